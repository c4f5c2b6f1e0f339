"""Rows cut into pieces over devices: the same function, and a device works on its piece alone."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlhf_jax as rl
import sharding
from experiments.bench import update
from sharding import hlo

ROWS, LENGTH, START, VOCAB = 4, 40, 12, 80
CONFIG = rl.models.DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    initializer_range=0.2,
)
MODEL = rl.models.Decoder(CONFIG)
SLOW = pytest.mark.slow
LOSS = update.grpo_loss_fn(kl_coef=0.1, clip=0.2)
OPTIMIZER = optax.sgd(1.0)  # what a step changes is the gradient


def batch_of(rows=ROWS, length=LENGTH, start=START, **changes):
    """Ragged on both sides; old and reference log-probs a little off the policy's."""
    rng = np.random.default_rng(0)
    column = np.arange(length)
    ends = rng.integers(start + 1, length + 1, rows)[:, None]
    begins = rng.integers(0, max(start, 1), rows)[:, None]
    real = (column >= begins) & (column < ends)
    mask = real & (column >= start)
    noise = jnp.asarray(rng.normal(size=(3, rows, length)), jnp.float32)
    return rl.Batch(
        tokens=jnp.asarray(rng.integers(0, VOCAB, (rows, length))),
        mask=jnp.asarray(mask),
        attention_mask=jnp.asarray(real),
        group_ids=jnp.arange(rows) // 2,
        advantages=noise[0, :, 0],
        old_log_probs=-4 + 0.2 * noise[1],
        sampler_log_probs=jnp.zeros((rows, length)),
        ref_log_probs=-4 + 0.2 * noise[2],
        denominator=jnp.full(rows, mask.sum(), jnp.float32),
        start=start,
    )


@functools.cache
def start(model=MODEL):
    return jax.tree.map(np.asarray, model.init(jax.random.key(0)))


@pytest.fixture
def quick():
    """XLA's passes, the partitioner among them, are what is tested here; LLVM's are not."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def layout_of(parts):
    return sharding.get_layout("sequence").with_sizes(sequence=parts)


def gradient(batch, layout=None, *, explicit=False, model=MODEL, group_size=1, micro_batches=1):
    """Loss and gradient of one step; on one device without a layout."""
    params, places, states = start(model), None, None
    if layout is not None:
        mesh = sharding.make_mesh(layout, explicit=explicit)
        places = sharding.tree_shardings(model.logical_axes(), params, layout, mesh)
        states = rl.train_step.state_shardings(params, OPTIMIZER, places)
        model = dataclasses.replace(model, placement=sharding.activation_sharding(layout, mesh))
        whole = jax.NamedSharding(mesh, jax.P())
        divides = batch.tokens.shape[0] % math.prod(mesh.shape[axis] for axis in layout.rows) == 0
        batch = jax.device_put(batch, sharding.row_sharding(layout, mesh) if divides else whole)
    step = rl.make_train_step(
        rl.policy.from_decoder(model, group_size=group_size),
        LOSS,
        OPTIMIZER,
        shardings=states,
        group_size=group_size,
        micro_batches=micro_batches,
    )
    state, found = step(rl.init_train_state(params, OPTIMIZER, shardings=places), batch)
    moved = jax.tree.map(lambda new, old: np.asarray(new) - old, state.params, params)
    return rl.metrics.compute(found)["policy/loss"], jax.tree.leaves(moved)


def same(found, wanted):
    assert abs(found[0] - wanted[0]) < 1e-5
    for a, b in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@functools.cache
def on_one_device():
    return gradient(batch_of())


@pytest.mark.long
@pytest.mark.parametrize(
    ("parts", "explicit"),
    [(2, False), pytest.param(8, False, marks=SLOW), pytest.param(4, True, marks=SLOW)],
)
def test_the_gradient_is_that_of_one_device(quick, parts, explicit):
    same(gradient(batch_of(), layout_of(parts), explicit=explicit), on_one_device())


def packed():
    """Two sequences in a row."""
    batch = batch_of(start=0)
    ids = jnp.asarray((np.arange(LENGTH) >= 17).astype(np.int32)) + jnp.zeros((ROWS, 1), jnp.int32)
    return dataclasses.replace(batch, segment_ids=ids)


def shared():
    """Two rows of each prompt."""
    batch = batch_of()
    first = (jnp.arange(ROWS) // 2 * 2)[:, None]
    prompt = jnp.arange(LENGTH) < START
    changed = {
        name: jnp.where(prompt, getattr(batch, name)[first[:, 0]], getattr(batch, name))
        for name in ("tokens", "attention_mask")
    }
    return dataclasses.replace(batch, **changed)


WINDOWED = rl.models.Decoder(
    dataclasses.replace(CONFIG, architecture="Qwen3ForCausalLM", layer_windows=(0, 9))
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: batch_of(length=37), {}),
        (lambda: batch_of(rows=3), {}),
        (packed, {}),
        (batch_of, dict(model=WINDOWED)),
        (shared, dict(group_size=2)),
        (lambda: batch_of(rows=8), dict(micro_batches=2)),
        (batch_of, dict(model=dataclasses.replace(MODEL, remat="full"))),
        (batch_of, dict(model=dataclasses.replace(MODEL, remat="attention", stacks=(1, 1)))),
    ],
    ids=[
        "odd length",
        "odd rows",
        "packed",
        "windows",
        "shared prompts",
        "micro-batches",
        "remat",
        "stacks",
    ],
)
def test_so_it_is_with(quick, make, options):
    batch = make()
    same(gradient(batch, layout_of(2), **options), gradient(batch, **options))


def compiled(parts, rows=4, length=256):
    """A step on two devices' rows, each cut into so many pieces."""
    layout = layout_of(parts).with_sizes(fsdp=2)
    mesh = sharding.make_mesh(layout)
    placement = sharding.activation_sharding(layout, mesh)
    model = dataclasses.replace(MODEL, remat="full", placement=placement)
    shapes = model.shapes()
    places = sharding.tree_shardings(model.logical_axes(), shapes, layout, mesh)
    states = rl.train_step.state_shardings(shapes, OPTIMIZER, places)
    state = jax.eval_shape(lambda p: rl.init_train_state(p, OPTIMIZER), shapes)
    batch = update.step_shapes(model, rows, length, START)
    step = rl.make_train_step(rl.policy.from_decoder(model), LOSS, OPTIMIZER, shardings=states)
    at_rows = sharding.row_sharding(layout, mesh)

    def put(x, at):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)

    batch = jax.tree.map(lambda x: put(x, at_rows), batch)
    return step.lower(jax.tree.map(put, state, states), batch).compile()


@pytest.mark.slow
def test_a_device_computes_and_holds_its_piece_alone():
    whole, half, quarter = map(compiled, (1, 2, 4))
    flops = [one.cost_analysis()["flops"] for one in (whole, half, quarter)]
    room = [one.memory_analysis().temp_size_in_bytes for one in (whole, half, quarter)]
    # exactly half but for the attention of a prompt, which now reads completions it must not see
    assert flops[1] < 0.65 * flops[0] and flops[2] < 0.6 * flops[1]
    assert room[1] < 0.65 * room[0] and room[2] < 0.65 * room[1]


@pytest.mark.slow
def test_only_keys_and_values_go_to_the_devices_of_a_row():
    module = hlo.parse(compiled(4).as_text())
    kinds = ("all-gather", "all-to-all", "collective-permute")
    found = [one for one in hlo.transfers(module, module.entry) if one.kind in kinds]
    in_layers = [one for one in found if one.times == CONFIG.num_layers and not one.sources]
    width = CONFIG.head_dim
    assert in_layers and {one.shape for one in in_layers} == {f"f32[1,2,4,64,2,{width}]"}


@pytest.mark.slow
@pytest.mark.parametrize("explicit", [False, True])
def test_the_sampler_draws_the_same_tokens(explicit):
    layout = layout_of(2)
    mesh = sharding.make_mesh(layout, explicit=explicit)
    placement = sharding.activation_sharding(layout, mesh)
    places = sharding.tree_shardings(MODEL.logical_axes(), start(), layout, mesh)
    tokens = jax.random.randint(jax.random.key(1), (4, 7), 3, VOCAB)
    mask = jnp.arange(7) < jnp.array([[7], [3], [1], [5]])

    def rollout(model, params, rows=None):
        put = (tokens, mask) if rows is None else jax.device_put((tokens, mask), rows)
        options = dict(group_size=2, max_new_tokens=9, stop_ids=(2,))
        return rl.generate(model, params, *put, jax.random.key(2), **options)

    found = rollout(
        dataclasses.replace(MODEL, placement=placement),
        jax.device_put(start(), places),
        sharding.row_sharding(layout, mesh),
    )
    wanted = rollout(MODEL, start())
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.log_probs, wanted.log_probs, atol=1e-5)


def placement_of(*axes):
    return jax.NamedSharding(jax.make_mesh((2,), ("sequence",)), jax.P(*axes))


def test_a_fused_kernel_reads_whole_rows():
    split = placement_of(None, "sequence")
    with pytest.raises(ValueError, match=r"placement: .* splits tokens, and attention='splash'"):
        dataclasses.replace(MODEL, attention="splash", placement=split)
    dataclasses.replace(MODEL, attention="auto", placement=split)


@pytest.mark.parametrize("axes", [(None, None, None, "sequence"), (None,) * 5])
def test_the_width_stays_whole(axes):
    with pytest.raises(ValueError, match=r"placement: .* splits the width"):
        dataclasses.replace(MODEL, placement=placement_of(*axes))

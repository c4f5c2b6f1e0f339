"""Three steps of a real decoder: no split of the batch, no layout and no packing changes them.

The reference is one device, one micro-batch, rows as they were sampled. Rounding is all that may
differ: sums run in another order in every split.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlhf_jax as rl
import sharding

B, START, T, WIDTH = 16, 4, 16, 24
MODEL = rl.models.Decoder(
    rl.models.DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=16,
        num_kv_heads=8,
        head_dim=4,
        initializer_range=0.2,
    )
)
LAYOUTS = ("single", "dp", "fsdp", "tensor", "fsdp_tensor")
# A gradient element g that is 0 up to its rounding error δ ≈ 1e-8 is one that Adam's g/|g| makes a
# whole step of, of either sign. With ε = 1e-8 about one parameter in 10⁵ would differ by 2·lr
# however right the step is. ε = 1e-5 stays far below the other elements (about 1e-2) and bounds
# what rounding can do to lr·δ/ε.
OPTIMIZER = optax.adamw(1e-3, eps=1e-5, weight_decay=0.1)


@pytest.fixture(scope="module", autouse=True)
def _quick_to_compile():
    """XLA's passes, the partitioner among them, are what is tested here; LLVM's are not."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@functools.cache
def start():
    return jax.tree.map(np.asarray, MODEL.init(jax.random.key(0)))


def batch_of(aggregation, seed=0):
    """Ragged completions, two of them empty, four a prompt; old log-probs near the policy's."""
    rng = np.random.default_rng(seed)
    lengths = np.concatenate([[0, 0, T - START], rng.integers(1, T - START + 1, B - 3)])
    prompts, column = rng.integers(1, START + 1, B), np.arange(T)
    mask = (column >= START) & (column < START + lengths[:, None])
    group_ids = np.repeat(np.arange(B // 4), 4)
    options = dict(length=T - START) if aggregation == "fixed_length" else {}
    total = rl.masked.denominator(mask, aggregation, group_ids=group_ids, **options)
    batch = rl.Batch(
        tokens=jnp.asarray(rng.integers(0, 64, (B, T))),
        mask=jnp.asarray(mask),
        attention_mask=jnp.asarray(
            mask | ((column < START) & (column >= START - prompts[:, None]))
        ),
        group_ids=jnp.asarray(group_ids),
        advantages=jnp.asarray(rng.normal(size=B), jnp.float32),
        old_log_probs=jnp.zeros((B, T)),
        sampler_log_probs=jnp.zeros((B, T)),
        denominator=jnp.broadcast_to(total, (B,)),
        start=START,
    )
    now = jax.jit(policy())(start(), batch).log_probs
    noise = jnp.asarray(rng.normal(size=(2, B, T)), jnp.float32)
    return dataclasses.replace(
        batch, old_log_probs=now + 0.2 * noise[0], ref_log_probs=now + 0.5 * noise[1]
    )


@functools.cache
def policy(placement=None):
    return rl.policy.from_decoder(dataclasses.replace(MODEL, placement=placement), chunk_size=16)


@functools.cache
def loss_of(aggregation):
    def loss(output, batch):
        shared = dict(denominator=batch.denominator, segment_ids=batch.segment_ids)
        value, found = rl.losses.grpo_loss(
            output.log_probs,
            batch.old_log_probs,
            batch.advantages,
            batch.mask,
            ref_log_probs=batch.ref_log_probs,
            kl_coef=0.1,
            aggregation=aggregation,
            **shared,
        )
        bonus = rl.masked.aggregate(output.entropy, batch.mask, aggregation, **shared)
        return value - 0.01 * bonus, found

    return loss


@functools.cache
def setup(aggregation, layout, micro_batches):
    """The step, and where parameters and rows lie; one for every batch of one shape."""
    places, rows, state_places, placement = None, None, None, None
    if layout:
        layout = sharding.get_layout(layout)
        mesh = sharding.make_mesh(layout)
        places = sharding.tree_shardings(MODEL.logical_axes(), start(), layout, mesh)
        rows = sharding.row_sharding(layout, mesh)
        if "fsdp" in mesh.shape:  # the others leave the activations to the compiler
            placement = sharding.activation_sharding(layout, mesh)
        state_places = rl.train_step.state_shardings(start(), OPTIMIZER, places)
    step = rl.make_train_step(
        policy(placement),
        loss_of(aggregation),
        OPTIMIZER,
        micro_batches=micro_batches,
        shardings=state_places,
    )
    return step, places, rows


def run(aggregation, layout=None, micro_batches=1, packed=False, change=lambda batch: batch):
    batch = change(batch_of(aggregation))
    if packed:
        packing = rl.packing.plan(batch.attention_mask, WIDTH, rows=B)
        batch = rl.packing.pack(batch, packing)
    step, places, rows = setup(aggregation, layout, micro_batches)
    batch = jax.device_put(batch, rows) if rows else batch
    state, seen = rl.init_train_state(start(), OPTIMIZER, shardings=places), []
    before = step._cache_size()
    for _ in range(3):
        state, metrics = step(state, batch)
        seen.append(rl.metrics.compute(metrics))
    assert step._cache_size() <= before + 1, "one shape, one program"
    return jax.tree.map(np.asarray, state.params), jax.tree.map(float, seen)


@functools.cache
def plain(aggregation):
    return run(aggregation)


def compare(found, expected):
    """‖a − b‖ of every leaf within 1e-6 of its norm, and within 1e-3 of how far it has moved.

    The second bar is there because three steps move a leaf by 1/100 of its norm only; the metrics
    because Adam hides a gradient that is wrong by a factor.
    """
    for a, b, before in zip(*map(jax.tree.leaves, (found[0], expected[0], start())), strict=True):
        gap, moved = np.linalg.norm(a - b), np.linalg.norm(b - before)
        assert moved > 1e-3 * np.linalg.norm(before)
        assert gap <= 1e-6 * np.linalg.norm(b), gap / np.linalg.norm(b)
        assert gap <= 1e-3 * moved, gap / moved
    for a, b in zip(found[1], expected[1], strict=True):
        assert a.keys() == b.keys()
        for name, value in b.items():
            assert a[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


# One aggregation, so that the ordinary suite compiles the reference once; it is the one whose
# denominator differs from token to token.
QUICK = {
    ("prompt_mean", "fsdp_tensor", 2, True),
    ("prompt_mean", "dp", 4, False),
    ("prompt_mean", None, 8, True),
}
CASES = [
    *(("token_mean", layout, n, packed)
      for layout in LAYOUTS for n in (1, 2, 4, 8) for packed in (False, True)),
    *((name, layout, n, packed)
      for name in rl.masked.AGGREGATIONS[1:]
      for layout, n in ((None, 8), ("dp", 4), ("fsdp_tensor", 2))
      for packed in (False, True)),
]  # fmt: skip


@pytest.mark.fault(23)
@pytest.mark.fault(51)
@pytest.mark.fault(58)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in QUICK else [pytest.mark.slow]) for c in CASES],
    ids=lambda c: "-".join(map(str, c)),
)
def test_three_steps_are_the_same(case):
    compare(run(*case), plain(case[0]))


def test_the_comparison_sees_a_row_that_counts_twice():
    expected = plain("prompt_mean")

    def twice(batch):
        return dataclasses.replace(batch, advantages=batch.advantages.at[3].multiply(2))

    with pytest.raises(AssertionError):
        compare(run("prompt_mean", change=twice), expected)

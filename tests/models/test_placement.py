"""Where activations lie: under fsdp devices send each other weights, not their rows."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import rlhf_jax as rl
import sharding
from experiments.bench import update
from rlhf_jax.models.decoding import few_rows
from sharding import hlo, plan

ROWS, LENGTH, START, BLOCKS = 16, 52, 12, 5
MODEL = rl.models.Decoder(
    rl.models.DecoderConfig(
        vocab_size=80,
        hidden_size=32,
        intermediate_size=48,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
    ),
    remat="full",
)


def collectives(layout, place, model=MODEL):
    """What one train step exchanges."""
    mesh = sharding.make_mesh(layout)
    shapes = model.shapes()
    where = sharding.tree_shardings(model.logical_axes(), shapes, layout, mesh)
    optimizer = optax.adam(1e-3)
    states = rl.train_step.state_shardings(shapes, optimizer, where)
    state = jax.eval_shape(lambda p: rl.init_train_state(p, optimizer), shapes)
    rows = sharding.row_sharding(layout, mesh)
    batch = update.step_shapes(model, ROWS, LENGTH, START)
    placement = sharding.activation_sharding(layout, mesh) if place else None
    each = ROWS // mesh.shape["fsdp"] if place else ROWS
    step = rl.make_train_step(
        rl.policy.from_decoder(
            dataclasses.replace(model, placement=placement),
            chunk_size=each * (LENGTH - START) // BLOCKS,
        ),
        update.grpo_loss_fn(kl_coef=0.1, clip=0.2),
        optimizer,
        shardings=states,
    )

    def put(x, at):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)

    placed = jax.tree.map(put, state, states), jax.tree.map(lambda x: put(x, rows), batch)
    module = hlo.parse(step.lower(*placed).compile().as_text())
    return hlo.transfers(module, module.entry)


def carried(found, sizes):
    """Those with an axis of one of these sizes."""
    return [one for one in found if sizes & set(map(int, re.findall(r"\d+", one.shape[3:])))]


@pytest.mark.long
@pytest.mark.parametrize("name", ["fsdp", "fsdp_tensor"])
def test_rows_stay_on_their_devices(name):
    layout = sharding.get_layout(name)
    floats = [one for one in collectives(layout, place=True) if one.shape.startswith("f32")]
    gathered = [one for one in floats if one.kind in ("all-gather", "all-to-all")]
    # the lookup of the tokens' embeddings is the one thing that both rows and width are split for
    activations = [one for one in carried(gathered, {LENGTH, LENGTH - START}) if one.times > 1]
    assert activations == []
    parts = 1 if name == "fsdp" else 2
    head = carried(floats, {80 // parts})
    assert head and all(one.times == 1 for one in head), "once, not in every block of tokens"


@pytest.mark.slow
def test_rows_over_two_axes_are_nowhere_all_together():
    """The width of the embeddings lies over one of the axes: rows are exchanged along that one."""
    untied = dataclasses.replace(MODEL.config, tie_embeddings=False, vocab_size=4096)
    model = dataclasses.replace(MODEL, config=untied)
    found = collectives(sharding.get_layout("hsdp"), place=True, model=model)
    rows = [one for one in carried(found, {LENGTH}) if one.shape.startswith("f32")]
    assert rows and {one.kind for one in rows} == {"all-to-all"}


@pytest.mark.slow
def test_the_compiler_alone_moves_rows():
    """Or the test above would see nothing."""
    found = collectives(sharding.get_layout("fsdp_tensor"), place=False)
    assert [one for one in carried(found, {LENGTH}) if one.times > 1]


def test_a_placement_is_a_sharding():
    with pytest.raises(ValueError, match=r"placement: got .*fsdp.*; give a NamedSharding"):
        dataclasses.replace(MODEL, placement=jax.P("fsdp"))


def test_a_temperature_for_each_row_goes_with_its_row():
    layout = sharding.get_layout("fsdp")
    mesh = sharding.make_mesh(layout)
    params = MODEL.init(jax.random.key(0))
    full = (8, LENGTH)
    batch = dataclasses.replace(
        jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), update.step_shapes(MODEL, *full, START)),
        tokens=jax.random.randint(jax.random.key(1), full, 0, 80),
    )
    tau = jnp.linspace(0.5, 2.0, 8)[:, None]
    placed = dataclasses.replace(MODEL, placement=sharding.activation_sharding(layout, mesh))
    found, expected = (
        jax.jit(rl.policy.from_decoder(model, temperature=tau))(
            params, jax.device_put(batch, rows) if rows else batch
        )
        for model, rows in ((placed, sharding.row_sharding(layout, mesh)), (MODEL, None))
    )
    assert jnp.abs(found.log_probs - expected.log_probs).max() < 1e-5
    assert jnp.abs(found.entropy - expected.entropy).max() < 1e-5
    assert not found.log_probs[:, :START].any()


@pytest.mark.long
@pytest.mark.parametrize("layout", ["fsdp", "fsdp_tensor", "hsdp"])
def test_no_weight_goes_to_the_rows_of_a_decode_step(layout):
    config = dataclasses.replace(MODEL.config, hidden_size=256, num_heads=8, num_kv_heads=8)
    request = plan.Request(
        name="tiny",
        config=config,
        topology="cpu:8",
        layout=sharding.get_layout(layout),
        sizes=plan.Sizes(rows=16, length=48, prompt=16, group=2, steps=4),
        programs=("generate", "round"),
    )
    programs = plan.make(request)["programs"]
    assert programs["generate"]["moved weights"] == programs["round"]["moved weights"] == []


def test_many_rows_leave_a_decode_step_to_the_compiler():
    mesh = sharding.make_mesh(sharding.get_layout("fsdp"))
    where = jax.NamedSharding(mesh, jax.P(None, None, "fsdp"))

    def laid(group):
        place = jax.jit(functools.partial(few_rows, where))
        return place(jnp.ones((4, group, 64))).sharding.is_equivalent_to(where, 3)

    assert laid(8) and not laid(9)


def test_what_is_no_decode_placement_is_refused():
    mesh = sharding.make_mesh(sharding.get_layout("fsdp"))
    for wrong in (jax.P("fsdp"), jax.NamedSharding(mesh, jax.P(None, None, None, "fsdp"))):
        with pytest.raises(ValueError, match=r"decode_placement: got .* \[prompts, group, width\]"):
            dataclasses.replace(MODEL, decode_placement=wrong)

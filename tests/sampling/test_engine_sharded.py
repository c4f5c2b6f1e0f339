"""The engine on eight devices gives what it gives on one."""

import importlib.util

import jax
import numpy as np
import pytest

import rlhf_jax as rl
import sharding

from .served import EOS, MODEL, params, prompts


def run(params, row_sharding=None):
    server = rl.sampling.Engine(
        MODEL,
        params,
        slots=8,
        max_prompt_tokens=16,
        max_new_tokens=16,
        steps_per_round=4,
        row_sharding=row_sharding,
    )
    for i, prompt in enumerate(prompts(7)):
        options = dict(max_new_tokens=4 + i, stop_ids=[EOS], top_k=i % 3)
        server.submit(prompt, key=jax.random.key(0), group_size=2, keep=i == 3, **options)
    groups = {group.request: group for group in server}
    server.extend(3, [[1, 2], [3]], max_new_tokens=4)
    groups |= {group.request: group for group in server}
    server.release(3)
    return [row for _, group in sorted(groups.items()) for row in group.rows], server


@pytest.fixture(scope="module")
def expected():
    return run(params())[0]


@pytest.mark.long
@pytest.mark.fault(57)
@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.slow)])
def test_tokens_are_those_of_one_device(expected, kind, caplog):
    layout = sharding.get_layout("fsdp_tensor")
    shape = sharding.make_mesh(layout).shape
    kinds = (getattr(jax.sharding.AxisType, kind),) * len(shape)
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=kinds)
    placed = jax.device_put(
        params(), sharding.tree_shardings(MODEL.logical_axes(), params(), layout, mesh)
    )
    found, server = run(placed, sharding.row_sharding(layout, mesh))
    with jax.log_compiles():
        run(placed, sharding.row_sharding(layout, mesh))
    assert "Compiling" not in caplog.text
    for row, other in zip(found, expected, strict=True):
        assert row.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(row.log_probs, other.log_probs, atol=1e-5)
    cache = server._pool._state.rows.cache
    for leaf in (*jax.tree.leaves(cache.keys), *jax.tree.leaves(cache.values)):
        slots, _, heads = leaf.sharding.shard_shape(leaf.shape)[1:4]
        assert slots == 2, "slots lie over the mesh"
        assert heads == 1, "and heads"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("layout", ["tensor", "fsdp_tensor"])
def test_a_round_on_a_tpu_copies_no_cache(layout, monkeypatch):
    """The cache is too large for the chip's fast memory, where a copy costs little."""
    from sharding import plan

    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # else a second process is turned away
    config = rl.models.DecoderConfig(
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=2048,
        num_layers=16,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
    )
    request = plan.Request(
        name="a Llama",
        config=config,
        topology="v5e:2x4",
        layout=sharding.get_layout(layout),
        sizes=plan.Sizes(rows=32, length=2048, prompt=1024, group=4),
        programs=("round",),
    )
    token = plan.make(request)["programs"]["round"]
    assert token["copied a token"] == 0
    assert token["moved weights"] == [] or layout != "tensor"

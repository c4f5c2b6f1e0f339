"""Generation on eight devices: the same tokens as on one, and nothing held more often than said.

Rows lie over the layout's data axes and key/value heads over its tensor axis. Heads that are fewer
than the tensor axis cannot be split over it: then its devices all hold the heads of their rows.
"""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
import sharding
from rlhf_jax.models.cache import keep_rows
from rlhf_jax.models.explicit import rows_of

PROMPTS, GROUP, WIDTH, NEW, LAYERS = 8, 2, 6, 12, 2
CASES = [
    (name, kind, kv_heads)
    for name in ("dp", "fsdp", "tensor", "fsdp_tensor")
    for kind in ("Auto", "Explicit")
    for kv_heads in (8, 1)
]
QUICK = [("tensor", "Auto", 1), ("fsdp_tensor", "Explicit", 8)]


def cases(quick):
    """A few cases of both kinds of axes in every run, the others in the slow one."""
    slow = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in quick]
    return pytest.mark.parametrize(("name", "kind", "kv_heads"), [*quick, *slow])


def make(kv_heads, **options):
    config = rl.models.DecoderConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_layers=LAYERS,
        num_heads=8,
        num_kv_heads=kv_heads,
        head_dim=8,
        initializer_range=0.2,
    )
    model = rl.models.Decoder(config, **options)
    return model, model.init(jax.random.key(0))


def place(name, kind, model, params):
    """Layout, mesh, and parameters on it."""
    layout = sharding.get_layout(name)
    mesh = sharding.make_mesh(layout)
    if model.config.num_kv_heads % mesh.shape.get("tensor", 1):
        rules = {k: v for k, v in layout.rules.items() if k != "kv_heads"}
        layout = dataclasses.replace(layout, rules=rules)
    kinds = (getattr(jax.sharding.AxisType, kind),) * len(mesh.axis_names)
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)
    where = sharding.tree_shardings(model.logical_axes(), params, layout, mesh)
    return layout, mesh, jax.device_put(params, where)


def prompts():
    tokens = jax.random.randint(jax.random.key(1), (PROMPTS, WIDTH), 3, 48)
    mask = jnp.arange(WIDTH) < jnp.array([6, 3, 1, 5, 6, 2, 4, 6])[:, None]
    return tokens, mask


def rollout_of(model, params, tokens, mask):
    return rl.generate(
        model,
        params,
        tokens,
        mask,
        jax.random.key(2),
        group_size=GROUP,
        max_new_tokens=NEW,
        stop_ids=(7, 11),
    )


@functools.cache
def on_one_device(kv_heads):
    return rollout_of(*make(kv_heads), *prompts())


@pytest.fixture
def programs(monkeypatch):
    """The compiled text of every program that ``generate`` runs."""
    module = importlib.import_module("rlhf_jax.sampling.generate")
    original, texts = module._generate, []

    def spy(model, *args, **static):
        compiled = original.lower(model, *args, **static).compile()
        texts.append(compiled.as_text())
        return compiled(*args)

    monkeypatch.setattr(module, "_generate", spy)
    return texts


def parts(layout, mesh):
    """Into how many parts the layout splits the rows, and the key/value heads."""
    axes = layout.rows[0] if layout.rows else None, layout.rules.get("kv_heads")
    return [mesh.shape[axis] if axis else 1 for axis in axes]


def whole_in(text, layout, mesh, kv_heads):
    """Keys in a program that should be split and are not; and whether the split ones are there."""
    shape = f"f32[{LAYERS},{{}},{GROUP},{{}},{NEW},8]".format
    rows, heads = parts(layout, mesh)
    wrong = {shape(PROMPTS, kv_heads), shape(PROMPTS // rows, kv_heads)}
    right = shape(PROMPTS // rows, kv_heads // heads)
    return [name for name in wrong - {right} if name in text], right in text


@pytest.mark.long
@pytest.mark.fault(57)
@cases(QUICK)
def test_generate_gives_what_one_device_gives(name, kind, kv_heads, programs):
    want = on_one_device(kv_heads)
    model, params = make(kv_heads)
    layout, mesh, params = place(name, kind, model, params)
    with jax.set_mesh(mesh):
        given = jax.device_put(prompts(), sharding.row_sharding(layout, mesh))
        found = rollout_of(model, params, *given)
    assert 0 < int(want.terminated.sum()) < PROMPTS * GROUP
    for field in ("tokens", "mask", "lengths", "terminated"):
        np.testing.assert_array_equal(getattr(found, field), getattr(want, field))
    np.testing.assert_allclose(found.log_probs, want.log_probs, atol=1e-5)
    assert whole_in(programs[-1], layout, mesh, kv_heads) == ([], True)


def loop(model, params, tokens, mask, per_row, rows):
    """A decode loop that hands its cache out."""
    _, prefix = model.prefill(params, tokens, mask)
    cache = model.init_cache(prefix, group_size=GROUP, max_new_tokens=NEW)
    cache = keep_rows(cache, rows)
    token = jnp.repeat(tokens[:, :1], GROUP, axis=1)

    def body(carry):
        step, cache = carry
        at = step + jnp.zeros_like(token) if per_row else step
        return step + 1, model.decode(params, token, cache, at)[1]

    return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, cache))[1]


def spec(array):
    return tuple(array.sharding.spec) + (None,) * (array.ndim - len(array.sharding.spec))


@pytest.mark.long
@pytest.mark.fault(57)
@pytest.mark.parametrize(
    ("kv_dtype", "per_row"),
    [(None, True), pytest.param("int8", False, marks=pytest.mark.slow)],
)
@cases([("fsdp", "Explicit", 8), ("fsdp_tensor", "Auto", 8), ("tensor", "Explicit", 1)])
def test_the_cache_lies_with_its_rows_and_heads(name, kind, kv_heads, kv_dtype, per_row):
    model, params = make(kv_heads, kv_dtype=kv_dtype)
    layout, mesh, params = place(name, kind, model, params)
    given = jax.device_put(prompts(), sharding.row_sharding(layout, mesh))
    with jax.set_mesh(mesh):
        run = jax.jit(loop, static_argnums=(0, 4, 5))
        cache = run(model, params, *given, per_row, rows_of(given[0]))
    over, heads = layout.rows[0] if layout.rows else None, layout.rules.get("kv_heads")
    for leaf in jax.tree.leaves((cache.prefix.keys, cache.prefix.values)):
        assert spec(leaf) == (None, over, heads, None, None)
    for leaf in jax.tree.leaves((cache.keys, cache.values)):
        assert spec(leaf) == (None, over, None, heads, None, None)

"""What the backward pass recomputes changes memory and work, never the gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
import sharding
from rlhf_jax.models import remat

MODEL = rl.models.Decoder(
    rl.models.DecoderConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        initializer_range=0.2,
    )
)


def _loss(model):
    return lambda params, tokens: jnp.mean(model.hidden(params, tokens) ** 3)


@pytest.fixture(scope="module")
def inputs():
    tokens = jax.random.randint(jax.random.key(1), (4, 32), 0, 16)
    return MODEL.init(jax.random.key(0)), tokens


@pytest.fixture(scope="module")
def measured(inputs):
    """For every name the gradient, and XLA's counts of operations and temporaries."""
    found = {}
    for name in rl.models.Decoder.REMAT:
        model = dataclasses.replace(MODEL, remat=name)
        lowered = jax.jit(jax.grad(_loss(model))).lower(*inputs)
        compiled = lowered.compile(compiler_options={"xla_llvm_disable_expensive_passes": True})
        memory = compiled.memory_analysis().temp_size_in_bytes
        found[name] = compiled(*inputs), compiled.cost_analysis()["flops"], memory
    return found


def test_every_name_gives_the_same_gradient(measured):
    assert tuple(measured) == remat.REMAT == ("none", "attention", "dots", "full", "offload")
    expected = jax.tree.leaves(measured["none"][0])
    for name, (gradient, _, _) in measured.items():
        for a, b in zip(jax.tree.leaves(gradient), expected, strict=True):
            assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b), name


def test_what_is_not_kept_is_computed_again(measured):
    flops = {name: count for name, (_, count, _) in measured.items()}
    assert flops["none"] < flops["attention"] < flops["full"]
    assert flops["none"] < flops["dots"] < flops["full"]
    sizes = {name: size for name, (_, _, size) in measured.items()}
    assert sizes["none"] > sizes["attention"] > sizes["full"]
    assert sizes["none"] > sizes["dots"] > sizes["full"]


@pytest.mark.parametrize("name", rl.models.Decoder.REMAT)
def test_only_offload_moves_anything_to_the_host(inputs, name):
    model = dataclasses.replace(MODEL, remat=name)
    text = str(jax.make_jaxpr(jax.grad(_loss(model)))(*inputs))
    assert ("Host" in text or "pinned_host" in text) == (name == "offload")


@pytest.mark.slow
def test_offload_under_a_layout(inputs, measured):
    params, tokens = inputs
    layout = sharding.get_layout("fsdp").with_sizes(fsdp=4)
    mesh = sharding.make_mesh(layout, jax.devices()[:4])
    places = sharding.tree_shardings(MODEL.logical_axes(), params, layout, mesh)
    rows = jax.device_put(tokens, sharding.row_sharding(layout, mesh))
    model = dataclasses.replace(MODEL, remat="offload")
    found = jax.jit(jax.grad(_loss(model)))(jax.device_put(params, places), rows)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(measured["none"][0]), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def test_a_backend_without_host_memory_is_named(inputs, monkeypatch):
    monkeypatch.setattr(remat, "memory_kinds", lambda: {"device"})
    model = dataclasses.replace(MODEL, remat="offload")
    with pytest.raises(ValueError, match=r"remat: 'offload' needs .*'pinned_host'.*use 'full'"):
        model.hidden(*inputs)
    with pytest.raises(ValueError, match=r"remat: got 'some'; choose one of \('none', "):
        dataclasses.replace(MODEL, remat="some")

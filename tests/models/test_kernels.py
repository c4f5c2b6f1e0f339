"""The learner's attention by a fused kernel equals the plain one, in value and gradient."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
import sharding
from rlhf_jax.models import attention, kernels

ROWS, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 72, 4, 2, 32
CONFIG = rl.models.DecoderConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    initializer_range=0.2,
)


def real(rows=ROWS, length=LENGTH):
    """Padding on the left of the first row, on the right of the last one, and a hole."""
    mask = np.ones((rows, length), bool)
    mask[0, :9], mask[-1, 60:], mask[-1, 20:23] = False, False, False
    return jnp.asarray(mask)


def inputs(rows=ROWS):
    shapes = [(rows, LENGTH, count, WIDTH) for count in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def both(function, q, k, v, weights):
    """Values and gradients of a weighted sum."""
    weights = weights * real(q.shape[0])[:, :, None, None]

    def total(q, k, v):
        out = function(q, k, v)
        return jnp.sum(out * weights), out * real(q.shape[0])[:, :, None, None]

    (_, out), grads = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(q, k, v)
    return out, grads


def plain(segment_ids=None):
    def function(q, k, v):
        rows = q.shape[0]
        mask, _, _ = attention.attention_inputs(rows, LENGTH, real(rows), None, segment_ids)
        return attention.masked_attention(q, k, v, mask)

    return function


def fused(segment_ids=None, placement=None):
    def function(q, k, v):
        ids = kernels.segments(real(q.shape[0]), segment_ids, q.shape[:2])
        return kernels.splash(q, k, v, ids, placement)

    return function


def close(found, expected, tolerance=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), found, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_splash_equals_plain_attention(packed):
    arrays = inputs()
    ids = jnp.asarray(np.repeat([[-1, 3, 4]], LENGTH // 3, axis=1).repeat(ROWS, 0))
    ids = ids if packed else None
    found, expected = (jax.jit(lambda *a, f=f: both(f(ids), *a))(*arrays) for f in (fused, plain))
    close(found, expected)


def test_splash_over_a_mesh():
    layout = sharding.get_layout("fsdp_tensor")
    mesh = sharding.make_mesh(layout)
    arrays = inputs(rows=4)
    spread = jax.NamedSharding(mesh, jax.P("fsdp", None, "tensor", None))
    placed = [jax.device_put(x, spread) for x in arrays]
    found = jax.jit(lambda *a: both(fused(placement=spread), *a))(*placed)
    assert found[0].sharding.spec == spread.spec
    close(found, jax.jit(lambda *a: both(plain(), *a))(*arrays))


def one_device(*axes):
    return jax.NamedSharding(jax.make_mesh((1,), ("fsdp",)), jax.P(*axes))


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        (dict(attention="flash"), {}, "attention: got 'flash'; choose one of xla, cudnn, splash"),
        (dict(attention="cudnn"), {}, "'cudnn' computes in bfloat16, the model in float32"),
        (
            dict(attention="splash"),
            dict(architecture="Qwen2ForCausalLM", layer_windows=(8, 8)),
            "'splash' knows no sliding windows",
        ),
    ],
)
def test_what_a_kernel_cannot_do_is_refused(options, config, message):
    config = dataclasses.replace(CONFIG, **config)
    with pytest.raises(ValueError, match=message):
        rl.models.Decoder(config, **options)


def test_auto_is_the_plain_one_on_a_cpu():
    for name, chosen in (("auto", "xla"), ("splash", "splash"), ("xla", "xla")):
        assert kernels.choose(rl.models.Decoder(CONFIG, attention=name)) == chosen


@pytest.mark.parametrize(
    ("backend", "options", "windows", "chosen"),
    [
        ("gpu", dict(dtype="bfloat16"), (), "cudnn"),
        ("gpu", {}, (), "xla"),
        ("tpu", dict(placement=one_device("fsdp")), (), "splash"),
        ("tpu", {}, (), "xla"),  # on several devices it has to be told their axes
        ("tpu", dict(placement=one_device("fsdp")), (8, 8), "xla"),
    ],
)
def test_auto_takes_what_the_backend_has(monkeypatch, backend, options, windows, chosen):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    config = dataclasses.replace(CONFIG, architecture="Qwen2ForCausalLM", layer_windows=windows)
    assert kernels.choose(rl.models.Decoder(config, attention="auto", **options)) == chosen


def test_a_decoder_with_a_kernel_gives_the_same_gradients():
    model = rl.models.Decoder(CONFIG)
    params = model.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 20), 0, 40)
    mask = real(2, 80)[:, :20]

    def of(attention):
        other = dataclasses.replace(model, attention=attention)

        @jax.jit
        @jax.value_and_grad
        def total(params):
            logits = other.logits(params, tokens, attention_mask=mask)
            return jnp.sum(jnp.sin(logits) * mask[..., None])

        return total(params)

    close(of("splash"), of("xla"), 1e-4)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_splash_compiles_for_a_tpu_without_holding_the_scores():
    from sharding.plan import devices_of

    layout = sharding.get_layout("fsdp_tensor")
    mesh = sharding.make_mesh(layout, devices_of("v5e:2x4"))
    length, spread = 4096, jax.NamedSharding(mesh, jax.P("fsdp", None, "tensor", None))
    shapes = [
        jax.ShapeDtypeStruct((4, length, heads, 128), jnp.bfloat16, sharding=spread)
        for heads in (8, 2, 2)
    ]
    ids = jnp.ones((4, length), jnp.int32)

    def total(q, k, v):
        out = kernels.splash(q, k, v, ids, spread)
        return jnp.sum(out.astype(jnp.float32))

    program = jax.jit(jax.grad(total, (0, 1, 2))).lower(*shapes).compile()
    assert "tpu_custom_call" in program.as_text()
    scores = 4 * (4 // mesh.shape["fsdp"]) * (8 // mesh.shape["tensor"]) * length**2
    assert program.memory_analysis().temp_size_in_bytes < scores / 2

"""Layers that see only the last tokens; exactness against the reference is in test_parity.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl

WINDOW = 5
CONFIG = rl.models.DecoderConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    architecture="Qwen2ForCausalLM",
    initializer_range=0.2,
    layer_windows=(0, WINDOW, WINDOW),
)
MODEL = rl.models.Decoder(CONFIG, stacks=(2, 1))
LENGTH = 20


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (3, LENGTH), 0, CONFIG.vocab_size)


def with_windows(*windows):
    return dataclasses.replace(MODEL, config=dataclasses.replace(CONFIG, layer_windows=windows))


@jax.jit(static_argnums=0, static_argnames=("from_stack", "to_stack"))
def hidden_of(model, params, tokens, **options):
    return model.hidden(params, tokens, **options)


@jax.jit(static_argnums=0)
def prefill(model, *args):
    return model.prefill(*args)


@jax.jit(static_argnums=0)
def decode(model, *args):
    return model.decode(*args)


@jax.jit(static_argnums=0)
def seen_from_the_end(model, params, tokens):
    """Which tokens of the row the last position depends on."""
    inputs = params["embed"]["weight"][tokens]

    def last(inputs):
        return model.hidden(params, None, inputs=inputs, from_stack=1)[:, -1]

    jacobian = jax.jacrev(last)(inputs)  # of the last stack alone: one layer
    return jnp.abs(jacobian).max(axis=(0, 1, 2, 4)) > 0


@pytest.mark.long
@pytest.mark.parametrize("window", [1, 3, WINDOW])
def test_a_query_sees_itself_and_the_tokens_just_before_it(params, tokens, window):
    seen = seen_from_the_end(with_windows(0, 0, window), params, tokens[:1])
    assert seen.tolist() == [False] * (LENGTH - window) + [True] * window


@pytest.mark.long
def test_a_window_past_the_row_changes_nothing(params, tokens):
    full = hidden_of(with_windows(), params, tokens)
    wide = hidden_of(with_windows(0, LENGTH, LENGTH), params, tokens)
    np.testing.assert_allclose(wide, full, atol=2e-6)
    assert np.abs(hidden_of(MODEL, params, tokens) - full).max() > 1e-2


def test_stacking_changes_nothing(params, tokens):
    other = dataclasses.replace(MODEL, stacks=(1, 2))
    restacked = MODEL.restack(params, (1, 2))
    want = hidden_of(MODEL, params, tokens)
    np.testing.assert_allclose(hidden_of(other, restacked, tokens), want, atol=1e-5)
    trunk = hidden_of(MODEL, params, tokens, to_stack=1)
    top = hidden_of(MODEL, params, None, inputs=trunk, from_stack=1)
    np.testing.assert_allclose(top, want, atol=1e-5)


@pytest.mark.fault(9)
@pytest.mark.parametrize(("before", "after"), [(7, 0), (0, 7), (3, 4)])
def test_padding_does_not_count(params, tokens, before, after):
    width = ((0, 0), (before, after))
    padded = jnp.pad(tokens, width, constant_values=7)
    mask = jnp.pad(jnp.ones_like(tokens, bool), width)
    found = hidden_of(MODEL, params, padded, attention_mask=mask)[:, before : before + LENGTH]
    np.testing.assert_allclose(found, hidden_of(MODEL, params, tokens), atol=2e-5)


def test_packed_rows_equal_rows_of_their_own(params, tokens):
    packed = jnp.concatenate([tokens[0, :9], tokens[1, :8]])[None]
    ids = jnp.array([[4] * 9 + [2] * 8])
    found = hidden_of(MODEL, params, packed, segment_ids=ids)[0]
    for row, start, length in ((0, 0, 9), (1, 9, 8)):
        alone = hidden_of(MODEL, params, tokens[row : row + 1, :length])[0]
        np.testing.assert_allclose(found[start : start + length], alone, atol=2e-5)


@pytest.mark.fault(9)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("per_row", [False, True])
def test_prefill_and_decode_equal_the_full_forward_pass(params, tokens, side, per_row):
    lengths, steps, width = np.array([8, 6, 2]), 9, 8
    index = np.arange(width)
    mask = index >= width - lengths[:, None] if side == "left" else index < lengths[:, None]
    prompts = np.zeros((3, width), np.int32)
    for row, n in enumerate(lengths):
        prompts[row, mask[row]] = tokens[row, :n]
    _, prefix = prefill(MODEL, params, prompts, mask)
    cache = MODEL.init_cache(prefix, group_size=2, max_new_tokens=steps)
    want = hidden_of(MODEL, params, tokens)
    for step in range(steps):
        at = jnp.full((3, 2), step) if per_row else step
        token = np.stack([tokens[row, n + step] for row, n in enumerate(lengths)])
        hidden, cache = decode(MODEL, params, np.repeat(token[:, None], 2, axis=1), cache, at)
        for row, n in enumerate(lengths):
            for found in hidden[row]:
                np.testing.assert_allclose(found, want[row, n + step], atol=2e-5)


def test_rows_at_different_steps_have_windows_of_their_own(params, tokens):
    _, prefix = prefill(MODEL, params, tokens[:, :6])
    cache = MODEL.init_cache(prefix, group_size=1, max_new_tokens=12)
    lag, hidden = jnp.array([[0], [3], [7]]), None
    for tick in range(12):
        steps = jnp.maximum(tick - lag, 0)
        token = jnp.take_along_axis(tokens, 6 + steps, axis=1)
        hidden, cache = decode(MODEL, params, token, cache, steps)
    want = hidden_of(MODEL, params, tokens)
    for row, n in enumerate(17 - lag[:, 0]):
        np.testing.assert_allclose(hidden[row, 0], want[row, n], atol=2e-5)


def test_a_model_without_windows_computes_none(params, tokens):
    def ops(model):
        return str(jax.make_jaxpr(model.hidden)(params, tokens)).count(" = lt ")

    assert ops(with_windows()) == 0 < ops(MODEL)


@pytest.mark.parametrize(
    ("windows", "architecture", "words"),
    [
        ((5, 5), "Qwen2ForCausalLM", "3 layers"),
        ((5, 5, -1), "Qwen2ForCausalLM", "≥ 0"),
        ((5, 6, 0), "Qwen3ForCausalLM", "one size"),
        ((0, 0, 5), "LlamaForCausalLM", "Qwen2ForCausalLM, Qwen3ForCausalLM"),
    ],
)
def test_windows_that_do_not_fit_are_refused(windows, architecture, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, layer_windows=windows, architecture=architecture)

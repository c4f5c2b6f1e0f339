"""The dtype of the key/value cache: what it costs in exactness, what it saves in memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from experiments.bench import parity
from rlhf_jax.models.cache import stored, unscaled

GROUP, PROMPT, STEPS = 2, 7, 24


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def family(request):
    model, params = rl.models.load(parity.GOLDEN / request.param)
    params = jax.tree.map(lambda leaf: leaf / 4, params)  # log-probs of a size that models have
    tokens = jax.random.randint(jax.random.key(0), (4 * GROUP, PROMPT + STEPS), 3, 64)
    prompts = jnp.repeat(tokens[::GROUP, :PROMPT], GROUP, axis=0)
    return model, params, tokens.at[:, :PROMPT].set(prompts)


@jax.jit(static_argnums=0, static_argnames="per_row")
def decoded(model, params, tokens, per_row=False):
    """Log-softmax at every position from the last prompt token on, through the cache."""
    last, prefix = model.prefill(params, tokens[::GROUP, :PROMPT])
    cache = model.init_cache(prefix, group_size=GROUP, max_new_tokens=STEPS)
    shape = (tokens.shape[0] // GROUP, GROUP)

    def step(cache, xs):
        index, token = xs
        at = jnp.full(shape, index) if per_row else index
        hidden, cache = model.decode(params, token.reshape(shape), cache, at)
        return cache, hidden.reshape(tokens.shape[0], -1)

    _, hidden = jax.lax.scan(step, cache, (jnp.arange(STEPS), tokens[:, PROMPT:].T))
    hidden = jnp.concatenate([jnp.repeat(last, GROUP, axis=0)[None], hidden])
    return jax.nn.log_softmax(model.project(params, hidden.swapaxes(0, 1)))


@jax.jit(static_argnums=0)
def learned(model, params, tokens):
    """The same by the learner's pass over whole rows."""
    return jax.nn.log_softmax(model.logits(params, tokens)[:, PROMPT - 1 :])


@pytest.mark.long
@pytest.mark.parametrize(
    ("kv_dtype", "largest", "mean", "per_row"),
    [
        pytest.param("bfloat16", 3e-2, 3e-3, False, marks=pytest.mark.slow),
        pytest.param("int8", 6e-2, 6e-3, False, marks=pytest.mark.slow),
        ("int8", 6e-2, 6e-3, True),
    ],
)
def test_error_of_the_log_probs_is_bounded(family, kv_dtype, largest, mean, per_row):
    model, params, tokens = family
    model = dataclasses.replace(model, kv_dtype=kv_dtype)
    gap = np.abs(decoded(model, params, tokens, per_row=per_row) - learned(model, params, tokens))
    assert 1e-6 < gap.max() < largest and gap.mean() < mean, (gap.max(), gap.mean())
    assert gap[:, 0].max() < 2e-5, "the prompt read itself unrounded"


@pytest.fixture(scope="module")
def llama():
    return rl.models.load(parity.GOLDEN / "llama", stacks=(2, 1))


def ids(rows, length):
    return jax.random.randint(jax.random.key(0), (rows, length), 3, 64)


@pytest.mark.long
def test_float32_is_the_default_bit_for_bit(llama):
    model, params = llama
    tokens = ids(2 * GROUP, PROMPT + STEPS)
    same = dataclasses.replace(model, kv_dtype=jnp.float32)
    np.testing.assert_array_equal(decoded(same, params, tokens), decoded(model, params, tokens))


@pytest.mark.long
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_compute_and_cache_dtypes_are_independent(llama, kv_dtype):
    model, params = llama
    tokens = ids(2 * GROUP, PROMPT + STEPS)
    tokens = tokens.at[1::GROUP, :PROMPT].set(tokens[::GROUP, :PROMPT])
    params = jax.tree.map(lambda leaf: leaf / 4, params)
    coarse = dataclasses.replace(model, dtype=jnp.bfloat16)
    held = dataclasses.replace(coarse, kv_dtype=kv_dtype)
    gap = np.abs(decoded(held, params, tokens) - learned(coarse, params, tokens))
    assert np.isfinite(gap).all() and gap.mean() < 0.05


def empty_cache(model, params, prompts, length, group_size, room):
    def make(params):
        _, prefix = model.prefill(params, jnp.ones((prompts, length), int))
        return model.init_cache(prefix, group_size=group_size, max_new_tokens=room)

    return make, jax.eval_shape(make, params)


@pytest.mark.parametrize(
    ("kv_dtype", "per_slot"),
    [(None, 4 * 8), ("float32", 4 * 8), ("bfloat16", 2 * 8), ("int8", 8 + 4)],
)
def test_bytes_of_the_cache(llama, kv_dtype, per_slot):
    model, params = llama
    model = dataclasses.replace(model, kv_dtype=kv_dtype)
    _, cache = empty_cache(model, params, 2, 5, group_size=3, room=11)

    def held(*trees):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees))

    heads = 2 * model.config.num_layers * model.config.num_kv_heads  # keys and values
    assert model.config.head_dim == 8
    assert held(cache.keys, cache.values) == heads * 2 * 3 * 11 * per_slot
    assert held(cache.prefix.keys, cache.prefix.values) == heads * 2 * 5 * per_slot


def test_int8_is_within_half_a_scale():
    x = jax.random.normal(jax.random.key(0), (3, 5, 7)) * jnp.logspace(-3, 3, 3)[:, None, None]
    x = x.at[0, 0].set(0.0)
    held = stored(x, "int8")
    assert isinstance(held, rl.models.Quantized)
    assert held.values.dtype == jnp.int8 and held.scales.dtype == jnp.float32
    assert held.scales.shape == (3, 5, 1)
    error = np.abs(held.values * held.scales - x)
    assert (error <= 0.5001 * np.asarray(held.scales)).all()
    assert np.abs(held.values).max(axis=-1).tolist() == [[0, *[127] * 4], [127] * 5, [127] * 5]


def test_bfloat16_is_held_as_its_bits():
    x = jax.random.normal(jax.random.key(0), (3, 5))
    held = stored(x, jnp.bfloat16)
    assert held.dtype == jnp.uint16
    np.testing.assert_array_equal(unscaled(held, jnp.float32), x.astype(jnp.bfloat16))
    assert unscaled(held, jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.long
def test_every_leaf_of_an_int8_cache_has_axes_and_grows(llama):
    model, params = llama
    model = dataclasses.replace(model, kv_dtype="int8")
    make, shapes = empty_cache(model, params, 3, 5, group_size=4, room=6)
    sizes = {"prompt": 3, "group": 4, "kv_heads": model.config.num_kv_heads}

    def check(leaf, names):
        for size, name in zip(leaf.shape, names, strict=True):
            assert name in (None, "layers") or sizes[name] == size

    jax.tree.map(check, shapes, rl.models.cache_axes(shapes))
    token, decode = jnp.full((3, 4), 9), jax.jit(model.decode)
    _, cache = decode(params, token, jax.jit(make)(params), 0)
    longer = rl.models.extend_cache(cache, 70)
    for leaf in jax.tree.leaves((longer.keys, longer.values)):
        assert leaf.shape[-2] == 70
    for step in (1, 2):
        a, cache = decode(params, token, cache, step)
        b, longer = decode(params, token, longer, step)
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_unknown_dtypes_are_refused(llama):
    with pytest.raises(ValueError, match="kv_dtype: got 'int16'"):
        dataclasses.replace(llama[0], kv_dtype="int16")

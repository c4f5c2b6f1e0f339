import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl

CONFIG = rl.models.DecoderConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    initializer_range=0.2,
)
PROMPT = 6  # the prompt bucket; prompts have 6, 4 and 1 tokens
LENGTHS = np.array([6, 4, 1])
GROUP, STEPS = 2, 5


@pytest.fixture(scope="module")
def setup():
    model = rl.models.Decoder(CONFIG, stacks=(2, 1))  # one stack is scanned, one is not
    params = model.init(jax.random.key(0))
    prompts = jax.random.randint(jax.random.key(1), (3, PROMPT), 0, 40)
    suffix = jax.random.randint(jax.random.key(2), (3, GROUP, STEPS), 0, 40)
    return model, params, prompts, suffix


@jax.jit(static_argnums=0)
def decode(model, *args):
    return model.decode(*args)


@jax.jit(static_argnums=0)
def prefill(model, *args):
    return model.prefill(*args)


def expected(model, params, prompts, suffix):
    """What the full forward pass says from the last prompt token on: [P, G, STEPS + 1, D]."""
    out = np.zeros((3, GROUP, STEPS + 1, CONFIG.hidden_size), np.float32)
    rows = np.zeros((3 * GROUP, PROMPT + STEPS), np.int32)
    for row in range(3 * GROUP):
        p, g = divmod(row, GROUP)
        rows[row, : LENGTHS[p] + STEPS] = [*prompts[p, : LENGTHS[p]], *suffix[p, g]]
    hidden = np.asarray(jax.jit(model.hidden)(params, rows))
    for row in range(3 * GROUP):
        p, g = divmod(row, GROUP)
        out[p, g] = hidden[row, LENGTHS[p] - 1 : LENGTHS[p] + STEPS]
    return out


def padded(prompts, side):
    if side == "right":
        return prompts, np.arange(PROMPT) < LENGTHS[:, None]
    mask = np.arange(PROMPT) >= PROMPT - LENGTHS[:, None]
    rows = [np.roll(np.asarray(row), PROMPT - n) for row, n in zip(prompts, LENGTHS, strict=True)]
    return jnp.stack(rows), mask


@pytest.mark.fault(9)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("per_row", [False, True])
def test_prefill_and_decode_equal_the_full_forward_pass(setup, side, per_row):
    model, params, prompts, suffix = setup
    tokens, mask = padded(prompts, side)
    last, prefix = prefill(model, params, tokens, mask)
    assert prefix.lengths.tolist() == LENGTHS.tolist()
    assert prefix.keys[0].shape[1] == 3, "the prefix is kept once for each prompt"
    cache = model.init_cache(prefix, group_size=GROUP, max_new_tokens=STEPS + 2)
    seen = [jnp.repeat(last[:, None], GROUP, 1)]
    for step in range(STEPS):
        at = jnp.full((3, GROUP), step) if per_row else step
        hidden, cache = decode(model, params, suffix[:, :, step], cache, at)
        seen.append(hidden)
    seen = jnp.stack(seen, axis=2)
    np.testing.assert_allclose(seen, expected(model, params, prompts, suffix), atol=2e-5)


def test_rows_at_different_steps(setup):
    model, params, prompts, suffix = setup
    tokens, mask = padded(prompts, "left")
    _, prefix = prefill(model, params, tokens, mask)
    cache = model.init_cache(prefix, group_size=GROUP, max_new_tokens=STEPS)
    lag = jnp.array([[0, 1], [2, 0], [1, 1]])
    last = None
    for tick in range(STEPS):
        steps = jnp.maximum(tick - lag, 0)  # a waiting row writes its first token again
        token = jnp.take_along_axis(suffix, steps[..., None], axis=2)[..., 0]
        last, cache = decode(model, params, token, cache, steps)
    done = (STEPS - lag)[..., None, None]
    want = jnp.take_along_axis(expected(model, params, prompts, suffix), done, axis=2)[:, :, 0]
    np.testing.assert_allclose(last, want, atol=2e-5)


def test_a_finished_row_disturbs_nobody(setup):
    model, params, prompts, suffix = setup
    _, prefix = prefill(model, params, prompts)
    outs = []
    for garbage in (0, 17):
        cache = model.init_cache(prefix, group_size=GROUP, max_new_tokens=STEPS)
        hidden = None
        for step in range(3):
            token = suffix[:, :, step].at[0, 0].set(garbage)
            hidden, cache = decode(model, params, token, cache, step)
        outs.append(hidden)
    a, b = outs
    assert abs(a[0, 0] - b[0, 0]).max() > 1e-3
    np.testing.assert_array_equal(a.at[0, 0].set(0.0), b.at[0, 0].set(0.0))


@pytest.mark.fault(44)
def test_a_cache_can_grow_while_decoding(setup):
    model, params, prompts, suffix = setup
    _, prefix = prefill(model, params, prompts)
    small = model.init_cache(prefix, group_size=GROUP, max_new_tokens=2)
    large = model.init_cache(prefix, group_size=GROUP, max_new_tokens=STEPS)
    for step in range(STEPS):
        if step == 2:
            small = rl.models.extend_cache(small, STEPS)
        a, small = decode(model, params, suffix[:, :, step], small, step)
        b, large = decode(model, params, suffix[:, :, step], large, step)
        np.testing.assert_allclose(a, b, atol=1e-6)
    with pytest.raises(ValueError, match="already has 5"):
        rl.models.extend_cache(small, 3)


def test_the_step_is_traced(setup):
    model, params, prompts, suffix = setup
    _, prefix = prefill(model, params, prompts)
    cache = model.init_cache(prefix, group_size=GROUP, max_new_tokens=STEPS)
    traces = []

    @jax.jit
    def counted(*args):
        traces.append(1)
        return model.decode(*args)

    for step in range(3):
        _, cache = counted(params, suffix[:, :, step], cache, step)
    assert len(traces) == 1


def test_decode_loop_in_bf16_is_finite_and_keeps_its_types(setup):
    model, params, prompts, _ = setup
    model = dataclasses.replace(model, dtype=jnp.bfloat16)
    hidden, prefix = prefill(model, params, prompts)
    cache = model.init_cache(prefix, group_size=GROUP, max_new_tokens=STEPS)
    assert cache.keys[0].dtype == jnp.bfloat16

    def body(carry):
        step, hidden, cache = carry
        token = jnp.argmax(model.project(params, hidden), -1)
        hidden, cache = decode(model, params, token, cache, step)
        return step + 1, hidden, cache

    start = (0, jnp.repeat(hidden[:, None], GROUP, 1), cache)
    step, hidden, _ = jax.lax.while_loop(lambda carry: carry[0] < STEPS, body, start)
    assert int(step) == STEPS and bool(jnp.isfinite(hidden.astype(jnp.float32)).all())


def test_cache_axes_fit_every_leaf(setup):
    model, params, prompts, _ = setup
    _, prefix = prefill(model, params, prompts)
    cache = model.init_cache(prefix, group_size=GROUP, max_new_tokens=4)
    axes = rl.models.cache_axes(cache)
    sizes = {"prompt": 3, "group": GROUP, "kv_heads": 2}

    def check(leaf, names):
        for size, name in zip(leaf.shape, names, strict=True):
            assert name in (None, "layers") or sizes[name] == size

    jax.tree.map(check, cache, axes)


def test_what_does_not_belong_together_is_refused(setup):
    model, params, prompts, suffix = setup
    _, prefix = prefill(model, params, prompts)
    cache = model.init_cache(prefix, group_size=GROUP, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"token: shape \(3,\)"):
        model.decode(params, suffix[:, 0, 0], cache, 0)
    other = model.restack(params, (1, 2))
    with pytest.raises(ValueError, match=r"grouped as .* the parameters' as \(1, 2\)"):
        model.decode(other, suffix[:, :, 0], cache, 0)
    with pytest.raises(ValueError, match="group_size: got 0"):
        model.init_cache(prefix, group_size=0, max_new_tokens=4)
    with pytest.raises(ValueError, match="max_new_tokens: got 0"):
        model.init_cache(prefix, group_size=1, max_new_tokens=0)
    with pytest.raises(ValueError, match="attention_mask: shape"):
        prefill(model, params, prompts, jnp.ones((3, 2), bool))

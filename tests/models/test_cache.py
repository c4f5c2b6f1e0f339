import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from rlhf_jax.models import cache as caches

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


@jax.jit(static_argnums=0)
def hidden_of(model, *args, **options):
    return model.hidden(*args, **options)


def expected(model, params, prompts, suffix):
    """What the full forward pass says from the last prompt token on: [P, G, STEPS + 1, D]."""
    out = np.zeros((3, GROUP, STEPS + 1, CONFIG.hidden_size), np.float32)
    rows = np.zeros((3 * GROUP, PROMPT + STEPS), np.int32)
    for row in range(3 * GROUP):
        p, g = divmod(row, GROUP)
        rows[row, : LENGTHS[p] + STEPS] = [*prompts[p, : LENGTHS[p]], *suffix[p, g]]
    hidden = np.asarray(hidden_of(model, params, rows))
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


@pytest.mark.long
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
        np.testing.assert_allclose(a, b, atol=5e-6)
    with pytest.raises(ValueError, match="already has 5"):
        rl.models.extend_cache(small, 3)


def poisoned(cache, lower, upper):
    """NaN in the slots before `lower` and from `upper` on: whoever reads them has NaN."""

    def spoil(held):
        index = np.arange(held.shape[-2])[:, None]
        return jnp.where((index < lower) | (index >= upper), jnp.nan, held)

    keys, values = jax.tree.map(spoil, (cache.keys, cache.values))
    return dataclasses.replace(cache, keys=keys, values=values)


@pytest.mark.fault(44)
@pytest.mark.parametrize(("step", "read"), [(0, 64), (63, 64), (64, 128), (127, 128), (200, 300)])
@pytest.mark.parametrize("per_row", [False, True])
def test_only_the_bucket_in_use_of_the_suffix_is_read(setup, step, read, per_row):
    model, params, prompts, suffix = setup
    _, prefix = prefill(model, params, prompts)
    cache = model.init_cache(prefix, group_size=GROUP, max_new_tokens=300)
    noise = jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(3), leaf.shape), (cache.keys, cache.values)
    )
    cache = dataclasses.replace(cache, keys=noise[0], values=noise[1])
    at = jnp.full((3, GROUP), step).at[0, 0].set(0) if per_row else step
    want, _ = decode(model, params, suffix[:, :, 0], cache, at)
    found, _ = decode(model, params, suffix[:, :, 0], poisoned(cache, 0, read), at)
    np.testing.assert_array_equal(found, want)


@pytest.mark.fault(9, 44)
@pytest.mark.parametrize(("first", "last"), [(0, 40), (0, 70), (190, 199), (100, 180), (3, 150)])
def test_only_the_columns_with_prompt_tokens_are_read(setup, first, last):
    model, params, _, _ = setup
    width, count = 200, last - first + 1
    short = max(1, count // 2)  # one prompt reaches both ends, the others lie inside
    tokens = jax.random.randint(jax.random.key(4), (3, width + 1), 0, 40)
    token = jnp.repeat(tokens[:, -1:], GROUP, axis=1)
    mask = np.zeros((3, width), bool)
    mask[0, first : last + 1] = mask[1, first : first + short] = mask[2, last - short : last] = True
    _, prefix = prefill(model, params, tokens[:, :-1], mask)
    cache = model.init_cache(prefix, group_size=GROUP, max_new_tokens=1)
    want, _ = decode(model, params, token, cache, 0)
    read = next(size for size in (64, 128, 200) if size >= count)
    start = min(first, width - read)
    prefix = poisoned(prefix, start, start + read)
    found, _ = decode(model, params, token, dataclasses.replace(cache, prefix=prefix), 0)
    np.testing.assert_array_equal(found, want)
    mask = np.append(mask, [[True]] * 3, axis=1)
    whole = hidden_of(model, params, tokens, attention_mask=mask)[:, -1]
    np.testing.assert_allclose(found, np.repeat(whole[:, None], GROUP, axis=1), atol=2e-5)


@pytest.mark.fault(44)
def test_decoding_across_buckets_equals_the_full_forward_pass(setup):
    model, params, prompts, _ = setup
    steps = 140
    rows = jax.random.randint(jax.random.key(5), (3, PROMPT + steps), 0, 40).at[:, :PROMPT]
    rows = rows.set(prompts)
    _, prefix = prefill(model, params, prompts)
    cache = model.init_cache(prefix, group_size=1, max_new_tokens=160)

    def step(cache, xs):
        index, token = xs
        hidden, cache = model.decode(params, token[:, None], cache, index)
        return cache, hidden[:, 0]

    _, found = jax.jit(lambda *xs: jax.lax.scan(step, cache, xs))(
        jnp.arange(steps), rows[:, PROMPT:].T
    )
    want = hidden_of(model, params, rows)[:, PROMPT:]
    np.testing.assert_allclose(found.swapaxes(0, 1), want, atol=2e-5)


@pytest.mark.long
@pytest.mark.fault(44)
@pytest.mark.parametrize(
    ("per_row", "kv_dtype"), [(False, "float32"), (False, "bfloat16"), (True, "int8")]
)
def test_a_decode_loop_never_copies_the_cache(setup, per_row, kv_dtype):
    model, params, prompts, suffix = setup
    model = dataclasses.replace(model, kv_dtype=kv_dtype)
    _, prefix = prefill(model, params, prompts)
    cache = model.init_cache(prefix, group_size=GROUP, max_new_tokens=4096)

    def loop(params, cache, token):
        def body(carry):
            step, cache, hidden = carry
            at = jnp.full(token.shape, step) if per_row else step
            hidden, cache = model.decode(params, token, cache, at)
            return step + 1, cache, hidden

        start = (0, cache, jnp.zeros((3, GROUP, CONFIG.hidden_size)))
        return jax.lax.while_loop(lambda carry: carry[0] < 4000, body, start)

    compiled = jax.jit(loop, donate_argnums=1).lower(params, cache, suffix[:, :, 0]).compile()
    # One layer's largest bucket, widened to float32, is the most a step may set aside.
    largest = 2 * 4 * 3 * GROUP * CONFIG.num_kv_heads * CONFIG.head_dim * 4096
    assert compiled.memory_analysis().temp_size_in_bytes < 1.2 * largest
    leaves = jax.tree.leaves((cache.keys, cache.values))
    whole = {",".join(map(str, leaf.shape)) for leaf in leaves}
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line]
    assert not [line for line in copies if any(f"[{shape}]" in line for shape in whole)]


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
    assert cache.keys[0].dtype == jnp.uint16  # the bits of bfloat16

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


@pytest.mark.parametrize("apart", [(), (0, 3)])
def test_tokens_go_to_the_slot_of_their_row_in_every_layer(apart):
    held = jax.random.normal(jax.random.key(0), (2, 3, 1, 2, STEPS, 4))
    new = jax.random.normal(jax.random.key(1), (2, 3, 1, 2, 4))
    step = np.array([[4], [STEPS], [0]], np.int32)  # the second has no room: nothing is written
    expected = np.array(held)
    for row, slot in ((0, 4), (2, 0)):
        expected[:, row, :, :, slot] = new[:, row]
    np.testing.assert_array_equal(caches._scatter(held, new, jnp.array(step), apart), expected)

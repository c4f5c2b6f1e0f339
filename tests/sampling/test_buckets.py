"""Padding to declared shapes changes no row, and bounds the number of compilations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl

CONFIG = rl.models.DecoderConfig(
    vocab_size=50, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2
)
MODEL = rl.models.Decoder(CONFIG)


@pytest.fixture(scope="module")
def params():
    return MODEL.init(jax.random.key(0))


def prompts(rng, count, longest):
    lengths = rng.integers(1, longest + 1, count)
    lengths[0] = longest
    mask = np.arange(longest) >= longest - lengths[:, None]
    return np.where(mask, rng.integers(0, 50, (count, longest)), 0).astype(np.int32), mask


@pytest.mark.fault(40)
def test_fifty_batches_compile_once_per_pair_of_buckets(params):
    rng = np.random.default_rng(0)
    widths, counts = (8, 16), (2, 4)
    before, met = rl.sampling.compilations(), set()
    for batch in range(50):
        count, longest = int(rng.integers(1, 5)), int(rng.integers(1, 17))
        tokens, mask = prompts(rng, count, longest)
        rollout = rl.generate(
            MODEL,
            params,
            tokens,
            mask,
            jax.random.key(batch),
            group_size=2,
            max_new_tokens=int(rng.integers(1, 7)),
            room=6,
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.integers(0, 5)),
            min_p=float(rng.choice([0.0, 0.1])),
            repetition_penalty=float(rng.choice([1.0, 1.2])),
            stop_ids=rng.integers(0, 50, rng.integers(0, 8)),
            version=batch,
            prompt_buckets=widths,
            row_buckets=counts,
        )
        met.add((rl.sampling.round_up(longest, widths), rl.sampling.round_up(count, counts)))
        assert rollout.tokens.shape == (2 * count, rl.sampling.round_up(longest, widths) + 6)
    assert rl.sampling.compilations() - before == len(met) <= len(widths) * len(counts)


@pytest.mark.long
@pytest.mark.parametrize("per_row", [pytest.param(False, marks=pytest.mark.slow), True])
def test_padding_to_buckets_changes_no_row(params, per_row):
    tokens, mask = prompts(np.random.default_rng(1), 3, 5)
    options = dict(group_size=2, room=6, max_new_tokens=6, stop_ids=[4, 9])
    if per_row:
        options |= dict(
            max_new_tokens=np.array([6, 2, 4]),
            temperature=np.array([1.0, 0.5, 0.0]),
            stop_ids=np.array([[4], [9], [7]]),
            logit_bias=np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32),
        )
    keys = rl.sampling.row_keys(jax.random.key(2), jnp.array([5, 6, 7]), 2)
    plain = rl.generate(MODEL, params, tokens, mask, keys, **options)
    padded = rl.generate(
        MODEL, params, tokens, mask, keys, prompt_buckets=(16,), row_buckets=(8,), **options
    )
    assert padded.tokens.shape == (6, 22)
    assert (padded.tokens[:, 11:] == plain.tokens).all()
    assert (padded.mask[:, 11:] == plain.mask).all()
    assert (padded.lengths == plain.lengths).all() and (padded.terminated == plain.terminated).all()
    assert padded.group_ids.tolist() == plain.group_ids.tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(padded.log_probs[:, 11:], plain.log_probs, atol=1e-5)


@pytest.mark.fault(41)
def test_what_does_not_fit_is_an_error(params):
    tokens, mask = prompts(np.random.default_rng(1), 3, 5)
    options = dict(group_size=1, max_new_tokens=2)
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="prompt width: 5 does not fit the largest bucket"):
        rl.generate(MODEL, params, tokens, mask, key, prompt_buckets=(4, 2), **options)
    with pytest.raises(ValueError, match="number of prompts: 3"):
        rl.generate(MODEL, params, tokens, mask, key, row_buckets=(2,), **options)
    with pytest.raises(ValueError, match="room: got 1"):
        rl.generate(MODEL, params, tokens, mask, key, room=1, **options)


def test_every_row_has_its_own_cap_and_floor(params):
    tokens, mask = prompts(np.random.default_rng(2), 3, 4)
    rollout = rl.generate(
        MODEL,
        params,
        tokens,
        mask,
        jax.random.key(1),
        group_size=2,
        max_new_tokens=np.array([[1, 2], [3, 4], [5, 7]]),
        min_new_tokens=np.array([0, 3, 0]),
        stop_ids=range(0, 50, 2),
    )
    assert rollout.tokens.shape == (6, 4 + 8)  # 7 rounded up to a power of two
    assert (rollout.lengths <= np.array([1, 2, 3, 4, 5, 7])).all()
    cut = np.asarray(rollout.truncated)
    assert (np.asarray(rollout.lengths)[cut] == np.array([1, 2, 3, 4, 5, 7])[cut]).all()
    assert (np.asarray(rollout.lengths)[2:4] >= 3).all()
    assert (np.asarray(rollout.mask).sum(1) == rollout.lengths).all()


@pytest.mark.long
def test_keys_of_rows_are_what_a_key_gives(params):
    tokens, mask = prompts(np.random.default_rng(3), 2, 4)
    options = dict(group_size=3, max_new_tokens=5, group_ids=np.array([8, 1]))
    one = rl.generate(MODEL, params, tokens, mask, jax.random.key(4), **options)
    keys = rl.sampling.row_keys(jax.random.key(4), jnp.array([8, 1]), 3)
    rows = rl.generate(MODEL, params, tokens, mask, keys, **options)
    assert (one.tokens == rows.tokens).all()

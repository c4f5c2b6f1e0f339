"""Shaping of rewards: where scores go, what length and KL cost, running normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from tests import reference

shaping = rl.rewards.shaping
MASK = jnp.array([[False, True, True, False], [True, True, True, True], [False] * 4])


@pytest.mark.fault(10)
def test_the_score_goes_to_the_last_valid_token():
    out = shaping.place_at_last(jnp.array([1.0, 2.0, jnp.nan]), MASK)
    np.testing.assert_array_equal(out, [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, 0]])
    left = shaping.place_at_last(jnp.array([1.0]), jnp.array([[False, False, True, True]]))
    np.testing.assert_array_equal(left, [[0, 0, 0, 1]])


def test_packed_scores_are_read_at_last_tokens():
    mask = jnp.array([[True, True, False, True, True]])
    ids = jnp.array([[2, 2, 2, 7, 7]])
    scores = jnp.array([[jnp.nan, 1.0, 5.0, 5.0, 2.0]])
    got = shaping.place_at_last(scores, mask, segment_ids=ids)
    np.testing.assert_array_equal(got, [[0, 1, 0, 0, 2]])


@pytest.mark.fault(2, 6)
def test_masked_tokens_have_no_kl_in_rewards_returns_or_sums():
    rng = np.random.default_rng(0)
    log_probs, ref = rng.normal(size=(2, 3, 4)).astype(np.float32)
    scores = jnp.array([1.0, -1.0, 0.0])
    poison = np.where(MASK, log_probs, np.nan), np.where(MASK, ref, -np.inf)
    per_token = shaping.kl_in_reward(scores, *poison, MASK, kl_coef=0.1)
    assert not np.asarray(per_token)[~np.asarray(MASK)].any()
    per_row = shaping.sequence_kl_in_reward(scores, *poison, MASK, kl_coef=0.1)
    returns = rl.advantages.monte_carlo_returns(per_token, MASK)
    np.testing.assert_allclose(returns[0, 1], per_row[0], rtol=1e-6)
    np.testing.assert_allclose(returns[1, 0], per_row[1], rtol=1e-6)
    kl = np.where(MASK, log_probs - ref, 0).sum(axis=1)
    np.testing.assert_allclose(per_row, scores - 0.1 * kl, rtol=1e-5)


@pytest.mark.fault(31)
def test_drifting_from_the_reference_costs_reward():
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.2, 0.3, 0.5])
    rewards = shaping.sequence_kl_in_reward(
        jnp.zeros(3), jnp.log(p)[:, None], jnp.log(q)[:, None], jnp.ones((3, 1), bool), kl_coef=2.0
    )
    assert float(p @ np.asarray(rewards)) == pytest.approx(-2.0 * reference.kl(p, q), rel=1e-5)


@pytest.mark.fault(18)
def test_missing_scores_stay_missing_until_a_row_is_dropped():
    nan = jnp.array([jnp.nan, 1.0])
    log_probs, on = jnp.zeros((2, 2)), jnp.ones((2, 2), bool)
    kept = shaping.sequence_kl_in_reward(nan, log_probs, log_probs, on, kl_coef=0.1)
    np.testing.assert_array_equal(jnp.isnan(kept), [True, False])
    for out in (
        shaping.clip(nan, low=-1.0, high=1.0),
        shaping.eos_bonus(nan, on[:, 0], bonus=1.0),
        shaping.RunningMoments.init().update(nan).normalize(nan),
    ):
        np.testing.assert_array_equal(jnp.isnan(out), [True, False])
    with pytest.raises(ValueError, match=r"scores must be finite; got nan.*Drop the row"):
        shaping.kl_in_reward(nan, log_probs, log_probs, on, kl_coef=0.1)
    dropped = on & jnp.isfinite(nan)[:, None]
    out = shaping.kl_in_reward(nan, log_probs, log_probs, dropped, kl_coef=0.1)
    np.testing.assert_array_equal(out, [[0, 0], [0, 1]])


@pytest.mark.fault(9)
def test_padding_side_does_not_matter():
    rng = np.random.default_rng(1)
    log_probs, ref = rng.normal(size=(2, 3, 4)).astype(np.float32)
    scores = jnp.array([1.0, 2.0, 3.0])
    want = shaping.kl_in_reward(scores, log_probs, ref, MASK, kl_coef=0.1)

    def pad(x, fill):
        return np.pad(x, ((0, 0), (2, 3)), constant_values=fill)

    got = shaping.kl_in_reward(
        scores, pad(log_probs, np.nan), pad(ref, 0.0), pad(MASK, False), kl_coef=0.1
    )
    np.testing.assert_array_equal(got, pad(np.asarray(want), 0.0))


@pytest.mark.fault(4, 5, 11, 13)
def test_masks_come_from_lengths():
    # Pad and EOS are both 0: ids cannot tell them apart, lengths can.
    tokens = np.array([[9, 9, 5, 0, 0, 0], [9, 9, 5, 6, 7, 8]])
    mask = rl.masked.from_lengths(jnp.array([2, 4]), 6, start=2)
    np.testing.assert_array_equal(mask[0], [False, False, True, True, False, False])
    np.testing.assert_array_equal(mask[1], [False, False, True, True, True, True])
    assert tokens[0][np.asarray(mask[0])].tolist() == [5, 0]  # the EOS is an action
    rewards = shaping.place_at_last(jnp.array([1.0, 2.0]), mask)
    np.testing.assert_array_equal(rewards[:, 3:], [[1, 0, 0], [0, 0, 2]])
    with pytest.raises(ValueError, match=r"lengths must be ≥ 0 and ≤ 4.*Widen"):
        rl.masked.from_lengths(jnp.array([5]), 6, start=2)


def test_eos_and_overlong():
    scores, ended = jnp.array([1.0, 1.0]), jnp.array([True, False])
    np.testing.assert_array_equal(
        shaping.eos_bonus(scores, ended, bonus=0.5, penalty=2.0), [1.5, -1.0]
    )
    np.testing.assert_array_equal(shaping.missing_eos_score(scores, ended, score=-5.0), [1.0, -5.0])
    np.testing.assert_array_equal(shaping.overlong_hard(~ended, penalty=0.5), [0.0, -0.5])
    mask = shaping.overlong_filter(MASK, jnp.array([False, True, False]))
    np.testing.assert_array_equal(mask, MASK.at[1].set(False))
    run = jax.jit(lambda n, m, c, p: shaping.overlong_soft(n, max_length=m, cache=c, penalty=p))
    np.testing.assert_allclose(run(jnp.array([5, 8, 10, 99]), 10, 4, 2.0), [0.0, -1.0, -2.0, -2.0])


@pytest.mark.fault(17)
def test_filtered_rows_still_count_in_the_group_baseline():
    rewards, ids = jnp.array([1.0, 0.0, 0.0]), jnp.array([0, 0, 0])
    advantages = rl.advantages.centered(rewards, ids)
    mask = shaping.overlong_filter(jnp.ones((3, 2), bool), jnp.array([False, False, True]))
    assert float(advantages[0]) == pytest.approx(2 / 3)
    assert float(rl.masked.denominator(mask, "seq_mean_token_mean")) == 2.0


@pytest.mark.fault(15)
def test_running_moments_agree_with_numpy_over_any_split():
    x = (10_000 + np.random.default_rng(0).normal(size=30)).astype(np.float32)
    whole = shaping.RunningMoments.init().update(x)
    update = jax.jit(lambda m, r: m.update(r))
    parts = shaping.RunningMoments.init()
    for part in np.split(x, 3):
        parts = update(parts, part)
    parts = parts.update(jnp.array([jnp.nan]))
    for moments in (whole, parts):
        assert float(moments.count) == 30
        assert float(moments.squares / 30) == pytest.approx(np.var(x.astype(np.float64)), rel=1e-3)
    z = (x[:3].astype(np.float64) - x.mean(dtype=np.float64)) / np.std(x.astype(np.float64))
    np.testing.assert_allclose(whole.normalize(x[:3]), z, atol=2e-2)
    kept = whole.normalize(x[:3], shift_mean=False, limit=1.0)
    np.testing.assert_array_equal(kept, 1.0)
    empty = shaping.RunningMoments.init()
    np.testing.assert_array_equal(empty.normalize(jnp.array([2.0])), [2.0])


def test_bf16_scores_and_gradients():
    scores = jnp.array([1.0], jnp.bfloat16)
    lp, on = jnp.array([[-1.0, -2.0]], jnp.bfloat16), jnp.ones((1, 2), bool)
    out = shaping.kl_in_reward(scores, lp, lp, on, kl_coef=0.1)
    assert out.dtype == jnp.float32
    total = lambda x: shaping.kl_in_reward(scores, x, lp, on, kl_coef=0.1).sum()  # noqa: E731
    assert not np.asarray(jax.grad(total)(lp), np.float32).any()


ONE, FLAG, LP, ON = jnp.ones(2), jnp.ones(2, bool), jnp.zeros((2, 3)), jnp.ones((2, 3), bool)


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (
            ValueError,
            "kl_coef must be ≥ 0.*β",
            lambda: shaping.kl_in_reward(ONE, LP, LP, ON, kl_coef=-1.0),
        ),
        (
            ValueError,
            "kl_coef must be ≥ 0",
            lambda: shaping.sequence_kl_in_reward(ONE, LP, LP, ON, kl_coef=-1.0),
        ),
        (
            TypeError,
            "scores must be a floating",
            lambda: shaping.kl_in_reward(ONE.astype(int), LP, LP, ON, kl_coef=0.1),
        ),
        (
            TypeError,
            "mask must be bool",
            lambda: shaping.kl_in_reward(ONE, LP, LP, ON.astype(int), kl_coef=0.1),
        ),
        (
            ValueError,
            r"log_probs must be \[B, T\]",
            lambda: shaping.kl_in_reward(LP, ONE, LP, ON, kl_coef=0.1),
        ),
        (
            ValueError,
            "ref_log_probs must have shape",
            lambda: shaping.kl_in_reward(ONE, LP, LP[:, :2], ON, kl_coef=0.1),
        ),
        (ValueError, "scores must have shape", lambda: shaping.place_at_last(jnp.ones(3), ON)),
        (TypeError, "terminated must be bool", lambda: shaping.eos_bonus(ONE, ONE)),
        (
            ValueError,
            "terminated must have shape",
            lambda: shaping.missing_eos_score(ONE, jnp.ones(3, bool)),
        ),
        (ValueError, "penalty must be ≥ 0", lambda: shaping.eos_bonus(ONE, FLAG, penalty=-1.0)),
        (ValueError, "penalty must be ≥ 0", lambda: shaping.overlong_hard(FLAG, penalty=-1.0)),
        (
            TypeError,
            "lengths must be an integer",
            lambda: shaping.overlong_soft(ONE, max_length=4, cache=2),
        ),
        (
            ValueError,
            "cache must be > 0",
            lambda: shaping.overlong_soft(jnp.array([1]), max_length=4, cache=0),
        ),
        (
            ValueError,
            "cache must be ≤ 4",
            lambda: shaping.overlong_soft(jnp.array([1]), max_length=4, cache=5),
        ),
        (
            ValueError,
            "truncated must have shape",
            lambda: shaping.overlong_filter(ON, jnp.ones(3, bool)),
        ),
        (ValueError, "high must be > 1", lambda: shaping.clip(ONE, low=1.0, high=1.0)),
        (
            ValueError,
            "limit must be > 0",
            lambda: shaping.RunningMoments.init().normalize(ONE, limit=0.0),
        ),
    ],
)
def test_errors_name_the_argument_and_the_remedy(error, text, call):
    with pytest.raises(error, match=text):
        call()

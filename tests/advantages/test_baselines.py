"""Baselines without a group, stopped gradients, and the errors of all advantage functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import rlhf_jax as rl
from tests import reference
from tests.advantages.inputs import tokens

adv = rl.advantages
SEED = st.integers(0, 10_000)


def test_batch_baselines():
    rewards = [1.0, None, 0.0, 2.0]
    known = np.array([1.0, 0.0, 2.0])
    want = np.zeros(4)
    want[[0, 2, 3]] = known - 1.0
    np.testing.assert_allclose(adv.batch_centered(rewards), want)
    for ddof in (0, 1):
        got = adv.batch_normalized(rewards, ddof=ddof, eps=0.5)
        np.testing.assert_allclose(got, want / (known.std(ddof=ddof) + 0.5), rtol=1e-6)
    same = jnp.full(5, 0.1)
    np.testing.assert_array_equal(adv.batch_normalized(same, ddof=1, eps=0.0), 0.0)
    np.testing.assert_array_equal(adv.batch_centered(same), 0.0)


def test_moving_average_knows_nothing_of_the_current_batch():
    state = adv.MovingAverage.init()
    step = jax.jit(lambda r, s: adv.moving_average(r, s, decay=0.5))
    first, state = step(jnp.array([1.0, 3.0]), state)
    np.testing.assert_array_equal(first, [1.0, 3.0])
    assert float(state.baseline()) == 2.0  # no bias towards the 0 at the start
    second, state = step(jnp.array([8.0, jnp.nan]), state)
    np.testing.assert_array_equal(second, [6.0, 0.0])
    assert float(state.baseline()) == pytest.approx((0.25 * 4 + 0.5 * 8) / (0.25 * 2 + 0.5))


def test_remax():
    out = adv.remax([1.0, 0.0, None], [0.5, None, 0.5])
    np.testing.assert_array_equal(out, [0.5, 0.0, 0.0])


@pytest.mark.fault(2, 3)
def test_reinforce_plus_plus_whitens_rewards_to_go_over_valid_tokens():
    rewards, _, mask, segments = tokens(8)
    returns = reference.monte_carlo(rewards, mask, gamma=0.9)
    known = returns[mask]
    want = np.where(mask, (returns - known.mean()) / np.sqrt(known.var() + 1e-8), 0.0)
    got = adv.reinforce_plus_plus(np.where(mask, rewards, np.nan), mask, gamma=0.9)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    packed = adv.reinforce_plus_plus(rewards, mask, gamma=0.9, segment_ids=segments)
    assert np.isfinite(packed).all()


def test_reinforce_plus_plus_baseline():
    rewards, ids = [1.0, 0.0, None, 1.0, 0.5, 0.5], np.array([1, 1, 1, 2, 2, 2])
    mask = np.random.default_rng(0).random((6, 4)) < 0.7
    mask[:, 0] = True
    rows = np.where([r is None for r in rewards], np.nan, np.array(rewards, float))
    spread = np.repeat(reference.centered(rows, ids)[:, None], 4, axis=1)
    on = mask & ~np.isnan(rows)[:, None]
    want = np.where(on, (spread - spread[on].mean()) / np.sqrt(spread[on].var() + 1e-8), 0.0)
    got = adv.reinforce_plus_plus_baseline(rewards, ids, mask)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_no_gradient_flows_into_rewards_or_values():
    r, v, on = jnp.array([[0.0, 1.0], [0.5, 0.2]]), jnp.ones((2, 2)), jnp.ones((2, 2), bool)
    ids = jnp.array([0, 0])

    def total(r, v):
        per_row = (adv.leave_one_out, adv.centered, adv.max_rl)
        out = sum(f(r[:, 0], ids).sum() for f in per_row) + adv.batch_centered(r[:, 0]).sum()
        out += sum(x.sum() for x in adv.gae(r, v, on)[:2]) + adv.monte_carlo_returns(r, on).sum()
        out += sum(x.sum() for x in adv.vtrace(r, v, r, on))
        return out + (adv.reinforce_plus_plus(r, on) ** 2).sum()

    for gradient in jax.grad(total, argnums=(0, 1))(r, v):
        np.testing.assert_array_equal(gradient, 0.0)


R2, M2, G2 = jnp.zeros((2, 3)), jnp.ones((2, 3), bool), jnp.array([0, 0])


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, r"rewards must be \[B\].*rank 2", lambda: adv.centered(R2, G2)),
        (
            TypeError,
            "group_ids must be an integer.*order",
            lambda: adv.centered(R2[:, 0], R2[:, 0]),
        ),
        (TypeError, "rewards must be a floating.*order", lambda: adv.leave_one_out(G2, R2[:, 0])),
        (
            ValueError,
            "group_ids must have shape",
            lambda: adv.centered(R2[:, 0], jnp.array([0, 0, 0])),
        ),
        (TypeError, "valid must be bool", lambda: adv.centered(R2[:, 0], G2, valid=G2)),
        (
            ValueError,
            "rewards must be finite; got inf.*NaN",
            lambda: adv.centered(jnp.array([jnp.inf, 0.0]), G2),
        ),
        (ValueError, "ddof is unknown: got 2", lambda: adv.group_normalized(R2[:, 0], G2, ddof=2)),
        (
            ValueError,
            "eps must be ≥ 0",
            lambda: adv.group_normalized(R2[:, 0], G2, ddof=0, eps=-1.0),
        ),
        (TypeError, "ddof", lambda: adv.group_normalized(R2[:, 0], G2)),
        (ValueError, "rewards must be ≥ 0.*0 or 1", lambda: adv.max_rl(jnp.array([-1.0, 0.0]), G2)),
        (TypeError, "mask must be bool", lambda: adv.gae(R2, R2, M2.astype(int))),
        (ValueError, "values must have shape", lambda: adv.gae(R2, R2[:, :2], M2)),
        (ValueError, r"rewards must be \[B, T\]", lambda: adv.gae(R2[0], R2[0], M2[0])),
        (ValueError, "gamma must be", lambda: adv.gae(R2, R2, M2, gamma=1.1)),
        (ValueError, "gae_lambda must be", lambda: adv.gae(R2, R2, M2, gae_lambda=-0.1)),
        (
            ValueError,
            "gae_lambda must have shape",
            lambda: adv.gae(R2, R2, M2, gae_lambda=jnp.ones(3)),
        ),
        (ValueError, "truncation is unknown", lambda: adv.gae(R2, R2, M2, truncation="zero")),
        (
            ValueError,
            "bootstrap_value is missing",
            lambda: adv.gae(R2, R2, M2, truncation="bootstrap"),
        ),
        (ValueError, "truncated is missing", lambda: adv.gae(R2, R2, M2, truncation="mask")),
        (ValueError, "alpha must be > 0", lambda: adv.length_adaptive_lambda(G2, alpha=0.0)),
        (ValueError, "rho_bar must be > 0", lambda: adv.vtrace(R2, R2, R2, M2, rho_bar=0.0)),
        (
            ValueError,
            "step_mask marks tokens",
            lambda: adv.process_supervision(R2, M2, ~M2, G2, ddof=0),
        ),
        (
            ValueError,
            "group 0 has one row",
            lambda: adv.process_supervision(R2, M2, M2, jnp.array([0, 1]), ddof=0),
        ),
        (
            ValueError,
            "decay must be",
            lambda: adv.moving_average(R2[:, 0], adv.MovingAverage.init(), decay=1.0),
        ),
        (ValueError, "greedy_rewards must have shape", lambda: adv.remax(R2[:, 0], R2[0])),
        (
            ValueError,
            "mask must have shape",
            lambda: adv.reinforce_plus_plus_baseline(R2[:, 0], G2, jnp.ones((3, 3), bool)),
        ),
    ],
)
def test_errors_name_the_argument_and_the_remedy(error, text, call):
    with pytest.raises(error, match=text):
        call()

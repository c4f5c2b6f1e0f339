"""GAE, Monte Carlo returns and V-trace against loops, and their invariances."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlhf_jax as rl
from tests import reference
from tests.advantages.inputs import tokens

adv = rl.advantages
SEED = st.integers(0, 10_000)


@pytest.mark.fault(1)
@pytest.mark.parametrize("packed", [False, True])
@given(seed=SEED)
def test_gae_is_that_of_the_compressed_sequence(packed, seed):
    rewards, values, mask, segments = tokens(seed)
    ids = segments if packed else None
    poisoned = (np.where(mask, x, np.nan) for x in (rewards, values))
    got = adv.gae(*poisoned, mask, gamma=0.9, gae_lambda=0.8, segment_ids=ids)
    want = reference.gae(rewards, values, mask, gamma=0.9, lam=0.8, segment_ids=ids)
    np.testing.assert_allclose(got.advantages, want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.returns, want[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got.mask, mask)


@pytest.mark.fault(1)
def test_gae_skips_holes_and_ignores_what_is_behind_the_end():
    one = adv.gae(
        jnp.array([[0.0, 1.0, 0.0]]),
        jnp.array([[0.0, 0.0, 100.0]]),
        jnp.array([[True, True, False]]),
        gae_lambda=0.95,
    )
    np.testing.assert_allclose(one.advantages, [[0.95, 1.0, 0.0]], rtol=1e-6)
    hole = adv.gae(
        jnp.array([[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]]),
        jnp.array([[0.1, 0.2, 9.0, 9.0, 0.3, 0.4]]),
        jnp.array([[True, True, False, False, True, True]]),
        gae_lambda=0.95,
    )
    want = [[0.799675, 0.7365, 0.0, 0.0, 0.67, 0.6]]
    np.testing.assert_allclose(hole.advantages, want, rtol=1e-5)


@pytest.mark.fault(9)
@given(seed=SEED, left=st.sampled_from([0, 3]), right=st.sampled_from([0, 2]))
def test_padding_moves_nothing(seed, left, right):
    rewards, values, mask, segments = tokens(seed)

    def pad(x, fill):
        return np.pad(x, ((0, 0), (left, right)), constant_values=fill)

    for ids in (None, segments):
        want = adv.gae(rewards, values, mask, segment_ids=ids).advantages
        got = adv.gae(
            pad(rewards, np.nan),
            pad(values, np.inf),
            pad(mask, False),
            segment_ids=None if ids is None else pad(ids, -1),
        ).advantages
        np.testing.assert_allclose(got, pad(np.asarray(want), 0.0), rtol=1e-4, atol=1e-5)


@pytest.mark.fault(1)
def test_packing_two_rows_into_one_changes_nothing():
    rewards, values, mask, _ = tokens(3)
    truncated, after = np.array([1, 0, 1, 1], bool), np.array([0.5, 9.0, -0.25, 0.125], np.float32)
    spread = np.repeat(np.arange(4, dtype=np.int32)[:, None], 9, axis=1)

    def pack(x):
        return x.reshape(2, 18)

    for truncation in adv.TRUNCATIONS:
        want = adv.gae(
            rewards, values, mask, truncation=truncation, truncated=truncated, bootstrap_value=after
        )
        got = adv.gae(
            *(pack(x) for x in (rewards, values, mask)),
            truncation=truncation,
            truncated=pack(truncated[spread]),
            bootstrap_value=pack(after[spread]),
            segment_ids=pack(spread),
        )
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, pack(np.asarray(b)), rtol=1e-5, atol=1e-6)


def test_three_ways_to_treat_truncation():
    rewards, values, mask, _ = tokens(4)
    truncated = np.array([False, False, True, False])
    after = np.array([np.nan, 7.0, -0.25, 5.0], np.float32)
    options = {"gamma": 0.9, "gae_lambda": 0.8, "truncated": truncated}
    terminal = adv.gae(rewards, values, mask, truncation="terminal", **options)
    want, _ = reference.gae(rewards, values, mask, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(terminal.advantages, want, rtol=1e-4, atol=1e-5)

    bootstrap = adv.gae(
        rewards, values, mask, truncation="bootstrap", bootstrap_value=after, **options
    )
    used = np.where(truncated, after, 0.0)
    want, _ = reference.gae(rewards, values, mask, gamma=0.9, lam=0.8, bootstrap=used)
    np.testing.assert_allclose(bootstrap.advantages, want, rtol=1e-4, atol=1e-5)

    masked = adv.gae(rewards, values, mask, truncation="mask", **options)
    np.testing.assert_array_equal(masked.mask, mask & ~truncated[:, None])
    np.testing.assert_array_equal(masked.advantages[2], 0.0)
    np.testing.assert_array_equal(masked.advantages[3], terminal.advantages[3])


def test_decoupled_and_length_adaptive_lambda():
    rewards, values, mask, _ = tokens(5)
    lam = np.array([0.1, 0.5, 0.9, 0.3], np.float32)
    got = adv.gae(rewards, values, mask, gae_lambda=lam, returns_lambda=1.0)
    for b in range(4):
        want, _ = reference.gae(rewards, values, mask, gamma=1.0, lam=lam[b])
        np.testing.assert_allclose(got.advantages[b], want[b], rtol=1e-4, atol=1e-5)
    per_token = adv.gae(rewards, values, mask, gae_lambda=np.repeat(lam[:, None], 9, 1))
    np.testing.assert_allclose(per_token.advantages, got.advantages, rtol=1e-6)
    returns = reference.monte_carlo(np.where(mask, rewards, 0), mask, gamma=1.0)
    np.testing.assert_allclose(got.returns, returns, rtol=1e-4, atol=1e-5)
    short = adv.length_adaptive_lambda(jnp.array([0, 10, 20, 40]))
    np.testing.assert_allclose(short, [0.0, 0.0, 0.0, 0.5])


@pytest.mark.parametrize("packed", [False, True])
@given(seed=SEED)
def test_monte_carlo_and_vtrace(packed, seed):
    rewards, values, mask, segments = tokens(seed)
    ids = segments if packed else None
    want = reference.monte_carlo(rewards, mask, gamma=0.9, segment_ids=ids)
    got = adv.monte_carlo_returns(np.where(mask, rewards, np.nan), mask, gamma=0.9, segment_ids=ids)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    ratios = np.random.default_rng(seed + 1).normal(size=mask.shape).astype(np.float32)
    out = adv.vtrace(
        rewards,
        values,
        np.where(mask, ratios, np.nan),
        mask,
        gamma=0.9,
        rho_bar=1.2,
        c_bar=0.8,
        segment_ids=ids,
    )
    for b, where in reference.sequences(mask, ids):
        targets, advantages = reference.vtrace(
            rewards[b, where], values[b, where], ratios[b, where], gamma=0.9, rho_bar=1.2, c_bar=0.8
        )
        np.testing.assert_allclose(out.targets[b, where], targets, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(out.advantages[b, where], advantages, rtol=1e-4, atol=1e-5)
    assert not np.asarray(out.advantages)[~mask].any()


@pytest.mark.fault(35)
def test_vtrace_caps_before_the_exponential():
    out = adv.vtrace(
        jnp.ones((1, 2)), jnp.zeros((1, 2)), jnp.array([[1e4, -1e4]]), jnp.ones((1, 2), bool)
    )
    assert np.isfinite(out.targets).all()


def test_vtrace_bootstraps():
    on = jnp.ones((1, 2), bool)
    r, v, zero = jnp.array([[0.0, 1.0]]), jnp.array([[0.2, 0.4]]), jnp.zeros((1, 2))
    got = adv.vtrace(r, v, zero, on, bootstrap_value=jnp.array([0.5]))
    np.testing.assert_allclose(got.targets, [[1.5, 1.5]])


@pytest.mark.long
@pytest.mark.parametrize("explicit", [False, True])
def test_rows_may_be_spread_over_devices(explicit):
    rewards, values, mask, segments = tokens(6, rows=8)
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    placed = jax.device_put(
        (rewards, values, mask, segments), jax.NamedSharding(mesh, jax.P("data"))
    )

    def run(rewards, values, mask, segments):
        options = {"segment_ids": segments}
        cut = jnp.arange(8) % 2 == 0
        out = adv.gae(
            rewards, values, mask, truncation="mask", truncated=cut[:, None] & mask, **options
        )
        white = adv.reinforce_plus_plus(rewards, mask, **options)
        return out, white, adv.vtrace(rewards, values, rewards, mask, **options)

    want = jax.jit(run)(rewards, values, mask, segments)
    with jax.set_mesh(mesh):
        got = jax.jit(run)(*placed)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

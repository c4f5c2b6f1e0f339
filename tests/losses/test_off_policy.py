"""Weights for samples of another policy, and decoupled PPO."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from tests.losses.common import batch, same

L = rl.losses
GAP = jnp.array([[0.0, 0.3, 1.0], [-0.5, 2.0, 9.0]])
MASK = jnp.array([[True, True, True], [True, True, False]])
ZERO = jnp.zeros_like(GAP)


def weights(gap=GAP, mask=MASK, **options):
    return L.off_policy_weights(gap, jnp.zeros_like(gap), mask, **options)


def test_levels():
    token, _ = weights(high=2.0)
    np.testing.assert_allclose(token, np.where(MASK, np.minimum(np.exp(GAP), 2.0), 0.0), rtol=1e-6)
    sequence, _ = weights(level="sequence", high=100.0)
    np.testing.assert_allclose(sequence, np.where(MASK, np.exp([[1.3], [1.5]]), 0.0), rtol=1e-5)
    geometric, _ = weights(level="geometric", high=100.0)
    np.testing.assert_allclose(
        geometric, np.where(MASK, np.exp([[1.3 / 3], [0.75]]), 0.0), rtol=1e-6
    )


def test_levels_of_packed_rows():
    gap, mask = GAP.reshape(1, 6), MASK.reshape(1, 6)
    segments = jnp.array([[0, 0, 0, 5, 5, 5]])
    for level in L.off_policy.LEVELS:
        want, found = weights(level=level, high=3.0)
        got, packed = weights(gap, mask, level=level, high=3.0, segment_ids=segments)
        same(got.reshape(2, 3), want)
        same(rl.metrics.compute(packed), rl.metrics.compute(found))


def test_metrics():
    _, found = weights(high=2.0)
    values = rl.metrics.compute(found)
    raw = np.exp(np.asarray(GAP)[np.asarray(MASK)])
    np.testing.assert_allclose(values["off_policy/logprob_diff_mean"], 3.8 / 5, rtol=1e-6)
    np.testing.assert_allclose(values["off_policy/logprob_diff_max"], 2.0)
    np.testing.assert_allclose(
        values["off_policy/ess"], raw.sum() ** 2 / (5 * (raw**2).sum()), rtol=1e-5
    )
    np.testing.assert_allclose(values["off_policy/clipped"], 2 / 5, rtol=1e-6)
    assert values["off_policy/dropped"] == 0 and values["off_policy/weight_max"] == 2.0
    _, found = weights(mode="mask", low=0.9, high=2.0)
    values = rl.metrics.compute(found)
    np.testing.assert_allclose(values["off_policy/dropped"], 3 / 5, rtol=1e-6)
    assert values["off_policy/clipped"] == 0


def test_staleness():
    found = rl.metrics.compute(L.staleness_metrics(7, jnp.array([7, 6, 4])))
    np.testing.assert_allclose(found["off_policy/staleness_mean"], 4 / 3, rtol=1e-6)
    assert found["off_policy/staleness_max"] == 3


@pytest.mark.fault(35)
def test_a_long_sequences_product_does_not_overflow():
    gap = jnp.full((2, 4000), 0.5).at[1].set(-0.5)
    mask = jnp.ones(gap.shape, bool)
    for mode in L.off_policy.MODES:
        for level in L.off_policy.LEVELS:
            got, found = weights(gap, mask, mode=mode, level=level)
            assert np.isfinite(got).all()
            assert all(np.isfinite(x) for x in rl.metrics.compute(found).values())


@pytest.mark.fault(6)
def test_poison_under_the_mask():
    want, found = weights()
    got, poisoned = weights(jnp.where(MASK, GAP, jnp.nan))
    same(got, want)
    same(rl.metrics.compute(poisoned), rl.metrics.compute(found))


@pytest.mark.fault(25)
def test_dropped_tokens_can_leave_the_denominator_too():
    data = batch(3)
    w, _ = L.off_policy_weights(
        data["old_log_probs"],
        data["sampler_log_probs"],
        data["mask"],
        mode="mask",
        low=0.7,
        high=1.4,
    )
    kept = data["mask"] & (w > 0)
    assert 0 < kept.sum() < data["mask"].sum()
    args = (data["log_probs"], data["old_log_probs"], data["advantages"])
    # As an importance-sampled mean, dropped tokens are samples of weight 0 …
    loss, _ = L.ppo_loss(*args, data["mask"], weights=w)
    total = jnp.sum(L.ppo_per_token(*args, data["mask"]) * w)
    same(loss, total / data["mask"].sum())
    # … and with the narrower mask numerator and denominator hold the same set.
    loss, _ = L.ppo_loss(*args, kept, weights=w)
    same(loss, total / kept.sum())


@pytest.mark.fault(36)
def test_mu_is_kept_from_sampling_time():
    """The sampler's log-probs are an argument of their own; the learner's do not replace them."""
    data = batch(3)
    new, prox, mu = (data[k] for k in ("log_probs", "old_log_probs", "sampler_log_probs"))
    a, mask = data["advantages"], data["mask"]
    loss, found = L.decoupled_ppo_loss(new, prox, a, mask, sampler_log_probs=mu)
    # Definition: clip around π_prox, weigh by π_prox/μ.
    ratio = jnp.exp(new - prox)
    surrogate = jnp.maximum(-ratio * a[:, None], -jnp.clip(ratio, 0.8, 1.2) * a[:, None])
    want = rl.masked.aggregate(jnp.exp(prox - mu) * surrogate, mask, "token_mean")
    same(loss, want, rtol=1e-5)
    gap = rl.masked.mean(jnp.abs(prox - mu), mask)
    np.testing.assert_allclose(found["off_policy/logprob_diff_mean"].value(), gap, rtol=1e-5)
    # Had "old" been recomputed with newer weights and passed for both, the weight would be 1 and
    # staleness would be invisible.
    _, blind = L.decoupled_ppo_loss(new, prox, a, mask, sampler_log_probs=prox)
    assert blind["off_policy/logprob_diff_max"].value() == 0.0
    assert found["off_policy/logprob_diff_max"].value() > 0.1
    # Unclipped, prox cancels: the gradient is that of π/μ, whatever prox is.
    wide = {"clip_low": 1.0, "clip_high": 1e6, "sampler_log_probs": mu}
    grads = [
        jax.grad(lambda x, p=p: L.decoupled_ppo_loss(x, p, a, mask, **wide)[0])(new)
        for p in (prox, mu, prox + 0.3)
    ]
    same(grads[0], grads[1], rtol=1e-4)
    same(grads[2], grads[1], rtol=1e-4)


def test_decoupled_ppo_is_ppo_where_prox_sampled():
    data = batch(3)
    args = (data["log_probs"], data["old_log_probs"], data["advantages"], data["mask"])
    got, _ = L.decoupled_ppo_loss(*args, sampler_log_probs=data["old_log_probs"])
    same(got, L.ppo_loss(*args)[0])
    capped, found = L.decoupled_ppo_loss(
        *args, sampler_log_probs=data["old_log_probs"] - 2.0, weight_cap=3.0
    )
    same(capped, 3.0 * got, rtol=1e-5)
    assert found["off_policy/clipped"].value() == 1.0
    # Without a cap nothing counts as clipped.
    _, found = L.decoupled_ppo_loss(*args, sampler_log_probs=data["old_log_probs"] - 2.0)
    assert found["off_policy/clipped"].value() == 0.0

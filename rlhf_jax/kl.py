"""KL divergence of the policy π from a reference: estimators, the exact sum, controllers.

With u = log π − log π_ref at tokens sampled from π, the estimators differ in what they serve:

=====================  ===============  =====================  ============================
estimator              expected value   as a loss gives        in the reward (detached) gives
=====================  ===============  =====================  ============================
``k1``                 KL(π‖ref)        0 in expectation       ∇KL(π‖ref), exactly
``k2``                 biased           ∇KL(π‖ref), exactly    another direction
``k3``                 KL(π‖ref)        ∇KL(ref‖π)             another direction
``k3_straight_through``  KL(π‖ref)      ∇KL(π‖ref), exactly    another direction
=====================  ===============  =====================  ============================

"As a loss" differentiates the estimator itself; "in the reward" subtracts its value from the
reward, and the score function does the rest: ∇E[f] = E[∇f] + E[f·∇log π]. The statements hold per
token. Sums over the tokens, not means, are what E[R] − β·KL means. If β = 0, load no reference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks, masked
from rlhf_jax._exact_kl import DIRECTIONS, exact, exact_chunked
from rlhf_jax._kl_controllers import AdaptiveKL, FixedKL

__all__ = [
    "DIRECTIONS",
    "ESTIMATORS",
    "AdaptiveKL",
    "FixedKL",
    "estimate",
    "exact",
    "exact_chunked",
    "k1",
    "k2",
    "k3",
    "k3_off_policy",
    "k3_straight_through",
    "loss_term",
    "mean_sequence_kl",
    "old_to_new",
]

# Beyond this log-ratio exp() is continued by its tangent: finite in float32, gradient of the
# right sign.
MAX_LOG_RATIO = 20.0


def _log_ratio(log_probs: ArrayLike, ref_log_probs: ArrayLike, mask: ArrayLike | None) -> jax.Array:
    x = checks.real("log_probs", log_probs)
    ref = checks.real("ref_log_probs", ref_log_probs, like=x, like_name="log_probs")
    if mask is not None:
        m = checks.boolean("mask", mask, like=x, like_name="log_probs")
        x, ref = jnp.where(m, x, 0.0), jnp.where(m, ref, 0.0)
    return x - jax.lax.stop_gradient(ref)


@jax.custom_jvp
def _k3_of(u: jax.Array) -> jax.Array:
    # expm1 keeps what exp(-u) - 1 + u cancels; past the limit follow the tangent.
    near = jnp.minimum(-u, MAX_LOG_RATIO)
    grown = jnp.expm1(near)
    return grown - near + jnp.maximum(-u - MAX_LOG_RATIO, 0.0) * grown


@_k3_of.defjvp
def _k3_jvp(primals, tangents):
    (u,), (du,) = primals, tangents
    return _k3_of(u), -jnp.expm1(jnp.minimum(-u, MAX_LOG_RATIO)) * du


def k1(
    log_probs: ArrayLike, ref_log_probs: ArrayLike, *, mask: ArrayLike | None = None
) -> jax.Array:
    """The log-ratio, per token: k₁ = u = log π − log π_ref.

    Value: unbiased for KL(π‖ref). Variance: high, k₁ takes both signs (the standard deviation is
    many times the KL when the policies are near). As a loss: 0 in expectation, so useless; see
    ``loss_term``. In the reward: exactly ∇KL(π‖ref); this is its place.

    Args:
      log_probs: floating, any shape: log π of tokens sampled from π.
      ref_log_probs: the same shape: log π_ref of the same tokens; stop-gradient.
      mask: bool of the same shape; the result is 0 off it.

    Returns:
      Array of that shape, float32 (or float64).

    Raises:
      TypeError: if a log-prob array is not floating or ``mask`` not bool.
      ValueError: if the shapes differ.

    References:
      Schulman, "Approximating KL divergence", 2020.

    Example:
      >>> float(k1(jnp.array(-1.0), jnp.array(-1.5)))
      0.5
    """
    return _log_ratio(log_probs, ref_log_probs, mask)


def k2(
    log_probs: ArrayLike, ref_log_probs: ArrayLike, *, mask: ArrayLike | None = None
) -> jax.Array:
    """Half the squared log-ratio, per token: k₂ = u²/2.

    Value: biased, by a term of third order in u. Variance: low. As a loss: exactly ∇KL(π‖ref), as
    E[u·∇log π]. In the reward: another direction, since E[k₂·∇log π] is no gradient of a KL.

    Args:
      log_probs: floating, any shape: log π of tokens sampled from π.
      ref_log_probs: the same shape: log π_ref of the same tokens; stop-gradient.
      mask: bool of the same shape; the result is 0 off it.

    Returns:
      Array of that shape, ≥ 0.

    Raises:
      TypeError: if a log-prob array is not floating or ``mask`` not bool.
      ValueError: if the shapes differ.

    References:
      Schulman, "Approximating KL divergence", 2020; Tang and Munos, "On a few pitfalls in KL
      divergence gradient estimation for RL", 2025.

    Example:
      >>> float(k2(jnp.array(-1.0), jnp.array(-1.5)))
      0.125
    """
    return 0.5 * jnp.square(_log_ratio(log_probs, ref_log_probs, mask))


def k3(
    log_probs: ArrayLike, ref_log_probs: ArrayLike, *, mask: ArrayLike | None = None
) -> jax.Array:
    """The log-ratio with a control variate, per token: k₃ = expm1(−u) + u.

    Value: unbiased for KL(π‖ref). Variance: low near the reference, heavy-tailed where π_ref ≫ π.
    As a loss: ∇KL(ref‖π), the other direction. In the reward: neither direction's gradient.
    Beyond −u = 20 the exponential is continued by its tangent, so that it stays finite.

    Args:
      log_probs: floating, any shape: log π of tokens sampled from π.
      ref_log_probs: the same shape: log π_ref of the same tokens; stop-gradient.
      mask: bool of the same shape; the result is 0 off it.

    Returns:
      Array of that shape, ≥ 0 up to rounding.

    Raises:
      TypeError: if a log-prob array is not floating or ``mask`` not bool.
      ValueError: if the shapes differ.

    References:
      Schulman, "Approximating KL divergence", 2020; Shao et al., "DeepSeekMath", 2024, eq. 4.

    Example:
      >>> round(float(k3(jnp.array(-1.0), jnp.array(-1.5))), 4)
      0.1065
    """
    return _k3_of(_log_ratio(log_probs, ref_log_probs, mask))


def k3_straight_through(
    log_probs: ArrayLike, ref_log_probs: ArrayLike, *, mask: ArrayLike | None = None
) -> jax.Array:
    """The value of k₃ with the gradient of k₂, per token: sg(k₃ − k₂) + k₂.

    Value: that of k₃, unbiased for KL(π‖ref). Variance: that of k₃ for the value, that of u·∇log π
    for the gradient. As a loss: exactly ∇KL(π‖ref). In the reward: as k₃, neither's gradient.

    Args:
      log_probs: floating, any shape: log π of tokens sampled from π.
      ref_log_probs: the same shape: log π_ref of the same tokens; stop-gradient.
      mask: bool of the same shape; the result is 0 off it.

    Returns:
      Array of that shape.

    Raises:
      TypeError: if a log-prob array is not floating or ``mask`` not bool.
      ValueError: if the shapes differ.

    References:
      Schulman, "Approximating KL divergence", 2020, for the value; Tang and Munos, "On a few
      pitfalls in KL divergence gradient estimation for RL", 2025, for the gradient.

    Example:
      >>> float(jax.grad(k3_straight_through)(-1.0, -1.5))
      0.5
    """
    u = _log_ratio(log_probs, ref_log_probs, mask)
    square = 0.5 * jnp.square(u)
    value = jax.lax.stop_gradient(_k3_of(u))
    return value + (square - jax.lax.stop_gradient(square))


def k3_off_policy(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    ref_log_probs: ArrayLike,
    *,
    mask: ArrayLike | None = None,
) -> jax.Array:
    """k₃ of tokens that another policy sampled, per token: ρ·k₃, ρ = π/π_old, gradient through ρ.

    Value: E over π_old of ρ·k₃ = KL(π‖ref), unbiased. Variance: grows with that of ρ. As a loss:
    exactly ∇KL(π‖ref), because ρ is differentiated too (with ρ detached it would be ∇KL(ref‖π)).
    In the reward: neither direction's gradient. log ρ is clamped to ±20 before the exponential.

    Args:
      log_probs: floating, any shape: log π.
      old_log_probs: the same shape: log-prob under the policy that sampled; stop-gradient.
      ref_log_probs: the same shape: log π_ref; stop-gradient.
      mask: bool of the same shape; the result is 0 off it.

    Returns:
      Array of that shape.

    Raises:
      TypeError: if a log-prob array is not floating or ``mask`` not bool.
      ValueError: if the shapes differ.

    References:
      DeepSeek-AI, "DeepSeek-V3.2", 2025, on the unbiased KL estimate.

    Example:
      >>> float(k3_off_policy(jnp.array(-1.0), jnp.array(-1.0), jnp.array(-1.0)))
      0.0
    """
    x = checks.real("log_probs", log_probs)
    old = checks.real("old_log_probs", old_log_probs, like=x, like_name="log_probs")
    log_rho = jnp.clip(_log_ratio(x, old, mask), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.exp(log_rho) * k3(x, ref_log_probs, mask=mask)


ESTIMATORS: dict[str, Callable[..., jax.Array]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_straight_through": k3_straight_through,
}


def estimate(
    name: str,
    log_probs: ArrayLike,
    ref_log_probs: ArrayLike,
    *,
    mask: ArrayLike | None = None,
) -> jax.Array:
    """Evaluate an estimator by name, per token.

    Value, variance and gradients are those of the function of that name. For a term of a loss use
    ``loss_term``, which warns where the gradient would vanish.

    Args:
      name: one of ``ESTIMATORS``.
      log_probs: floating, any shape: log π of tokens sampled from π.
      ref_log_probs: the same shape: log π_ref; stop-gradient.
      mask: bool of the same shape; the result is 0 off it.

    Returns:
      Array of that shape.

    Raises:
      TypeError: if a log-prob array is not floating or ``mask`` not bool.
      ValueError: if the name is unknown or the shapes differ.

    Example:
      >>> float(estimate("k2", jnp.array(-1.0), jnp.array(-1.5)))
      0.125
    """
    checks.one_of("estimator", name, tuple(ESTIMATORS))
    return ESTIMATORS[name](log_probs, ref_log_probs, mask=mask)


def loss_term(
    name: str,
    log_probs: ArrayLike,
    ref_log_probs: ArrayLike,
    *,
    mask: ArrayLike | None = None,
) -> jax.Array:
    """The KL term of a differentiated loss, per token, before β and the aggregation.

    As a loss: ``k2`` and ``k3_straight_through`` give ∇KL(π‖ref), ``k3`` gives ∇KL(ref‖π), ``k1``
    gives 0 in expectation and therefore warns. Value and variance are the estimator's.

    Args:
      name: one of ``ESTIMATORS``.
      log_probs: floating, any shape: log π of tokens sampled from π.
      ref_log_probs: the same shape: log π_ref; stop-gradient.
      mask: bool of the same shape; the result is 0 off it.

    Returns:
      Array of that shape.

    Raises:
      TypeError: if a log-prob array is not floating or ``mask`` not bool.
      ValueError: if the name is unknown or the shapes differ.

    Example:
      >>> float(jax.grad(lambda x: loss_term("k2", x, -1.5))(-1.0))
      0.5
    """
    if name == "k1":
        warnings.warn(
            "kl estimator 'k1' in a differentiated loss has zero gradient in expectation: it does "
            "not hold the policy at the reference. Use 'k2', 'k3' or 'k3_straight_through' in the "
            "loss, or put k1 in the reward (rewards.shaping.kl_in_reward).",
            UserWarning,
            stacklevel=2,
        )
    return estimate(name, log_probs, ref_log_probs, mask=mask)


def old_to_new(
    name: str,
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    *,
    mask: ArrayLike | None = None,
) -> jax.Array:
    """The dashboard's KL(π_old‖π), per token, where **π_old sampled**: −d, d²/2 or expm1(d) − d.

    d = log π − log π_old. The sign is opposite to that of the reference KL, where π samples. Value:
    k1 and k3 unbiased, k2 biased; variance: k1's is the highest. No gradient: this is for logging.

    Args:
      name: ``"k1"``, ``"k2"`` or ``"k3"``.
      log_probs: floating, any shape: log π, the updated policy; stop-gradient.
      old_log_probs: the same shape: log π_old, the policy that sampled; stop-gradient.
      mask: bool of the same shape; the result is 0 off it.

    Returns:
      Array of that shape.

    Raises:
      TypeError: if a log-prob array is not floating or ``mask`` not bool.
      ValueError: if the name is unknown or the shapes differ.

    References:
      Schulman, "Approximating KL divergence", 2020, with the roles of the policies exchanged.

    Example:
      >>> round(float(old_to_new("k1", jnp.array(-1.0), jnp.array(-1.1))), 4)
      -0.1
    """
    checks.one_of("estimator", name, ("k1", "k2", "k3"))
    x = checks.real("log_probs", log_probs)
    old = checks.real("old_log_probs", old_log_probs, like=x, like_name="log_probs")
    return jax.lax.stop_gradient(estimate(name, old, x, mask=mask))


def mean_sequence_kl(
    log_probs: ArrayLike,
    ref_log_probs: ArrayLike,
    mask: ArrayLike,
    *,
    estimator: str = "k1",
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """Mean over the sequences of the estimator's sum over tokens: what a controller steers by.

    Value and variance are the estimator's, summed; no gradient.

    Args:
      log_probs: floating [B, T]: log π of tokens sampled from π; stop-gradient.
      ref_log_probs: floating [B, T]: log π_ref; stop-gradient.
      mask: bool [B, T].
      estimator: one of ``ESTIMATORS``.
      segment_ids: int [B, T] for packed rows.

    Returns:
      A scalar; sequences without a valid token do not count.

    Raises:
      TypeError: if a log-prob array is not floating or ``mask`` not bool.
      ValueError: if the estimator is unknown or the shapes differ.

    Example:
      >>> lp, ref = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.5, -2.0]])
      >>> float(mean_sequence_kl(lp, ref, jnp.ones((1, 2), bool)))
      1.5
    """
    values = estimate(estimator, log_probs, ref_log_probs, mask=mask)
    return jax.lax.stop_gradient(
        masked.aggregate(values, mask, "seq_mean_token_sum", segment_ids=segment_ids)
    )

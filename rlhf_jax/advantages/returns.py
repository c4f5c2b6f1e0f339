"""Returns over valid tokens: Monte Carlo, and V-trace for tokens of an older policy."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks
from rlhf_jax.advantages._rows import backward_recurrence, per_token
from rlhf_jax.advantages.gae import _next_values
from rlhf_jax.masked import last_valid


def monte_carlo_returns(
    rewards: ArrayLike,
    mask: ArrayLike,
    *,
    gamma: float | jax.Array = 1.0,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """Discounted rewards to go, over valid tokens: G_t = r_t + γ·G_t', t' the next valid token.

    Args:
      rewards: floating [B, T], per token; stop-gradient.
      mask: bool [B, T], the valid tokens.
      gamma: γ in [0, 1].
      segment_ids: int [B, T] for packed rows.

    Returns:
      [B, T], float32 (or float64), 0 off the mask.

    Raises:
      TypeError: if rewards are not floating or ``mask`` not bool.
      ValueError: if shapes do not fit or γ is outside [0, 1].

    References:
      Sutton and Barto, "Reinforcement learning", 2nd ed., 2018, eq. 3.8.

    Example:
      >>> monte_carlo_returns(jnp.array([[0.0, 1.0]]), jnp.ones((1, 2), bool), gamma=0.5).tolist()
      [[0.5, 1.0]]
    """
    checks.number("gamma", gamma, at_least=0.0, at_most=1.0, remedy="γ is a discount.")
    rewards = jax.lax.stop_gradient(checks.real("rewards", rewards, ndim=2, axes="[B, T]"))
    mask = checks.boolean("mask", mask, like=rewards, like_name="rewards")
    decay = jnp.where(last_valid(mask, segment_ids), 0.0, jnp.asarray(gamma, rewards.dtype))
    return backward_recurrence(decay, jnp.where(mask, rewards, 0.0), mask)


class VTrace(NamedTuple):
    """Value targets and policy advantages, [B, T], 0 off the mask."""

    targets: jax.Array
    advantages: jax.Array


def vtrace(
    rewards: ArrayLike,
    values: ArrayLike,
    log_ratios: ArrayLike,
    mask: ArrayLike,
    *,
    gamma: float | jax.Array = 1.0,
    rho_bar: float | jax.Array = 1.0,
    c_bar: float | jax.Array = 1.0,
    bootstrap_value: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> VTrace:
    """V-trace: v_t = V_t + δ_t + γc_t(v_t' − V_t'), δ_t = ρ_t(r_t + γV_t' − V_t).

    ρ = min(π/μ, ρ̄), c = min(π/μ, c̄), t' the next valid token; A_t = ρ_t(r_t + γv_t' − V_t). On
    policy, with both caps ≥ 1, the targets are the Monte Carlo returns.

    Args:
      rewards: floating [B, T], per token.
      values: floating [B, T], V before the token is emitted.
      log_ratios: floating [B, T], log π − log μ; capped before the exponential.
      mask: bool [B, T], the valid tokens.
      gamma: γ in [0, 1].
      rho_bar: ρ̄ > 0, sets which policy's value the targets approach.
      c_bar: c̄ > 0, how far corrections travel back.
      bootstrap_value: floating [B] (packed rows: [B, T], read at last tokens), the value after the
        last token; 0 by default.
      segment_ids: int [B, T] for packed rows.

    Returns:
      ``VTrace(targets, advantages)``, [B, T]; all inputs are stop-gradient.

    Raises:
      TypeError: if an array is not floating or ``mask`` not bool.
      ValueError: if shapes do not fit, γ is outside [0, 1], or a cap is not positive.

    References:
      Espeholt et al., "IMPALA", 2018, eq. 1 and §4.2.

    Example:
      >>> r, v, on = jnp.array([[0.0, 1.0]]), jnp.array([[0.25, 0.5]]), jnp.ones((1, 2), bool)
      >>> out = vtrace(r, v, jnp.zeros((1, 2)), on)
      >>> out.targets.tolist(), out.advantages.tolist()
      ([[1.0, 1.0]], [[0.75, 0.5]])
    """
    checks.number("gamma", gamma, at_least=0.0, at_most=1.0, remedy="γ is a discount.")
    checks.positive("rho_bar", rho_bar)
    checks.positive("c_bar", c_bar)
    rewards = checks.real("rewards", rewards, ndim=2, axes="[B, T]")
    mask = checks.boolean("mask", mask, like=rewards, like_name="rewards")

    def clean(name, x):
        array = checks.real(name, x, like=mask, like_name="rewards")
        return jnp.where(mask, jax.lax.stop_gradient(array), 0.0)

    rewards, values = clean("rewards", rewards), clean("values", values)
    log_ratios = clean("log_ratios", log_ratios)
    rho = jnp.exp(jnp.minimum(log_ratios, jnp.log(rho_bar)))
    c = jnp.exp(jnp.minimum(log_ratios, jnp.log(c_bar)))
    last = last_valid(mask, segment_ids)
    after = jnp.zeros_like(values)
    if bootstrap_value is not None:
        after = per_token("bootstrap_value", bootstrap_value, mask, checks.real)
        after = jax.lax.stop_gradient(jnp.where(last, after, 0.0))
    delta = rho * (rewards + gamma * _next_values(values, mask, last, after) - values)
    excess = backward_recurrence(jnp.where(last, 0.0, gamma * c), delta, mask)
    targets = jnp.where(mask, values + excess, 0.0)
    step = rewards + gamma * _next_values(targets, mask, last, after) - values
    return VTrace(targets, jnp.where(mask, rho * step, 0.0))

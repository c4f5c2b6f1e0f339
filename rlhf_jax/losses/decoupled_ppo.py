"""Decoupled PPO: clip around a proximal policy, correct for the one that sampled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks
from rlhf_jax.losses import _common
from rlhf_jax.losses.off_policy import off_policy_weights
from rlhf_jax.losses.ppo import ppo_loss, ppo_per_token
from rlhf_jax.metrics import Metrics

__all__ = ["decoupled_ppo_loss", "decoupled_ppo_per_token"]


def _behaviour_weight(prox, sampler, mask, weight_cap) -> tuple[jax.Array, Metrics]:
    """sg(π_prox/μ) and its metrics; without a cap only the clamp of the log-ratio bounds it."""
    if weight_cap is not None:
        checks.positive("weight_cap", weight_cap, remedy="None leaves the weight unbounded.")
    return off_policy_weights(
        prox,
        sampler,
        mask,
        high=jnp.inf if weight_cap is None else weight_cap,
        log_clamp=_common.MAX_LOG_RATIO,
    )


def decoupled_ppo_per_token(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    sampler_log_probs: ArrayLike,
    clip_low: float | jax.Array = 0.2,
    clip_high: float | jax.Array = 0.2,
    weight_cap: float | jax.Array | None = None,
) -> jax.Array:
    """Clipped surrogate around the proximal policy, times the behaviour weight.

    ``ℓ = sg(π_prox/μ)·max(−rA, −clip(r, 1−ε_lo, 1+ε_hi)·A)`` with ``r = π/π_prox``.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_prox, the policy whose neighbourhood is trusted (the
        weights at the start of this update); stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``; stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.
      sampler_log_probs: float ``[B, T]``, log μ kept from sampling time; stop-gradient.
      clip_low: ε_lo > 0.
      clip_high: ε_hi > 0.
      weight_cap: > 0, bound of π_prox/μ; None for none.

    Returns:
      float32 ``[B, T]``. Equal to PPO's where π_prox = μ.

    Raises:
      ValueError: shapes that do not fit, ε ≤ 0, a cap ≤ 0; TypeError: wrong dtypes.

    References:
      Hilton, Cobbe, Schulman, "Batch size-invariance for policy optimization", 2022, eq. 3; Fu et
      al., "AReaL", 2025, eq. 5.

    Example:
      >>> import jax.numpy as jnp
      >>> x, mu = jnp.array([[-1.0]]), jnp.array([[-1.5]])
      >>> one = jnp.ones((1, 1), bool)
      >>> print(decoupled_ppo_per_token(x, x, jnp.ones(1), one, sampler_log_probs=mu).round(4))
      [[-1.6487]]
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    losses = ppo_per_token(*inputs, clip_low=clip_low, clip_high=clip_high)
    weight, _ = _behaviour_weight(inputs.old_log_probs, sampler_log_probs, inputs.mask, weight_cap)
    return weight * losses


def decoupled_ppo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    sampler_log_probs: ArrayLike,
    clip_low: float | jax.Array = 0.2,
    clip_high: float | jax.Array = 0.2,
    weight_cap: float | jax.Array | None = None,
    aggregation: str = "token_mean",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """Decoupled PPO's loss: :func:`decoupled_ppo_per_token`, aggregated.

    ``L = Σ w·sg(π_prox/μ)·ℓ_clip / D``.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_prox; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``; stop-gradient.
      mask: bool ``[B, T]``, sampled tokens.
      sampler_log_probs: float ``[B, T]``, log μ kept from sampling time; stop-gradient.
      clip_low: ε_lo > 0.
      clip_high: ε_hi > 0.
      weight_cap: > 0 or None.
      aggregation: one of ``masked.AGGREGATIONS``.
      denominator: D of the global batch (``masked.denominator``); counted here if None.
      length: int, for ``fixed_length``.
      group_ids: int ``[B]``, for ``prompt_mean``.
      segment_ids: int ``[B, T]``, for packed rows.
      weights: float ``[B]`` or ``[B, T]``, off-policy weights; stop-gradient.

    Returns:
      The scalar loss and its metrics, those of ``off_policy_weights`` included.

    Raises:
      ValueError, TypeError: as :func:`decoupled_ppo_per_token` and ``masked.aggregate``.

    References:
      Hilton, Cobbe, Schulman, "Batch size-invariance for policy optimization", 2022, eq. 3.

    Example:
      >>> import jax.numpy as jnp
      >>> x, one = jnp.array([[-1.0]]), jnp.ones((1, 1), bool)
      >>> loss, _ = decoupled_ppo_loss(x, x, jnp.ones(1), one, sampler_log_probs=x)
      >>> float(loss)
      -1.0
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    behaviour, off_policy = _behaviour_weight(
        inputs.old_log_probs, sampler_log_probs, inputs.mask, weight_cap
    )
    if weights is not None:
        behaviour = behaviour * _common.per_token("weights", weights, inputs.mask, rows=True)
    loss, found = ppo_loss(
        *inputs,
        clip_low=clip_low,
        clip_high=clip_high,
        aggregation=aggregation,
        denominator=denominator,
        length=length,
        group_ids=group_ids,
        segment_ids=segment_ids,
        weights=behaviour,
    )
    return loss, {**found, **off_policy}

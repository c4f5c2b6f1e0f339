"""Dr. GRPO: no standard deviation, no length in the denominator."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from rlhf_jax.losses.ppo import ppo_loss, ppo_per_token
from rlhf_jax.metrics import Metrics

__all__ = ["dr_grpo_loss", "dr_grpo_per_token"]


def dr_grpo_per_token(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 0.2,
    clip_high: float | jax.Array = 0.2,
) -> jax.Array:
    """Clipped surrogate of every token.

    ``ℓ = max(−ρA, −clip(ρ, 1−ε_lo, 1+ε_hi)·A)``, as PPO's.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``, R − group mean (``advantages.centered``);
        stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.
      clip_low: ε_lo > 0.
      clip_high: ε_hi > 0.

    Returns:
      float32 ``[B, T]``.

    Raises:
      ValueError: shapes that do not fit, ε ≤ 0; TypeError: wrong dtypes.

    References:
      Liu et al., "Understanding R1-Zero-like training: a critical perspective", 2025.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0]])
      >>> dr_grpo_per_token(x, x, jnp.array([2.0]), jnp.ones((1, 2), bool)).tolist()
      [[-2.0, -2.0]]
    """
    return ppo_per_token(
        log_probs, old_log_probs, advantages, mask, clip_low=clip_low, clip_high=clip_high
    )


def dr_grpo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 0.2,
    clip_high: float | jax.Array = 0.2,
    aggregation: str = "fixed_length",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """Dr. GRPO's loss: token sums divided by a constant length, averaged over rows.

    ``L = Σ w·ℓ / (rows·L)``. Neither the length of a completion nor the spread of its group changes
    the size of a gradient. Pass ``length=`` (L, say the longest completion allowed), or a
    ``denominator``.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``, R − group mean (``advantages.centered``);
        stop-gradient.
      mask: bool ``[B, T]``, sampled tokens.
      clip_low: ε_lo > 0.
      clip_high: ε_hi > 0.
      aggregation: one of ``masked.AGGREGATIONS``.
      denominator: D of the global batch (``masked.denominator``); counted here if None.
      length: int, for ``fixed_length``.
      group_ids: int ``[B]``, for ``prompt_mean``.
      segment_ids: int ``[B, T]``, for packed rows.
      weights: float ``[B]`` or ``[B, T]``, off-policy weights; stop-gradient.

    Returns:
      The scalar loss and its metrics.

    Raises:
      ValueError, TypeError: as :func:`dr_grpo_per_token` and ``masked.aggregate``.

    References:
      Liu et al., "Understanding R1-Zero-like training: a critical perspective", 2025.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0]])
      >>> float(dr_grpo_loss(x, x, jnp.array([2.0]), jnp.ones((1, 2), bool), length=4)[0])
      -1.0
    """
    return ppo_loss(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        aggregation=aggregation,
        denominator=denominator,
        length=length,
        group_ids=group_ids,
        segment_ids=segment_ids,
        weights=weights,
    )

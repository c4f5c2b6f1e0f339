"""DAPO: clip-higher and one mean over the tokens of the whole batch."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from rlhf_jax.losses.ppo import ppo_loss, ppo_per_token
from rlhf_jax.metrics import Metrics

__all__ = ["dapo_loss", "dapo_per_token"]


def dapo_per_token(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 0.2,
    clip_high: float | jax.Array = 0.28,
) -> jax.Array:
    """Clipped surrogate of every token.

    ``ℓ = max(−ρA, −clip(ρ, 1−ε_lo, 1+ε_hi)·A)``, as PPO's.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]`` (``advantages.group_normalized``); stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.
      clip_low: ε_lo > 0.
      clip_high: ε_hi > 0.

    Returns:
      float32 ``[B, T]``.

    Raises:
      ValueError: shapes that do not fit, ε ≤ 0; TypeError: wrong dtypes.

    References:
      Yu et al., "DAPO: an open-source LLM reinforcement learning system at scale", 2025,
      eq. 8 and 12.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0]])
      >>> dapo_per_token(x, x, jnp.array([2.0]), jnp.ones((1, 2), bool)).tolist()
      [[-2.0, -2.0]]
    """
    return ppo_per_token(
        log_probs, old_log_probs, advantages, mask, clip_low=clip_low, clip_high=clip_high
    )


def dapo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 0.2,
    clip_high: float | jax.Array = 0.28,
    aggregation: str = "token_mean",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """DAPO's loss: the asymmetric clip, averaged over all tokens of the global batch.

    ``L = Σ w·ℓ / Σ m``. The rest of the method acts before the loss: groups with equal rewards are
    dropped and sampled anew, and overlong completions are penalised (``rewards.shaping``) or
    filtered. Drop rows by their mask *before* counting a ``denominator``.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]`` (``advantages.group_normalized``); stop-gradient.
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
      ValueError, TypeError: as :func:`dapo_per_token` and ``masked.aggregate``.

    References:
      Yu et al., "DAPO: an open-source LLM reinforcement learning system at scale", 2025,
      eq. 8 and 12.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0]])
      >>> float(dapo_loss(x, x, jnp.array([2.0]), jnp.ones((1, 2), bool))[0])
      -2.0
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

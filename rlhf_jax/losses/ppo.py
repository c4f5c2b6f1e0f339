"""Proximal policy optimisation: the clipped surrogate, per token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks, metrics
from rlhf_jax.losses import _common
from rlhf_jax.metrics import Metrics

__all__ = ["ppo_loss", "ppo_per_token"]


def ppo_per_token(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 0.2,
    clip_high: float | jax.Array = 0.2,
    dual_clip: float | jax.Array | None = None,
) -> jax.Array:
    """Clipped surrogate of every token.

    ``ℓ = max(−ρA, −clip(ρ, 1−ε_lo, 1+ε_hi)·A)`` with ``ρ = π/π_old``; with a dual clip c and
    ``A < 0``: ``min(ℓ, −c·A)``.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``; stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.
      clip_low: ε_lo > 0.
      clip_high: ε_hi > 0.
      dual_clip: c > 1, bounds the loss where A < 0 and ρ is large; None turns it off.

    Returns:
      float32 ``[B, T]``. log ρ is clamped to ±20.

    Raises:
      ValueError: shapes that do not fit, ε ≤ 0 or c ≤ 1; TypeError: wrong dtypes.

    References:
      Schulman et al., "Proximal policy optimization algorithms", 2017, eq. 7; Ye et al., "Mastering
      complex control in MOBA games with deep reinforcement learning", 2020, eq. 5 (dual clip).

    Example:
      >>> import jax.numpy as jnp
      >>> old = jnp.zeros((1, 2))
      >>> new = jnp.log(jnp.array([[1.1, 1.5]]))
      >>> print(ppo_per_token(new, old, jnp.ones(1), jnp.ones((1, 2), bool)).round(3))
      [[-1.1 -1.2]]
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    losses = _common.clipped_surrogate(inputs.log_ratio, inputs.advantages, clip_low, clip_high)
    if dual_clip is None:
        return losses
    checks.number("dual_clip", dual_clip, above=1.0, remedy="Usual is 3.0; None turns it off.")
    bound = -dual_clip * inputs.advantages
    return jnp.where((inputs.advantages < 0) & (losses > bound), bound, losses)


def ppo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 0.2,
    clip_high: float | jax.Array = 0.2,
    dual_clip: float | jax.Array | None = None,
    aggregation: str = "token_mean",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """PPO's policy loss: :func:`ppo_per_token`, aggregated.

    ``L = Σ w·ℓ / D``. Value loss and entropy bonus are functions of their own; add them.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``; stop-gradient.
      mask: bool ``[B, T]``, sampled tokens.
      clip_low: ε_lo > 0.
      clip_high: ε_hi > 0.
      dual_clip: c > 1 or None.
      aggregation: one of ``masked.AGGREGATIONS``.
      denominator: D of the global batch (``masked.denominator``); counted here if None.
      length: int, for ``fixed_length``.
      group_ids: int ``[B]``, for ``prompt_mean``.
      segment_ids: int ``[B, T]``, for packed rows.
      weights: float ``[B]`` or ``[B, T]``, off-policy weights; stop-gradient.

    Returns:
      The scalar loss and its metrics.

    Raises:
      ValueError, TypeError: as :func:`ppo_per_token` and ``masked.aggregate``.

    References:
      Schulman et al., "Proximal policy optimization algorithms", 2017, eq. 7.

    Example:
      >>> import jax.numpy as jnp
      >>> new, old = jnp.log(jnp.array([[1.1, 1.5]])), jnp.zeros((1, 2))
      >>> loss, found = ppo_loss(new, old, jnp.ones(1), jnp.ones((1, 2), bool))
      >>> round(float(loss), 4), float(found["policy/clip_high"].value())
      (-1.15, 0.5)
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    losses = ppo_per_token(*inputs, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    loss = _common.reduce(
        losses,
        inputs.mask,
        weights,
        aggregation,
        denominator=denominator,
        length=length,
        group_ids=group_ids,
        segment_ids=segment_ids,
    )
    log_ratio, low, high = inputs.log_ratio, 1.0 - clip_low, 1.0 + clip_high
    found = {
        **_common.policy_metrics(inputs, loss),
        **_common.ratio_metrics(log_ratio, inputs.mask),
        **_common.clip_metrics(log_ratio, inputs.advantages, inputs.mask, low, high),
    }
    if dual_clip is not None:
        cut = (inputs.advantages < 0) & (jnp.exp(log_ratio) > dual_clip)
        found["policy/dual_clip"] = metrics.mean(cut, inputs.mask)
    return loss, found

"""CISPO: the ratio is a clipped, detached weight; every token keeps its gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks
from rlhf_jax.losses import _common
from rlhf_jax.metrics import Metrics

__all__ = ["cispo_loss", "cispo_per_token"]


def _bounds(clip_low, clip_high, cap):
    """Lower and upper bound of the weight; 0 and ∞ where there is none."""
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high), ("cap", cap)):
        if value is not None:
            checks.positive(name, value, remedy="None turns this bound off.")
    low = 0.0 if clip_low is None else jnp.maximum(1.0 - clip_low, 0.0)
    high = jnp.inf if clip_high is None else 1.0 + clip_high
    return low, high if cap is None else jnp.minimum(high, cap)


def cispo_per_token(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array | None = 0.2,
    clip_high: float | jax.Array | None = 0.28,
    cap: float | jax.Array | None = None,
) -> jax.Array:
    """Score-function loss of every token, weighted by the clipped ratio.

    ``ℓ = −sg(min(clip(ρ, 1−ε_lo, 1+ε_hi), C))·A·log π``: the clip bounds the weight, it never
    removes a token's gradient.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``; stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.
      clip_low: ε_lo > 0, relative to 1; None for no lower bound.
      clip_high: ε_hi > 0, relative to 1; None for no relative upper bound.
      cap: C > 0, an absolute upper bound of ρ, such as 5; None for none.

    Returns:
      float32 ``[B, T]``.

    Raises:
      ValueError: shapes that do not fit, a bound ≤ 0; TypeError: wrong dtypes.

    References:
      MiniMax, "MiniMax-M1", 2025, eq. 4 and 5; Khatri et al., "The art of scaling reinforcement
      learning compute for LLMs", 2025 (the absolute cap).

    Example:
      >>> import jax.numpy as jnp
      >>> old = jnp.array([[-1.0, -3.0]])
      >>> new = jnp.array([[-1.0, -2.0]])
      >>> print(cispo_per_token(new, old, jnp.ones(1), jnp.ones((1, 2), bool)).round(2))
      [[1.   2.56]]
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    low, high = _bounds(clip_low, clip_high, cap)
    weight = jax.lax.stop_gradient(jnp.clip(jnp.exp(inputs.log_ratio), low, high))
    return -weight * inputs.advantages * inputs.log_probs


def cispo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array | None = 0.2,
    clip_high: float | jax.Array | None = 0.28,
    cap: float | jax.Array | None = None,
    aggregation: str = "token_mean",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """CISPO's loss: :func:`cispo_per_token`, averaged over the tokens of the batch.

    ``L = −Σ sg(clip(ρ))·A·log π / Σ m``.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``; stop-gradient.
      mask: bool ``[B, T]``, sampled tokens.
      clip_low: ε_lo > 0 or None.
      clip_high: ε_hi > 0 or None.
      cap: C > 0 or None. For an absolute cap alone: ``clip_low=None, clip_high=None, cap=5.0``.
      aggregation: one of ``masked.AGGREGATIONS``.
      denominator: D of the global batch (``masked.denominator``); counted here if None.
      length: int, for ``fixed_length``.
      group_ids: int ``[B]``, for ``prompt_mean``.
      segment_ids: int ``[B, T]``, for packed rows.
      weights: float ``[B]`` or ``[B, T]``, off-policy weights; stop-gradient.

    Returns:
      The scalar loss and its metrics. A weight is never inactive, so ``policy/clip_low`` and
      ``policy/clip_high`` are the shares of weights at their bounds, for either sign of A.

    Raises:
      ValueError, TypeError: as :func:`cispo_per_token` and ``masked.aggregate``.

    References:
      MiniMax, "MiniMax-M1", 2025, eq. 4.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0]])
      >>> float(cispo_loss(x, x, jnp.ones(1), jnp.ones((1, 2), bool))[0])
      1.5
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    losses = cispo_per_token(*inputs, clip_low=clip_low, clip_high=clip_high, cap=cap)
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
    low, high = _bounds(clip_low, clip_high, cap)
    found = {
        **_common.policy_metrics(inputs, loss),
        **_common.ratio_metrics(inputs.log_ratio, inputs.mask),
        **_common.bound_metrics(inputs.log_ratio, inputs.mask, low, high),
    }
    return loss, found

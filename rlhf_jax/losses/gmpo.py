"""GMPO: the geometric mean of clipped token ratios."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks, masked
from rlhf_jax.losses import _common
from rlhf_jax.metrics import Metrics

__all__ = ["gmpo_loss", "gmpo_per_token"]


def _geometric(inputs, clip_low, clip_high, segment_ids) -> jax.Array:
    """log of the geometric mean of the pessimistically clipped ratios, on each token."""
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        checks.positive(name, value, remedy="It bounds log ρ; 0.4 keeps ρ in (e^-0.4, e^0.4).")
    log_ratio = inputs.log_ratio
    upper, lower = jnp.minimum(log_ratio, clip_high), jnp.maximum(log_ratio, -clip_low)
    return masked.sequence_mean(
        jnp.where(inputs.advantages > 0, upper, lower), inputs.mask, segment_ids
    )


def gmpo_per_token(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 0.4,
    clip_high: float | jax.Array = 0.4,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """The sequence's geometric surrogate, repeated on each of its tokens.

    ``ℓ = −A·exp(mean_t c_t)``, ``c_t = min(log ρ_t, ε_hi)`` where A > 0, else
    ``max(log ρ_t, −ε_lo)``. Each token holds the whole sequence's value: reduce with
    ``seq_mean_token_mean``.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` (or ``[B, T]``, equal within a sequence); stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.
      clip_low: ε_lo > 0, a bound of **log** ρ.
      clip_high: ε_hi > 0, a bound of **log** ρ.
      segment_ids: int ``[B, T]``, for packed rows.

    Returns:
      float32 ``[B, T]``.

    Raises:
      ValueError: shapes that do not fit, ε ≤ 0; TypeError: wrong dtypes.

    References:
      Zhao et al., "Geometric-mean policy optimization", 2025, eq. 4.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0]])
      >>> gmpo_per_token(x, x, jnp.ones(1), jnp.ones((1, 2), bool)).tolist()
      [[-1.0, -1.0]]
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    log_mean = _geometric(inputs, clip_low, clip_high, segment_ids)
    return -inputs.advantages * jnp.exp(log_mean)


def gmpo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 0.4,
    clip_high: float | jax.Array = 0.4,
    aggregation: str = "seq_mean_token_mean",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """GMPO's loss: one geometric surrogate a sequence, averaged over sequences.

    ``L = −(1/N)·Σ_i A_i·(Π_t clip(ρ_t))^(1/|y_i|)``.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` (or ``[B, T]``, equal within a sequence); stop-gradient.
      mask: bool ``[B, T]``, sampled tokens.
      clip_low: ε_lo > 0, a bound of **log** ρ.
      clip_high: ε_hi > 0, a bound of **log** ρ.
      aggregation: one of ``masked.AGGREGATIONS``.
      denominator: D of the global batch (``masked.denominator``); counted here if None.
      length: int, for ``fixed_length``.
      group_ids: int ``[B]``, for ``prompt_mean``.
      segment_ids: int ``[B, T]``, for packed rows.
      weights: float ``[B]`` or ``[B, T]``, off-policy weights; stop-gradient.

    Returns:
      The scalar loss and its metrics; ratios and clip shares are per token.

    Raises:
      ValueError, TypeError: as :func:`gmpo_per_token` and ``masked.aggregate``.

    References:
      Zhao et al., "Geometric-mean policy optimization", 2025, eq. 4.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0]])
      >>> float(gmpo_loss(x, x, jnp.ones(1), jnp.ones((1, 2), bool))[0])
      -1.0
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    losses = gmpo_per_token(
        *inputs, clip_low=clip_low, clip_high=clip_high, segment_ids=segment_ids
    )
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
    log_ratio, low, high = inputs.log_ratio, jnp.exp(-clip_low), jnp.exp(clip_high)
    found = {
        **_common.policy_metrics(inputs, loss),
        **_common.ratio_metrics(log_ratio, inputs.mask),
        **_common.clip_metrics(log_ratio, inputs.advantages, inputs.mask, low, high),
    }
    return loss, found

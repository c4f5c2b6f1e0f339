"""Group sequence policy optimisation: one length-normalised ratio a sequence."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from rlhf_jax import masked
from rlhf_jax.losses import _common
from rlhf_jax.metrics import Metrics

__all__ = ["gspo_loss", "gspo_per_token", "gspo_token_loss", "gspo_token_per_token"]


def _sequence_log_ratio(inputs: _common.Inputs, segment_ids: ArrayLike | None) -> jax.Array:
    difference = inputs.log_probs - inputs.old_log_probs
    return _common.clamp(masked.sequence_mean(difference, inputs.mask, segment_ids))


def _token_log_ratio(inputs: _common.Inputs, segment_ids: ArrayLike | None) -> jax.Array:
    detached = jax.lax.stop_gradient(_sequence_log_ratio(inputs, segment_ids))
    return detached + inputs.log_probs - jax.lax.stop_gradient(inputs.log_probs)


def gspo_per_token(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 3e-4,
    clip_high: float | jax.Array = 4e-4,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """The sequence's clipped surrogate, repeated on each of its tokens.

    ``ℓ_t = max(−sA, −clip(s, 1−ε_lo, 1+ε_hi)·A)`` with ``s = exp(mean_t(log π − log π_old))``, the
    mean over the valid tokens of the *sequence* (not of a packed row). Each token holds the whole
    sequence's value: reduce with ``seq_mean_token_mean``; a token sum would multiply by the length.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` (or ``[B, T]``, equal within a sequence); stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.
      clip_low: ε_lo > 0.
      clip_high: ε_hi > 0.
      segment_ids: int ``[B, T]``, for packed rows.

    Returns:
      float32 ``[B, T]``.

    Raises:
      ValueError: shapes that do not fit, ε ≤ 0; TypeError: wrong dtypes.

    References:
      Zheng et al., "Group sequence policy optimization", 2025, eq. 5 and 7.

    Example:
      >>> import jax.numpy as jnp
      >>> new, old = jnp.array([[-1.0, -1.2]]), jnp.array([[-1.1, -1.1]])
      >>> print(gspo_per_token(new, old, jnp.ones(1), jnp.ones((1, 2), bool)).round(4))
      [[-1. -1.]]
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    log_ratio = _sequence_log_ratio(inputs, segment_ids)
    return _common.clipped_surrogate(log_ratio, inputs.advantages, clip_low, clip_high)


def gspo_token_per_token(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 3e-4,
    clip_high: float | jax.Array = 4e-4,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """The token form: the sequence's ratio as value, each token's own gradient.

    ``ℓ_t = max(−s_t·A_t, −clip(s_t)·A_t)`` with ``log s_t = sg(log s) + log π_t − sg(log π_t)``.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``, may differ within a sequence; stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.
      clip_low: ε_lo > 0.
      clip_high: ε_hi > 0.
      segment_ids: int ``[B, T]``, for packed rows.

    Returns:
      float32 ``[B, T]``.

    Raises:
      ValueError: shapes that do not fit, ε ≤ 0; TypeError: wrong dtypes.

    References:
      Zheng et al., "Group sequence policy optimization", 2025, eq. 13 and 14.

    Example:
      >>> import jax.numpy as jnp
      >>> x, ones = jnp.array([[-1.0, -1.2]]), jnp.ones((1, 2), bool)
      >>> jax.grad(lambda x: gspo_token_per_token(x, x, jnp.ones(1), ones).sum())(x).tolist()
      [[-1.0, -1.0]]
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    log_ratio = _token_log_ratio(inputs, segment_ids)
    return _common.clipped_surrogate(log_ratio, inputs.advantages, clip_low, clip_high)


def _metrics(inputs, loss, clip_low, clip_high, segment_ids) -> Metrics:
    # One ratio a sequence: counted once, on its last token.
    sequences = masked.last_valid(inputs.mask, segment_ids)
    log_ratio, low, high = _sequence_log_ratio(inputs, segment_ids), 1.0 - clip_low, 1.0 + clip_high
    return {
        **_common.policy_metrics(inputs, loss),
        **_common.ratio_metrics(log_ratio, sequences),
        **_common.clip_metrics(log_ratio, inputs.advantages, sequences, low, high),
    }


def gspo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 3e-4,
    clip_high: float | jax.Array = 4e-4,
    aggregation: str = "seq_mean_token_mean",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """GSPO's loss: one clipped surrogate a sequence, averaged over sequences.

    ``L = −(1/N)·Σ_i min(s_i·A_i, clip(s_i)·A_i)``; its gradient on each token of an active
    sequence is ``−s·A/(|y|·N)``.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` (or ``[B, T]``, equal within a sequence); stop-gradient.
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
      The scalar loss and its metrics; ratios and clip shares are per sequence.

    Raises:
      ValueError, TypeError: as :func:`gspo_per_token` and ``masked.aggregate``.

    References:
      Zheng et al., "Group sequence policy optimization", 2025, eq. 5.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -1.2]])
      >>> float(gspo_loss(x, x, jnp.ones(1), jnp.ones((1, 2), bool))[0])
      -1.0
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    losses = gspo_per_token(
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
    return loss, _metrics(inputs, loss, clip_low, clip_high, segment_ids)


def gspo_token_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 3e-4,
    clip_high: float | jax.Array = 4e-4,
    aggregation: str = "seq_mean_token_mean",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """GSPO-token's loss: :func:`gspo_token_per_token`, aggregated.

    ``L = −(1/N)·Σ_i (1/|y_i|)·Σ_t min(s_t·A_t, clip(s_t)·A_t)``; equal to GSPO, in value and
    gradient, where A is one number a sequence.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``, may differ within a sequence; stop-gradient.
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
      The scalar loss and its metrics; ratios and clip shares are per sequence.

    Raises:
      ValueError, TypeError: as :func:`gspo_token_per_token` and ``masked.aggregate``.

    References:
      Zheng et al., "Group sequence policy optimization", 2025, eq. 13.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -1.2]])
      >>> float(gspo_token_loss(x, x, jnp.ones((1, 2)), jnp.ones((1, 2), bool))[0])
      -1.0
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    losses = gspo_token_per_token(
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
    return loss, _metrics(inputs, loss, clip_low, clip_high, segment_ids)

"""REINFORCE leave-one-out: −A·log π(y), with an optional clip of the sequence ratio."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import masked
from rlhf_jax.losses import _common
from rlhf_jax.metrics import Metrics

__all__ = ["rloo_loss", "rloo_per_token"]


def _sequence_log_ratio(inputs: _common.Inputs, segment_ids: ArrayLike | None) -> jax.Array:
    difference = inputs.log_probs - inputs.old_log_probs
    return _common.clamp(masked.sequence_sum(difference, inputs.mask, segment_ids))


def rloo_per_token(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike | None,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array | None = None,
    clip_high: float | jax.Array | None = None,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """Each token's part of its sequence's RLOO loss; the parts of a sequence add up to it.

    Without a clip ``ℓ_t = −A·log π_t``. With a clip the sequence is one action, with ratio
    ``r = exp(Σ_t log π_t − log π_old,t)``, and its loss ``max(−rA, −clip(r, 1−ε_lo, 1+ε_hi)·A)``
    is spread evenly over its tokens.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient. Without a clip it may be None.
      advantages: float ``[B]`` (or ``[B, T]``, equal within a sequence); stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.
      clip_low: ε_lo > 0, or None for no clip.
      clip_high: ε_hi > 0; given together with ``clip_low``.
      segment_ids: int ``[B, T]``, for packed rows.

    Returns:
      float32 ``[B, T]``.

    Raises:
      ValueError: shapes that do not fit, ε ≤ 0, one ε without the other, a clip without
        ``old_log_probs``; TypeError: wrong dtypes.

    References:
      Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!", 2019; Ahmadian et al.,
      "Back to basics: revisiting REINFORCE style optimization", 2024.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0]])
      >>> rloo_per_token(x, None, jnp.array([0.5]), jnp.ones((1, 2), bool)).tolist()
      [[0.5, 1.0]]
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask, old_optional=True)
    if (clip_low is None) != (clip_high is None):
        raise ValueError(
            f"clip_low={clip_low} and clip_high={clip_high}: give both, or neither for plain RLOO"
        )
    if clip_low is None or clip_high is None:
        return -inputs.advantages * inputs.log_probs
    if old_log_probs is None:
        raise ValueError("old_log_probs is None: a clip of the ratio needs them, float [B, T]")
    log_ratio = _sequence_log_ratio(inputs, segment_ids)
    losses = _common.clipped_surrogate(log_ratio, inputs.advantages, clip_low, clip_high)
    return losses / _tokens(inputs.mask, segment_ids)


def _tokens(mask: jax.Array, segment_ids: ArrayLike | None) -> jax.Array:
    ones = jnp.ones(mask.shape, jnp.float32)
    return jnp.maximum(masked.sequence_sum(ones, mask, segment_ids), 1.0)


def rloo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike | None,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array | None = None,
    clip_high: float | jax.Array | None = None,
    aggregation: str = "seq_mean_token_sum",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """RLOO's loss: the sum over each sequence of :func:`rloo_per_token`, averaged.

    ``L = −(1/N)·Σ_i A_i·log π(y_i)`` with ``A_i = R_i − mean of the others' R``
    (``advantages.leave_one_out``). R already holds −β·Σ_t k1, so the loss has no KL term.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]`` or None; stop-gradient. Needed for the clip, else only for
        metrics.
      advantages: float ``[B]`` or ``[B, T]``; stop-gradient.
      mask: bool ``[B, T]``, sampled tokens.
      clip_low: ε_lo > 0 of the sequence ratio, or None for plain RLOO.
      clip_high: ε_hi > 0, together with ``clip_low``.
      aggregation: one of ``masked.AGGREGATIONS``; with the default a sequence is one action.
      denominator: D of the global batch (``masked.denominator``); counted here if None.
      length: int, for ``fixed_length``.
      group_ids: int ``[B]``, for ``prompt_mean``.
      segment_ids: int ``[B, T]``, for packed rows.
      weights: float ``[B]`` or ``[B, T]``, off-policy weights; stop-gradient.

    Returns:
      The scalar loss and its metrics; ratio metrics are per sequence, over all its tokens.

    Raises:
      ValueError, TypeError: as :func:`rloo_per_token` and ``masked.aggregate``.

    References:
      Ahmadian et al., "Back to basics: revisiting REINFORCE style optimization", 2024, eq. 7.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0], [-1.0, -1.0]])
      >>> loss, _ = rloo_loss(x, x, jnp.array([0.5, -0.5]), jnp.ones((2, 2), bool))
      >>> float(loss)
      0.25
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask, old_optional=True)
    losses = rloo_per_token(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        segment_ids=segment_ids,
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
    sequences = masked.last_valid(inputs.mask, segment_ids)
    log_ratio = _sequence_log_ratio(inputs, segment_ids)
    found = {
        **_common.policy_metrics(inputs, loss),
        **_common.ratio_metrics(log_ratio, sequences),
    }
    if clip_low is not None and clip_high is not None:
        low, high = 1.0 - clip_low, 1.0 + clip_high
        found |= _common.clip_metrics(log_ratio, inputs.advantages, sequences, low, high)
    return loss, found

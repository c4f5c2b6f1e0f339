"""Tapered off-policy REINFORCE: bad samples are weighted by their truncated ratio."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks, masked
from rlhf_jax.losses import _common
from rlhf_jax.metrics import Metrics

__all__ = ["topr_loss", "topr_per_token"]


def _weight(inputs, ratio_max, segment_ids) -> tuple[jax.Array, jax.Array]:
    """The detached sequence weight on each token, and the sequence's log-ratio."""
    checks.positive("ratio_max", ratio_max)
    difference = inputs.log_probs - inputs.old_log_probs
    log_ratio = jax.lax.stop_gradient(masked.sequence_sum(difference, inputs.mask, segment_ids))
    # In log space: exp of a sum over a long sequence would overflow before the minimum.
    tapered = jnp.exp(jnp.minimum(log_ratio, jnp.log(ratio_max)))
    return jnp.where(inputs.advantages >= 0, 1.0, tapered), _common.clamp(log_ratio)


def topr_per_token(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    ratio_max: float | jax.Array = 1.0,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """Score-function loss of every token with the tapered weight of its sequence.

    ``ℓ_t = −sg(w)·A·log π_t``; ``w = 1`` where A ≥ 0, else ``min(π(y)/π_old(y), w_max)``.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log-probs of the policy that sampled; stop-gradient.
      advantages: float ``[B]`` (or ``[B, T]``, of one sign within a sequence), the reward or the
        reward less a baseline; stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.
      ratio_max: w_max > 0.
      segment_ids: int ``[B, T]``, for packed rows.

    Returns:
      float32 ``[B, T]``.

    Raises:
      ValueError: shapes that do not fit, w_max ≤ 0; TypeError: wrong dtypes.

    References:
      Le Roux et al., "Tapered off-policy REINFORCE", 2025.

    Example:
      >>> import jax.numpy as jnp
      >>> new, old = jnp.array([[-1.0], [-1.0]]), jnp.array([[-2.0], [-0.5]])
      >>> out = topr_per_token(new, old, jnp.array([1.0, -1.0]), jnp.ones((2, 1), bool))
      >>> [round(float(x), 4) for x in out[:, 0]]
      [1.0, -0.6065]
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    weight, _ = _weight(inputs, ratio_max, segment_ids)
    return -weight * inputs.advantages * inputs.log_probs


def topr_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    ratio_max: float | jax.Array = 1.0,
    aggregation: str = "seq_mean_token_sum",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """TOPR's loss: the sum over each sequence of :func:`topr_per_token`, averaged.

    ``L = −(1/N)·Σ_i sg(w_i)·A_i·log π(y_i)``. Good samples are learned from at full weight however
    unlikely they have become; bad ones only as long as the policy still produces them.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log-probs of the policy that sampled; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``; stop-gradient.
      mask: bool ``[B, T]``, sampled tokens.
      ratio_max: w_max > 0.
      aggregation: one of ``masked.AGGREGATIONS``.
      denominator: D of the global batch (``masked.denominator``); counted here if None.
      length: int, for ``fixed_length``.
      group_ids: int ``[B]``, for ``prompt_mean``.
      segment_ids: int ``[B, T]``, for packed rows.
      weights: float ``[B]`` or ``[B, T]``, off-policy weights; stop-gradient.

    Returns:
      The scalar loss and its metrics; ratios are per sequence, over all its tokens.

    Raises:
      ValueError, TypeError: as :func:`topr_per_token` and ``masked.aggregate``.

    References:
      Le Roux et al., "Tapered off-policy REINFORCE", 2025.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0]])
      >>> float(topr_loss(x, x, jnp.ones(1), jnp.ones((1, 2), bool))[0])
      3.0
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    weight, log_ratio = _weight(inputs, ratio_max, segment_ids)
    loss = _common.reduce(
        -weight * inputs.advantages * inputs.log_probs,
        inputs.mask,
        weights,
        aggregation,
        denominator=denominator,
        length=length,
        group_ids=group_ids,
        segment_ids=segment_ids,
    )
    sequences = masked.last_valid(inputs.mask, segment_ids)
    found = {
        **_common.policy_metrics(inputs, loss),
        **_common.ratio_metrics(log_ratio, sequences),
    }
    return loss, found

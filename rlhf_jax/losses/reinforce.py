"""REINFORCE: −A·log π."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from rlhf_jax.losses import _common
from rlhf_jax.metrics import Metrics

__all__ = ["reinforce_loss", "reinforce_per_token"]


def reinforce_per_token(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike | None,
    advantages: ArrayLike,
    mask: ArrayLike,
) -> jax.Array:
    """The score-function loss of every token.

    ``ℓ = −A·log π``; its gradient is −A·∇log π, whatever policy the tokens came from.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]`` or None; not used, there for the common order of arguments.
      advantages: float ``[B]`` or ``[B, T]``; stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.

    Returns:
      float32 ``[B, T]``.

    Raises:
      ValueError: shapes that do not fit; TypeError: wrong dtypes.

    References:
      Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement
      learning", 1992.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0]])
      >>> reinforce_per_token(x, None, jnp.array([2.0]), jnp.ones((1, 2), bool)).tolist()
      [[2.0, 4.0]]
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask, old_optional=True)
    return -inputs.advantages * inputs.log_probs


def reinforce_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike | None,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    aggregation: str = "seq_mean_token_sum",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """REINFORCE's loss: the sum over each sequence of −A·log π, averaged.

    ``L = −(1/N)·Σ_i Σ_t A_t·log π_t``; token-normalised with another ``aggregation``. A is the
    return less a baseline (0, a batch mean, a moving average): see ``advantages``.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]`` or None; stop-gradient; only for metrics.
      advantages: float ``[B]`` or ``[B, T]``; stop-gradient.
      mask: bool ``[B, T]``, sampled tokens.
      aggregation: one of ``masked.AGGREGATIONS``.
      denominator: D of the global batch (``masked.denominator``); counted here if None.
      length: int, for ``fixed_length``.
      group_ids: int ``[B]``, for ``prompt_mean``.
      segment_ids: int ``[B, T]``, for packed rows.
      weights: float ``[B]`` or ``[B, T]``, off-policy weights; stop-gradient.

    Returns:
      The scalar loss and its metrics.

    Raises:
      ValueError, TypeError: as :func:`reinforce_per_token` and ``masked.aggregate``.

    References:
      Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement
      learning", 1992.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0]])
      >>> loss, _ = reinforce_loss(x, None, jnp.array([2.0]), jnp.ones((1, 2), bool))
      >>> float(loss)
      6.0
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask, old_optional=True)
    loss = _common.reduce(
        -inputs.advantages * inputs.log_probs,
        inputs.mask,
        weights,
        aggregation,
        denominator=denominator,
        length=length,
        group_ids=group_ids,
        segment_ids=segment_ids,
    )
    found = _common.policy_metrics(inputs, loss)
    if old_log_probs is not None:
        found |= _common.ratio_metrics(inputs.log_ratio, inputs.mask)
    return loss, found

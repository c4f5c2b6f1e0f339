"""Group-relative policy optimisation: the clipped surrogate with the KL inside the loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax.losses import _common
from rlhf_jax.metrics import Metrics

__all__ = ["grpo_loss", "grpo_per_token"]


def grpo_per_token(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 0.2,
    clip_high: float | jax.Array = 0.2,
    ref_log_probs: ArrayLike | None = None,
    kl_coef: float | jax.Array = 0.0,
    kl_estimator: str = "k3",
) -> jax.Array:
    """Clipped surrogate of every token plus β times a KL estimate.

    ``ℓ = max(−ρA, −clip(ρ, 1−ε_lo, 1+ε_hi)·A) + β·k(log π, log π_ref)``.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``, z-scores within the group; stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.
      clip_low: ε_lo > 0.
      clip_high: ε_hi > 0.
      ref_log_probs: float ``[B, T]``, log π_ref; stop-gradient. None with β = 0.
      kl_coef: β ≥ 0.
      kl_estimator: one of ``kl.ESTIMATORS``. ``"k3"``'s gradient is that of KL(ref‖π);
        ``"k2"`` and ``"k3_straight_through"`` give that of KL(π‖ref); ``"k1"`` warns. These take
        the samples for π's own; ``"k3_off_policy"`` weighs by ρ, which stays exact (for KL(π‖ref))
        after the first of several steps.

    Returns:
      float32 ``[B, T]``.

    Raises:
      ValueError: shapes that do not fit, ε ≤ 0, β < 0, β > 0 without a reference, an unknown
        estimator; TypeError: wrong dtypes.

    References:
      Shao et al., "DeepSeekMath", 2024, eq. 3 and 4.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.full((1, 2), -1.0)
      >>> ones = jnp.ones((1, 2), bool)
      >>> out = grpo_per_token(x, x, jnp.ones(1), ones, ref_log_probs=x - 0.5, kl_coef=0.1)
      >>> round(float(out[0, 0]), 4)
      -0.9893
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    losses = _common.clipped_surrogate(inputs.log_ratio, inputs.advantages, clip_low, clip_high)
    penalty, _ = _common.reference_kl(inputs, ref_log_probs, kl_coef, kl_estimator)
    return losses + penalty


def grpo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 0.2,
    clip_high: float | jax.Array = 0.2,
    ref_log_probs: ArrayLike | None = None,
    kl_coef: float | jax.Array = 0.0,
    kl_estimator: str = "k3",
    aggregation: str = "seq_mean_token_mean",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """GRPO's loss: :func:`grpo_per_token`, averaged over each sequence, then over sequences.

    ``L = Σ w·(ℓ_clip + β·k) / D``; the KL is added per token, before the aggregation.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``; stop-gradient. See ``advantages.group_normalized``.
      mask: bool ``[B, T]``, sampled tokens.
      clip_low: ε_lo > 0.
      clip_high: ε_hi > 0.
      ref_log_probs: float ``[B, T]`` or None; stop-gradient.
      kl_coef: β ≥ 0.
      kl_estimator: one of ``kl.ESTIMATORS``, or ``"k3_off_policy"``.
      aggregation: one of ``masked.AGGREGATIONS``.
      denominator: D of the global batch (``masked.denominator``); counted here if None.
      length: int, for ``fixed_length``.
      group_ids: int ``[B]``, for ``prompt_mean``.
      segment_ids: int ``[B, T]``, for packed rows.
      weights: float ``[B]`` or ``[B, T]``, off-policy weights of surrogate and KL; stop-gradient.

    Returns:
      The scalar loss and its metrics.

    Raises:
      ValueError, TypeError: as :func:`grpo_per_token` and ``masked.aggregate``.

    References:
      Shao et al., "DeepSeekMath", 2024, eq. 3.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.full((2, 2), -1.0)
      >>> loss, found = grpo_loss(x, x, jnp.array([1.0, -1.0]), jnp.ones((2, 2), bool))
      >>> float(loss), float(found["policy/ratio_mean"].value())
      (0.0, 1.0)
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    losses = _common.clipped_surrogate(inputs.log_ratio, inputs.advantages, clip_low, clip_high)
    penalty, kl_metrics = _common.reference_kl(inputs, ref_log_probs, kl_coef, kl_estimator)

    def total(values):
        return _common.reduce(
            values,
            inputs.mask,
            weights,
            aggregation,
            denominator=denominator,
            length=length,
            group_ids=group_ids,
            segment_ids=segment_ids,
        )

    loss = total(losses + penalty)
    parts = {}
    if kl_metrics:
        parts["kl"] = total(jnp.zeros_like(losses) + penalty)
        parts["surrogate"] = loss - parts["kl"]
    log_ratio, low, high = inputs.log_ratio, 1.0 - clip_low, 1.0 + clip_high
    found = {
        **_common.policy_metrics(inputs, loss, **parts),
        **_common.ratio_metrics(log_ratio, inputs.mask),
        **_common.clip_metrics(log_ratio, inputs.advantages, inputs.mask, low, high),
        **kl_metrics,
    }
    return loss, found

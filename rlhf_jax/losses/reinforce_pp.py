"""REINFORCE++: a globally whitened return, the clipped surrogate, token mean."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from rlhf_jax.losses.grpo import grpo_loss, grpo_per_token
from rlhf_jax.metrics import Metrics

__all__ = ["reinforce_pp_loss", "reinforce_pp_per_token"]


def reinforce_pp_per_token(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 0.2,
    clip_high: float | jax.Array = 0.2,
    ref_log_probs: ArrayLike | None = None,
    kl_coef: float | jax.Array = 0.0,
    kl_estimator: str = "k2",
) -> jax.Array:
    """Clipped surrogate of every token, with an optional KL term.

    ``ℓ = max(−ρA, −clip(ρ, 1−ε_lo, 1+ε_hi)·A) + β·k``; A is whitened over all tokens of the global
    batch (``advantages.reinforce_plus_plus``).

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``; stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.
      clip_low: ε_lo > 0.
      clip_high: ε_hi > 0.
      ref_log_probs: float ``[B, T]`` or None; stop-gradient. For the baseline variant, which
        keeps the KL out of the reward.
      kl_coef: β ≥ 0.
      kl_estimator: one of ``kl.ESTIMATORS``, or ``"k3_off_policy"``; ``"k2"`` gives ∇KL(π‖ref).

    Returns:
      float32 ``[B, T]``.

    Raises:
      ValueError: shapes that do not fit, ε ≤ 0, β < 0; TypeError: wrong dtypes.

    References:
      Hu et al., "REINFORCE++", 2025.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0]])
      >>> reinforce_pp_per_token(x, x, jnp.array([2.0]), jnp.ones((1, 2), bool)).tolist()
      [[-2.0, -2.0]]
    """
    return grpo_per_token(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        ref_log_probs=ref_log_probs,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
    )


def reinforce_pp_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_low: float | jax.Array = 0.2,
    clip_high: float | jax.Array = 0.2,
    ref_log_probs: ArrayLike | None = None,
    kl_coef: float | jax.Array = 0.0,
    kl_estimator: str = "k2",
    aggregation: str = "token_mean",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """REINFORCE++'s loss: :func:`reinforce_pp_per_token`, averaged over the tokens of the batch.

    ``L = Σ w·ℓ / D``. What sets the method apart is its advantage, not its loss.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``; stop-gradient.
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
      weights: float ``[B]`` or ``[B, T]``, off-policy weights; stop-gradient.

    Returns:
      The scalar loss and its metrics.

    Raises:
      ValueError, TypeError: as :func:`reinforce_pp_per_token` and ``masked.aggregate``.

    References:
      Hu et al., "REINFORCE++", 2025.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0]])
      >>> float(reinforce_pp_loss(x, x, jnp.array([2.0]), jnp.ones((1, 2), bool))[0])
      -2.0
    """
    return grpo_loss(
        log_probs,
        old_log_probs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
        ref_log_probs=ref_log_probs,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        aggregation=aggregation,
        denominator=denominator,
        length=length,
        group_ids=group_ids,
        segment_ids=segment_ids,
        weights=weights,
    )

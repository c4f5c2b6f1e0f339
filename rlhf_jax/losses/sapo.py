"""SAPO: a soft gate in the place of the clip."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks
from rlhf_jax.losses import _common
from rlhf_jax.metrics import Metrics

__all__ = ["sapo_loss", "sapo_per_token"]


def sapo_per_token(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    tau_positive: float | jax.Array = 1.0,
    tau_negative: float | jax.Array = 1.05,
) -> jax.Array:
    """Gated surrogate of every token.

    ``ℓ = −A·(4/τ)·σ(τ·(ρ−1))``, τ = τ₊ where A > 0, else τ₋. The slope in ρ is 1 at ρ = 1 and falls
    off smoothly on both sides, faster with a larger τ.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``; stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.
      tau_positive: τ₊ > 0.
      tau_negative: τ₋ > 0.

    Returns:
      float32 ``[B, T]``.

    Raises:
      ValueError: shapes that do not fit, τ ≤ 0; TypeError: wrong dtypes.

    References:
      Gao et al., "Soft adaptive policy optimization", 2025.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0]])
      >>> sapo_per_token(x, x, jnp.ones(1), jnp.ones((1, 2), bool)).tolist()
      [[-2.0, -2.0]]
    """
    checks.positive("tau_positive", tau_positive)
    checks.positive("tau_negative", tau_negative)
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    tau = jnp.where(inputs.advantages > 0, tau_positive, tau_negative)
    gate = jax.nn.sigmoid(tau * (jnp.exp(inputs.log_ratio) - 1.0)) * 4.0 / tau
    return -inputs.advantages * gate


def sapo_loss(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    tau_positive: float | jax.Array = 1.0,
    tau_negative: float | jax.Array = 1.05,
    aggregation: str = "seq_mean_token_mean",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """SAPO's loss: :func:`sapo_per_token`, averaged over each sequence, then over sequences.

    ``L = −(1/N)·Σ_i (1/|y_i|)·Σ_t A·(4/τ)·σ(τ·(ρ_t−1))``.

    Args:
      log_probs: float ``[B, T]``, log π; the only input that is differentiated.
      old_log_probs: float ``[B, T]``, log π_old; stop-gradient.
      advantages: float ``[B]`` or ``[B, T]``; stop-gradient.
      mask: bool ``[B, T]``, sampled tokens.
      tau_positive: τ₊ > 0.
      tau_negative: τ₋ > 0.
      aggregation: one of ``masked.AGGREGATIONS``.
      denominator: D of the global batch (``masked.denominator``); counted here if None.
      length: int, for ``fixed_length``.
      group_ids: int ``[B]``, for ``prompt_mean``.
      segment_ids: int ``[B, T]``, for packed rows.
      weights: float ``[B]`` or ``[B, T]``, off-policy weights; stop-gradient.

    Returns:
      The scalar loss and its metrics.

    Raises:
      ValueError, TypeError: as :func:`sapo_per_token` and ``masked.aggregate``.

    References:
      Gao et al., "Soft adaptive policy optimization", 2025.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[-1.0, -2.0]])
      >>> float(sapo_loss(x, x, jnp.ones(1), jnp.ones((1, 2), bool))[0])
      -2.0
    """
    inputs = _common.prepare(log_probs, old_log_probs, advantages, mask)
    losses = sapo_per_token(*inputs, tau_positive=tau_positive, tau_negative=tau_negative)
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
    found = {
        **_common.policy_metrics(inputs, loss),
        **_common.ratio_metrics(inputs.log_ratio, inputs.mask),
    }
    return loss, found

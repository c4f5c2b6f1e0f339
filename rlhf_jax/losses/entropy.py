"""The entropy bonus."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks, metrics
from rlhf_jax.losses import _common
from rlhf_jax.metrics import Metrics

__all__ = ["entropy_loss"]


def entropy_loss(
    entropy: ArrayLike,
    mask: ArrayLike,
    *,
    entropy_coef: float | jax.Array = 0.01,
    aggregation: str = "token_mean",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """The entropy bonus as a loss to add: it rewards an undecided policy.

    ``L = −c_e·Σ w·H / D``.

    Args:
      entropy: float ``[B, T]``, each token's true entropy (``logprobs.chunked(…,
        with_entropy=True)``); differentiated.
      mask: bool ``[B, T]``, sampled tokens.
      entropy_coef: c_e ≥ 0. With 0 only the metric is wanted.
      aggregation: one of ``masked.AGGREGATIONS``.
      denominator: D of the global batch (``masked.denominator``); counted here if None.
      length: int, for ``fixed_length``.
      group_ids: int ``[B]``, for ``prompt_mean``.
      segment_ids: int ``[B, T]``, for packed rows.
      weights: float ``[B]`` or ``[B, T]``, off-policy weights; stop-gradient.

    Returns:
      The scalar loss and metrics ``policy/entropy`` (masked mean) and ``policy/loss_entropy``.

    Raises:
      ValueError: shapes that do not fit, c_e < 0; TypeError: wrong dtypes.

    References:
      Mnih et al., "Asynchronous methods for deep reinforcement learning", 2016.

    Example:
      >>> import jax.numpy as jnp
      >>> loss, found = entropy_loss(jnp.array([[0.5, 9.0]]), jnp.array([[True, False]]))
      >>> round(float(loss), 4), float(found["policy/entropy"].value())
      (-0.005, 0.5)
    """
    checks.non_negative("entropy_coef", entropy_coef, remedy="A bonus has a coefficient ≥ 0.")
    entropy = checks.real("entropy", entropy, ndim=2, axes="[B, T]")
    mask = checks.boolean("mask", mask, like=entropy, like_name="entropy")
    entropy = jnp.where(mask, entropy, 0.0)
    loss = -entropy_coef * _common.reduce(
        entropy,
        mask,
        weights,
        aggregation,
        denominator=denominator,
        length=length,
        group_ids=group_ids,
        segment_ids=segment_ids,
    )
    return loss, {
        "policy/entropy": metrics.mean(entropy, mask),
        "policy/loss_entropy": metrics.sum_(loss),
    }

"""The value function's loss, clipped or not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks, metrics
from rlhf_jax.losses import _common
from rlhf_jax.metrics import Metrics

__all__ = ["value_loss", "value_per_token"]


def _prepare(values, old_values, returns, mask, clip):
    values = checks.real("values", values, ndim=2, axes="[B, T]")
    mask = checks.boolean("mask", mask, like=values, like_name="values")
    if clip is not None:
        checks.positive("clip", clip, remedy="None turns clipping of the value off.")
        if old_values is None:
            raise ValueError("old_values is None: clipping needs them, float [B, T], or clip=None")
    old = values if old_values is None else old_values
    old, returns = (
        _common.per_token(name, x, mask) for name, x in (("old_values", old), ("returns", returns))
    )
    return jnp.where(mask, values, 0.0), old, returns, mask


def _squares(values, old_values, returns, clip):
    """Squared errors: of the value, and of the value held near its old one."""
    plain = jnp.square(values - returns)
    if clip is None:
        return plain, plain
    return plain, jnp.square(jnp.clip(values, old_values - clip, old_values + clip) - returns)


def value_per_token(
    values: ArrayLike,
    old_values: ArrayLike | None,
    returns: ArrayLike,
    mask: ArrayLike,
    *,
    clip: float | jax.Array | None = 0.2,
) -> jax.Array:
    """Clipped squared error of every value.

    ``ℓ = ½·max((V−R)², (clip(V, V_old−ε_v, V_old+ε_v)−R)²)``.

    Args:
      values: float ``[B, T]``, V_t *before* token t; the only input that is differentiated.
      old_values: float ``[B, T]``, V at rollout time; stop-gradient. None with ``clip=None``.
      returns: float ``[B, T]``, A + V_old, fixed for all epochs; stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.
      clip: ε_v > 0, or None for the plain squared error.

    Returns:
      float32 ``[B, T]``.

    Raises:
      ValueError: shapes that do not fit, ε_v ≤ 0, a clip without ``old_values``; TypeError: wrong
        dtypes.

    References:
      Schulman et al., "High-dimensional continuous control using generalized advantage
      estimation", 2016; the clip is that of common PPO implementations.

    Example:
      >>> import jax.numpy as jnp
      >>> v = jnp.array([[0.55]])
      >>> one = jnp.ones((1, 1), bool)
      >>> print(value_per_token(v, jnp.array([[0.5]]), jnp.array([[0.6]]), one).round(5))
      [[0.00125]]
    """
    values, old_values, returns, mask = _prepare(values, old_values, returns, mask, clip)
    plain, clipped = _squares(values, old_values, returns, clip)
    return 0.5 * jnp.where(mask, jnp.where(plain >= clipped, plain, clipped), 0.0)


def value_loss(
    values: ArrayLike,
    old_values: ArrayLike | None,
    returns: ArrayLike,
    mask: ArrayLike,
    *,
    clip: float | jax.Array | None = 0.2,
    aggregation: str = "token_mean",
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    weights: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    """The critic's loss: :func:`value_per_token`, averaged over the tokens of the batch.

    ``L_V = Σ w·ℓ / D``; add it to the policy's as ``c_v·L_V``, or train a critic of its own.

    Args:
      values: float ``[B, T]``, V_t before token t; the only input that is differentiated.
      old_values: float ``[B, T]`` or None; stop-gradient.
      returns: float ``[B, T]``; stop-gradient.
      mask: bool ``[B, T]``, sampled tokens.
      clip: ε_v > 0 or None.
      aggregation: one of ``masked.AGGREGATIONS``.
      denominator: D of the global batch (``masked.denominator``); counted here if None.
      length: int, for ``fixed_length``.
      group_ids: int ``[B]``, for ``prompt_mean``.
      segment_ids: int ``[B, T]``, for packed rows.
      weights: float ``[B]`` or ``[B, T]``, off-policy weights; stop-gradient.

    Returns:
      The scalar loss and metrics ``value/loss``, ``value/clip_fraction`` (clipped branch active),
      ``value/explained_variance``, ``value/mean``, ``value/return_mean``.

    Raises:
      ValueError, TypeError: as :func:`value_per_token` and ``masked.aggregate``.

    References:
      Schulman et al., "Proximal policy optimization algorithms", 2017, eq. 9.

    Example:
      >>> import jax.numpy as jnp
      >>> v, r, ones = jnp.array([[0.5, 1.0]]), jnp.array([[1.0, 1.0]]), jnp.ones((1, 2), bool)
      >>> float(value_loss(v, None, r, ones, clip=None)[0])
      0.0625
    """
    values, old_values, returns, mask = _prepare(values, old_values, returns, mask, clip)
    plain, clipped = _squares(values, old_values, returns, clip)
    loss = _common.reduce(
        0.5 * jnp.where(plain >= clipped, plain, clipped),
        mask,
        weights,
        aggregation,
        denominator=denominator,
        length=length,
        group_ids=group_ids,
        segment_ids=segment_ids,
    )
    return loss, {
        "value/loss": metrics.sum_(loss),
        "value/clip_fraction": metrics.mean(clipped > plain, mask),
        "value/explained_variance": metrics.explained_variance(returns, values, mask),
        "value/mean": metrics.mean(values, mask),
        "value/return_mean": metrics.mean(returns, mask),
    }

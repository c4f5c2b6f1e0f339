"""Generalised advantage estimation over valid tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks
from rlhf_jax._sequences import _nearest
from rlhf_jax.advantages._rows import backward_recurrence, per_token
from rlhf_jax.masked import last_valid, sequence_sum

TRUNCATIONS = ("terminal", "bootstrap", "mask")


class Estimates(NamedTuple):
    """Advantages, value targets, and the mask on which they stand; all [B, T], 0 off that mask."""

    advantages: jax.Array
    returns: jax.Array
    mask: jax.Array


def _next_values(values, mask, last, bootstrap):
    following, _ = _nearest(values, mask, reverse=True)
    return jnp.where(last, bootstrap, following)


def _bootstrap(truncation, bootstrap_value, truncated, mask, last) -> jax.Array:
    """The value of the state after the last token; 0 where nothing is to be bootstrapped."""
    if truncation != "bootstrap":
        return jnp.zeros_like(mask, jnp.float32)
    if bootstrap_value is None:
        raise ValueError(
            "bootstrap_value is missing: truncation='bootstrap' needs the value of the state after "
            "the last token. Pass it as float [B] (0 where a completion terminated), or choose "
            "truncation='terminal'."
        )
    after = per_token("bootstrap_value", bootstrap_value, mask, checks.real)
    if truncated is not None:
        last = last & per_token("truncated", truncated, mask, checks.boolean)
    return jnp.where(last, after, 0.0)


def _lambda(name: str, value, mask: jax.Array, dtype) -> jax.Array:
    checks.number(name, value, at_least=0.0, at_most=1.0, remedy="λ weighs steps of the return.")
    array = jnp.asarray(value, dtype)
    checks.rank(name, array, (0, 1, 2), axes="a scalar, [B] or [B, T]")
    if array.ndim:
        checks.shape(name, array, mask.shape[: array.ndim], like="mask")
    return array[:, None] if array.ndim == 1 else array


def gae(
    rewards: ArrayLike,
    values: ArrayLike,
    mask: ArrayLike,
    *,
    gamma: float | jax.Array = 1.0,
    gae_lambda: ArrayLike = 0.95,
    returns_lambda: ArrayLike | None = None,
    truncation: str = "terminal",
    truncated: ArrayLike | None = None,
    bootstrap_value: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> Estimates:
    """Generalised advantages: δ_t = r_t + γ(1−d_t)V_t' − V_t, A_t = δ_t + γλ(1−d_t)A_t'.

    t' is the next valid token and d = 1 at the last one: holes in the mask are skipped, so the
    result is that of the compressed sequence. Returns are A + V, with A at λ = ``returns_lambda``.

    Args:
      rewards: floating [B, T], per token.
      values: floating [B, T], V before the token is emitted.
      mask: bool [B, T], the valid tokens.
      gamma: γ in [0, 1].
      gae_lambda: λ in [0, 1] of the advantages: a scalar, [B] or [B, T].
      returns_lambda: λ of the returns (decoupled); ``gae_lambda`` by default.
      truncation: what stands behind the last token of a cut completion: ``"terminal"``, nothing;
        ``"bootstrap"``, ``bootstrap_value``; ``"mask"``, the completion is not learned from.
      truncated: bool [B] (packed rows: [B, T], read at last tokens), which completions were cut;
        all by default under ``"bootstrap"``, required by ``"mask"``.
      bootstrap_value: floating [B] (packed rows: [B, T], read at last tokens), for ``"bootstrap"``.
      segment_ids: int [B, T] for packed rows.

    Returns:
      ``Estimates(advantages, returns, mask)``, each [B, T]; float32 (or float64). The mask is the
      given one, less the cut completions under ``"mask"``: use it for losses and denominators. All
      inputs are stop-gradient.

    Raises:
      TypeError: if rewards or values are not floating, or a mask is not bool.
      ValueError: if shapes do not fit, γ or λ is outside [0, 1], or the truncation is unknown or
        lacks its argument.

    References:
      Schulman et al., "High-dimensional continuous control using generalized advantage
      estimation", 2016, eq. 11–16; Yue et al., "VAPO", 2025, for decoupled λ.

    Example:
      >>> r, v = jnp.array([[0.0, 1.0, 0.0]]), jnp.array([[0.0, 0.0, 100.0]])
      >>> a = gae(r, v, jnp.array([[True, True, False]]), gae_lambda=0.95).advantages
      >>> [round(x, 4) for x in a[0].tolist()]
      [0.95, 1.0, 0.0]
    """
    checks.one_of("truncation", truncation, TRUNCATIONS)
    checks.number("gamma", gamma, at_least=0.0, at_most=1.0, remedy="γ is a discount.")
    rewards = jax.lax.stop_gradient(checks.real("rewards", rewards, ndim=2, axes="[B, T]"))
    values = jax.lax.stop_gradient(checks.real("values", values, like=rewards, like_name="rewards"))
    mask = checks.boolean("mask", mask, like=rewards, like_name="rewards")
    rewards, values = jnp.where(mask, rewards, 0.0), jnp.where(mask, values, 0.0)
    last = last_valid(mask, segment_ids)
    after = _bootstrap(truncation, bootstrap_value, truncated, mask, last).astype(values.dtype)
    delta = rewards + gamma * _next_values(values, mask, last, after) - values

    def accumulate(name: str, lam: ArrayLike, on: jax.Array) -> jax.Array:
        decay = gamma * _lambda(name, lam, on, delta.dtype)
        return backward_recurrence(jnp.where(last, 0.0, decay), delta, on)

    advantages = accumulate("gae_lambda", gae_lambda, mask)
    targets = advantages
    if returns_lambda is not None:
        targets = accumulate("returns_lambda", returns_lambda, mask)
    if truncation == "mask":
        if truncated is None:
            raise ValueError(
                "truncated is missing: truncation='mask' must know which completions were cut. "
                "Pass bool [B], or choose truncation='terminal'."
            )
        cut = last & per_token("truncated", truncated, mask, checks.boolean)
        mask = mask & (sequence_sum(cut.astype(values.dtype), mask, segment_ids) == 0)
    return Estimates(
        jax.lax.stop_gradient(jnp.where(mask, advantages, 0.0)),
        jax.lax.stop_gradient(jnp.where(mask, targets + values, 0.0)),
        mask,
    )


def length_adaptive_lambda(lengths: ArrayLike, *, alpha: float | jax.Array = 0.05) -> jax.Array:
    """λ of the policy's advantages by length: λ = 1 − 1/(α·l), at least 0.

    Args:
      lengths: integer or floating [B], valid tokens of each completion.
      alpha: α > 0.

    Returns:
      float32 [B], for ``gae(gae_lambda=…)``; 0 for lengths under 1/α.

    Raises:
      ValueError: if ``alpha`` is not positive.

    References:
      Yue et al., "VAPO", 2025, eq. 9.

    Example:
      >>> [round(x, 4) for x in length_adaptive_lambda(jnp.array([100, 1000])).tolist()]
      [0.8, 0.98]
    """
    checks.positive("alpha", alpha)
    lengths = jnp.asarray(lengths)
    lengths = lengths.astype(jnp.promote_types(lengths.dtype, jnp.float32))
    return jnp.maximum(1.0 - 1.0 / jnp.maximum(alpha * lengths, 1e-6), 0.0)

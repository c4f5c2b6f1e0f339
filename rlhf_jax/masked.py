"""Masked statistics, statistics per sequence, and the named aggregations of a loss.

``where`` comes before the arithmetic everywhere, so NaN and infinity under the mask reach neither
value nor gradient. A sequence is a row, or, with ``segment_ids``, a run of valid tokens of one id
within a row; masked tokens between them (tool output) do not end a sequence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks
from rlhf_jax._sequences import first_valid, group_sum, last_valid, sequence_mean, sequence_sum

__all__ = [
    "AGGREGATIONS",
    "aggregate",
    "denominator",
    "deviations",
    "first_valid",
    "from_lengths",
    "group_sum",
    "last_valid",
    "mean",
    "sequence_mean",
    "sequence_sum",
    "sum",
    "var",
    "whiten",
]

AGGREGATIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "fixed_length",
    "prompt_mean",
)

Axis = int | tuple[int, ...] | None


def _checked(x: ArrayLike, mask: ArrayLike) -> tuple[jax.Array, jax.Array]:
    x = checks.real("x", x)
    m = checks.boolean("mask", mask, like=x, like_name="x")
    return jnp.where(m, x, 0.0), m


def from_lengths(lengths: ArrayLike, width: int, *, start: int = 0) -> jax.Array:
    """The mask of completions that start at one column: m_t = [start ≤ t < start + length].

    A mask comes from lengths, never from comparing ids: pad and EOS may be one id, and EOS is a
    token that was sampled.

    Args:
      lengths: int [B], sampled tokens of each completion, EOS included.
      width: T, columns of the result; static.
      start: the column of the first completion token; static.

    Returns:
      bool [B, T].

    Raises:
      TypeError: if ``lengths`` are not integers.
      ValueError: if a length is negative or does not fit (checked where it can be read).

    Example:
      >>> from_lengths(jnp.array([2, 1]), 4, start=1).tolist()
      [[False, True, True, False], [False, True, False, False]]
    """
    lengths = checks.integer("lengths", lengths, ndim=1, axes="[B]")
    room = width - start
    checks.number("lengths", lengths, at_least=0, at_most=room, remedy="Widen T, or cut first.")
    column = jnp.arange(width)[None, :]
    return (column >= start) & (column < start + lengths[:, None])


def sum(x: ArrayLike, mask: ArrayLike, *, axis: Axis = None) -> jax.Array:
    """Sum of the valid entries: Σ m·x.

    Args:
      x: floating array of any shape.
      mask: bool, of the same shape.
      axis: the axis or axes to reduce; all by default.

    Returns:
      float32 (float64 if ``x`` is), 0 where nothing is valid.

    Raises:
      TypeError: if ``x`` is not floating or ``mask`` not bool.
      ValueError: if the shapes differ.

    Example:
      >>> float(sum(jnp.array([1.0, jnp.nan]), jnp.array([True, False])))
      1.0
    """
    x, _ = _checked(x, mask)
    return jnp.sum(x, axis=axis)


def mean(x: ArrayLike, mask: ArrayLike, *, axis: Axis = None) -> jax.Array:
    """Mean of the valid entries: Σ m·x / Σ m.

    Args:
      x: floating array of any shape.
      mask: bool, of the same shape.
      axis: the axis or axes to reduce; all by default.

    Returns:
      float32 (float64 if ``x`` is), 0 where nothing is valid.

    Raises:
      TypeError: if ``x`` is not floating or ``mask`` not bool.
      ValueError: if the shapes differ.

    Example:
      >>> float(mean(jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False])))
      2.0
    """
    x, m = _checked(x, mask)
    count = jnp.sum(m, axis=axis, dtype=x.dtype)
    return jnp.sum(x, axis=axis) / jnp.maximum(count, 1.0)


def _deviations(
    x: jax.Array, m: jax.Array, axis: Axis
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Mean, deviations (exactly 0 for equal entries), count, and whether all entries are equal."""
    count = jnp.sum(m, axis=axis, keepdims=True, dtype=x.dtype)
    centre = jnp.sum(x, axis=axis, keepdims=True) / jnp.maximum(count, 1.0)
    top = jnp.max(jnp.where(m, x, -jnp.inf), axis=axis, keepdims=True)
    bottom = jnp.min(jnp.where(m, x, jnp.inf), axis=axis, keepdims=True)
    equal = jax.lax.stop_gradient(top <= bottom)  # also where nothing is valid
    return centre, jnp.where(m & ~equal, x - centre, 0.0), count, equal


def deviations(x: ArrayLike, mask: ArrayLike, *, axis: Axis = None) -> jax.Array:
    """Deviations of the valid entries from their mean: m·(x − μ).

    Args:
      x: floating array of any shape.
      mask: bool, of the same shape.
      axis: the axes the mean is taken over; all by default.

    Returns:
      Array of the shape of ``x``, 0 off the mask; exactly 0 where all valid entries are equal.

    Raises:
      TypeError: if ``x`` is not floating or ``mask`` not bool.
      ValueError: if the shapes differ.

    Example:
      >>> deviations(jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False])).tolist()
      [-1.0, 1.0, 0.0]
    """
    return _deviations(*_checked(x, mask), axis)[1]


def var(x: ArrayLike, mask: ArrayLike, *, axis: Axis = None, ddof: int = 0) -> jax.Array:
    """Variance of the valid entries, in two passes: Σ m·(x−μ)² / (Σ m − ddof).

    Args:
      x: floating array of any shape.
      mask: bool, of the same shape.
      axis: the axis or axes to reduce; all by default.
      ddof: 0 for the population variance, 1 for the unbiased one.

    Returns:
      float32 (float64 if ``x`` is); exactly 0 where all valid entries are equal, or none is valid.

    Raises:
      TypeError: if ``x`` is not floating or ``mask`` not bool.
      ValueError: if the shapes differ, or ``ddof`` is neither 0 nor 1.

    Example:
      >>> float(var(jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False]), ddof=1))
      2.0
    """
    checks.one_of("ddof", ddof, (0, 1))
    x, m = _checked(x, mask)
    _, deviations, count, _ = _deviations(x, m, axis)
    squares = jnp.sum(deviations**2, axis=axis, keepdims=True)
    out = squares / jnp.maximum(count - ddof, 1.0)
    return jnp.squeeze(out, axis=axis)


def whiten(
    x: ArrayLike,
    mask: ArrayLike,
    *,
    axis: Axis = None,
    shift_mean: bool = True,
    ddof: int = 0,
    eps: float | jax.Array = 1e-8,
) -> jax.Array:
    """Whiten the valid entries: m·((x−μ)·rsqrt(σ²+ε) + [0 or μ]).

    Args:
      x: floating array of any shape.
      mask: bool, of the same shape.
      axis: the axes the statistics are taken over; all by default.
      shift_mean: False adds the mean back, as is usual for rewards.
      ddof: 0 for the population variance, 1 for the unbiased one.
      eps: added to the variance.

    Returns:
      Array of the shape of ``x``, 0 off the mask. Equal entries (one valid entry, say) have
      deviation exactly 0. Differentiable; the advantage functions stop the gradient themselves.

    Raises:
      TypeError: if ``x`` is not floating or ``mask`` not bool.
      ValueError: if the shapes differ, ``ddof`` is neither 0 nor 1, or ``eps`` is negative.

    Example:
      >>> whiten(jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False])).tolist()
      [-1.0, 1.0, 0.0]
    """
    checks.one_of("ddof", ddof, (0, 1))
    checks.non_negative("eps", eps)
    x, m = _checked(x, mask)
    centre, deviations, count, equal = _deviations(x, m, axis)
    squares = jnp.sum(deviations**2, axis=axis, keepdims=True)
    variance = squares / jnp.maximum(count - ddof, 1.0) + eps
    # Without eps the squares of minute deviations may vanish: those then stay as they are.
    variance = jnp.where(equal | (variance == 0), 1.0, variance)
    white = deviations * jax.lax.rsqrt(variance)
    return white if shift_mean else jnp.where(m, white + centre, 0.0)


# ---- aggregation of a loss ----


def _prompt_denominator(mask: jax.Array, group_ids: ArrayLike | None) -> jax.Array:
    if group_ids is None:
        raise ValueError(
            "group_ids is missing: aggregation='prompt_mean' needs to know which prompt a row "
            "belongs to. Pass group_ids=int [B], or [B, T] for packed rows."
        )
    ids = checks.integer("group_ids", group_ids, ndim=(1, 2), axes="[B] or [B, T]")
    counts = jnp.sum(mask, axis=1, dtype=jnp.int32) if ids.ndim == 1 else mask.astype(jnp.int32)
    checks.shape("group_ids", ids, counts.shape, like="mask")
    flat, ids = counts.reshape(-1), ids.reshape(-1)
    tokens = group_sum(flat, ids)
    # Each group counts once: its entries share a vote, weighted by their tokens.
    votes = jnp.where(flat > 0, flat / jnp.maximum(tokens, 1), 0.0)
    groups = jnp.round(jnp.sum(votes))
    return (tokens * groups).astype(jnp.float32).reshape(counts.shape)


def denominator(
    mask: ArrayLike,
    aggregation: str,
    *,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """Count what a loss is divided by, over the whole batch and before any split.

    ``token_mean``: valid tokens. ``seq_mean_token_mean``, ``seq_mean_token_sum``: sequences with a
    valid token. ``fixed_length``: all rows × length (with ``segment_ids``, sequences with a valid
    token × length: an empty one leaves no trace in a packed row). ``prompt_mean``: valid tokens of
    the row's group × groups with a valid token.

    Args:
      mask: bool [B, T], of the whole global batch.
      aggregation: one of ``AGGREGATIONS``.
      length: the constant length, for ``fixed_length`` only.
      group_ids: int [B], for ``prompt_mean`` only; [B, T] if prompts share packed rows.
      segment_ids: int [B, T] for packed rows.

    Returns:
      float32: a scalar; for ``prompt_mean`` one of the shape of ``group_ids``, which has to be
      split together with the rows.

    Raises:
      TypeError: if ``mask`` is not bool, or ids are not integers.
      ValueError: if the aggregation is unknown, or an argument it needs is missing.

    References:
      Liu et al., "Understanding R1-Zero-like training", 2025, for the constant length; Yu et al.,
      "DAPO", 2025, eq. 12, for the token mean.

    Example:
      >>> mask = jnp.array([[True, True, True], [True, False, False]])
      >>> float(denominator(mask, "token_mean")), float(denominator(mask, "fixed_length", length=4))
      (4.0, 8.0)
    """
    checks.one_of("aggregation", aggregation, AGGREGATIONS)
    mask = checks.boolean("mask", mask, ndim=2, axes="[B, T]")
    if aggregation == "token_mean":
        return jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32)
    if aggregation == "prompt_mean":
        return _prompt_denominator(mask, group_ids)
    if segment_ids is None:
        sequences = jnp.sum(jnp.any(mask, axis=1), dtype=jnp.float32)
    else:
        sequences = jnp.sum(last_valid(mask, segment_ids), dtype=jnp.float32)
    if aggregation != "fixed_length":
        return sequences
    if length is None:
        raise ValueError(
            "length is missing: aggregation='fixed_length' divides by a constant. Pass length=, "
            "the longest completion that may be sampled, say."
        )
    checks.positive("length", length)
    rows = mask.shape[0] if segment_ids is None else sequences
    return jnp.asarray(rows * jnp.asarray(length), jnp.float32)


_denominator = denominator  # aggregate() has an argument of that name


def aggregate(
    values: ArrayLike,
    mask: ArrayLike,
    aggregation: str,
    *,
    denominator: ArrayLike | None = None,
    length: int | jax.Array | None = None,
    group_ids: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """Reduce per-token values to a scalar: Σ w·m·ℓ / D, with D counted over the global batch.

    w is 1, or 1 / (valid tokens of the sequence) for ``seq_mean_token_mean``; D is what the
    function ``denominator`` counts. With D of the whole batch handed in, the results (and
    gradients) of its micro-batches add up to those of the whole.

    Args:
      values: floating [B, T].
      mask: bool [B, T].
      aggregation: one of ``AGGREGATIONS``.
      denominator: float scalar, [B] or [B, T]: D, counted ahead; from this batch by default.
      length: the constant length, for ``fixed_length`` without a denominator.
      group_ids: int [B] or [B, T], for ``prompt_mean`` without a denominator.
      segment_ids: int [B, T] for packed rows.

    Returns:
      A float32 (or float64) scalar, 0 if no token is valid. ``denominator`` is stop-gradient.

    Raises:
      TypeError: if ``values`` is not floating, ``mask`` not bool, or ids are not integers.
      ValueError: if the aggregation is unknown, a shape does not fit, or a needed argument is
        missing.

    Example:
      >>> losses = jnp.array([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]])
      >>> mask = jnp.array([[True, True, True], [True, False, False]])
      >>> [float(aggregate(losses, mask, name)) for name in ("token_mean", "seq_mean_token_mean")]
      [2.5, 3.0]
    """
    checks.one_of("aggregation", aggregation, AGGREGATIONS)
    values = checks.real("values", values, ndim=2, axes="[B, T]")
    mask = checks.boolean("mask", mask, like=values, like_name="values")
    if denominator is None:
        count = _denominator(
            mask, aggregation, length=length, group_ids=group_ids, segment_ids=segment_ids
        )
    else:
        count = jnp.asarray(denominator)
        checks.rank("denominator", count, (0, 1, 2), axes="a scalar, [B] or [B, T]")
        if count.ndim:
            checks.shape("denominator", count, mask.shape[: count.ndim], like="values")
    count = jax.lax.stop_gradient(count).astype(values.dtype)
    values = jnp.where(mask, values, 0.0)
    if aggregation == "seq_mean_token_mean":
        ones = jnp.ones_like(values)
        values = values / jnp.maximum(sequence_sum(ones, mask, segment_ids), 1.0)
    if count.ndim == 0:
        values = jnp.sum(values)
    elif count.ndim == 1:
        values = jnp.sum(values, axis=1)
    return jnp.sum(jnp.where(count > 0, values / jnp.where(count > 0, count, 1.0), 0.0))

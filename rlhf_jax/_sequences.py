"""Sums over the sequences of a row and over the rows of a group; ``masked`` exports them.

A sequence is a row, or, with ``segment_ids``, a run of valid tokens of one id within a row; masked
tokens between them (tool output) do not end it. Its sums are scans along T, without a scatter, so
that rows may be sharded in any way.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks

# The scans are jitted: op by op, an eager call would compile dozens of small programs.


@functools.partial(jax.jit, static_argnames="reverse")
def _nearest(ids: jax.Array, mask: jax.Array, *, reverse: bool) -> tuple[jax.Array, jax.Array]:
    """The id of the nearest valid token strictly before (after, if reverse), and whether any is."""

    def keep(far, near):
        return jnp.where(near[1], near[0], far[0]), far[1] | near[1]

    ids, found = jax.lax.associative_scan(keep, (ids, mask), reverse=reverse, axis=1)
    window = ((0, 0), (0, 1)) if reverse else ((0, 0), (1, 0))
    cut = (lambda x: x[:, 1:]) if reverse else (lambda x: x[:, :-1])
    return cut(jnp.pad(ids, window)), cut(jnp.pad(found, window))


def _edges(mask: jax.Array, segment_ids: ArrayLike | None, *, reverse: bool) -> jax.Array:
    if segment_ids is None:
        seen = jax.lax.cumsum(mask.astype(jnp.int32), axis=1, reverse=reverse)
        return mask & (seen == 1)
    ids = checks.integer("segment_ids", segment_ids, like=mask, like_name="mask")
    neighbour, found = _nearest(ids, mask, reverse=reverse)
    return mask & (~found | (neighbour != ids))


def last_valid(mask: ArrayLike, segment_ids: ArrayLike | None = None) -> jax.Array:
    """Mark the last valid token of every sequence, where its score belongs.

    Args:
      mask: bool [B, T].
      segment_ids: int [B, T], which sequence of its row a token belongs to; None for one per row.

    Returns:
      bool [B, T], one true entry for each sequence that has a valid token.

    Raises:
      TypeError: if ``mask`` is not bool or ``segment_ids`` not integer.
      ValueError: if the ranks or shapes do not fit.

    Example:
      >>> last_valid(jnp.array([[True, True, False]])).tolist()
      [[False, True, False]]
    """
    mask = checks.boolean("mask", mask, ndim=2, axes="[B, T]")
    return _edges(mask, segment_ids, reverse=True)


def first_valid(mask: ArrayLike, segment_ids: ArrayLike | None = None) -> jax.Array:
    """Mark the first valid token of every sequence.

    Args:
      mask: bool [B, T].
      segment_ids: int [B, T], which sequence of its row a token belongs to; None for one per row.

    Returns:
      bool [B, T], one true entry for each sequence that has a valid token.

    Raises:
      TypeError: if ``mask`` is not bool or ``segment_ids`` not integer.
      ValueError: if the ranks or shapes do not fit.

    Example:
      >>> first_valid(jnp.array([[False, True, True]])).tolist()
      [[False, True, False]]
    """
    mask = checks.boolean("mask", mask, ndim=2, axes="[B, T]")
    return _edges(mask, segment_ids, reverse=False)


@jax.jit
def _spread_last(x: jax.Array, first: jax.Array, last: jax.Array) -> jax.Array:
    """Give every token of a sequence the total of x, summed in one fixed order."""

    def add(left, right):
        return jnp.where(right[1], right[0], left[0] + right[0]), left[1] | right[1]

    def copy(right, left):
        return jnp.where(left[1], left[0], right[0]), left[1] | right[1]

    running, _ = jax.lax.associative_scan(add, (x, first), axis=1)
    total, _ = jax.lax.associative_scan(copy, (running, last), reverse=True, axis=1)
    return total


def sequence_sum(x: ArrayLike, mask: ArrayLike, segment_ids: ArrayLike | None = None) -> jax.Array:
    """Sum over each sequence, broadcast to its valid tokens: Σ over the sequence of m·x.

    Args:
      x: floating [B, T].
      mask: bool [B, T].
      segment_ids: int [B, T], which sequence of its row a token belongs to; None for one per row.

    Returns:
      [B, T], 0 off the mask; all tokens of a sequence hold the same number.

    Raises:
      TypeError: if ``x`` is not floating, ``mask`` not bool or ``segment_ids`` not integer.
      ValueError: if the ranks or shapes do not fit.

    Example:
      >>> sequence_sum(jnp.array([[1.0, 2.0, 9.0]]), jnp.array([[True, True, False]])).tolist()
      [[3.0, 3.0, 0.0]]
    """
    checks.rank("x", x, 2, axes="[B, T]")
    x = checks.real("x", x)
    m = checks.boolean("mask", mask, like=x, like_name="x")
    x = jnp.where(m, x, 0.0)
    if segment_ids is None:
        return jnp.where(m, jnp.sum(x, axis=1, keepdims=True), 0.0)
    first, last = _edges(m, segment_ids, reverse=False), _edges(m, segment_ids, reverse=True)
    return jnp.where(m, _spread_last(x, first, last), 0.0)


def sequence_mean(x: ArrayLike, mask: ArrayLike, segment_ids: ArrayLike | None = None) -> jax.Array:
    """Mean over each sequence, broadcast to its valid tokens: Σ m·x / Σ m over the sequence.

    Args:
      x: floating [B, T].
      mask: bool [B, T].
      segment_ids: int [B, T], which sequence of its row a token belongs to; None for one per row.

    Returns:
      [B, T], 0 off the mask; all tokens of a sequence hold the same number.

    Raises:
      TypeError: if ``x`` is not floating, ``mask`` not bool or ``segment_ids`` not integer.
      ValueError: if the ranks or shapes do not fit.

    Example:
      >>> sequence_mean(jnp.array([[1.0, 3.0, 9.0]]), jnp.array([[True, True, False]])).tolist()
      [[2.0, 2.0, 0.0]]
    """
    total = sequence_sum(x, mask, segment_ids)
    return total / jnp.maximum(sequence_sum(jnp.ones_like(total), mask, segment_ids), 1.0)


# ---- groups of rows ----


def gathered(x: jax.Array) -> jax.Array:
    """Give every device the whole array where explicit mesh axes shard it; else do nothing."""
    sharding = jax.typeof(x).sharding
    if all(axis is None for axis in sharding.spec):
        return x
    return jax.sharding.reshard(x, jax.NamedSharding(sharding.mesh, jax.P(*[None] * x.ndim)))


def group_labels(group_ids: jax.Array) -> jax.Array:
    """Number the groups 0, 1, … in the order of their ids: [N] in, [N] out."""
    order = jnp.argsort(group_ids)
    ranked = group_ids[order]
    starts = jnp.concatenate([jnp.zeros(1, bool), ranked[1:] != ranked[:-1]])
    numbers = jnp.cumsum(starts[: ranked.shape[0]], dtype=jnp.int32)
    return jnp.zeros_like(numbers).at[order].set(numbers)


def group_sum(x: ArrayLike, group_ids: ArrayLike) -> jax.Array:
    """Sum over the entries of each group, given to each of its members: Σ_j [g_j = g_i]·x_j.

    Args:
      x: [N], of any dtype that adds.
      group_ids: int [N], any numbers.

    Returns:
      [N], of the dtype of ``x``.

    Raises:
      TypeError: if ``group_ids`` is not integer.
      ValueError: if the shapes do not fit.

    Example:
      >>> group_sum(jnp.array([1.0, 2.0, 4.0]), jnp.array([7, 3, 7])).tolist()
      [5.0, 2.0, 5.0]
    """
    x = jnp.asarray(x)
    checks.rank("x", x, 1, axes="[N]")
    ids = checks.integer("group_ids", group_ids, like=x, like_name="x")
    labels = group_labels(gathered(ids))
    return jax.ops.segment_sum(gathered(x), labels, num_segments=x.shape[0])[labels]

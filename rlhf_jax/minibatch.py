"""Minibatches of a batch: shuffled without replacement, groups kept whole where they must be.

    for index in minibatch.shuffle(key, rows=256, parts=4, group_size=8):
        part = minibatch.take(batch, index)     # then count its denominator: it is the whole batch
        state, metrics = train_step(state, part)  # of this update

A batch is prompt-major (:mod:`rlhf_jax.types`), so a group is ``group_size`` neighbouring rows.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlhf_jax import checks, masked
from rlhf_jax.types import Batch, Params

__all__ = ["counted", "shuffle", "take"]


def shuffle(key: jax.Array, *, rows: int, parts: int, group_size: int = 1) -> jax.Array:
    """Deal the rows into ``parts`` minibatches, each row into exactly one.

    index = reshape(permutation(rows), [parts, rows/parts]), in units of whole groups

    Args:
      key: a new-style PRNG key; the same key gives the same order.
      rows: B, rows of the batch.
      parts: how many minibatches; must divide the rows.
      group_size: neighbouring rows that stay together, in their order; 1 shuffles single rows.

    Returns:
      int32 ``[parts, B/parts]``, row numbers.

    Raises:
      ValueError: if the minibatches cannot be equal, or not of whole groups.

    Example:
      >>> import jax
      >>> index = shuffle(jax.random.key(0), rows=8, parts=2, group_size=2)
      >>> index.shape, sorted(index.reshape(-1).tolist()) == list(range(8))
      ((2, 4), True)
      >>> [(row[1::2] - row[::2]).tolist() for row in index]
      [[1, 1], [1, 1]]
    """
    for name, value in (("rows", rows), ("parts", parts), ("group_size", group_size)):
        checks.number(name, value, at_least=1, remedy=f"Pass {name} ≥ 1.")
    if rows % parts:
        raise ValueError(f"parts: {parts} does not divide {rows} rows; use a divisor of {rows}")
    if (rows // parts) % group_size:
        raise ValueError(
            f"group_size: {rows // parts} rows a minibatch are no whole groups of {group_size}; "
            "use fewer parts, or group_size=1 to split groups"
        )
    order = jax.random.permutation(key, rows // group_size).astype(jnp.int32)
    index = order[:, None] * group_size + jnp.arange(group_size, dtype=jnp.int32)
    return index.reshape(parts, rows // parts)


def take(batch: Params, index: jax.Array) -> Params:
    """The rows ``index`` of every array of a batch: x ↦ x[index].

    Args:
      batch: a :class:`Batch` or any pytree of row-first arrays.
      index: int32 ``[b]``, row numbers.

    Returns:
      The same pytree with ``b`` rows. A ``denominator`` still counts the whole batch: see
      :func:`counted`.

    Raises:
      TypeError: if ``index`` holds no integers.
      ValueError: if ``index`` is not one-dimensional.

    Example:
      >>> import jax.numpy as jnp
      >>> take({"rewards": jnp.array([1.0, 2.0, 3.0])}, jnp.array([2, 0]))["rewards"].tolist()
      [3.0, 1.0]
    """
    index = checks.integer("index", index, ndim=1, axes="[b]")
    return jax.tree.map(lambda x: jnp.take(x, index, axis=0), batch)


def counted(batch: Batch, aggregation: str, *, length: int | jax.Array | None = None) -> Batch:
    """The batch with the denominator of its own rows: D of what one update sees.

    Args:
      batch: all rows of one update, before any split into micro-batches.
      aggregation: one of ``masked.AGGREGATIONS``.
      length: the constant length, for ``fixed_length`` only.

    Returns:
      The batch; its ``denominator`` is float32 ``[B]`` (packed rows: ``[B, T]``).

    Raises:
      ValueError: as :func:`rlhf_jax.masked.denominator`.

    Example:
      >>> import jax.numpy as jnp
      >>> ones, zeros = jnp.ones((2, 3), bool), jnp.zeros((2, 3))
      >>> batch = Batch(
      ...     tokens=jnp.zeros((2, 3), jnp.int32),
      ...     mask=ones,
      ...     attention_mask=ones,
      ...     group_ids=jnp.zeros(2, jnp.int32),
      ...     advantages=jnp.ones(2),
      ...     old_log_probs=zeros,
      ...     sampler_log_probs=zeros,
      ... )
      >>> counted(batch, "token_mean").denominator.tolist()
      [6.0, 6.0]
    """
    groups = batch.group_ids if aggregation == "prompt_mean" else None
    count = masked.denominator(
        batch.mask,
        aggregation,
        length=length,
        group_ids=groups,
        segment_ids=batch.segment_ids,
    )
    count = jnp.broadcast_to(count, batch.group_ids.shape)
    return dataclasses.replace(batch, denominator=count)

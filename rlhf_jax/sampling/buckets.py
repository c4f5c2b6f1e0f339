"""Declared shapes: batches are padded up to them, so that new lengths do not recompile."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.sampling.options import SamplingOptions
from rlhf_jax.types import Rollout

__all__ = ["round_up"]


class _Batch(NamedTuple):
    prompts: tuple[jax.Array, jax.Array]
    group_ids: jax.Array
    options: SamplingOptions
    keys: jax.Array | None


def round_up(size: int, buckets: Sequence[int] | None, name: str = "size") -> int:
    """The smallest bucket that holds ``size``.

    Args:
      size: what must fit.
      buckets: the declared sizes, in any order; None returns ``size``.
      name: what is measured, for the error.

    Returns:
      The bucket.

    Raises:
      ValueError: when ``size`` is larger than every bucket.

    >>> round_up(65, (64, 128, 256))
    128
    """
    if buckets is None:
        return size
    fitting = [bucket for bucket in buckets if bucket >= size]
    if not fitting:
        raise ValueError(
            f"{name}: {size} does not fit the largest bucket ({max(buckets, default=0)}); "
            "declare a larger one, or shorten the input yourself"
        )
    return min(fitting)


def pad_batch(
    prompts: tuple[jax.Array, jax.Array],
    group_ids: jax.Array,
    options: SamplingOptions,
    keys: jax.Array | None,
    *,
    prompt_buckets: Sequence[int] | None,
    row_buckets: Sequence[int] | None,
) -> _Batch:
    """Columns of padding on the left, and prompts that never start (their cap is 0) at the end."""
    count, width = prompts[0].shape
    columns = round_up(width, prompt_buckets, "prompt width") - width
    more = round_up(count, row_buckets, "number of prompts") - count
    if columns or more:
        prompts = tuple(jnp.pad(array, ((0, more), (columns, 0))) for array in prompts)  # pyright: ignore[reportAssignmentType]
    if row_buckets is None:
        return _Batch(prompts, group_ids, options, keys)

    def grow(array: jax.Array, rank: int) -> jax.Array:
        if array.ndim < rank or array.shape[0] != count:
            return array
        return jnp.concatenate([array, jnp.broadcast_to(array[:1], (more, *array.shape[1:]))])

    fields = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if getattr(options, field.name) is not None
    }
    wide = {name: 3 if name in ("stop_ids", "logit_bias") else 2 for name in fields}
    grown: Any = {name: grow(array, wide[name]) for name, array in fields.items()}
    caps = options.max_new_tokens
    caps = caps if caps.ndim else jnp.broadcast_to(caps, (count, 1))
    grown["max_new_tokens"] = jnp.pad(caps, ((0, more), (0, 0)))
    # a prompt must have a token, and its id must not repeat another's
    tokens, mask = prompts
    mask = mask.at[count:, -1].set(True)
    group_ids = jnp.concatenate([group_ids, -1 - jnp.arange(more, dtype=group_ids.dtype)])
    return _Batch(
        (tokens, mask),
        group_ids,
        dataclasses.replace(options, **grown),
        None if keys is None else grow(keys, 2),
    )


def cut_rows(rollout: Rollout, rows: int) -> Rollout:
    """The first ``rows`` rows: without those that padded the batch."""
    if rollout.tokens.shape[0] == rows:
        return rollout
    return jax.tree.map(lambda leaf: leaf[:rows] if leaf.ndim else leaf, rollout)

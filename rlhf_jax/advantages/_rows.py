"""Shared by the advantage functions: missing rewards, group statistics, recurrences."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from rlhf_jax import checks
from rlhf_jax._sequences import gathered, group_labels


def as_rewards(
    name: str,
    rewards: ArrayLike,
    valid: ArrayLike | None,
    *,
    ndim: int = 1,
    axes: str = "[B]",
) -> tuple[jax.Array, jax.Array]:
    """Return rewards (missing ones as 0) and which of them count."""
    if isinstance(rewards, (list, tuple)) and any(r is None for r in rewards):
        rewards = jnp.array([jnp.nan if r is None else float(r) for r in rewards])
    x = jax.lax.stop_gradient(checks.real(name, rewards, ndim=ndim, axes=axes))
    here = ~jnp.isnan(x)
    if valid is not None:
        here &= checks.boolean("valid", valid, like=x, like_name=name)
    checks.finite(name, x, where=here, remedy="Mark a missing reward with NaN, not with infinity.")
    return jnp.where(here, x, 0.0), here


def as_groups(group_ids: ArrayLike, rows: int, *, function: str) -> jax.Array:
    """Check group ids; refuse groups of one row where the ids can be read."""
    ids = checks.integer("group_ids", group_ids, ndim=1, axes="[B]")
    checks.shape("group_ids", ids, (rows,), like="rewards")
    if checks.is_concrete(ids):
        numbers, counts = np.unique(np.asarray(ids), return_counts=True)
        if (counts < 2).any():
            raise ValueError(
                f"group_ids: group {numbers[counts < 2][0]} has one row; {function} needs at least "
                "2 completions of a prompt to form a baseline. Sample more per prompt, or use "
                "batch_centered or moving_average."
            )
    return ids


class GroupStatistics(NamedTuple):
    """Per row (or entry) the statistics of its group; shapes broadcast against the values.

    deviation is exactly 0 for groups with equal values; count is the number of valid entries.
    """

    mean: jax.Array
    deviation: jax.Array
    count: jax.Array
    varies: jax.Array

    def std(self, of_group: Callable[[jax.Array], jax.Array], ddof: int) -> jax.Array:
        """Two-pass standard deviation; 1 where the group does not vary (or its squares vanish)."""
        variance = of_group(self.deviation**2) / jnp.maximum(self.count - ddof, 1.0)
        return jnp.sqrt(jnp.where(self.varies & (variance > 0), variance, 1.0))


class Groups:
    """Reductions over the groups of rows of [B] or [B, ...] values."""

    def __init__(self, group_ids: jax.Array) -> None:
        self.labels = group_labels(gathered(group_ids))
        self.size = group_ids.shape[0]

    def _reduce(self, x: jax.Array, rows: Callable, segments: Callable) -> jax.Array:
        trailing = (1,) * (x.ndim - 1)
        per_row = gathered(rows(x, axis=tuple(range(1, x.ndim))) if x.ndim > 1 else x)
        out = segments(per_row, self.labels, num_segments=self.size)[self.labels]
        return out.reshape(self.size, *trailing)

    def sum(self, x: jax.Array) -> jax.Array:
        return self._reduce(x, jnp.sum, jax.ops.segment_sum)

    def max(self, x: jax.Array) -> jax.Array:
        return self._reduce(x, jnp.max, jax.ops.segment_max)

    def statistics(self, x: jax.Array, valid: jax.Array) -> GroupStatistics:
        count = self.sum(valid.astype(x.dtype))
        mean = self.sum(jnp.where(valid, x, 0.0)) / jnp.maximum(count, 1.0)
        top = self.max(jnp.where(valid, x, -jnp.inf))
        bottom = -self.max(jnp.where(valid, -x, -jnp.inf))
        varies = top > bottom
        deviation = jnp.where(valid & varies, x - mean, 0.0)
        return GroupStatistics(mean, deviation, count, varies)

    def first(self) -> jax.Array:
        """Mark one row of each group."""
        row = jnp.arange(self.size, dtype=jnp.int32)
        lowest = jax.ops.segment_min(row, self.labels, num_segments=self.size)
        return lowest[self.labels] == row


@jax.jit
def backward_recurrence(decay: jax.Array, add: jax.Array, mask: jax.Array) -> jax.Array:
    """x_t = add_t + decay_t·x_(next valid t), over valid tokens only; 0 off the mask."""

    def compose(later, here):
        return later[0] * here[0], here[1] + here[0] * later[1]

    pair = (jnp.where(mask, decay, 1.0), jnp.where(mask, add, 0.0))
    _, out = jax.lax.associative_scan(compose, pair, reverse=True, axis=1)
    return jnp.where(mask, out, 0.0)


def per_token(name: str, x: ArrayLike, mask: jax.Array, check: Callable) -> jax.Array:
    """Accept [B] or [B, T] and return [B, T]."""
    array = check(name, x, ndim=(1, 2), axes="[B] or [B, T]")
    checks.shape(name, array, mask.shape[: array.ndim], like="mask")
    return jnp.broadcast_to(array[:, None] if array.ndim == 1 else array, mask.shape)

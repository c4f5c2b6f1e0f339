"""Baselines from the other completions of a prompt. Groups are explicit ids, of any size ≥ 2."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks
from rlhf_jax.advantages._rows import Groups, as_groups, as_rewards, backward_recurrence
from rlhf_jax.masked import last_valid
from rlhf_jax.metrics import Metric, Metrics


def leave_one_out(
    rewards: ArrayLike, group_ids: ArrayLike, *, valid: ArrayLike | None = None
) -> jax.Array:
    """Reward minus the mean of the others of the group: A_i = K/(K−1)·(R_i − mean_g R).

    Args:
      rewards: floating [B]; NaN marks a missing one; stop-gradient.
      group_ids: int [B], any numbers, rows in any order.
      valid: bool [B], rows that count besides; all by default.

    Returns:
      [B], float32 (or float64): exactly 0 where the group's rewards are equal, where the row does
      not count, and where missing rewards leave the group with one.

    Raises:
      TypeError: if rewards are not floating, ids not integers, or ``valid`` not bool.
      ValueError: if shapes do not fit, a reward is infinite, or a group has one row (checked where
        ids can be read; under jit such a row gets 0).

    References:
      Kool, van Hoof, Welling, "Buy 4 REINFORCE samples, get a baseline for free!", 2019; Ahmadian
      et al., "Back to basics", 2024, eq. 8.

    Example:
      >>> a = leave_one_out(jnp.array([0.2, 0.9, 0.4]), jnp.array([0, 0, 0]))
      >>> [round(x, 4) for x in a.tolist()]
      [-0.45, 0.6, -0.15]
    """
    x, here = as_rewards("rewards", rewards, valid)
    groups = Groups(as_groups(group_ids, x.shape[0], function="leave_one_out"))
    stats = groups.statistics(x, here)
    return stats.deviation * stats.count / jnp.maximum(stats.count - 1.0, 1.0)


def group_normalized(
    rewards: ArrayLike,
    group_ids: ArrayLike,
    *,
    ddof: int,
    eps: float | jax.Array = 1e-4,
    valid: ArrayLike | None = None,
) -> jax.Array:
    """The z-score within the group: A_i = (R_i − mean_g R) / (std_g R + ε).

    Args:
      rewards: floating [B]; NaN marks a missing one; stop-gradient.
      group_ids: int [B], any numbers, rows in any order.
      ddof: 0 for the population's standard deviation, 1 for the sample's; systems differ, so there
        is no default.
      eps: added to the standard deviation; 0 is allowed.
      valid: bool [B], rows that count besides; all by default.

    Returns:
      [B], float32 (or float64): exactly 0 where the group's rewards are equal, whatever ε, where
      the row does not count, and where missing rewards leave the group with one.

    Raises:
      TypeError: if rewards are not floating, ids not integers, or ``valid`` not bool.
      ValueError: if shapes do not fit, a reward is infinite, ``ddof`` is neither 0 nor 1, ``eps``
        is negative, or a group has one row (checked where ids can be read; under jit it gets 0).

    References:
      Shao et al., "DeepSeekMath", 2024, §4.1.2.

    Example:
      >>> r, g = jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.array([0, 0, 0, 0])
      >>> group_normalized(r, g, ddof=0, eps=0.0).tolist()
      [1.0, -1.0, -1.0, 1.0]
    """
    checks.one_of("ddof", ddof, (0, 1))
    checks.non_negative("eps", eps)
    x, here = as_rewards("rewards", rewards, valid)
    groups = Groups(as_groups(group_ids, x.shape[0], function="group_normalized"))
    stats = groups.statistics(x, here)
    return stats.deviation / (stats.std(groups.sum, ddof) + eps)


def centered(
    rewards: ArrayLike, group_ids: ArrayLike, *, valid: ArrayLike | None = None
) -> jax.Array:
    """Reward minus the group's mean, itself included: A_i = R_i − mean_g R.

    Short of the unbiased ``leave_one_out`` by the factor (K−1)/K.

    Args:
      rewards: floating [B]; NaN marks a missing one; stop-gradient.
      group_ids: int [B], any numbers, rows in any order.
      valid: bool [B], rows that count besides; all by default.

    Returns:
      [B], float32 (or float64): exactly 0 where the group's rewards are equal, where the row does
      not count, and where missing rewards leave the group with one.

    Raises:
      TypeError: if rewards are not floating, ids not integers, or ``valid`` not bool.
      ValueError: if shapes do not fit, a reward is infinite, or a group has one row (checked where
        ids can be read; under jit such a row gets 0).

    References:
      Liu et al., "Understanding R1-Zero-like training", 2025, §3.2 (Dr. GRPO).

    Example:
      >>> centered(jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.array([0, 0, 0, 0])).tolist()
      [0.5, -0.5, -0.5, 0.5]
    """
    x, here = as_rewards("rewards", rewards, valid)
    groups = Groups(as_groups(group_ids, x.shape[0], function="centered"))
    return groups.statistics(x, here).deviation


def max_rl(
    rewards: ArrayLike, group_ids: ArrayLike, *, valid: ArrayLike | None = None
) -> jax.Array:
    """Success relative to the group's success rate: A_i = (R_i − mean_g R) / mean_g R.

    Args:
      rewards: floating [B], 0 or 1 (≥ 0 at least); NaN marks a missing one; stop-gradient.
      group_ids: int [B], any numbers, rows in any order.
      valid: bool [B], rows that count besides; all by default.

    Returns:
      [B], float32 (or float64): exactly 0 for groups without a success, or with successes only.

    Raises:
      TypeError: if rewards are not floating, ids not integers, or ``valid`` not bool.
      ValueError: if shapes do not fit, a reward is negative, or a group has one row (both checked
        where they can be read).

    References:
      Tajwar et al., "Maximum likelihood reinforcement learning", 2026.

    Example:
      >>> max_rl(jnp.array([1.0, 0.0, 0.0, 1.0]), jnp.array([0, 0, 0, 0])).tolist()
      [1.0, -1.0, -1.0, 1.0]
    """
    x, here = as_rewards("rewards", rewards, valid)
    checks.non_negative("rewards", x, remedy="max_rl takes success rewards, 0 or 1.")
    groups = Groups(as_groups(group_ids, x.shape[0], function="max_rl"))
    stats = groups.statistics(x, here)
    return stats.deviation / jnp.where(stats.varies, jnp.maximum(stats.mean, 1e-30), 1.0)


def process_supervision(
    step_rewards: ArrayLike,
    step_mask: ArrayLike,
    mask: ArrayLike,
    group_ids: ArrayLike,
    *,
    ddof: int,
    eps: float | jax.Array = 1e-4,
) -> jax.Array:
    """Rewards of reasoning steps, normalised over the group: A_t = Σ over steps ending ≥ t of r̃.

    r̃ = (r − mean)/(std + ε), with the statistics of all steps of all the group's completions.

    Args:
      step_rewards: floating [B, T], a step's reward at the step's last token; NaN marks a missing
        one; stop-gradient.
      step_mask: bool [B, T], true at the last token of each step.
      mask: bool [B, T], the valid tokens.
      group_ids: int [B], any numbers, rows in any order.
      ddof: 0 for the population's standard deviation, 1 for the sample's.
      eps: added to the standard deviation; 0 is allowed.

    Returns:
      [B, T], float32 (or float64), 0 off the mask.

    Raises:
      TypeError: if rewards are not floating, masks not bool, or ids not integers.
      ValueError: if shapes do not fit, a step ends off the mask, ``ddof`` is neither 0 nor 1,
        ``eps`` is negative, or a group has one row (values are checked where they can be read).

    References:
      Shao et al., "DeepSeekMath", 2024, §4.1.3.

    Example:
      >>> r, on = jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.ones((2, 2), bool)
      >>> ends = jnp.array([[False, True], [False, True]])
      >>> process_supervision(r, ends, on, jnp.array([0, 0]), ddof=0, eps=0.0).tolist()
      [[1.0, 1.0], [-1.0, -1.0]]
    """
    checks.one_of("ddof", ddof, (0, 1))
    checks.non_negative("eps", eps)
    mask = checks.boolean("mask", mask, ndim=2, axes="[B, T]")
    ends = checks.boolean("step_mask", step_mask, like=mask, like_name="mask")
    if checks.is_concrete(ends) and checks.is_concrete(mask) and bool(jnp.any(ends & ~mask)):
        raise ValueError(
            "step_mask marks tokens that mask excludes. Mark the last valid token of each step."
        )
    ends = ends & mask
    raw = checks.real("step_rewards", step_rewards, ndim=2, axes="[B, T]")
    checks.shape("step_rewards", raw, mask.shape, like="mask")
    x, here = as_rewards("step_rewards", raw, ends, ndim=2, axes="[B, T]")
    groups = Groups(as_groups(group_ids, x.shape[0], function="process_supervision"))
    stats = groups.statistics(x, here)
    normalised = stats.deviation / (stats.std(groups.sum, ddof) + eps)
    return backward_recurrence(jnp.where(last_valid(mask), 0.0, 1.0), normalised, mask)


def dynamic_sampling(
    rewards: ArrayLike, group_ids: ArrayLike, *, valid: ArrayLike | None = None
) -> tuple[jax.Array, Metrics]:
    """Keep the rows of mixed groups: keep_i = (max_g R > min_g R), and count the others.

    Compute the advantages first; then drop the rows from mask *and* denominators
    (``mask & keep[:, None]``) and sample on until the batch is full.

    Args:
      rewards: floating [B]; NaN marks a missing one, whose row is not kept; stop-gradient.
      group_ids: int [B], any numbers, rows in any order; groups of one are never kept.
      valid: bool [B], rows that count besides; all by default.

    Returns:
      keep, bool [B], and metrics: ``reward/zero_std_groups``, the share of groups whose rewards
      are equal, and ``reward/dropped_rows``, how many rows are not kept.

    Raises:
      TypeError: if rewards are not floating, ids not integers, or ``valid`` not bool.
      ValueError: if shapes do not fit or a reward is infinite.

    References:
      Yu et al., "DAPO", 2025, eq. 11.

    Example:
      >>> keep, metrics = dynamic_sampling(jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([0, 0, 5, 5]))
      >>> keep.tolist(), float(metrics["reward/zero_std_groups"].value())
      ([True, True, False, False], 0.5)
    """
    x, here = as_rewards("rewards", rewards, valid)
    ids = checks.integer("group_ids", group_ids, like=x, like_name="rewards")
    groups = Groups(ids)
    stats = groups.statistics(x, here)
    keep = here & stats.varies
    counted = groups.first() & (stats.count > 0)
    share = Metric(
        total=jnp.sum(counted & ~stats.varies, dtype=jnp.float32),
        weight=jnp.sum(counted, dtype=jnp.float32),
        kind="mean",
    )
    rows = jnp.sum(~keep, dtype=jnp.float32)
    dropped = Metric(total=rows, weight=jnp.float32(x.shape[0]), kind="sum")
    return keep, {"reward/zero_std_groups": share, "reward/dropped_rows": dropped}

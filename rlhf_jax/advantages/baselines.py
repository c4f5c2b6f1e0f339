"""Baselines that need no group: the batch, a moving average, a greedy completion, whitening."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks, masked
from rlhf_jax.advantages._rows import as_rewards
from rlhf_jax.advantages.groups import centered
from rlhf_jax.advantages.returns import monte_carlo_returns


def batch_centered(rewards: ArrayLike, *, valid: ArrayLike | None = None) -> jax.Array:
    """Reward minus the mean of the batch: A_i = R_i − mean R.

    Args:
      rewards: floating [B]; NaN marks a missing one; stop-gradient.
      valid: bool [B], rows that count besides; all by default.

    Returns:
      [B], float32 (or float64): exactly 0 if all rewards are equal, and where one is missing.

    Raises:
      TypeError: if rewards are not floating or ``valid`` not bool.
      ValueError: if shapes do not fit or a reward is infinite.

    References:
      Williams, "Simple statistical gradient-following algorithms", 1992, on the baseline.

    Example:
      >>> batch_centered(jnp.array([1.0, 0.0, 2.0])).tolist()
      [0.0, -1.0, 1.0]
    """
    x, here = as_rewards("rewards", rewards, valid)
    return masked.deviations(x, here)


def batch_normalized(
    rewards: ArrayLike,
    *,
    ddof: int,
    eps: float | jax.Array = 1e-8,
    valid: ArrayLike | None = None,
) -> jax.Array:
    """The z-score within the batch: A_i = (R_i − mean R) / (std R + ε).

    Args:
      rewards: floating [B]; NaN marks a missing one; stop-gradient.
      ddof: 0 for the population's standard deviation, 1 for the sample's.
      eps: added to the standard deviation; 0 is allowed.
      valid: bool [B], rows that count besides; all by default.

    Returns:
      [B], float32 (or float64): exactly 0 if all rewards are equal, and where one is missing.

    Raises:
      TypeError: if rewards are not floating or ``valid`` not bool.
      ValueError: if shapes do not fit, a reward is infinite, ``ddof`` is neither 0 nor 1, or
        ``eps`` is negative.

    References:
      Williams, "Simple statistical gradient-following algorithms", 1992, on the baseline.

    Example:
      >>> batch_normalized(jnp.array([1.0, -1.0]), ddof=0, eps=0.0).tolist()
      [1.0, -1.0]
    """
    checks.one_of("ddof", ddof, (0, 1))
    checks.non_negative("eps", eps)
    x, here = as_rewards("rewards", rewards, valid)
    variance = masked.var(x, here, ddof=ddof)
    std = jnp.where(variance > 0, jnp.sqrt(variance) + eps, 1.0)
    return masked.deviations(x, here) / std


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MovingAverage:
    """State of a moving-average baseline: a decayed sum of rewards and of their number.

    Attributes:
      total: float32 scalar.
      weight: float32 scalar; total/weight is the baseline, free of start-up bias.

    Example:
      >>> float(MovingAverage.init().baseline())
      0.0
    """

    total: jax.Array
    weight: jax.Array

    @classmethod
    def init(cls) -> MovingAverage:
        """Return the state before any reward: baseline 0.

        Example:
          >>> float(MovingAverage.init().weight)
          0.0
        """
        return cls(total=jnp.zeros(()), weight=jnp.zeros(()))

    def baseline(self) -> jax.Array:
        """Return total / weight; 0 before any reward.

        Example:
          >>> float(MovingAverage(total=jnp.float32(1), weight=jnp.float32(2)).baseline())
          0.5
        """
        return jnp.where(self.weight > 0, self.total / jnp.maximum(self.weight, 1e-30), 0.0)


def moving_average(
    rewards: ArrayLike,
    state: MovingAverage,
    *,
    decay: float | jax.Array = 0.95,
    valid: ArrayLike | None = None,
) -> tuple[jax.Array, MovingAverage]:
    """Reward minus a moving average of *earlier* batches: A_i = R_i − b, then b is updated.

    The baseline knows nothing of the current batch, so the gradient stays unbiased.

    Args:
      rewards: floating [B]; NaN marks a missing one; stop-gradient.
      state: the baseline so far.
      decay: weight of the past at each update, in [0, 1).
      valid: bool [B], rows that count besides; all by default.

    Returns:
      The advantages [B] (0 where missing), and the state for the next batch.

    Raises:
      TypeError: if rewards are not floating or ``valid`` not bool.
      ValueError: if shapes do not fit, a reward is infinite, or ``decay`` is outside [0, 1).

    References:
      Williams, "Simple statistical gradient-following algorithms", 1992, on the baseline.

    Example:
      >>> a, state = moving_average(jnp.array([1.0, 3.0]), MovingAverage.init())
      >>> a.tolist(), float(state.baseline())
      ([1.0, 3.0], 2.0)
    """
    checks.number("decay", decay, at_least=0.0, below=1.0, remedy="0.95 is usual.")
    x, here = as_rewards("rewards", rewards, valid)
    count = jnp.sum(here, dtype=x.dtype)
    new = MovingAverage(
        total=(decay * state.total + (1.0 - decay) * jnp.sum(x)).astype(state.total.dtype),
        weight=(decay * state.weight + (1.0 - decay) * count).astype(state.weight.dtype),
    )
    return jnp.where(here, x - state.baseline(), 0.0), new


def remax(
    rewards: ArrayLike, greedy_rewards: ArrayLike, *, valid: ArrayLike | None = None
) -> jax.Array:
    """Reward minus that of the greedy completion of the same prompt: A_i = R_i − R_greedy.

    Args:
      rewards: floating [B]; NaN marks a missing one; stop-gradient.
      greedy_rewards: floating [B], of each row's prompt; NaN marks a missing one; stop-gradient.
      valid: bool [B], rows that count besides; all by default.

    Returns:
      [B], float32 (or float64), 0 where either reward is missing.

    Raises:
      TypeError: if rewards are not floating or ``valid`` not bool.
      ValueError: if shapes do not fit or a reward is infinite.

    References:
      Li et al., "ReMax", 2024, eq. 6.

    Example:
      >>> remax(jnp.array([1.0, 0.0]), jnp.array([0.5, 0.5])).tolist()
      [0.5, -0.5]
    """
    x, here = as_rewards("rewards", rewards, valid)
    greedy, known = as_rewards("greedy_rewards", greedy_rewards, None)
    checks.shape("greedy_rewards", greedy, x.shape, like="rewards")
    return jnp.where(here & known, x - greedy, 0.0)


def reinforce_plus_plus(
    rewards: ArrayLike,
    mask: ArrayLike,
    *,
    gamma: float | jax.Array = 1.0,
    eps: float | jax.Array = 1e-8,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """Rewards to go, whitened over all valid tokens: A = (G − mean G)·rsqrt(var G + ε).

    Args:
      rewards: floating [B, T], per token: −β·k₁ everywhere and the score at the last valid token,
        as ``rewards.shaping.kl_in_reward`` gives them; stop-gradient.
      mask: bool [B, T], of the whole batch.
      gamma: γ in [0, 1].
      eps: added to the (population) variance.
      segment_ids: int [B, T] for packed rows.

    Returns:
      [B, T], float32 (or float64), 0 off the mask.

    Raises:
      TypeError: if rewards are not floating or ``mask`` not bool.
      ValueError: if shapes do not fit, γ is outside [0, 1], or ``eps`` is negative.

    References:
      Hu et al., "REINFORCE++", 2025.

    Example:
      >>> r = jnp.array([[0.0, 1.0], [0.0, -1.0]])
      >>> reinforce_plus_plus(r, jnp.ones((2, 2), bool)).tolist()
      [[1.0, 1.0], [-1.0, -1.0]]
    """
    returns = monte_carlo_returns(rewards, mask, gamma=gamma, segment_ids=segment_ids)
    return masked.whiten(returns, mask, eps=eps)


def reinforce_plus_plus_baseline(
    rewards: ArrayLike,
    group_ids: ArrayLike,
    mask: ArrayLike,
    *,
    eps: float | jax.Array = 1e-8,
    valid: ArrayLike | None = None,
) -> jax.Array:
    """R − group mean on each token, whitened over all valid tokens of the batch.

    Args:
      rewards: floating [B]; NaN marks a missing one, whose row is left out; stop-gradient.
      group_ids: int [B], any numbers, rows in any order.
      mask: bool [B, T], of the whole batch.
      eps: added to the (population) variance.
      valid: bool [B], rows that count besides; all by default.

    Returns:
      [B, T], float32 (or float64), 0 off the mask.

    Raises:
      TypeError: if rewards are not floating, ids not integers, or a mask not bool.
      ValueError: if shapes do not fit, a reward is infinite, ``eps`` is negative, or a group has
        one row (checked where ids can be read).

    References:
      Hu et al., "REINFORCE++", 2025, the variant with a group baseline.

    Example:
      >>> on = jnp.ones((2, 2), bool)
      >>> reinforce_plus_plus_baseline(jnp.array([2.0, 1.0]), jnp.array([0, 0]), on).tolist()
      [[1.0, 1.0], [-1.0, -1.0]]
    """
    x, here = as_rewards("rewards", rewards, valid)
    mask = checks.boolean("mask", mask, ndim=2, axes="[B, T]")
    checks.shape("mask", mask, (x.shape[0], mask.shape[1]), like="rewards")
    mask = mask & here[:, None]
    advantages = centered(x, group_ids, valid=here)
    return masked.whiten(jnp.broadcast_to(advantages[:, None], mask.shape), mask, eps=eps)

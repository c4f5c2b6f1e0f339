"""Shaping of rewards, in the usual order: clip or normalise, EOS and length, KL, whitening.

Scores are per row, [B], floating; a missing one is NaN and stays NaN. Per-token rewards are [B, T].
Everything here is stop-gradient: the score function differentiates the policy, not the reward.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks, kl, masked
from rlhf_jax.rewards._running import RunningMoments

__all__ = [
    "RunningMoments",
    "clip",
    "eos_bonus",
    "kl_in_reward",
    "missing_eos_score",
    "overlong_filter",
    "overlong_hard",
    "overlong_soft",
    "place_at_last",
    "sequence_kl_in_reward",
]


def _scores(scores: ArrayLike) -> jax.Array:
    return jax.lax.stop_gradient(checks.real("scores", scores, ndim=1, axes="[B]"))


def _flags(name: str, x: ArrayLike, rows: int, like: str) -> jax.Array:
    flags = checks.boolean(name, x, ndim=1, axes="[B]")
    checks.shape(name, flags, (rows,), like=like)
    return flags


def place_at_last(
    scores: ArrayLike, mask: ArrayLike, *, segment_ids: ArrayLike | None = None
) -> jax.Array:
    """Put each completion's score on its last valid token: r_t = R·[t is the last valid].

    Args:
      scores: floating [B]; packed rows: [B, T], read at last valid tokens; stop-gradient.
      mask: bool [B, T].
      segment_ids: int [B, T] for packed rows.

    Returns:
      [B, T], float32 (or float64); a row without a valid token is all 0.

    Raises:
      TypeError: if scores are not floating or ``mask`` not bool.
      ValueError: if shapes do not fit, or the score of a row with valid tokens is not finite
        (checked where values can be read): drop the row from the mask first.

    Example:
      >>> place_at_last(jnp.array([2.0]), jnp.array([[False, True, True, False]])).tolist()
      [[0.0, 0.0, 2.0, 0.0]]
    """
    mask = checks.boolean("mask", mask, ndim=2, axes="[B, T]")
    x = jax.lax.stop_gradient(checks.real("scores", scores, ndim=(1, 2), axes="[B] or [B, T]"))
    checks.shape("scores", x, mask.shape[: x.ndim], like="mask")
    last = masked.last_valid(mask, segment_ids)
    checks.finite(
        "scores",
        x,
        where=last.any(axis=1) if x.ndim == 1 else last,
        remedy="Drop the row first: mask & jnp.isfinite(scores)[:, None].",
    )
    return jnp.where(last, x[:, None] if x.ndim == 1 else x, 0.0)


def kl_in_reward(
    scores: ArrayLike,
    log_probs: ArrayLike,
    ref_log_probs: ArrayLike,
    mask: ArrayLike,
    *,
    kl_coef: float | jax.Array,
    segment_ids: ArrayLike | None = None,
) -> jax.Array:
    """Per-token rewards: r_t = −β·(log π − log π_ref) on valid tokens, + R on the last valid one.

    The penalty is ``kl.k1``, the same numbers that ``kl.mean_sequence_kl`` sums for the log and the
    controller; detached, its policy gradient is ∇KL(π‖ref).

    Args:
      scores: floating [B]; packed rows: [B, T], read at last valid tokens; stop-gradient.
      log_probs: floating [B, T], of the policy that sampled; stop-gradient.
      ref_log_probs: floating [B, T]; stop-gradient.
      mask: bool [B, T].
      kl_coef: β ≥ 0.
      segment_ids: int [B, T] for packed rows.

    Returns:
      [B, T], float32 (or float64), 0 off the mask.

    Raises:
      TypeError: if an array is not floating or ``mask`` not bool.
      ValueError: if shapes do not fit, ``kl_coef`` is negative, or a score is not finite.

    References:
      Ouyang et al., "Training language models to follow instructions", 2022, eq. 2.

    Example:
      >>> lp, ref = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.5, -1.0]])
      >>> kl_in_reward(jnp.array([1.0]), lp, ref, jnp.ones((1, 2), bool), kl_coef=0.5).tolist()
      [[-0.25, 1.0]]
    """
    checks.non_negative("kl_coef", kl_coef, remedy="A KL penalty has β ≥ 0.")
    checks.rank("log_probs", log_probs, 2, axes="[B, T]")
    penalty = jax.lax.stop_gradient(kl.k1(log_probs, ref_log_probs, mask=mask))
    # + 0.0 turns −0 into 0.
    return place_at_last(scores, mask, segment_ids=segment_ids) - kl_coef * penalty + 0.0


def sequence_kl_in_reward(
    scores: ArrayLike,
    log_probs: ArrayLike,
    ref_log_probs: ArrayLike,
    mask: ArrayLike,
    *,
    kl_coef: float | jax.Array,
) -> jax.Array:
    """One reward per completion: R − β·Σ_t (log π − log π_ref), summed over valid tokens.

    Args:
      scores: floating [B], NaN where missing; stop-gradient.
      log_probs: floating [B, T], of the policy that sampled; stop-gradient.
      ref_log_probs: floating [B, T]; stop-gradient.
      mask: bool [B, T], one sequence per row.
      kl_coef: β ≥ 0.

    Returns:
      [B], float32 (or float64), NaN where the score is missing.

    Raises:
      TypeError: if an array is not floating or ``mask`` not bool.
      ValueError: if shapes do not fit or ``kl_coef`` is negative.

    References:
      Ahmadian et al., "Back to basics", 2024, eq. 3.

    Example:
      >>> lp, ref, on = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.5, -1.0]]), jnp.ones((1, 2), bool)
      >>> sequence_kl_in_reward(jnp.array([1.0]), lp, ref, on, kl_coef=0.5).tolist()
      [0.75]
    """
    checks.non_negative("kl_coef", kl_coef, remedy="A KL penalty has β ≥ 0.")
    checks.rank("log_probs", log_probs, 2, axes="[B, T]")
    x = _scores(scores)
    checks.shape("scores", x, jnp.shape(log_probs)[:1], like="log_probs")
    penalty = jax.lax.stop_gradient(kl.k1(log_probs, ref_log_probs, mask=mask))
    return x - kl_coef * jnp.sum(penalty, axis=1)


def eos_bonus(
    scores: ArrayLike,
    terminated: ArrayLike,
    *,
    bonus: float | jax.Array = 0.0,
    penalty: float | jax.Array = 0.0,
) -> jax.Array:
    """Reward ending and charge for not ending: R + bonus if terminated, else R − penalty.

    Args:
      scores: floating [B], NaN where missing; stop-gradient.
      terminated: bool [B], the completion ended with EOS or a stop sequence.
      bonus: added where terminated, ≥ 0.
      penalty: taken off where not, ≥ 0.

    Returns:
      [B], float32 (or float64).

    Raises:
      TypeError: if scores are not floating or ``terminated`` not bool.
      ValueError: if shapes do not fit, or an option is negative.

    Example:
      >>> eos_bonus(jnp.array([1.0, 1.0]), jnp.array([True, False]), penalty=0.5).tolist()
      [1.0, 0.5]
    """
    checks.non_negative("bonus", bonus)
    checks.non_negative("penalty", penalty, remedy="It is subtracted: pass penalty ≥ 0.")
    x = _scores(scores)
    return x + jnp.where(_flags("terminated", terminated, x.shape[0], "scores"), bonus, -penalty)


def missing_eos_score(
    scores: ArrayLike, terminated: ArrayLike, *, score: float | jax.Array = -1.0
) -> jax.Array:
    """Replace the score of completions without EOS by a constant: R if terminated, else c.

    Args:
      scores: floating [B], NaN where missing; stop-gradient.
      terminated: bool [B], the completion ended with EOS or a stop sequence.
      score: c.

    Returns:
      [B], float32 (or float64). A missing score of a completion without EOS becomes c as well.

    Raises:
      TypeError: if scores are not floating or ``terminated`` not bool.
      ValueError: if shapes do not fit.

    References:
      Stiennon et al., "Learning to summarize from human feedback", 2020.

    Example:
      >>> missing_eos_score(jnp.array([0.9, 0.9]), jnp.array([True, False])).tolist()
      [0.8999999761581421, -1.0]
    """
    checks.number("score", score)
    x = _scores(scores)
    return jnp.where(_flags("terminated", terminated, x.shape[0], "scores"), x, score)


def overlong_hard(truncated: ArrayLike, *, penalty: float | jax.Array = 1.0) -> jax.Array:
    """Charge every completion that was cut: −penalty if truncated, else 0.

    Args:
      truncated: bool [B], the completion ran into the length cap.
      penalty: ≥ 0.

    Returns:
      float32 [B], to be added to the scores.

    Raises:
      TypeError: if ``truncated`` is not bool.
      ValueError: if ``penalty`` is negative.

    Example:
      >>> overlong_hard(jnp.array([True, False])).tolist()
      [-1.0, 0.0]
    """
    checks.non_negative("penalty", penalty, remedy="It is subtracted: pass penalty ≥ 0.")
    flags = checks.boolean("truncated", truncated, ndim=1, axes="[B]")
    return jnp.where(flags, -jnp.asarray(penalty, jnp.float32), 0.0)


def overlong_soft(
    lengths: ArrayLike,
    *,
    max_length: int | jax.Array,
    cache: int | jax.Array,
    penalty: float | jax.Array = 1.0,
) -> jax.Array:
    """Charge length linearly over the last stretch: −p·clip((l − (L − c))/c, 0, 1).

    Args:
      lengths: int [B], valid tokens of each completion.
      max_length: L > 0, where the whole penalty is reached.
      cache: c > 0, over how many tokens it grows.
      penalty: p ≥ 0.

    Returns:
      float32 [B], to be added to the scores.

    Raises:
      TypeError: if ``lengths`` are not integers.
      ValueError: if an option is not positive, or ``cache`` exceeds ``max_length``.

    References:
      Yu et al., "DAPO", 2025, eq. 13.

    Example:
      >>> overlong_soft(jnp.array([10, 18, 30]), max_length=20, cache=4).tolist()
      [0.0, -0.5, -1.0]
    """
    lengths = checks.integer("lengths", lengths, ndim=1, axes="[B]")
    checks.positive("max_length", max_length)
    checks.positive("cache", cache)
    checks.non_negative("penalty", penalty, remedy="It is subtracted: pass penalty ≥ 0.")
    if checks.is_concrete(max_length) and checks.is_concrete(cache):
        checks.number("cache", cache, at_most=float(max_length), remedy="It ends at max_length.")
    over = (lengths - (jnp.asarray(max_length) - cache)).astype(jnp.float32)
    return -penalty * jnp.clip(over / cache, 0.0, 1.0) + 0.0


def overlong_filter(mask: ArrayLike, truncated: ArrayLike) -> jax.Array:
    """Take cut completions out of the loss: m·[not truncated].

    Apply it after the group advantages, so that cut completions still count in the baseline, and
    use the result for the loss and its denominator alike.

    Args:
      mask: bool [B, T].
      truncated: bool [B], the completion ran into the length cap.

    Returns:
      bool [B, T].

    Raises:
      TypeError: if an array is not bool.
      ValueError: if shapes do not fit.

    References:
      Yu et al., "DAPO", 2025, §3.4.

    Example:
      >>> overlong_filter(jnp.ones((2, 1), bool), jnp.array([True, False])).tolist()
      [[False], [True]]
    """
    mask = checks.boolean("mask", mask, ndim=2, axes="[B, T]")
    return mask & ~_flags("truncated", truncated, mask.shape[0], "mask")[:, None]


def clip(scores: ArrayLike, *, low: float | jax.Array, high: float | jax.Array) -> jax.Array:
    """Clip scores to an interval: min(max(R, low), high).

    Args:
      scores: floating [B], NaN where missing; stop-gradient.
      low: lower bound.
      high: upper bound, above ``low``.

    Returns:
      [B], float32 (or float64).

    Raises:
      TypeError: if scores are not floating.
      ValueError: if ``low`` ≥ ``high``.

    Example:
      >>> clip(jnp.array([-3.0, 0.5]), low=-1.0, high=1.0).tolist()
      [-1.0, 0.5]
    """
    if checks.is_concrete(low) and checks.is_concrete(high):
        checks.number("high", high, above=float(low), remedy="Pass low < high.")
    return jnp.clip(_scores(scores), low, high)

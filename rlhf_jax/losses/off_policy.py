"""Weights for samples of another policy: sampler mismatch and staleness."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks, masked, metrics
from rlhf_jax.losses import _common
from rlhf_jax.metrics import Metrics

__all__ = ["LEVELS", "MODES", "off_policy_weights", "staleness_metrics"]

MODES = ("truncate", "mask")
LEVELS = ("token", "sequence", "geometric")


def _log_weights(old, sampler, mask, level, segment_ids, log_clamp) -> jax.Array:
    """log w per token, clamped before any exp; a sum over a long sequence is clamped as a sum."""
    difference = old - sampler
    if level == "sequence":
        difference = masked.sequence_sum(difference, mask, segment_ids)
    elif level == "geometric":
        difference = masked.sequence_mean(difference, mask, segment_ids)
    return jnp.clip(difference, -log_clamp, log_clamp)


def off_policy_weights(
    old_log_probs: ArrayLike,
    sampler_log_probs: ArrayLike,
    mask: ArrayLike,
    *,
    mode: str = "truncate",
    level: str = "token",
    low: float | jax.Array = 0.0,
    high: float | jax.Array = 2.0,
    log_clamp: float = 10.0,
    segment_ids: ArrayLike | None = None,
) -> tuple[jax.Array, Metrics]:
    r"""Importance weights from what the sampler drew with to what the learner computes.

    ``w = exp(clip(log π_old − log μ, ±10))`` per token, or of the sequence's sum (``sequence``) or
    mean (``geometric``; a product collapses with length). ``truncate``: ``min(w, high)``;
    ``mask``: ``w·1[low ≤ w ≤ high]``.

    Hand the result to any loss as ``weights=``. If log μ itself serves as ``old_log_probs`` there
    is nothing left to correct: leave the weights out. With ``mask``, dropped tokens still count in
    denominators, as in an importance-sampled mean; to drop them there too, use
    ``mask & (weights > 0)`` as the mask of both loss and denominator.

    Args:
      old_log_probs: float ``[B, T]``, log π_old as the learner computes it; stop-gradient.
      sampler_log_probs: float ``[B, T]``, log μ kept **from sampling time** and of the same kind
        (full softmax against full softmax); stop-gradient.
      mask: bool ``[B, T]``; the result is 0 where it is false.
      mode: ``"truncate"`` or ``"mask"``.
      level: ``"token"``, ``"sequence"`` or ``"geometric"``.
      low: least weight that is kept by ``mask``, ≥ 0.
      high: C > 0, greatest weight.
      log_clamp: bound of \|log w\| before exp, > 0.
      segment_ids: int ``[B, T]``, for packed rows.

    Returns:
      Weights, float32 ``[B, T]``, 0 off the mask and detached; and the metrics
      ``off_policy/logprob_diff_mean|max`` (per token), ``ess`` (of w before truncation),
      ``weight_mean|max``, ``clipped`` (share above C) and ``dropped`` (share set to 0), the latter
      per token or per sequence as the level is.

    Raises:
      ValueError: shapes that do not fit, an unknown mode or level, bounds out of order; TypeError:
        wrong dtypes.

    References:
      Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025;
      Ionides, "Truncated importance sampling", 2008.

    Example:
      >>> import jax.numpy as jnp
      >>> old, mu = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.0, -3.0]])
      >>> weights, found = off_policy_weights(old, mu, jnp.ones((1, 2), bool))
      >>> weights.tolist(), float(found["off_policy/clipped"].value())
      ([[1.0, 2.0]], 0.5)
    """
    checks.one_of("mode", mode, MODES)
    checks.one_of("level", level, LEVELS)
    checks.non_negative("low", low)
    checks.positive("high", high)
    checks.positive("log_clamp", log_clamp)
    if checks.is_concrete(low) and checks.is_concrete(high) and low >= high:
        raise ValueError(f"low={low} must be below high={high}")
    old_log_probs = checks.real("old_log_probs", old_log_probs, ndim=2, axes="[B, T]")
    mask = checks.boolean("mask", mask, like=old_log_probs, like_name="old_log_probs")
    old = _common.per_token("old_log_probs", old_log_probs, mask)
    sampler = _common.per_token("sampler_log_probs", sampler_log_probs, mask)
    raw = jnp.exp(_log_weights(old, sampler, mask, level, segment_ids, log_clamp))
    if mode == "truncate":
        kept = jnp.minimum(raw, high)
    else:
        kept = jnp.where((raw >= low) & (raw <= high), raw, 0.0)
    kept = jnp.where(mask, kept, 0.0)
    units = mask if level == "token" else masked.last_valid(mask, segment_ids)
    gap = jnp.abs(old - sampler)
    return kept, {
        "off_policy/logprob_diff_mean": metrics.mean(gap, mask),
        "off_policy/logprob_diff_max": metrics.maximum(gap, mask),
        "off_policy/ess": metrics.effective_share(raw, units),
        "off_policy/weight_mean": metrics.mean(kept, units),
        "off_policy/weight_max": metrics.maximum(kept, units),
        "off_policy/clipped": metrics.mean((raw > high) & (kept > 0), units),
        "off_policy/dropped": metrics.mean(kept == 0, units),
    }


def staleness_metrics(version: ArrayLike, sampler_versions: ArrayLike) -> Metrics:
    """How many updates old the samples are.

    ``s_b = version − sampler_version_b``.

    Args:
      version: int scalar, the version of the weights being trained.
      sampler_versions: int scalar or ``[B]``, the version that sampled each row.

    Returns:
      ``off_policy/staleness_mean`` and ``off_policy/staleness_max``.

    Raises:
      TypeError: versions that are no integers.

    Example:
      >>> import jax.numpy as jnp
      >>> found = staleness_metrics(5, jnp.array([5, 3]))
      >>> float(found["off_policy/staleness_mean"].value())
      1.0
    """
    version = checks.integer("version", version, ndim=0, axes="scalar")
    sampled = checks.integer("sampler_versions", sampler_versions, ndim=(0, 1), axes="[B]")
    stale = (version - sampled).astype(jnp.float32)
    return {
        "off_policy/staleness_mean": metrics.mean(stale),
        "off_policy/staleness_max": metrics.maximum(stale),
    }

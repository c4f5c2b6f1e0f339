"""What every policy loss shares: checks, masking, ratios, the clipped surrogate, metrics."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from rlhf_jax import checks, kl, masked, metrics
from rlhf_jax.metrics import Metrics

MAX_LOG_RATIO = kl.MAX_LOG_RATIO
"""|log ρ| is clamped here before exp: e²⁰ ≈ 5·10⁸ is far beyond use and far from overflow."""


class Inputs(NamedTuple):
    """Checked float arrays ``[B, T]``, 0 off the mask; only ``log_probs`` is differentiated."""

    log_probs: jax.Array
    old_log_probs: jax.Array
    advantages: jax.Array
    mask: jax.Array

    @property
    def log_ratio(self) -> jax.Array:
        """log ρ = log π − log π_old per token, clamped; 0 off the mask."""
        return clamp(self.log_probs - self.old_log_probs)


def clamp(log_ratio: jax.Array) -> jax.Array:
    """Keeps exp() finite; the gradient is 0 beyond the bound."""
    return jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def per_token(
    name: str, x: ArrayLike, mask: jax.Array, *, rows: bool = False, stop: bool = True
) -> jax.Array:
    """A float ``[B, T]`` (or, with ``rows``, ``[B]``) as ``[B, T]``, 0 off the mask."""
    ranks, axes = ((1, 2), "[B] or [B, T]") if rows else (2, "[B, T]")
    x = checks.real(name, x, ndim=ranks, axes=axes)
    checks.shape(name, x, mask.shape[: x.ndim], like="log_probs")
    x = lax.stop_gradient(x) if stop else x
    return jnp.where(mask, x if x.ndim == 2 else x[:, None], 0.0)


def prepare(
    log_probs: ArrayLike,
    old_log_probs: ArrayLike | None,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    old_optional: bool = False,
) -> Inputs:
    """Checks the four arrays that all policy losses take and masks them before any arithmetic.

    With ``old_optional`` the policy itself, detached, stands in for missing ``old_log_probs``.
    """
    if old_log_probs is None and not old_optional:
        raise ValueError(
            "old_log_probs is None: the ratio needs them, float [B, T]. Pass the log-probs from "
            "before the update; for a single step on policy jax.lax.stop_gradient(log_probs)."
        )
    log_probs = checks.real("log_probs", log_probs, ndim=2, axes="[B, T]")
    mask = checks.boolean("mask", mask, like=log_probs, like_name="log_probs")
    log_probs = jnp.where(mask, log_probs, 0.0)
    old = log_probs if old_log_probs is None else old_log_probs
    return Inputs(
        log_probs,
        per_token("old_log_probs", old, mask),
        per_token("advantages", advantages, mask, rows=True),
        mask,
    )


def clip_range(clip_low: Any, clip_high: Any) -> None:
    """Refuses ε ≤ 0, and a lower ε above 1, where 1 − ε < 0 clips nothing."""
    remedy = "It is the ε of 1 ± ε, such as 0.2; the ratio's bounds themselves are not passed."
    checks.positive("clip_low", clip_low, remedy=remedy)
    checks.number("clip_low", clip_low, at_most=1.0, remedy=remedy)
    checks.positive("clip_high", clip_high, remedy=remedy)


def clipped_surrogate(
    log_ratio: jax.Array, advantages: jax.Array, clip_low: Any, clip_high: Any
) -> jax.Array:
    """max(−ρA, −clip(ρ, 1−ε_lo, 1+ε_hi)·A), the pessimistic of the two."""
    clip_range(clip_low, clip_high)
    ratio = jnp.exp(log_ratio)
    bounded = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    # Where the two agree (inside the range) take the unclipped one whole: max() would split the
    # gradient of a tie between them, which is the same, but not at the bounds themselves.
    unclipped, clipped = -ratio * advantages, -bounded * advantages
    return jnp.where(unclipped >= clipped, unclipped, clipped)


def reference_kl(
    inputs: Inputs, ref_log_probs: ArrayLike | None, kl_coef: Any, estimator: str
) -> tuple[jax.Array | float, Metrics]:
    """β·k per token, and its metrics: what is logged is what is trained."""
    checks.non_negative("kl_coef", kl_coef, remedy="β penalises drift; a negative one pays for it.")
    checks.one_of("kl_estimator", estimator, (*kl.ESTIMATORS, "k3_off_policy"))
    used = not checks.is_concrete(kl_coef) or float(kl_coef) != 0.0
    if ref_log_probs is None:
        if used:
            raise ValueError(
                f"ref_log_probs is None, but kl_coef={kl_coef}. Pass ref_log_probs [B, T], or "
                "leave kl_coef at 0.0 (then no reference model is needed)."
            )
        return 0.0, {}
    ref = per_token("ref_log_probs", ref_log_probs, inputs.mask)
    if estimator == "k3_off_policy":
        values = kl.k3_off_policy(inputs.log_probs, inputs.old_log_probs, ref, mask=inputs.mask)
    else:
        term = kl.loss_term if used else kl.estimate
        values = term(estimator, inputs.log_probs, ref, mask=inputs.mask)
    found = {
        f"policy/kl_ref_{name}": metrics.mean(
            kl.estimate(name, inputs.log_probs, ref, mask=inputs.mask), inputs.mask
        )
        for name in ("k1", "k3")
    }
    return (kl_coef * values if used else 0.0), found


def reduce(
    values: jax.Array,
    mask: jax.Array,
    weights: ArrayLike | None,
    aggregation: str,
    **options: Any,
) -> jax.Array:
    """Σ over the batch of w·ℓ / denominator; ``weights`` are off-policy weights, detached."""
    if weights is not None:
        values = values * per_token("weights", weights, mask, rows=True)
    return masked.aggregate(values, mask, aggregation, **options)


def policy_metrics(inputs: Inputs, loss: jax.Array, **more: jax.Array) -> Metrics:
    """The entries that every policy loss has; ``more`` are parts of the loss, as scalars."""
    return {
        "policy/loss": metrics.sum_(loss),
        **{f"policy/loss_{name}": metrics.sum_(part) for name, part in more.items()},
        "policy/advantage_mean": metrics.mean(inputs.advantages, inputs.mask),
        "policy/advantage_std": metrics.std(inputs.advantages, inputs.mask),
        # Sampled from π_old: KL(π_old‖π) by k3.
        "policy/kl_old": metrics.mean(
            kl.old_to_new("k3", inputs.log_probs, inputs.old_log_probs, mask=inputs.mask),
            inputs.mask,
        ),
    }


def ratio_metrics(log_ratio: jax.Array, mask: jax.Array) -> Metrics:
    """Mean and extremes of the ratio over ``mask``."""
    ratio = jnp.exp(log_ratio)
    return {
        "policy/ratio_mean": metrics.mean(ratio, mask),
        "policy/ratio_min": metrics.minimum(ratio, mask),
        "policy/ratio_max": metrics.maximum(ratio, mask),
    }


def clip_metrics(
    log_ratio: jax.Array, advantages: jax.Array, mask: jax.Array, low: Any, high: Any
) -> Metrics:
    """Shares where the clipped branch is active, by side, and where ρ left [low, high] at all."""
    ratio = jnp.exp(log_ratio)
    below, above = ratio < low, ratio > high
    return {
        "policy/clip_low": metrics.mean(below & (advantages < 0), mask),
        "policy/clip_high": metrics.mean(above & (advantages > 0), mask),
        "policy/outside_clip": metrics.mean(below | above, mask),
    }


def bound_metrics(log_ratio: jax.Array, mask: jax.Array, low: Any, high: Any) -> Metrics:
    """For losses that clip a weight and not a gradient: shares of weights at their bounds."""
    ratio = jnp.exp(log_ratio)
    below, above = ratio < low, ratio > high
    return {
        "policy/clip_low": metrics.mean(below, mask),
        "policy/clip_high": metrics.mean(above, mask),
        "policy/outside_clip": metrics.mean(below | above, mask),
    }

"""Running normalisation of scores; ``shaping`` exports it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks, masked


def _read(scores: ArrayLike) -> jax.Array:
    return jax.lax.stop_gradient(checks.real("scores", scores, ndim=1, axes="[B]"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunningMoments:
    """Mean and variance of all scores so far, to normalise by; a pytree to keep in checkpoints.

    Attributes:
      count: float32 scalar.
      mean: float32 scalar.
      squares: float32 scalar, Σ(R − mean)².

    References:
      Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
      variances", 1979.

    Example:
      >>> moments = RunningMoments.init().update(jnp.array([1.0, 3.0]))
      >>> moments.normalize(jnp.array([3.0])).tolist()
      [1.0]
    """

    count: jax.Array
    mean: jax.Array
    squares: jax.Array

    @classmethod
    def init(cls) -> RunningMoments:
        """Return the moments of no scores.

        Example:
          >>> float(RunningMoments.init().count)
          0.0
        """
        return cls(count=jnp.zeros(()), mean=jnp.zeros(()), squares=jnp.zeros(()))

    def update(self, scores: ArrayLike) -> RunningMoments:
        """Return the moments with a batch of scores added.

        Args:
          scores: floating [B], NaN where missing (left out).

        Returns:
          New moments; works under jit.

        Example:
          >>> float(RunningMoments.init().update(jnp.array([1.0, 3.0])).mean)
          2.0
        """
        x = _read(scores).astype(jnp.float32)
        here = ~jnp.isnan(x)
        count = jnp.sum(here, dtype=jnp.float32)
        total = jnp.maximum(self.count + count, 1.0)
        step = masked.mean(x, here) - self.mean
        squares = jnp.sum(masked.deviations(x, here) ** 2)
        return RunningMoments(
            count=self.count + count,
            mean=self.mean + step * count / total,
            squares=self.squares + squares + step**2 * self.count * count / total,
        )

    def normalize(
        self,
        scores: ArrayLike,
        *,
        shift_mean: bool = True,
        limit: float | jax.Array | None = None,
        eps: float | jax.Array = 1e-8,
    ) -> jax.Array:
        """Scale scores by the running moments: (R − μ)·rsqrt(σ² + ε) [+ μ], clipped to ±limit.

        Args:
          scores: floating [B], NaN where missing (stays NaN); stop-gradient.
          shift_mean: False keeps the mean and scales the deviation only.
          limit: bound on the result's size; None for none.
          eps: added to the population variance.

        Returns:
          [B], float32 (or float64); the mean alone was removed before two scores were seen.

        Raises:
          TypeError: if scores are not floating.
          ValueError: if ``limit`` is not positive or ``eps`` is negative.

        Example:
          >>> moments = RunningMoments.init().update(jnp.array([1.0, 3.0]))
          >>> moments.normalize(jnp.array([9.0]), limit=5.0).tolist()
          [5.0]
        """
        checks.non_negative("eps", eps)
        variance = self.squares / jnp.maximum(self.count, 1.0)
        scale = jnp.where(self.squares > 0, jax.lax.rsqrt(variance + eps), 1.0)
        out = (_read(scores) - self.mean) * scale
        out = out if shift_mean else out + self.mean
        if limit is None:
            return out
        checks.positive("limit", limit)
        return jnp.clip(out, -limit, limit)

"""Controllers of the KL coefficient; ``kl`` exports them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from rlhf_jax import checks


def _check_known(name: str, value: Any, **bounds: Any) -> None:
    # A pytree may be rebuilt around tracers, shapes or sentinels: those are not for checking.
    if isinstance(value, (int, float, np.number, np.ndarray)):
        checks.number(name, value, **bounds)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedKL:
    """A constant KL coefficient: β ← β.

    Attributes:
      coef: β, a float or a float32 scalar.

    Raises:
      ValueError: if ``coef`` is negative.

    Example:
      >>> FixedKL(coef=0.1).update(9.0, 64).coef
      0.1
    """

    coef: float | jax.Array

    def __post_init__(self) -> None:
        _check_known("coef", self.coef, at_least=0.0, remedy="A KL penalty has β ≥ 0.")

    def update(self, kl: ArrayLike, n: ArrayLike) -> FixedKL:
        """Return the controller for the next batch: itself.

        Args:
          kl: the measured mean KL per sequence.
          n: how many sequences it was measured on.

        Returns:
          The same controller.

        Example:
          >>> FixedKL(coef=0.1).update(9.0, 64).coef
          0.1
        """
        del kl, n
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveKL:
    """A coefficient that steers the KL to a target: β ← β·(1 + clip(KL/target − 1, ±c)·n/horizon).

    Attributes:
      coef: β, a float or a float32 scalar.
      target: the wanted mean KL per sequence (summed over tokens).
      horizon: over how many sequences β may change by the share c.
      clip: c, the largest relative error that counts.

    Raises:
      ValueError: if ``coef`` is negative, or another option not positive.

    References:
      Ziegler et al., "Fine-tuning language models from human preferences", 2019, §2.2.

    Example:
      >>> controller = AdaptiveKL(coef=0.2, target=6.0, horizon=10_000)
      >>> round(float(controller.update(9.0, 64).coef), 6)
      0.200256
    """

    coef: float | jax.Array
    target: float | jax.Array
    horizon: float | jax.Array
    clip: float | jax.Array = 0.2

    def __post_init__(self) -> None:
        _check_known("coef", self.coef, at_least=0.0, remedy="A KL penalty has β ≥ 0.")
        for name in ("target", "horizon", "clip"):
            _check_known(name, getattr(self, name), above=0.0, remedy=f"Pass a positive {name}.")

    def update(self, kl: ArrayLike, n: ArrayLike) -> AdaptiveKL:
        """Return the controller for the next batch; pure, works under jit.

        Args:
          kl: float scalar, the measured mean KL per sequence (``mean_sequence_kl``).
          n: how many sequences it was measured on.

        Returns:
          A controller with the new ``coef``, in the dtype of the computation; never below 0.

        Raises:
          ValueError: if n·c > horizon, so that one update could take β below 0 (checked where the
            values can be read).

        Example:
          >>> AdaptiveKL(coef=1.0, target=1.0, horizon=10.0).update(1.0, 10).coef.item()
          1.0
        """
        if all(checks.is_concrete(x) for x in (n, self.clip, self.horizon)):
            remedy = "One update may not take β below 0: raise horizon, or lower clip."
            checks.number("n·clip/horizon", n * self.clip / self.horizon, at_most=1, remedy=remedy)
        error = jnp.clip(jnp.asarray(kl) / self.target - 1.0, -self.clip, self.clip)
        factor = jnp.maximum(1.0 + error * n / self.horizon, 0.0)
        return dataclasses.replace(self, coef=self.coef * factor)

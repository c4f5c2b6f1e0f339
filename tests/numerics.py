"""How a golden case is run: eagerly or under jit, in float32 or float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Numerics:
    jit: bool
    dtype: str

    @property
    def tolerance(self) -> dict[str, float]:
        if self.dtype == "float64":
            return {"rtol": 1e-10, "atol": 1e-12}
        return {"rtol": 2e-6, "atol": 2e-6}

    def array(self, x) -> jax.Array:
        return jnp.asarray(np.asarray(x, self.dtype))

    def call(self, function, *args, **static):
        bound = functools.partial(function, **static)
        return (jax.jit(bound) if self.jit else bound)(*args)

    def equal(self, got, want, **tolerance) -> None:
        np.testing.assert_allclose(
            np.asarray(got), np.asarray(want), **{**self.tolerance, **tolerance}
        )

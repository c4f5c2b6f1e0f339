"""A row's tokens over several devices: each row is cut into pieces that count as rows.

Under a placement that splits tokens, everything but attention works on

    [B, T, …] → [B·S, T/S, …],  S devices to a row

whose first axis lies over the mesh axes of rows and of tokens together: a device holds the same
piece of each of its rows. (Splitting two axes of an array would not do: a matmul takes rows and
tokens as one axis, of which a device's part would not be one block.) In attention a device has the
queries of its pieces and gathers the keys and values of their rows.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pieces:
    """Where a placement puts rows, tokens and heads.

    Args:
      mesh: the mesh, its axes the compiler's: the decoder computes under Auto axes in any case.
      rows, tokens: the names of the mesh axes that split them.
      heads: the entry of the spec for heads.
    """

    mesh: Any
    rows: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    heads: Any = None

    @classmethod
    def of(cls, placement: Any) -> Pieces:
        """Those of a ``NamedSharding`` of ``[rows, tokens, heads, width]``, or of None."""
        if placement is None:
            return cls(mesh=None)
        rows, tokens, heads = (*placement.spec, None, None, None)[:3]
        rows, tokens = (
            names if isinstance(names, tuple) else (names,) if names else ()
            for names in (rows, tokens)
        )
        kinds = (jax.sharding.AxisType.Auto,) * len(placement.mesh.axis_names)
        mesh = placement.mesh.update(axis_types=kinds)
        return cls(mesh=mesh, rows=rows, tokens=tokens, heads=heads)

    @property
    def count(self) -> int:
        """S: into how many pieces a row is cut."""
        return math.prod(self.mesh.shape[axis] for axis in self.tokens)

    def _row_parts(self, rows: int) -> int:
        parts = math.prod(self.mesh.shape[axis] for axis in self.rows)
        return parts if rows % parts == 0 else 1

    def whole_rows(self, rows: int) -> Pieces:
        """The same without splitting tokens, and nowhere at all if the rows do not divide."""
        if self.mesh is None or self._row_parts(rows) == 1:
            return Pieces(mesh=None)
        return dataclasses.replace(self, tokens=())

    def fill(self, x: Any) -> Any:
        """Tokens at the end, which no other token reads, up to whole pieces."""
        missing = 0 if x is None else -x.shape[1] % self.count
        if x is None or not missing:
            return x
        return jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))

    def fold(self, x: Array) -> Array:
        """``[B, T, …]`` → ``[B·S, T/S, …]``."""
        if self.count == 1:
            return x
        (rows, length), tail = x.shape[:2], x.shape[2:]
        x = x.reshape(self._row_parts(rows), -1, self.count, length // self.count, *tail)
        return x.swapaxes(1, 2).reshape(rows * self.count, -1, *tail)

    def unfold(self, x: Array) -> Array:
        """``[B·S, T/S, …]`` → ``[B, T, …]``."""
        if self.count == 1:
            return x
        rows, tail = x.shape[0] // self.count, x.shape[2:]
        x = x.reshape(self._row_parts(rows), self.count, -1, *x.shape[1:])
        return x.swapaxes(1, 2).reshape(rows, -1, *tail)

    def place(self, x: Array, *axes: Any) -> Array:
        """x with its axes over these mesh axes; the rest whole."""
        return jax.lax.with_sharding_constraint(x, jax.NamedSharding(self.mesh, jax.P(*axes)))

    def by_rows(self, x: Array) -> Array:
        """The residual stream, folded or not, on the devices of its rows."""
        names = (*self.rows, *self.tokens)
        return x if self.mesh is None else self.place(x, names or None)

    def looked_up(self, x: Array) -> Array:
        """The residual stream as a table whose width is split gives it.

        Rows over several mesh axes, the width over the last of them: left to itself the compiler
        holds all rows everywhere between the two.
        """
        if self.mesh is None or len(self.rows) < 2 or self.tokens:
            return x
        return self.place(x, self.rows[:-1], None, jax.P.UNCONSTRAINED)

    def by_tokens(self, x: Array) -> Array:
        """``[B, T, …]`` on the devices of its rows and tokens, if tokens are split."""
        return x if self.count == 1 else self.place(x, self.rows or None, self.tokens)

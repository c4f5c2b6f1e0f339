"""Run a model under a mesh with Explicit axes: the compiler places what is inside.

The decoder's inner products mix weights and rows in many layouts, so inside the model placement is
the compiler's; outside, the rows of a result lie as the rows of the tokens do, and key/value heads
as the weights that make them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

__all__ = ["auto_inside", "like_rows", "placed", "rows_of", "sharded_as"]


def _sharding(array: Any) -> Any:
    """The array's sharding if its mesh has Explicit axes, else None."""
    sharding = getattr(jax.typeof(array), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty:
        return None
    kinds = mesh.axis_types
    return sharding if jax.sharding.AxisType.Explicit in kinds else None


def sharded_as(*axes: tuple[Any, int] | None) -> Any:
    """Sharding of a result whose axes lie as ``(array, axis)`` does; None leaves an axis whole."""
    found = [(_sharding(pair[0]), pair[1]) if pair else (None, 0) for pair in axes]
    meshes = [sharding.mesh for sharding, _ in found if sharding is not None]
    if not meshes:
        return None
    # A spec may be shorter than its array: the axes it does not name are whole.
    spec = [None if s is None else (*s.spec, *[None] * (axis + 1))[axis] for s, axis in found]
    return jax.NamedSharding(meshes[0], jax.P(*spec))


def like_rows(like: Any, *axes: int | None) -> Any:
    """Sharding of a result whose axes lie as these axes of ``like``."""
    return sharded_as(*(None if axis is None else (like, axis) for axis in axes))


def rows_of(array: Any) -> Any:
    """How an array's rows are split over a mesh, for ``keep_rows``; None where that is not known.

    Under Auto axes only a concrete array knows.
    """
    sharding = _sharding(array)
    if sharding is None and not isinstance(array, Tracer):
        sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, jax.NamedSharding) or not sharding.spec or not sharding.spec[0]:
        return None
    return jax.NamedSharding(sharding.mesh, jax.P(sharding.spec[0]))


def placed(tree: Any) -> Any:
    """The shardings of a tree of arrays."""
    return jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, tree)


def auto_inside(function: Callable[..., Any], out: Any, like: Any, *args: Any) -> Any:
    """``function(*args)``; under Explicit axes with Auto ones inside and results placed as ``out``.

    Args:
      function: takes pytrees of arrays only.
      out: a function that gives the shardings of the results (a tree prefix).
      like: an array whose mesh decides.
      *args: the pytrees.

    Returns:
      The results of ``function``.
    """
    if _sharding(like) is None:
        return function(*args)
    return jax.sharding.auto_axes(function, out_sharding=out())(*args)

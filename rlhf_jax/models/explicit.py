"""Run a model under a mesh with Explicit axes: the compiler places what is inside.

The decoder's inner products mix weights and rows in many layouts, so inside the model placement is
the compiler's; outside, the rows of a result lie as the rows of the tokens do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

__all__ = ["auto_inside", "placed", "rows"]


def _sharding(array: Any) -> Any:
    """The array's sharding if its mesh has Explicit axes, else None."""
    sharding = getattr(jax.typeof(array), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty:
        return None
    kinds = mesh.axis_types
    return sharding if jax.sharding.AxisType.Explicit in kinds else None


def rows(like: Any, lead: int, *axes: int) -> Any:
    """Sharding of a result: ``lead`` whole axes first, then these axes as in ``like``."""
    sharding = _sharding(like)
    if sharding is None:
        return None
    spec = (*sharding.spec, *[None] * like.ndim)
    return jax.NamedSharding(sharding.mesh, jax.P(*[None] * lead, *(spec[a] for a in axes)))


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

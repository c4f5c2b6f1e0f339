"""Where the arrays of a tree really lie: what every device holds whole, what lies elsewhere."""

from __future__ import annotations

import math
from typing import Any

import jax

__all__ = ["DisagreementError", "misplaced", "whole"]


class DisagreementError(RuntimeError):
    """Two layouts computed different things, or one left an array where it should not lie."""


def _named(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]


def whole(tree: Any, *, least: int = 1) -> dict[str, int]:
    """List the arrays that every device of a mesh holds whole.

    Args:
      tree: a pytree of arrays, or of ``ShapeDtypeStruct`` with shardings.
      least: smaller arrays (bytes) are left out.

    Returns:
      Path → bytes. Empty on one device.

    >>> import jax, jax.numpy as jnp
    >>> whole({"w": jnp.ones(4)})
    {}
    """
    found = {}
    for name, leaf in _named(tree):
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        at = leaf.sharding
        if size >= least and len(at.device_set) > 1 and at.shard_shape(leaf.shape) == leaf.shape:
            found[name] = size
    return found


def misplaced(tree: Any, shardings: Any) -> list[str]:
    """List the arrays that do not lie where they should.

    Args:
      tree: a pytree of arrays.
      shardings: a sharding for each of them, in the same structure.

    Returns:
      A line for each such array: its path, where it lies and where it should.

    >>> import jax, jax.numpy as jnp
    >>> tree = {"w": jnp.ones(4)}
    >>> misplaced(tree, jax.tree.map(lambda x: x.sharding, tree))
    []
    """
    wanted = jax.tree.leaves(shardings)
    return [
        f"{name} {list(leaf.shape)} lies as {_spec(leaf.sharding)}, not as {_spec(at)}"
        for (name, leaf), at in zip(_named(tree), wanted, strict=True)
        if not leaf.sharding.is_equivalent_to(at, len(leaf.shape))
    ]


def _spec(at: Any) -> str:
    spec = getattr(at, "spec", None)
    return str(at if spec is None else tuple(spec))

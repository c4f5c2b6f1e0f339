"""Split a parameter pytree into trainable and frozen parts, and put it together again.

Both parts keep the whole tree's structure with ``None`` in the other part's places, so that a
frozen leaf costs neither a gradient nor optimizer moments, and :func:`merge` is one ``tree.map``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

__all__ = ["copy", "count", "labels", "merge", "nbytes", "path_name", "split"]


def path_name(path: tuple[Any, ...]) -> str:
    """Spell a pytree path with slashes.

    Args:
      path: a key path as ``jax.tree_util.tree_flatten_with_path`` gives it.

    Returns:
      e.g. ``"layers/1/attention/query"``.

    >>> import jax
    >>> [path_name(p) for p, _ in jax.tree_util.tree_flatten_with_path({"a": (1, {"b": 2})})[0]]
    ['a/0', 'a/1/b']
    """
    return jax.tree_util.keystr(path, simple=True, separator="/")


def split(params: Any, trainable: str | Callable[[str, Any], bool]) -> tuple[Any, Any]:
    """Split ``params`` into ``(trainable, frozen)``.

    Args:
      params: any pytree of arrays.
      trainable: a regular expression searched in each leaf's path (``".*"`` trains all), or a
        function ``(path, leaf) -> bool``.

    Returns:
      Two trees of the structure of ``params``; each holds ``None`` where the other holds the leaf.

    Raises:
      ValueError: if no leaf is trainable; the message lists some paths.

    >>> split({"embed": 1, "layers": 2}, "layers")
    ({'embed': None, 'layers': 2}, {'embed': 1, 'layers': None})
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    if isinstance(trainable, str):
        pattern = re.compile(trainable)
        keep = [bool(pattern.search(path_name(path))) for path, _ in leaves]
    else:
        keep = [bool(trainable(path_name(path), leaf)) for path, leaf in leaves]
    if not any(keep):
        some = ", ".join(path_name(path) for path, _ in leaves[:8])
        raise ValueError(
            f"trainable: {trainable!r} matches none of the {len(leaves)} parameters; "
            f"paths look like: {some}"
        )
    pairs = list(zip(leaves, keep, strict=True))
    chosen = treedef.unflatten([leaf if kept else None for (_, leaf), kept in pairs])
    rest = treedef.unflatten([None if kept else leaf for (_, leaf), kept in pairs])
    return chosen, rest


def merge(first: Any, second: Any) -> Any:
    """Put two parts of one tree together: a leaf of ``first`` where it has one, else ``second``'s.

    Args:
      first: the trainable part (or any part) of :func:`split`.
      second: the other part, or None when nothing is frozen.

    Returns:
      The whole tree.

    >>> merge({"a": 1, "b": None}, {"a": None, "b": 2})
    {'a': 1, 'b': 2}
    """
    if second is None:
        return first
    return jax.tree.map(
        lambda a, b: b if a is None else a, first, second, is_leaf=lambda leaf: leaf is None
    )


def labels(params: Any, rules: Mapping[str, str], default: str | None = None) -> Any:
    """Name the group of every parameter, for ``optax.multi_transform``.

    ``optax.multi_transform({"decay": adamw(1e-5), "plain": adam(1e-5)}, labels(params, rules))``

    Args:
      params: the trainable parameters; ``None`` leaves (frozen ones) stay None.
      rules: regular expression → label; a leaf takes the label of the first expression that is
        found in its path.
      default: label of the leaves that no expression matches; None makes them an error.

    Returns:
      A tree of the structure of ``params`` with a label in each leaf's place.

    Raises:
      ValueError: an expression that matches no leaf (it would be a typing error), or a leaf that
        has no label; the message lists some paths.

    >>> labels({"frozen": None, "norm": 1, "w": 2}, {"norm": "plain"}, default="decay")
    {'frozen': None, 'norm': 'plain', 'w': 'decay'}
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    names = [path_name(path) for path, _ in leaves]
    some = ", ".join(names[:8])
    if unused := [rule for rule in rules if not any(re.search(rule, name) for name in names)]:
        raise ValueError(
            f"rules: {unused[0]!r} matches none of the {len(names)} parameters; "
            f"paths look like: {some}"
        )
    found = [
        next((label for rule, label in rules.items() if re.search(rule, name)), default)
        for name in names
    ]
    if missing := [name for name, label in zip(names, found, strict=True) if label is None]:
        raise ValueError(
            f"rules: no expression matches {missing[0]!r} ({len(missing)} of {len(names)} "
            "parameters have no label); add one, or give default="
        )
    return treedef.unflatten(found)


def copy(tree: Any) -> Any:
    """Copy every array, so that the result outlives a donation of the original.

    Args:
      tree: a pytree of arrays.

    Returns:
      The same values in buffers of their own, with the same shardings.

    >>> import jax.numpy as jnp
    >>> int(copy({"w": jnp.arange(3)})["w"][2])
    2
    """
    return jax.tree.map(lambda x: jax.numpy.array(x, copy=True), tree)


def count(tree: Any) -> int:
    """Count the parameters of a tree (arrays or ``ShapeDtypeStruct``).

    Args:
      tree: a pytree of arrays; ``None`` leaves count nothing.

    Returns:
      The number of elements.

    >>> import jax.numpy as jnp
    >>> count({"w": jnp.ones((2, 3)), "frozen": None})
    6
    """
    return sum(int(leaf.size) for leaf in jax.tree.leaves(tree))


def nbytes(tree: Any) -> int:
    """Bytes that a tree's arrays take.

    Args:
      tree: a pytree of arrays or ``ShapeDtypeStruct``.

    Returns:
      The sum of size × itemsize.

    >>> import jax.numpy as jnp
    >>> nbytes({"w": jnp.ones((2, 3), jnp.float32)})
    24
    """
    return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

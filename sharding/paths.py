"""Logical axes for any pytree: regular expressions on its paths, for models from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax

__all__ = ["axes_by_path"]

Axes = tuple[str | None, ...] | None
_SHOWN = 8


def axes_by_path(tree: Any, rules: Sequence[tuple[str, Axes]]) -> Any:
    """Name the axes of every leaf by its path.

    A leaf takes the axes of the first expression that is found in its path (``re.search``); paths
    look like ``"encoder/layers_0/attention/query/kernel"``.

    Args:
      tree: arrays or ``ShapeDtypeStruct``; ``None`` leaves stay None.
      rules: pairs (regular expression, axes). Axes are a logical name (or None) for each dimension;
        None instead of a tuple leaves tensors of any rank whole.

    Returns:
      The tree with a tuple of logical axis names in each leaf's place, for
      :func:`sharding.tree_shardings`.

    Raises:
      ValueError: an expression that is none, one that no leaf takes, leaves that none of them
        matches (listed), or axes of another rank than the leaf.

    >>> import jax
    >>> shape = jax.ShapeDtypeStruct((8, 4), "float32")
    >>> tree = {"dense": {"kernel": shape}, "out": {"kernel": shape}}
    >>> axes_by_path(tree, [("out/", None), ("kernel$", ("embed", "mlp"))])
    {'dense': {'kernel': ('embed', 'mlp')}, 'out': {'kernel': (None, None)}}
    """
    patterns = [(_compiled(expression), axes) for expression, axes in rules]
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    named = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves
    ]
    takes = [
        next((i for i, (pattern, _) in enumerate(patterns) if pattern.search(name)), None)
        for name, _ in named
    ]
    if missing := [pair for pair, taken in zip(named, takes, strict=True) if taken is None]:
        listed = ", ".join(f"{name} {tuple(leaf.shape)}" for name, leaf in missing[:_SHOWN])
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise ValueError(
            f"rules: no expression matches {listed}{more}; add one for them "
            "(axes None leaves a tensor whole)"
        )
    for i, (pattern, _) in enumerate(patterns):
        if i not in takes:
            raise ValueError(f"rules: {_unused(pattern, [name for name, _ in named])}")
    found = []
    for (name, leaf), taken in zip(named, takes, strict=True):
        pattern, axes = patterns[taken]  # pyright: ignore[reportArgumentType, reportCallIssue]
        axes = (None,) * len(leaf.shape) if axes is None else tuple(axes)
        if len(axes) != len(leaf.shape):
            raise ValueError(
                f"{name}: rule {pattern.pattern!r} names {len(axes)} axes {axes} for "
                f"{len(leaf.shape)} dimensions {tuple(leaf.shape)}"
            )
        found.append(axes)
    return treedef.unflatten(found)


def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise ValueError(f"rules: {expression!r} is no regular expression: {error}") from None


def _unused(pattern: re.Pattern[str], names: list[str]) -> str:
    if any(pattern.search(name) for name in names):
        return (
            f"{pattern.pattern!r} only matches what expressions before it take; "
            "move it before them, or drop it"
        )
    return (
        f"{pattern.pattern!r} matches none of the {len(names)} leaves; "
        f"paths look like: {', '.join(names[:_SHOWN])}"
    )

"""From logical axis names to shardings, with errors that name tensor, axis, size and remedy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from sharding.layouts import LOGICAL_AXES, Layout

__all__ = [
    "activation_sharding",
    "check_rows",
    "check_tokens",
    "decode_sharding",
    "fitted",
    "row_sharding",
    "spec_for",
    "tree_shardings",
]

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def spec_for(
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    layout: Layout,
    mesh: Mesh,
    *,
    name: str = "tensor",
) -> jax.P:
    """The partition spec of one tensor.

    Args:
      axes: logical axis name of each dimension (None: never split).
      shape: the tensor's shape.
      layout: rules from logical to mesh axes.
      mesh: gives the mesh axes' sizes.
      name: the tensor's name, for messages.

    Returns:
      A ``PartitionSpec`` as long as ``shape``.

    Raises:
      ValueError: if ranks differ, an axis has an unknown name, a dimension does not divide over its
        mesh axes, two dimensions land on one mesh axis, or the mesh lacks one.

    >>> import jax, sharding
    >>> layout = sharding.get_layout("fsdp")
    >>> mesh = sharding.make_mesh(layout, jax.devices()[:1])
    >>> tuple(spec_for(("vocab", "embed"), (256, 64), layout, mesh))
    (None, 'fsdp')
    """
    if len(axes) != len(shape):
        raise ValueError(
            f"{name}: {len(axes)} logical axes {axes} for {len(shape)} dimensions {shape}"
        )
    taken: dict[str, tuple[str | None, int]] = {}
    spec: list[Any] = []
    for axis, size in zip(axes, shape, strict=True):
        if axis is not None and axis not in LOGICAL_AXES and axis not in layout.rules:
            raise ValueError(
                f"{name}: unknown logical axis {axis!r}; use one of {', '.join(LOGICAL_AXES)}, "
                f"or give layout {layout.name!r} a rule for it (() leaves it whole)"
            )
        over = layout.targets(axis)
        parts = _parts(over, layout, mesh)
        if size % parts:
            raise ValueError(f"{name}: {_indivisible(axis, size, over, parts, layout)}")
        for target in over:
            if target in taken:
                other, length = taken[target]
                raise ValueError(
                    f"{name}: layout {layout.name!r} puts two axes, {other!r} of size {length} and "
                    f"{axis!r} of size {size}, on mesh axis {target!r}; drop one of its rules"
                )
            taken[target] = (axis, size)
        spec.append(_entry(over))
    return jax.P(*spec)


def _entry(over: tuple[str, ...]) -> Any:
    """One dimension of a PartitionSpec."""
    return None if not over else over[0] if len(over) == 1 else over


def _parts(over: tuple[str, ...], layout: Layout, mesh: Mesh) -> int:
    """Into how many parts these mesh axes split."""
    for axis in over:
        if axis not in mesh.shape:
            raise ValueError(
                f"layout {layout.name!r} splits over mesh axis {axis!r}, and the mesh has only "
                f"{', '.join(mesh.shape)}; build it by make_mesh(layout)"
            )
    return math.prod(mesh.shape[axis] for axis in over)


def _indivisible(
    axis: str | None, size: int, over: tuple[str, ...], parts: int, layout: Layout
) -> str:
    where = " × ".join(map(repr, over))
    heads = ", or sharding.fitted, which leaves heads whole" if axis in _HEADS else ""
    return (
        f"axis {axis!r} has size {size}, which mesh axis {where} of size {parts} (layout "
        f"{layout.name!r}) does not divide; use another layout, or a {where} size that divides "
        f"{size}{heads}"
    )


def tree_shardings(axes: Any, tree: Any, layout: Layout, mesh: jax.sharding.Mesh) -> Any:
    """Shardings for a whole parameter tree.

    Args:
      axes: the tree's structure with a tuple of logical axis names in each leaf's place: a model's
        ``logical_axes()``, or :func:`sharding.axes_by_path` of any other tree.
      tree: arrays or ``ShapeDtypeStruct``; ``None`` leaves stay None.
      layout: rules from logical to mesh axes.
      mesh: where to.

    Returns:
      ``NamedSharding`` for each leaf, in the structure of ``tree``.

    Raises:
      ValueError: as :func:`spec_for`, naming the leaf by its path.
    """

    def one(path: tuple[Any, ...], leaf: Any, names: tuple[str | None, ...]) -> Any:
        if leaf is None:
            return None
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = spec_for(names, tuple(leaf.shape), layout, mesh, name=name)
        return jax.NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, tree, axes, is_leaf=lambda leaf: leaf is None)


def row_sharding(layout: Layout, mesh: jax.sharding.Mesh) -> jax.NamedSharding:
    """The sharding of any row-first array: rows over the layout's row axes, the rest whole.

    Args:
      layout: names the mesh axes that split rows.
      mesh: where to.

    Returns:
      A ``NamedSharding`` that fits every rank ≥ 1.
    """
    return jax.NamedSharding(mesh, jax.P(layout.rows or None))


def activation_sharding(layout: Layout, mesh: jax.sharding.Mesh) -> jax.NamedSharding:
    """The sharding of activations ``[rows, tokens, heads, width]``, for ``Decoder(placement=…)``.

    Args:
      layout: names the mesh axes that split rows, those that split tokens, and those of heads.
      mesh: where to.

    Returns:
      A ``NamedSharding``; heads are split where the layout splits those of queries and of keys.

    Raises:
      ValueError: if one mesh axis splits heads and also rows or tokens.

    >>> import jax, sharding
    >>> layout = sharding.get_layout("fsdp_tensor")
    >>> mesh = sharding.make_mesh(layout.with_sizes(tensor=1), jax.devices()[:1])
    >>> activation_sharding(layout, mesh).spec == jax.P("fsdp", None, "tensor")
    True
    """
    heads = layout.targets("heads")
    if layout.targets("kv_heads") != heads:
        heads = ()
    for what, over in (("rows", layout.rows), ("tokens", layout.tokens)):
        if both := set(heads) & set(over):
            raise ValueError(
                f"activations: layout {layout.name!r} puts heads and {what} on mesh axis "
                f"{min(both)!r}; drop it from one of them"
            )
    spec = jax.P(layout.rows or None, layout.tokens or None, _entry(heads))
    return jax.NamedSharding(mesh, spec)


def decode_sharding(layout: Layout, mesh: jax.sharding.Mesh) -> jax.NamedSharding:
    """The sharding of a decode step's hidden states, for ``Decoder(decode_placement=…)``.

    Args:
      layout: names the mesh axes that split rows and those that split the weights' ``embed`` axis.
      mesh: where to.

    Returns:
      A ``NamedSharding`` of ``[prompts, group, width]``: the width as the weights' ``embed`` axis,
      prompts over the row axes that do not split weights.

    >>> import jax, sharding
    >>> layout = sharding.get_layout("hsdp:slice=1")
    >>> mesh = sharding.make_mesh(layout, jax.devices()[:1])
    >>> decode_sharding(layout, mesh).spec == jax.P("slice", None, "fsdp")
    True
    """
    width = layout.targets("embed")
    rows = tuple(axis for axis in layout.rows if axis not in width)
    return jax.NamedSharding(mesh, jax.P(_entry(rows), None, _entry(width)))


def check_rows(rows: int, layout: Layout, mesh: Mesh, *, name: str = "rows") -> None:
    """Check that a number of rows divides over the layout's row axes.

    Args:
      rows: how many rows (or prompts) one array holds.
      layout: names the mesh axes that split rows.
      mesh: gives their sizes.
      name: what the rows are, for the message.

    Raises:
      ValueError: naming the count, the axes and their size.

    >>> import jax, sharding
    >>> layout = sharding.get_layout("dp")
    >>> check_rows(3, layout, sharding.make_mesh(layout, jax.devices()[:1]))
    """
    _check_count(rows, layout.rows, layout, mesh, name)


def check_tokens(tokens: int, layout: Layout, mesh: Mesh, *, name: str = "tokens") -> None:
    """Check that a row's length divides over the layout's token axes.

    A decoder fills other lengths up, at the cost of the filling.

    Args:
      tokens: the length of a row.
      layout: names the mesh axes that split tokens.
      mesh: gives their sizes.
      name: what the tokens are, for the message.

    Raises:
      ValueError: naming the count, the axes and their size.

    >>> import jax, sharding
    >>> layout = sharding.get_layout("sequence")
    >>> mesh = jax.sharding.AbstractMesh((2, 4), ("fsdp", "sequence"))
    >>> check_tokens(4096, layout, mesh)
    """
    _check_count(tokens, layout.tokens, layout, mesh, name)


def _check_count(count: int, over: tuple[str, ...], layout: Layout, mesh: Mesh, name: str) -> None:
    parts = _parts(over, layout, mesh)
    if count % parts:
        raise ValueError(
            f"{name}: {count} do not divide over {' × '.join(over)} = {parts} devices of "
            f"layout {layout.name!r}; use a multiple of {parts} or another layout"
        )


_HEADS = ("heads", "kv_heads")


def fitted(layout: Layout, config: Any, mesh: Mesh) -> Layout:
    """The layout without the rules for heads that its mesh cannot split evenly.

    Key and value heads are few: over a wider ``tensor`` axis they stay whole, as do the weights
    that make them and their cache. What was left out is ``set(layout.rules) - set(result.rules)``.

    Args:
      layout: any layout.
      config: anything with ``num_heads`` and ``num_kv_heads``.
      mesh: gives the mesh axes' sizes.

    Returns:
      The layout itself, or one with fewer rules.

    Raises:
      ValueError: if the mesh lacks an axis of the layout.

    >>> import jax, types, sharding
    >>> layout = sharding.get_layout("tensor")
    >>> mesh = jax.sharding.AbstractMesh((16,), ("tensor",))
    >>> config = types.SimpleNamespace(num_heads=32, num_kv_heads=8)
    >>> sorted(set(layout.rules) - set(fitted(layout, config, mesh).rules))
    ['kv_heads']
    """
    counts = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
    rules = {
        axis: target
        for axis, target in layout.rules.items()
        if counts.get(axis, 0) % _parts(layout.targets(axis), layout, mesh) == 0
    }
    return layout if rules == layout.rules else dataclasses.replace(layout, rules=rules)

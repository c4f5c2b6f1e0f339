"""From logical axis names to shardings, with errors that name tensor, axis, size and remedy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from sharding.layouts import Layout

__all__ = [
    "activation_sharding",
    "check_rows",
    "fitted",
    "row_sharding",
    "spec_for",
    "tree_shardings",
]


def spec_for(
    axes: tuple[str | None, ...],
    shape: tuple[int, ...],
    layout: Layout,
    mesh: jax.sharding.Mesh,
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
      ValueError: if ranks differ, a dimension does not divide its mesh axis, or two dimensions
        land on one mesh axis.

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
    spec: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        target = layout.rules.get(axis) if axis is not None else None
        if target is not None and size % mesh.shape[target]:
            raise ValueError(
                f"{name}: axis {axis!r} has size {size}, which mesh axis {target!r} of size "
                f"{mesh.shape[target]} (layout {layout.name!r}) does not divide; use another "
                f"layout, or a {target!r} size that divides {size}"
            )
        if target is not None and target in spec:
            raise ValueError(
                f"{name}: layout {layout.name!r} puts two axes of {axes} on mesh axis "
                f"{target!r}; drop one of its rules"
            )
        spec.append(target)
    return jax.P(*spec)


def tree_shardings(axes: Any, tree: Any, layout: Layout, mesh: jax.sharding.Mesh) -> Any:
    """Shardings for a whole parameter tree.

    Args:
      axes: the tree's structure with a tuple of logical axis names in each leaf's place.
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
      layout: names the mesh axes that split rows, and the one that splits heads.
      mesh: where to.

    Returns:
      A ``NamedSharding``; heads are split where the layout splits those of queries and of keys.

    >>> import jax, sharding
    >>> layout = sharding.get_layout("fsdp_tensor")
    >>> mesh = sharding.make_mesh(layout.with_sizes(tensor=1), jax.devices()[:1])
    >>> activation_sharding(layout, mesh).spec == jax.P("fsdp", None, "tensor")
    True
    """
    heads = layout.rules.get("heads")
    if layout.rules.get("kv_heads") != heads:
        heads = None
    return jax.NamedSharding(mesh, jax.P(layout.rows or None, None, heads))


def check_rows(rows: int, layout: Layout, mesh: jax.sharding.Mesh, *, name: str = "rows") -> None:
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
    parts = math.prod(mesh.shape[axis] for axis in layout.rows)
    if rows % parts:
        raise ValueError(
            f"{name}: {rows} do not divide over {' × '.join(layout.rows)} = {parts} devices of "
            f"layout {layout.name!r}; use a multiple of {parts} or another layout"
        )


def fitted(layout: Layout, config: Any, mesh: jax.sharding.Mesh) -> Layout:
    """The layout without the rules for heads that its mesh cannot split evenly.

    Key and value heads are few: over a wider ``tensor`` axis they stay whole, as do the weights
    that make them and their cache. What was left out is ``set(layout.rules) - set(result.rules)``.

    Args:
      layout: any layout.
      config: anything with ``num_heads`` and ``num_kv_heads``.
      mesh: gives the mesh axes' sizes.

    Returns:
      The layout itself, or one with fewer rules.

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
        if counts.get(axis, 0) % mesh.shape[target] == 0
    }
    return layout if rules == layout.rules else dataclasses.replace(layout, rules=rules)

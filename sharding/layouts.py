"""Named layouts: which mesh axes there are and which logical axis goes to which of them.

A layout is plain data: print it, edit it with ``dataclasses.replace`` or ``with_sizes``, compare
two with ``==``, keep your own in a TOML file (:func:`sharding.load_layouts`).

| layout | parameters and moments | rows of the batch | tokens in training |
|---|---|---|---|
| ``single`` | one device | one device | whole |
| ``dp`` | whole on every device | split over ``data`` | whole |
| ``fsdp`` | split over ``fsdp`` along the embedding | split over ``fsdp`` | whole |
| ``tensor`` | heads, MLP and vocabulary over ``tensor`` | whole on every device | whole |
| ``fsdp_tensor`` | both | split over ``fsdp`` | whole |
| ``hsdp`` | whole in every slice, split over its ``fsdp`` | split over both | whole |
| ``sequence`` | over both axes along the embedding | split over ``fsdp`` | over ``sequence`` |
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

__all__ = ["LAYOUTS", "LOGICAL_AXES", "MESH_AXES", "Layout"]

MESH_AXES = ("slice", "data", "fsdp", "sequence", "tensor", "expert")
"""The names that a mesh axis may have, from the network that a cluster has least of to the fastest:
a layout had best list its axes in this order."""

LOGICAL_AXES = (
    *("layers", "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "expert"),
    "rank",  # of an adapter
    *("prompt", "group"),  # of the key/value cache
)
"""The names of a tensor's axes that the library uses. A layout may have rules for others."""

Target = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to lay a model and its batch over a mesh.

    Args:
      name: what it is called in flags and messages.
      axes: mesh axes (of :data:`MESH_AXES`) and their sizes, in mesh order; one size may be -1:
        what the other axes leave.
      rules: logical axis → the mesh axis that splits it, or a tuple of them; a logical axis that is
        not named, or goes to ``()``, stays whole.
      rows: mesh axes that split the batch's rows.
      tokens: mesh axes that split the tokens of the activations in training.

    Raises:
      ValueError: an unknown mesh axis or one named twice, a size of 0, two sizes of -1, a rule to
        an axis that the layout lacks, or rows and tokens on one axis.

    >>> print(
    ...     Layout(
    ...         name="mine",
    ...         axes=(("data", 2), ("tensor", -1)),
    ...         rows=("data",),
    ...         rules={"heads": "tensor", "mlp": ("data", "tensor")},
    ...     )
    ... )
    mine: data=2, tensor=-1
      rows    data
      tokens  whole
      heads   tensor
      mlp     data × tensor
      others  whole
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    rules: Mapping[str, Target] = dataclasses.field(hash=False)
    rows: tuple[str, ...]
    tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        pairs = self.axes.items() if isinstance(self.axes, Mapping) else self.axes
        plain = {
            "axes": tuple((name, size) for name, size in pairs),
            "rules": {axis: _short(_names(target)) for axis, target in self.rules.items()},
            "rows": _names(self.rows),
            "tokens": _names(self.tokens),
        }
        for field, value in plain.items():
            object.__setattr__(self, field, value)
        if problem := _problem(self):
            raise ValueError(f"layout {self.name!r}: {problem}")

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.axes)
        lines = {"rows": self.rows, "tokens": self.tokens}
        lines |= {axis: self.targets(axis) for axis in self.rules}
        lines["others"] = ()
        width = max(map(len, lines))
        table = (
            f"  {what:<{width}}  {' × '.join(over) or 'whole'}" for what, over in lines.items()
        )
        return "\n".join([f"{self.name}: {axes}", *table])

    def targets(self, axis: str | None) -> tuple[str, ...]:
        """The mesh axes that split a logical axis.

        Args:
          axis: a logical axis, or None for one that is never split.

        Returns:
          Their names; empty if it stays whole.

        >>> LAYOUTS["sequence"].targets("embed"), LAYOUTS["fsdp"].targets("mlp")
        (('fsdp', 'sequence'), ())
        """
        return () if axis is None else _names(self.rules.get(axis, ()))

    def with_sizes(self, /, **sizes: int) -> Layout:
        """The same layout with other mesh sizes.

        Args:
          **sizes: mesh axis → size.

        Returns:
          A new layout.

        Raises:
          ValueError: for a name that is no axis of this layout, or a size that cannot be.

        >>> LAYOUTS["fsdp_tensor"].with_sizes(tensor=4).axes
        (('fsdp', -1), ('tensor', 4))
        """
        names = [name for name, _ in self.axes]
        for name in sizes:
            if name not in names:
                raise ValueError(
                    f"layout {self.name!r} has no mesh axis {name!r}; it has: {', '.join(names)}"
                )
        axes = tuple((name, sizes.get(name, size)) for name, size in self.axes)
        return dataclasses.replace(self, axes=axes)


def _names(target: str | Iterable[str]) -> tuple[str, ...]:
    return (target,) if isinstance(target, str) else tuple(target)


def _short(names: tuple[str, ...]) -> Target:
    """One way to write a rule, so that equal layouts compare equal."""
    return names[0] if len(names) == 1 else names


def _problem(layout: Layout) -> str | None:
    """What is wrong with a layout, and what to do."""
    if not isinstance(layout.name, str) or not re.fullmatch(r"[\w.-]+", layout.name):
        return "a name is made of letters, digits and _ . -"
    names = [name for name, _ in layout.axes]
    if not names:
        return "no mesh axes; give at least one, e.g. axes=(('data', -1),)"
    for name, size in layout.axes:
        if name not in MESH_AXES:
            return f"unknown mesh axis {name!r}; choose from: {', '.join(MESH_AXES)}"
        if not isinstance(size, int) or isinstance(size, bool) or size < -1 or size == 0:
            return (
                f"mesh axis {name!r} has size {size!r}; give a positive number, or -1 for what the "
                "other axes leave"
            )
    if len(set(names)) < len(names):
        return f"a mesh axis is named twice: {', '.join(names)}"
    if len(rest := [name for name, size in layout.axes if size == -1]) > 1:
        return f"only one mesh axis may have size -1, not {' and '.join(rest)}; give one a number"
    places = {"rows": layout.rows, "tokens": layout.tokens}
    places |= {f"rule for {axis!r}": layout.targets(axis) for axis in layout.rules}
    for what, over in places.items():
        if unknown := [axis for axis in over if axis not in names]:
            return f"{what}: no mesh axis {unknown[0]!r} in this layout; it has: {', '.join(names)}"
        if len(set(over)) < len(over):
            return f"{what}: a mesh axis is named twice: {', '.join(over)}"
    if both := set(layout.rows) & set(layout.tokens):
        return f"rows and tokens are both split over {', '.join(sorted(both))}; drop it from one"
    return None


_FSDP: dict[str, Target] = {"embed": "fsdp"}
_TENSOR: dict[str, Target] = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "tensor")

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(name="single", axes=(("data", 1),), rules={}, rows=("data",)),
        Layout(name="dp", axes=(("data", -1),), rules={}, rows=("data",)),
        Layout(name="fsdp", axes=(("fsdp", -1),), rules=_FSDP, rows=("fsdp",)),
        Layout(name="tensor", axes=(("tensor", -1),), rules=_TENSOR, rows=()),
        Layout(
            name="fsdp_tensor",
            axes=(("fsdp", -1), ("tensor", 2)),
            rules={**_FSDP, **_TENSOR},
            rows=("fsdp",),
        ),
        Layout(
            name="hsdp",
            axes=(("slice", 2), ("fsdp", -1)),
            rules=_FSDP,
            rows=("slice", "fsdp"),
        ),
        Layout(
            name="sequence",
            axes=(("fsdp", -1), ("sequence", 2)),
            rules={"embed": ("fsdp", "sequence")},
            rows=("fsdp",),
            tokens=("sequence",),
        ),
    )
}
"""The layouts by name."""

"""Named layouts: which mesh axes there are and which logical axis goes to which of them.

A layout is plain data: print it, edit it with ``dataclasses.replace``, compare two with ``==``.

| layout | parameters and moments | rows of the batch |
|---|---|---|
| ``single`` | one device | one device |
| ``dp`` | whole on every device | split over ``data`` |
| ``fsdp`` | split over ``fsdp`` along the embedding | split over ``fsdp`` |
| ``tensor`` | heads, MLP and vocabulary split over ``tensor`` | whole on every device |
| ``fsdp_tensor`` | both | split over ``fsdp`` |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

__all__ = ["LAYOUTS", "Layout", "get_layout"]

ROWS = "rows"
"""The logical name of a batch's row axis; every other name belongs to a parameter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to lay a model and its batch over a mesh.

    Args:
      name: what it is called in flags and messages.
      axes: mesh axes and their sizes, in mesh order; one size may be -1: what the other axes leave.
      rules: logical axis → mesh axis; a logical axis that is not named stays whole.
      rows: mesh axes that split the batch's rows.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    rules: Mapping[str, str]
    rows: tuple[str, ...]

    def with_sizes(self, **sizes: int) -> Layout:
        """The same layout with other mesh sizes.

        Args:
          **sizes: mesh axis → size.

        Returns:
          A new layout.

        Raises:
          ValueError: for a name that is no axis of this layout.

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


_FSDP = {"embed": "fsdp"}
_TENSOR = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}

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
    )
}


def get_layout(name: str) -> Layout:
    """Look a named layout up.

    Args:
      name: one of :data:`LAYOUTS`.

    Returns:
      The layout.

    Raises:
      ValueError: for an unknown name; the message lists the known ones.

    >>> get_layout("fsdp").rows
    ('fsdp',)
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout: unknown name {name!r}; known layouts: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]

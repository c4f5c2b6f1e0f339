"""Build a device mesh for a layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from sharding.layouts import Layout

__all__ = ["describe", "make_mesh"]


def make_mesh(layout: Layout, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """Build the mesh of a layout; ``jax.make_mesh`` orders the devices for their topology.

    Args:
      layout: the layout whose ``axes`` give names and sizes; a size of -1 takes what is left.
      devices: devices to use; all of them when None (the ``single`` layout takes the first).

    Returns:
      A mesh whose axes are ``Auto``: the compiler inserts the collectives.

    Raises:
      ValueError: if the sizes do not multiply to the number of devices.

    >>> from sharding import get_layout
    >>> dict(make_mesh(get_layout("single")).shape)
    {'data': 1}
    """
    devices = list(jax.devices() if devices is None else devices)
    names = tuple(name for name, _ in layout.axes)
    sizes = [size for _, size in layout.axes]
    fixed = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) > 1:
        raise ValueError(f"layout {layout.name!r}: only one mesh axis may have size -1")
    if -1 not in sizes and fixed <= len(devices):
        devices = devices[:fixed]
    elif len(devices) % fixed:
        raise ValueError(
            f"layout {layout.name!r}: its fixed mesh axes ({describe_axes(layout)}) take "
            f"{fixed} devices, which does not divide the {len(devices)} at hand; "
            "change the axis sizes (Layout.with_sizes) or the number of devices"
        )
    shape = tuple(len(devices) // fixed if size == -1 else size for size in sizes)
    axis_types = (AxisType.Auto,) * len(names)
    return jax.make_mesh(shape, names, axis_types=axis_types, devices=devices)


def describe_axes(layout: Layout) -> str:
    """The layout's axes as text, e.g. ``fsdp=-1, tensor=2``."""
    return ", ".join(f"{name}={size}" for name, size in layout.axes)


def describe(mesh: jax.sharding.Mesh) -> str:
    """A mesh as one short line.

    Args:
      mesh: any mesh.

    Returns:
      e.g. ``"fsdp=8 (8 × cpu)"``.

    >>> from sharding import get_layout
    >>> describe(make_mesh(get_layout("single"))).startswith("data=1 (1 × ")
    True
    """
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{axes} ({mesh.devices.size} × {mesh.devices.flat[0].device_kind})"

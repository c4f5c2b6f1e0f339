"""Build a device mesh for a layout: one device, one host, several hosts, several slices.

Devices are ordered by JAX's own mesh utilities, which know the networks of TPUs. Between *slices*
(of a TPU pod, or NVLink domains of a GPU cluster: devices with another ``slice_index``) the network
is slow, so one mesh axis runs over them: ``slice``, or the first one that splits rows.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from sharding.layouts import Layout

__all__ = ["describe", "make_mesh"]


def make_mesh(
    layout: Layout, devices: Sequence[Any] | None = None, *, explicit: bool = False
) -> jax.sharding.Mesh:
    """Build the mesh of a layout.

    Args:
      layout: the layout whose ``axes`` give names and sizes; a size of -1 takes what is left.
      devices: devices to use; by default all of them, those of other hosts as well (the ``single``
        layout takes the first).
      explicit: whether the mesh axes are ``Explicit``: shardings are part of an array's type.

    Returns:
      A mesh, whose axes are by default ``Auto``: the compiler inserts the collectives.

    Raises:
      ValueError: if the sizes do not multiply to the number of devices, or if no axis can run over
        the slices that the devices lie in.

    >>> from sharding import get_layout
    >>> dict(make_mesh(get_layout("single")).shape)
    {'data': 1}
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = _sizes(layout, len(devices))
    devices = devices[: math.prod(sizes.values())]
    slices = collections.Counter(_slice(device) for device in devices)
    names, shape = tuple(sizes), tuple(sizes.values())
    kinds = (AxisType.Explicit if explicit else AxisType.Auto,) * len(sizes)
    if len(slices) > 1:
        ordered = _over_slices(layout, sizes, slices, devices)
        return jax.sharding.Mesh(ordered, names, axis_types=kinds)
    try:
        return jax.make_mesh(shape, names, axis_types=kinds, devices=devices)
    except NotImplementedError:  # a mesh axis is no product of whole axes of the TPU's torus
        ordered = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return jax.sharding.Mesh(ordered, names, axis_types=kinds)


def _sizes(layout: Layout, count: int) -> dict[str, int]:
    """The mesh axes' sizes on so many devices."""
    sizes = dict(layout.axes)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 not in sizes.values() and fixed <= count:
        return sizes
    if count % fixed:
        raise ValueError(
            f"layout {layout.name!r}: its fixed mesh axes ({describe_axes(layout)}) take "
            f"{fixed} devices, which does not divide the {count} at hand; "
            "change the axis sizes (Layout.with_sizes) or the number of devices"
        )
    return {axis: count // fixed if size == -1 else size for axis, size in sizes.items()}


def _slice(device: Any) -> int:
    """Which slice a device lies in; a backend that knows none has one."""
    return getattr(device, "slice_index", None) or 0


def _over_slices(
    layout: Layout, sizes: dict[str, int], slices: dict[int, int], devices: list[Any]
) -> np.ndarray:
    """The same with one axis over the slices, or its outer part."""
    count = len(slices)
    if len(set(slices.values())) > 1:
        raise ValueError(
            f"layout {layout.name!r}: its {len(devices)} devices lie unevenly in {count} slices "
            f"({', '.join(map(str, slices.values()))}); use sizes that take as many of each"
        )
    outer = "slice" if "slice" in sizes else next(iter(layout.rows), None)
    if outer is None:
        raise ValueError(
            f"layout {layout.name!r}: the devices lie in {count} slices, and it has neither an "
            "axis 'slice' nor one that splits rows to run over them; use e.g. 'hsdp' or "
            "'fsdp_tensor', or the devices of one slice"
        )
    if sizes[outer] % count or (outer == "slice" and sizes[outer] != count):
        least = f"{count}" if outer == "slice" else f"a multiple of {count}"
        raise ValueError(
            f"layout {layout.name!r}: mesh axis {outer!r} runs over the {count} slices of the "
            f"devices, so its size must be {least}, not {sizes[outer]}; change it "
            f"(Layout.with_sizes)"
        )
    between = tuple(count if axis == outer else 1 for axis in sizes)
    inside = tuple(size // n for size, n in zip(sizes.values(), between, strict=True))
    try:
        return mesh_utils.create_hybrid_device_mesh(inside, between, devices)
    except NotImplementedError:
        return mesh_utils.create_hybrid_device_mesh(
            inside, between, devices, allow_split_physical_axes=True
        )


def describe_axes(layout: Layout) -> str:
    """The layout's axes as text, e.g. ``fsdp=-1, tensor=2``."""
    return ", ".join(f"{name}={size}" for name, size in layout.axes)


def describe(mesh: jax.sharding.Mesh) -> str:
    """A mesh as one short line.

    Args:
      mesh: any mesh.

    Returns:
      e.g. ``"fsdp=8 (8 × cpu)"``, or ``"slice=2, fsdp=16 (32 × TPU v5 lite in 2 slices)"``.

    >>> from sharding import get_layout
    >>> describe(make_mesh(get_layout("single"))).startswith("data=1 (1 × ")
    True
    """
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    count = len({_slice(device) for device in mesh.devices.flat})
    slices = f" in {count} slices" if count > 1 else ""
    return f"{axes} ({mesh.devices.size} × {mesh.devices.flat[0].device_kind}{slices})"

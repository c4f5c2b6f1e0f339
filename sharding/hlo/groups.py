"""Which devices a collective joins: HLO's spellings of groups, and the mesh axes they follow.

| spelling | meaning |
|---|---|
| ``{{0,2},{1,3}}`` | the groups themselves; ``{}`` is one group of all |
| ``[2,4]<=[4,2]T(1,0)`` | 0, 1, 2 … reshaped to 4 × 2, transposed, reshaped to 2 groups of 4 |
| ``mesh['a'=4,'b'=2] {'b'}`` | a mesh of all devices; a group follows the named axes |
| ``mesh['a'=8] {'a':(2)2}`` | of axis a, seen as 2 × 2 × 2, the middle one |
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

__all__ = ["axes_of", "group_size", "groups_of"]

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"@?mesh[\[<]([^\]>]*)[\]>](?:, ?device_ids=\(((?:[^()]|\([^()]*\))*)\))? ?\{([^}]*)\}"
)
_AXIS = re.compile(r"([^,:]+)(?::\((\d+)\)(\d+))?")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _iota(dims: str, order: str) -> np.ndarray:
    """0, 1, 2 … reshaped to `dims` and transposed by `order`."""
    shape = _numbers(dims)
    found = np.arange(math.prod(shape)).reshape(shape)
    return found.transpose(_numbers(order)) if order else found


def _of_mesh(sizes: str, ids: str, wanted: str) -> np.ndarray:
    """Groups along named axes, or parts of axes, of a mesh."""
    named = [part.split("=") for part in sizes.split(",")]
    names = [name.strip("'\" ") for name, _ in named]
    shape = [int(size) for _, size in named]
    order = np.arange(math.prod(shape))
    if listed := _IOTA.match(ids):
        order = _iota(listed[1], listed[3] or "")
    elif ids:
        order = np.array(_numbers(ids.replace(" ", "")))
    # every axis is cut where a part of it is wanted; groups then follow whole small axes
    cuts: list[set[int]] = [{1, size} for size in shape]
    parts = []
    for name, before, count in _AXIS.findall(wanted.replace(" ", "")):
        axis = names.index(name.strip("'\""))
        start = int(before or 1)
        end = start * int(count or shape[axis])
        cuts[axis] |= {start, end}
        parts.append((axis, start, end))
    small: list[tuple[int, int, int]] = []
    for axis, at in enumerate(cuts):
        edges = sorted(at)
        small += [(axis, a, b) for a, b in itertools.pairwise(edges)] or [(axis, 1, 1)]
    follow = [
        index
        for axis, start, end in parts
        for index, (of, a, b) in enumerate(small)
        if of == axis and start <= a and b <= end
    ]
    found = np.asarray(order).reshape([b // a for _, a, b in small])
    rest = [index for index in range(len(small)) if index not in follow]
    return found.transpose(rest + follow).reshape(-1, math.prod(found.shape[i] for i in follow))


@functools.lru_cache(maxsize=1024)
def groups_of(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups that a text describes.

    Args:
      text: of ``replica_groups`` or ``source_target_pairs``; empty or ``{}`` means one group.
      devices: how many there are.

    Returns:
      Groups of positions in the program's device order.

    Raises:
      ValueError: for a spelling that is not known.

    >>> groups_of("[2,2]<=[2,2]T(1,0)", 4)
    ((0, 2), (1, 3))
    >>> groups_of("mesh['a'=2,'b'=2] {'b'}", 4)
    ((0, 1), (2, 3))
    """
    if text in ("", "{}"):
        return (tuple(range(devices)),)
    if text.startswith("{"):
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,]*)\}", text))
    if mesh := _MESH.match(text):
        found = _of_mesh(mesh[1], mesh[2] or "", mesh[3])
    elif (iota := _IOTA.match(text)) and iota[2]:
        found = _iota(iota[2], iota[3] or "").reshape(_numbers(iota[1]))
    else:
        raise ValueError(f"replica groups: unknown spelling {text[:80]!r}")
    return tuple(tuple(map(int, group)) for group in found)


def group_size(text: str, devices: int) -> int:
    """Devices in the largest group.

    >>> group_size("[2,4]<=[8]", 8)
    4
    """
    return max((len(group) for group in groups_of(text, devices)), default=1)


@functools.lru_cache(maxsize=1024)
def _axes(text: str, mesh: tuple[tuple[str, int], ...], devices: int) -> tuple[str, ...]:
    shape = [size for _, size in mesh]
    found = set()
    for group in groups_of(text, devices):
        places = np.array(np.unravel_index(np.array(group, int), shape))
        found |= {axis for axis, row in enumerate(places) if len(set(row.tolist())) > 1}
    return tuple(name for axis, (name, _) in enumerate(mesh) if axis in found)


def axes_of(text: str, mesh: Mapping[str, int], devices: int | None = None) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ.

    Args:
      text: as for :func:`groups_of`.
      mesh: axis → size, in mesh order; the program's device order is the mesh's.
      devices: of the program, where that is one slice of a mesh whose first axes are the slices.

    Returns:
      Axis names; none where every group is one device.

    >>> axes_of("{{0,1},{2,3}}", {"fsdp": 2, "tensor": 2})
    ('tensor',)
    """
    return _axes(text, tuple(mesh.items()), devices or math.prod(mesh.values()))

"""Move a tree from one layout to another, and say how many bytes that took."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

__all__ = ["Moved", "reshard"]

Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved:
    """What :func:`reshard` moved.

    Args:
      total: bytes of the tree, each element counted once.
      received: device id → bytes that it did not hold before.

    >>> print(Moved(total=4096, received={0: 1024, 1: 512}))
    4,096 bytes laid out anew: 1,536 received, at most 1,024 by one device
    """

    total: int
    received: Mapping[int, int]

    def __str__(self) -> str:
        return (
            f"{self.total:,} bytes laid out anew: {sum(self.received.values()):,} received, at "
            f"most {max(self.received.values(), default=0):,} by one device"
        )


def reshard(tree: Any, shardings: Any, *, donate: bool = False) -> tuple[Any, Moved]:
    """Lay a tree out anew: between layouts, and between meshes of the same or other devices.

    What changes its place between meshes over the same devices in the same order goes through one
    jitted call, whose collectives also work across hosts; the rest through one ``device_put``.

    Args:
      tree: arrays of JAX or NumPy; ``None`` leaves stay None.
      shardings: a sharding for each leaf, in the structure of ``tree``, or one for all.
      donate: give the arrays of ``tree`` up: one that lies in its place already is handed on, the
        memory of the others is used or freed, and they are deleted. Without it the result shares no
        memory with them, so that a learner may go on and donate them. An array in several leaves
        (tied weights) is copied for each, as without ``donate``.

    Returns:
      The same values laid out by ``shardings``, and the bytes as :class:`Moved`. What a device
      receives is counted from the index maps, not measured.

    Raises:
      ValueError: if the structures differ, or a leaf's shape does not divide over its sharding.

    >>> import jax.numpy as jnp, sharding
    >>> mesh = sharding.make_mesh(sharding.get_layout("single"))
    >>> params = {"w": jnp.ones((2, 3)), "frozen": None}
    >>> placed, moved = reshard(params, jax.NamedSharding(mesh, jax.P()))
    >>> placed["w"].shape, placed["frozen"], moved.total
    ((2, 3), None, 24)
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    if isinstance(shardings, jax.sharding.Sharding):
        targets = [shardings] * len(leaves)
    else:
        targets, given = jax.tree.flatten(shardings)
        if given != treedef:
            raise ValueError(
                f"shardings: their structure {given} is not the tree's {treedef}; give one "
                "sharding for each leaf, or one for all"
            )
    for (path, leaf), target in zip(leaves, targets, strict=True):
        _check(jax.tree_util.keystr(path, simple=True, separator="/"), leaf, target)
    arrays = [x if isinstance(x, jax.Array) else np.asarray(x) for _, x in leaves]
    moved = _count(arrays, targets)
    uses = collections.Counter(map(id, arrays))  # a buffer can be given up once only
    groups: dict[Any, list[int]] = {}
    for i, (x, target) in enumerate(zip(arrays, targets, strict=True)):
        give_up = donate and uses[id(x)] == 1
        groups.setdefault((_shared_devices(x, target), give_up), []).append(i)
    out: list[Any] = [None] * len(arrays)
    for (devices, give_up), some in groups.items():
        move: Any = _put if devices is None else _jitted
        found = move([arrays[i] for i in some], [targets[i] for i in some], give_up)
        for i, one in zip(some, found, strict=True):
            out[i] = one
    return treedef.unflatten(out), moved


def _check(name: str, leaf: Any, target: jax.sharding.Sharding) -> None:
    try:
        target.shard_shape(np.shape(leaf))
    except ValueError as error:
        raise ValueError(f"{name}: {np.shape(leaf)} does not fit {target}: {error}") from None


def _shared_devices(x: Any, target: jax.sharding.Sharding) -> tuple[Any, ...] | None:
    """The devices over which one program can lay an array out anew, or None for ``device_put``.

    ``device_put`` would send it through the host. An array that lies there already is copied by
    ``device_put``, which promises a copy.
    """
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, jax.NamedSharding):
        return None
    if x.sharding.is_equivalent_to(target, x.ndim):
        return None
    here, there = (tuple(each.devices_indices_map(x.shape)) for each in (x.sharding, target))
    return here if here == there else None


def _put(xs: list[Any], targets: list[Any], donate: bool) -> list[Any]:
    pairs = list(zip(xs, targets, strict=True))
    stays = [
        isinstance(x, jax.Array) and x.sharding.is_equivalent_to(to, x.ndim) for x, to in pairs
    ]
    # `device_put` keeps its promise to copy only for an array that stays where it is.
    on_host = [np.array(x) if isinstance(x, np.ndarray) else x for x in xs]
    found = jax.device_put(on_host, targets, may_alias=[donate and there for there in stays])
    for i, (x, target) in enumerate(pairs):
        if stays[i] or isinstance(x, np.ndarray):
            continue
        if x.sharding.device_set & target.device_set:
            found[i] = found[i].copy()
        if donate:
            x.delete()
    return found


def _jitted(xs: list[jax.Array], targets: list[Any], donate: bool) -> list[Any]:
    # A buffer can become another only if it is as large.
    reused = [
        donate and math.prod(x.sharding.shard_shape(x.shape)) == math.prod(to.shard_shape(x.shape))
        for x, to in zip(xs, targets, strict=True)
    ]
    given = [x for x, use in zip(xs, reused, strict=True) if use]
    kept = [x for x, use in zip(xs, reused, strict=True) if not use]
    order = sorted(range(len(xs)), key=lambda i: not reused[i])  # those of `given` first
    found = _mover(tuple(targets[i] for i in order))(tuple(given), tuple(kept))
    if donate:
        for x in kept:
            x.delete()
    back = dict(zip(order, found, strict=True))
    return [back[i] for i in range(len(xs))]


@functools.lru_cache(maxsize=32)
def _mover(targets: tuple[Any, ...]) -> Any:
    return jax.jit(_both, out_shardings=targets, donate_argnums=0)


def _both(given: tuple[Any, ...], kept: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*given, *kept)


def _count(arrays: list[Any], targets: list[Any]) -> Moved:
    total, received = 0, {}
    for x, target in zip(arrays, targets, strict=True):
        shape, width = np.shape(x), x.dtype.itemsize
        total += math.prod(shape) * width
        held = x.sharding.devices_indices_map(shape) if isinstance(x, jax.Array) else {}
        for device, box in target.devices_indices_map(shape).items():
            new = _elements(box, shape)
            if device in held:
                new -= _elements(_overlap(box, held[device], shape), shape)
            received[device.id] = received.get(device.id, 0) + new * width
    return Moved(total=total, received=received)


def _elements(box: Box, shape: tuple[int, ...]) -> int:
    return math.prod(len(range(*part.indices(n))) for part, n in zip(box, shape, strict=True))


def _overlap(one: Box, other: Box, shape: tuple[int, ...]) -> Box:
    parts = []
    for a, b, size in zip(one, other, shape, strict=True):
        (start, stop, _), (first, end, _) = a.indices(size), b.indices(size)
        parts.append(slice(max(start, first), max(min(stop, end), start, first)))
    return tuple(parts)

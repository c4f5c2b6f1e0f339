"""What the processes of a pod agree on, and what each holds: one program on many hosts.

Every process runs the same script on the same flags. Arrays are spread over all of them; texts,
rewards and files are not, so here is who scores which row, and how the others learn of it. With one
process every function here does what NumPy and `jax.device_put` do, and waits for nobody.

What follows from a clock, a file, a signal or a user's function may differ from host to host, and a
difference leaves some waiting for others for ever: such a thing goes through `first` (process 0
does it, all get its result or its error), `together` (each does its part, all get all parts) or
`any_of`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import sharding

_CHUNK = 2**28  # bytes that are gathered at a time


def is_first() -> bool:
    """Whether this process writes the files and speaks to the user."""
    return jax.process_index() == 0


def own_name() -> str:
    """How this process is called in messages."""
    return f"process {jax.process_index()} of {jax.process_count()} ({socket.gethostname()})"


def exchange(value: Any) -> list[Any]:
    """Give a value to every process; returns what each gave, in the order of the processes.

    Args:
      value: anything JSON can hold (NaN included).
    """
    if jax.process_count() == 1:
        return [value]
    raw = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(raw.size)).reshape(-1)
    padded = np.zeros(1 << max(10, int(sizes.max() - 1).bit_length()), np.uint8)  # few programs
    padded[: raw.size] = raw
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def first(function: Callable[[], Any]) -> Any:
    """Let process 0 call a function; every process gets its result, or raises its error.

    Args:
      function: gives what JSON can hold.

    Raises:
      ValueError: on the others, naming process 0; it raises what the function raised.
    """
    if jax.process_count() == 1:
        return function()
    mine, error = _outcome(function) if is_first() else (None, None)
    found = exchange(mine)[0]
    if error is not None:
        raise error
    if "error" in found:
        raise ValueError(f"{found['who']}: {found['error']}")
    return found["value"]


def together(function: Callable[[], Any]) -> list[Any]:
    """Let every process call its function; all get all results, or an error that names the process.

    Args:
      function: gives what JSON can hold.
    """
    if jax.process_count() == 1:
        return [function()]
    mine, error = _outcome(function)
    found = exchange(mine)
    failed = [f"{one['who']}: {one['error']}" for one in found if "error" in one]
    if failed:
        more = f" (and {len(failed) - 1} more processes)" if len(failed) > 1 else ""
        raise ValueError(failed[0] + more) from error
    return [one["value"] for one in found]


def _outcome(function: Callable[[], Any]) -> tuple[dict[str, Any], BaseException | None]:
    who = own_name()
    try:
        return {"who": who, "value": function()}, None
    except (Exception, SystemExit) as error:  # or the others wait for this process
        text = str(error) or type(error).__name__
        if isinstance(error, SystemExit):  # a user's function called sys.exit
            text = f"SystemExit: {error}"
        return {"who": who, "error": text}, error


def any_of(flag: bool) -> bool:
    """Whether the flag is set on any process."""
    if jax.process_count() == 1:
        return bool(flag)
    return bool(multihost_utils.process_allgather(np.int32(flag)).any())


# ------------------------------------------------------------------------------------------ arrays


def place(tree: Any, shardings: Any) -> Any:
    """Lay arrays out; what is on the host or one device must be the same on every process.

    Args:
      tree: a pytree of arrays.
      shardings: of each leaf, in the same structure.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    return jax.tree.map(_place, tree, shardings)


def _place(array: Any, target: jax.sharding.Sharding) -> jax.Array:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.device_put(array, target)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, target, lambda index: host[index])


def whole(array: Any) -> np.ndarray:
    """All of an array on every host."""
    parts = isinstance(array, jax.Array) and not array.is_fully_addressable
    if parts and not array.is_fully_replicated:
        return multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def visible(array: Any) -> np.ndarray:
    """What this process holds of an array in its place, and zeros elsewhere."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return np.asarray(array)
    out = np.zeros(array.shape, array.dtype)
    for shard in array.addressable_shards:
        out[shard.index] = shard.data
    return out


def gathered(tree: Any) -> Any:
    """A tree on the host of process 0, brought there in pieces; the others get empty leaves."""

    def one(array: Any) -> Any:
        if not isinstance(array, jax.Array) or array.is_fully_addressable or not array.ndim:
            return whole(array)
        out = np.empty(array.shape, array.dtype) if is_first() else np.empty(0, array.dtype)
        rows = max(1, _CHUNK * array.shape[0] // max(1, array.nbytes))
        for begin in range(0, array.shape[0], rows):
            part = whole(array[begin : begin + rows])
            if is_first():
                out[begin : begin + rows] = part
        return out

    return tree if jax.process_count() == 1 else jax.tree.map(one, tree)


# -------------------------------------------------------------------------------------------- rows


def owners(rows: int, layout: sharding.Layout, mesh: jax.sharding.Mesh) -> np.ndarray:
    """Which process decodes and scores each row: the lowest of those that hold it; int [rows]."""
    out = np.full(rows, jax.process_count())
    found = sharding.row_sharding(layout, mesh).devices_indices_map((rows,))
    for device, index in found.items():
        np.minimum(out[index[0]], device.process_index, out=out[index[0]])
    return out


def all_texts(texts: Sequence[str | None]) -> list[str]:
    """Texts of rows on every process; each gives those it has, and None for the others'."""
    if jax.process_count() == 1:
        return list(texts)  # pyright: ignore[reportReturnType]
    out: dict[int, str] = {}
    for part in exchange([[row, text] for row, text in enumerate(texts) if text is not None]):
        out |= {row: text for row, text in part if row not in out}
    return [out[row] for row in range(len(texts))]


def check_mesh(layout: sharding.Layout, mesh: jax.sharding.Mesh) -> None:
    """Check that every device of every process takes part.

    Raises:
      ValueError: naming the layout.
    """
    if jax.process_count() > 1 and mesh.size != jax.device_count():
        raise ValueError(
            f"--layout {layout.name} uses {mesh.size} of the {jax.device_count()} devices of "
            f"{jax.process_count()} processes; use one that takes them all, such as fsdp"
        )

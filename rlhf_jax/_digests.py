"""Digests of arrays that do not depend on how, or over how many hosts, an array is spread.

digest(x) = Σ_i bits(x_i)·w_i mod 2⁶⁴, where i counts the elements of the whole array and w_i is odd

Each host sums what it holds. An odd factor has an inverse, so one changed element always changes
the sum; any other damage passes with a chance of about 2⁻³².
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 2**16  # elements at a time: they stay in the cache


def of(arrays: Mapping[str, Any]) -> dict[str, str]:
    """The digest of each array, sixteen hexadecimal digits; with several processes all must call.

    Args:
      arrays: name → array.
    """
    sums = _over_processes([_sum(array) for array in arrays.values()])
    return {name: f"{total:016x}" for name, total in zip(arrays, sums, strict=True)}


def everywhere(flag: bool) -> bool:
    """Whether a flag is set on every process; all must call."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.int32(flag)).all())


def _over_processes(sums: list[int]) -> list[int]:
    if jax.process_count() == 1 or not sums:
        return sums
    halves = np.array([(total >> 32, total & 0xFFFFFFFF) for total in sums], np.uint32)
    every = multihost_utils.process_allgather(halves).reshape(-1, len(sums), 2)
    found = [
        sum((int(high) << 32) + int(low) for high, low in every[:, i]) for i in range(len(sums))
    ]
    return [total % 2**64 for total in found]


def _sum(array: Any) -> int:
    """The sum over what this process holds and no other counts."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        shards = [(s.index, s.data) for s in array.addressable_shards if s.replica_id == 0]
    elif jax.process_index() == 0:
        shards = [((slice(None),) * np.ndim(array), array)]
    else:
        shards = []
    shape = np.shape(array)
    total = sum(_weighted(np.asarray(data), index, shape) for index, data in shards)
    return total % 2**64


def _weighted(data: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...]) -> int:
    bits = _bits(data)
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        for part, positions in _blocks(bits, _starts(data.shape, index, shape)):
            weights = ((positions * _GOLDEN) >> np.uint64(32)) | np.uint64(1)
            total += (part * weights).sum(dtype=np.uint64)
    return int(total)


def _bits(data: np.ndarray) -> np.ndarray:
    """The elements' bytes as unsigned integers: [runs, run]."""
    size = data.dtype.itemsize
    kind = np.dtype(f"u{size if size in (1, 2, 4, 8) else 1}")
    width = data.shape[-1] if data.ndim else 1
    rows = int(np.prod(data.shape[:-1], dtype=np.int64))
    return np.ascontiguousarray(data).reshape(rows, width).view(kind)


def _starts(shape: tuple[int, ...], index: tuple[slice, ...], whole: tuple[int, ...]) -> np.ndarray:
    """Where each run along the last axis begins in the whole array; uint64 [runs]."""
    strides = [int(np.prod(whole[axis + 1 :], dtype=np.int64)) for axis in range(len(whole))]
    out = np.zeros(1, np.uint64)
    for size, part, stride in zip(shape[:-1], index[:-1], strides[:-1], strict=True):
        begin = part.start or 0
        steps = np.arange(begin, begin + size, dtype=np.uint64) * np.uint64(stride)
        out = (out[:, None] + steps).reshape(-1)
    return out + np.uint64((index[-1].start or 0) if index else 0)


def _blocks(bits: np.ndarray, starts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pieces of the runs with the elements' positions in the whole array."""
    width = bits.shape[1] if bits.size else 0
    for column in range(0, width, _BLOCK):
        along = np.arange(column, min(width, column + _BLOCK), dtype=np.uint64)
        rows = max(1, _BLOCK // len(along))
        for row in range(0, len(starts), rows):
            part = bits[row : row + rows, column : column + _BLOCK].astype(np.uint64)
            yield part, starts[row : row + rows, None] + along

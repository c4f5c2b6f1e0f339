"""A NumPy reader of GGUF files (versions 2 and 3): metadata, and tensors as float32 arrays.

Only the storage types that plain converters need are known: F32, F16, Q8_0 and Q4_1.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_BLOCK = 32  # elements of one quantisation block of Q8_0 and Q4_1
# storage type: (name, elements per block, bytes per block)
_STORAGE = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    3: ("Q4_1", _BLOCK, 2 + 2 + _BLOCK // 2),
    8: ("Q8_0", _BLOCK, 2 + _BLOCK),
}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies in the file: its NumPy shape, storage type and byte range."""

    shape: tuple[int, ...]
    storage: str
    offset: int
    nbytes: int


class _Cursor:
    """Reads little-endian values one after the other and names what is cut off."""

    def __init__(self, data: mmap.mmap | bytes, where: str):
        self.data, self.where, self.at = data, where, 0

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise ValueError(
                f"gguf file {self.where}: ends at byte {len(self.data)} inside its header, "
                f"which needs at least {end} bytes; the file is cut off"
            )
        chunk, self.at = self.data[self.at : end], end
        return chunk

    def scalar(self, kind: int) -> Any:
        code = _SCALARS[kind]
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.scalar(10)).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise ValueError(f"gguf file {self.where}: unknown metadata type {kind}")
            return self.scalar(kind)
        inner, count = self.scalar(4), self.scalar(10)
        if inner in _SCALARS:
            dtype = np.dtype(_SCALARS[inner].replace("<?", "?"))
            return np.frombuffer(self.take(dtype.itemsize * count), dtype).tolist()
        return [self.value(inner) for _ in range(count)]


def _dequantise(raw: np.ndarray, storage: str) -> np.ndarray:
    """Flat float32 values of the flat bytes `raw` (uint8)."""
    if storage == "F32":
        return raw.view("<f4").astype(np.float32)
    if storage == "F16":
        return raw.view("<f2").astype(np.float32)
    if storage == "Q8_0":
        blocks = raw.reshape(-1, 2 + _BLOCK)
        scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
        return (scale * blocks[:, 2:].view(np.int8).astype(np.float32)).reshape(-1)
    blocks = raw.reshape(-1, 4 + _BLOCK // 2)  # Q4_1: scale, minimum, then 32 nibbles
    scale, low = np.split(blocks[:, :4].copy().view("<f2").astype(np.float32), 2, axis=1)
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (nibbles.astype(np.float32) * scale + low).reshape(-1)


class GGUF:
    """An opened GGUF file: `metadata`, `tensors` (name → `TensorInfo`) and `tensor(name)`."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"path: no GGUF file at {str(self.path)!r}")
        with self.path.open("rb") as file:
            if self.path.stat().st_size < 24:
                raise ValueError(f"gguf file {self.path.name}: too short to be a GGUF file")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._data, self.path.name)
        if (magic := cursor.take(4)) != b"GGUF":
            raise ValueError(f"gguf file {self.path.name}: starts with {magic!r}, not b'GGUF'")
        if (version := cursor.scalar(4)) not in (2, 3):
            raise ValueError(
                f"gguf file {self.path.name}: version {version}; supported: 2, 3 (little-endian)"
            )
        tensor_count, pair_count = cursor.scalar(10), cursor.scalar(10)
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar(4))
        self.metadata: Mapping[str, Any] = metadata
        self.tensors: Mapping[str, TensorInfo] = self._read_infos(cursor, tensor_count)

    def _read_infos(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = cursor.string()
            dims = [cursor.scalar(10) for _ in range(cursor.scalar(4))]
            found.append((name, tuple(reversed(dims)), cursor.scalar(4), cursor.scalar(10)))
        align = int(self.metadata.get("general.alignment", 32))
        start = (cursor.at + align - 1) // align * align
        infos: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in found:
            if kind not in _STORAGE:
                known = ", ".join(storage for storage, _, _ in _STORAGE.values())
                raise ValueError(
                    f"gguf file {self.path.name}: tensor {name!r} has storage type {kind}; "
                    f"supported: {known}"
                )
            storage, per_block, block_bytes = _STORAGE[kind]
            nbytes = int(np.prod(shape, dtype=np.int64)) // per_block * block_bytes
            if start + offset + nbytes > len(self._data):
                raise ValueError(
                    f"gguf file {self.path.name}: tensor {name!r} ends after the file's "
                    f"{len(self._data)} bytes; the file is cut off"
                )
            infos[name] = TensorInfo(
                shape=shape, storage=storage, offset=start + offset, nbytes=nbytes
            )
        return infos

    def tensor(self, name: str) -> np.ndarray:
        """The tensor `name` as a float32 array of its own (row-major, slowest dimension first)."""
        if name not in self.tensors:
            raise ValueError(
                f"gguf file {self.path.name}: no tensor {name!r}; it has {sorted(self.tensors)}"
            )
        info = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, info.nbytes, info.offset)
        return _dequantise(raw, info.storage).reshape(info.shape)


def read_gguf(path: str | os.PathLike[str]) -> GGUF:
    """Open a GGUF file: its metadata is read at once, its tensors when asked for.

    Dequantisation per block of 32 values q: Q8_0 x = d·q (int8), Q4_1 x = d·q + m (4 bits).

    Args:
        path: the file (GGUF version 2 or 3, little-endian).

    Returns:
        A `GGUF` with `metadata` (dict), `tensors` (name → shape and storage) and `tensor(name)`
        (float32 NumPy array, slowest dimension first).

    Raises:
        ValueError: no such file, not a GGUF file, another version, a cut-off file, or a storage
            type other than F32, F16, Q8_0 and Q4_1.

    Example:
        >>> import rlhf_jax as rl
        >>> rl.models.read_gguf("missing.gguf")
        Traceback (most recent call last):
        ...
        ValueError: path: no GGUF file at 'missing.gguf'
    """
    return GGUF(path)

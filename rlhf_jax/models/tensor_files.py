"""safetensors files as named shapes and a reader, and one error for all that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Shape = tuple[int, ...]

_LISTED = 60


def open_tensors(
    files: Sequence[Path], *, what: str
) -> tuple[dict[str, Shape], Callable[[str], np.ndarray]]:
    """Open files without reading their tensors.

    Args:
      files: safetensors files whose names of tensors differ.
      what: the argument named in errors.

    Returns:
      Name → shape, and a function name → array.

    Raises:
      ValueError: a damaged file.
    """
    from safetensors import SafetensorError, safe_open

    handles: dict[str, Any] = {}
    for file in files:
        try:
            handle = safe_open(file, framework="numpy")
        except SafetensorError as error:
            folder = str(file.parent)
            raise ValueError(f"{what}: {file.name} in {folder!r} is damaged: {error}") from error
        handles |= dict.fromkeys(handle.keys(), handle)
    shapes = {name: tuple(h.get_slice(name).get_shape()) for name, h in handles.items()}
    return shapes, lambda name: handles[name].get_tensor(name)


def check_tensors(found: Mapping[str, Shape], expected: Mapping[str, Shape], where: str) -> None:
    """One error that lists every missing, extra and misshapen tensor.

    Args:
      found: name → shape of what there is.
      expected: name → shape of what there must be.
      where: begins the error: which tensors, and what they ought to fit.
    """
    missing = [f"  missing {n} {list(s)}" for n, s in expected.items() if n not in found]
    extra = [f"  extra {n} {list(s)}" for n, s in found.items() if n not in expected]
    wrong = [
        f"  shape of {n}: file {list(found[n])}, expected {list(s)}"
        for n, s in expected.items()
        if n in found and tuple(found[n]) != tuple(s)
    ]
    problems = [*missing, *extra, *wrong]
    if problems:
        listed = "\n".join(problems[:_LISTED])
        more = f"\n  … and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise ValueError(
            f"{where} ({len(missing)} missing, {len(extra)} extra, {len(wrong)} of another "
            f"shape):\n{listed}{more}"
        )

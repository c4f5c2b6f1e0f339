"""What the planner and the benchmark share as commands: flags, and the files that they write."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Parser", "canvas", "check_files", "write_json"]


class Parser(argparse.ArgumentParser):
    """Raises ``ValueError`` for bad flags: the command then says it in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print with its usage."""
        raise ValueError(message)


def check_files(*, json: Path | None, plot: Path | None) -> None:
    """Refuse, before any work, files that could not be written after it.

    Raises:
      ValueError: one is a folder, matplotlib is missing, or it writes no such picture.
    """
    for name, path in (("--json", json), ("--plot", plot)):
        if path is not None and path.is_dir():
            raise ValueError(f"{name}: {path} is a folder; name a file")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if plot is not None:
        canvas(plot)


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def canvas(file: Path, *, size: tuple[float, float] = (11.0, 4.5)) -> Any:
    """An empty matplotlib figure for this file; `size` in inches.

    Raises:
      ValueError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "--plot: matplotlib is not installed; pip install 'rlhf-jax[experiments]', or leave "
            "--plot out"
        ) from error
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    known = sorted(figure.canvas.get_supported_filetypes())
    if file.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"--plot: {file} has none of the known endings: {', '.join(known)}")
    return figure

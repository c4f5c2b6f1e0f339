"""What a run writes: one record per optimizer step, with the same names wherever it goes.

A :class:`Tracker` hands each record to its backends (the console, ``metrics.jsonl``, TensorBoard,
W&B) **one step late**: the arrays of step n−1 are read when step n is handed in. By then they are
computed, so that logging never makes the host wait for the device.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

__all__ = [
    "Backend",
    "JsonLines",
    "TensorBoard",
    "Tracker",
    "WandB",
    "read_jsonl",
    "rewind",
    "to_number",
]

Record = dict[str, Any]


class Backend(Protocol):
    """A place that records go to."""

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Take one record: plain numbers under slash-separated names."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


def to_number(name: str, value: Any) -> float | int:
    """Turn one metric into a plain number; waits for the device if the value is on one.

    Args:
      name: the metric's name, for the error.
      value: a number, a scalar array, or a :class:`rlhf_jax.metrics.Metric`.

    Returns:
      An int for integers and bools, else a float.

    Raises:
      ValueError: it is no scalar.

    Example:
      >>> import numpy as np
      >>> to_number("reward/mean", np.float32(0.5))
      0.5
    """
    value = _scalar(name, value)
    value = value.item() if hasattr(value, "item") else value
    return int(value) if isinstance(value, bool | int) else float(value)


def _scalar(name: str, value: Any) -> Any:
    """Check that a metric is one number, without waiting for it."""
    reading = getattr(value, "value", None)
    if callable(reading):
        value = reading()
    shape = getattr(value, "shape", None)
    if shape is None and not isinstance(value, int | float):
        raise ValueError(f"metric {name!r} is a {type(value).__name__}; log one number a name")
    if shape:
        raise ValueError(f"metric {name!r} has shape {tuple(shape)}; log one number a name")
    return value


def _json_line(record: Mapping[str, Any]) -> str:
    # JSON knows no NaN or infinity: null stands for both.
    clean = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
    }
    return json.dumps(clean, ensure_ascii=False, allow_nan=False) + "\n"


def read_jsonl(path: str | Path) -> Iterator[Record]:
    """Read the records of a ``.jsonl`` file; a last line that was broken off is left out.

    Args:
      path: the file.

    Yields:
      One dict a line.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line other than the last is no JSON object.

    Example:
      >>> import tempfile, os
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = Path(folder, "metrics.jsonl")
      ...     _ = path.write_text('{"step": 0}\\n{"step": 1}\\n{"st')
      ...     [record["step"] for record in read_jsonl(path)]
      [0, 1]
    """
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        broken = None
        for number, line in enumerate(file, 1):
            if broken is not None:
                raise ValueError(f"{path}, line {broken}: not a JSON object")
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                record = None
            if isinstance(record, dict):
                yield record
            elif line.strip():
                broken = number


def rewind(path: str | Path, step: int) -> int:
    """Keep a file's records of the steps before ``step``, so that a resumed run repeats none.

    The file is replaced in one move: a crash leaves the old one or the new one.

    Args:
      path: a ``.jsonl`` file whose records have a ``step``; nothing happens if it is missing.
      step: the first step that the run will do again.

    Returns:
      How many records were dropped.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = Path(folder, "metrics.jsonl")
      ...     _ = path.write_text('{"step": 0}\\n{"step": 1}\\n{"step": 2}\\n')
      ...     rewind(path, 1), path.read_text()
      (2, '{"step": 0}\\n')
    """
    path = Path(path)
    if not path.exists():
        return 0
    dropped = 0
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for record in read_jsonl(path):
            if record.get("step", -1) < step:
                file.write(_json_line(record))
            else:
                dropped += 1
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return dropped


class JsonLines:
    """One JSON object a line, written whole and flushed, so that a crash costs no earlier line.

    Args:
      path: the file; made if missing, appended to otherwise.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     lines = JsonLines(Path(folder, "metrics.jsonl"))
      ...     lines.write(0, {"reward/mean": 0.5})
      ...     lines.close()
      ...     [r["reward/mean"] for r in read_jsonl(lines.path)]
      [0.5]
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Append one record."""
        self._file.write(_json_line({"step": step, **record}).encode("utf-8", "replace"))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars for TensorBoard (package ``tensorboardX``).

    Args:
      folder: where the event file goes.
      first_step: on resume, what TensorBoard shows from this step on is replaced.
    """

    def __init__(self, folder: str | Path, *, first_step: int | None = None):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ImportError(
                "TensorBoard logging needs the package tensorboardX: "
                "pip install 'rlhf-jax[experiments]'"
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Add one point to the curve of each name."""
        for name, value in record.items():
            if math.isfinite(value):  # tensorboardX logs a warning for each that is not
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandB:
    """Records for Weights & Biases (package ``wandb``), if it is installed and asked for.

    Args:
      folder: where its files go; also names the run, so that a resumed run goes on in its curves.
      config: the run's settings.
      project: the project's name.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        project: str = "rlhf-jax",
    ):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ImportError("W&B logging needs the package wandb: pip install wandb") from None
        name = Path(folder).resolve().name
        self._run = wandb.init(
            project=project,
            dir=str(folder),
            config=dict(config or {}),
            name=name,
            id=name,
            resume="allow",
        )

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Log one record."""
        self._run.log(dict(record), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class _Nowhere:
    """The file of a quiet tracker."""

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Drop it."""

    def close(self) -> None:
        """Nothing to close."""


class Tracker:
    """Sends the metrics of a run to all its backends, one step late.

    The folder gets ``metrics.jsonl`` (one record a step), ``eval.jsonl`` (one an evaluation,
    stamped with the version of the weights that were evaluated), ``samples.jsonl`` and
    ``tensorboard/``. Only the latest record is held in memory.

    Args:
      folder: the run's folder.
      backends: further backends, such as a :class:`rlhf_jax.console.Console` or :class:`WandB`.
      resume_step: the step that a resumed run does next: records from it on are dropped from the
        files. None is a new run, which refuses a folder that has records.
      tensorboard: write TensorBoard files; by default if ``tensorboardX`` is installed.
      quiet: write no files: for every process of a pod but the first. Records are read all the
        same, since reading an array that is spread over hosts is the work of all of them, and go to
        ``backends``.

    Raises:
      FileExistsError: a new run in the folder of another.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with Tracker(folder, tensorboard=False) as tracker:
      ...         for step in range(3):
      ...             tracker.log(step, {"reward/mean": step / 2})
      ...     [r["reward/mean"] for r in read_jsonl(Path(folder, "metrics.jsonl"))]
      [0.0, 0.5, 1.0]
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        backends: Sequence[Backend] = (),
        resume_step: int | None = None,
        tensorboard: bool | None = None,
        quiet: bool = False,
    ):
        self.folder = Path(folder)
        self._backends = list(backends)
        self._pending: tuple[int, dict[str, Any]] | None = None
        self._last = -1 if resume_step is None else resume_step - 1
        self._evaluated = -1
        self._metrics: Any = _Nowhere()
        self._eval = self._samples = self._metrics
        if not quiet:
            self._open_files(resume_step, tensorboard)

    def _open_files(self, resume_step: int | None, tensorboard: bool | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = [self.folder / f"{name}.jsonl" for name in ("metrics", "eval", "samples")]
        if resume_step is None:
            used = [path.name for path in paths if path.exists() and path.stat().st_size]
            if used:
                raise FileExistsError(
                    f"run folder {str(self.folder)!r} already has {', '.join(used)}: "
                    "resume that run, or choose another folder"
                )
        else:
            for path in paths:
                # Weights of version k were evaluated before step k, which is done again.
                rewind(path, resume_step + (path.name == "eval.jsonl"))
        self._metrics, self._eval, self._samples = (JsonLines(path) for path in paths)
        if tensorboard is None:
            tensorboard = importlib.util.find_spec("tensorboardX") is not None
        if tensorboard:
            first = resume_step if resume_step else None
            self._backends.append(TensorBoard(self.folder / "tensorboard", first_step=first))
        self._evaluated = max((r["step"] for r in read_jsonl(paths[1])), default=-1)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Hand in the metrics of one step, and write those of the step before.

        Args:
          step: the optimizer step, larger than any before.
          metrics: name → number, scalar array or ``Metric``; arrays may still be on their way.

        Raises:
          ValueError: the step goes back, or a metric is no scalar.
        """
        if step <= self._last:
            raise ValueError(f"step {step} after step {self._last}: one record a step, in order")
        record = {name: _scalar(name, value) for name, value in metrics.items()}
        for value in record.values():
            if hasattr(value, "copy_to_host_async"):
                value.copy_to_host_async()  # the copy runs while the next step does
        self.flush()
        self._pending, self._last = (step, {"wall_time": time.time(), **record}), step

    def flush(self) -> None:
        """Write the record that is held back; waits for its arrays."""
        if self._pending is None:
            return
        step, values = self._pending
        self._pending = None
        record = {name: to_number(name, value) for name, value in values.items()}
        self._metrics.write(step, record)
        del record["wall_time"]
        for backend in self._backends:
            backend.write(step, record)

    def evaluation(self, version: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of an evaluation at once, under the version that was evaluated.

        Args:
          version: updates that the evaluated weights have seen.
          metrics: as in :meth:`log`; names get the prefix ``eval/``. A version evaluated again
            replaces its record.

        Raises:
          ValueError: a metric is no scalar.
        """
        record = {
            name if name.startswith("eval/") else f"eval/{name}": to_number(name, value)
            for name, value in metrics.items()
        }
        self.flush()
        if version <= self._evaluated and not isinstance(self._eval, _Nowhere):
            self._eval.close()
            rewind(self._eval.path, version)
            self._eval = JsonLines(self._eval.path)
        self._eval.write(version, record)
        self._evaluated = version
        for backend in self._backends:
            backend.write(version, record)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep sample completions, and show them where a backend can.

        Args:
          step: the step, or version, that they belong to.
          rows: one dict a sample: ``prompt``, ``completion``, ``reward``, …
        """
        for row in rows:
            plain = {k: v.item() if hasattr(v, "item") else v for k, v in row.items()}
            self._samples.write(step, plain)
        for backend in self._backends:
            show = getattr(backend, "samples", None)
            if show is not None:
                show(step, rows)

    def close(self) -> None:
        """Write what is left and close every backend."""
        with contextlib.ExitStack() as stack:  # a full disk must not leave a live line behind
            for backend in (self._metrics, self._eval, self._samples, *self._backends):
                stack.callback(backend.close)
            self.flush()
        self._backends = []

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

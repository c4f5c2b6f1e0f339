"""The progress of a run on the terminal: a live line where there is one, else a line a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

__all__ = ["COLUMNS", "Console", "duration"]

COLUMNS: dict[str, tuple[str, ...]] = {
    "reward": ("reward/mean",),
    "KL": ("policy/kl_ref_sum", "policy/kl_ref_k1", "policy/kl_ref_k3"),
    "entropy": ("policy/entropy",),
    "length": ("completion/length_mean",),
    "tok/s": ("throughput/tokens_per_s_generate", "throughput/tokens_per_s_train"),
}
"""What is shown: a label and the metrics to look for, first come."""


def duration(seconds: float) -> str:
    """Write a time span in two units at most.

    Example:
      >>> duration(5.4), duration(65), duration(3 * 3600 + 125)
      ('5s', '1m05s', '3h02m')
    """
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


class Console:
    """Shows step, reward, KL, entropy, length, tokens/s and time left; a tracking backend.

    On a terminal with ``rich`` installed it is one live line with a bar; elsewhere (a file, a pipe,
    a CI log) one plain line a step.

    Args:
      total_steps: steps of the whole run.
      first_step: where a resumed run begins, for the time left.
      columns: label → names of metrics, the first that a record has is shown.
      samples: how many of the sample completions handed in are shown.
      stream: where to; standard output by default.

    Example:
      >>> console = Console(total_steps=10, stream=sys.stdout)
      >>> console.write(0, {"reward/mean": 0.25, "policy/entropy": 2.0})
      step  1/10  reward 0.250  entropy 2.00
      >>> console.close()
    """

    def __init__(
        self,
        *,
        total_steps: int,
        first_step: int = 0,
        columns: Mapping[str, Sequence[str]] = COLUMNS,
        samples: int = 2,
        stream: TextIO | None = None,
    ):
        self.total_steps = total_steps
        self.columns = columns
        self._shown = samples
        self._stream = stream or sys.stdout
        self._previous: float | None = None  # when the step before was done
        self._pace: float | None = None  # seconds a step, smoothed
        self._done = first_step
        self._live = self._start_live() if self._stream.isatty() else None

    def _start_live(self) -> Any:
        try:
            from rich import console, progress
        except ImportError:
            return None
        terminal = console.Console(file=self._stream, highlight=False)
        columns: list[progress.ProgressColumn] = [
            progress.TextColumn("[bold]{task.completed:.0f}/{task.total:.0f}")
        ]
        if terminal.width >= 110:  # the figures come first: a narrow window has no bar
            columns.append(progress.BarColumn(bar_width=20))
        columns.append(progress.TextColumn("{task.fields[line]}"))
        live = progress.Progress(*columns, console=terminal)
        self._task = live.add_task("", total=self.total_steps, completed=self._done, line="…")
        live.start()
        return live

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Show one step, or the result of an evaluation."""
        parts = [
            f"{_figure(label, record[found])} tok/s"
            if label == "tok/s"
            else f"{label} {_figure(label, record[found])}"
            for label, names in self.columns.items()
            if (found := next((name for name in names if name in record), None)) is not None
        ]
        if any(name.startswith("eval/") for name in record):
            self._show_evaluation(step, record)
            return
        if record.get("optim/skipped"):
            parts.append("update dropped (gradient not finite)")
        self._done = step + 1
        self._measure()
        if self._pace is not None:
            parts.append(f"left {duration(self._pace * (self.total_steps - self._done))}")
        line = "  ".join(parts)
        if self._live is not None:
            self._live.update(self._task, completed=self._done, line=line)
            return
        width = len(str(self.total_steps))
        self.print(f"step {self._done:{width}d}/{self.total_steps}  {line}")

    def _show_evaluation(self, version: int, record: Mapping[str, float]) -> None:
        shown = [
            f"{name.removeprefix('eval/')} {_figure(name, value)}" for name, value in record.items()
        ]
        self.print(f"held-out, after {version} updates:  " + "  ".join(shown))

    def _measure(self) -> None:
        now = time.monotonic()
        if self._previous is not None:
            took = now - self._previous
            self._pace = took if self._pace is None else 0.8 * self._pace + 0.2 * took
        self._previous = now

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show a few completions: the prompt in grey, the completion behind it."""
        for row in rows[: self._shown]:
            prompt, completion = (
                str(row.get(key, "")).replace("\n", "⏎") for key in ("prompt", "completion")
            )
            reward = row.get("reward")
            mark = f"{float(reward):+.2f}" if reward is not None else "  ·  "
            if self._live is None:
                self.print(f"    {mark} │ {prompt}│{completion}")
                continue
            from rich.text import Text

            text = Text("    ").append(mark, "cyan").append(" │ ", "dim")
            self._live.console.print(text.append(prompt, "dim").append(completion))

    def print(self, text: str) -> None:
        """Print a line above the live one."""
        if self._live is not None:
            self._live.console.print(text, markup=False)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was; what was shown stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _figure(label: str, value: float) -> str:
    if label == "tok/s" or abs(value) >= 1000:
        return f"{value:,.0f}"
    if label == "length":
        return f"{value:.1f}"
    return f"{value:.3f}" if label == "reward" or abs(value) < 1 else f"{value:.2f}"

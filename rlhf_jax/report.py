"""The end of a run: diversity of its texts, a table start → end, and its curves as a PNG."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rlhf_jax.tracking import read_jsonl

__all__ = ["CURVES", "distinct_n", "plot_run", "print_table", "repetition", "table_rows"]

CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward/mean",)),
    ("KL to the reference (nats)", ("policy/kl_ref_sum", "policy/kl_ref_k1", "policy/kl_ref_k3")),
)
"""The panels of a run's picture: a title and the metrics to look for, first come."""


def _words(text: str) -> list[str]:
    return text.split()


def distinct_n(
    texts: Sequence[str], n: int = 2, *, tokenize: Callable[[str], Sequence[Any]] | None = None
) -> float:
    """Share of different n-grams among all n-grams of all texts together.

    distinct-n = |set of n-grams| / |n-grams|; 1 is no repetition at all, near 0 is collapse. It
    falls with the number of texts, so compare runs over equally many.

    Args:
      texts: completions.
      n: how many words an n-gram has.
      tokenize: text → words; splits at blanks by default.

    Returns:
      A share in [0, 1]; 0 if no text has n words.

    Raises:
      ValueError: ``n`` is below 1.

    References:
      Li, Galley, Brockett, Gao and Dolan (2016), "A Diversity-Promoting Objective Function for
      Neural Conversation Models", section 5.1.

    Example:
      >>> distinct_n(["so good", "so good", "so bad"])
      0.6666666666666666
    """
    grams = [gram for text in texts for gram in _grams(text, n, tokenize)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(
    texts: Sequence[str], n: int = 2, *, tokenize: Callable[[str], Sequence[Any]] | None = None
) -> float:
    """Mean share of n-grams within a text that it has used before: 1 − distinct-n, text by text.

    Args:
      texts: completions; those of fewer than n words do not count.
      n: how many words an n-gram has.
      tokenize: text → words; splits at blanks by default.

    Returns:
      A share in [0, 1]; 0 if no text has n words.

    Raises:
      ValueError: ``n`` is below 1.

    Example:
      >>> repetition(["amazing amazing amazing amazing", "all words differ here"], 1)
      0.375
    """
    shares = []
    for text in texts:
        grams = _grams(text, n, tokenize)
        if grams:
            shares.append(1 - len(set(grams)) / len(grams))
    return sum(shares) / len(shares) if shares else 0.0


def _grams(text: str, n: int, tokenize: Callable[[str], Sequence[Any]] | None) -> list[tuple]:
    if n < 1:
        raise ValueError(f"n must be 1 or more, got {n}")
    words = list((tokenize or _words)(text))
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def table_rows(
    start: Mapping[str, float], end: Mapping[str, float]
) -> list[tuple[str, str, str, str]]:
    """Put two evaluations side by side: (name, start, end, change), as text.

    Args:
      start: name → number before training.
      end: the same after it; a name that only one of them has shows a dash on the other side.

    Returns:
      One row a name, in the order of ``start``, then what only ``end`` has.

    Example:
      >>> table_rows({"reward": 0.1}, {"reward": 0.65, "KL": 5.5})
      [('reward', '0.100', '0.650', '+0.550'), ('KL', '–', '5.500', '')]
    """
    rows = []
    for name in dict.fromkeys([*start, *end]):
        a, b = start.get(name), end.get(name)
        change = ""
        if a is not None and b is not None and math.isfinite(a) and math.isfinite(b):
            change = f"{b - a:+.3f}"
        rows.append((name, _figure(a), _figure(b), change))
    return rows


def _figure(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.3f}"


def print_table(
    start: Mapping[str, float],
    end: Mapping[str, float],
    *,
    title: str = "held-out prompts",
    stream: TextIO | None = None,
) -> None:
    """Print a table start → end: a drawn one on a terminal with ``rich``, plain columns elsewhere.

    Args:
      start: name → number before training.
      end: the same after it.
      title: what was measured.
      stream: where to; standard output by default.

    Example:
      >>> print_table({"reward": 0.1}, {"reward": 0.65}, stream=sys.stdout)
      held-out prompts   start     end  change
      reward             0.100   0.650  +0.550
    """
    out: TextIO = stream or sys.stdout
    rows = table_rows(start, end)
    if out.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(title=title, title_justify="left")
            table.add_column("")
            for heading in ("start", "end", "change"):
                table.add_column(heading, justify="right")
            for row in rows:
                table.add_row(*row)
            Console(file=out).print(table)
            return
    heading = (title, "start", "end", "change")
    width = max(len(row[0]) for row in [heading, *rows])
    for name, *figures in [heading, *rows]:
        print(f"{name:<{width}}", *(f"{x:>7}" for x in figures), file=out, flush=True)


def plot_run(
    folder: str | Path,
    path: str | Path | None = None,
    *,
    title: str | None = None,
    curves: Sequence[tuple[str, Sequence[str]]] = CURVES,
) -> Path | None:
    """Draw a run's curves, each step and a running mean over them, and its evaluations as dots.

    Args:
      folder: a run's folder with ``metrics.jsonl`` and, if it was evaluated, ``eval.jsonl``.
      path: the picture; ``curves.png`` in the folder by default. The ending decides its kind.
      title: its heading; the folder's name by default.
      curves: panels: a title and the names of metrics, of which the first that was logged is drawn.

    Returns:
      Where the picture is, or None if nothing was logged that could be drawn.

    Raises:
      FileNotFoundError: there is no ``metrics.jsonl``.
      ImportError: matplotlib is missing.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     _ = Path(folder, "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\\n')
      ...     picture = plot_run(folder)
      >>> picture.name
      'curves.png'
    """
    folder = Path(folder)
    records = list(read_jsonl(folder / "metrics.jsonl"))
    evaluations = folder / "eval.jsonl"
    evals = list(read_jsonl(evaluations)) if evaluations.exists() else []
    panels = []
    for label, names in curves:
        found = next((n for n in names if any(r.get(n) is not None for r in records)), None)
        if found is not None:
            panels.append((label, _series(records, found), _series(evals, f"eval/{found}")))
    if not panels:
        return None
    figure = _draw(panels, title or folder.resolve().name)
    path = Path(path) if path is not None else folder / "curves.png"
    figure.savefig(path)
    return path


def _series(records: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(r["step"], float(r[name])) for r in records if r.get(name) is not None]


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    out = []
    for i in range(len(values)):
        near = values[max(0, i - window + 1) : i + 1]
        out.append(sum(near) / len(near))
    return out


def _draw(panels: Sequence[tuple[str, list, list]], title: str) -> Any:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ImportError(
            "drawing curves needs matplotlib: pip install 'rlhf-jax[experiments]'"
        ) from None
    # A figure without pyplot: no window system is asked for, nothing global is kept.
    figure = Figure(figsize=(5.2 * len(panels), 3.6), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, color, (label, series, evals) in zip(
        axes, ("#1b6ca8", "#c8553d", "#4b8f5b", "#7a5195") * len(panels), panels, strict=False
    ):
        steps, values = zip(*series, strict=True)
        axis.plot(steps, values, color=color, alpha=0.3, linewidth=1, label="each step")
        window = max(2, len(values) // 10)
        smooth = _running_mean(values, window)
        axis.plot(steps, smooth, color=color, linewidth=2, label=f"mean of {window}")
        if len(values) == 1:
            axis.plot(steps, values, "o", color=color)
        if evals:
            axis.plot(
                *zip(*evals, strict=True), "o", color="#222222", markersize=5, label="held out"
            )
        axis.set_title(label, loc="left", fontsize=11)
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(True, color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure

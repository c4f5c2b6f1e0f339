"""The benchmark's result as a table, as JSON and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sharding._command import canvas

__all__ = ["plot", "spread", "table"]

MIB = 2**20
REHEARSAL = (
    "REHEARSAL on host devices of a CPU, which share its cores: programs and checks are those of "
    "the layouts, the times mean nothing for an accelerator."
)


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median and quartiles.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'q1': 1.5, 'q3': 2.5}
    """
    if len(seconds) == 1:
        return dict.fromkeys(("median", "q1", "q3"), seconds[0])
    q1, median, q3 = statistics.quantiles(seconds, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """One line a layout, as markdown.

    Args:
      results: what the JSON file holds under ``layouts``.

    Returns:
      The table.
    """
    header = (
        *("layout", "mesh", "train step, s", "tokens/s", "decode, s", "tokens/s"),
        *("state, MiB", "train peak, MiB", "decode peak, MiB", "loss"),
    )
    rows: list[Sequence[str]] = [header, ["---", "---", *["---:"] * (len(header) - 2)]]
    for one in results:
        train, decode, memory = one["train"], one["decode"], one["memory"]
        rows.append(
            (
                one["name"],
                " × ".join(f"{axis} {size}" for axis, size in one["mesh"].items()),
                _seconds(train),
                f"{train['tokens_per_second']:,.0f}",
                _seconds(decode),
                f"{decode['tokens_per_second']:,.0f}",
                _mib(memory["train"].get("updated in place")),
                _mib(memory["train"].get("peak")),
                _mib(memory["decode"].get("peak")),
                f"{one['loss']:.6f}",
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _seconds(found: Mapping[str, Any]) -> str:
    return f"{found['median']:.4g} ({found['q1']:.4g} – {found['q3']:.4g})"


def _mib(count: int | None) -> str:
    return "?" if count is None else f"{count / MIB:,.1f}"


def plot(path: Path, record: Mapping[str, Any]) -> None:
    """Draw times with their quartiles, and the memory of a device.

    Args:
      path: picture to write, in any format that matplotlib knows.
      record: what the JSON file holds.

    Raises:
      ValueError: matplotlib is missing, or cannot write such a file.
    """
    figure = canvas(path, size=(13, 4))
    results = record["layouts"]
    names = [one["name"] for one in results]
    axes = figure.subplots(1, 3)
    titles = ("train step, seconds", "decode, seconds")
    for axis, what, title, color in zip(
        axes, ("train", "decode"), titles, ("#1b6ca8", "#c8553d"), strict=False
    ):
        found = [one[what] for one in results]
        middle = [x["median"] for x in found]
        low = [x["median"] - x["q1"] for x in found]
        high = [x["q3"] - x["median"] for x in found]
        axis.bar(names, middle, yerr=(low, high), color=color, capsize=4)
        axis.set_title(title)
    for what, shift, color in (("train", -0.2, "#1b6ca8"), ("decode", 0.2, "#c8553d")):
        peaks = [one["memory"][what].get("peak", 0) / MIB for one in results]
        places = [place + shift for place in range(len(names))]
        axes[2].bar(places, peaks, width=0.4, color=color, label=what)
    axes[2].set_xticks(range(len(names)), names)
    axes[2].set_title("peak memory of a device, MiB")
    axes[2].margins(y=0.25)
    axes[2].legend(ncols=2)
    for axis in axes:
        for label in axis.get_xticklabels():
            label.set(rotation=30, ha="right")
    what = f"{record['devices']} × {record['device']}, {record['model']}"
    note = "REHEARSAL: times mean nothing for an accelerator\n" if record["rehearsal"] else ""
    figure.suptitle(note + what)
    figure.savefig(path)

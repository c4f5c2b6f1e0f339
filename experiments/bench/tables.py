"""Tables of results: as markdown for people, as records for JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax


@dataclasses.dataclass(frozen=True)
class Table:
    """Column names, rows and a sentence before them.

    As text it is markdown: the first column is text, the others are numbers, aligned right.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    note: str = ""

    def __str__(self) -> str:
        rule = ["---", *["---:"] * (len(self.header) - 1)]
        lines = ["| " + " | ".join(map(str, row)) + " |" for row in (self.header, rule, *self.rows)]
        return "\n".join([*([self.note, ""] if self.note else []), *lines])

    def records(self) -> list[dict[str, object]]:
        """One dictionary a row."""
        return [dict(zip(self.header, row, strict=True)) for row in self.rows]


def run_sections(
    sections: Mapping[str, Callable[[], Table]], wanted: Sequence[str], file: Path | None
) -> None:
    """Measure and print the wanted sections (all when none is named); also as JSON into a file."""
    print(f"jax {jax.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    found = {}
    for name, run in sections.items():
        if not wanted or name in wanted:
            found[name] = run()
            print(f"\n## {name}\n\n{found[name]}", flush=True)
    if file:
        records = {name: {"note": one.note, "rows": one.records()} for name, one in found.items()}
        file.write_text(json.dumps(records, indent=1, default=str) + "\n", encoding="utf-8")

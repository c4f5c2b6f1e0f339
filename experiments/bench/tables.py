"""Tables of results: as markdown for people, as records for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


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

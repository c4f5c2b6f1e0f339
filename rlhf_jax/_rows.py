"""Rows of prompts before they are tokenised: files, generated rows, order, split, digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
"""One prompt with its columns: ``row["prompt"]`` is text, the rest goes to the reward function."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptFile:
    """What a file held.

    Attributes:
      rows: one dict a prompt, in the order of the file.
      blank_lines: how many empty lines were passed over.
    """

    rows: tuple[Row, ...]
    blank_lines: int


def read_prompts(path: str | Path, *, field: str = "prompt") -> PromptFile:
    """Read prompts from a text file (one a line) or a ``.jsonl`` file (one object a line).

    Args:
      path: UTF-8 file. Of a ``.jsonl`` file every field is kept as a column of its row.
      field: the field of a ``.jsonl`` object that holds the prompt.

    Returns:
      The rows, and the number of blank lines, which are ignored.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: it is no UTF-8, holds no prompt, or a line is no JSON object with a text field;
        the message names file and line.

    Example:
      >>> import tempfile, os
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = Path(folder, "prompts.txt")
      ...     _ = path.write_text("The train was\\n\\nDear Ada, I\\n")
      ...     file = read_prompts(path)
      >>> [row["prompt"] for row in file.rows], file.blank_lines
      (['The train was', 'Dear Ada, I'], 1)
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"prompts file {str(path)!r} does not exist; give a .txt or .jsonl")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"prompts file {str(path)!r} is not UTF-8 (byte {error.start}); convert it first"
        ) from None
    # Only "\n" and "\r\n" end a line: str.splitlines would also cut at U+2028 inside a prompt.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if lines and not lines[-1]:
        lines.pop()
    jsonl = path.suffix in (".jsonl", ".json", ".ndjson")
    rows = [
        _parse_line(path, number, line, field) if jsonl else {"prompt": line}
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not rows:
        raise ValueError(f"prompts file {str(path)!r} holds no prompt: write one on each line")
    blank = len(lines) - len(rows)
    if blank:
        _log.warning("%s: %d blank lines ignored", path, blank)
    return PromptFile(rows=tuple(rows), blank_lines=blank)


def _parse_line(path: Path, number: int, line: str, field: str) -> Row:
    where = f"prompts file {str(path)!r}, line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}); write one object a line") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a JSON object is wanted, this is a {type(row).__name__}")
    prompt = row.get(field)
    if not isinstance(prompt, str) or not prompt.strip():
        have = ", ".join(sorted(row)) or "none"
        raise ValueError(f"{where}: field {field!r} must hold a text; fields there: {have}")
    return {**{k: v for k, v in row.items() if k != field}, "prompt": prompt}


@dataclasses.dataclass(frozen=True)
class GeneratedRows(Sequence[Row]):
    """Rows made when they are asked for: ``make(i)`` for i in 0 … size−1, nothing kept.

    Attributes:
      make: a pure function of the index.
      size: the number of rows.

    Example:
      >>> rows = GeneratedRows(lambda i: {"prompt": f"{i}+{i}=", "answer": str(2 * i)}, 100)
      >>> len(rows), rows[21]["answer"]
      (100, '42')
    """

    make: Callable[[int], Row]
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        if not -self.size <= index < self.size:
            raise IndexError(index)
        return self.make(int(index) % self.size)


def permutation(size: int, *, seed: int, epoch: int = 0) -> np.ndarray:
    """Return a random order of 0 … size−1 that depends on (size, seed, epoch) alone.

    It sorts raw words of the counter-based Philox generator, whose stream is fixed for all time;
    NumPy's own ``permutation`` may change with a release.

    Args:
      size: how many.
      seed: the run's seed, ≥ 0.
      epoch: which pass over the data, ≥ 0.

    Returns:
      int64 ``[size]``.

    Example:
      >>> sorted(permutation(4, seed=0).tolist())
      [0, 1, 2, 3]
      >>> bool((permutation(99, seed=0) == permutation(99, seed=0, epoch=1)).all())
      False
    """
    if not (0 <= seed < 2**63 and epoch >= 0):
        raise ValueError(f"seed and epoch must be 0 or more (64 bits), got {seed} and {epoch}")
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(size)
    return np.argsort(words, kind="stable")


def split(rows: Sequence[Row], *, held_out: int, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """Part rows into training and held-out ones; deterministic, and disjoint by prompt text.

    Args:
      rows: all rows. Rows that share a prompt text stay on one side.
      held_out: how many different prompts to hold out.
      seed: which split.

    Returns:
      ``(train, held_out)``; training rows in their first order, held-out ones in drawn order.

    Raises:
      ValueError: not enough different prompts.

    Example:
      >>> train, test = split([{"prompt": p} for p in "abcab"], held_out=1)
      >>> {r["prompt"] for r in train} & {r["prompt"] for r in test}
      set()
    """
    texts = list(dict.fromkeys(row["prompt"] for row in rows))
    if not 0 <= held_out < len(texts):
        raise ValueError(
            f"held_out={held_out} of {len(texts)} different prompts: leave at least one to train on"
        )
    chosen = [texts[i] for i in permutation(len(texts), seed=seed)[:held_out]]
    apart = {text: [] for text in chosen}
    train = []
    for row in rows:
        apart.get(row["prompt"], train).append(row)
    return train, [row for text in chosen for row in apart[text]]


def fingerprint(rows: Sequence[Row]) -> str:
    """Return a short digest of all rows, to notice on resume that the data changed.

    Example:
      >>> fingerprint([{"prompt": "a"}]) == fingerprint([{"prompt": "b"}])
      False
    """
    digest = hashlib.sha256()
    for i in range(len(rows)):
        line = json.dumps(rows[i], sort_keys=True, ensure_ascii=False, default=repr)
        digest.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()[:16]

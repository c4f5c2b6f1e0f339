"""Every row of the fault list has a named test: ``@pytest.mark.fault(row, ...)`` lists its rows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

# Rows 1-38 are faults of masks, advantages, normalisation, clipping, KL and off-policy weights;
# 39-49 of the sampler.
REQUIRED = tuple(range(1, 59))
ROWS = 63  # the list's last row: state, sharding, resume, models, files


def marks(tree: ast.Module):
    """(row, test's name) of every fault mark in a file."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            if (
                isinstance(decorator, ast.Call)
                and isinstance(decorator.func, ast.Attribute)
                and decorator.func.attr == "fault"
            ):
                for argument in decorator.args:
                    yield ast.literal_eval(argument), node.name


def collect() -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    root = Path(__file__).parent
    for path in sorted(root.rglob("test_*.py")):
        for row, name in marks(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(row, []).append(f"{path.relative_to(root)}::{name}")
    return found


FOUND = collect()


@pytest.mark.parametrize("row", REQUIRED)
def test_row_is_covered(row):
    assert FOUND.get(row), f"no test is marked @pytest.mark.fault({row})"


def test_marks_name_rows_that_exist():
    strangers = {row: tests for row, tests in FOUND.items() if row not in range(1, ROWS + 1)}
    assert not strangers


def test_marks_sit_on_tests():
    for tests in FOUND.values():
        assert all(name.split("::")[1].startswith(("test_", "Test")) for name in tests)

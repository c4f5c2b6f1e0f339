"""Diversity, the closing table, the picture."""

from __future__ import annotations

import io
import json

import pytest

import rlhf_jax as rl

report = rl.report


def test_distinct_n_counts_over_all_texts():
    assert report.distinct_n(["a b c", "a b d"], 2) == 3 / 4
    assert report.distinct_n(["a b c", "a b d"], 1) == 4 / 6
    assert report.distinct_n(["a a a a"], 2) == 1 / 3
    assert report.distinct_n(["a", ""], 2) == 0.0
    assert report.distinct_n([]) == 0.0
    assert report.distinct_n(["abab"], 2, tokenize=list) == 2 / 3


def test_repetition_looks_at_each_text_alone():
    assert report.repetition(["a b c", "a b c"], 1) == 0.0
    assert report.repetition(["a a", "a b", ""], 1) == 0.25
    assert report.repetition([], 1) == 0.0


@pytest.mark.parametrize("function", [report.distinct_n, report.repetition])
def test_n_must_be_positive(function):
    with pytest.raises(ValueError, match="n must be 1 or more"):
        function(["a"], 0)


def test_table_rows_and_plain_table():
    start, end = {"reward": 0.1, "gone": 1.0}, {"reward": 0.65, "new": float("nan")}
    assert report.table_rows(start, end) == [
        ("reward", "0.100", "0.650", "+0.550"),
        ("gone", "1.000", "–", ""),
        ("new", "–", "–", ""),
    ]
    out = io.StringIO()
    report.print_table(start, end, title="t", stream=out)
    assert out.getvalue().splitlines()[1] == "reward   0.100   0.650  +0.550"


def test_drawn_table_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    report.print_table({"reward": 0.1}, {"reward": 0.65}, stream=out)
    assert "│ reward" in out.getvalue() and "+0.550" in out.getvalue()


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def test_picture_has_a_panel_a_curve(tmp_path):
    write(
        tmp_path / "metrics.jsonl",
        [
            {"step": s, "reward/mean": s / 9, "policy/kl_ref_k1": None if s == 3 else 0.1 * s}
            for s in range(10)
        ],
    )
    write(tmp_path / "eval.jsonl", [{"step": 0, "eval/reward/mean": 0.1}])
    path = report.plot_run(tmp_path)
    assert path == tmp_path / "curves.png"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    svg = report.plot_run(tmp_path, tmp_path / "c.svg", title="A run")
    assert svg is not None and svg.read_text().count('<g id="axes_') == len(report.CURVES) == 2


def test_nothing_to_draw(tmp_path):
    write(tmp_path / "metrics.jsonl", [{"step": 0, "optim/lr": 1.0}])
    assert report.plot_run(tmp_path) is None
    with pytest.raises(FileNotFoundError):
        report.plot_run(tmp_path / "nowhere")


def test_a_figure_that_is_no_number_has_no_change():
    rows = report.table_rows({"reward": float("nan"), "KL": None}, {"reward": 0.5, "KL": 1.0})
    assert rows == [("reward", "–", "0.500", ""), ("KL", "–", "1.000", "")]

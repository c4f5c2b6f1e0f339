"""What a run shows: a plain line a step in a log, one live line on a terminal."""

from __future__ import annotations

import io

import pytest

from rlhf_jax import console

RECORD = {
    "reward/mean": 0.5,
    "policy/kl_ref_k1": 1.25,
    "policy/kl_ref_sum": 5.5,
    "policy/entropy": 2.0,
    "completion/length_mean": 16.0,
    "throughput/tokens_per_s_generate": 1234.5,
    "optim/lr": 1e-4,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_output_is_one_line_a_step(monkeypatch):
    clock = iter([100.0, 102.0, 104.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    shown = console.Console(total_steps=35, stream=out)
    for step in range(3):
        shown.write(step, RECORD)
    shown.close()
    first, _, third = out.getvalue().splitlines()
    line = "reward 0.500  KL 5.50  entropy 2.00  length 16.0  1,234 tok/s"
    assert first == f"step  1/35  {line}"  # one step done: no pace yet
    assert third == f"step  3/35  {line}  left 1m04s"
    assert "\x1b" not in out.getvalue()


def test_resumed_run_counts_on_and_measures_its_own_steps(monkeypatch):
    clock = iter([0.0, 3.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    shown = console.Console(total_steps=10, first_step=6, stream=out)
    shown.write(6, {"reward/mean": 0.5})
    shown.write(7, {"reward/mean": 0.5})
    assert out.getvalue().splitlines()[1] == "step  8/10  reward 0.500  left 6s"


def test_missing_metrics_are_left_out_and_columns_are_data():
    out = io.StringIO()
    shown = console.Console(total_steps=2, stream=out, columns={"lr": ("optim/lr",), "x": ("no",)})
    shown.write(0, {"optim/lr": 0.25})
    assert out.getvalue() == "step 1/2  lr 0.250\n"
    assert "reward" in console.COLUMNS


def test_a_dropped_update_is_said():
    out = io.StringIO()
    shown = console.Console(total_steps=2, stream=out)
    shown.write(0, {"reward/mean": 0.5, "optim/skipped": 1.0})
    assert out.getvalue() == "step 1/2  reward 0.500  update dropped (gradient not finite)\n"


def test_samples_and_evaluations_are_lines_of_their_own():
    out = io.StringIO()
    shown = console.Console(total_steps=2, stream=out, samples=1)
    rows = [{"prompt": "The [bold]", "completion": " sea\nwas", "reward": 0.734}] * 2
    shown.samples(0, rows)
    shown.samples(0, [{"prompt": "a", "completion": "b"}])
    shown.write(0, {"eval/reward/mean": 0.1})
    assert out.getvalue().splitlines() == [
        "    +0.73 │ The [bold]│ sea⏎was",
        "      ·   │ a│b",
        "held-out, after 0 updates:  reward/mean 0.100",
    ]


@pytest.mark.parametrize("columns", [80, 140])
def test_live_line_fits_and_leaves_the_samples_above(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    shown = console.Console(total_steps=35, stream=out)
    for step in range(3):
        shown.write(step, {**RECORD, "reward/mean": -0.5})
    shown.samples(2, [{"prompt": "The [red]", "completion": " sea", "reward": -1}])
    shown.print("a [plain] line")
    shown.close()
    shown.close()
    text = out.getvalue()
    assert "3/35" in text and "1,234 tok/s" in text and "left 0s" in text
    assert "[red]" in text and "a [plain] line" in text and "-1.00" in text


def test_a_terminal_without_rich_gets_plain_lines(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "rich", None)
    out = Terminal()
    console.Console(total_steps=1, stream=out).write(0, {"reward/mean": 1})
    assert out.getvalue() == "step 1/1  reward 1.000\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0s"), (59.6, "1m00s"), (3599, "59m59s"), (90000, "25h00m")]
)
def test_duration(seconds, text):
    assert console.duration(seconds) == text

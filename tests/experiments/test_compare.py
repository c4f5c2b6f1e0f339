"""The comparison: what it runs, what it does not run again, and what the table says."""

import json

import numpy as np
import pytest

SCRIPT = """
import json, pathlib, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
folder, seed = pathlib.Path(flags["--run-dir"]), int(flags["--seed"])
(folder / "config.json").write_text('{"batch_size": 8}')
with pathlib.Path(__file__).with_name("calls").open("a") as calls:
    print(flags["--kind"], seed, file=calls)
if flags["--kind"] == "broken":
    sys.exit("error: no such luck")
rewards = [0.4 + 0.02 * step for step in range(int(flags["--steps"]))]
records = [
    {"step": i, "reward/mean": r, "value/explained_variance": r, "optim/updates": 3}
    for i, r in enumerate(rewards)
]
(folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in records))
ends = [{"step": 0, "eval/reward": 0.4}, {"step": 30, "eval/reward": 0.74 + 0.02 * seed}]
(folder / "eval.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in ends))
"""


@pytest.fixture
def methods(tmp_path, monkeypatch):
    import compare

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = {kind: (str(script), "--kind", kind) for kind in ("one", "two", "broken")}
    monkeypatch.setattr(compare, "METHODS", found)
    return lambda: (tmp_path / "calls").read_text().split("\n")[:-1]


def test_what_is_done_is_not_run_again(methods, tmp_path, capsys):
    import compare

    folder = tmp_path / "runs"
    flags = compare.Flags(methods=("one",), seeds=1, steps=30, folder=str(folder))
    assert compare.compare(flags) == 0 and methods() == ["one 0"]
    broken_off = folder / "one-1"
    broken_off.mkdir()
    (broken_off / "config.json").write_text("{}")
    (broken_off / "metrics.jsonl").write_text("half of it")
    both = compare.Flags(methods=("one", "two"), seeds=2, steps=30, folder=str(folder))
    assert compare.compare(both) == 0
    assert methods() == ["one 0", "two 0", "one 1", "two 1"]
    assert (folder / "curves.png").stat().st_size > 0
    result = json.loads((folder / "results.json").read_text())
    assert result["threshold"] == 0.75 and set(result["methods"]) == {"one", "two"}
    one = result["methods"]["one"][1]
    assert one["start"] == 0.4 and one["end"] == 0.76 and one["updates"] == 90
    assert one["cpu_seconds"] > 0.0 and len(one["curve"]) == 30
    # Steps 14 to 23 average .4 + .02 · 18.5 = .77, the ten before them .75.
    assert one["crossed"] == 23
    np.testing.assert_allclose(one["explained_variance"], 0.4 + 0.02 * 24.5)  # of ten steps
    shown = capsys.readouterr().out
    assert "| one | 0.400 ± 0.000 | 0.750 ± 0.014 | 30 | 90 | 240 |" in shown
    assert "| 1 of 2 | 23, 23 | 0.89 ± 0.00 |" in shown
    with pytest.raises(ValueError, match="of other settings"):
        compare.compare(compare.Flags(methods=("one",), seeds=1, steps=9, folder=str(folder)))


def test_a_run_that_fails_says_which_and_why(methods, tmp_path):
    import compare

    flags = compare.Flags(methods=("broken",), seeds=1, folder=str(tmp_path / "runs"))
    with pytest.raises(ValueError, match="broken, seed 0, ended with 1: error: no such luck"):
        compare.compare(flags)
    with pytest.raises(ValueError, match="--methods best: there are one, two, broken"):
        compare.compare(compare.Flags(methods=("best",)))


def test_every_method_is_a_call_that_its_script_takes():
    """The flags parse, and their values pass the script's own check."""
    import importlib
    import pathlib

    import common
    import compare
    import tasks
    import tyro
    from common.config import fill

    defaults = tasks.build("sort").defaults
    for method in compare.METHODS:
        call = compare.command(compare.Flags(), method, 1, pathlib.Path("somewhere"))
        script = pathlib.Path(call[1]).stem
        kind = getattr(importlib.import_module(script), "Config", common.Config)
        filled = fill(tyro.cli(kind, args=call[2:]), defaults)
        assert (filled.seed, filled.steps, filled.run_dir) == (1, 150, "somewhere"), method


def test_a_curve_crosses_where_a_whole_window_is_above():
    import compare

    assert compare.crossed([1.0] * 9) is None
    assert compare.crossed([1.0] * 10) == 10
    assert compare.crossed([0.0] * 10 + [1.0] * 8) == 18
    np.testing.assert_allclose(compare.smooth([1.0, 0.0, 2.0]), [1.0, 0.5, 1.0])

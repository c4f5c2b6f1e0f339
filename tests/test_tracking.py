"""Records: one a step, a step late, and no step twice after a resume."""

from __future__ import annotations

import gc
import json
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl

tracking = rl.tracking


class Memory:
    """A backend that keeps what it is given."""

    def __init__(self):
        self.records, self.shown, self.closed = [], [], False

    def write(self, step, record):
        self.records.append((step, dict(record)))

    def samples(self, step, rows):
        self.shown.append((step, len(rows)))

    def close(self):
        self.closed = True


def steps(path):
    return [record["step"] for record in tracking.read_jsonl(path)]


def test_all_backends_get_the_same_names_and_numbers(tmp_path):
    memory = Memory()
    with tracking.Tracker(tmp_path, backends=[memory]) as tracker:
        for step in range(3):
            metrics = {
                "reward/mean": jnp.float32(step / 4),
                "completion/truncated": np.float64(0.5),
                "off_policy/dropped": jnp.int32(step),
                "policy/clip_low": rl.metrics.mean(jnp.array([1.0, 2.0])),
                "optim/lr": 1e-4,
            }
            tracker.log(step, metrics)
    assert memory.closed
    lines = list(tracking.read_jsonl(tmp_path / "metrics.jsonl"))
    for (step, record), line in zip(memory.records, lines, strict=True):
        assert line.pop("step") == step
        assert line.pop("wall_time") > 1e9
        assert line == record
    assert memory.records[2][1] == {
        "reward/mean": 0.5,
        "completion/truncated": 0.5,
        "off_policy/dropped": 2,
        "policy/clip_low": 1.5,
        "optim/lr": 1e-4,
    }
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_values_are_read_one_step_late(tmp_path):
    read = []

    class Slow:
        """A device scalar that notes when it is read."""

        shape = ()

        def __init__(self, step):
            self.step = step
            self.copying = False

        def copy_to_host_async(self):
            self.copying = True

        def item(self):
            assert self.copying
            read.append(self.step)
            return float(self.step)

    memory = Memory()
    tracker = tracking.Tracker(tmp_path, backends=[memory], tensorboard=False)
    tracker.log(0, {"x": Slow(0)})
    assert read == [] and memory.records == []
    tracker.log(1, {"x": Slow(1)})
    assert read == [0] and [step for step, _ in memory.records] == [0]
    tracker.close()
    assert read == [0, 1] and steps(tmp_path / "metrics.jsonl") == [0, 1]


@pytest.mark.fault(53)
def test_resume_repeats_no_step(tmp_path):
    with tracking.Tracker(tmp_path, tensorboard=False) as tracker:
        tracker.evaluation(0, {"reward/mean": 0.1})
        for step in range(6):
            tracker.log(step, {"x": step})
            tracker.samples(step, [{"prompt": "a", "completion": "b"}])
        tracker.evaluation(6, {"reward/mean": 0.9})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "x"')  # the crash
    memory = Memory()
    with tracking.Tracker(tmp_path, backends=[memory], resume_step=4, tensorboard=False) as tracker:
        with pytest.raises(ValueError, match="step 3 after step 3"):
            tracker.log(3, {"x": 0})
        for step in range(4, 8):
            tracker.log(step, {"x": 10 * step})
        tracker.evaluation(8, {"reward/mean": 1.0})
    records = list(tracking.read_jsonl(tmp_path / "metrics.jsonl"))
    assert [r["x"] for r in records] == [0, 1, 2, 3, 40, 50, 60, 70]
    assert steps(tmp_path / "metrics.jsonl") == list(range(8))
    assert steps(tmp_path / "samples.jsonl") == [0, 1, 2, 3]
    assert steps(tmp_path / "eval.jsonl") == [0, 8]
    assert [step for step, _ in memory.records] == [4, 5, 6, 7, 8]


def test_evaluation_at_the_resumed_version_is_kept_or_replaced(tmp_path):
    with tracking.Tracker(tmp_path, tensorboard=False) as tracker:
        tracker.evaluation(3, {"r": 0.5})
        tracker.evaluation(4, {"r": 0.6})
    with tracking.Tracker(tmp_path, resume_step=3, tensorboard=False):
        pass
    assert steps(tmp_path / "eval.jsonl") == [3]
    with tracking.Tracker(tmp_path, resume_step=3, tensorboard=False) as tracker:
        tracker.evaluation(3, {"r": 0.7})
    got = list(tracking.read_jsonl(tmp_path / "eval.jsonl"))
    assert got == [{"step": 3, "eval/r": 0.7}]


@pytest.mark.fault(56)
def test_evaluation_carries_its_version_and_comes_after_the_step_before(tmp_path):
    memory = Memory()
    with tracking.Tracker(tmp_path, backends=[memory], tensorboard=False) as tracker:
        tracker.log(0, {"x": 1.0})
        tracker.evaluation(1, {"eval/y": jnp.float32(2.0)})
        tracker.log(1, {"x": 3.0})
    assert memory.records == [(0, {"x": 1.0}), (1, {"eval/y": 2.0}), (1, {"x": 3.0})]


def test_a_new_run_refuses_the_folder_of_another(tmp_path):
    with tracking.Tracker(tmp_path, tensorboard=False) as tracker:
        tracker.log(0, {"x": 1.0})
    with pytest.raises(FileExistsError, match=r"already has metrics\.jsonl.*resume"):
        tracking.Tracker(tmp_path, tensorboard=False)


@pytest.mark.parametrize("value", [jnp.zeros(2), np.zeros((1, 1)), "text", None, [1.0]])
def test_only_scalars_are_metrics(tmp_path, value):
    with (
        tracking.Tracker(tmp_path, tensorboard=False) as tracker,
        pytest.raises(ValueError, match=r"metric 'policy/x' .*one number a name"),
    ):
        tracker.log(0, {"policy/x": value})


def test_what_is_not_finite_is_null_in_json(tmp_path):
    lines = tracking.JsonLines(tmp_path / "deep" / "m.jsonl")
    lines.write(0, {"a": math.nan, "b": math.inf, "c": 1.0})
    lines.close()
    text = lines.path.read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 0, "a": None, "b": None, "c": 1}


def test_lines_are_there_before_the_file_is_closed(tmp_path):
    lines = tracking.JsonLines(tmp_path / "m.jsonl")
    lines.write(0, {"text": "Ünï\n\ud800"})  # a line stays a line, whatever the sampler wrote
    assert steps(lines.path) == [0]
    assert lines.path.read_bytes().count(b"\n") == 1
    lines.close()


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\noops\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2: not a JSON object"):
        list(tracking.read_jsonl(path))


def test_rewind_keeps_the_old_file_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    before = '{"step": 0}\n{"step": 1}\n'
    path.write_text(before)
    assert tracking.rewind(tmp_path / "missing.jsonl", 0) == 0

    def crash(_):
        raise OSError("disk full")

    monkeypatch.setattr(tracking.os, "fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        tracking.rewind(path, 1)
    assert path.read_text() == before


def test_samples_are_kept_and_shown(tmp_path):
    memory = Memory()
    with tracking.Tracker(tmp_path, backends=[memory], tensorboard=False) as tracker:
        rows = [{"prompt": "a", "completion": "b", "reward": jnp.float32(0.5)}] * 3
        tracker.samples(7, rows)
    assert memory.shown == [(7, 3)]
    kept = list(tracking.read_jsonl(tmp_path / "samples.jsonl"))
    assert kept == [{"step": 7, "prompt": "a", "completion": "b", "reward": 0.5}] * 3


@pytest.mark.fault(55)
def test_a_long_run_keeps_no_arrays(tmp_path):
    tracker = tracking.Tracker(tmp_path, tensorboard=False)
    double = jax.jit(lambda x: 2 * x)

    def run(first, count):
        for step in range(first, first + count):
            tracker.log(step, {"x": double(jnp.float32(step))})
        gc.collect()
        return len(jax.live_arrays())

    assert run(0, 50) == run(50, 200)
    tracker.close()


def test_tensorboard_is_read_back(tmp_path):
    writer = tracking.TensorBoard(tmp_path)
    writer.write(3, {"reward/mean": 0.25})
    writer.close()
    (file,) = tmp_path.glob("events*")
    assert b"reward/mean" in file.read_bytes()


def test_missing_packages_are_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="needs the package tensorboardX"):
        tracking.TensorBoard(tmp_path)
    with pytest.raises(ImportError, match="needs the package wandb"):
        tracking.WandB(tmp_path)


def test_wandb_gets_records_and_resumes_under_one_name(monkeypatch, tmp_path):
    calls = []
    run = types.SimpleNamespace(
        log=lambda record, step: calls.append((step, record)), finish=lambda: calls.append("end")
    )
    fake = types.ModuleType("wandb")
    fake.__dict__["init"] = lambda **options: calls.append(options) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    backend = tracking.WandB(tmp_path / "run1", config={"seed": 0})
    backend.write(0, {"reward/mean": 1.0})
    backend.close()
    options, *rest = calls
    assert options["id"] == options["name"] == "run1" and options["resume"] == "allow"
    assert options["config"] == {"seed": 0}
    assert rest == [(0, {"reward/mean": 1.0}), "end"]


def test_to_number_keeps_integers():
    assert isinstance(tracking.to_number("x", jnp.int32(3)), int)
    assert isinstance(tracking.to_number("x", True), int)
    assert isinstance(tracking.to_number("x", np.float32(3)), float)


def test_a_backend_that_fails_leaves_no_other_one_open(tmp_path):
    class Full:
        def write(self, step, record):
            raise OSError(28, "No space left on device")

        def close(self):
            raise OSError(28, "No space left on device")

    class Last:
        closed = False

        def write(self, step, record):
            pass

        def close(self):
            self.closed = True

    last = Last()
    tracker = rl.tracking.Tracker(tmp_path, backends=[last, Full(), last], tensorboard=False)
    tracker.log(0, {"a": 1.0})
    with pytest.raises(OSError, match="No space left"):
        tracker.close()
    assert last.closed and tracker._metrics._file.closed

"""The main experiment end to end on the small model: bad input, interrupts, resume, layouts."""

import functools
import json
import shutil
import sys

import numpy as np
import pytest

import rlhf_jax as rl
from tests.experiments import scripts
from tests.experiments.scripts import GRADED, SMALL, records, same

run = functools.partial(scripts.run, "grpo")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Four steps with a reference, not interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    code = run(*SMALL, "--steps", 4, "--kl-coef", 0.05, "--run-dir", folder, "--save-every", 2)
    assert code == 0
    return folder


def test_a_run_leaves_everything_behind(plain, capsys):
    for name in ("config.json", "metrics.jsonl", "eval.jsonl", "samples.jsonl", "curves.png"):
        assert (plain / name).stat().st_size > 0, name
    assert any((plain / "tensorboard").iterdir())
    assert (plain / "model" / "model.safetensors").exists()
    steps = records(plain)
    assert [r["step"] for r in steps] == [0, 1, 2, 3]
    assert [r["step"] for r in records(plain, "eval")] == [0, 4]
    expected = {"reward/mean", "reward/std", "policy/entropy", "policy/kl_ref_sum", "policy/loss"}
    expected |= {"completion/length_mean", "optim/grad_norm", "optim/lr", "time/step"}
    expected |= {"off_policy/logprob_diff_max", "policy/ratio_max", "policy/clip_high"}
    assert expected <= set(steps[0])


@pytest.mark.fault(32)
@pytest.mark.fault(38)
def test_before_the_first_update_the_kl_is_zero_and_the_ratio_one(plain):
    first = records(plain)[0]
    assert first["policy/kl_ref_sum"] == 0.0
    assert first["policy/kl_ref_k1"] == 0.0
    assert first["policy/kl_ref_k3"] == 0.0
    assert abs(first["policy/ratio_max"] - 1) < 1e-5 and abs(first["policy/ratio_min"] - 1) < 1e-5
    assert np.expm1(first["off_policy/logprob_diff_max"]) < 1e-4
    assert records(plain)[3]["policy/kl_ref_k3"] > 0.0


@pytest.mark.fault(53)
@pytest.mark.parametrize("signal", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_an_interrupted_run_resumes_with_the_next_step(
    plain, tmp_path, capsys, signal, monkeypatch
):
    # The start's evaluation takes 32 calls (256 held-out prompts, 8 at a time); 34 is step 2 of 4.
    monkeypatch.setenv("RLHF_TEST_AT", "34")
    monkeypatch.setenv("RLHF_TEST_SIGNAL", signal)
    folder = tmp_path / "run"
    flags = [*SMALL, "--steps", 4, "--kl-coef", 0.05, "--run-dir", folder, "--save-every", 100]
    assert run(*flags, "--reward", f"{GRADED}:interrupted") == 130
    said = capsys.readouterr().out
    assert "stopped after step 2 of 4" in said
    assert f"--resume {folder}" in said
    assert [r["step"] for r in records(folder)] == [0, 1]
    assert run("--resume", folder) == 0
    ours = [{k: v for k, v in r.items() if "reward/" not in k} for r in records(folder)]
    same(ours, records(plain))


@pytest.mark.fault(62)
def test_a_run_killed_in_its_first_save_starts_over(plain, tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints" / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "steps": 2}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "reward/mean": 9.0}) + "\n")
    assert run("--resume", folder) == 0
    same(records(folder), records(plain)[:2])


@pytest.mark.fault(62)
def test_a_damaged_checkpoint_is_made_again(plain, tmp_path):
    shutil.copytree(plain, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "4")
    (checkpoints / "9").mkdir()
    assert run("--resume", tmp_path / "run") == 0
    assert {path.name for path in checkpoints.iterdir()} == {"2", "4", "unusable-9"}
    same(records(tmp_path / "run"), records(plain))


@pytest.mark.fault(53)
def test_what_a_checkpoint_has_seen_is_in_the_records(tmp_path, monkeypatch):
    """A run killed right after a save resumes behind it: no record may still be held back."""
    from common import saving

    class Checkpoints:
        def save(self, step, *_):
            seen = records(tmp_path)
            assert [r["step"] for r in seen] == list(range(step))
            saved.append(step)

    saved: list[int] = []
    run_ = type("Run", (), {"frozen_digest": "", "prompts_digest": None})
    with rl.tracking.Tracker(tmp_path, tensorboard=False) as tracker:
        for step in range(3):
            tracker.log(step, {"reward/mean": 0.0})
            saving.save(run_, Checkpoints(), tracker, {}, None, step + 1)
    assert saved == [1, 2, 3]


@pytest.mark.fault(53)
def test_other_prompts_or_fewer_steps_cannot_be_resumed(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"{i}>", "answer": str(i)}) for i in range(12)]
    prompts.write_text("\n".join(lines))
    folder = tmp_path / "run"
    flags = [*SMALL, "--prompts", prompts, "--steps", 1, "--run-dir", folder]
    assert run(*flags) == 0
    assert run("--resume", folder, "--steps", 2, "--learning-rate", 1e-5) == 2
    assert "drop --learning-rate" in capsys.readouterr().err
    prompts.write_text("\n".join(lines[1:]))
    assert run("--resume", folder, "--steps", 2) == 2
    assert "not those that the run began with" in capsys.readouterr().err
    (folder / "checkpoints" / "7" / "state").mkdir(parents=True)
    assert run("--resume", folder, "--steps", 3) == 2
    assert "--steps 3: the run in" in capsys.readouterr().err
    (folder / "config.json").write_text('{"task": ')
    assert run("--resume", folder) == 2
    assert "config.json is damaged" in capsys.readouterr().err


def test_the_last_layers_of_a_model_from_scratch(tmp_path):
    flags = [*SMALL, "--kl-coef", 0.05, "--trainable-layers", 1, "--run-dir", tmp_path / "run"]
    assert run(*flags, "--steps", 1) == 0
    assert run("--resume", tmp_path / "run") == 0  # the warm-up made the same frozen layers again


def test_a_run_whose_updates_are_all_dropped_ends(tmp_path):
    from common import display

    watch = display.Watch(patience=2)
    for step, dropped in enumerate([1, 0, 1]):
        watch.write(step, {"optim/skipped": dropped})
        watch.write(step, {"eval/reward": 0.0})
    with pytest.raises(ValueError, match="up to step 4, were dropped"):
        watch.write(3, {"optim/skipped": 1})


def test_ctrl_c_outside_the_loop_is_no_traceback(capsys):
    import common

    def interrupted(_):
        raise KeyboardInterrupt  # what SIGINT does; test workers ignore the signal itself

    before, sys.argv = sys.argv, ["experiments/grpo.py"]
    try:
        with pytest.raises(SystemExit) as stopped:
            common.main(interrupted)
    finally:
        sys.argv = before
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "stopped\n"


def test_a_model_that_cannot_be_written_says_that_nothing_is_lost(tmp_path, monkeypatch):
    from common import saving
    from safetensors import SafetensorError

    def full(*_):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(rl.models, "save", full)
    run_ = type("Run", (), dict(folder=tmp_path, model=None, tokenizer=None, frozen=None))
    with pytest.raises(OSError, match="nothing is lost: make room, then --resume"):
        saving.export(run_, {})


@pytest.mark.fault(23)
@pytest.mark.fault(57)
@pytest.mark.parametrize("layout", ["fsdp", pytest.param("dp", marks=pytest.mark.slow)])
def test_the_same_run_on_eight_devices(plain, tmp_path, layout):
    flags = [*SMALL, "--kl-coef", 0.05, "--steps", 3, "--layout", layout]
    assert run(*flags, "--run-dir", tmp_path / "run") == 0
    same(records(plain)[:3], records(tmp_path / "run"), atol=1e-4)


def test_micro_batches_and_kl_in_the_loss(plain, tmp_path):
    flags = [*SMALL, "--kl-coef", 0.05, "--steps", 2, "--kl-place", "loss"]
    assert run(*flags, "--run-dir", tmp_path / "one") == 0
    assert run(*flags, "--run-dir", tmp_path / "four", "--micro-batches", 4) == 0
    same(records(tmp_path / "one"), records(tmp_path / "four"), atol=1e-4)


@pytest.mark.fault(18)
def test_without_kl_no_reference_and_without_a_judgement_no_update_and_no_nan(tmp_path, capsys):
    (tmp_path / "rewards.py").write_text("def silent(prompts, _): return [None] * len(prompts)")
    flags = [*SMALL, "--steps", 1, "--kl-coef", 0, "--run-dir", tmp_path / "run"]
    assert run(*flags, "--reward", f"{tmp_path}/rewards.py:silent") == 0
    only = records(tmp_path / "run")[0]
    assert not any(name.startswith("policy/kl_ref") for name in only)
    assert only["optim/grad_norm"] == 0.0 and only["optim/update_norm"] == 0.0
    assert "eval/reward" not in records(tmp_path / "run", "eval")[0]
    assert "nan" not in capsys.readouterr().out


def test_the_exported_model_samples(plain, capsys):
    import common
    import sample

    before = sys.argv
    sys.argv = ["sample.py", str(plain), "314159>", "--number", "2"]
    try:
        with pytest.raises(SystemExit) as stopped:
            common.main(sample.main, sample.Flags)
    finally:
        sys.argv = before
    assert stopped.value.code == 0
    assert capsys.readouterr().out.count("314159>") == 2


BAD = {
    "unknown task": (["--task", "chess"], "chess"),
    "model folder missing": (["--model", "no/such/folder"], "no/such/folder"),
    "unknown architecture": (["--model", "{mamba}"], "architecture"),
    "empty prompts": (["--prompts", "{empty}"], "empty.txt"),
    "prompts file missing": (["--prompts", "nowhere.txt"], "nowhere.txt"),
    "reward of wrong length": ([*SMALL, "--reward", "{rewards}:short"], "short"),
    "reward raises": ([*SMALL, "--reward", "{rewards}:broken"], "broken"),
    "reward is NaN": ([*SMALL, "--reward", "{rewards}:nan"], "nan"),
    "reward function missing": ([*SMALL, "--reward", "{rewards}:absent"], "absent"),
    "layout does not divide rows": (
        ["--task", "sort", "--layout", "fsdp", "--batch-size", "12", "--group-size", "4"],
        "fsdp = 8",
    ),
    "layout does not divide a tensor": ([*SMALL, "--layout", "tensor"], "'vocab' has size 14"),
    "unknown layout": ([*SMALL, "--layout", "zero3"], "fsdp"),
    "batch is no multiple of the group": (
        ["--batch-size", "10", "--group-size", "4"],
        "--batch-size",
    ),
    "group of one": (["--group-size", "1"], "--group-size 1"),
    "micro-batches": ([*SMALL, "--micro-batches", "5"], "--micro-batches 5"),
    "micro-batches over devices": (
        [*SMALL, "--layout", "fsdp", "--micro-batches", "8"],
        "4 rows a micro-batch",
    ),
    "negative KL": ([*SMALL, "--kl-coef", "-1"], "--kl-coef"),
    "KL of NaN": ([*SMALL, "--kl-coef", "nan"], "--kl-coef nan"),
    "infinite learning rate": ([*SMALL, "--learning-rate", "inf"], "must be finite"),
    "temperature of zero": ([*SMALL, "--temperature", "0"], "--temperature 0.0"),
    "top-p above one": ([*SMALL, "--top-p", "2"], "--top-p 2.0: it must be at most 1"),
    "top-k beyond int32": ([*SMALL, "--top-k", "1000000000000"], "--top-k"),
    "seed beyond 64 bits": ([*SMALL, "--seed", "99999999999999999999"], "seed"),
    "too few prompts": ([*SMALL, "--prompts", "{three}"], "use at most 12"),
    "over the model's positions": ([*SMALL, "--max-new-tokens", "99"], "32 positions"),
    "too many trainable layers": ([*SMALL, "--trainable-layers", "9"], "has 2 layers"),
    "no run to resume": (["--resume", "{nothing}"], "config.json"),
    "folder taken": ([*SMALL, "--run-dir", "{taken}"], "--resume"),
}


@pytest.mark.fault(22)
@pytest.mark.fault(54)
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line_and_exit_code_2(name, tmp_path, capsys, plain):
    flags, says = BAD[name]
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "rewards.py").write_text(
        "def short(prompts, completions): return [1.0]\n"
        "def broken(prompts, completions): raise KeyError('boom')\n"
        "def nan(prompts, completions): return [float('nan')] * len(prompts)\n"
    )
    (tmp_path / "three.txt").write_text("1>\n2>\n3>\n")
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text(
        json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    places = {
        "mamba": tmp_path / "mamba",
        "empty": tmp_path / "empty.txt",
        "three": tmp_path / "three.txt",
        "rewards": tmp_path / "rewards.py",
        "nothing": tmp_path / "nothing",
        "taken": plain,
    }
    flags = [flag.format(**places) for flag in flags]
    if "--run-dir" not in flags and "--resume" not in flags:
        flags += ["--run-dir", str(tmp_path / "run")]
    assert run(*flags) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("error: ") and says in error[-1]
    assert "Traceback" not in "\n".join(error)

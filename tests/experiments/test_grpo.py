"""The main experiment end to end on the small model: bad input, interrupts, resume, layouts."""

import json
import pathlib
import sys

import numpy as np
import pytest

EXPERIMENTS = pathlib.Path(__file__).parents[2] / "experiments"
GRADED = str(pathlib.Path(__file__).with_name("graded.py"))
SMALL = ["--task", "sort", "--batch-size", "32", "--group-size", "4", "--warmup-steps", "3"]
SMALL += ["--reward", f"{GRADED}:positions"]


@pytest.fixture(scope="module", autouse=True)
def _path():
    sys.path.insert(0, str(EXPERIMENTS))
    yield
    sys.path.remove(str(EXPERIMENTS))


def run(*flags):
    """Call the script as a shell would; returns its exit code."""
    import common
    import grpo

    before = sys.argv
    sys.argv = ["experiments/grpo.py", *map(str, flags)]
    try:
        with pytest.raises(SystemExit) as stopped:
            common.main(grpo.train)
    finally:
        sys.argv = before
    return stopped.value.code


def records(folder, name="metrics"):
    lines = (pathlib.Path(folder) / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def same(first, second, atol=0.0):
    """Compare two runs' records, times left out."""
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        names = {n for n in a if not n.startswith(("time/", "throughput/", "wall"))}
        assert names <= set(b)
        for name in names:
            np.testing.assert_allclose(a[name], b[name], atol=atol, rtol=atol, err_msg=name)


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
@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
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


def test_a_run_killed_before_its_first_checkpoint_starts_over(plain, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "steps": 2}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "reward/mean": 9.0}) + "\n")
    assert run("--resume", folder) == 0
    same(records(folder), records(plain)[:2])


@pytest.mark.fault(23)
@pytest.mark.fault(57)
@pytest.mark.parametrize("layout", ["fsdp", "dp"])
def test_the_same_run_on_eight_devices(plain, tmp_path, layout):
    flags = [*SMALL, "--kl-coef", 0.05, "--steps", 3, "--layout", layout]
    assert run(*flags, "--run-dir", tmp_path / "run") == 0
    same(records(plain)[:3], records(tmp_path / "run"), atol=1e-4)


def test_micro_batches_and_kl_in_the_loss(plain, tmp_path):
    flags = [*SMALL, "--kl-coef", 0.05, "--steps", 2, "--kl-place", "loss"]
    assert run(*flags, "--run-dir", tmp_path / "one") == 0
    assert run(*flags, "--run-dir", tmp_path / "four", "--micro-batches", 4) == 0
    same(records(tmp_path / "one"), records(tmp_path / "four"), atol=1e-4)


def test_without_kl_there_is_no_reference(tmp_path):
    assert run(*SMALL, "--steps", 1, "--kl-coef", 0, "--run-dir", tmp_path / "run") == 0
    assert not any(name.startswith("policy/kl_ref") for name in records(tmp_path / "run")[0])


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
    "negative KL": ([*SMALL, "--kl-coef", "-1"], "--kl-coef"),
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
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text(
        json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    places = {
        "mamba": tmp_path / "mamba",
        "empty": tmp_path / "empty.txt",
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

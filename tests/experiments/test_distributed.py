"""Experiments as two processes of four devices, against one process of eight."""

import functools
import json
import shutil
import signal
import time

import pytest

from tests.experiments import pods, scripts
from tests.experiments.scripts import records, same

# The test's own process 1 (or 0) does what RLHF_TEST_DO says when its reward is called for the
# RLHF_TEST_AT-th time: one call evaluates the start, then each step makes one.
REWARDS = f"""
import os, signal, sys, time
import jax

sys.path.insert(0, {str(pods.ROOT)!r})
from tests.experiments.graded import positions

calls = 0

def graded(prompts, completions, answer):
    global calls
    calls += 1
    me = jax.process_index() == int(os.environ.get("RLHF_TEST_WHO", 9))
    if me and calls == int(os.environ["RLHF_TEST_AT"]):
        what = os.environ["RLHF_TEST_DO"]
        if what == "raise":
            raise KeyError("no such answer")
        if what == "exit":
            sys.exit("no such answer")
        os.kill(os.getpid(), getattr(signal, what))
    return positions(prompts, completions, answer)
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """A run with few held-out prompts, a reference and a checkpoint each step."""
    folder = tmp_path_factory.mktemp("task")
    numbers = [f"{(i * 7919 + 13) % 10**6:06d}" for i in range(40)]
    rows = [json.dumps({"prompt": f"{n}>", "answer": "".join(sorted(n))}) for n in numbers]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    (folder / "rewards.py").write_text(REWARDS)
    return [
        *("--task", "sort", "--batch-size", 32, "--group-size", 4, "--warmup-steps", 3),
        *("--prompts", folder / "prompts.jsonl", "--reward", f"{folder}/rewards.py:graded"),
        *("--kl-coef", 0.05, "--save-every", 1, "--layout", "fsdp"),
    ]


@pytest.fixture(scope="module")
def one(flags, tmp_path_factory):
    """Three steps by one process of eight devices."""
    folder = tmp_path_factory.mktemp("one") / "run"
    assert scripts.run("grpo", *flags, "--steps", 3, "--run-dir", folder) == 0
    return folder


@pytest.fixture(scope="module")
def two(flags, tmp_path_factory):
    """Two steps by two processes of four."""
    folder = tmp_path_factory.mktemp("two") / "run"
    command = ["experiments/grpo.py", *flags, "--steps", 2, "--run-dir", folder]
    found = pods.ends(pods.pair(*command))
    assert [code for code, *_ in found] == [0, 0], found
    return folder, found


near = functools.partial(same, atol=1e-5)


@pytest.mark.slow
@pytest.mark.fault(57)
def test_two_processes_give_the_figures_and_tokens_of_one(one, two):
    folder, found = two
    near(records(folder), records(one)[:2])
    near(records(folder, "eval")[:1], records(one, "eval")[:1])
    tokens = [(r["step"], r["prompt"], r["completion"]) for r in records(folder, "samples")]
    assert (
        tokens[:2]
        == [(r["step"], r["prompt"], r["completion"]) for r in records(one, "samples")][:2]
    )
    (_, first, _), (_, second, error) = found
    assert "step 2/2" in first and "held-out prompts" in first
    said = [line for line in second.splitlines() if not line.startswith("[Gloo]")]
    assert said == [] and error == ""  # process 0 alone speaks
    for name in ("curves.png", "model/model.safetensors", "tensorboard"):
        assert (folder / name).exists(), name
    mine, theirs = (json.loads((f / "config.json").read_text()) for f in (folder, one))
    assert set(mine) == set(theirs) and "coordinator" not in mine


@pytest.mark.slow
@pytest.mark.fault(53, 57)
def test_a_checkpoint_of_two_processes_is_gone_on_with_by_one_and_the_reverse(
    flags, one, two, tmp_path
):
    shutil.copytree(two[0], tmp_path / "to-one")
    assert scripts.run("grpo", "--resume", tmp_path / "to-one", "--steps", 3) == 0
    near(records(tmp_path / "to-one"), records(one))
    shutil.copytree(one, tmp_path / "to-two")
    shutil.rmtree(tmp_path / "to-two" / "checkpoints" / "3")
    command = ["experiments/grpo.py", "--resume", tmp_path / "to-two"]
    found = pods.ends(pods.pair(*command))
    assert [code for code, *_ in found] == [0, 0], found
    near(records(tmp_path / "to-two"), records(one))
    near(records(tmp_path / "to-two", "eval"), records(one, "eval"))


def killed(flags, folder, *, who, at, what, timeout=10):
    """A run in which something happens to one process; its ends, and how long the other took."""
    command = ["experiments/grpo.py", *flags, "--steps", 9, "--run-dir", folder]
    variables = dict(RLHF_TEST_WHO=who, RLHF_TEST_AT=at, RLHF_TEST_DO=what)
    processes = pods.pair(*command, "--heartbeat-timeout", timeout, **variables)
    try:
        processes[who].wait(300)
        begin = time.monotonic()
        processes[1 - who].wait(60)
        return pods.ends(processes), time.monotonic() - begin
    finally:
        pods.ends(processes, timeout=60)


@pytest.mark.slow
@pytest.mark.fault(57)
@pytest.mark.parametrize("who", [0, 1])
def test_when_one_process_is_killed_the_other_says_so_and_ends(who, flags, one, tmp_path):
    found, seconds = killed(flags, tmp_path / "run", who=who, at=4, what="SIGKILL")
    assert found[who][0] == -signal.SIGKILL
    code, _, error = found[1 - who]
    assert code == (75 if who else -signal.SIGABRT) and seconds < 60  # JAX aborts without process 0
    lines = pods.errors(error)
    assert len(lines) == 1, error
    assert f"process {who}" in lines[0] and f"--resume {tmp_path / 'run'}" in lines[0]
    assert scripts.run("grpo", "--resume", tmp_path / "run", "--steps", 3) == 0
    near(records(tmp_path / "run"), records(one))


@pytest.mark.slow
@pytest.mark.fault(22)
@pytest.mark.parametrize("what", ["raise", "exit"])
def test_a_reward_that_fails_on_one_host_is_named_and_ends_all(what, flags, tmp_path):
    found, seconds = killed(flags, tmp_path / "run", who=1, at=3, what=what)
    assert [code for code, *_ in found] == [2, 2] and seconds < 30
    for _, _, error in found:
        (line,) = pods.errors(error)
        assert "process 1 of 2" in line and "no such answer" in line
        assert ("graded" if what == "raise" else "SystemExit") in line
        assert "Traceback" not in error


@pytest.mark.slow
@pytest.mark.fault(53)
def test_sigterm_at_one_host_saves_and_stops_all(flags, one, tmp_path):
    found, _ = killed(flags, tmp_path / "run", who=1, at=3, what="SIGTERM")
    assert [code for code, *_ in found] == [130, 130], found
    assert "stopped after step 2 of 9" in found[0][1]
    assert "stopping after this step" in found[1][2]
    near(records(tmp_path / "run"), records(one)[:2])
    assert (tmp_path / "run" / "checkpoints" / "2").exists()


@pytest.mark.slow
@pytest.mark.fault(22)
def test_bad_input_ends_all_at_once_with_its_line(flags, tmp_path):
    command = ["experiments/grpo.py", *flags, "--layout", "single", "--run-dir", tmp_path]
    found = pods.ends(pods.pair(*command), timeout=120)
    assert [code for code, *_ in found] == [2, 2], found
    for _, _, error in found:
        assert "--layout single uses 1 of the 8 devices" in pods.errors(error)[0]

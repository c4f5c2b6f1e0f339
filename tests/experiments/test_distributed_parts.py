"""What two processes share (without a model), flags that join them, digests of spread arrays."""

import json
import shutil
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
import sharding
from rlhf_jax import _digests
from tests.experiments import pods, scripts, two_processes
from tests.experiments.scripts import SMALL


@pytest.mark.fault(57)
def test_two_processes_share_data_decisions_errors_and_checkpoints(tmp_path):
    two_processes.main(tmp_path)  # this one process has eight devices too
    found = pods.ends(pods.pair("tests/experiments/two_processes.py", tmp_path), timeout=120)
    assert [code for code, *_ in found] == [0, 0], found
    two_processes.main(tmp_path)
    one = json.loads((tmp_path / "said-1-0.json").read_text())
    two = [json.loads((tmp_path / f"said-2-{i}.json").read_text()) for i in range(2)]
    for index, said in enumerate(two):
        assert said["devices"] == 8
        assert [e["me"] for e in said["exchanged"]] == [0, 1]
        assert np.isnan(said["exchanged"][1]["nan"]) and said["exchanged"][1]["long"] == "ä" * 999
        assert said["first"] == "from 0" and said["together"] == [0, 10]
        assert said["any"] == [True, False]
        error = said["error of first"]
        assert index == 0 or error.startswith("process 0 of 2 (")
        assert error.endswith("invalid literal for int() with base 10: 'x'")
        assert said["error of together"].startswith("process 1 of 2 (")
        assert "by zero" in said["error of together"]
        for what, flag in (("same", "--prompts"), ("same width", "width of the prompts")):
            error = said[f"error of {what}"]
            assert error.startswith("process 1 of 2 (") and flag in error and "process 0" in error
        assert said["owners"] == [0] * 8 + [1] * 8
        assert said["whole"] == (np.arange(16, dtype=np.float32) * 3 / 7).tolist()
        assert said["mine"] and said["not mine"] == 0.0
        assert said["gathered"] == ([96, 1, 48, 5] if index == 0 else [0, 1, 0, 0])
        assert said["texts"] == [f"{row}ß" for row in range(16)]
        assert said["digest"] == one["digest"]
        assert said["restored"] == [1, 1, one["digest"]] and said["laid out"]
        assert said["half readable"] == [1, True]
    assert one["restored"] == [1, 2, one["digest"]] and one["laid out"]


def test_digests_do_not_depend_on_the_layout():
    mesh = sharding.make_mesh(sharding.get_layout("fsdp"))
    rng = np.random.default_rng(0)
    for dtype in (np.float32, jnp.bfloat16, np.int8, bool):
        for shape in ((), (0, 3), (8,), (16, 3), (2, 8, 24), (3, 70_000)):
            x = np.asarray(rng.normal(size=shape) * 50).astype(dtype)
            plain = _digests.of({"x": x})["x"]
            specs = [
                jax.P(),
                *(
                    jax.P(*[None] * axis, "fsdp")
                    for axis, n in enumerate(shape)
                    if n and n % 8 == 0
                ),
            ]
            for spec in specs:
                spread = jax.device_put(x, jax.NamedSharding(mesh, spec))
                assert _digests.of({"x": spread})["x"] == plain, (dtype, shape, spec)
    # By hand: element i counts bits · (the high half of i·2⁶⁴/φ, made odd).
    x = np.array([3, 5], np.uint32)
    expected = 3 * 1 + 5 * ((0x9E3779B97F4A7C15 >> 32) | 1)
    assert int(_digests.of({"x": x})["x"], 16) == expected


@pytest.mark.fault(62)
def test_every_flipped_bit_and_every_swap_changes_a_digest():
    x = np.random.default_rng(1).normal(size=(7, 5)).astype(np.float32)
    before = _digests.of({"x": x})["x"]
    for place in range(x.nbytes * 8):
        raw = bytearray(x.tobytes())
        raw[place // 8] ^= 1 << place % 8
        damaged = np.frombuffer(bytes(raw), np.float32).reshape(x.shape)
        assert _digests.of({"x": damaged})["x"] != before
    assert _digests.of({"x": x[:, ::-1]})["x"] != before
    assert _digests.of({"x": x[::-1]})["x"] != before


def test_a_step_that_has_other_digests_is_passed_over(tmp_path, monkeypatch):
    with rl.checkpoint.Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"a": {"x": jnp.full(3, step, jnp.float32)}})
            checkpoints.wait()
            monkeypatch.setattr(_digests, "of", lambda tree: dict.fromkeys(tree, "0" * 16))
        monkeypatch.undo()
        step, trees, _ = checkpoints.restore({"a": {"x": jnp.zeros(3)}})
    assert step == 1 and trees["a"]["x"].tolist() == [1, 1, 1]


def test_a_quiet_tracker_reads_everything_and_writes_nothing(tmp_path):
    class Seen:
        records: list = []  # noqa: RUF012

        def write(self, step, record):
            self.records.append((step, dict(record)))

        def close(self):
            pass

    with rl.tracking.Tracker(tmp_path / "run", backends=[Seen()], quiet=True) as tracker:
        tracker.log(0, {"reward/mean": jnp.float32(0.5)})
        for _ in range(2):
            tracker.evaluation(0, {"reward": 1.0})
        tracker.samples(0, [{"prompt": "a", "completion": "b", "reward": 1.0}])
        with pytest.raises(ValueError, match="metric 'x' has shape"):
            tracker.log(1, {"x": jnp.ones(2)})
    assert Seen.records == [(0, {"reward/mean": 0.5}), *[(0, {"eval/reward": 1.0})] * 2]
    assert not (tmp_path / "run").exists()


BAD = {
    "nobody numbers them": (["--distributed"], {}, "give --coordinator HOST:PORT"),
    "no port": (["--coordinator", "here"], {}, "--coordinator here: write HOST:PORT"),
    "port out of range": (["--coordinator", "here:99999"], {}, "write HOST:PORT"),
    "number too high": (
        ["--coordinator", "127.0.0.1:1", "--process-id", "2", "--processes", "2"],
        {},
        "--process-id 2: 2 processes are numbered 0 to 1",
    ),
    "no processes": (["--processes", "0"], {}, "--processes 0: it must be at least 1"),
    "heartbeat": (["--distributed", "--heartbeat-timeout", "1"], {}, "--heartbeat-timeout 1"),
    "variable": ([], {"JAX_PROCESS_ID": "two"}, "JAX_PROCESS_ID=two"),
    "only a number": (["--process-id", "1"], {}, "give --coordinator HOST:PORT"),
}


@pytest.mark.parametrize("name", BAD)
def test_flags_that_join_nobody_are_one_clear_line(name, tmp_path, capsys, monkeypatch):
    flags, variables, says = BAD[name]
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    # jax.distributed refuses to begin once a backend is there, as it is in a test.
    monkeypatch.setattr(jax._src.xla_bridge, "backends_are_initialized", lambda: False)
    assert scripts.run("grpo", *SMALL, *flags, "--run-dir", tmp_path / "run") == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("error: ") and says in error[-1], error
    assert not (tmp_path / "run").exists()


def test_a_run_of_one_process_joins_nobody_and_where_it_ran_is_not_its_config(tmp_path):
    import common
    from common import pod, setup

    config = common.Config(coordinator="127.0.0.1:1", process_id=0, processes=1)
    pod.join(config)
    assert pod.alone() and pod.signed("error: x") == "error: x"
    own = common.Config(run_dir=str(tmp_path), heartbeat_timeout=50)
    setup._write_config(tmp_path, own, "grpo")
    stored = json.loads((tmp_path / "config.json").read_text())
    assert not set(pod.FLAGS) & set(stored)
    again = common.Config(resume=str(tmp_path), distributed=True, processes=4)
    _, found, resumed = setup._opened(again, "grpo", "grpo")
    assert not resumed and found.heartbeat_timeout == 25 and found.processes is None


def test_last_words_are_said_unless_taken_back(tmp_path):
    program = (
        "import os, sys; from common import pod; words = pod._LastWords(); words.say('one');"
        "words.say('two'); words.take_back() if sys.argv[1] == 'y' else os.abort()"
    )
    assert shutil.which("sh")
    (back,), (gone,) = (pods.ends([pods.start("-c", program, answer)]) for answer in "yn")
    assert back[0] == 0 and back[2] == ""
    assert gone[0] == -6 and gone[2].splitlines()[-1] == "two"


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_last_words_outlive_a_signal_to_all_and_a_dead_listener_ends_no_run(signal):
    program = (
        "import os, signal, sys, time; from common import pod; words = pod._LastWords();"
        "words.say('one'); time.sleep(0.5);"
        f"words._process.send_signal(signal.SIG{signal}); time.sleep(0.5);"
        "words.say('two'); words.take_back() if sys.argv[1] == 'y' else os.abort()"
    )
    back, gone = pods.ends([pods.start("-c", program, answer) for answer in "yn"])
    assert back[0] == 0 and back[2] == ""
    assert gone[0] == -6 and ("two" in gone[2].splitlines()) == (signal != "KILL")


class Store:
    """The coordination service's keys and values."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite):
        self.values[key] = value

    def key_value_dir_get(self, prefix):
        return [(k, v) for k, v in self.values.items() if k.startswith(prefix)]


@pytest.fixture
def ended(monkeypatch):
    """The exit codes of this process, which goes on."""
    codes = []

    def note(code):
        codes.append(code)
        raise SystemExit

    monkeypatch.setattr("os._exit", note)
    return codes


@pytest.mark.fault(22)
@pytest.mark.parametrize("code", [1, 2, 130])
def test_a_process_ends_with_the_code_of_the_one_that_failed(code, ended, capsys):
    from common import pod

    store = Store()
    words = types.SimpleNamespace(take_back=lambda: None)
    with pytest.raises(SystemExit):
        pod._end(store, 1, 2, code, "process 1 of 2 (b) failed: no such answer")
    with pytest.raises(SystemExit):
        pod._Watch(store, 0, ("a", "b"), 5, words).run()
    assert ended == [code, code]
    said = "error: process 1 of 2 (b) failed: no such answer; this process ends too\n"
    assert capsys.readouterr().err == said
    assert store.values["rlhf_jax/end/0"] == store.values["rlhf_jax/end/1"]


@pytest.mark.fault(22)
@pytest.mark.parametrize("error", [SystemExit("no API key"), RuntimeError("no API key")])
def test_whatever_ends_a_run_the_others_are_told(error, monkeypatch, capsys):
    import common
    from common import pod

    def run(config):
        raise error

    def ctrl_c(error):
        raise KeyboardInterrupt

    told = []
    monkeypatch.setattr(sys, "argv", ["grpo.py"])
    monkeypatch.setattr(pod, "alone", lambda: False)
    monkeypatch.setattr(pod, "await_verdict", ctrl_c)
    monkeypatch.setattr(pod, "abandon", lambda *said: told.append(said))
    with pytest.raises(SystemExit) as end:
        common.main(run)
    assert end.value.code == 1
    assert told == [(1, f"{type(error).__name__}: no API key")]


def test_a_process_that_owns_no_row_asks_no_reward(monkeypatch):
    from common import hosts, passes

    def reward(prompts, completions):
        return np.stack([len(text) for text in completions])  # of nothing it raises

    run = types.SimpleNamespace(
        config=types.SimpleNamespace(group_size=1), task=types.SimpleNamespace(reward=reward)
    )
    prompts = types.SimpleNamespace(prompts=("a", "b"), columns=dict)
    said = []

    def together(judge):
        said.insert(0, judge())
        return said

    monkeypatch.setattr(hosts, "together", together)
    passes.score(run, prompts, ["x", "yy"])
    scores = passes.score(run, prompts, [None, None])
    assert len(said) == 2
    assert scores.rewards.tolist() == scores.by_function["reward"].tolist() == [1, 2]

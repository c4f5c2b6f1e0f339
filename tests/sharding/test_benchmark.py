"""The layout benchmark: what it reports, what it refuses, and that it sees layouts disagree."""

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import rlhf_jax as rl
import sharding
from sharding import benchmark
from sharding.benchmarking import programs, report

ROOT = Path(__file__).resolve().parents[2]
SIZES = programs.Sizes(rows=8, prompt=5, length=6, group_size=2)
FLAGS = ["--rows", "8", "--prompt", "5", "--length", "6", "--group-size", "2"]
CONFIG = rl.models.DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    initializer_range=0.2,
    tie_embeddings=False,
)
MODEL = rl.models.Decoder(CONFIG)


@pytest.fixture(scope="module", autouse=True)
def _quick_to_compile():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG.to_hf()), encoding="utf-8")
    return str(path)


def plain_outcome():
    """What one device gives by the library's own calls."""
    params = MODEL.init(jax.random.key(0))
    batch = programs.batch_for(SIZES, CONFIG.vocab_size)
    rollout = rl.generate(
        MODEL,
        params,
        batch.tokens[::2, :5],
        np.ones((4, 5), bool),
        jax.random.key(0),
        group_size=2,
        max_new_tokens=6,
    )

    def loss(params):
        return programs.grpo(
            rl.policy.from_decoder(MODEL, with_entropy=False)(params, batch), batch
        )

    (value, _), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(grads)))
    return float(value), float(norm), np.asarray(rollout.tokens)[:, 5:]


@pytest.mark.long
def test_a_run_is_reported_in_full(model_file, tmp_path, capsys, monkeypatch):
    seen, compare = [], benchmark._check_same

    def spy(ready, exact):
        seen.extend(ready)
        return compare(ready, exact)

    monkeypatch.setattr(benchmark, "_check_same", spy)
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    flags = ["--layouts", "fsdp_tensor", "tensor", "--model", model_file, *FLAGS]
    flags += ["--rounds", "2", "--steps", "2", "--json", str(out), "--plot", str(picture)]
    assert benchmark.main(flags) == 0
    said, record = capsys.readouterr().out, json.loads(out.read_text(encoding="utf-8"))
    assert record["rehearsal"] and "REHEARSAL" in said and "mean nothing" in said
    assert "All layouts gave the same" in said
    reason = record["skipped"]["tensor"]
    assert re.search(r"axis 'kv_heads' has size 2, which mesh axis 'tensor' of size 8", reason)
    assert "tensor was left out" in said
    (found,) = record["layouts"]
    assert (found["name"], found["mesh"]) == ("fsdp_tensor", {"fsdp": 4, "tensor": 2})
    for what, count, tokens in (("train", 4, 8 * 11), ("decode", 2, 8 * 6)):
        one = found[what]
        assert len(one["seconds"]) == count and min(one["seconds"]) > 0
        assert one["median"] == pytest.approx(np.median(one["seconds"]))
        assert [one["q1"], one["q3"]] == pytest.approx(np.quantile(one["seconds"], [0.25, 0.75]))
        assert one["tokens_per_second"] == pytest.approx(tokens / one["median"])
    # float32 weights and two moments of each: all but the norms' are in eight parts
    weights = rl.partition.count(MODEL.shapes())
    state = found["memory"]["train"]["updated in place"]
    assert 12 * weights / 8 <= state <= 12 * weights / 8 + 12 * 200
    assert found["memory"]["train"]["peak"] >= state + found["memory"]["train"]["temporaries"]
    loss, norm, tokens = plain_outcome()
    np.testing.assert_array_equal(seen[0][1].tokens, tokens)
    assert [found["loss"], found["grad_norm"]] == pytest.approx([loss, norm], rel=1e-5)
    assert picture.read_bytes().startswith(b"\x89PNG")


@functools.cache
def one_device(sizes):
    sizes = dataclasses.replace(sizes, micro_batches=1)
    made = programs.compile_all(programs.place(MODEL, sharding.get_layout("single"), sizes))
    return made, made.outcome()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp", "fsdp", "fsdp_tensor", "hsdp", "sequence"])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_outcome_is_that_of_one_device(name, parts):
    layout = sharding.get_layout(name)
    sizes = dataclasses.replace(SIZES, rows=32, micro_batches=parts)
    made = programs.compile_all(programs.place(MODEL, layout, sizes))
    alone = one_device(sizes)
    benchmark._check_same([alone, (made, made.outcome())], exact=True)
    assert len(np.unique(alone[1].tokens)) > 10


# what disagrees


def ready(**changes):
    """Two layouts' outcomes; the second with changes."""
    first = programs.Outcome(loss=0.5, grad_norm=2.0, tokens=np.arange(12).reshape(3, 4))
    placed = [types.SimpleNamespace(placed=types.SimpleNamespace(name=n)) for n in ("dp", "fsdp")]
    return [(placed[0], first), (placed[1], dataclasses.replace(first, **changes))]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(loss=0.50002), r"'dp' and 'fsdp' do not agree: loss 0\.5 and 0\.50002"),
        (dict(loss=float("nan")), r"loss 0\.5 and nan"),
        (dict(grad_norm=2.1), r"grad_norm 2 and 2\.1"),
        (
            dict(tokens=np.array([[0, 1, 2, 3], [4, 5, 9, 7], [8, 9, 10, 11]])),
            r"1 of 3 rows of sampled tokens.*row 1 from token 2 on \(6 and 9\)",
        ),
    ],
)
def test_a_layout_that_computes_something_else_is_named(changes, words):
    with pytest.raises(benchmark.DisagreementError, match=words):
        benchmark._check_same(ready(**changes), exact=True)


def test_bfloat16_counts_tokens_and_still_compares_losses():
    tokens = np.arange(12).reshape(3, 4) + [[0], [1], [1]]
    counts = benchmark._check_same(ready(loss=0.51, tokens=tokens), exact=False)
    assert counts == {"dp": 0, "fsdp": 2}
    with pytest.raises(benchmark.DisagreementError, match="loss"):
        benchmark._check_same(ready(loss=0.53), exact=False)


class Fake:
    """Programs that take no time to compile; `took` notes whose turn it was."""

    took: list[str]

    def __init__(self, placed, change=0.0):
        self.placed, self.change = placed, change
        self.memory = {"train": {}, "decode": {}}

    def outcome(self):
        return programs.Outcome(loss=self.change, grad_norm=1.0, tokens=np.zeros((8, 6), int))

    def turn(self, steps):
        self.took.append(self.placed.name)
        return {"train": [0.5] * steps, "decode": [0.25]}


@pytest.fixture
def fakes(monkeypatch):
    """`compile_all` gives :class:`Fake`; returns the layouts that shall fail, and how."""
    Fake.took, trouble = [], {}

    def compile_all(placed, seed):
        found = trouble.get(placed.name, 0.0)
        if isinstance(found, Exception):
            raise found
        return Fake(placed, found)

    monkeypatch.setattr(programs, "compile_all", compile_all)
    return trouble


THREE = ["--layouts", "dp", "fsdp", "fsdp:fsdp=4", "--rows", "8"]


def test_layouts_take_turns(fakes, capsys):
    assert benchmark.main([*THREE, "--rounds", "3"]) == 0
    order = [Fake.took[i : i + 3] for i in (0, 3, 6)]
    assert [sorted(one) for one in order] == [["dp", "fsdp", "fsdp:fsdp=4"]] * 3
    assert [one[0] for one in order] == ["dp", "fsdp", "fsdp:fsdp=4"], "each is the first once"
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("| fsdp:fsdp=4"))
    assert "fsdp 4 | 0.5 (0.5 – 0.5) | 1,024 | 0.25" in line and "?" in line


def test_a_disagreement_ends_with_exit_code_1_before_any_time_is_taken(fakes, capsys):
    fakes["fsdp"] = 0.1
    assert benchmark.main(THREE) == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith(
        "sharding.benchmark: layouts 'dp' and 'fsdp' do not"
    )
    assert not said.out and not Fake.took


def test_a_layout_too_large_for_the_devices_is_left_out(fakes, capsys):
    fakes["dp"] = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 99 GiB of 16 GiB\nmore lines")
    assert benchmark.main(THREE) == 0
    assert "dp was left out: out of memory: RESOURCE_EXHAUSTED: 99 GiB" in capsys.readouterr().out
    assert set(Fake.took) == {"fsdp", "fsdp:fsdp=4"}
    fakes["dp"] = jax.errors.JaxRuntimeError("INTERNAL: a bug")
    with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
        benchmark.main(THREE)


# what is refused


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--layouts", "fsd"], "layout: unknown name 'fsd'; known layouts: single, dp"),
        (["--layouts", "dp", "fsd"], "unknown name 'fsd'"),
        (["--layouts", "fsdp", "--rows", "12"], "12 do not divide over fsdp = 8"),
        (
            ["--layouts", "fsdp", "tensor", "--rows", "12", "--model", "HEADS"],
            "none of the layouts",
        ),
        (["--layouts", "tensor", "--model", "HEADS"], "axis 'kv_heads' has size 2"),
        (["--layouts", "fsdp_tensor:tensor=3"], "does not divide the 8"),
        (["--layouts", "fsdp:tensor=2"], "no mesh axis 'tensor'"),
        (["--rows", "10", "--group-size", "4"], "rows: 10 are no whole groups of 4"),
        (["--layouts", "fsdp", "--micro-batches", "4"], "groups of a micro-batch: 4 do not divide"),
        (["--rows", "0"], "rows: expected an int ≥ 1, got 0"),
        (["--rows", "many"], "argument --rows: invalid int value: 'many'"),
        (["--rounds", "0"], "--rounds: expected an int ≥ 1, got 0"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--model", "no/such/folder/here"], "model: no folder 'no/such/folder/here'"),
        (["--model", "DAMAGED"], "is not valid JSON"),
        (["--remat", "some"], "remat: got 'some'; choose one of"),
        (["--json", "."], "--json: . is a folder; name a file"),
        (["--plot", "x.xyz"], "--plot: x.xyz has none of the known endings: "),
        (["--devices", "3"], "JAX has started with 8 devices already"),
        (["--devices", "0"], "--devices: expected an int ≥ 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    flags, words, fakes, model_file, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # put back afterwards
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{", encoding="utf-8")
    files = {"HEADS": model_file, "DAMAGED": str(damaged)}
    assert benchmark.main([files.get(flag, flag) for flag in flags]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert not said.out and not Fake.took
    assert line.startswith("sharding.benchmark: ") and words in line, line


def test_whole_heads_take_a_layout_that_they_do_not_divide(model_file, fakes, capsys):
    flags = ["--layouts", "tensor", "--model", model_file, "--whole-heads"]
    assert benchmark.main(flags) == 0
    layout = sharding.get_layout("tensor")
    placed = programs.place(MODEL, layout, SIZES, whole_heads=True)
    specs = placed.states.params["layers"][0]
    assert specs["attn"]["q"]["weight"].spec == jax.P(None, None, None, None)
    assert specs["mlp"]["up"]["weight"].spec == jax.P(None, "tensor", None)


def test_without_matplotlib_nothing_is_measured(fakes, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert benchmark.main([*THREE, "--plot", str(tmp_path / "x.png")]) == 2
    said = capsys.readouterr().err
    assert "matplotlib is not installed; pip install 'rlhf-jax[experiments]'" in said
    assert not Fake.took


def test_quartiles():
    assert report.spread([5.0]) == {"median": 5.0, "q1": 5.0, "q3": 5.0}
    assert report.spread([4.0, 1.0, 2.0, 3.0]) == {"median": 2.5, "q1": 1.75, "q3": 3.25}


@pytest.mark.slow
def test_host_devices_are_made_in_a_process_of_its_own(model_file):
    ran = subprocess.run(
        [sys.executable, "-m", "sharding.benchmark", "--devices", "4", "--model", model_file]
        + [*FLAGS, "--layouts", "dp", "fsdp", "--rounds", "1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "4 × cpu" in ran.stdout and "REHEARSAL" in ran.stdout
    assert "| dp | data 4 |" in ran.stdout and "| fsdp | fsdp 4 |" in ran.stdout

"""The sampling benchmarks: what they count by hand, and that each runs at a tiny size."""

import argparse
import json
import sys
import time

import jax
import numpy as np
import pytest

import rlhf_jax as rl
from experiments.bench import batching, roofline, sampling, timing
from experiments.bench import peers as peers_lib

TINY = dict(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    tie_embeddings=False,
    rope_theta=10000.0,
    dtype="float32",
    prompts=2,
    group_size=3,
    prompt_length=8,
    new_tokens=4,
    kl_coef=0.04,
    clip=0.2,
    learning_rate=1e-5,
)
PEER = """
import json, sys
print("noise")
print(json.dumps(dict(tokens_per_s=20.0, tokens_per_cpu_s=10.0, argv=sys.argv[1:])))
"""


@pytest.fixture
def peers(tmp_path):
    (tmp_path / "workload.json").write_text(json.dumps(TINY))
    (tmp_path / "peer.py").write_text(PEER)
    return tmp_path


def cells(table, row):
    return [cell.strip() for cell in str(table).splitlines()[row].strip("|").split("|")]


def test_speed_compares_with_a_peer_that_is_there_and_names_one_that_is_not(peers, monkeypatch):
    monkeypatch.setattr(peers_lib.Workload, "generate", lambda self, seed: time.sleep(0.01))
    work = peers_lib.workload(peers / "workload.json")
    there = peers_lib.Peer(name="slow", script=peers / "peer.py", python=sys.executable, bar=2.0)
    without = peers_lib.Peer(name="gone", script=peers / "no.py", python=sys.executable, bar=2.0)
    table = sampling.speed(work, [there, without], rounds=1, repeats=1)
    ours, slow = cells(table, 2), cells(table, 3)
    assert slow[1] == "10"
    assert 0 < float(ours[2]) <= 2 * 3 * 4 / 0.01
    assert float(slow[3]) == pytest.approx(float(ours[1]) / 10, rel=0.1)
    assert "no.py is not in the folder" in cells(table, 4)[1]


def test_a_peer_that_fails_says_how(peers):
    (peers / "peer.py").write_text("raise SystemExit('no such package')")
    broken = peers_lib.Peer(name="b", script=peers / "peer.py", python=sys.executable, bar=2.0)
    with pytest.raises(RuntimeError, match="no such package"):
        broken.run()


@pytest.mark.slow
def test_prefill_runs_at_a_tiny_size(peers):
    work = peers_lib.workload(peers / "workload.json")
    assert cells(sampling.prefill(work, 16, 1), 3)[0] == "8"


@pytest.mark.slow
def test_capacity_runs_at_a_tiny_size(peers):
    work = peers_lib.workload(peers / "workload.json")
    table = sampling.capacity(work, 1, rooms=(256, 512))
    assert [cells(table, row)[:2] for row in (2, 3, 4, 5)] == [
        ["2 × 3", "256"],
        ["2 × 3", "512"],
        ["6 × 1", "256"],
        ["6 × 1", "512"],
    ]


def test_all_sections_have_a_name(peers):
    args = argparse.Namespace(
        peers=peers, torch_python=None, tunix_python=None, rounds=1, repeats=1, requests=4
    )
    assert tuple(sampling.sections(args)) == sampling.SECTIONS


def test_roofline_counts_what_a_step_reads_and_multiplies():
    config = rl.models.DecoderConfig(**{k: v for k, v in TINY.items() if k in CONFIG})
    shapes = rl.models.Decoder(config).shapes()
    weights = sum(
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
        if "embed" not in str(path) and "norm" not in str(path)
    )
    cache_per_key = config.num_layers * config.num_kv_heads * config.head_dim * 2
    score_per_key = config.num_layers * config.num_heads * config.head_dim * 4
    moved, operations = roofline.counted(config, rows=3, context=5)
    assert moved == 4 * (weights + 3 * 5 * cache_per_key)
    assert operations == 3 * (2 * weights + 5 * score_per_key)


CONFIG = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
    *("num_kv_heads", "head_dim", "tie_embeddings"),
)


def test_roofline_bound_is_the_slower_of_memory_and_arithmetic():
    machine = roofline.Machine(
        bandwidth=timing.Clocks(wall=10.0, cpu=5.0), operations=timing.Clocks(wall=100.0, cpu=50.0)
    )
    assert roofline.bound(machine, 20.0, 1.0) == timing.Clocks(wall=2.0, cpu=4.0)
    assert roofline.bound(machine, 1.0, 500.0) == timing.Clocks(wall=5.0, cpu=10.0)


@pytest.mark.slow
def test_roofline_runs_at_a_tiny_size(peers):
    work = peers_lib.workload(peers / "workload.json")
    found = roofline.measure(work.model, work.params, rows=(1, 2), repeats=1, megabytes=1, size=64)
    assert [cells(roofline.table(*found), row)[0] for row in (-2, -1)] == ["1", "2"]


def test_lengths_are_log_normal_with_the_stated_mean_and_cut():
    sizes = batching.lengths(4096)
    assert sizes.mean() == pytest.approx(batching.MEAN, rel=0.01)
    assert sizes.min() >= 1
    assert sizes.max() == batching.LONGEST
    inner = np.log(sizes[(sizes > 1) & (sizes < batching.LONGEST)])
    assert inner.std() == pytest.approx(batching.SIGMA, rel=0.05)


@pytest.mark.slow
def test_batching_serves_every_token_both_ways(peers, monkeypatch):
    monkeypatch.setattr(batching, "LONGEST", 32)
    monkeypatch.setattr(batching, "MEAN", 8)
    work = peers_lib.workload(peers / "workload.json")
    static, engine = batching.measure(work.model, work.params, requests=24, slots=4, static=8)
    sizes = batching.lengths(24)
    assert (static.tokens, engine.tokens) == (sizes[:8].sum(), sizes.sum())
    rows = sizes[:8].reshape(2, 4)
    assert static.busy == pytest.approx(rows.sum() / (4 * rows.max(axis=1).sum()))
    assert static.busy < engine.busy <= engine.busy_while_waiting <= 1
    assert cells(batching.table([static, engine]), 5)[:3] == [
        "continuously",
        "24",
        f"{sizes.sum()}",
    ]


def test_medians_take_each_clock_for_itself():
    runs = [timing.Clocks(wall=w, cpu=c) for w, c in ((1, 9), (2, 1), (3, 5))]
    assert timing.median(runs) == timing.Clocks(wall=2, cpu=5)

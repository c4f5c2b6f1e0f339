"""The update benchmarks: what they count by hand, and that each runs at a tiny size."""

import dataclasses
import json
import sys

import jax
import pytest

import rlhf_jax as rl
import sharding
from experiments.bench import peers as peers_lib
from experiments.bench import tpu_train, update
from experiments.bench.hlo import parse
from tests.experiments.test_bench_sampling import TINY, cells
from tests.experiments.test_bench_tpu_decode import CONFIG

OWN = dict(gradient_cpu_s=1.0, gradient_s=0.5, whole_cpu_s=2.0, whole_s=1.5, peak_rss_mb=100)
TORCH = dict(update_cpu_s=4.0, update_s=2.0, peak_rss_mb=200)
TUNIX = dict(update_cpu_s=[90, 80, 5, 4, 3], update_s=[9, 8, 2, 2, 2], maxrss_mb=400)
MODULE = """HloModule logits

ENTRY %main (p: f32[64,16]) -> f32[3,8] {
  %p = f32[64,16]{1,0} parameter(0)
  %head = f32[64,8]{1,0} slice(%p)
  %halves = bf16[64,32]{1,0} concatenate(%head, %head)
  %piece = f32[5,64]{1,0} custom-call(%halves)
  %split = bf16[7,32]{1,0} custom-call(%piece)
  ROOT %out = f32[3,8]{1,0} custom-call(%split)
}
"""


@pytest.fixture
def work(tmp_path):
    (tmp_path / "workload.json").write_text(json.dumps(TINY))
    return peers_lib.workload(tmp_path / "workload.json")


def peer(tmp_path, name, found):
    (tmp_path / f"{name}.py").write_text(f"print({json.dumps(found)!r})")
    return peers_lib.Peer(name=name, script=tmp_path / f"{name}.py", python=sys.executable, bar=0.7)


def test_speed_compares_the_same_parts_with_each_peer(tmp_path):
    gone = peers_lib.Peer(name="gone", script=tmp_path / "no.py", python=None, bar=0.7)
    peers = (
        (peer(tmp_path, "torch", TORCH), "whole", update.of_torch),
        (peer(tmp_path, "tunix", TUNIX), "gradient", update.of_tunix),
        (gone, "whole", update.of_torch),
    )
    table = update.speed(peers, lambda: OWN, rounds=2)
    torch, tunix, missing = (cells(table, row) for row in (4, 5, 6))
    assert torch[1:] == [
        *("old, reference, gradient, AdamW", "4.00", "2.00", "200"),
        *("0.50", "0.7", "0.50"),
    ]
    assert tunix[1:] == ["gradient pass and AdamW", "4.00", "2.00", "400", "0.25", "0.7", "0.25"]
    assert missing[1] == "left out: no interpreter given"


@pytest.mark.long
def test_our_own_update_is_measured(work):
    found = update.own(work, 1)
    assert found["gradient_cpu_s"] > 0 and found["whole_cpu_s"] > 0
    assert found["peak_rss_mb"] > 50


@pytest.mark.long
def test_chunked_log_probs_hold_a_small_part_of_the_logits(work):
    table = update.memory(work)  # compiled, not run: V = 131072, T = 2048
    assert float(cells(table, 5)[2]) < 0.25


@pytest.mark.slow
def test_remat_saves_memory(work):
    table = update.remat(work, 1, ("none", "full"), layers=4, length=128)
    assert float(cells(table, 5)[2]) < 0.7


@pytest.mark.slow
def test_packed_rows_make_the_same_update_of_fewer_tokens(work):
    table = update.packing(work, 1, rows=8, micro=2)
    plain, packed = cells(table, 4), cells(table, 5)
    assert float(packed[2]) > float(plain[2])
    assert float(packed[-1]) == pytest.approx(float(plain[-1]), rel=1e-5)


def test_logits_are_told_from_weights():
    assert tpu_train.vocabulary_arrays(parse(MODULE), 64, {16, 32, 8}, 2) == [7 * 32, 5 * 64]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(aliased=99), "only .* are updated in place"),
        ({"largest logits": 26}, "holds the logits of many tokens"),
    ],
)
def test_what_a_tpu_plan_must_hold(change, message):
    good = {"layout": "fsdp", "state": 100, "aliased": 100, "largest logits": 25, "all logits": 100}
    tpu_train.check(good)
    with pytest.raises(AssertionError, match=message):
        tpu_train.check(good | change)


@pytest.mark.long
def test_a_plan_of_a_small_model_on_the_devices_at_hand():
    """The CPU's compiler plays the TPU's part: the state is donated, logits come in parts."""
    layout = sharding.get_layout("fsdp_tensor")
    config = dataclasses.replace(CONFIG, vocab_size=1024)
    sizes = tpu_train.Sizes(rows=8, length=64, prompt=16, chunk=4)
    placed = tpu_train.place(config, layout, jax.devices(), sizes)
    found = tpu_train.measure(placed)
    tpu_train.check(found)
    weights = rl.partition.count(placed.model.shapes())
    assert 3 * 4 * weights / 8 <= found["state"] <= 1.1 * 3 * 4 * weights / 8
    assert 0 < found["largest logits"] <= found["all logits"] / 4
    assert "all-gather" in found["traffic"]

"""The update benchmarks: what they count by hand, and that each runs at a tiny size."""

import json
import sys

import pytest

from experiments.bench import peers as peers_lib
from experiments.bench import update
from tests.experiments.test_bench_sampling import TINY, cells

OWN = dict(gradient_cpu_s=1.0, gradient_s=0.5, whole_cpu_s=2.0, whole_s=1.5, peak_rss_mb=100)
TORCH = dict(update_cpu_s=4.0, update_s=2.0, peak_rss_mb=200)
TUNIX = dict(update_cpu_s=[90, 80, 5, 4, 3], update_s=[9, 8, 2, 2, 2], maxrss_mb=400)


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

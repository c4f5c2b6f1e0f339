"""The decoder against the reference implementation: golden files, and torch itself where it is."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import rlhf_jax as rl
from experiments.bench import parity

TOLERANCE = 1e-4
FAMILIES = parity.families()


def test_there_are_goldens_of_every_family():
    named = {"llama", "llama_tied", "llama3", "llama_linear", "qwen2", "qwen3"}
    assert {*named, "qwen2_window", "qwen3_window"} <= set(FAMILIES)


@pytest.mark.fault(9, 59)
@pytest.mark.parametrize("family", FAMILIES)
def test_golden_logits(family):
    found = parity.row(family, live=False)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.fault(59)
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", dict(rope_theta=2e4)),
        ("llama3", dict(rope_scaling=None)),
        ("llama_linear", dict(rope_scaling=None)),
        ("llama", dict(norm_eps=1e-2)),
        ("qwen2_window", dict(layer_windows=(0, 6, 6))),
        ("qwen2_window", dict(layer_windows=(0, 0, 5))),
        ("qwen3_window", dict(layer_windows=())),
    ],
)
def test_golden_logits_see_a_wrong_setting(family, change):
    model, params = rl.models.load(parity.GOLDEN / family)
    data = parity.golden(family)
    wrong = rl.models.Decoder(dataclasses.replace(model.config, **change))
    logits = jax.jit(wrong.logits)(params, data["tokens"])
    assert np.abs(logits - data["logits"])[data["mask"]].max() > 100 * TOLERANCE


@pytest.mark.fault(59)
@pytest.mark.parametrize(
    ("family", "leaf"),
    [
        ("qwen2", ("attn", "q", "bias")),
        ("qwen2", ("attn", "k", "bias")),
        ("qwen2", ("attn", "v", "bias")),
        ("qwen3", ("attn", "q_norm", "scale")),
        ("qwen3", ("attn", "k_norm", "scale")),
        ("llama", ("attn", "q", "weight")),
    ],
)
def test_golden_logits_see_a_changed_weight(family, leaf):
    model, params = rl.models.load(parity.GOLDEN / family, as_numpy=True)
    data = parity.golden(family)
    tree = params["layers"][0]
    for key in leaf[:-1]:
        tree = tree[key]
    tree[leaf[-1]] = np.flip(tree[leaf[-1]], -1 if leaf[-1] != "weight" else 2)  # pairs swapped
    logits = jax.jit(model.logits)(params, data["tokens"])
    assert np.abs(logits - data["logits"])[data["mask"]].max() > 100 * TOLERANCE


@pytest.mark.long
@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_live_logits(family):
    pytest.importorskip("torch")
    found = parity.row(family, live=True)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_we_save(family, tmp_path):
    pytest.importorskip("torch")
    model, params = rl.models.load(parity.GOLDEN / family, stacks=(1, 2))
    rl.models.save(tmp_path, model, params)
    data = parity.golden(family)
    logits = parity.torch_logits(tmp_path, data["tokens"], data["mask"])
    assert np.abs(logits - data["logits"])[data["mask"]].max() <= TOLERANCE


@pytest.fixture(scope="module")
def smollm2():
    return rl.models.load("smollm2-135m", stacks=(22, 8))


@pytest.mark.long
@pytest.mark.fault(9, 59)
@pytest.mark.download
def test_smollm2_golden_logits(smollm2):
    data = parity.golden("smollm2")
    columns = data["columns"]
    found = parity.measure(*smollm2, data["tokens"], data["mask"], data["logits"], columns)
    assert max(found.values()) <= TOLERANCE, found


@pytest.mark.download
def test_smollm2_is_as_exact_as_the_reference(smollm2):
    data = parity.golden("smollm2")
    exact, valid = data["exact"], data["mask"]
    model, params = smollm2
    logits = jax.jit(model.logits)(params, data["tokens"], attention_mask=valid)
    ours = np.abs(logits[..., data["columns"]] - exact)[valid]
    reference = np.abs(data["logits"] - exact)[valid]  # float32 too: not zero
    assert np.sqrt(np.mean(ours**2)) < 2 * np.sqrt(np.mean(reference**2))
    assert ours.max() < 2 * TOLERANCE


@pytest.mark.download
def test_smollm2_greedy_text(smollm2):
    assert parity.greedy_matches(*smollm2) == (8, 8)
    texts = json.loads((parity.GOLDEN / "smollm2.json").read_text(encoding="utf-8"))
    assert texts["greedy"][0].startswith(" Paris")


@pytest.mark.long
@pytest.mark.parity
@pytest.mark.download
@pytest.mark.filterwarnings("ignore")
def test_smollm2_live_logits():
    pytest.importorskip("torch")
    found = parity.row("smollm2", live=True)
    # Where this residual stream reaches 25,000 float32 resolves .002, so the CPU decides much: with
    # one code 9.8e-5 was measured on one and 1.7e-4 on another, where this one gives 2.1e-4 in one
    # pass (and the reference is 9.3e-5 from double precision).
    assert max(found[name] for name in found if "decode" in name) <= 1.5 * TOLERANCE, found
    assert max(found.values()) <= 3 * TOLERANCE, found

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rlhf_jax as rl

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "golden"
FAMILIES = ("llama", "llama3", "qwen2", "qwen3")


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(GOLDEN / "qwen2", tmp_path / "qwen2"))


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def same(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), a, b)))


@pytest.mark.parametrize("family", FAMILIES)
def test_save_writes_back_the_very_tensors(family, tmp_path):
    model, params = rl.models.load(GOLDEN / family, stacks=(2, 1))
    rl.models.save(tmp_path / "out", model, params)
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path / "out", GOLDEN / family))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value)
    again, reread = rl.models.load(tmp_path / "out", stacks=(2, 1))
    assert again == model and same(reread, params)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors",
    }  # fmt: skip


def test_load_options(folder):
    model, params = rl.models.load(folder, dtype=jnp.bfloat16, remat="dots", as_numpy=True)
    assert model == rl.models.Decoder(model.config, dtype="bfloat16", remat="dots")
    leaves = jax.tree.leaves(params)
    assert all(isinstance(leaf, np.ndarray) and leaf.dtype == np.float32 for leaf in leaves)
    _, small = rl.models.load(folder, param_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(small)} == {jnp.dtype("bfloat16")}
    restacked = model.restack(params, (2, 1))
    assert same(restacked, rl.models.load(folder, stacks=(2, 1))[1])


def test_bf16_files_and_sharded_files(folder, tmp_path):
    model, params = rl.models.load(folder)
    rl.models.save(tmp_path / "half", model, params, dtype="bfloat16")
    raw = load_file(tmp_path / "half" / "model.safetensors")
    assert {value.dtype for value in raw.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    _, half = rl.models.load(tmp_path / "half")
    assert same(half, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params))

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in shards.items():
        save_file({key: tensors[key] for key in keys}, folder / file)
    index = {"weight_map": {key: file for file, keys in shards.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(rl.models.load(folder)[1], params)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks the shards \['b.safetensors'\]"):
        rl.models.load(folder)


@pytest.mark.fault(61)
def test_missing_extra_and_misshapen_tensors_are_all_listed(folder):
    def edit(tensors):
        del tensors["model.layers.1.self_attn.k_proj.bias"]
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(8, np.float32)
        tensors["model.norm.weight"] = np.ones(31, np.float32)

    change(folder, edit)
    with pytest.raises(ValueError, match="do not fit Qwen2ForCausalLM") as error:
        rl.models.load(folder)
    message = str(error.value)
    assert "missing model.layers.1.self_attn.k_proj.bias [16]" in message
    assert "extra model.layers.0.self_attn.q_norm.weight [8]" in message
    assert "shape of model.norm.weight: file [31], config [32]" in message
    assert "1 missing, 1 extra, 1 of another shape" in message


@pytest.mark.fault(61)
def test_a_layer_too_many_and_a_lost_head_are_errors(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    shorter = config | {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    (folder / "config.json").write_text(json.dumps(shorter))
    with pytest.raises(ValueError, match=r"12 extra.*\n *extra model\.layers\.2\."):
        rl.models.load(folder)
    untied = config | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(untied))
    with pytest.raises(ValueError, match=r"missing lm_head.weight \[64, 32\]"):
        rl.models.load(folder)


def test_rotary_buffers_and_a_tied_duplicate_are_ignored(folder):
    _, params = rl.models.load(folder)

    def edit(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    change(folder, edit)
    assert same(rl.models.load(folder)[1], params)


def test_what_is_not_there_is_said_clearly(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no folder '.*nothing'"):
        rl.models.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        rl.models.resolve(tmp_path)
    (folder / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(ValueError, match=r"model.safetensors in .* is damaged"):
        rl.models.load(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="pickled weights are never read"):
        rl.models.load(folder)

    import huggingface_hub

    def offline(*args, **options):
        raise OSError("no connection\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"hub did not give it either \(OSError: no connection\)"):
        rl.models.load("owner/model")


def test_a_hub_name_is_read_from_the_hub_cache(monkeypatch):
    import huggingface_hub

    asked = []

    def download(name, allow_patterns):
        asked.append((name, "*.safetensors" in allow_patterns, "*.bin" in allow_patterns))
        return str(GOLDEN / "qwen3")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert rl.models.load("owner/model")[0].config.qk_norm
    assert asked == [("owner/model", True, False)]


def test_saving_checks_what_it_writes(folder, tmp_path):
    model, params = rl.models.load(folder)
    bigger = rl.models.Decoder(dataclasses.replace(model.config, vocab_size=65))
    with pytest.raises(ValueError, match=r"(?s)weights in the parameters .*config \[65, 32\]"):
        rl.models.save(tmp_path / "out", bigger, params)
    with pytest.raises(ValueError, match="tokenizer: it has 65 ids"):
        rl.models.save(tmp_path / "out", model, params, tokenizer=range(65))
    assert not (tmp_path / "out").exists()


def test_tensors_from_anywhere(folder):
    model, params = rl.models.load(folder)
    tensors = dict(rl.models.to_hf_tensors(model, params))
    shapes = {name: value.shape for name, value in tensors.items()}
    again = rl.models.from_hf_tensors(model, shapes, tensors.__getitem__)
    assert same(again, params)


def write_tokenizer(folder, count):
    vocab = {chr(0x100 + i): i for i in range(count)}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    raw = {"version": "1.0", "added_tokens": [], "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.fault(63)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tokenizer_and_vocabulary_must_fit(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "llama", tmp_path / "llama"))
    with pytest.raises(ValueError, match=r"tokenizer: folder .* has no tokenizer.json"):
        rl.models.load_tokenizer(folder)
    write_tokenizer(folder, 64)
    tokenizer = rl.models.load_tokenizer(folder)
    assert len(tokenizer) == 64
    smaller = dataclasses.replace(rl.models.DecoderConfig.from_hf(folder), vocab_size=60)
    with pytest.raises(ValueError, match="has 64 ids, the model's vocabulary only 60"):
        rl.models.load_tokenizer(folder, smaller)
    write_tokenizer(folder, 65)
    with pytest.raises(ValueError, match="has 65 ids, the model's vocabulary only 64"):
        rl.models.load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="does not load"):
        rl.models.load_tokenizer(folder)

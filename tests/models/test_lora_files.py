"""Adapter folders against PEFT: its files, its logits, its gradients; and PEFT itself if there."""

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

DATA = Path(__file__).resolve().parents[1] / "data"
ADAPTERS = DATA / "adapters"
CASES = {"qwen3_all": ("qwen3", (2, 1)), "qwen2_last": ("qwen2", (2, 1))}
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
TENSOR = "base_model.model.model.layers.{}.{}.lora_{}.weight"


def load(name):
    family, stacks = CASES[name]
    model, base = rl.models.load(DATA / "golden" / family, stacks=stacks)
    lora, adapters = rl.models.load_adapters(ADAPTERS / name, model)
    return model, base, lora, adapters


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(ADAPTERS / "qwen2_last", tmp_path / "adapters"))


@pytest.fixture(scope="module")
def qwen2():
    return rl.models.load(DATA / "golden" / "qwen2", stacks=(2, 1))


def configure(folder, **changes):
    raw = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(raw | changes))


@pytest.mark.long
@pytest.mark.fault(59)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_peft(name):
    model, base, lora, adapters = load(name)
    data = np.load(ADAPTERS / name / "golden.npz")
    tokens, mask = data["tokens"], data["mask"]
    logits = jax.jit(model.logits)(lora.merge(base, adapters), tokens, attention_mask=mask)
    assert np.abs(logits - data["exact"])[mask].max() < 1e-4
    plain = np.load(DATA / "golden" / CASES[name][0] / "golden.npz")["exact"]
    assert np.abs(plain - data["exact"])[mask].max() > 0.1, "the adapters do something"


@pytest.mark.parametrize("name", ["qwen2_last", pytest.param("qwen3_all", marks=pytest.mark.slow)])
def test_gradients_are_those_of_peft(name):
    model, base, lora, adapters = load(name)
    data = np.load(ADAPTERS / name / "golden.npz")
    tokens, mask = data["tokens"], data["mask"]

    def loss(adapters):
        logits = model.logits(lora.merge(base, adapters), tokens, attention_mask=mask)
        per_token = rl.logprobs.token_log_probs(logits, tokens)[:, 1:]
        return -jnp.sum(jnp.where(mask[:, 1:], per_token, 0.0)) / mask[:, 1:].sum()

    grads = jax.jit(jax.grad(loss))(adapters)
    seen = set()
    for stack, first in zip(grads["layers"], (0, 2), strict=True):
        for target, pair in [item for held in stack.values() for item in held.items()]:
            module = f"{'self_attn' if target in 'qkvo' else 'mlp'}.{target}_proj"
            for side, i in [(side, i) for side in "ab" for i in range(len(pair["a"]))]:
                key = TENSOR.format(first + i, module, side.upper())
                want = data[key]
                found = pair[side][i].reshape(want.shape)
                np.testing.assert_allclose(found, want, atol=2e-4 * abs(want).max())
                seen.add(key)
    assert seen == {key for key in data if "lora_" in key}


@pytest.mark.parametrize("name", CASES)
def test_save_writes_back_the_very_tensors(name, tmp_path):
    model, _, lora, adapters = load(name)
    rl.models.save_adapters(tmp_path, model, lora, adapters, base="owner/model")
    ours, theirs = load_file(tmp_path / WEIGHTS), load_file(ADAPTERS / name / WEIGHTS)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key], value)
    mine, peft = (json.loads((f / CONFIG).read_text()) for f in (tmp_path, ADAPTERS / name))
    told = {"base_model_name_or_path": "owner/model", "lora_dropout": 0.0}
    wanted = peft | told | {"target_modules": set(peft["target_modules"])}
    mine["target_modules"] = set(mine["target_modules"])
    assert mine == {key: wanted[key] for key in mine}
    again, reread = rl.models.load_adapters(tmp_path, model)
    assert again == lora
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), reread, adapters)))


def test_what_a_config_says(qwen2):
    model, _ = qwen2
    lora, adapters = rl.models.load_adapters(ADAPTERS / "qwen2_last", model)
    assert lora == rl.models.LoRA(
        rank=3, alpha=5, targets=("q", "v"), layers=(2,), rank_stabilized=True
    )
    assert adapters["layers"][0] == {}
    flat = rl.models.Decoder(model.config)
    with pytest.raises(ValueError, match=r"layers: \[2\] are a part of the stack"):
        rl.models.load_adapters(ADAPTERS / "qwen2_last", flat)


def test_other_spellings_of_the_same(folder, qwen2):
    model, _ = qwen2
    want, _ = rl.models.load_adapters(folder, model)
    configure(folder, target_modules=["self_attn.v_proj", "q_proj"], layers_to_transform=2)
    assert rl.models.load_adapters(folder, model)[0] == want
    configure(folder, init_lora_weights="gaussian", future_field=None, layers_pattern="layers")
    assert rl.models.load_adapters(folder, model)[0].init_a == "gaussian"
    _, half = rl.models.load_adapters(folder, model, param_dtype=jnp.bfloat16)
    assert {x.dtype.name for x in jax.tree.leaves(half)} == {"bfloat16"}


def test_bf16_files(tmp_path, qwen2):
    model, _ = qwen2
    lora, adapters = rl.models.load_adapters(ADAPTERS / "qwen2_last", model)
    rl.models.save_adapters(tmp_path, model, lora, adapters, dtype="bfloat16")
    dtypes = {x.dtype for x in load_file(tmp_path / WEIGHTS).values()}
    assert dtypes == {np.dtype(ml_dtypes.bfloat16)}
    _, reread = rl.models.load_adapters(tmp_path, model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-8), reread, adapters)


@pytest.mark.fault(61)
def test_missing_extra_and_misshapen_tensors_are_all_listed(folder, qwen2):
    tensors = load_file(folder / WEIGHTS)
    names = [TENSOR.format(2, "self_attn.q_proj", "A"), TENSOR.format(2, "self_attn.v_proj", "B")]
    del tensors[names[0]]
    tensors[names[1]] = tensors[names[1]][:, :2].copy()
    tensors[TENSOR.format(1, "mlp.up_proj", "A")] = np.ones((3, 32), np.float32)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ValueError, match="do not fit their config and Qwen2") as error:
        rl.models.load_adapters(folder, qwen2[0])
    message = str(error.value)
    assert "1 missing, 1 extra, 1 of another shape" in message
    assert f"missing {names[0]} [3, 32]" in message
    assert f"extra {TENSOR.format(1, 'mlp.up_proj', 'A')} [3, 32]" in message
    assert f"shape of {names[1]}: file [16, 2], expected [16, 3]" in message


@pytest.mark.fault(61)
def test_every_field_that_would_change_the_result_is_listed(folder, qwen2):
    wrong = dict(
        use_dora=True,
        bias="lora_only",
        rank_pattern={"q_proj": 4},
        alpha_pattern={"q_proj": 4},
        modules_to_save=["lm_head"],
        fan_in_fan_out=True,
        init_lora_weights="pissa",
        layer_replication=[[0, 2]],
        lora_bias=True,
        trainable_token_indices=[1],
        some_future_field=3,
        peft_type="IA3",
        target_modules="all-linear",
        r=None,
    )
    configure(folder, **wrong)
    with pytest.raises(ValueError, match="fields that are not supported") as error:
        rl.models.load_adapters(folder, qwen2[0])
    message = str(error.value)
    assert [name for name, value in wrong.items() if f"  {name}={value!r} (" not in message] == []
    assert len(message.splitlines()) == 1 + len(wrong)
    assert "bias='lora_only' ('none')" in message and "q_proj, k_proj, v_proj" in message


@pytest.mark.parametrize("targets", [["embed_tokens"], ["q_proj", "lm_head"], [], ".*proj"])
def test_other_targets_are_refused(folder, qwen2, targets):
    configure(folder, target_modules=targets)
    with pytest.raises(ValueError, match="target_modules="):
        rl.models.load_adapters(folder, qwen2[0])


@pytest.mark.fault(61)
def test_damaged_folders(folder, qwen2, tmp_path):
    model, _ = qwen2
    weights = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(weights[:100])
    with pytest.raises(ValueError, match=r"adapter_model.safetensors in .* is damaged"):
        rl.models.load_adapters(folder, model)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(ValueError, match="pickled weights are never read"):
        rl.models.load_adapters(folder, model)
    for text, words in (("{", "not valid JSON"), ("[]", "holds list, not an object")):
        (folder / CONFIG).write_text(text)
        with pytest.raises(ValueError, match=words):
            rl.models.load_adapters(folder, model)
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        rl.models.load_adapters(tmp_path, model)


def test_save_refuses_the_adapters_of_another(tmp_path, qwen2):
    model, _ = qwen2
    _, adapters = rl.models.load_adapters(ADAPTERS / "qwen2_last", model)
    other = rl.models.LoRA(rank=2, targets=("q",), layers=(2,))
    with pytest.raises(ValueError, match="not those of this LoRA and model") as error:
        rl.models.save_adapters(tmp_path, model, other, adapters)
    assert "extra layers/1/attn/v/a [1, 3, 32]" in str(error.value)
    assert "shape of layers/1/attn/q/a" in str(error.value)
    with pytest.raises(ValueError, match="missing layers/0/attn/q/a"):
        all_layers = rl.models.LoRA(rank=3, targets=("q", "v"))
        rl.models.save_adapters(tmp_path, model, all_layers, adapters)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_reads_what_we_write(tmp_path, qwen2):
    """PEFT's own forward pass with our file, freshly made: other ranks and targets than theirs."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    model, base = qwen2
    lora = rl.models.LoRA(rank=5, alpha=7, targets=("k", "o", "gate"), layers=(0, 1))
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32), lora.shapes(model)
    )
    rl.models.save_adapters(tmp_path, model, lora, adapters)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        DATA / "golden" / "qwen2", attn_implementation="eager", dtype=torch.float32
    )
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path).eval()
    tokens = rng.integers(3, 64, (2, 12)).astype(np.int32)
    with torch.no_grad():
        want = theirs(input_ids=torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    found = jax.jit(model.logits)(lora.merge(base, adapters), tokens)
    assert np.abs(found - want).max() < 1e-4
    assert np.abs(jax.jit(model.logits)(base, tokens) - want).max() > 0.1

import json

import pytest

import rlhf_jax as rl

Config = rl.models.DecoderConfig
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_old_and_new_spelling_of_the_rotary_settings_agree():
    old = Config.from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3})
    new = Config.from_hf(LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}})
    assert old == new
    assert old.rope_theta == 5e5
    assert old.rope_scaling == rl.models.RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip
    oldest = Config.from_hf(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert oldest.rope_scaling == rl.models.RopeScaling(kind="linear", factor=2.0)


def test_families_and_their_defaults():
    llama = Config.from_hf({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})
    assert (llama.num_kv_heads, llama.head_dim, llama.tie_embeddings) == (4, 4, False)
    qwen2 = Config.from_hf(LLAMA | {"architectures": ["Qwen2ForCausalLM"]})
    assert qwen2.qkv_bias and not qwen2.qk_norm
    qwen3 = Config.from_hf(LLAMA | {"architectures": ["Qwen3ForCausalLM"]})
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_dim == 128
    assert Config.from_hf(LLAMA | {"architectures": None, "model_type": "qwen2"}) == qwen2


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
        {"architectures": ["Qwen3ForCausalLM"], "head_dim": 8, "eos_token_id": [1, 2]},
    ],
)
def test_round_trip_keeps_everything(change):
    config = Config.from_hf(LLAMA | change)
    assert Config.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert hash(config) == hash(Config.from_hf(LLAMA | change))


@pytest.mark.fault(59)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, ["architectures", "Gemma", "LlamaForCausalLM"]),
        ({"architectures": [], "model_type": "gpt2"}, ["model_type", "gpt2", "qwen3"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"attention_bias": True}, ["attention_bias", "True", "False for Llama"]),
        (
            {"architectures": ["Qwen2ForCausalLM"], "attention_bias": False},
            ["attention_bias", "False", "True for Qwen2"],
        ),
        ({"mlp_bias": True}, ["mlp_bias", "True"]),
        ({"use_sliding_window": True, "sliding_window": 8}, ["use_sliding_window", "full"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["rope_type", "yarn", "llama3"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["lacks", "low_freq_factor"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["rope_parameters", "all"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "1.0"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"vocab_size": None}, ["vocab_size", "missing"]),
        ({"num_key_value_heads": 3}, ["num_heads=4", "num_kv_heads=3"]),
        ({"head_dim": 5}, ["head_dim=5", "even"]),
        ({"hidden_size": 18}, ["hidden_size=18", "num_heads=4"]),
        ({"num_hidden_layers": 0}, ["num_layers=0", "positive"]),
    ],
)
def test_what_is_not_supported_is_named(change, words):
    with pytest.raises(ValueError) as error:
        Config.from_hf(LLAMA | change)
    for word in words:
        assert word in str(error.value)


QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 4}
SLIDING = {"use_sliding_window": True, "sliding_window": 8}
KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, ()),
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, ()),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ()),
        (SLIDING, ()),  # the default is for models of more than 28 layers
        (SLIDING | {"max_window_layers": 4}, ()),
        (SLIDING | {"max_window_layers": 1}, (0, 8, 8, 8)),
        ({"use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 4096)),
        (SLIDING | {"layer_types": KINDS, "max_window_layers": 9}, (8, 0, 0, 8)),
        (SLIDING | {"layer_types": ["full_attention"] * 4, "max_window_layers": 0}, ()),
    ],
)
def test_sliding_windows_are_those_of_the_reference(change, windows):
    for raw in (QWEN2 | change, QWEN2 | change | {"architectures": ["Qwen3ForCausalLM"]}):
        config = Config.from_hf(raw)
        assert config.layer_windows == windows
        assert Config.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    reference = pytest.importorskip("transformers").Qwen2Config
    for raw in (QWEN2 | change, Config.from_hf(QWEN2 | change).to_hf()):
        theirs = reference(**raw)
        sizes = [theirs.sliding_window if "sliding" in k else 0 for k in theirs.layer_types]
        assert tuple(sizes if any(sizes) else ()) == windows


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": KINDS}, ["layer_types", "use_sliding_window=False"]),
        (SLIDING | {"sliding_window": None, "layer_types": KINDS}, ["sliding_window=None"]),
        (SLIDING | {"layer_types": KINDS[:2]}, ["2 entries", "4 layers"]),
        ({"layer_types": ["linear_attention"] * 4}, ["linear_attention", "sliding_attention"]),
    ],
)
def test_sliding_windows_that_do_not_fit_are_named(change, words):
    with pytest.raises(ValueError) as error:
        Config.from_hf(QWEN2 | change)
    for word in words:
        assert word in str(error.value)


def test_reads_a_folder_and_its_stop_ids(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 5}))
    assert Config.from_hf(tmp_path).eos_token_ids == (5,)
    generation = {"eos_token_id": [5, 7], "pad_token_id": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    config = Config.from_hf(tmp_path)
    assert (config.eos_token_ids, config.pad_token_id) == ((5, 7), 3)
    assert Config.from_hf(tmp_path / "config.json").eos_token_ids == (5,)


def test_bad_files_are_said_clearly(tmp_path):
    with pytest.raises(ValueError, match=r"no file .*config\.json"):
        Config.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        Config.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="list"):
        Config.from_hf(tmp_path)


def test_rope_scaling_checks_its_numbers():
    with pytest.raises(ValueError, match="factor"):
        rl.models.RopeScaling(kind="linear", factor=0.0)
    with pytest.raises(ValueError, match="high_freq_factor"):
        rl.models.RopeScaling(kind="llama3", factor=2.0, low_freq_factor=4.0)

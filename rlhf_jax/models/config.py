"""What a decoder looks like, read from (and written to) a Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_jax.models import windows
from rlhf_jax.models.refusals import unsupported

__all__ = ["DecoderConfig", "RopeScaling"]

# architecture → (model_type, biases on q/k/v, norm on q/k)
_FAMILIES = {
    "LlamaForCausalLM": ("llama", False, False),
    "Qwen2ForCausalLM": ("qwen2", True, False),
    "Qwen3ForCausalLM": ("qwen3", False, True),
}
_QWEN3_HEAD_DIM = 128  # what the reference implementation takes when the file is silent
_LLAMA3_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts.

    Args:
      kind: ``"linear"`` (all frequencies / factor) or ``"llama3"`` (low ones only, blended).
      factor: the stretch.
      low_freq_factor: llama3: wavelengths above original / low are stretched by ``factor``.
      high_freq_factor: llama3: wavelengths below original / high are kept.
      original_max_position_embeddings: llama3: the context of pre-training.

    Raises:
      ValueError: an unknown kind, or a factor that is not positive.

    >>> RopeScaling(kind="linear", factor=2.0).factor
    2.0
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise unsupported("rope_type", self.kind, "default, linear, llama3")
        if not self.factor > 0:
            raise ValueError(f"config: rope factor={self.factor!r}; it must be positive")
        if self.kind == "llama3" and not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"config: rope high_freq_factor={self.high_freq_factor!r} must be greater than "
                f"low_freq_factor={self.low_freq_factor!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape and kind of a decoder; hashable, so it can be static under ``jit``.

    Args:
      vocab_size, hidden_size, intermediate_size, num_layers, num_heads: the sizes.
      num_kv_heads: key/value heads (GQA); 0 means ``num_heads``.
      head_dim: width of one head; 0 means ``hidden_size // num_heads``.
      architecture: name in ``config.json``: ``LlamaForCausalLM``, ``Qwen2ForCausalLM`` (biases on
        q, k, v) or ``Qwen3ForCausalLM`` (RMS norm on q and k).
      norm_eps: ε of the RMS norms.
      rope_theta, rope_scaling: rotary base and :class:`RopeScaling` or None.
      layer_windows: for each layer, how many tokens back a query sees, itself included (a sliding
        window); 0 means all. Empty means all in every layer.
      tie_embeddings: the head is the embedding matrix.
      max_position_embeddings: context length; information only.
      initializer_range: standard deviation of fresh weights.
      bos_token_id, eos_token_ids, pad_token_id: special ids (None / empty where the file has none).

    Raises:
      ValueError: sizes that do not divide or are not positive, windows that do not fit, or an
        unknown architecture.

    >>> config = DecoderConfig(
    ...     vocab_size=16, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4
    ... )
    >>> config.head_dim, config.num_kv_heads
    (8, 4)
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0
    head_dim: int = 0
    architecture: str = "LlamaForCausalLM"
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    layer_windows: tuple[int, ...] = ()
    tie_embeddings: bool = True
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.architecture not in _FAMILIES:
            raise unsupported("architectures", self.architecture, ", ".join(_FAMILIES))
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if not self.head_dim and self.num_heads > 0:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"config: hidden_size={self.hidden_size} is not divisible by "
                    f"num_heads={self.num_heads}; give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*sizes, "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise ValueError(f"config: {name}={value!r}; it must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config: num_heads={self.num_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"config: head_dim={self.head_dim}; rotary positions need it even")
        found = windows.checked(self.layer_windows, self.architecture, self.num_layers)
        object.__setattr__(self, "layer_windows", found)

    @property
    def windows(self) -> tuple[int, ...] | None:
        """Each layer's window with a number past every length for "all"; None without windows."""
        return tuple(window or windows.ALL for window in self.layer_windows) or None

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v carry a bias."""
        return _FAMILIES[self.architecture][1]

    @property
    def qk_norm(self) -> bool:
        """Whether each head's q and k are RMS-normalised."""
        return _FAMILIES[self.architecture][2]

    @classmethod
    def from_hf(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> DecoderConfig:
        """Read a Hugging Face configuration.

        Args:
          source: the dict of a ``config.json``, the file, or its folder (then a
            ``generation_config.json`` beside it adds its stop ids). Rotary settings are understood
            in the old spelling (``rope_theta``, ``rope_scaling``) and the new one
            (``rope_parameters``).

        Returns:
          The :class:`DecoderConfig`.

        Raises:
          ValueError: no such file, a required field is missing, or the model needs something this
            decoder has not; the message names the field, its value and what is supported.

        >>> DecoderConfig.from_hf(
        ...     {
        ...         "architectures": ["LlamaForCausalLM"],
        ...         "vocab_size": 16,
        ...         "hidden_size": 8,
        ...         "intermediate_size": 16,
        ...         "num_hidden_layers": 1,
        ...         "num_attention_heads": 2,
        ...         "hidden_act": "silu",
        ...     }
        ... ).num_kv_heads
        2
        """
        raw = dict(source) if isinstance(source, Mapping) else _read_json(source)
        architecture = _architecture(raw)
        _check_features(raw, architecture)
        theta, scaling = _rope(raw)
        heads, layers = (_required(raw, f"num_{n}") for n in ("attention_heads", "hidden_layers"))
        head_dim = raw.get("head_dim")
        if head_dim is None and architecture == "Qwen3ForCausalLM":
            head_dim = _QWEN3_HEAD_DIM
        if architecture != "LlamaForCausalLM":
            _required(raw, "num_key_value_heads")
        return cls(
            vocab_size=_required(raw, "vocab_size"),
            hidden_size=_required(raw, "hidden_size"),
            intermediate_size=_required(raw, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=head_dim or 0,
            architecture=architecture,
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            layer_windows=windows.from_hf(raw, architecture, layers),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
            initializer_range=float(raw.get("initializer_range", 0.02)),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=_ids(raw.get("eos_token_id")),
            pad_token_id=raw.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The dict of a ``config.json`` that :meth:`from_hf` and transformers read back.

        Returns:
          Plain JSON values; ``from_hf(config.to_hf()) == config``.

        >>> config = DecoderConfig(
        ...     vocab_size=16, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4
        ... )
        >>> DecoderConfig.from_hf(config.to_hf()) == config
        True
        """
        model_type, qkv_bias, _ = _FAMILIES[self.architecture]
        rope: dict[str, Any] | None = None
        if self.rope_scaling is not None:
            keys = _LLAMA3_KEYS if self.rope_scaling.kind == "llama3" else ("factor",)
            rope = {"rope_type": self.rope_scaling.kind}
            rope |= {key: getattr(self.rope_scaling, key) for key in keys}
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        out = {
            "architectures": [self.architecture],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": rope,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
            "dtype": "float32",
        }
        if not qkv_bias:
            out["attention_bias"] = False
        return out | windows.to_hf(self.layer_windows)


def _read_json(source: str | os.PathLike[str]) -> dict[str, Any]:
    path = Path(source).expanduser()
    folder = path if path.is_dir() else None
    if folder is not None:
        path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"config: no file {str(path)!r}; give a folder with a config.json")
    raw = _parse(path)
    generation = folder / "generation_config.json" if folder is not None else None
    if generation is not None and generation.is_file():
        extra = _parse(generation)
        stops = dict.fromkeys((*_ids(raw.get("eos_token_id")), *_ids(extra.get("eos_token_id"))))
        raw["eos_token_id"] = list(stops)
        for key in ("bos_token_id", "pad_token_id"):
            if raw.get(key) is None:
                raw[key] = extra.get(key)
    return raw


def _parse(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"config: {str(path)!r} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"config: {str(path)!r} holds {type(raw).__name__}, not an object")
    return raw


def _required(raw: Mapping[str, Any], key: str) -> int:
    if raw.get(key) is None:
        raise ValueError(f"config: {key} is missing; the file has {sorted(raw)}")
    return int(raw[key])


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, (list, tuple)) else (int(value),)


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    if not names:
        by_type = {model_type: name for name, (model_type, _, _) in _FAMILIES.items()}
        if raw.get("model_type") not in by_type:
            raise unsupported("model_type", raw.get("model_type"), ", ".join(by_type))
        return by_type[raw["model_type"]]
    if names[0] not in _FAMILIES:
        raise unsupported("architectures", names[0], ", ".join(_FAMILIES))
    return names[0]


def _check_features(raw: Mapping[str, Any], architecture: str) -> None:
    """Refuse what would silently give other logits."""
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise unsupported("hidden_act", raw["hidden_act"], "silu")
    bias = _FAMILIES[architecture][1]
    if bool(raw.get("attention_bias", bias)) != bias:
        raise unsupported("attention_bias", raw["attention_bias"], f"{bias} for {architecture}")
    if raw.get("mlp_bias"):
        raise unsupported("mlp_bias", raw["mlp_bias"], "False")
    if raw.get("quantization_config") is not None:
        raise unsupported("quantization_config", raw["quantization_config"], "plain weights")


def _rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The rotary base and scaling in either spelling."""
    field = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    rope: Mapping[str, Any] = raw.get(field) or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise unsupported(field, dict(rope), "one setting for all layers")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise unsupported("partial_rotary_factor", partial, "1.0")
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise unsupported(f"{field}.rope_type", kind, "default, linear, llama3")
    keys = _LLAMA3_KEYS if kind == "llama3" else ("factor",)
    values = dict(rope)
    if kind == "llama3" and values.get("original_max_position_embeddings") is None:
        values["original_max_position_embeddings"] = raw.get("original_max_position_embeddings")
    missing = [key for key in keys if values.get(key) is None]
    if missing:
        raise ValueError(f"config: {field} of type {kind!r} lacks {missing}; it has {dict(rope)}")
    return theta, RopeScaling(kind=kind, **{key: values[key] for key in keys})

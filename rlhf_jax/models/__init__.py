"""Models: one decoder described by a config, files in and out, adapters for anybody's module."""

from rlhf_jax.models.adapters import from_linen, from_nnx
from rlhf_jax.models.cache import Cache, Prefix, Quantized, cache_axes, extend_cache
from rlhf_jax.models.config import DecoderConfig, RopeScaling
from rlhf_jax.models.decoder import Decoder
from rlhf_jax.models.gguf import GGUF, read_gguf
from rlhf_jax.models.hf import load, load_tokenizer, resolve, save
from rlhf_jax.models.hf_tensors import from_hf_tensors, to_hf_tensors
from rlhf_jax.models.lora import LoRA
from rlhf_jax.models.lora_files import load_adapters, save_adapters
from rlhf_jax.models.smollm2 import convert_gguf, fetch_smollm2, tokenizer_json
from rlhf_jax.models.token_bytes import token_bytes
from rlhf_jax.models.value import ValueModel, ValueOutput, load_value_model

__all__ = [
    "GGUF",
    "Cache",
    "Decoder",
    "DecoderConfig",
    "LoRA",
    "Prefix",
    "Quantized",
    "RopeScaling",
    "ValueModel",
    "ValueOutput",
    "cache_axes",
    "convert_gguf",
    "extend_cache",
    "fetch_smollm2",
    "from_hf_tensors",
    "from_linen",
    "from_nnx",
    "load",
    "load_adapters",
    "load_tokenizer",
    "load_value_model",
    "read_gguf",
    "resolve",
    "save",
    "save_adapters",
    "to_hf_tensors",
    "token_bytes",
    "tokenizer_json",
]

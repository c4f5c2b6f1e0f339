"""Parameters as tensors named and shaped as in Hugging Face files, and back.

Tensors keep the file's order ``[out, in]``; layers are stacked, heads have an axis of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from rlhf_jax.models.config import DecoderConfig
from rlhf_jax.models.decoder import Decoder, Params

__all__ = ["from_hf_tensors", "to_hf_tensors"]

_SHELL = {
    "model.embed_tokens.weight": ("embed", "weight"),
    "model.norm.weight": ("final_norm", "scale"),
    "lm_head.weight": ("head", "weight"),
}
_LAYER = {
    "input_layernorm.weight": ("attn_norm", "scale"),
    "self_attn.q_proj.weight": ("attn", "q", "weight"),
    "self_attn.k_proj.weight": ("attn", "k", "weight"),
    "self_attn.v_proj.weight": ("attn", "v", "weight"),
    "self_attn.o_proj.weight": ("attn", "o", "weight"),
    "self_attn.q_proj.bias": ("attn", "q", "bias"),
    "self_attn.k_proj.bias": ("attn", "k", "bias"),
    "self_attn.v_proj.bias": ("attn", "v", "bias"),
    "self_attn.q_norm.weight": ("attn", "q_norm", "scale"),
    "self_attn.k_norm.weight": ("attn", "k_norm", "scale"),
    "post_attention_layernorm.weight": ("mlp_norm", "scale"),
    "mlp.gate_proj.weight": ("mlp", "gate", "weight"),
    "mlp.up_proj.weight": ("mlp", "up", "weight"),
    "mlp.down_proj.weight": ("mlp", "down", "weight"),
}
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|self_attn\.(masked_)?bias$")


def _get(tree: Any, path: tuple[str, ...]) -> Any:
    """The leaf at `path`, or None where this kind of model has none."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _flat_shape(shape: tuple[int, ...], path: tuple[str, ...], config: DecoderConfig) -> tuple:
    """The two-dimensional shape in the file of a parameter of this shape."""
    if path[:1] == ("attn",) and path[-1] in ("weight", "bias"):
        width = config.head_dim
        if path[1] == "o":  # [D, N, H] → [D, N·H]
            return (shape[0], shape[1] * width)
        return (shape[0] * width, *shape[2:])  # [N, H, D] → [N·H, D]
    return shape


def _expected(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor that a file of this model holds."""
    shapes, config = model.shapes(), model.config
    names = {
        name: leaf.shape
        for name, path in _SHELL.items()
        if (leaf := _get(shapes, path)) is not None
    }
    block = shapes["layers"][0]
    for name, path in _LAYER.items():
        if (leaf := _get(block, path)) is not None:
            flat = _flat_shape(leaf.shape[1:], path, config)
            names |= {f"model.layers.{i}.{name}": flat for i in range(config.num_layers)}
    return names


def check_names(found: Mapping[str, tuple[int, ...]], model: Decoder, where: str) -> None:
    """One error that lists every missing, extra and misshapen tensor."""
    expected = _expected(model)
    ignored = {name for name in found if _IGNORED.search(name)}
    if model.config.tie_embeddings:
        ignored.add("lm_head.weight")  # a duplicate of the embedding
    missing = [f"  missing {n} {list(s)}" for n, s in expected.items() if n not in found]
    extra = [
        f"  extra {n} {list(s)}" for n, s in found.items() if n not in expected and n not in ignored
    ]
    wrong = [
        f"  shape of {n}: file {list(found[n])}, config {list(s)}"
        for n, s in expected.items()
        if n in found and tuple(found[n]) != tuple(s)
    ]
    problems = [*missing, *extra, *wrong]
    if problems:
        listed = "\n".join(problems[:60])
        more = f"\n  … and {len(problems) - 60} more" if len(problems) > 60 else ""
        raise ValueError(
            f"weights in {where} do not fit {model.config.architecture} of its config "
            f"({len(missing)} missing, {len(extra)} extra, {len(wrong)} of another shape):\n"
            f"{listed}{more}"
        )


def from_hf_tensors(
    model: Decoder,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    *,
    param_dtype: Any = np.float32,
    where: str = "the file",
) -> Params:
    """Parameters from tensors named as in Hugging Face files.

    Args:
      model: says which tensors there must be.
      shapes: name → shape of the tensors that there are.
      read: name → array ``[out, in]``; called once for each.
      param_dtype: dtype of the result.
      where: named in errors.

    Returns:
      The parameter dict of ``model`` with NumPy leaves.

    Raises:
      ValueError: missing, extra or misshapen tensors, all listed. Only rotary ``inv_freq``
        buffers, attention-mask buffers and the duplicate ``lm_head.weight`` of a tied model may
        be extra.

    >>> import rlhf_jax as rl
    >>> config = rl.models.DecoderConfig(
    ...     vocab_size=4, hidden_size=4, intermediate_size=4, num_layers=1, num_heads=2
    ... )
    >>> rl.models.from_hf_tensors(rl.models.Decoder(config), {}, {}.get)
    Traceback (most recent call last):
    ...
    ValueError: weights in the file do not fit LlamaForCausalLM of its config (11 missing, ...
    """
    check_names(shapes, model, where)
    template = model.shapes()
    dtype = np.dtype(param_dtype)
    params: Params = {"layers": tuple({} for _ in model.stacks)}

    def put(tree: dict, path: tuple[str, ...], value: np.ndarray) -> None:
        for key in path[:-1]:
            tree = tree.setdefault(key, {})
        tree[path[-1]] = value

    for name, path in _SHELL.items():
        if _get(template, path) is not None:
            put(params, path, np.asarray(read(name)).astype(dtype))
    for name, path in _LAYER.items():
        start = 0
        for stack, target in zip(template["layers"], params["layers"], strict=True):
            if (leaf := _get(stack, path)) is None:
                continue
            stacked = np.empty(leaf.shape, dtype)
            for i in range(len(stacked)):
                stacked[i] = read(f"model.layers.{start + i}.{name}").reshape(leaf.shape[1:])
            start += len(stacked)
            put(target, path, stacked)
    return params


def to_hf_tensors(model: Decoder, params: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters as tensors named as in Hugging Face files; a tied head is left out.

    Args:
      model: the description of ``params``.
      params: the parameter dict, of any stacking.

    Returns:
      Pairs (name, array ``[out, in]``), in the parameters' dtype.

    >>> import jax, rlhf_jax as rl
    >>> config = rl.models.DecoderConfig(
    ...     vocab_size=4, hidden_size=4, intermediate_size=4, num_layers=1, num_heads=2
    ... )
    >>> model = rl.models.Decoder(config)
    >>> dict(rl.models.to_hf_tensors(model, model.init(jax.random.key(0)))).keys() >= {
    ...     "model.embed_tokens.weight",
    ...     "model.layers.0.self_attn.q_proj.weight",
    ... }
    True
    """
    for name, path in _SHELL.items():
        if (leaf := _get(params, path)) is not None:
            yield name, np.asarray(leaf)
    index = 0
    for stack in params["layers"]:
        leaves = {n: (p, _get(stack, p)) for n, p in _LAYER.items()}
        present = {n: (p, np.asarray(leaf)) for n, (p, leaf) in leaves.items() if leaf is not None}
        count = len(next(iter(present.values()))[1])
        for i in range(count):
            for name, (path, leaf) in present.items():
                flat = _flat_shape(leaf.shape[1:], path, model.config)
                yield f"model.layers.{index + i}.{name}", leaf[i].reshape(flat)
        index += count

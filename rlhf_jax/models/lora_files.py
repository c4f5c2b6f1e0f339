"""LoRA adapters as folders of the PEFT library, which read ours as we read theirs.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors`` with tensors like
``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`` (A ``[r, in]``, B ``[out, r]``).
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models.decoder import Decoder
from rlhf_jax.models.hf import _dump, _write
from rlhf_jax.models.hf_tensors import _LAYER
from rlhf_jax.models.lora import GROUPS, LoRA
from rlhf_jax.models.tensor_files import check_tensors, open_tensors
from rlhf_jax.partition import path_name

Tree = dict[str, Any]

__all__ = ["load_adapters", "save_adapters"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model.model.layers"
_MODULES = {
    path[1]: name.removesuffix(".weight")
    for name, path in _LAYER.items()
    if path[-1] == "weight" and path[1] in GROUPS
}
"""Projection → its module in a layer of a Hugging Face model, e.g. q → self_attn.q_proj."""
_LEAVES = {"a": "lora_A", "b": "lora_B"}

# Fields that change what adapters compute, with the values under which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    # Other ways to begin (pissa, olora, …) change the base too, which is not in the folder.
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "layers_pattern": (None, "layers", ["layers"], []),
    "peft_type": ("LORA",),
}
_USED = {"r", "lora_alpha", "target_modules", "layers_to_transform", "use_rslora"}
# Where it came from and how it was trained: nothing that a forward pass without dropout sees.
_TOLD = {
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
}


def load_adapters(
    path: str | os.PathLike[str], model: Decoder, *, param_dtype: Any = jnp.float32
) -> tuple[LoRA, Tree]:
    """Load adapters that PEFT or :func:`save_adapters` wrote.

    Args:
      path: the folder.
      model: the decoder that is adapted; the adapters follow its stacks.
      param_dtype: dtype of A and B.

    Returns:
      ``(lora, adapters)`` for :meth:`LoRA.merge`. Dropout is not taken over: training here has
      none.

    Raises:
      ValueError: no such files, a field of the config that would change the result and is not
        supported (DoRA, biases, ranks per layer, …: all are listed), or tensors that do not fit:
        missing, extra and misshapen ones are all listed.

    >>> import rlhf_jax as rl
    >>> config = rl.models.DecoderConfig(
    ...     vocab_size=4, hidden_size=4, intermediate_size=4, num_layers=1, num_heads=2
    ... )
    >>> load_adapters("no/such/folder", rl.models.Decoder(config))
    Traceback (most recent call last):
    ...
    ValueError: adapters: folder 'no/such/folder' has no adapter_config.json
    """
    folder = Path(path).expanduser()
    lora = _described(folder, model)
    if not (folder / _WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        hint = " (it has adapter_model.bin; pickled weights are never read)" if pickled else ""
        raise ValueError(f"adapters: folder {str(folder)!r} has no {_WEIGHTS}{hint}")
    found, read = open_tensors([folder / _WEIGHTS], what="adapters")
    shapes = lora.shapes(model)
    expected = {}
    for where, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        names, flat = _places(where, leaf, model)
        expected |= dict.fromkeys(names, flat)
    check_tensors(
        found,
        expected,
        f"adapters in {str(folder)!r} do not fit their config and {model.config.architecture}",
    )

    def stacked(where: Any, leaf: Any) -> jax.Array:
        names, _ = _places(where, leaf, model)
        layers = [np.asarray(read(name)).reshape(leaf.shape[1:]) for name in names]
        return jnp.asarray(np.stack(layers).astype(np.dtype(param_dtype)))

    return lora, jax.tree_util.tree_map_with_path(stacked, shapes)


def save_adapters(
    path: str | os.PathLike[str],
    model: Decoder,
    lora: LoRA,
    adapters: Tree,
    *,
    base: str | None = None,
    dtype: Any = None,
) -> Path:
    """Write a folder that PEFT's ``PeftModel.from_pretrained`` and :func:`load_adapters` read.

    Args:
      path: the folder; made when it is not there.
      model: the decoder that is adapted.
      lora: the description of ``adapters``.
      adapters: the adapter tree, stacked as the model is.
      base: name or folder of the base model, noted in the config.
      dtype: dtype in the file; None keeps the adapters'.

    Returns:
      The folder.

    Raises:
      ValueError: adapters that are not those that ``lora`` describes.

    >>> import jax, tempfile, rlhf_jax as rl
    >>> config = rl.models.DecoderConfig(
    ...     vocab_size=4, hidden_size=4, intermediate_size=4, num_layers=1, num_heads=2
    ... )
    >>> model, lora = rl.models.Decoder(config), rl.models.LoRA(rank=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_adapters(folder, model, lora, lora.init(jax.random.key(0), model))
    ...     loaded, _ = load_adapters(folder, model)
    >>> loaded == lora
    True
    """
    from safetensors.numpy import save_file

    given, expected = (
        {path_name(at): leaf.shape for at, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (adapters, lora.shapes(model))
    )
    check_tensors(given, expected, "adapters: they are not those of this LoRA and model")
    tensors = {}
    for where, leaf in jax.tree_util.tree_leaves_with_path(adapters):
        names, flat = _places(where, leaf, model)
        whole = np.asarray(leaf).astype(np.dtype(dtype or leaf.dtype))
        tensors |= {n: np.ascontiguousarray(whole[i].reshape(flat)) for i, n in enumerate(names)}
    folder = Path(path).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / _WEIGHTS, lambda file: save_file(tensors, file, {"format": "pt"}))
    _write(folder / _CONFIG, lambda file: _dump(file, _config(lora, base)))
    return folder


def _places(path: tuple[Any, ...], leaf: Any, model: Decoder) -> tuple[list[str], tuple[int, int]]:
    """Names in the file of a stacked leaf's layers, and the shape of each there."""
    _, stack, _, target, side = path_name(path).split("/")
    first = sum(model.stacks[: int(stack)])
    names = [
        f"{_PREFIX}.{first + i}.{_MODULES[target]}.{_LEAVES[side]}.weight"
        for i in range(leaf.shape[0])
    ]
    axes = leaf.shape[1:]
    cut = 1 if side == "a" else -1
    return names, (math.prod(axes[:cut]), math.prod(axes[cut:]))


def _config(lora: LoRA, base: str | None) -> dict[str, Any]:
    """The ``adapter_config.json`` of a description."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "use_rslora": lora.rank_stabilized,
        "target_modules": [_MODULES[target].rpartition(".")[2] for target in lora.targets],
        "layers_to_transform": list(lora.layers) or None,
        "init_lora_weights": True if lora.init_a == "kaiming" else lora.init_a,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _described(folder: Path, model: Decoder) -> LoRA:
    """The description in a folder's config, or an error that lists what is not supported."""
    file = folder / _CONFIG
    if not file.is_file():
        raise ValueError(f"adapters: folder {str(folder)!r} has no {_CONFIG}")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"adapters: {str(file)!r} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"adapters: {str(file)!r} holds {type(raw).__name__}, not an object")
    targets, problems = _targets(raw.get("target_modules"))
    for name in ("r", "lora_alpha"):
        if isinstance(raw.get(name), bool) or not isinstance(raw.get(name), (int, float)):
            problems.append(f"{name}={raw.get(name)!r} (a number)")
    for name, value in raw.items():
        neutral = _NEUTRAL.get(name)
        if name in _USED | _TOLD or (value in neutral if neutral else not value):
            continue
        wanted = " or ".join(repr(v) for v in neutral) if neutral else "absent or empty"
        problems.append(f"{name}={value!r} ({wanted})")
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(
            f"adapters: {str(file)!r} has fields that are not supported (supported values):\n"
            f"{listed}"
        )
    layers = raw.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers or ()
    every = set(layers) >= set(range(model.config.num_layers))
    return LoRA(
        rank=raw["r"],
        alpha=raw["lora_alpha"],
        targets=targets,
        layers=() if every else tuple(layers),
        init_a="gaussian" if raw.get("init_lora_weights") == "gaussian" else "kaiming",
        rank_stabilized=bool(raw.get("use_rslora")),
    )


def _targets(names: Any) -> tuple[tuple[str, ...], list[str]]:
    """The projections that a config names, and what is wrong with it."""
    by_name = {module.rpartition(".")[2]: target for target, module in _MODULES.items()}
    by_name |= {module: target for target, module in _MODULES.items()}
    if not isinstance(names, list) or not names or not all(name in by_name for name in names):
        return (), [f"target_modules={names!r} (a list of {', '.join(list(by_name)[:7])})"]
    return tuple(by_name[name] for name in names), []

"""Hugging Face folders in and out: ``config.json``, safetensors weights and the tokenizer.

No pickle is ever read. The libraries for files, hub and tokenizers are imported when needed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models.config import DecoderConfig
from rlhf_jax.models.decoder import Decoder, Params
from rlhf_jax.models.hf_tensors import check_names, from_hf_tensors, to_hf_tensors

__all__ = ["load", "load_tokenizer", "resolve", "save"]

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SMOLLM2 = "smollm2-135m"


def resolve(name: str | os.PathLike[str]) -> Path:
    """The local folder of a model: a folder, ``"smollm2-135m"``, or a hub name ``owner/model``.

    Args:
      name: an existing folder as it is; ``"smollm2-135m"`` is fetched and converted on first use;
        ``owner/model`` is downloaded into (or found in) the hub's own cache.

    Returns:
      A folder with a ``config.json``.

    Raises:
      ValueError: no such folder, or the hub cannot give it.

    >>> resolve("no/such/folder")
    Traceback (most recent call last):
    ...
    ValueError: model: no folder 'no/such/folder'; give a folder with a config.json, a hub name...
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"model: folder {str(path)!r} has no config.json")
        return path
    if str(name).lower() == _SMOLLM2:
        from rlhf_jax.models.smollm2 import fetch_smollm2

        return fetch_smollm2()
    if not _HUB_NAME.fullmatch(str(name)):
        raise ValueError(
            f"model: no folder {str(name)!r}; give a folder with a config.json, a hub name "
            f"(owner/model) or {_SMOLLM2!r}"
        )
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(name), allow_patterns=_HUB_FILES))
    except Exception as error:  # offline, no such name, no access: many types, one meaning here
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ValueError(
            f"model: there is no folder {str(name)!r}, and the hub did not give it either "
            f"({type(error).__name__}: {reason})"
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: the shards of its index, or the single file."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        hint = f" (it has {others}; pickled weights are never read)" if others else ""
        raise ValueError(f"model: folder {str(folder)!r} has no model.safetensors{hint}")
    shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    files = [folder / shard for shard in shards]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ValueError(f"model: folder {str(folder)!r} lacks the shards {absent} of its index")
    return files


def load(
    name: str | os.PathLike[str],
    *,
    stacks: tuple[int, ...] | None = None,
    dtype: Any = jnp.float32,
    remat: str = "none",
    kv_dtype: Any = None,
    param_dtype: Any = jnp.float32,
    as_numpy: bool = False,
) -> tuple[Decoder, Params]:
    """Load a model from a folder, the hub, or ``"smollm2-135m"``.

    Args:
      name: as for :func:`resolve`.
      stacks: layers in each stack, e.g. ``(22, 8)``; None means one stack.
      dtype: compute dtype of the model.
      remat, kv_dtype: as for :class:`Decoder`.
      param_dtype: dtype of the parameters.
      as_numpy: leave the parameters on the host, for ``jax.device_put`` with shardings.

    Returns:
      ``(model, params)``.

    Raises:
      ValueError: no such model, a config that is not supported, or tensors that do not fit it:
        missing, extra and misshapen ones are all listed.

    >>> load("no/such/folder")
    Traceback (most recent call last):
    ...
    ValueError: model: no folder 'no/such/folder'; give a folder with a config.json, a hub name...
    """
    from safetensors import SafetensorError, safe_open

    folder = resolve(name)
    model = Decoder(
        DecoderConfig.from_hf(folder),
        stacks=stacks or (),
        dtype=dtype,
        remat=remat,
        kv_dtype=kv_dtype,
    )
    handles: dict[str, Any] = {}
    try:
        for file in _weight_files(folder):
            handle = safe_open(file, framework="numpy")
            handles |= dict.fromkeys(handle.keys(), handle)
    except SafetensorError as error:
        raise ValueError(f"model: {file.name} in {str(folder)!r} is damaged: {error}") from error  # pyright: ignore[reportPossiblyUnbound]
    shapes = {key: tuple(handle.get_slice(key).get_shape()) for key, handle in handles.items()}
    params = from_hf_tensors(
        model,
        shapes,
        lambda key: handles[key].get_tensor(key),
        param_dtype=param_dtype,
        where=repr(str(folder)),
    )
    return model, params if as_numpy else jax.tree.map(jnp.asarray, params)


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """Write through a temporary name, so that a half-written file never has the real one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save(
    path: str | os.PathLike[str],
    model: Decoder,
    params: Params,
    tokenizer: Any = None,
    *,
    dtype: Any = None,
) -> Path:
    """Write a Hugging Face folder that :func:`load` and transformers read.

    Args:
      path: the folder; made when it is not there.
      model: the description of ``params``.
      params: the parameter dict, of any stacking; ``model.safetensors`` holds all of it.
      tokenizer: its ``save_pretrained`` is called when given.
      dtype: dtype of the weights in the file; None keeps the parameters'.

    Returns:
      The folder.

    Raises:
      ValueError: parameters that do not fit the model, or a tokenizer with more ids than the model.

    >>> import jax, tempfile, rlhf_jax as rl
    >>> config = rl.models.DecoderConfig(
    ...     vocab_size=4, hidden_size=4, intermediate_size=4, num_layers=1, num_heads=2
    ... )
    >>> model = rl.models.Decoder(config)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = rl.models.save(folder, model, model.init(jax.random.key(0)))
    ...     loaded, _ = rl.models.load(folder)
    >>> loaded == model
    True
    """
    from safetensors.numpy import save_file

    if tokenizer is not None:
        _check_vocabulary(tokenizer, model.config)
    tensors = dict(to_hf_tensors(model, params))
    check_names({n: t.shape for n, t in tensors.items()}, model, "the parameters")
    if dtype is not None:
        tensors = {n: t.astype(np.dtype(dtype)) for n, t in tensors.items()}
    tensors = {n: np.ascontiguousarray(t) for n, t in tensors.items()}
    folder = Path(path).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    raw = {**config.to_hf(), "dtype": next(iter(tensors.values())).dtype.name}
    raw["torch_dtype"] = raw["dtype"]
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = {key: raw[key] for key in keys if raw[key] is not None}
    _write(folder / "model.safetensors", lambda p: save_file(tensors, p, {"format": "pt"}))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if generation:
        _write(folder / "generation_config.json", lambda p: _dump(p, generation))
    _write(folder / "config.json", lambda p: _dump(p, raw))
    return folder


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _check_vocabulary(tokenizer: Any, config: DecoderConfig) -> None:
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"tokenizer: it has {len(tokenizer)} ids, the model's vocabulary only "
            f"{config.vocab_size} (vocab_size of its config); they do not belong together"
        )


def load_tokenizer(name: str | os.PathLike[str], config: DecoderConfig | None = None) -> Any:
    """The tokenizer of a model folder, checked against the model's vocabulary.

    Args:
      name: as for :func:`resolve`.
      config: the model to check against; None means the folder's own ``config.json``.

    Returns:
      A transformers tokenizer.

    Raises:
      ValueError: no such folder, no tokenizer in it, or more ids than the model's vocabulary.

    >>> load_tokenizer("no/such/folder")
    Traceback (most recent call last):
    ...
    ValueError: model: no folder 'no/such/folder'; give a folder with a config.json, a hub name...
    """
    folder = resolve(name)
    if not any((folder / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ValueError(f"tokenizer: folder {str(folder)!r} has no tokenizer.json")
    # Without torch transformers advises to install it, which tokenizers have no use for.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers raises many types for one broken file
        raise ValueError(
            f"tokenizer: the one in {str(folder)!r} does not load ({type(error).__name__}: {error})"
        ) from error
    _check_vocabulary(tokenizer, config or DecoderConfig.from_hf(folder))
    return tokenizer

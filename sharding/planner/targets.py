"""What a plan is made for: devices that are not there, and models by name or configuration."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import re
from pathlib import Path
from typing import Any

import jax

import rlhf_jax as rl
from sharding.hardware import Chip, chip_of

__all__ = ["MODELS", "devices_of", "known_of", "model_of"]

_GQA: dict[str, Any] = dict(num_kv_heads=8, head_dim=128, tie_embeddings=False)
MODELS = {
    "llama3-8b": rl.models.DecoderConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        rope_theta=5e5,
        **_GQA,
    ),
    "qwen3-8b": rl.models.DecoderConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        rope_theta=1e6,
        norm_eps=1e-6,
        architecture="Qwen3ForCausalLM",
        **_GQA,
    ),
    "llama3-70b": rl.models.DecoderConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_layers=80,
        num_heads=64,
        rope_theta=5e5,
        **_GQA,
    ),
}
"""Shapes of models that are often asked for; any other comes as a ``config.json``."""

_SHAPE = re.compile(r"[a-z0-9]+:[1-9]\d*(x[1-9]\d*)*")


def model_of(name: str) -> rl.models.DecoderConfig:
    """A built-in model, or the one that a Hugging Face ``config.json`` (or its folder) describes.

    Raises:
      ValueError: no such name or file, or a model that the decoder cannot be.

    >>> model_of("llama3-70b").num_layers
    80
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    if not Path(name).expanduser().exists():
        raise ValueError(
            f"--model: no file or folder {name!r}, and no built-in model; give a config.json or "
            f"one of {', '.join(MODELS)}"
        )
    return rl.models.DecoderConfig.from_hf(name)


def _cpus(count: int) -> list[Any]:
    """So many host devices, made now if jax has not begun."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # jax runs already: take what there is
            jax.config.update("jax_num_cpu_devices", count)
    found = jax.devices("cpu")
    if len(found) < count:
        raise ValueError(
            f"topology: 'cpu:{count}', but jax has {len(found)} host devices; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return list(found[:count])


@functools.lru_cache(maxsize=8)
def _tpus(topology: str, slices: int) -> tuple[Any, ...]:
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"topology: {topology!r} needs libtpu, which is not installed (pip install "
            "'.[tpu-plan]'); cpu:8 plans for host devices without it"
        )
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    options = {"num_slices": slices} if slices > 1 else {}
    try:
        return tuple(topologies.get_topology_desc(topology, "tpu", **options).devices)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        if "lockfile" in reason:
            raise ValueError(
                "topology: another process has libtpu open, which allows one at a time; wait for it"
            ) from error
        raise ValueError(
            f"topology: the TPU compiler knows no {topology!r} ({reason[:160]}); e.g. v5e:4x4, "
            "v5e:16x16, v5p:4x4x4, v6e:8x8"
        ) from error


def devices_of(topology: str, slices: int = 1) -> list[Any]:
    """The devices of a slice (or several), as descriptions for the compiler.

    Args:
      topology: chip and shape, ``v5e:16x16``; ``cpu:8`` for host devices.
      slices: how many of them, joined by the data center's network.

    Returns:
      Device descriptions; host devices are real ones.

    Raises:
      ValueError: an unknown topology, or ``libtpu`` is missing or busy.

    >>> len(devices_of("cpu:1"))
    1
    """
    if slices < 1:
        raise ValueError(f"--slices: got {slices}; it must be at least 1")
    if not _SHAPE.fullmatch(topology):
        raise ValueError(
            f"topology: got {topology!r}; write chip and shape, e.g. v5e:16x16, v5p:4x4x4 or cpu:8"
        )
    chip_of(topology)
    config: Any = jax.config
    if not config.jax_platforms:  # else a host with libtpu would look for a TPU of its own
        jax.config.update("jax_platforms", "cpu")
    if topology.startswith("cpu:"):
        if slices > 1:
            raise ValueError("--slices: host devices are one slice; use a TPU topology")
        return _cpus(math.prod(map(int, topology.removeprefix("cpu:").split("x"))))
    return list(_tpus(topology, slices))


def known_of(topology: str, devices: list[Any]) -> Chip | None:
    """What one device of a topology can do: a chip, or the half that jax sees; None of CPUs."""
    chip = chip_of(topology)
    if chip is None:
        return None
    first = tuple(getattr(devices[0], "coords", ()))
    slice_of = getattr(devices[0], "slice_index", 0)
    parts = sum(
        tuple(getattr(d, "coords", ())) == first and getattr(d, "slice_index", 0) == slice_of
        for d in devices
    )
    return chip.split(max(1, parts))

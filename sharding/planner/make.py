"""Makes one plan: places the programs, compiles them, and gathers what they say."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import rlhf_jax as rl
import sharding
from sharding import hlo
from sharding._command import write_json
from sharding.hardware import Chip
from sharding.planner import measure, programs
from sharding.planner.targets import devices_of, known_of

__all__ = ["HOST_TRAFFIC", "PROGRAMS", "Request", "make", "placed_train"]

PROGRAMS = ("train", "prefill", "generate", "round")
HOST_TRAFFIC = "With remat offload: what moves to the host's memory and back is in no clock."


@functools.cache
def _sources() -> str:
    """A digest of the code that a plan compiles and counts with."""
    found = hashlib.sha256()
    for package in (rl, sharding):
        for file in sorted(Path(str(package.__file__)).parent.rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"no {package}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to plan.

    Args:
      name: what the model is called in the output.
      config: the model.
      topology, slices: the target, as :func:`sharding.planner.targets.devices_of` takes them.
      layout: how to lay it out.
      sizes: rows and lengths.
      remat: as for ``Decoder``.
      attention: kernel of the update; None takes splash attention on TPUs where it can do the
        model, else plain attention.
      programs: some of ``PROGRAMS``.
      whole_heads: heads that do not divide over their axis lie whole on every device.
    """

    name: str
    config: rl.models.DecoderConfig
    topology: str
    layout: sharding.Layout
    sizes: programs.Sizes
    slices: int = 1
    remat: str = "full"
    attention: str | None = None
    programs: tuple[str, ...] = ("train", "prefill", "round")
    whole_heads: bool = False

    def kernel(self) -> str:
        """The kernel of the update's attention."""
        if self.attention is not None:
            return self.attention
        fits = self.config.head_dim % 128 == 0 and self.config.windows is None
        fits = fits and not self.layout.tokens and not self.topology.startswith("cpu")
        return "splash" if fits else "xla"

    def key(self) -> str:
        """A name for this request's result on disk; other code, packages or flags give another."""
        settings = [os.environ.get(name, "") for name in ("LIBTPU_INIT_ARGS", "XLA_FLAGS")]
        versions = [_version(name) for name in ("jax", "jaxlib", "libtpu", "flax", "optax")]
        held = dataclasses.asdict(self)
        held["layout"]["rules"] = sorted(map(str, self.layout.rules.items()))
        text = json.dumps([_sources(), versions, settings, held], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def settled(request: Request, devices: Sequence[Any]) -> sharding.Layout:
    """The layout as it is placed: with heads that do not divide whole, where that is asked for."""
    if not request.whole_heads:
        return request.layout
    mesh = sharding.make_mesh(request.layout, devices)
    return sharding.fitted(request.layout, request.config, mesh)


def placed_train(request: Request, devices: Sequence[Any]) -> programs.Placed:
    """The update's shapes with their shardings.

    Raises:
      ValueError: what does not divide over the layout's axes, or a kernel that cannot.
    """
    return programs.place_train(
        request.config,
        settled(request, devices),
        devices,
        request.sizes,
        request.remat,
        request.kernel(),
    )


def _train(request: Request, devices: Sequence[Any], chip: Chip | None) -> dict[str, Any]:
    """The update: its figures, what it holds, how near its exchanges come to the least."""
    placed = placed_train(request, devices)
    params, state = (programs.on_a_device(tree) for tree in (placed.state.params, placed.state))
    held = {"parameters": params, "optimizer": state - params, "cache": 0}
    out: dict[str, Any] = {"held": held, "mesh": sharding.describe(placed.mesh), "state": state}
    if chip is not None and state > chip.granted:
        why = "not compiled: the state alone is larger than a device's memory"
        return out | {"figures": {"failed": why, "needs": state}}
    try:
        compiled = programs.compile_train(placed)
    except jax.errors.JaxRuntimeError as error:
        return out | {"figures": measure.refusal(error)}
    flops = measure.model_flops(request.config, request.sizes)["train"]
    found, module = measure.program_figures(compiled, placed.mesh, chip, flops=flops)
    least = measure.least_exchange(placed)
    total = sum(least.values())
    # where tokens are split too, activations move along the same axes as weights
    if total and not placed.layout.tokens:
        moved = measure.exchanged_weights(found["collectives"], placed.layout.rows)
        out["least exchange"] = least | {"measured": moved, "ratio": moved / total}
    found["updated in place"] = found["memory"]["aliased"] >= state
    found["largest logits"], found["all logits"] = _logits(placed, module)
    return out | {"figures": found}


def _logits(placed: programs.Placed, module: hlo.Module) -> tuple[int, int]:
    """Bytes of the largest piece of logits, and of all logits of a micro-batch on a device."""
    config, sizes, shape = placed.model.config, placed.sizes, dict(placed.mesh.shape)
    tensor, spread = shape.get("tensor", 1), 1
    for axis in placed.layout.rows:
        spread *= shape[axis]
    width = config.hidden_size
    # Whole, split, or the two bfloat16 halves of a float32 matrix side by side.
    widths = {factor * width // parts for factor in (1, 2) for parts in (1, spread, tensor)}
    pieces = measure.vocabulary_arrays(module, config.vocab_size, widths, tensor)
    rows = sizes.rows // sizes.micro_batches // spread
    everything = 4 * rows * (sizes.length - sizes.prompt) * config.vocab_size // tensor
    return 4 * max(pieces, default=0), everything


def _loop(module: hlo.Module) -> str:
    return hlo.outer_loop(module).body


def _generation(
    placed: programs.Rollout,
    name: str,
    chip: Chip | None,
    flops: dict[str, float],
) -> tuple[dict[str, Any], int]:
    """Figures of one of generation's programs, and the bytes of its cache on a device."""
    build: dict[str, Callable[[programs.Rollout], Any]] = {
        "prefill": programs.compile_prefill,
        "generate": programs.compile_generate,
        "round": programs.compile_round,
    }
    try:
        compiled = build[name](placed)
    except jax.errors.JaxRuntimeError as error:
        return measure.refusal(error), 0
    if name == "prefill":
        return measure.program_figures(compiled, placed.mesh, chip, flops=flops["prefill"])[0], 0
    found, module = measure.program_figures(
        compiled, placed.mesh, chip, flops=flops["token"], pick=_loop, dearest=False
    )
    loop = hlo.outer_loop(module)
    cache = (
        programs.generate_cache(placed)
        if name == "generate"
        else programs.engine_slots(placed).rows.cache
    )
    figures = measure.cache_figures(cache, module, loop)
    found["copied a token"] = figures["copied a token"]
    found["cache of all"] = figures["cache of all"]
    moved = hlo.carried_parameters(module, loop.body, "params")
    found["moved weights"] = [
        f"{one.kind} {one.shape} of {', '.join(one.sources)}" for one in moved
    ]
    found["with filters"] = measure.exchanges(module, placed.mesh, loop.body)
    return found, figures["cache"]


_COUNTED = {
    "train": "train step",
    "prefill": "prefill",
    "generate": "generate, a token",
    "round": "engine, a token",
}


def _remarks(request: Request, chip: Chip | None, found: dict[str, Any]) -> list[str]:
    lines = []
    if chip is None:
        lines.append(
            "Host devices: their memory, bandwidth and links are not known, so neither what fits "
            "nor a time. FLOPs, bytes and collectives are those of the CPU's compiler; a TPU's "
            "fuses otherwise, and chooses other collectives. For both: libtpu and a TPU topology."
        )
    elif chip.name == "v4":
        lines.append(
            "A device is half a v4 chip, as libtpu describes it; JAX on a real v4 joins the halves "
            "(megacore): half as many devices, each twice as large."
        )
    if any(one.get("seconds", {}).get("network", 0) is None for one in found.values()):
        lines.append("The network between slices is not documented: the estimate leaves it out.")
    kernels = sum(one.get("kernel flops", 0) for one in found.values())
    if kernels:
        lines.append(
            f"Of the FLOPs {kernels / 1e12:,.3f} T are those of splash attention, by formula: its "
            "kernels' work is not in the program's text."
        )
    if request.remat == "offload":
        lines.append(HOST_TRAFFIC)
    if request.remat == "none":
        lines.append("Weights are counted as gathered once in each pass, without remat too.")
    train = found.get("train", {})
    if train.get("updated in place") is False:
        lines.append("**The state is not updated in place.**")
    if train.get("largest logits", 0) > max(2**26, train.get("all logits", 0) / 4):
        size = train["largest logits"] / 2**30
        lines.append(f"**An array of {size:,.2f} GiB holds the logits of many tokens.**")
    padded = [
        one
        for figures in found.values()
        for one in figures.get("collectives", ())
        if one["kind"] == "all-reduce" and one["stands_for"] and one["received"] > 2**27
    ]
    if padded:
        size = sum(one["received"] for one in padded) / 2**30
        lines.append(
            f"{size:,.2f} GiB are received in all-reduces that stand for gathers or scatters, at "
            "twice their bytes: the compiler does so where a device's part of a weight is narrow "
            "(seen at 64 and at 128 columns). Split that axis over fewer devices."
        )
    return lines


def _beside(found: list[dict[str, Any]], state: int, chip: Chip | None) -> dict[str, Any]:
    """Generation beside the resident train state: a program that failed does not fit either."""
    peaks = [one["memory"]["peak"] for one in found if "memory" in one]
    out: dict[str, Any] = {"fits beside the state": None}
    if peaks:
        out["generation beside the state"] = max(peaks) + state
    if chip is not None:
        whole = len(peaks) == len(found)
        out["fits beside the state"] = whole and max(peaks) + state <= chip.granted
    return out


def make(request: Request, cache: Path | None = None) -> dict[str, Any]:
    """Compile what is asked for and say what it takes.

    Args:
      request: :class:`Request`.
      cache: a folder that keeps results; one that is there is not compiled again.

    Returns:
      Plain values for JSON.

    Raises:
      ValueError: an unknown or unavailable target, or sizes that do not divide over the layout.
    """
    file = cache / f"{request.key()}.json" if cache else None
    if file is not None:
        with contextlib.suppress(FileNotFoundError, ValueError):  # not there, or broken off
            return json.loads(file.read_text(encoding="utf-8"))
    devices = devices_of(request.topology, request.slices)
    chip = known_of(request.topology, devices)
    flops = measure.model_flops(request.config, request.sizes)
    found: dict[str, Any] = {}
    held: dict[str, Any] = {}
    out: dict[str, Any] = {}
    if "train" in request.programs:
        train = _train(request, devices, chip)
        found["train"], held["train"] = train.pop("figures"), train.pop("held")
        out |= train
    wanted = [name for name in request.programs if name != "train"]
    if wanted:
        layout = settled(request, devices)
        placed = programs.place_rollout(request.config, layout, devices, request.sizes)
        out["mesh"] = sharding.describe(placed.mesh)
        weights = programs.on_a_device(placed.params)
        for name in wanted:
            found[name], kept = _generation(placed, name, chip, flops)
            held[name] = {"parameters": weights, "optimizer": 0, "cache": kept}
    for name, one in found.items():
        one["counted"] = _COUNTED[name]
    if wanted and "state" in out:
        out |= _beside([found[name] for name in wanted], out["state"], chip)
    sizes = dataclasses.asdict(request.sizes)
    told = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items())
    result = {
        "model": request.name,
        "topology": request.topology,
        "slices": request.slices,
        "layout": request.layout.name,
        "devices": len(devices),
        "hbm": chip.hbm if chip else None,
        "chip": dataclasses.asdict(chip) if chip else None,
        "sizes": sizes,
        "remat": request.remat,
        "settings": f"jax {jax.__version__}; {told}; remat {request.remat}, attention "
        f"{request.kernel()}, float32 masters and AdamW moments, bfloat16 compute",
        "programs": found,
        "held": held,
        "remarks": _remarks(request, chip, found),
        **out,
    }
    # a failure that is not of memory may be gone the next time
    explained = all("needs" in one for one in found.values() if "failed" in one)
    if file is not None and explained:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, result)
    return result

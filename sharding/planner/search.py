"""Tries layouts × micro-batches × remat and ranks those that fit.

What cannot work is left out by arithmetic: rows or heads that do not divide, a state that is larger
than the memory, a state and the layers' inputs that are. The rest is put in the order of a rough
estimate, and the first of them are compiled.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sharding
from sharding.hardware import Chip
from sharding.planner import measure, programs
from sharding.planner.make import HOST_TRAFFIC, Request, make, placed_train
from sharding.planner.report import markdown, sized
from sharding.planner.targets import devices_of, known_of

__all__ = ["Candidate", "candidates", "ranked", "table"]

TENSOR, MICRO, REMAT = (2, 4, 8), (1, 2, 4), ("full", "dots")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way, before it is compiled.

    Args:
      request: what would be planned.
      state: bytes of masters and moments on a device.
      least: bytes that a device needs at the very least.
      rough: seconds by arithmetic: products, gathers and sums one after the other.
    """

    request: Request
    state: int
    least: int
    rough: float

    @property
    def told(self) -> str:
        """In words."""
        request = self.request
        sizes = "".join(f" {name} {size}" for name, size in request.layout.axes if size != -1)
        return (
            f"{request.layout.name}{sizes}, {request.sizes.micro_batches} micro-batches, remat "
            f"{request.remat}"
        )


def layouts(slices: int = 1) -> Iterator[sharding.Layout]:
    """Every named layout, those with a fixed tensor axis in several sizes."""
    for name, layout in sharding.LAYOUTS.items():
        if name == "single":
            continue
        if "slice" in dict(layout.axes) and slices > 1:
            layout = layout.with_sizes(slice=slices)
        if dict(layout.axes).get("tensor", -1) == -1:
            yield layout
        else:
            yield from (layout.with_sizes(tensor=size) for size in TENSOR)


def _kept(request: Request, shape: dict[str, int]) -> int:
    """Bytes of activations that a device's layers keep for the backward pass, at the least."""
    config, sizes, layout = request.config, request.sizes, request.layout
    if request.remat == "offload":  # they lie in the host's memory
        return 0
    spread = math.prod(shape[axis] for axis in layout.rows + layout.tokens)
    tokens = sizes.rows // sizes.micro_batches * sizes.length // spread
    width = config.hidden_size
    if request.remat == "dots":  # the outputs of all products but the last
        made = config.head_dim * (config.num_heads + 2 * config.num_kv_heads)
        width += (made + 2 * config.intermediate_size) // shape.get("tensor", 1) + width
    return 2 * config.num_layers * tokens * width


def _rough(request: Request, placed: programs.Placed, chip: Chip) -> float:
    config, sizes, shape = request.config, request.sizes, dict(placed.mesh.shape)
    again = {"none": 0.0, "attention": 0.1, "dots": 0.1, "full": 1 / 3, "offload": 1 / 3}
    flops = measure.model_flops(config, sizes)["train"] * (1 + again[request.remat])
    devices = placed.mesh.devices.size
    gathered = sum(measure.least_exchange(placed).values())
    tensor = shape.get("tensor", 1)
    parts = math.prod(shape[axis] for axis in placed.layout.rows)
    summed = 2 * sizes.rows // parts * sizes.length * config.hidden_size * config.num_layers
    # two sums a layer forward, one more when computed again, two backward; an all-reduce is double
    exchanged = gathered + 2 * 5 * summed * (tensor - 1) / tensor
    return flops / devices / chip.flops + exchanged / (chip.ici / 2)


def _candidate(request: Request, devices: Sequence[Any], chip: Chip) -> Candidate:
    """One way with its arithmetic.

    Raises:
      ValueError: it cannot work.
    """
    placed = placed_train(request, devices)
    state = programs.on_a_device(placed.state)
    least = state + _kept(request, dict(placed.mesh.shape))
    if least > chip.granted:
        raise ValueError(f"needs at least {sized(least)} of {sized(chip.granted)} GiB")
    rough = _rough(request, placed, chip)
    return Candidate(request=request, state=state, least=least, rough=rough)


def candidates(
    base: Request,
    devices: Sequence[Any],
    chip: Chip,
    micro: Sequence[int] = MICRO,
    remat: Sequence[str] = REMAT,
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """All that may fit, the most promising first, and what was left out with its reason.

    Args:
      base: a request; its layout, micro-batches and remat are what varies.
      devices: of its target.
      chip: what one of them can do.
      micro: numbers of micro-batches.
      remat: policies.
    """
    found, left_out = [], []
    for layout in layouts(base.slices):
        for parts in micro:
            if base.sizes.rows % parts:
                left_out.append((f"{parts} micro-batches", f"{base.sizes.rows} rows"))
                continue
            sizes = dataclasses.replace(base.sizes, micro_batches=parts)
            for policy in remat:
                request = dataclasses.replace(base, layout=layout, sizes=sizes, remat=policy)
                try:
                    found.append(_candidate(request, devices, chip))
                except ValueError as error:
                    told = Candidate(request=request, state=0, least=0, rough=0).told
                    left_out.append((told, str(error)))
    return sorted(found, key=lambda one: (one.rough, one.least)), left_out


def ranked(
    base: Request,
    *,
    cache: Path | None = None,
    most: int = 8,
    minutes: float = 25.0,
    tell: Callable[[str], None] = print,
    **choices: Sequence[Any],
) -> dict[str, Any]:
    """Compile the most promising and rank those that fit by estimated time.

    Args:
      base: a request; see :func:`candidates`.
      cache: as for :func:`sharding.planner.make.make`.
      most: how many to compile.
      minutes: begin no other program after so long.
      tell: is told of the progress.
      **choices: ``micro`` and ``remat``, as for :func:`candidates`.

    Returns:
      ``ranked`` (plans that fit, best first), ``misfits`` (compiled, do not fit), ``waiting`` (not
      compiled) and ``left out`` (with reasons).

    Raises:
      ValueError: a target of which nothing is known.
    """
    devices = devices_of(base.topology, base.slices)
    chip = known_of(base.topology, devices)
    if chip is None:
        raise ValueError(f"--search: of {base.topology!r} neither memory nor speed is known")
    base = dataclasses.replace(base, programs=("train",))
    found, left_out = candidates(base, devices, chip, **choices)
    tell(f"{len(found)} ways may fit, {len(left_out)} are left out by arithmetic")
    begun, done, waiting = time.monotonic(), [], []
    for candidate in found:
        if len(done) >= most or time.monotonic() - begun > 60 * minutes:
            waiting.append(candidate)
            continue
        plan = make(candidate.request, cache)
        train = plan["programs"]["train"]
        done.append({"told": candidate.told, "rough": candidate.rough, "plan": plan})
        spent = time.monotonic() - begun
        fits = f"{1e3 * train['estimate']:,.0f} ms" if train.get("fits") else "does not fit"
        tell(f"{spent:6.0f} s  {candidate.told}: {fits}")

    def order(one: dict[str, Any]) -> tuple[float, float]:
        train = one["plan"]["programs"]["train"]
        return train["estimate"], train["without overlap"]

    fits = [one for one in done if one["plan"]["programs"]["train"].get("fits")]
    return {
        "model": base.name,
        "topology": base.topology,
        "slices": base.slices,
        "ranked": sorted(fits, key=order),
        "misfits": [one for one in done if one not in fits],
        "waiting": [{"told": one.told, "rough": one.rough} for one in waiting],
        "left out": [{"told": told, "why": why} for told, why in left_out],
        "minutes": (time.monotonic() - begun) / 60,
    }


def table(found: dict[str, Any]) -> str:
    """The ranking in markdown."""
    rows = []
    for place, one in enumerate(found["ranked"], 1):
        train = one["plan"]["programs"]["train"]
        rows.append(
            (
                *(f"{place}. {one['told']}", sized(train["memory"]["peak"])),
                *(f"{1e3 * train[name]:,.0f}" for name in ("estimate", "without overlap")),
                *(train["bound by"], f"{train['estimated mfu']:.2f}"),
            )
        )
    header = ("way", "peak, GiB a device", "estimate, ms", "without overlap", "bound by")
    lines = [
        f"## {found['model']} on {found['topology']}: ways that fit, best first",
        markdown((*header, "estimated MFU"), rows) if rows else "None of those compiled fits.",
    ]
    for one in found["misfits"]:
        train = one["plan"]["programs"]["train"]
        why = train.get("failed") or f"peak {sized(train['memory']['peak'])} GiB"
        lines.append(f"- Does not fit: {one['told']} ({why[:160]})")
    lines += [
        f"- Not compiled: {one['told']} (roughly {1e3 * one['rough']:,.0f} ms)"
        for one in found["waiting"]
    ]
    lines.append(f"- Left out by arithmetic: {len(found['left out'])} (reasons in --json).")
    if any("remat offload" in one["told"] for one in found["ranked"]):
        lines.append(f"- {HOST_TRAFFIC}")
    lines.append(f"- {found['minutes']:.1f} minutes.")
    return "\n\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:])

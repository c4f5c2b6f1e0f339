"""From compiled programs to figures: memory, work, exchanges, time.

All figures are of one device, which is one chip on most TPUs and half of one on v4 and tpu7x.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import rlhf_jax as rl
from sharding import hlo
from sharding.hardware import Chip, Clocks
from sharding.hlo import costs
from sharding.hlo.groups import axes_of, groups_of
from sharding.planner import programs

__all__ = [
    "cache_figures",
    "clocks",
    "exchanged_weights",
    "exchanges",
    "least_exchange",
    "model_flops",
    "program_figures",
    "refusal",
    "vocabulary_arrays",
]

MEMORY = {  # what the compiler says of a program's memory
    "arguments": "argument_size_in_bytes",
    "output": "output_size_in_bytes",
    "aliased": "alias_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "peak": "peak_memory_in_bytes",
}
_REFUSED = (  # what is needed and what there is, as the compiler has said it
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def memory(compiled: Any, *, named: bool = True) -> dict[str, int]:
    """Bytes on one device, by the compiler's plan.

    Args:
      compiled: the program.
      named: take the peak that the compiler names. The CPU's leaves temporaries out of it; then the
        peak is arguments, outputs that are not among them, and temporaries together.
    """
    plan = compiled.memory_analysis()
    found = {name: int(getattr(plan, field, 0)) for name, field in MEMORY.items()}
    if not named:
        fresh = found["output"] - found["aliased"]
        found["peak"] = found["arguments"] + fresh + found["temporaries"]
    return found


def refusal(error: Exception) -> dict[str, Any]:
    """Why a program does not compile, and the bytes that it would need, if that is the reason."""
    text = str(error)
    needs = next((told for known in _REFUSED if (told := known.search(text))), None)
    found: dict[str, Any] = {"failed": text.splitlines()[0][:300] if text else repr(error)}
    if needs:
        found["needs"] = int(float(needs[1]) * _UNITS[needs[2]])
        found["of"] = int(float(needs[3]) * _UNITS[needs[4]])
    return found


def _between_slices(mesh: Any) -> tuple[str, ...]:
    """The mesh axes along which devices lie in other slices."""
    slices = np.vectorize(lambda device: getattr(device, "slice_index", None) or 0)(mesh.devices)
    return tuple(
        name
        for axis, name in enumerate(mesh.axis_names)
        if (slices != slices.take([0], axis=axis)).any()
    )


def exchanges(
    module: hlo.Module, mesh: Any, computation: str | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Collectives by kind and mesh axes, largest first.

    Args:
      module: from :func:`sharding.hlo.parse`.
      mesh: what the program is compiled for.
      computation: whose; the entry when None.
      **options: handed to :func:`sharding.hlo.transfers`.

    Returns:
      Of each kind: ``axes``, ``stands_for`` (what permutes or a sum are in truth), ``runs``,
      ``bytes`` of the results and ``received``, bytes that come from other devices.
    """
    found: dict[tuple[str, str, tuple[str, ...]], dict[str, Any]] = {}
    for one in hlo.transfers(module, computation or module.entry, **options):
        if one.groups == hlo.SLICES:
            axes = _between_slices(mesh)
        else:
            axes = axes_of(one.groups, mesh.shape, module.devices)
        entry = found.setdefault(
            (one.kind, one.stands_for, axes),
            dict(
                kind=one.kind,
                stands_for=one.stands_for,
                axes=list(axes),
                runs=0,
                bytes=0,
                received=0,
            ),
        )
        entry["runs"] += one.times
        entry["bytes"] += one.bytes * one.times
        entry["received"] += one.wire * one.times
    return sorted(found.values(), key=lambda entry: -entry["received"])


def _spread(text: str, devices: list[Any], count: int) -> int:
    """Over how many torus dimensions the groups of a collective of `count` devices spread."""
    dims = 0
    for group in groups_of(text, count):
        places = [tuple(getattr(devices[index], "coords", ()) or ()) for index in group]
        dims = max(dims, sum(len(set(column)) > 1 for column in zip(*places, strict=True)))
    return dims


def clocks(
    module: hlo.Module,
    cost: costs.Cost,
    chip: Chip,
    mesh: Any,
    computation: str | None = None,
    **options: Any,
) -> Clocks:
    """Seconds by the roofline of :mod:`sharding.hardware`."""
    devices = list(mesh.devices.flat)
    ici, between = 0.0, 0
    seen: dict[str, int] = {}
    for one in hlo.transfers(module, computation or module.entry, **options):
        received = one.wire * one.times
        if one.groups == hlo.SLICES:
            between += received
            continue
        if one.groups not in seen:
            seen[one.groups] = _spread(one.groups, devices, module.devices)
        if dims := min(seen[one.groups], chip.torus):
            ici += received / (chip.ici / 2 * dims / chip.torus)
    return Clocks(
        arithmetic=cost.flops / chip.flops,
        memory=cost.bytes / chip.bandwidth,
        ici=ici,
        network=between and (between / chip.network if chip.network else None),
    )


def program_figures(
    compiled: Any,
    mesh: Any,
    chip: Chip | None,
    *,
    flops: float = 0.0,
    pick: Callable[[hlo.Module], str] | None = None,
    **options: Any,
) -> tuple[dict[str, Any], hlo.Module]:
    """All that is known of one compiled program.

    Args:
      compiled: the program.
      mesh: the mesh that it is compiled for.
      chip: one device's figures; None where nothing is known of it.
      flops: operations of all devices that the model itself asks for, for the MFU.
      pick: names the computation of which one run is counted; the whole program when None.
      **options: ``dearest``, which branch of a conditional counts.

    Returns:
      The figures and the parsed program.
    """
    module = hlo.parse(compiled.as_text())
    where = module.entry if pick is None else pick(module)
    cost = costs.count(module, where, **options)
    found: dict[str, Any] = {
        "memory": memory(compiled, named=chip is not None),
        "flops": cost.flops,
        "kernel flops": cost.kernels,
        "bytes": cost.bytes,
        "not counted": dict(cost.unknown),
        "open loops": [loop.name for loop in hlo.open_loops(module, where)],
        "model flops": flops / mesh.devices.size,
        "collectives": exchanges(module, mesh, where, **options),
    }
    if chip is not None:
        found["fits"] = found["memory"]["peak"] <= chip.granted
        time = clocks(module, cost, chip, mesh, where, **options)
        found["seconds"] = dataclasses.asdict(time)
        found["estimate"], found["bound by"] = time.longest, time.bound_by
        found["without overlap"] = time.together
        if time.longest:
            found["estimated mfu"] = found["model flops"] / (chip.flops * time.longest)
    return found, module


def model_flops(config: rl.models.DecoderConfig, sizes: programs.Sizes) -> dict[str, float]:
    """Operations that the model asks for, all devices together, nothing computed twice.

    6·N·T for an update and 2·N a token for generation, with N the weights that are multiplied (the
    head only where there is a completion), and attention to the tokens before (half a square).
    """
    heads, kv, width = config.num_heads, config.num_kv_heads, config.head_dim
    layer = config.hidden_size * (width * (2 * heads + 2 * kv) + 3 * config.intermediate_size)
    body, head = config.num_layers * layer, config.vocab_size * config.hidden_size
    pairs = 2 * 2 * config.num_layers * heads * width  # of a query and a key: score and value
    rows, length, new = sizes.rows, sizes.length, sizes.length - sizes.prompt
    prompts = rows // sizes.group
    forward = 2 * (body * rows * length + head * rows * new) + pairs * rows * length**2 / 2
    return {
        "train": 3.0 * forward,
        "prefill": 2 * body * prompts * sizes.prompt + pairs * prompts * sizes.prompt**2 / 2,
        "token": rows * (2 * (body + head) + pairs * (sizes.prompt + new / 2)),
    }


# what moves between devices that split both the rows and the weights


def least_exchange(placed: programs.Placed) -> dict[str, int]:
    """Bytes that a device must receive in one step, where weights lie over rows' or tokens' axes.

    Every weight comes once in the forward and once in the backward pass of each micro-batch, in
    bfloat16, and the gradients' sum goes back once, in bfloat16 too; where devices hold copies of a
    part, they sum it once more. Of the embedding only the gradient counts where the head is a
    matrix of its own: its rows are looked up, not gathered.
    """
    gathered = scattered = 0
    rows = {*placed.layout.rows, *placed.layout.tokens}
    everyone = math.prod(placed.mesh.shape[name] for name in rows)
    params = placed.state.params
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = [
            n for part in leaf.sharding.spec for n in (part if isinstance(part, tuple) else (part,))
        ]
        parts = math.prod(placed.mesh.shape[name] for name in names if name in rows)
        others = math.prod(placed.mesh.shape[name] for name in names if name and name not in rows)
        received = 2 * leaf.size // others * (parts - 1) // parts
        tied = placed.model.config.tie_embeddings
        looked_up = jax.tree_util.keystr(path, simple=True, separator="/").startswith("embed")
        gathered += 0 if looked_up and not tied else received
        scattered += received
        copies = everyone // parts
        scattered += 2 * (2 * leaf.size // others // parts) * (copies - 1) // copies
    return {"gathered": 2 * placed.sizes.micro_batches * gathered, "scattered": scattered}


def exchanged_weights(found: list[dict[str, Any]], rows: tuple[str, ...]) -> int:
    """Bytes received by gathers, sums and permutes along the axes that split the rows."""
    kinds = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute")
    return sum(
        one["received"]
        for one in found
        if one["kind"] in kinds and one["axes"] and set(one["axes"]) <= set(rows)
    )


# logits and caches


def vocabulary_arrays(module: hlo.Module, vocab: int, widths: set[int], shards: int) -> list[int]:
    """Elements of every float array with a vocabulary axis (whole or split) that is no weight.

    A weight is two-dimensional, with one of `widths` beside the vocabulary.
    """
    axes = {vocab, vocab // shards}
    found = set()
    for computation in module.computations.values():
        for one in computation.instructions.values():
            for dtype, dims in hlo.arrays(one.shape):
                held = axes & set(dims)
                if dtype not in ("f32", "bf16") or not held:
                    continue
                others = [dim for dim in dims if dim != 1 and dim not in held]
                if len(others) > 1 or (others and others[0] not in widths):
                    found.add(math.prod(dims))
    return sorted(found)


def carried(cache: Any, loop: hlo.Instruction) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays of the decode loop's carry that are the cache's, as they lie on one device."""
    there, found = hlo.arrays(loop.shape), []
    for leaf in (leaf for leaf in jax.tree.leaves(cache) if leaf.ndim >= 5):
        parts = [
            (dtype, dims)
            for dtype, dims in there
            if len(dims) == leaf.ndim
            and dims[0] == leaf.shape[0]
            and all(whole % part == 0 for whole, part in zip(leaf.shape, dims, strict=True))
        ]
        if parts:  # keys and values may have one shape: each array is taken once
            found.append(max(parts, key=lambda part: hlo.size(*part)))
            there.remove(found[-1])
    return found


def cache_figures(cache: Any, module: hlo.Module, loop: hlo.Instruction) -> dict[str, int]:
    """Bytes of the cache on a device, of the whole cache, and of its copies in a trip of the loop.

    The loop should write a token's keys and values in place: a copy as large as the cache costs
    more than all weights. (A cache so small that the TPU keeps it in fast memory may be copied.)
    """
    parts = carried(cache, loop)
    dims = {dims for _, dims in parts}
    copies = hlo.transfers(
        module,
        loop.body,
        wanted=lambda one: (
            one.opcode in ("copy", "transpose")
            and hlo.arrays(one.shape)[0][1] in dims
            and sum(costs.stored(one.shape)) > 0
        ),
    )
    return {
        "cache": sum(hlo.size(*part) for part in parts),
        "cache of all": sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache) if leaf.ndim >= 5
        ),
        "copied a token": hlo.total(copies),
    }

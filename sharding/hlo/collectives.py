"""Which collectives a compiled program runs, how often, and what they carry.

A TPU program hides them in four ways; see :mod:`sharding.hlo`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

from sharding.hlo.groups import group_size
from sharding.hlo.loops import trips
from sharding.hlo.roles import roles
from sharding.hlo.sources import sources
from sharding.hlo.text import KINDS, SLICES, Instruction, Module, arrays, instructions, result, size

__all__ = [
    "Transfer",
    "carried_parameters",
    "continued",
    "scattered_sum",
    "summary",
    "total",
    "transfers",
]

_CONTINUED = re.compile(r'"async_collective_fusion_config":\{"flag_start":"(?!-1")')


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective, or copy, of a stretch of a program.

    ``bytes`` is the result on one device, ``times`` how often it runs, ``sources`` the program's
    parameters that it moves untouched, ``groups`` which devices exchange, ``wire`` the bytes that
    one device receives of others in one run (of an all-reduce: in both halves of a ring's), and
    ``stands_for`` the collective that it is in truth (:mod:`sharding.hlo.roles`).
    """

    kind: str
    shape: str
    bytes: int
    times: int
    sources: tuple[str, ...]
    groups: str = ""
    wire: int = 0
    stands_for: str = ""


def continued(module: Module, instruction: Instruction) -> bool:
    """Whether this is a copy of a collective that another fusion has started."""
    return bool(_CONTINUED.search(instruction.rest)) and (
        instruction.attribute("channel_id") in module.started
    )


def scattered_sum(module: Module, fusion: Instruction) -> Instruction | None:
    """The all-reduce inside a fusion that keeps a slice of its result: a reduce-scatter."""
    for name in fusion.called.get("calls", []):
        inside = module.computations[name]
        root = inside.instructions[inside.root]
        while root.opcode in ("bitcast", "copy", "convert"):
            root = inside.instructions[root.operands[0]]
        sums = [one for one in inside.instructions.values() if one.kind == "all-reduce"]
        if len(sums) == 1 and root.opcode == "dynamic-slice":
            return sums[0]
    return None


def _wire(kind: str, count: int, parts: int) -> int:
    """Bytes that one of `parts` devices receives, of a collective with a result of `count`."""
    if kind == "collective-permute":
        return count
    if kind == "reduce-scatter":
        return count * (parts - 1)
    return count * (parts - 1) * (2 if kind == "all-reduce" else 1) // parts


def _transfers(
    module: Module, where: str, instruction: Instruction, times: int, within: Instruction | None
) -> list[Transfer]:
    """A collective or copy; `within` is the all-reduce inside a fusion that is a reduce-scatter.

    One of several operands comes once for each of the things that they stand for.
    """
    kind = "reduce-scatter" if within else instruction.kind or instruction.opcode
    found = arrays(result(instruction))
    told = roles(module, where, instruction) if instruction.kind else [""]
    told = told if len(told) == len(found) else [told[0] if told else ""] * len(found)
    groups = (within or instruction).groups
    joins = kind in KINDS and groups != SLICES
    parts = group_size(groups, module.devices) if joins else 1
    moved = {s for operand in instruction.operands for s in sources(module, where, operand)}
    out = []
    for role in dict.fromkeys(told):
        held = [array for array, other in zip(found, told, strict=True) if other == role]
        count = sum(size(*array) for array in held)
        dtype, dims = max(held, key=lambda array: size(*array))
        wire = _wire(kind, count, parts) if joins else count if groups == SLICES else 0
        shape = f"{dtype}[{','.join(map(str, dims))}]"
        out.append(Transfer(kind, shape, count, times, tuple(sorted(moved)), groups, wire, role))
    return out


def total(found: list[Transfer]) -> int:
    """Bytes of all of them."""
    return sum(one.bytes * one.times for one in found)


def transfers(
    module: Module,
    computation: str,
    times: int = 1,
    *,
    dearest: bool = True,
    wanted: Callable[[Instruction], object] = lambda instruction: instruction.kind,
) -> list[Transfer]:
    """What one run of a computation exchanges; of a conditional, its dearest or cheapest branch.

    A loop's body counts as often as its trip count says, once where that is not known. `wanted`
    says which instructions count: all collectives, unless it is given.
    """
    inner = functools.partial(transfers, module, dearest=dearest, wanted=wanted)
    found = []
    for instruction in module.computations[computation].instructions.values():
        summed = scattered_sum(module, instruction) if instruction.opcode == "fusion" else None
        if summed is not None and wanted(summed):
            found += _transfers(module, computation, instruction, times, summed)
            continue
        if wanted(instruction) and not continued(module, instruction):
            found += _transfers(module, computation, instruction, times, None)
        called = instruction.called
        if instruction.opcode == "conditional":
            branches = [inner(name, times) for names in called.values() for name in names]
            found += (max if dearest else min)(branches, key=total)
        elif instruction.opcode in ("while", "fusion", "call", "async-start"):
            rounds = trips(module, instruction) if instruction.opcode == "while" else 1
            for names in called.values():
                for name in names:
                    found += inner(name, times * (rounds or 1))
    return found


def carried_parameters(module: Module, computation: str, pattern: str = "") -> list[Transfer]:
    """Collectives anywhere under a computation that move parameters whose name has `pattern`."""
    found = [
        one
        for where, instruction in instructions(module, computation)
        if instruction.kind
        for one in _transfers(module, where, instruction, 1, None)
    ]
    return [one for one in found if any(pattern in source for source in one.sources)]


def summary(found: list[Transfer]) -> dict[str, tuple[int, int]]:
    """Kind → (how many runs, bytes of them all)."""
    kinds = {kind: [one for one in found if one.kind == kind] for kind in KINDS}
    return {
        kind: (sum(one.times for one in same), total(same)) for kind, same in kinds.items() if same
    }

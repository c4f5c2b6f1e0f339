"""What a collective stands for, where the compiler writes one as another.

- A loop of collective-permutes around a product is a gather or a reduce-scatter in pieces.
- An all-reduce of arrays that are zero but for a device's own part is an all-gather; one of which
  every device keeps a slice is a reduce-scatter. Both move twice the bytes: the TPU's compiler
  falls back to them where a device's part is narrow (seen at 64 and at 128 columns).
"""

from __future__ import annotations

import re

from sharding.hlo.text import Instruction, Module

__all__ = ["roles"]

_SAME = ("bitcast", "convert", "copy", "copy-start", "copy-done", "reshape", "transpose")
_RING = re.compile(r"windowed_dot_general_body_(ag|rs)")


def _origin(module: Module, where: str, name: str) -> tuple[str, Instruction | None]:
    """The instruction that makes a value, inside fusions too."""
    for _ in range(40):
        inside = module.computations[where].instructions
        one = inside.get(name)
        if one is None:
            return where, None
        if one.opcode in _SAME:
            name = one.operands[0]
        elif one.opcode == "get-tuple-element":
            of, index = inside.get(one.operands[0]), int(one.attribute("index"))
            if of is None or of.opcode != "fusion":
                return where, one
            where = of.called["calls"][0]
            root = module.computations[where].instructions[module.computations[where].root]
            if root.opcode != "tuple":
                return where, root
            name = root.operands[index]
        elif one.opcode == "fusion":
            where = one.called["calls"][0]
            name = module.computations[where].root
        else:
            return where, one
    return where, None


def _own_part(module: Module, where: str, name: str) -> bool:
    """Whether a value is a constant with one part written over."""
    inner, one = _origin(module, where, name)
    if one is None or one.opcode != "dynamic-update-slice":
        return False
    target = module.computations[inner].instructions.get(one.operands[0])
    while target is not None and target.opcode in _SAME:
        target = module.computations[inner].instructions.get(target.operands[0])
    if target is not None and target.opcode == "parameter":
        for caller_in, caller, _, _ in module.callers.get(inner, []):
            _, target = _origin(module, caller_in, caller.operands[int(target.operands[0])])
            break
    return target is not None and (
        target.opcode in ("broadcast", "constant")
        or (target.opcode == "custom-call" and "AllocateBuffer" in target.rest)
    )


def _sliced(module: Module, where: str, name: str, depth: int = 0) -> bool:
    """Whether of a value only dynamic slices are used."""
    used = False
    for one in module.computations[where].instructions.values():
        if name not in one.operands:
            continue
        used = True
        if one.opcode == "dynamic-slice":
            continue
        if one.opcode in (*_SAME, "get-tuple-element") and depth < 6:
            if not _sliced(module, where, one.name, depth + 1):
                return False
        elif one.opcode == "fusion" and depth < 6:
            inner = one.called["calls"][0]
            numbers = [i for i, operand in enumerate(one.operands) if operand == name]
            for inside in module.computations[inner].instructions.values():
                taken = inside.opcode == "parameter" and int(inside.operands[0]) in numbers
                if taken and not _sliced(module, inner, inside.name, depth + 1):
                    return False
        else:
            return False
    return used


def roles(module: Module, where: str, one: Instruction) -> list[str]:
    """What each operand of a collective goes through in truth; empty where it is what it says.

    Args:
      module: :class:`sharding.hlo.Module`.
      where: the computation that the instruction stands in.
      one: the instruction.

    Returns:
      ``"all-gather"``, ``"reduce-scatter"`` or ``""`` for every operand.
    """
    if one.opcode.startswith("collective-permute"):
        ring = _RING.search(where)
        found = {"ag": "all-gather", "rs": "reduce-scatter"}[ring[1]] if ring else ""
        return [found] * len(one.operands)
    if one.opcode not in ("all-reduce", "all-reduce-start"):
        return [""] * len(one.operands)
    results = [one.name] if len(one.operands) == 1 else []
    if not results:
        by_index = {
            int(user.attribute("index")): user.name
            for user in module.computations[where].instructions.values()
            if user.opcode == "get-tuple-element" and user.operands[0] == one.name
        }
        results = [by_index.get(index, "") for index in range(len(one.operands))]
    found = []
    for operand, result in zip(one.operands, results, strict=True):
        if _own_part(module, where, operand):
            found.append("all-gather")
        else:
            sliced = bool(result) and _sliced(module, where, result)
            found.append("reduce-scatter" if sliced else "")
    return found

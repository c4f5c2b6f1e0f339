"""Where a value of a compiled program comes from.

An instruction's origin is followed back through what only moves data (slices, copies, converts,
tuples, loops, fusions of those) to a parameter of the program; arithmetic ends the walk.
"""

from __future__ import annotations

from sharding.hlo.text import Instruction, Module

__all__ = ["sources"]

MOVES = {  # operations that hand data on without arithmetic
    *("bitcast", "bitcast-convert", "concatenate", "convert", "copy", "copy-done", "copy-start"),
    *("dynamic-slice", "dynamic-update-slice", "opt-barrier", "pad", "reduce-precision"),
    *("reshape", "slice", "transpose", "all-gather", "all-gather-start", "all-gather-done"),
    *("all-to-all", "collective-permute", "collective-permute-start", "collective-permute-done"),
    *("async-start", "async-update", "async-done", "slice-start", "slice-done"),
}


def _operand_paths(instruction: Instruction, path: tuple[int, ...]) -> list[tuple[str, tuple]]:
    """Operands that this part of an instruction's result is made of, when it only moves data."""
    if instruction.opcode == "tuple":
        picked = instruction.operands[path[0] : path[0] + 1] if path else instruction.operands
        return [(name, path[1:]) for name in picked]
    if instruction.opcode == "get-tuple-element":
        return [(instruction.operands[0], (int(instruction.attribute("index")), *path))]
    if instruction.opcode == "while":
        return [(instruction.operands[0], path)]
    if instruction.opcode in MOVES:
        count = {"dynamic-slice": 1, "dynamic-update-slice": 2}.get(instruction.opcode, 99)
        return [(name, ()) for name in instruction.operands[:count]]
    return []


def _handed_in(caller: Instruction, role: str, index: int, number: int) -> str | None:
    """The caller's operand that is parameter `number` of the computation that it calls."""
    if caller.opcode == "while":
        return caller.operands[0]
    if caller.opcode == "conditional":
        return caller.operands[1 + (index if role == "branch_computations" else role[0] == "f")]
    return caller.operands[number] if number < len(caller.operands) else None


def sources(module: Module, computation: str, name: str) -> tuple[str, ...]:
    """The program's parameters of which this value is a moved (part of a) copy."""
    found, seen = set(), set()
    todo: list[tuple[str, str, tuple[int, ...]]] = [(computation, name, ())]
    while todo:
        place = todo.pop()
        where, what, path = place
        if place in seen or what not in module.computations[where].instructions:
            continue
        seen.add(place)
        instruction = module.computations[where].instructions[what]
        if instruction.opcode == "parameter":
            if where == module.entry:
                found.add(instruction.attribute("op_name") or what)
            for caller_in, caller, role, index in module.callers.get(where, []):
                operand = _handed_in(caller, role, index, int(instruction.operands[0]))
                if operand is not None:
                    todo.append((caller_in, operand, path))
            continue
        todo.extend((where, operand, inner) for operand, inner in _operand_paths(instruction, path))
        if instruction.opcode in ("while", "fusion", "call", "conditional", "async-start"):
            for role, names in instruction.called.items():
                if role != "condition":
                    todo.extend((n, module.computations[n].root, path) for n in names)
    return tuple(sorted(found))

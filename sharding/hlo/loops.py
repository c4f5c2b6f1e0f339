"""How often a loop of a compiled program runs.

The CPU's compiler notes it; the TPU's does not. There the count follows from the loop itself: where
its counter begins, by how much the body raises it, and the bound that the condition compares with.
"""

from __future__ import annotations

import operator
import re
from typing import Any

from sharding.hlo.text import Instruction, Module, arrays, instructions, size

__all__ = ["open_loops", "outer_loop", "trips"]

_NOTED = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SAME = ("bitcast", "convert", "copy", "copy-start", "copy-done", "reshape", "opt-barrier")
_BINARY = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}


class _Scalars:
    """Values of scalars inside one computation, with what its caller knows of its parameters."""

    def __init__(self, module: Module, computation: str, given: dict[Any, int]):
        self.module, self.name = module, computation
        self.inside = module.computations[computation].instructions
        self.given = given  # parameter number, or (parameter number, element) → value

    def value(self, name: str, depth: int = 0) -> int | None:
        """The integer that an instruction gives; None where it is not known."""
        one = self.inside.get(name)
        if one is None or depth > 40:
            return None
        if one.opcode == "constant":
            return int(one.operands[0]) if re.fullmatch(r"-?\d+", one.operands[0]) else None
        if one.opcode == "parameter":
            return self.given.get(int(one.operands[0]))
        if one.opcode == "get-tuple-element":
            return self._element(one.operands[0], int(one.attribute("index")), depth)
        if one.opcode in _SAME:
            return self.value(one.operands[0], depth + 1)
        if one.opcode == "fusion":
            return self._inside(one, None, depth)
        if one.opcode not in _BINARY:
            return None
        a, b = (self.value(operand, depth + 1) for operand in one.operands)
        return None if a is None or b is None else _BINARY[one.opcode](a, b)

    def _inside(self, fusion: Instruction, element: int | None, depth: int) -> int | None:
        """What a fusion gives, or one element of it."""
        called = fusion.called["calls"][0]
        given = {
            number: found
            for number, operand in enumerate(fusion.operands)
            if (found := self.value(operand, depth + 1)) is not None
        }
        inner = _Scalars(self.module, called, given)
        root = self.module.computations[called].root
        return inner.value(root, depth + 1) if element is None else inner._element(root, element)

    def _element(self, name: str, index: int, depth: int = 0) -> int | None:
        """An element of a tuple."""
        one = self.inside.get(name)
        if one is None or depth > 40:
            return None
        if one.opcode == "parameter":
            return self.given.get((int(one.operands[0]), index))
        if one.opcode == "tuple":
            return self.value(one.operands[index], depth + 1)
        if one.opcode == "fusion":
            return self._inside(one, index, depth)
        return None

    def counter(self, name: str) -> int | None:
        """Which element of the computation's parameter a value is."""
        one = self.inside.get(name)
        while one is not None and one.opcode in _SAME:
            one = self.inside.get(one.operands[0])
        if one is None or one.opcode != "get-tuple-element":
            return None
        of = self.inside.get(one.operands[0])
        return int(one.attribute("index")) if of is not None and of.opcode == "parameter" else None


def _bound(module: Module, condition: str) -> tuple[int, int] | None:
    """Which element counts, and below which number the loop goes on."""
    scalars = _Scalars(module, condition, {})
    root = scalars.inside[module.computations[condition].root]
    operands, compare = root.operands, root
    if root.opcode == "fusion":  # the comparison itself, with its operands handed in
        inside = module.computations[root.called["calls"][0]]
        compare = inside.instructions[inside.root]
        if compare.opcode != "compare":
            return None
        handed = [inside.instructions[name] for name in compare.operands]
        operands = tuple(
            root.operands[int(one.operands[0])] if one.opcode == "parameter" else ""
            for one in handed
        )
        limit = (
            int(handed[1].operands[0])
            if handed[1].opcode == "constant"
            else scalars.value(operands[1])
        )
    elif root.opcode == "compare":
        limit = scalars.value(operands[1])
    else:
        return None
    counter = scalars.counter(operands[0])
    if compare.attribute("direction") != "LT" or counter is None or limit is None:
        return None
    return counter, limit


def trips(module: Module, loop: Instruction) -> int | None:
    """A while loop's trip count, if it is fixed.

    Args:
      module: from :func:`sharding.hlo.parse`.
      loop: its ``while`` instruction.

    Returns:
      The compiler's note; else of a condition `i < n` the number of steps from where the counter
      begins (0 where that is not known) to n, by what the body adds (1 where that is not known).
      None for any other condition.
    """
    if noted := _NOTED.search(loop.rest):
        return int(noted[1])
    found = _bound(module, loop.called["condition"][0])
    if found is None:
        return None
    counter, limit = found
    begin = 0
    for where, inside in module.computations.items():
        if inside.instructions.get(loop.name) is loop:
            begin = _Scalars(module, where, {})._element(loop.operands[0], counter) or 0
    root = module.computations[loop.body].root
    after = _Scalars(module, loop.body, {(0, counter): begin})._element(root, counter)
    step = 1 if after is None else after - begin
    if step <= 0:
        return None
    return max(0, -(-(limit - begin) // step))


def open_loops(module: Module, computation: str) -> list[Instruction]:
    """The while loops under a computation whose trip count is not known."""
    return [
        instruction
        for _, instruction in instructions(module, computation)
        if instruction.opcode == "while" and trips(module, instruction) is None
    ]


def outer_loop(module: Module) -> Instruction:
    """The while loop whose trip count only the run decides: a decode loop that may end early."""
    found = open_loops(module, module.entry)
    inside = {
        instruction.name for loop in found for _, instruction in instructions(module, loop.body)
    }
    outer = [loop for loop in found if loop.name not in inside]
    if not outer:
        raise ValueError("the program has no while loop without a known trip count")
    return max(outer, key=lambda loop: sum(size(*array) for array in arrays(loop.shape)))

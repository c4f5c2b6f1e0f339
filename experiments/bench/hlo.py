"""Reads a compiled program's HLO text: which collectives run how often, and what they carry.

    module = parse(compiled.as_text())
    loop = outer_loop(module)                    # the while loop whose trip count is not known
    transfers(module, loop.body)                 # what one trip of it exchanges, layers counted
    carried_parameters(module, loop.body)        # collectives that move parameters, by name

An instruction's origin is followed back through what only moves data (slices, copies, converts,
tuples, loops, fusions of those) to a parameter of the program; arithmetic ends the walk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
MOVES = {  # operations that hand data on without arithmetic
    *("bitcast", "bitcast-convert", "concatenate", "convert", "copy", "copy-done", "copy-start"),
    *("dynamic-slice", "dynamic-update-slice", "opt-barrier", "pad", "reduce-precision"),
    *("reshape", "slice", "transpose", "all-gather", "all-gather-start", "all-gather-done"),
    *("all-to-all", "collective-permute", "collective-permute-start", "collective-permute-done"),
    *("async-start", "async-update", "async-done", "slice-start", "slice-done"),
}
BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "bf16": 16}
ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e\d+m\d+\w*)?)\[([0-9,<=]*)\]")
CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str

    @property
    def called(self) -> dict[str, list[str]]:
        """Role → computations that it calls."""
        found: dict[str, list[str]] = {}
        for role, text in CALLED.findall(self.rest):
            found.setdefault(role, []).extend(re.findall(r"[\w.\-]+", text))
        return found

    @property
    def body(self) -> str:
        """A while loop's body."""
        return self.called["body"][0]

    @property
    def kind(self) -> str | None:
        """The collective that it starts, if it is one."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in KINDS else None

    def attribute(self, name: str) -> str:
        """An attribute such as ``index``; empty when it is not there."""
        found = re.search(rf'\b{name}="?([^,"}}]+)', self.rest)
        return found[1].replace("\\", "") if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, and which of them is the result."""

    name: str
    instructions: dict[str, Instruction]
    root: str


@dataclasses.dataclass(frozen=True)
class Module:
    """Computations by name, the entry, and who calls each computation."""

    computations: dict[str, Computation]
    entry: str
    callers: dict[str, list[tuple[str, Instruction, str, int]]]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective, or copy, of a stretch of a program.

    ``bytes`` is the result on one device, ``times`` how often it runs, ``sources`` the program's
    parameters that it moves untouched.
    """

    kind: str
    shape: str
    bytes: int
    times: int
    sources: tuple[str, ...]


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """dtype and dimensions of each array in a shape's text, layouts left out."""
    return [
        (dtype, tuple(int(re.sub(r"\D", "", d)) for d in dims.split(",") if d))
        for dtype, dims in ARRAY.findall(shape)
    ]


def size(dtype: str, dims: tuple[int, ...]) -> int:
    """Bytes of an array."""
    bits = BITS.get(dtype) or int((re.search(r"\d+", dtype) or ["0"])[0])
    return math.prod(dims) * bits // 8


def _balanced(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`."""
    level = 0
    for index in range(start, len(text)):
        level += (text[index] == "(") - (text[index] == ")")
        if level == 0:
            return index + 1
    raise ValueError(f"unbalanced brackets in {text[start : start + 80]!r}")


def _instruction(line: str) -> Instruction | None:
    head, equals, text = line.strip().removeprefix("ROOT ").partition(" = ")
    if not equals or " " in head:
        return None
    end = _balanced(text, 0) if text.startswith("(") else text.index(" ")
    shape, text = text[:end], text[end:].strip()
    opcode, _, _ = text.partition("(")
    close = _balanced(text, len(opcode))
    inside = re.sub(r"/\*.*?\*/", "", text[len(opcode) + 1 : close - 1])
    if opcode in ("parameter", "constant"):
        operands = (inside,)
    elif opcode == "iota":
        operands = ()
    else:
        operands = tuple(
            word.split()[-1].removeprefix("%") for word in inside.split(", ") if word.strip()
        )
    return Instruction(head.removeprefix("%"), shape, opcode, operands, text[close:])


def parse(text: str) -> Module:
    """The text of ``compiled.as_text()`` as computations and instructions."""
    computations, entry = {}, ""
    name, lines, root = "", {}, ""
    for line in text.splitlines():
        if (opening := re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line)) and " = " not in line:
            name, lines, root = opening[2], {}, ""
            entry = name if opening[1] else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(name, lines, root)
            name = ""
        elif name and (found := _instruction(line)) is not None:
            lines[found.name] = found
            root = found.name if line.lstrip().startswith("ROOT ") else root
    callers: dict[str, list[tuple[str, Instruction, str, int]]] = {}
    for computation in computations.values():
        for instruction in computation.instructions.values():
            for role, names in instruction.called.items():
                for index, called in enumerate(names):
                    caller = (computation.name, instruction, role, index)
                    callers.setdefault(called, []).append(caller)
    return Module(computations, entry, callers)


def instructions(module: Module, computation: str) -> Iterator[tuple[str, Instruction]]:
    """Every instruction under a computation, with where it stands; each computation once."""
    todo, seen = [computation], set()
    while todo:
        name = todo.pop()
        if name in seen or name not in module.computations:
            continue
        seen.add(name)
        for instruction in module.computations[name].instructions.values():
            yield name, instruction
            todo.extend(called for names in instruction.called.values() for called in names)


def trips(module: Module, loop: Instruction) -> int | None:
    """A while loop's trip count, if it is fixed: by the compiler's note, or a scan's `i < n`."""
    if noted := TRIPS.search(loop.rest):
        return int(noted[1])
    inside = module.computations[loop.called["condition"][0]]
    root = inside.instructions[inside.root]
    if root.opcode != "compare" or root.attribute("direction") != "LT":
        return None
    limit = inside.instructions[root.operands[1]]
    return int(limit.operands[0]) if limit.opcode == "constant" else None


def outer_loop(module: Module) -> Instruction:
    """The while loop whose trip count only the run decides: a decode loop that may end early."""
    open_loops = [
        instruction
        for _, instruction in instructions(module, module.entry)
        if instruction.opcode == "while" and trips(module, instruction) is None
    ]
    inside = {
        instruction.name
        for loop in open_loops
        for _, instruction in instructions(module, loop.body)
    }
    outer = [loop for loop in open_loops if loop.name not in inside]
    if not outer:
        raise ValueError("the program has no while loop without a known trip count")
    return max(outer, key=lambda loop: sum(size(*array) for array in arrays(loop.shape)))


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


def _transfer(module: Module, where: str, instruction: Instruction, times: int) -> Transfer:
    parts = [size(*array) for array in arrays(instruction.shape)]
    # the start of an asynchronous one returns its operand beside its result
    count = max(parts, default=0) if instruction.opcode.endswith("-start") else sum(parts)
    moved = {s for operand in instruction.operands for s in sources(module, where, operand)}
    kind = instruction.kind or instruction.opcode
    largest = max(arrays(instruction.shape), key=lambda array: size(*array), default=("", ()))
    shape = f"{largest[0]}[{','.join(map(str, largest[1]))}]"
    return Transfer(kind, shape, count, times, tuple(sorted(moved)))


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
        if wanted(instruction):
            found.append(_transfer(module, computation, instruction, times))
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
        _transfer(module, where, instruction, 1)
        for where, instruction in instructions(module, computation)
        if instruction.kind
    ]
    return [one for one in found if any(pattern in source for source in one.sources)]


def summary(found: list[Transfer]) -> dict[str, tuple[int, int]]:
    """Kind → (how many runs, bytes of them all)."""
    kinds = {kind: [one for one in found if one.kind == kind] for kind in KINDS}
    return {
        kind: (sum(one.times for one in same), total(same)) for kind, same in kinds.items() if same
    }

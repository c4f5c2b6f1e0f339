"""A compiled program's HLO text as computations and instructions."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

__all__ = [
    "KINDS",
    "SLICES",
    "Computation",
    "Instruction",
    "Module",
    "arrays",
    "instructions",
    "parse",
    "parts",
    "result",
    "size",
]

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "bf16": 16}
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e\d+m\d+\w*)?)\[([0-9,<=]*)\]")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_BEGINS = re.compile(r"^\s+(?:ROOT )?%[\w.\-]+ = ")
_GROUPS = re.compile(
    r"\breplica_groups=(\{(?:\{[^}]*\},?)*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|@?mesh[\[<][^\]>]*[\]>](?:, ?device_ids=\((?:[^()]|\([^()]*\))*\))? ?\{[^}]*\})"
)
_PAIRS = re.compile(r"\bsource_target_pairs=(\{(?:\{[^}]*\},?)*\})")
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
SLICES = "slices"  # in the place of a collective's groups: every device with its peers elsewhere
_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_STARTED = re.compile(r'"async_collective_fusion_config":\{"flag_start":"-1"')


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
        for role, text in _CALLED.findall(self.rest):
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
        if kind == "recv" and (joined := _BETWEEN_SLICES.search(self.rest)):
            kind = joined[1].lower().replace("_", "-")
        return kind if kind in KINDS else None

    @property
    def groups(self) -> str:
        """The text that says which devices exchange with each other; empty where nothing does."""
        if self.opcode == "recv":
            return SLICES
        found = _GROUPS.search(self.rest) or _PAIRS.search(self.rest)
        return found[1] if found else ""

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
    """Computations by name, the entry, who calls each computation, and for how many devices.

    ``started`` holds the channels of the collectives that a fusion starts and others go on with.
    """

    computations: dict[str, Computation]
    entry: str
    callers: dict[str, list[tuple[str, Instruction, str, int]]]
    devices: int = 1
    started: frozenset[str] = frozenset()


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """dtype and dimensions of each array in a shape's text, layouts left out."""
    return [
        (dtype, tuple(int(re.sub(r"\D", "", d)) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(shape)
    ]


def size(dtype: str, dims: tuple[int, ...]) -> int:
    """Bytes of an array."""
    bits = _BITS.get(dtype) or int((re.search(r"\d+", dtype) or ["0"])[0])
    return math.prod(dims) * bits // 8


def _balanced(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`."""
    level = 0
    for index in range(start, len(text)):
        level += (text[index] == "(") - (text[index] == ")")
        if level == 0:
            return index + 1
    raise ValueError(f"unbalanced brackets in {text[start : start + 80]!r}")


def parts(shape: str) -> list[str]:
    """The elements of a tuple's shape; any other shape itself."""
    if not shape.startswith("("):
        return [shape]
    found, level = [""], 0
    for letter in shape[1:-1]:
        level += (letter in "([{") - (letter in ")]}")
        if letter == "," and not level:
            found.append("")
        else:
            found[-1] += letter
    return [part.strip() for part in found]


def result(one: Instruction) -> str:
    """The shape of what an instruction makes.

    The start of an asynchronous one returns its operands, its results and contexts, a copy's the
    two the other way round, an all-reduce's its results alone; a recv returns its result first.
    """
    if one.opcode in ("copy-start", "recv"):
        return parts(one.shape)[0]
    if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
        return parts(one.shape)[1]
    return one.shape


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


def _lines(text: str) -> Iterator[str]:
    """Lines; one whose braces close in a later line comes whole (a kernel's metadata does that)."""
    held, open_ = "", 0
    for line in text.splitlines():
        if not open_ and " = " not in line:
            yield line
            continue
        if open_ and _BEGINS.match(line):  # never closed: better one odd line than a lost program
            yield held
            held, open_ = "", 0
        bare = _QUOTED.sub("", line)
        open_ += bare.count("{") - bare.count("}")
        held = f"{held} {line}" if held else line
        if open_ <= 0:
            yield held
            held, open_ = "", 0


def parse(text: str) -> Module:
    """The text of ``compiled.as_text()`` as computations and instructions."""
    computations, entry = {}, ""
    name, lines, root = "", {}, ""
    for line in _lines(text):
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
    started = set()
    for computation in computations.values():
        for instruction in computation.instructions.values():
            if instruction.kind and _STARTED.search(instruction.rest):
                started.add(instruction.attribute("channel_id"))
            for role, names in instruction.called.items():
                for index, called in enumerate(names):
                    caller = (computation.name, instruction, role, index)
                    callers.setdefault(called, []).append(caller)
    counts = [int(count) for count in _DEVICES.findall(text[: text.find("\n")])]
    return Module(computations, entry, callers, max(counts, default=1), frozenset(started))


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

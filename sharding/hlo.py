"""Reads a compiled program's HLO text: which collectives run how often, and what they carry.

    module = parse(compiled.as_text())
    loop = outer_loop(module)                    # the while loop whose trip count is not known
    transfers(module, loop.body)                 # what one trip of it exchanges, layers counted
    carried_parameters(module, loop.body)        # collectives that move parameters, by name

A TPU program hides collectives in four ways, all of which are counted once here:

- A collective that runs beside arithmetic is cut up: a fusion starts it, every fusion that it runs
  beside holds a copy of it (same channel, ``async_collective_fusion_config``), another ends it.
- A reduce-scatter is a fusion of an all-reduce and the slice that a device keeps.
- A gather or scatter that a product eats piece by piece is a loop of collective-permutes, two
  pieces a trip: its counter goes up by 2 (:mod:`sharding._plan_loops`).
- Between slices it is a send and a receive of the host's runtime, told apart by an attribute; the
  program is that of one slice.

Some all-reduces are gathers in truth, or reduce-scatters: :mod:`sharding._plan_roles`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator

from sharding import _plan_loops
from sharding._plan_groups import group_size
from sharding._plan_roles import roles
from sharding._plan_sources import sources

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "bf16": 16}
ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e\d+m\d+\w*)?)\[([0-9,<=]*)\]")
CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
BEGINS = re.compile(r"^\s+(?:ROOT )?%[\w.\-]+ = ")
GROUPS = re.compile(
    r"\breplica_groups=(\{(?:\{[^}]*\},?)*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|@?mesh[\[<][^\]>]*[\]>](?:, ?device_ids=\((?:[^()]|\([^()]*\))*\))? ?\{[^}]*\})"
)
PAIRS = re.compile(r"\bsource_target_pairs=(\{(?:\{[^}]*\},?)*\})")
BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
SLICES = "slices"  # in the place of a collective's groups: every device with its peers elsewhere
DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
CONTINUED = re.compile(r'"async_collective_fusion_config":\{"flag_start":"(?!-1")')
STARTED = re.compile(r'"async_collective_fusion_config":\{"flag_start":"-1"')


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
        if kind == "recv" and (joined := BETWEEN_SLICES.search(self.rest)):
            kind = joined[1].lower().replace("_", "-")
        return kind if kind in KINDS else None

    @property
    def groups(self) -> str:
        """The text that says which devices exchange with each other; empty where nothing does."""
        if self.opcode == "recv":
            return SLICES
        found = GROUPS.search(self.rest) or PAIRS.search(self.rest)
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


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective, or copy, of a stretch of a program.

    ``bytes`` is the result on one device, ``times`` how often it runs, ``sources`` the program's
    parameters that it moves untouched, ``groups`` which devices exchange, ``wire`` the bytes that
    one device receives of others in one run (of an all-reduce: in both halves of a ring's), and
    ``stands_for`` the collective that it is in truth (:mod:`sharding._plan_roles`).
    """

    kind: str
    shape: str
    bytes: int
    times: int
    sources: tuple[str, ...]
    groups: str = ""
    wire: int = 0
    stands_for: str = ""


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
        if open_ and BEGINS.match(line):  # never closed: better one odd line than a lost program
            yield held
            held, open_ = "", 0
        bare = QUOTED.sub("", line)
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
            if instruction.kind and STARTED.search(instruction.rest):
                started.add(instruction.attribute("channel_id"))
            for role, names in instruction.called.items():
                for index, called in enumerate(names):
                    caller = (computation.name, instruction, role, index)
                    callers.setdefault(called, []).append(caller)
    counts = [int(count) for count in DEVICES.findall(text[: text.find("\n")])]
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


def trips(module: Module, loop: Instruction) -> int | None:
    """A while loop's trip count, if it is fixed; see :func:`sharding._plan_loops.trips`."""
    return _plan_loops.trips(module, loop)


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


def continued(module: Module, instruction: Instruction) -> bool:
    """Whether this is a copy of a collective that another fusion has started."""
    return bool(CONTINUED.search(instruction.rest)) and (
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

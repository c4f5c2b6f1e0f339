"""FLOPs and bytes of memory traffic of a compiled program, counted from its HLO.

XLA's own analysis counts the body of a loop once. Here every product (``dot``, ``convolution``,
also inside fusions) counts as often as its loops run: a multiply-add is two operations. Of a custom
call nothing is written in the program; splash attention's kernels are counted by formula, any other
is reported as not counted. Elementwise arithmetic is left out.

Bytes are those between the memory (HBM) and the chip: what every fusion reads and writes. A slice
of a larger array counts for itself, an update in place for what it writes, an array that the TPU's
compiler keeps in its fast memory (``S(1)`` in its layout) for nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable

from sharding import hlo

__all__ = ["Cost", "count", "stored"]

_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"),
    *("call", "after-all", "partition-id", "replica-id", "opt-barrier", "async-start"),
    *("async-done", "async-update", "domain", "add-dependency", "send", "recv"),
)
_THROUGH = ("bitcast", "convert", "copy", "pad", "reshape", "transpose")
_NO_WORK = {  # custom calls that compute nothing
    *("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "AsyncCollectiveStart"),
    *("GatherScatterIndicesBitpacked", "SliceId", "ZeroCrop"),
    *("AsyncCollectiveDone", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"),
    *("TopK", "PartialReduce", "annotate_device_placement", "MoveToHost", "MoveToDevice"),
}
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e\d+m\d+\w*)?)\[([0-9,<=]*)\](\{[^}]*\})?")
_ELSEWHERE = re.compile(r"S\([1-9]")
# Products of [queries, width] with keys: scores and values forward; of the backward kernels scores,
# dv, dp, dk and scores, dp, dq.
_SPLASH = {"fwd": 2, "dkv": 4, "dq": 3}


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one device does.

    ``kernels`` are the FLOPs of them that come from the formula for splash attention; ``unknown``
    names custom calls whose work is not counted, with how often they run.
    """

    flops: int = 0
    bytes: int = 0
    kernels: int = 0
    unknown: tuple[tuple[str, int], ...] = ()

    def __add__(self, other: Cost) -> Cost:
        """Both, one after the other."""
        names: dict[str, int] = dict(self.unknown)
        for name, runs in other.unknown:
            names[name] = names.get(name, 0) + runs
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.kernels + other.kernels,
            tuple(sorted(names.items())),
        )

    def times(self, runs: int) -> Cost:
        """So many runs."""
        unknown = tuple((name, runs * count) for name, count in self.unknown)
        return Cost(self.flops * runs, self.bytes * runs, self.kernels * runs, unknown)


def stored(shape: str) -> list[int]:
    """Bytes in the device's memory of every array of a shape; 0 of one that lies elsewhere."""
    return [
        0
        if _ELSEWHERE.search(layout)
        else hlo.size(dtype, tuple(int(re.sub(r"\D", "", d)) for d in dims.split(",") if d))
        for dtype, dims, layout in _ARRAY.findall(shape)
    ]


def _piece(piece: str, *ends: str) -> int:
    """Bytes of moving a piece from one array to another: of each of the two that is in memory."""
    count = sum(hlo.size(*array) for array in hlo.arrays(piece))
    return count * sum(any(stored(end)) for end in ends)


def _dims(shape: str) -> tuple[int, ...]:
    """Dimensions of a shape's first array."""
    found = hlo.arrays(shape)
    return found[0][1] if found else ()


def _listed(rest: str, name: str) -> tuple[int, ...]:
    found = re.search(rf"\b{name}=\{{([\d,]*)\}}", rest)
    return tuple(int(number) for number in found[1].split(",") if number) if found else ()


def _dot(one: hlo.Instruction, left: tuple[int, ...]) -> int:
    """2 × elements of the result × elements that each of them sums."""
    summed = math.prod(left[axis] for axis in _listed(one.rest, "lhs_contracting_dims"))
    return 2 * math.prod(_dims(one.shape)) * summed


def _window(one: hlo.Instruction, rank: int) -> list[dict[str, int]]:
    """Size, stride, padding and dilations of every spatial axis."""
    text = (re.search(r"\bwindow=\{([^}]*)\}", one.rest) or ["", ""])[1]
    found = [dict(size=1, stride=1, low=0, lhs=1, rhs=1) for _ in range(rank)]
    for name, values in re.findall(r"(\w+)=([\dx_\-]+)", text):
        for axis, value in enumerate(values.split("x")[:rank]):
            if name == "pad":
                found[axis]["low"] = int(value.split("_")[0])
            elif name in ("size", "stride"):
                found[axis][name] = int(value)
            elif name in ("lhs_dilate", "rhs_dilate"):
                found[axis][name[:3]] = int(value)
    return found


def _convolution(one: hlo.Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """2 × pairs of an output and a kernel's place that lie inside the input, × the features.

    The TPU's compiler writes products as convolutions, and their batch axes as padded windows.
    """
    labels = re.search(r"\bdim_labels=(\w+)_(\w+)->(\w+)", one.rest)
    if not labels:
        return 0
    of_left, of_right, of_out = labels[1], labels[2], labels[3]
    spatial = sorted({label for label in of_left if label.isdigit()})
    out = _dims(one.shape)
    pairs = 1
    for axis, window in enumerate(_window(one, len(spatial))):
        label = spatial[axis]
        length, results = left[of_left.index(label)], out[of_out.index(label)]
        held = (length - 1) * window["lhs"] + 1
        places = (
            place * window["stride"] + kernel * window["rhs"] - window["low"]
            for place in range(results)
            for kernel in range(window["size"])
        )
        pairs *= sum(0 <= at < held and at % window["lhs"] == 0 for at in places)
    groups = [
        int((re.search(rf"\b{name}_group_count=(\d+)", one.rest) or ["", "1"])[1])
        for name in ("feature", "batch")
    ]
    features = right[of_right.index("o")] * (left[of_left.index("f")] // groups[0])
    return 2 * pairs * features * (left[of_left.index("b")] // groups[1])


def _splash(one: hlo.Instruction, shapes: list[str]) -> int:
    """Of a causal kernel on blocks: those on and below the diagonal are computed whole."""
    queries = next(
        (dims for shape in shapes for dtype, dims in hlo.arrays(shape)[:1] if dtype[0] in "bf"), ()
    )
    if len(queries) < 3:
        return 0
    rows, length, width = math.prod(queries[:-2]), queries[-2], queries[-1]
    kind = next(key for key in _SPLASH if f"_{key}_" in one.name or one.name.endswith(key))
    found = re.search(r"block_q\D{1,8}(\d+)", one.rest)
    block = int(found[1]) if found else length
    across = -(-length // block)
    pairs = across * (across + 1) // 2 * block * block
    return 2 * _SPLASH[kind] * rows * pairs * width


class _Counter:
    """Costs of a module's computations, each counted once."""

    def __init__(self, module: hlo.Module, dearest: bool = True):
        self.module = module
        self.sign = 1 if dearest else -1
        self.of = functools.cache(self._of)
        self.users = functools.cache(self._users)

    def shapes(self, computation: str, names: Iterable[str]) -> list[str]:
        inside = self.module.computations[computation].instructions
        return [inside[name].shape if name in inside else "" for name in names]

    def _of(self, computation: str, fused: bool = False) -> Cost:
        """One run of a computation; of one that is fused, no bytes of its own."""
        total = Cost()
        for one in self.module.computations[computation].instructions.values():
            total += self._one(computation, one, fused)
        return total

    def _one(self, computation: str, one: hlo.Instruction, fused: bool) -> Cost:
        cost = self._work(computation, one)
        if not fused:
            cost += Cost(bytes=self._traffic(computation, one))
        called = [name for names in one.called.values() for name in names]
        if one.opcode == "conditional":
            branches = [self.of(name, fused) for name in called]
            return cost + max(branches, key=lambda one: (one.flops, self.sign * one.bytes))
        if one.opcode == "while":
            return cost + self.of(one.body, fused).times(hlo.trips(self.module, one) or 1)
        if one.opcode in ("call", "async-start"):
            return functools.reduce(Cost.__add__, (self.of(name, fused) for name in called), cost)
        if one.opcode == "fusion":
            return functools.reduce(Cost.__add__, (self.of(name, True) for name in called), cost)
        return cost

    def _work(self, computation: str, one: hlo.Instruction) -> Cost:
        """FLOPs of one instruction."""
        if one.opcode not in ("dot", "convolution", "custom-call"):
            return Cost()
        shapes = self.shapes(computation, one.operands)
        if one.opcode == "dot":
            return Cost(flops=_dot(one, _dims(shapes[0])))
        if one.opcode == "convolution":
            return Cost(flops=_convolution(one, _dims(shapes[0]), _dims(shapes[1])))
        target = one.attribute("custom_call_target")
        if target in _NO_WORK:
            return Cost()
        if target == "tpu_custom_call" and "splash" in one.name:
            flops = _splash(one, shapes)
            return Cost(flops=flops, kernels=flops)
        return Cost(unknown=((target, 1),))

    # bytes

    def _users(self, computation: str) -> dict[str, list[tuple[hlo.Instruction, int]]]:
        found: dict[str, list[tuple[hlo.Instruction, int]]] = {}
        for one in self.module.computations[computation].instructions.values():
            for index, operand in enumerate(one.operands):
                found.setdefault(operand, []).append((one, index))
        return found

    def _traffic(self, computation: str, one: hlo.Instruction) -> int:
        """Bytes that one instruction outside of a fusion moves."""
        if one.opcode in _FREE or one.opcode.endswith("-done"):
            return 0
        if hlo.continued(self.module, one):
            return 0
        shapes, made = self.shapes(computation, one.operands), hlo.result(one)
        opcode = one.opcode.removesuffix("-start")
        if opcode == "fusion":
            return self._of_fusion(one, stored(made), shapes)
        if opcode in ("dynamic-slice", "slice", "gather"):
            return _piece(made, shapes[0], made)
        if opcode == "dynamic-update-slice":
            return _piece(shapes[1], shapes[1], made)
        return sum(sum(stored(shape)) for shape in (made, *shapes))

    def _of_fusion(self, one: hlo.Instruction, written: list[int], shapes: list[str]) -> int:
        name = one.called["calls"][0]
        inside = self.module.computations[name].instructions
        numbers = {
            int(inner.operands[0]): inner.name
            for inner in inside.values()
            if inner.opcode == "parameter"
        }
        total = 0
        for number, shape in enumerate(shapes):
            whole = sum(stored(shape))
            if whole and number in numbers:
                total += min(whole, self._read(name, numbers[number], whole, 0))
        results = self._results(name)
        if len(results) != len(written):
            return total + sum(written)
        for result, count in zip(results, written, strict=True):
            total += min(count, self._made(name, result, count)) if count else 0
        return total

    def _read(self, computation: str, name: str, whole: int, depth: int) -> int:
        """Bytes that a fusion reads of a value of `whole` bytes."""
        total = 0
        for user, index in self.users(computation).get(name, []):
            if total >= whole:
                return whole
            if user.opcode in ("dynamic-slice", "slice", "gather"):
                total += sum(hlo.size(*a) for a in hlo.arrays(user.shape)) if index == 0 else whole
            elif user.opcode == "dynamic-update-slice" and index == 0:
                continue
            elif user.opcode in _THROUGH and depth < 8:
                total += self._read(computation, user.name, whole, depth + 1)
            elif user.opcode == "fusion" and depth < 8:
                inner = user.called["calls"][0]
                inside = self.module.computations[inner].instructions.values()
                for one in inside:
                    if one.opcode == "parameter" and int(one.operands[0]) == index:
                        total += self._read(inner, one.name, whole, depth + 1)
            elif user.opcode == "tuple" or self._hidden(user):
                continue
            else:
                return whole
        return total

    def _hidden(self, one: hlo.Instruction) -> bool:
        """Part of a collective that runs beside this fusion."""
        target = one.attribute("custom_call_target") if one.opcode == "custom-call" else ""
        return hlo.continued(self.module, one) or target.startswith("AsyncCollective")

    def _results(self, computation: str) -> tuple[str, ...]:
        inside = self.module.computations[computation]
        root = inside.instructions[inside.root]
        if root.opcode == "custom-call" and self._hidden(root):
            starts = root.attribute("custom_call_target") == "AsyncCollectiveStart"
            # (operand, result, flags …): what the collective writes is counted where it starts
            made = ("", root.operands[0]) if starts else ()
            return (*made, *[""] * (len(hlo.arrays(root.shape)) - len(made)))
        return root.operands if root.opcode == "tuple" else (root.name,)

    def _made(self, computation: str, name: str, count: int, depth: int = 0) -> int:
        """Bytes that a fusion writes of a result of `count` bytes."""
        one = self.module.computations[computation].instructions.get(name)
        if one is None or one.opcode in ("parameter", "get-tuple-element") or self._hidden(one):
            return 0
        if one.opcode == "dynamic-update-slice":
            (shape,) = self.shapes(computation, one.operands[1:2])
            return sum(hlo.size(*array) for array in hlo.arrays(shape))
        if one.opcode in ("bitcast", "copy") and depth < 8:
            inner = self._made(computation, one.operands[0], count, depth + 1)
            return inner if one.opcode == "bitcast" else count
        if one.opcode == "fusion" and depth < 8:
            inside = one.called["calls"][0]
            return self._made(inside, self.module.computations[inside].root, count, depth + 1)
        return count


def count(module: hlo.Module, computation: str | None = None, *, dearest: bool = True) -> Cost:
    """What one run of a computation costs one device.

    Args:
      module: from :func:`sharding.hlo.parse`.
      computation: its name; the whole program when None.
      dearest: of a conditional's branches with the most FLOPs, the one with the most bytes counts;
        else the one with the fewest (of sampling, the branch without filters).

    Returns:
      A :class:`Cost`. A loop whose trip count is not known counts once.
    """
    return _Counter(module, dearest).of(module.entry if computation is None else computation)

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
  pieces a trip: its counter goes up by 2 (:mod:`sharding.hlo.loops`).
- Between slices it is a send and a receive of the host's runtime, told apart by an attribute; the
  program is that of one slice.

Some all-reduces are gathers in truth, or reduce-scatters: :mod:`sharding.hlo.roles`.
"""

from sharding.hlo.collectives import (
    Transfer,
    carried_parameters,
    continued,
    summary,
    total,
    transfers,
)
from sharding.hlo.loops import open_loops, outer_loop, trips
from sharding.hlo.text import SLICES, Instruction, Module, arrays, parse, result, size

__all__ = [
    "SLICES",
    "Instruction",
    "Module",
    "Transfer",
    "arrays",
    "carried_parameters",
    "continued",
    "open_loops",
    "outer_loop",
    "parse",
    "result",
    "size",
    "summary",
    "total",
    "transfers",
    "trips",
]

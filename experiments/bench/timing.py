"""Wall and CPU time of several functions, taken in turn, as medians."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clocks:
    """One figure by two clocks: the wall's, and the CPU-seconds of all threads of this process."""

    wall: float
    cpu: float

    def __sub__(self, other: Clocks) -> Clocks:
        return Clocks(wall=self.wall - other.wall, cpu=self.cpu - other.cpu)

    def __truediv__(self, count: float) -> Clocks:
        return Clocks(wall=self.wall / count, cpu=self.cpu / count)


def timed(function: Callable[[], Any]) -> Clocks:
    """One run, to the end of what it computes."""
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(function())
    return Clocks(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)


def median(runs: Sequence[Clocks]) -> Clocks:
    """Medians of wall and of CPU, each for itself."""
    return Clocks(
        wall=statistics.median(run.wall for run in runs),
        cpu=statistics.median(run.cpu for run in runs),
    )


def in_turn(functions: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[Clocks]]:
    """Every function once to warm up, then all of them in turn, `repeats` times."""
    for function in functions.values():
        timed(function)
    runs: dict[str, list[Clocks]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            runs[name].append(timed(function))
    return runs


def medians(functions: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, Clocks]:
    """Medians of :func:`in_turn`."""
    return {name: median(runs) for name, runs in in_turn(functions, repeats).items()}

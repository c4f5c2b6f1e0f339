"""How near a decode step of the real model comes to what this machine can do at all.

The bound of a step is max(bytes / bandwidth, operations / throughput), with bandwidth and
throughput measured on the spot and bytes and operations counted by hand: every weight is read
once a step, every row reads its own keys and values, a multiply-add is two operations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rlhf_jax as rl
from experiments.bench import timing
from experiments.bench.tables import Table
from experiments.bench.timing import Clocks

PROMPT = 16
STEPS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Bytes and operations a second, by the wall's clock and by CPU-seconds."""

    bandwidth: Clocks
    operations: Clocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One decode step: counted, bounded and measured."""

    rows: int
    bytes: float
    operations: float
    bound: Clocks
    measured: Clocks

    @property
    def fraction(self) -> Clocks:
        """Bound / measured."""
        return Clocks(
            wall=self.bound.wall / self.measured.wall, cpu=self.bound.cpu / self.measured.cpu
        )


def probe(megabytes: int = 540, size: int = 2048, repeats: int = 5) -> Machine:
    """The best of NumPy and XLA at reading a large matrix once, and at a square matmul."""
    wide = np.ones((megabytes * 2**20 // (4 * 8192), 8192), np.float32)
    narrow = np.ones(8192, np.float32)
    square = np.ones((size, size), np.float32)
    dot = jax.jit(jnp.dot)
    jax_wide, jax_narrow, jax_square = (jnp.asarray(a) for a in (wide, narrow, square))
    runs = timing.in_turn(
        {
            "read, NumPy": lambda: wide @ narrow,
            "read, XLA": lambda: dot(jax_wide, jax_narrow),
            "multiply, NumPy": lambda: square @ square,
            "multiply, XLA": lambda: dot(jax_square, jax_square),
        },
        repeats,
    )

    def rate(kind: str, amount: float) -> Clocks:
        found = [timing.median(times) for name, times in runs.items() if name.startswith(kind)]
        return Clocks(
            wall=amount / min(run.wall for run in found), cpu=amount / min(run.cpu for run in found)
        )

    return Machine(bandwidth=rate("read", wide.nbytes), operations=rate("multiply", 2.0 * size**3))


def counted(config: rl.models.DecoderConfig, rows: int, context: float) -> tuple[float, float]:
    """Bytes and operations of one float32 decode step of `rows` rows that read `context` keys."""
    heads, kv, width = config.num_heads, config.num_kv_heads, config.head_dim
    layer = config.hidden_size * width * (2 * heads + 2 * kv)
    layer += 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    own = config.num_layers * 2 * kv * width * context
    scores = config.num_layers * 4 * heads * width * context
    return 4.0 * (weights + rows * own), rows * (2.0 * weights + scores)


def bound(machine: Machine, count: float, operations: float) -> Clocks:
    """The least time that a step can take."""
    return Clocks(
        wall=max(count / machine.bandwidth.wall, operations / machine.operations.wall),
        cpu=max(count / machine.bandwidth.cpu, operations / machine.operations.cpu),
    )


def decode_step(model: Any, params: Any, rows: int, repeats: int) -> Clocks:
    """One step of ``rl.generate`` for rows of different prompts: drawing included."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, model.config.vocab_size, (rows, PROMPT)).astype(np.int32)
    generate = functools.partial(
        rl.generate,
        *(model, params, tokens, np.ones_like(tokens, bool), jax.random.key(0)),
        group_size=1,
    )
    found = timing.medians(
        {
            "long": lambda: generate(max_new_tokens=1 + STEPS),
            "short": lambda: generate(max_new_tokens=1),
        },
        repeats,
    )
    return (found["long"] - found["short"]) / STEPS


def measure(
    model: Any, params: Any, *, rows: Sequence[int] = (1, 8, 64), repeats: int = 5, **sizes: int
) -> tuple[Machine, list[Step]]:
    """The machine, probed with `sizes`, and one step at each number of rows."""
    machine, steps = probe(repeats=repeats, **sizes), []
    for count in rows:
        moved, operations = counted(model.config, count, PROMPT + STEPS / 2)
        steps.append(
            Step(
                rows=count,
                bytes=moved,
                operations=operations,
                bound=bound(machine, moved, operations),
                measured=decode_step(model, params, count, repeats),
            )
        )
    return machine, steps


def table(machine: Machine, steps: Sequence[Step]) -> Table:
    """Both."""
    band, peak = machine.bandwidth, machine.operations
    by_clock = f"{band.wall / 1e9:.1f} GB/s and {peak.wall / 1e9:.0f} Gflop/s by the clock"
    by_cpu = f"{band.cpu / 1e9:.1f} GB and {peak.cpu / 1e9:.0f} Gflop a CPU-second"
    return Table(
        (
            *("rows", "MB a step", "Gflop a step", "bound (ms)", "step (ms)", "fraction"),
            *("bound (CPU-ms)", "step (CPU-ms)", "fraction"),
        ),
        [
            (
                *(step.rows, f"{step.bytes / 1e6:.0f}", f"{step.operations / 1e9:.2f}"),
                *(f"{1e3 * step.bound.wall:.1f}", f"{1e3 * step.measured.wall:.1f}"),
                f"{step.fraction.wall:.2f}",
                *(f"{1e3 * step.bound.cpu:.1f}", f"{1e3 * step.measured.cpu:.1f}"),
                f"{step.fraction.cpu:.2f}",
            )
            for step in steps
        ],
        note=f"The machine: {by_clock}, {by_cpu}.",
    )

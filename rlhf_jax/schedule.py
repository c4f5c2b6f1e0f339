"""What a schedule costs: dedicated devices in turn or overlapped, and waiting for the longest."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks


class Makespan(NamedTuple):
    """How long a run takes, and the share of it that each group of devices works."""

    duration: float
    generate_utilisation: float
    train_utilisation: float


def makespan(generate: float, train: float, steps: int, *, overlapped: bool) -> Makespan:
    """Duration of N steps of generation (g) and training (t) on devices of their own.

    In turn: N·(g + t). Overlapped, one step ahead: g + (N−1)·max(g, t) + t; the first update then
    has staleness 0, every later one 1. Utilisation: N·g and N·t over the duration.

    Args:
      generate: g > 0, seconds a step.
      train: t > 0, seconds a step.
      steps: N ≥ 1.
      overlapped: whether generation runs one step ahead.

    Returns:
      ``Makespan(duration, generate_utilisation, train_utilisation)``.

    Raises:
      ValueError: if a duration is not positive or ``steps`` is below 1.

    Example:
      >>> makespan(3.0, 2.0, 10, overlapped=True)
      Makespan(duration=32.0, generate_utilisation=0.9375, train_utilisation=0.625)
    """
    checks.positive("generate", generate)
    checks.positive("train", train)
    checks.number("steps", steps, at_least=1, remedy="Count at least one step.")
    if overlapped:
        duration = generate + (steps - 1) * max(generate, train) + train
    else:
        duration = steps * (generate + train)
    return Makespan(duration, steps * generate / duration, steps * train / duration)


def batch_waste(lengths: ArrayLike) -> jax.Array:
    """Share of decode slots that wait for the longest completion: (max l − mean l) / max l.

    Args:
      lengths: int [B], sampled tokens of each completion that decodes in one static batch.

    Returns:
      A float32 scalar in [0, 1).

    Raises:
      TypeError: if ``lengths`` are not integers.

    Example:
      >>> float(batch_waste(jnp.array([4, 10, 6, 20])))
      0.5
    """
    x = checks.integer("lengths", lengths, ndim=1, axes="[B]").astype(jnp.float32)
    longest = jnp.maximum(jnp.max(x), 1.0)
    return (longest - jnp.mean(x)) / longest

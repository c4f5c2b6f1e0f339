"""Schedules: in turn, overlapped, and the waste of a static batch."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from rlhf_jax import schedule


def simulate(generate, train, steps, overlapped):
    """Play it event by event: training waits for its rollout, generation for its weights."""
    trained = [0.0]  # trained[n]: when version n is ready
    generator = 0.0
    for n in range(steps):
        needed = trained[max(0, n - 1) if overlapped else n]
        generator = max(generator, needed) + generate
        trained.append(max(trained[-1], generator) + train)
    return trained[-1]


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize(("generate", "train"), [(2.0, 2.0), (3.0, 2.0), (1.0, 4.0)])
@pytest.mark.parametrize("steps", [1, 2, 10])
def test_makespan_agrees_with_a_simulation(generate, train, steps, overlapped):
    got = schedule.makespan(generate, train, steps, overlapped=overlapped)
    assert got.duration == pytest.approx(simulate(generate, train, steps, overlapped))
    assert got.train_utilisation == pytest.approx(steps * train / got.duration)


def test_errors():
    with pytest.raises(ValueError, match="generate must be > 0"):
        schedule.makespan(0.0, 1.0, 1, overlapped=True)
    with pytest.raises(ValueError, match="steps must be ≥ 1"):
        schedule.makespan(1.0, 1.0, 0, overlapped=True)
    with pytest.raises(TypeError, match="lengths must be an integer"):
        schedule.batch_waste(jnp.ones(2))
    assert float(schedule.batch_waste(jnp.array([3, 3]))) == 0.0

"""Advantages and returns: from a value function, from a group of completions, from the batch.

Arrays are per token, [B, T], or per row, [B]. Every result is stop-gradient. Rewards are floating;
a missing one (None in a list, NaN in an array) leaves its group's statistics and gets advantage 0.
What one optimizer step sees is the batch: with rows sharded over devices the statistics are global.
"""

from __future__ import annotations

from rlhf_jax.advantages.baselines import (
    MovingAverage,
    batch_centered,
    batch_normalized,
    moving_average,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
)
from rlhf_jax.advantages.gae import TRUNCATIONS, Estimates, gae, length_adaptive_lambda
from rlhf_jax.advantages.groups import (
    centered,
    dynamic_sampling,
    group_normalized,
    leave_one_out,
    max_rl,
    process_supervision,
)
from rlhf_jax.advantages.returns import VTrace, monte_carlo_returns, vtrace

__all__ = [
    "TRUNCATIONS",
    "Estimates",
    "MovingAverage",
    "VTrace",
    "batch_centered",
    "batch_normalized",
    "centered",
    "dynamic_sampling",
    "gae",
    "group_normalized",
    "leave_one_out",
    "length_adaptive_lambda",
    "max_rl",
    "monte_carlo_returns",
    "moving_average",
    "process_supervision",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "vtrace",
]

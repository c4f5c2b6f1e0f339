"""The critic of an experiment: a value model with a state, a step and names of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

import rlhf_jax as rl
import sharding
from common import hosts
from common.setup import Run
from common.updates import Learner, make_learner
from rlhf_jax import metrics, partition

_NAMES = {
    "optim/grad_norm": "value/grad_norm",
    "optim/update_norm": "value/update_norm",
    "optim/skipped": "value/skipped",
}


@dataclasses.dataclass(frozen=True)
class Critic:
    """A value model in training; its state changes and so lies in ``loop.more``."""

    learner: Learner
    frozen: Any
    outputs: Callable[[Any, rl.Rollout], rl.models.ValueOutput]  # (trained params, rollout), jitted

    def step(self, state: rl.TrainState, batch: rl.Batch) -> tuple[rl.TrainState, metrics.Metrics]:
        """One update; the train step's metrics under ``value/``."""
        state, found = self.learner.step(state, batch, self.frozen)
        # That of the updates would be of values that have seen the returns.
        left_out = ("policy/loss", "value/explained_variance")
        return state, {_NAMES.get(n, n): m for n, m in found.items() if n not in left_out}


def make_critic(
    run: Run,
    loss_fn: Callable[..., tuple[jax.Array, metrics.Metrics]],
    *,
    separate: bool,
    learning_rate: float,
) -> Critic:
    """A critic that begins with the policy's weights and a head of zeros.

    Args:
      run: the run.
      loss_fn: ``(values, batch) -> (scalar, Metrics)``.
      separate: train as many layers as the policy does, a second set of them; else the head alone,
        over the weights that the policy began with, which are held once.
      learning_rate: the critic's.
    """
    model = rl.models.ValueModel(run.model, trunk_stacks=run.trunk_stacks)
    params = model.init(run.params)
    layout = sharding.tree_shardings(model.logical_axes(), params, run.layout, run.mesh)
    params = hosts.place(params, layout)
    learned = {"score/weight"}
    if separate:
        leaves = jax.tree_util.tree_flatten_with_path(run.trainable)[0]
        learned |= {f"body/{partition.path_name(path)}" for path, _ in leaves}
    trainable, frozen = partition.split(params, lambda path, _: path in learned)
    learner = make_learner(
        run,
        loss_fn,
        output_fn=model.values,
        params=trainable,
        shardings=jax.tree.map(lambda x: x.sharding, trainable),
        learning_rate=learning_rate,
        parts=None,
    )

    @jax.jit
    def outputs(trained: Any, frozen: Any, rollout: rl.Rollout) -> rl.models.ValueOutput:
        return model.outputs(partition.merge(trained, frozen), rollout)

    return Critic(learner, frozen, lambda trained, rollout: outputs(trained, frozen, rollout))

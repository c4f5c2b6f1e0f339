"""Train a language model by REINFORCE: make each completion likelier by how good it was.

One step: G completions of each prompt → a reward each → the reward's KL penalty → less a baseline →
one policy-gradient update. The baseline is the mean of the batch, or that of earlier batches.

    python experiments/reinforce.py --task sort                     # a small model from scratch
    python experiments/reinforce.py --task sort --baseline moving
    python experiments/reinforce.py                                 # steer SmolLM2-135M's sentiment

Differs from the paper (Williams 1992) by default in: Adam instead of plain ascent, and a loss
divided by the tokens of the batch; ``--aggregation seq_mean_token_sum`` is the paper's, with a
gradient that grows with the length.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Literal

import common
import jax
import jax.numpy as jnp

import rlhf_jax as rl
from rlhf_jax.advantages import MovingAverage


@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    """REINFORCE's own flags come after those of every experiment."""

    least_group: ClassVar[int] = 1  # the batch is the baseline

    baseline: Literal["batch", "moving", "none"] = "batch"
    """The batch's mean, a moving average of earlier batches, or 0."""
    baseline_decay: float = 0.9
    """Weight of the past at each update of the moving average."""
    aggregation: Literal["token_mean", "seq_mean_token_sum"] = "token_mean"
    """Average over the tokens of the batch, or over completions of their token sums."""

    def check_own(self, filled: common.Filled) -> None:
        """Check the flags of this script."""
        common.check_kl_in_reward(filled)
        common.check_numbers(self, least={"baseline_decay": 0}, most={"baseline_decay": 0.999999})


def make_loss(aggregation: str):
    """−A·log π as a function of arrays."""

    def loss_fn(output: rl.types.PolicyOutput, batch: rl.Batch):
        loss, metrics = rl.losses.reinforce_loss(
            output.log_probs,
            batch.old_log_probs,
            batch.advantages,
            batch.mask,
            aggregation=aggregation,
            denominator=batch.denominator,
        )
        metrics["policy/entropy"] = rl.metrics.mean(output.entropy, batch.mask)
        return loss, metrics

    return loss_fn


@functools.partial(jax.jit, static_argnames="config")
def make_batch(
    rollout: rl.Rollout,
    rewards: jax.Array,
    log_probs: common.LogProbs,
    average: MovingAverage,
    config: Config,
) -> tuple[rl.Batch, MovingAverage, dict[str, jax.Array]]:
    """Rewards and log-probs → shaped rewards → less the baseline → what the step consumes."""
    shaped = common.kl_in_reward(rewards, rollout, log_probs, config.kl_coef or 0.0)
    before, decay = average.baseline(), config.baseline_decay
    moving, average = rl.advantages.moving_average(shaped, average, decay=decay)
    advantages = {
        "batch": rl.advantages.batch_centered(shaped),
        "moving": moving,
        "none": jnp.where(jnp.isnan(shaped), 0.0, shaped),
    }[config.baseline]
    batch = common.batch_of(
        rollout,
        mask=common.judged(rollout, rewards),
        advantages=advantages,
        log_probs=log_probs,
        aggregation=config.aggregation,
    )
    return batch, average, {"policy/baseline": before}


def train(config: Config) -> int:
    """Run; returns the exit code."""
    run = common.start(config, algorithm="reinforce")
    config = run.own
    learner = common.make_learner(run, make_loss(config.aggregation))
    average = run.place_rows(MovingAverage.init())
    with common.Loop(
        run,
        learner.state,
        common.reference_of(run),
        schedule=learner.schedule,
        baseline=average,
    ) as loop:
        for step in loop.steps():
            samples = loop.sample(step)
            with loop.timed("time/train"):
                log_probs = loop.log_probs(samples.rollout)
                rewards = run.place_rows(samples.rewards)
                batch, loop.more["baseline"], found = make_batch(
                    samples.rollout, rewards, log_probs, loop.more["baseline"], config
                )
                loop.state, metrics = learner.step(loop.state, batch, run.frozen)
                jax.block_until_ready(loop.state)
            loop.log(step, samples, log_probs, metrics | found)
    return loop.exit_code


if __name__ == "__main__":
    common.main(train, Config)

"""Train a language model by RLOO: what was better than the other completions of its prompt?

One step: G completions of each prompt → a reward each, less β·Σ_t k1 → each reward minus the mean
of the group's others → one policy-gradient update, the whole completion being one action.

    python experiments/rloo.py --task sort                       # a small model from scratch
    python experiments/rloo.py                                   # steer SmolLM2-135M's sentiment
    python experiments/rloo.py --kl-coef 0                       # the same without the governor

Differs from the paper (Ahmadian et al. 2024, "Back to basics") by default in the group size: 6 or
the task's instead of 2 or 4. ``--aggregation token_mean`` divides by tokens instead of completions,
which makes long completions weigh more and the gradient smaller.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import common
import jax

import rlhf_jax as rl


@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    """RLOO's own flags come after those of every experiment."""

    aggregation: Literal["seq_mean_token_sum", "token_mean"] = "seq_mean_token_sum"
    """Average over completions of their token sums, or over the tokens of the batch."""

    def check_own(self, filled: common.Filled) -> None:
        """Check the flags of this script."""
        common.check_kl_in_reward(filled)


def make_loss(aggregation: str):
    """The whole algorithm as a function of arrays."""

    def loss_fn(output: rl.types.PolicyOutput, batch: rl.Batch):
        loss, metrics = rl.losses.rloo_loss(
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


@functools.partial(jax.jit, static_argnames="aggregation")
def make_batch(
    rollout: rl.Rollout,
    rewards: jax.Array,
    log_probs: common.LogProbs,
    kl_coef: float | jax.Array,
    aggregation: str,
) -> rl.Batch:
    """Rewards and log-probs → R − β·Σ k1 → leave-one-out advantages → what the step consumes."""
    shaped = common.kl_in_reward(rewards, rollout, log_probs, kl_coef)
    return common.batch_of(
        rollout,
        mask=common.judged(rollout, rewards),
        advantages=rl.advantages.leave_one_out(shaped, rollout.group_ids),
        log_probs=log_probs,
        aggregation=aggregation,
    )


def train(config: Config) -> int:
    """Run; returns the exit code."""
    run = common.start(config, algorithm="rloo")
    config, kl_coef = run.own, run.config.kl_coef
    learner = common.make_learner(run, make_loss(config.aggregation))
    reference = common.reference_of(run)
    with common.Loop(run, learner.state, reference, schedule=learner.schedule) as loop:
        for step in loop.steps():
            samples = loop.sample(step)
            with loop.timed("time/train"):
                log_probs = loop.log_probs(samples.rollout)
                rewards = run.place_rows(samples.rewards)
                batch = make_batch(samples.rollout, rewards, log_probs, kl_coef, config.aggregation)
                loop.state, metrics = learner.step(loop.state, batch, run.frozen)
                jax.block_until_ready(loop.state)
            loop.log(step, samples, log_probs, metrics)
    return loop.exit_code


if __name__ == "__main__":
    common.main(train, Config)

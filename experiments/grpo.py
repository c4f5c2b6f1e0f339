"""Train a language model by GRPO: sample a group per prompt, score it, push the better ones up.

One step: G completions of each prompt → a reward each → the reward's KL penalty → z-scores within
the group → one clipped policy-gradient update. No value model: the group is the baseline.

    python experiments/grpo.py                                  # steer SmolLM2-135M's sentiment
    python experiments/grpo.py --kl-coef 0                      # the same without the governor
    python experiments/grpo.py --task addition                  # two-digit sums, exact match
    python experiments/grpo.py --task sort                      # a small model from scratch
    python experiments/grpo.py --task reasoning:basic_arithmetic --model FOLDER
    python experiments/grpo.py --prompts mine.txt --reward mine.py:score --model FOLDER

Differs from the paper (Shao et al. 2024, "DeepSeekMath", algorithm 1) by default in: the KL's
place (k1 in the reward, whose gradient is that of KL(π‖π_ref); ``--kl-place loss`` is the paper's
k3), group size 6 instead of 64, and token-mean aggregation over the whole batch instead of the mean
over completions of their token means. As there, a batch is used for one update.
"""

from __future__ import annotations

import common
import jax

import rlhf_jax as rl

AGGREGATION = "token_mean"


def make_loss(config: common.Filled):
    """The whole algorithm as a function of arrays."""
    in_loss = config.kl_coef if config.kl_place == "loss" else 0.0

    def loss_fn(output: rl.types.PolicyOutput, batch: rl.Batch):
        loss, metrics = rl.losses.grpo_loss(
            output.log_probs,
            batch.old_log_probs,
            batch.advantages,
            batch.mask,
            ref_log_probs=batch.ref_log_probs if in_loss else None,
            kl_coef=in_loss,
            aggregation=AGGREGATION,
            denominator=batch.denominator,
        )
        metrics["policy/entropy"] = rl.metrics.mean(output.entropy, batch.mask)
        return loss, metrics

    return loss_fn


@jax.jit
def make_batch(
    rollout: rl.Rollout, rewards: jax.Array, log_probs: common.LogProbs, kl_coef: float | jax.Array
) -> rl.Batch:
    """Rewards and log-probs → shaped rewards → group advantages → what the step consumes."""
    shaped = common.kl_in_reward(rewards, rollout, log_probs, kl_coef)
    return common.batch_of(
        rollout,
        mask=common.judged(rollout, rewards),
        advantages=rl.advantages.group_normalized(shaped, rollout.group_ids, ddof=1),
        log_probs=log_probs,
        aggregation=AGGREGATION,
    )


def train(config: common.Config) -> int:
    """Run; returns the exit code."""
    run = common.start(config, algorithm="grpo")
    config = run.config
    learner = common.make_learner(run, make_loss(config))
    reference = common.reference_of(run)
    in_reward = config.kl_coef if config.kl_place == "reward" else 0.0
    with common.Loop(run, learner.state, reference, schedule=learner.schedule) as loop:
        for step in loop.steps():
            samples = loop.sample(step)
            with loop.timed("time/train"):
                log_probs = loop.log_probs(samples.rollout)
                rewards = run.place_rows(samples.rewards)
                batch = make_batch(samples.rollout, rewards, log_probs, in_reward)
                loop.state, metrics = learner.step(loop.state, batch, run.frozen)
                jax.block_until_ready(loop.state)
            loop.log(step, samples, log_probs, metrics)
    return loop.exit_code


if __name__ == "__main__":
    common.main(train)

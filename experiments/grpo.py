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
import jax.numpy as jnp
import numpy as np
import optax

import rlhf_jax as rl
from rlhf_jax import checkpoint, partition

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
    rollout: rl.Rollout,
    rewards: jax.Array,
    log_probs: jax.Array,
    ref_log_probs: jax.Array | None,
    kl_coef: jax.Array | float,
) -> rl.Batch:
    """Rewards and log-probs → shaped rewards → group advantages → what the step consumes."""
    judged = ~jnp.isnan(rewards)  # a reward function may pass on a row: it is left out everywhere
    mask = rollout.mask & judged[:, None]
    shaped = rewards
    if ref_log_probs is not None:
        shaped = rl.rewards.shaping.sequence_kl_in_reward(
            rewards, log_probs, ref_log_probs, rollout.mask, kl_coef=kl_coef
        )
    advantages = rl.advantages.group_normalized(shaped, rollout.group_ids, ddof=1)
    rows = mask.shape[0]
    return rl.Batch(
        tokens=rollout.tokens,
        mask=mask,
        attention_mask=rollout.attention_mask,
        group_ids=rollout.group_ids,
        advantages=advantages,
        old_log_probs=log_probs,
        sampler_log_probs=rollout.log_probs,
        ref_log_probs=ref_log_probs,
        denominator=jnp.broadcast_to(rl.masked.denominator(mask, AGGREGATION), (rows,)),
        trunk=rollout.trunk,
        start=rollout.start,
    )


def train(config: common.Config) -> int:
    """Run; returns the exit code."""
    run = common.start(config, algorithm="grpo")
    config = run.config
    schedule = optax.linear_schedule(0.0, config.learning_rate, transition_steps=2)
    optimizer = optax.adamw(lambda count: schedule(count + 1), b2=0.99, weight_decay=0.0)
    shardings = rl.train_step.state_shardings(run.trainable, optimizer, run.shardings)
    state = rl.init_train_state(run.trainable, optimizer, shardings=run.shardings)
    reference = partition.copy(run.trainable) if config.kl_coef else None
    sampler, scorer = common.make_sampler(run), common.make_scorer(run)
    train_step = rl.make_train_step(
        common.policy_of(run),
        make_loss(config),
        optimizer,
        micro_batches=config.micro_batches,
        shardings=shardings,
    )
    in_reward = config.kl_coef if config.kl_place == "reward" else 0.0

    checkpoints = checkpoint.Checkpointer(run.folder / "checkpoints")
    first = 0
    if run.resumed:
        first, state, reference = common.restore(run, checkpoints, state, reference)
    common.print_plan(run, first_step=first)
    with (
        checkpoints,
        common.Interrupts() as interrupts,
        common.tracker(run, first_step=first if config.resume else None) as tracker,
    ):
        before = common.start_evaluation(run, tracker, sampler, scorer, state.params, reference)
        for step in range(first, config.steps):
            record: dict = {}
            with common.timed(record, "time/step"):
                with common.timed(record, "time/generate"):
                    prompts = run.source.batch(step)
                    params = partition.merge(state.params, run.frozen)
                    key = jax.random.fold_in(run.key, step)
                    rollout = sampler(params, prompts, key, step)
                    texts = common.completions(run, rollout)
                with common.timed(record, "time/score"):
                    scores = common.score(run, prompts, texts)
                with common.timed(record, "time/train"):
                    log_probs = scorer(state.params, run.frozen, rollout)
                    ref_log_probs = (
                        None if reference is None else scorer(reference, run.frozen, rollout)
                    )
                    batch = make_batch(
                        rollout,
                        run.place_rows(scores.rewards),
                        log_probs,
                        ref_log_probs,
                        in_reward,
                    )
                    state, metrics = train_step(state, batch, run.frozen)
                    jax.block_until_ready(state)
            tokens = int(np.sum(rollout.lengths))
            tracker.log(
                step,
                {
                    **common.reward_metrics(scores, np.asarray(rollout.group_ids)),
                    **common.rollout_metrics(rollout, log_probs, ref_log_probs),
                    **rl.metrics.compute(metrics),
                    **record,
                    "optim/lr": schedule(step + 1),
                    "throughput/tokens_per_s_generate": tokens / record["time/generate"],
                    "throughput/tokens_per_s_train": tokens / record["time/train"],
                    "memory/peak_bytes": common.peak_bytes(),
                },
            )
            common.show_samples(run, tracker, step, prompts, texts, scores.rewards)
            done = step + 1
            if done % config.save_every == 0 or done == config.steps or interrupts.requested:
                common.save(run, checkpoints, tracker, state, reference, done)
            if interrupts.requested and done < config.steps:
                checkpoints.wait()
                return common.say_resume(run, done)
        after = common.evaluate(run, sampler, scorer, state.params, reference, config.steps)
        tracker.evaluation(config.steps, after)
        common.export(run, state.params)
    common.print_end(run, before, after)
    return 0


if __name__ == "__main__":
    common.main(train)

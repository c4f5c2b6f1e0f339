"""Train a language model by PPO: a critic says what to expect, the policy moves towards better.

One step: G completions of each prompt → a reward each → the KL penalty on every token → advantages
by GAE over the critic's values → several epochs of shuffled minibatches, each one clipped update of
the policy and one of the critic.

    python experiments/ppo.py --task sort                       # a small model from scratch
    python experiments/ppo.py --task sort --batch-size 512 --group-size 1 --minibatches 16
    python experiments/ppo.py --kl-target 4                     # β is steered towards 4 nats
    python experiments/ppo.py --critic shared --critic-warmup 5 # a head over the starting weights
    python experiments/ppo.py --max-kl 0.05                     # end a step's epochs early

The critic learns most from different prompts, and needs no groups: ``--group-size 1``.

Differs from the papers (Schulman et al. 2017; Ouyang et al. 2022 for language models) by default
in: the critic's targets (Monte Carlo returns, so that the explained variance compares with what
came; ``--returns-lambda 0.95`` is the classical A + V), an optimizer of the critic's own in the
place of a summed loss, no entropy bonus, and token-mean aggregation over the minibatch.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Literal

import common
import jax
import jax.numpy as jnp

import rlhf_jax as rl

AGGREGATION = "token_mean"


@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    """PPO's own flags come after those of every experiment."""

    least_group: ClassVar[int] = 1  # the critic is the baseline

    critic: Literal["separate", "shared"] = "separate"
    """separate: as many layers as the policy trains, from its weights, a second set of them;
    shared: only a head, over the weights that the policy began with."""
    critic_learning_rate: float | None = None
    """The critic's learning rate; by default twice the policy's."""
    critic_warmup: int = 0
    """Steps at the start that train the critic only."""
    epochs: int = 4
    """Passes over the samples of a step."""
    minibatches: int = 4
    """Updates in a pass, of rows that are shuffled anew each time."""
    clip: float = 0.2
    """ε of the policy's ratio."""
    value_clip: float = 0.2
    """ε of the critic's step away from its value at sampling time; 0 turns it off."""
    gamma: float = 1.0
    """Discount γ."""
    gae_lambda: float = 0.95
    """λ of the advantages."""
    returns_lambda: float = 1.0
    """λ of the critic's targets; 1 is Monte Carlo."""
    truncation: Literal["terminal", "bootstrap", "mask"] = "terminal"
    """A completion cut by the length cap: as if it ended, valued by the critic, or left out."""
    kl_target: float | None = None
    """Steer β so that the summed KL to the reference comes to this many nats."""
    kl_horizon: float = 2000.0
    """Completions over which β may change by a fifth."""
    max_kl: float | None = None
    """End a step's updates when the mean KL(old→new) of a token exceeds this."""

    def check_own(self, filled: common.Filled) -> None:
        """Check the flags of this script."""
        least = {"epochs": 1, "minibatches": 1, "critic_warmup": 0, "value_clip": 0}
        unit = ("gamma", "gae_lambda", "returns_lambda")
        common.check_numbers(
            self,
            least=least | dict.fromkeys(unit, 0),
            most=dict.fromkeys(unit, 1),
            positive=("clip", "critic_learning_rate", "kl_target", "kl_horizon", "max_kl"),
        )
        common.check_updates(filled, self.minibatches)
        common.check_kl_in_reward(filled)
        if self.kl_target is not None and not filled.kl_coef:
            raise ValueError("--kl-target steers the KL's weight: give where it begins, --kl-coef")
        if self.kl_horizon < filled.batch_size / 5:  # or one step could take β below 0
            raise ValueError(
                f"--kl-horizon {self.kl_horizon:g}: use at least a fifth of --batch-size "
                f"{filled.batch_size}"
            )


def policy_loss(config: Config):
    """The policy's half of the algorithm as a function of arrays."""

    def loss_fn(output: rl.types.PolicyOutput, batch: rl.Batch):
        loss, metrics = rl.losses.ppo_loss(
            output.log_probs,
            batch.old_log_probs,
            batch.advantages,
            batch.mask,
            clip_low=config.clip,
            clip_high=config.clip,
            aggregation=AGGREGATION,
            denominator=batch.denominator,
        )
        metrics["policy/entropy"] = rl.metrics.mean(output.entropy, batch.mask)
        return loss, metrics

    return loss_fn


def critic_loss(config: Config):
    """The critic's half: towards the returns, not far from the values at sampling time."""

    def loss_fn(values: jax.Array, batch: rl.Batch):
        return rl.losses.value_loss(
            values,
            batch.extra["old_values"],
            batch.extra["returns"],
            batch.mask,
            clip=config.value_clip or None,
            aggregation=AGGREGATION,
            denominator=batch.denominator,
        )

    return loss_fn


@functools.partial(jax.jit, static_argnames="config")
def make_batch(
    rollout: rl.Rollout,
    rewards: jax.Array,
    log_probs: common.LogProbs,
    critic: rl.models.ValueOutput,
    kl: rl.kl.FixedKL | rl.kl.AdaptiveKL,
    config: Config,
) -> tuple[rl.Batch, rl.kl.FixedKL | rl.kl.AdaptiveKL, dict[str, Any]]:
    """Rewards, log-probs and values → rewards per token → GAE → what all updates consume."""
    mask = common.judged(rollout, rewards)
    old, ref = log_probs.old, log_probs.old if log_probs.ref is None else log_probs.ref
    estimates = rl.advantages.gae(
        rl.rewards.shaping.kl_in_reward(rewards, old, ref, mask, kl_coef=kl.coef),
        critic.values,
        mask,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        returns_lambda=config.returns_lambda,
        truncation=config.truncation,
        truncated=rollout.truncated,
        bootstrap_value=critic.bootstrap,
    )
    mask, returns = estimates.mask, estimates.returns
    batch = common.batch_of(
        rollout,
        mask=mask,
        advantages=rl.masked.whiten(estimates.advantages, mask),
        log_probs=log_probs,
        extra={"old_values": critic.values, "returns": returns},
        aggregation=AGGREGATION,
    )
    explained = rl.metrics.explained_variance(returns, critic.values, mask)
    found = {"value/explained_variance": explained, "policy/kl_coef": kl.coef}
    if log_probs.ref is not None:
        kl = kl.update(rl.kl.mean_sequence_kl(old, ref, rollout.mask), mask.shape[0])
    return batch, kl, found


def kl_controller(run: common.Run, config: Config) -> rl.kl.FixedKL | rl.kl.AdaptiveKL:
    """β as it begins, and what moves it; arrays, so that a checkpoint holds it."""
    coef = jnp.float32(run.config.kl_coef)
    if config.kl_target is None:
        return run.place_rows(rl.kl.FixedKL(coef=coef))
    target, horizon = jnp.float32(config.kl_target), jnp.float32(config.kl_horizon)
    kl = rl.kl.AdaptiveKL(coef=coef, target=target, horizon=horizon, clip=jnp.float32(0.2))
    return run.place_rows(kl)


def update(
    loop: common.Loop, step: int, batch: rl.Batch, actor: common.Learner, critic: common.Critic
) -> common.Collected:
    """All epochs over one batch, whose old log-probs, old values and returns stay as they are."""
    config: Config = loop.run.own
    updates = common.Collected()
    for part in common.minibatches(
        loop.run,
        batch,
        step,
        epochs=config.epochs,
        parts=config.minibatches,
        aggregation=AGGREGATION,
    ):
        loop.more["critic"], metrics = critic.step(loop.more["critic"], part)
        if step >= config.critic_warmup:
            loop.state, of_actor = actor.step(loop.state, part, loop.run.frozen)
            metrics |= of_actor
        updates.add(metrics)
        if config.max_kl and updates.latest("policy/kl_old") > config.max_kl:
            break
    return updates


def train(config: Config) -> int:
    """Run; returns the exit code."""
    run = common.start(config, algorithm="ppo")
    config = run.own
    actor = common.make_learner(run, policy_loss(config), parts=None)
    critic = common.make_critic(
        run,
        critic_loss(config),
        separate=config.critic == "separate",
        learning_rate=config.critic_learning_rate or 2 * run.config.learning_rate,
    )
    with common.Loop(
        run,
        actor.state,
        common.reference_of(run),
        schedule=actor.schedule,
        critic=critic.learner.state,
        kl=kl_controller(run, config),
    ) as loop:
        for step in loop.steps():
            samples = loop.sample(step)
            with loop.timed("time/train"):
                log_probs = loop.log_probs(samples.rollout)
                values = critic.outputs(loop.more["critic"].params, samples.rollout)
                rewards = run.place_rows(samples.rewards)
                batch, loop.more["kl"], found = make_batch(
                    samples.rollout, rewards, log_probs, values, loop.more["kl"], config
                )
                updates = update(loop, step, batch, actor, critic)
                jax.block_until_ready((loop.state, loop.more["critic"]))
            loop.log(step, samples, log_probs, updates.compute() | found)
    return loop.exit_code


if __name__ == "__main__":
    common.main(train, Config)

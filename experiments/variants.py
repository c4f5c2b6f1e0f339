"""Train a language model by one of GRPO's descendants: ``METHODS`` says where they differ.

One step: G completions of each prompt → a reward each → advantages within the group → one epoch of
clipped updates. All but DAPO sample once a step; DAPO goes on until every group holds both better
and worse completions, since a group of equal rewards teaches nothing.

    python experiments/variants.py --task sort --method dr_grpo
    python experiments/variants.py --task sort --method dapo --max-new-tokens 8 --overlong-cache 1
    python experiments/variants.py --task sort --method gspo --minibatches 4

Differs from the papers by default in: everything that is not in the table (Adam's settings, group
sizes, batch sizes), and one update a batch (``--minibatches``), where no ratio is clipped yet.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import common
import jax
import jax.numpy as jnp
import numpy as np

import rlhf_jax as rl
from rlhf_jax import advantages, losses


@dataclasses.dataclass(frozen=True)
class Method:
    """What a method is made of; the rest of the loop is the same for all."""

    loss: Callable[..., tuple[jax.Array, rl.metrics.Metrics]]
    advantages: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # rewards, group ids, mask
    aggregation: str
    clip: Mapping[str, float] = dataclasses.field(default_factory=dict)
    mixed_groups: bool = False  # sample until every group is mixed


def z_score(rewards: jax.Array, group_ids: jax.Array, _: jax.Array) -> jax.Array:
    return advantages.group_normalized(rewards, group_ids, ddof=1)


def centered(rewards: jax.Array, group_ids: jax.Array, _: jax.Array) -> jax.Array:
    return advantages.centered(rewards, group_ids)


SEQUENCES, TOKENS = "seq_mean_token_mean", "token_mean"
METHODS = {
    # Liu et al. 2025: neither length nor spread of a group changes the size of a gradient.
    "dr_grpo": Method(losses.dr_grpo_loss, centered, "fixed_length"),
    # Yu et al. 2025: clip-higher, mixed groups only, mean over tokens, soft overlong penalty.
    "dapo": Method(
        losses.dapo_loss, z_score, TOKENS, dict(clip_low=0.2, clip_high=0.28), mixed_groups=True
    ),
    # Zheng et al. 2025: one length-normalised ratio a sequence.
    "gspo": Method(losses.gspo_loss, z_score, SEQUENCES, dict(clip_low=3e-4, clip_high=4e-4)),
    # MiniMax 2025: the weight is clipped, and every token keeps its gradient.
    "cispo": Method(losses.cispo_loss, z_score, TOKENS, dict(clip_low=0.2, clip_high=0.28)),
    # Gao et al. 2025: a soft gate in the place of the clip.
    "sapo": Method(losses.sapo_loss, z_score, SEQUENCES),
    # Zhao et al. 2025: geometric mean of clipped ratios.
    "gmpo": Method(losses.gmpo_loss, z_score, SEQUENCES, dict(clip_low=0.4, clip_high=0.4)),
    # Le Roux et al. 2025: the good in full, the bad as long as they are still likely.
    "topr": Method(losses.topr_loss, centered, "seq_mean_token_sum"),
    # Hu et al. 2025, with a group's baseline: whitened over all tokens of the batch.
    "reinforce_pp": Method(
        losses.reinforce_pp_loss, advantages.reinforce_plus_plus_baseline, TOKENS
    ),
}


@dataclasses.dataclass(frozen=True)
class Config(common.Config):
    """The variants' own flags come after those of every experiment."""

    method: Literal["dr_grpo", "dapo", "gspo", "cispo", "sapo", "gmpo", "topr", "reinforce_pp"] = (
        "dr_grpo"
    )
    """A row of the table METHODS."""
    minibatches: int = 1
    """Updates a step, each on its share of the batch."""
    epochs: int = 1
    """Passes over the samples of a step."""
    draws: int = 4
    """DAPO: how often to sample at most until every group is mixed; then equal ones fill up."""
    overlong_cache: int = 0
    """Charge the last so many tokens below the length cap, up to 1 at the cap; 0 is off."""

    def check_own(self, filled: common.Filled) -> None:
        """Check the flags of this script."""
        if self.method not in METHODS:  # in a config.json that was edited
            raise ValueError(f"--method {self.method}: there are {', '.join(METHODS)}")
        common.check_numbers(
            self,
            least={"minibatches": 1, "epochs": 1, "draws": 1, "overlong_cache": 0},
            most={"overlong_cache": filled.max_new_tokens},
        )
        common.check_kl_in_reward(filled)
        common.check_updates(filled, self.minibatches, whole_groups=True)


def make_loss(method: Method):
    """The method's loss on what the learner's forward pass gave."""

    def loss_fn(output: rl.types.PolicyOutput, batch: rl.Batch):
        loss, metrics = method.loss(
            output.log_probs,
            batch.old_log_probs,
            batch.advantages,
            batch.mask,
            aggregation=method.aggregation,
            denominator=batch.denominator,
            **method.clip,
        )
        metrics["policy/entropy"] = rl.metrics.mean(output.entropy, batch.mask)
        return loss, metrics

    return loss_fn


@functools.partial(jax.jit, static_argnames=("config", "length"))
def make_batch(
    rollout: rl.Rollout,
    rewards: jax.Array,
    log_probs: common.LogProbs,
    kl_coef: float | jax.Array,
    *,
    config: Config,
    length: int,
) -> rl.Batch:
    """Rewards and log-probs → shaped rewards → the method's advantages → what all updates use."""
    method, mask = METHODS[config.method], common.judged(rollout, rewards)
    if config.overlong_cache:
        rewards = rewards + rl.rewards.shaping.overlong_soft(
            rollout.lengths, max_length=length, cache=config.overlong_cache
        )
    shaped = common.kl_in_reward(rewards, rollout, log_probs, kl_coef)
    return common.batch_of(
        rollout,
        mask=mask,
        advantages=method.advantages(shaped, rollout.group_ids, mask),
        log_probs=log_probs,
        aggregation=method.aggregation,
        length=length,
    )


def sample_mixed(
    loop: common.Loop, step: int, draws: int
) -> tuple[common.Samples, dict[str, float]]:
    """Sample until every group of the batch is mixed, at most ``draws`` times.

    Which prompts come next is part of the checkpoint. The figures are those of everything drawn:
    the rewards of mixed groups alone would say nothing of the policy.
    """
    group = loop.run.config.group_size
    kept, mixed, seen = None, np.zeros(0, bool), []
    for _ in range(draws):
        position = int(loop.more["position"])
        loop.more["position"] = loop.run.place_rows(jnp.int32(position + 1))
        fresh = loop.sample(step, position=position)
        keep, _ = advantages.dynamic_sampling(fresh.rewards, common.whole(fresh.rollout.group_ids))
        seen.append(fresh.rewards)
        both = np.concatenate([mixed, np.asarray(keep).reshape(-1, group).any(axis=1)])
        chosen = np.argsort(~both, kind="stable")[: len(fresh.prompts)]  # mixed groups first
        kept = fresh if kept is None else kept.pick(fresh, chosen, loop.run)
        mixed = both[chosen] if len(seen) > 1 else both
        if mixed.all():
            break
    assert kept is not None
    figures = {
        "reward/mean": float(np.nanmean(seen)),
        "reward/mixed_groups": float(mixed.mean()),
        "reward/draws": len(seen),
    }
    return kept, figures


def train(config: Config) -> int:
    """Run; returns the exit code."""
    run = common.start(config, algorithm="variants", name=config.method)
    config, length = run.own, run.config.max_new_tokens
    method = METHODS[config.method]
    learner = common.make_learner(run, make_loss(method), parts=config.minibatches)
    more: dict[str, Any] = {"position": run.place_rows(jnp.int32(0))} if method.mixed_groups else {}
    passes: dict[str, Any] = dict(epochs=config.epochs, parts=config.minibatches, length=length)
    passes |= dict(aggregation=method.aggregation, whole_groups=True)
    reference = common.reference_of(run)
    with common.Loop(run, learner.state, reference, schedule=learner.schedule, **more) as loop:
        for step in loop.steps():
            if method.mixed_groups:
                samples, found = sample_mixed(loop, step, config.draws)
            else:
                samples, found = loop.sample(step), {}
            with loop.timed("time/train"):
                log_probs = loop.log_probs(samples.rollout)
                rewards, kl_coef = run.place_rows(samples.rewards), run.config.kl_coef
                batch = make_batch(
                    samples.rollout, rewards, log_probs, kl_coef, config=config, length=length
                )
                updates = common.Collected()
                for part in common.minibatches(run, batch, step, **passes):
                    loop.state, metrics = learner.step(loop.state, part, run.frozen)
                    updates.add(metrics)
                jax.block_until_ready(loop.state)
            loop.log(step, samples, log_probs, updates.compute() | found)
    return loop.exit_code


if __name__ == "__main__":
    common.main(train, Config)

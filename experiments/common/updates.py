"""Around the update: the optimizer and the jitted step, its batch, minibatches, its metrics."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import rlhf_jax as rl
import sharding
from common.config import Filled
from common.passes import LogProbs, policy_of
from common.setup import Run
from rlhf_jax import metrics, minibatch, partition


@dataclasses.dataclass(frozen=True)
class Learner:
    """Parameters in training and the jitted step that trains them."""

    state: rl.TrainState
    step: Callable[..., tuple[rl.TrainState, metrics.Metrics]]
    schedule: Callable[[Any], Any]  # updates tried → learning rate of the next one


def make_learner(
    run: Run,
    loss_fn: Callable[..., tuple[jax.Array, metrics.Metrics]],
    *,
    output_fn: Callable[..., Any] | None = None,
    params: Any = None,
    shardings: Any = None,
    learning_rate: float | None = None,
    parts: int | None = 1,
) -> Learner:
    """AdamW after a warm-up of two updates, a fresh state, one compiled step.

    Args:
      run: the run.
      loss_fn: ``(output, batch) -> (scalar, Metrics)``.
      output_fn: ``(params, batch) -> output``; the policy's by default.
      params: what is trained; the policy's trainable part by default.
      shardings: of ``params``.
      learning_rate: the run's by default.
      parts: minibatches of whole groups that a batch is updated in; None if they split groups.
    """
    rate = run.config.learning_rate if learning_rate is None else learning_rate
    if params is None:
        params, shardings = run.trainable, run.shardings
    schedule = optax.linear_schedule(0.0, rate, transition_steps=2)
    optimizer = optax.adamw(lambda count: schedule(count + 1), b2=0.99, weight_decay=0.0)
    count = run.config.micro_batches
    group = run.sharing(run.config.batch_size // parts // count) if parts else 1
    step = rl.make_train_step(
        output_fn or policy_of(run, group),
        loss_fn,
        optimizer,
        micro_batches=count,
        group_size=group,
        shardings=rl.train_step.state_shardings(params, optimizer, shardings),
    )
    state = rl.init_train_state(params, optimizer, shardings=shardings)
    return Learner(state, step, schedule)


def reference_of(run: Run) -> Any:
    """A copy of what is trained, to stay near to; None without a KL: it is never loaded."""
    return partition.copy(run.trainable) if run.config.kl_coef else None


def judged(rollout: rl.Rollout, rewards: jax.Array) -> jax.Array:
    """The tokens to learn from: a reward function may pass on a row, which is left out of all."""
    return rollout.mask & ~jnp.isnan(rewards)[:, None]


def kl_in_reward(
    rewards: jax.Array, rollout: rl.Rollout, log_probs: LogProbs, kl_coef: jax.Array | float
) -> jax.Array:
    """R − β·Σ_t k1 of each completion; R where there is no reference."""
    if log_probs.ref is None:
        return rewards
    return rl.rewards.shaping.sequence_kl_in_reward(
        rewards, log_probs.old, log_probs.ref, rollout.mask, kl_coef=kl_coef
    )


def batch_of(
    rollout: rl.Rollout,
    *,
    mask: jax.Array,
    advantages: jax.Array,
    log_probs: LogProbs,
    extra: dict[str, jax.Array] | None = None,
    aggregation: str,
    length: int | None = None,
) -> rl.Batch:
    """What a step consumes, its denominator counted over all rows; for use under jit."""
    batch = rl.Batch(
        tokens=rollout.tokens,
        mask=mask,
        attention_mask=rollout.attention_mask,
        group_ids=rollout.group_ids,
        advantages=advantages,
        old_log_probs=log_probs.old,
        sampler_log_probs=rollout.log_probs,
        ref_log_probs=log_probs.ref,
        trunk=rollout.trunk,
        extra=extra or {},
        start=rollout.start,
    )
    return minibatch.counted(batch, aggregation, length=length)


def minibatches(
    run: Run,
    batch: rl.Batch,
    step: int,
    *,
    epochs: int,
    parts: int,
    aggregation: str,
    length: int | None = None,
    whole_groups: bool = False,
) -> Iterator[rl.Batch]:
    """``epochs`` × ``parts`` shuffled minibatches; each is the whole batch of one update.

    A row comes once an epoch, in an order that the run's seed, the step and the epoch decide.
    """
    if epochs == parts == 1:
        yield batch
        return
    rows, group = batch.group_ids.shape[0], run.config.group_size
    key = jax.random.fold_in(jax.random.fold_in(run.key, 2**31 - 3), step)  # not the sampler's
    for epoch in range(epochs):
        shuffled = minibatch.shuffle(
            jax.random.fold_in(key, epoch),
            rows=rows,
            parts=parts,
            group_size=group if whole_groups else 1,
        )
        for index in shuffled:
            part = _take(batch, index, aggregation, length)
            yield run.place_rows(part)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _take(batch: rl.Batch, index: jax.Array, aggregation: str, length: int | None) -> rl.Batch:
    return minibatch.counted(minibatch.take(batch, index), aggregation, length=length)


class Collected:
    """The metrics of the updates of one step, each reduced by its own rule.

    Losses and norms are averaged over the updates, dropped updates are counted.
    """

    def __init__(self) -> None:
        self._number = 0
        self._found: metrics.Metrics = {}
        self._latest: metrics.Metrics = {}

    def add(self, found: metrics.Metrics) -> None:
        """Take in the metrics of one update."""
        self._latest = {name: _of_one_update(name, metric) for name, metric in found.items()}
        self._found = _merge(self._found, self._latest) if self._number else self._latest
        self._number += 1

    def latest(self, name: str) -> float:
        """A metric of the latest update, 0 if it has none of that name; waits for it."""
        return float(self._latest[name].value()) if name in self._latest else 0.0

    def compute(self) -> dict[str, Any]:
        """Name → scalar, and how many updates there were."""
        return {**metrics.compute(self._found), "optim/updates": self._number}


def _of_one_update(name: str, metric: metrics.Metric) -> metrics.Metric:
    """A loss is a sum over its micro-batches, but the sum over several updates says nothing."""
    if metric.kind != "sum" or name.endswith("/skipped"):
        return metric
    return metrics.Metric(total=metric.total, weight=jnp.ones_like(metric.total), kind="mean")


_merge = jax.jit(metrics.merge)  # one program instead of hundreds of small ones a step


def check_updates(config: Filled, parts: int, *, whole_groups: bool = False) -> None:
    """Check early that a batch makes ``parts`` minibatches that split as the run wants.

    Raises:
      ValueError: naming the flags.
    """
    rows, group = config.batch_size, config.group_size
    if rows % parts:
        raise ValueError(f"--minibatches {parts} does not divide the batch of {rows} rows")
    mine = rows // parts
    if mine % config.micro_batches:
        raise ValueError(
            f"--micro-batches {config.micro_batches} does not divide a minibatch of {mine} rows"
        )
    if whole_groups and mine % group:
        raise ValueError(
            f"--minibatches {parts}: {mine} rows are no whole groups of {group}; "
            f"use a divisor of {rows // group}"
        )
    layout = sharding.get_layout(config.layout)
    each = mine // config.micro_batches
    sharding.check_rows(
        each, layout, sharding.make_mesh(layout), name=f"{each} rows of a minibatch"
    )

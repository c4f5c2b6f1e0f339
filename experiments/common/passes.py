"""The passes of a step around the update: sample, decode, score, measure, evaluate."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import rlhf_jax as rl
from common import hosts
from common.setup import Run
from rlhf_jax import data, partition, policy
from rlhf_jax.rewards import functions


class LogProbs(NamedTuple):
    """Log-probs [B, T] of the sampled tokens before the update; ``ref`` without a KL is None."""

    old: jax.Array
    ref: jax.Array | None


def make_scorer(run: Run) -> Callable[[Any, Any, rl.Rollout], jax.Array]:
    """``scorer(trainable, frozen, rollout) -> log-probs [B, T]``, for old policy and reference.

    One jitted function serves both: for equal parameters their KL is exactly 0.
    """
    policy_fn = policy_of(run, run.sharing(run.config.batch_size), with_entropy=False)

    @jax.jit
    def scorer(trainable: Any, frozen: Any, rollout: rl.Rollout) -> jax.Array:
        return policy_fn(partition.merge(trainable, frozen), rollout).log_probs

    return scorer


def policy_of(run: Run, group_size: int, *, with_entropy: bool = True) -> policy.PolicyFn:
    """The learner's policy function of a run, for rows in groups of one prompt."""
    return policy.from_decoder(
        run.model,
        temperature=run.config.temperature,
        with_entropy=with_entropy,
        trunk_stacks=run.trunk_stacks,
        group_size=group_size,
    )


def make_sampler(run: Run) -> Callable[..., rl.Rollout]:
    """``sampler(params, prompts, key, version) -> Rollout`` with the run's settings and trunk."""
    config = run.config
    stacks, group = run.trunk_stacks, run.sharing(config.batch_size)

    @jax.jit
    def add_trunk(params: Any, rollout: rl.Rollout) -> rl.Rollout:
        trunk = policy.trunk(run.model, params, rollout, stacks, group_size=group)
        return dataclasses.replace(rollout, trunk=trunk)

    def sampler(params: Any, prompts: data.PromptBatch, key: jax.Array, version: Any) -> rl.Rollout:
        tokens, mask = run.place_rows((prompts.tokens, prompts.attention_mask))
        rollout = rl.generate(
            run.model,
            params,
            tokens,
            mask,
            key,
            group_size=config.group_size,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            stop_ids=run.stop_ids,
            group_ids=prompts.ids,
            version=version,
        )
        rollout = run.place_rows(rollout)
        return add_trunk(params, rollout) if stacks else rollout

    return sampler


def completions(run: Run, rollout: rl.Rollout) -> list[str | None]:
    """Decode the sampled tokens for the reward and for people; training keeps the ids.

    On a pod each process decodes its own rows; the others' are None.
    """
    tokens, lengths = hosts.visible(rollout.tokens), hosts.visible(rollout.lengths)
    mine = run.owners(len(lengths)) == jax.process_index()
    return [
        run.tokenizer.decode(row[:length], skip_special_tokens=True) if own else None
        for row, length, own in zip(tokens[:, rollout.start :], lengths, mine, strict=True)
    ]


def score(run: Run, prompts: data.PromptBatch, texts: Sequence[str | None]) -> functions.Scores:
    """Call the task's reward on every completion; each process on its own, for all of them.

    A process without rows (where an axis that splits no rows spans processes) does not call it.
    """
    group = run.config.group_size
    rows = [row for row, text in enumerate(texts) if text is not None]

    def judge() -> dict[str, Any]:
        if not rows:
            return {"rows": [], "rewards": [], "parts": {}}
        found = functions.score(
            run.task.reward,
            [prompts.prompts[row // group] for row in rows],
            [text for text in texts if text is not None],
            columns={n: [v[row // group] for row in rows] for n, v in prompts.columns().items()},
        )
        parts = {name: values.tolist() for name, values in found.by_function.items()}
        return {"rows": rows, "rewards": found.rewards.tolist(), "parts": parts}

    found = hosts.together(judge)

    def all_rows(values: list[list[float]]) -> np.ndarray:
        out = np.full(len(texts), np.nan, np.float32)
        for one, part in zip(found, values, strict=True):
            out[one["rows"]] = part
        return out

    names = dict.fromkeys(name for one in found for name in one["parts"])
    return functions.Scores(
        rewards=all_rows([one["rewards"] for one in found]),
        by_function={n: all_rows([one["parts"].get(n, []) for one in found]) for n in names},
    )


@jax.jit
def rollout_metrics(
    rollout: rl.Rollout, log_probs: jax.Array, ref_log_probs: jax.Array | None
) -> dict[str, jax.Array]:
    """Lengths, the sampler's agreement with the learner, and the KL to the reference."""
    mask, lengths = rollout.mask, rollout.lengths.astype(jnp.float32)
    gap = jnp.abs(log_probs - rollout.log_probs)
    out = {
        "completion/length_mean": lengths.mean(),
        "completion/length_min": lengths.min(),
        "completion/length_max": lengths.max(),
        "completion/truncated": rollout.truncated.mean(),
        "off_policy/logprob_diff_mean": rl.masked.mean(gap, mask),
        "off_policy/logprob_diff_max": jnp.max(jnp.where(mask, gap, 0.0)),
    }
    if ref_log_probs is not None:
        k1 = rl.kl.k1(log_probs, ref_log_probs, mask=mask)
        out["policy/kl_ref_k1"] = rl.masked.mean(k1, mask)
        out["policy/kl_ref_k3"] = rl.masked.mean(
            rl.kl.k3(log_probs, ref_log_probs, mask=mask), mask
        )
        out["policy/kl_ref_sum"] = jnp.sum(k1) / mask.shape[0]
    return out


def peak_bytes() -> int:
    """The most memory held so far: the device's where it says, else the process's."""
    stats = jax.local_devices()[0].memory_stats() or {}
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    return int(stats.get("peak_bytes_in_use", own))


def reward_metrics(scores: functions.Scores, group_ids: np.ndarray) -> dict[str, float]:
    """Mean and spread of the rewards, and the share of groups that teach nothing."""
    rewards = scores.rewards.astype(np.float64)
    seen = rewards[~np.isnan(rewards)]
    groups = [rewards[group_ids == group] for group in np.unique(group_ids)]
    flat = [np.nanmax(g) == np.nanmin(g) for g in groups if not np.isnan(g).all()]
    return {
        "reward/mean": float(seen.mean()) if seen.size else 0.0,
        "reward/std": float(seen.std()) if seen.size else 0.0,
        "reward/zero_std_groups": float(np.mean(flat)) if flat else 0.0,
        **scores.metrics(),
    }


def evaluate(
    run: Run, sampler: Any, scorer: Any, trainable: Any, reference: Any, version: int
) -> dict[str, float]:
    """Sample every held-out prompt with fixed keys: reward, diversity, length, KL.

    Uses the training shapes, so that nothing compiles anew. Groups of one are sampled eight times,
    so that the figures are about as sharp as those of a method with groups.
    """
    draws, size = (8 if run.config.group_size == 1 else 1), run.held_out.steps_per_epoch
    params = partition.merge(trainable, run.frozen)
    rewards, found = [], []
    texts: list[Any] = []
    for index in range(draws * size):
        key = jax.random.fold_in(run.key, 2**31 - 2 - 2 * (index // size))
        prompts = run.held_out.batch(index % size)
        rollout = sampler(params, prompts, key, version)
        mine = completions(run, rollout)
        rewards.append(score(run, prompts, mine).rewards)
        texts += mine
        log_probs = scorer(trainable, run.frozen, rollout)
        ref = None if reference is None else scorer(reference, run.frozen, rollout)
        found.append(rollout_metrics(rollout, log_probs, ref))
    mean = {name: float(np.mean([f[name] for f in found])) for name in found[0]}
    seen = np.concatenate(rewards).astype(np.float64)
    seen = seen[~np.isnan(seen)]
    texts = hosts.all_texts(texts)
    out = {"reward": float(seen.mean())} if seen.size else {}  # none judged: no figure
    if any(len(text.split()) > 1 for text in texts):
        out["distinct_2"] = rl.report.distinct_n(texts, 2)
    out["length"] = mean["completion/length_mean"]
    if reference is not None:
        out["kl_ref_sum"] = mean["policy/kl_ref_sum"]
    return out


def start_evaluation(
    run: Run,
    tracker: rl.tracking.Tracker,
    sampler: Any,
    scorer: Any,
    trainable: Any,
    reference: Any,
) -> dict[str, float]:
    """The held-out figures before the first update; a resumed run reads what it measured then."""
    if run.config.resume and (before := hosts.first(lambda: _figures_at_start(run))):
        return before
    figures = evaluate(run, sampler, scorer, trainable, reference, 0)
    tracker.evaluation(0, figures)
    return figures


def _figures_at_start(run: Run) -> dict[str, float]:
    for record in rl.tracking.read_jsonl(run.folder / "eval.jsonl"):
        if record["step"] == 0:
            return {k.removeprefix("eval/"): v for k, v in record.items() if "eval/" in k}
    return {}


@contextlib.contextmanager
def timed(record: dict[str, Any], name: str) -> Iterator[None]:
    """Add the seconds of a block to a record."""
    begin = time.perf_counter()
    yield
    record[name] = record.get(name, 0.0) + time.perf_counter() - begin

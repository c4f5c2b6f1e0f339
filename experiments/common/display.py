"""What a person sees: the plan, two samples now and then, and the result."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import rlhf_jax as rl
import sharding
from common import hosts
from common.config import SMALL_MODEL
from common.setup import Run
from rlhf_jax import console, partition


def print_plan(run: Run, *, first_step: int) -> None:
    """Say what will be done before it is done."""
    if not hosts.is_first():
        return
    config, model = run.config, run.model.config
    total, trained = partition.count(run.params), partition.count(run.trainable)
    prompts = config.prompts_per_step
    lines = {
        "task": f"{config.task}: {len(run.task.train)} prompts, {len(run.task.held_out)} held out",
        "model": f"{config.model or ('from scratch' if run.task.scratch else SMALL_MODEL)}: "
        f"{total / 1e6:.1f}M parameters, {model.num_layers} layers, {config.dtype} compute",
        "trainable": f"{trained / 1e6:.1f}M"
        + (f" (the last {config.trainable_layers} layers)" if config.trainable_layers else ""),
        "layout": f"{config.layout} on {sharding.describe(run.mesh)}",
        "step": f"{prompts} prompts × {config.group_size} completions of ≤ {config.max_new_tokens} "
        f"tokens, {config.micro_batches} micro-batch(es)",
        "update": f"lr {config.learning_rate:g}, KL {config.kl_coef:g} in the {config.kl_place}"
        if config.kl_coef
        else f"lr {config.learning_rate:g}, no KL, no reference model",
        "memory": f"about {_memory(run) / 2**30:.2f} GiB of arrays",
        "steps": f"{first_step} → {config.steps}, seed {config.seed}",
        "folder": str(run.folder),
    }
    for name, text in lines.items():
        print(f"{name:>10}  {text}")
    sys.stdout.flush()


def _memory(run: Run) -> int:
    """Parameters, masters' copy, moments, gradients, reference, KV cache and logits of a step."""
    config, model = run.config, run.model.config
    trained = partition.nbytes(run.trainable)
    copies = 5 if config.kl_coef else 4  # masters, two moments, gradients (and the reference)
    rows, part = config.batch_size, config.batch_size // config.micro_batches
    prompts: Any = run.source.batch(0).tokens
    length = prompts.shape[1] + config.max_new_tokens
    cache = 8 * model.num_layers * model.num_kv_heads * model.head_dim * rows * length
    logits = 8 * rows * model.vocab_size
    activations = 4 * part * length * model.hidden_size * (4 + 14 * model.num_layers)
    return partition.nbytes(run.params) + copies * trained + cache + logits + activations


def print_end(run: Run, before: dict[str, float], after: dict[str, float]) -> None:
    """The table, the picture and the command that samples from the result."""
    if not hosts.is_first():
        return
    print()
    rl.report.print_table(before, after, title="held-out prompts")
    picture = rl.report.plot_run(run.folder, title=f"{run.config.task}, seed {run.config.seed}")
    print(f"\ncurves   {picture}\nmetrics  {run.folder / 'metrics.jsonl'}")
    print(f"sample   python experiments/sample.py {run.folder}")
    sys.stdout.flush()


def tracker(run: Run, *, first_step: int | None) -> rl.tracking.Tracker:
    """The run's tracker: console, files, TensorBoard; on a pod those of process 0 alone."""
    if not hosts.is_first():
        return rl.tracking.Tracker(run.folder, backends=[Watch()], quiet=True)
    shown = console.Console(total_steps=run.config.steps, first_step=first_step or 0)
    return rl.tracking.Tracker(run.folder, backends=[shown, Watch()], resume_step=first_step)


class Watch:
    """Ends a run whose updates are all dropped: it would go on to the end for nothing."""

    def __init__(self, patience: int = 5):
        self._patience = patience
        self._dropped = 0

    def write(self, step: int, record: Mapping[str, float]) -> None:
        """Look at one record; raises ValueError after ``patience`` dropped updates in a row."""
        if "optim/skipped" in record:
            self._dropped = self._dropped + 1 if record["optim/skipped"] else 0
        if self._dropped == self._patience:
            raise ValueError(
                f"the last {self._patience} updates, up to step {step + 1}, were dropped because "
                "the gradient is not finite: try a lower --learning-rate, and look for NaN in the "
                "model"
            )

    def close(self) -> None:
        """Nothing to close."""


def show_samples(
    run: Run,
    tracker: rl.tracking.Tracker,
    step: int,
    prompts: Sequence[str],
    texts: Sequence[str | None],
    rewards: np.ndarray,
) -> None:
    """Two completions every few steps: the first of two prompts."""
    if step % run.config.sample_every and step != run.config.steps - 1:
        return
    group = run.config.group_size
    shown = range(min(2, len(prompts)))
    found = hosts.all_texts([texts[p * group] for p in shown])
    rows = [
        {
            "prompt": prompts[p],
            "completion": found[p],
            "reward": None if np.isnan(rewards[p * group]) else rewards[p * group],
        }
        for p in shown
    ]
    tracker.samples(step, rows)

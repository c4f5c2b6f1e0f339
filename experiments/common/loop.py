"""What surrounds the steps of a run: restore, evaluate, time, record, save, stop, export.

    with common.Loop(run, learner.state, reference, schedule=learner.schedule) as loop:
        for step in loop.steps():
            ...                                  # the algorithm
            loop.log(samples, old, metrics)
    return loop.exit_code

What changes from step to step lies in ``loop.state``, ``loop.reference`` and ``loop.more``: it is
what a checkpoint holds and a resumed run begins with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rlhf_jax as rl
from common import display, hosts, passes, saving
from common.passes import LogProbs
from common.setup import Run
from rlhf_jax import checkpoint, data, partition
from rlhf_jax.rewards import functions


@dataclasses.dataclass(frozen=True)
class Samples:
    """The completions of one step: as ids, as text, and what they were worth.

    On a pod a process has the texts of its own rows, and None for the others'; it has all rewards.
    """

    prompts: tuple[str, ...]
    rollout: rl.Rollout
    texts: list[str | None]
    scores: functions.Scores

    @property
    def rewards(self) -> np.ndarray:
        """float32 [B]; NaN where no function judged."""
        return self.scores.rewards

    def pick(self, other: Samples, groups: np.ndarray, run: Run) -> Samples:
        """The chosen groups of both: group g of ``self``, or g − P of ``other``.

        Args:
          other: as many samples of the same run.
          groups: int [P].
          run: the run.
        """
        size = run.config.group_size
        rows = (groups[:, None] * size + np.arange(size)).reshape(-1)
        start = max(self.rollout.start, other.rollout.start)
        wide = [_widened(one.rollout, start) for one in (self, other)]
        texts = self.texts + other.texts
        return Samples(
            prompts=tuple((*self.prompts, *other.prompts)[g] for g in groups),
            rollout=run.place_rows(_pick(*wide, rows)),
            texts=[texts[row] for row in rows],
            scores=functions.Scores(
                rewards=np.concatenate([self.scores.rewards, other.scores.rewards])[rows],
                by_function={
                    name: np.concatenate([values, other.scores.by_function[name]])[rows]
                    for name, values in self.scores.by_function.items()
                },
            ),
        )


def _widened(rollout: rl.Rollout, start: int) -> rl.Rollout:
    """The same rows behind a wider prompt bucket: padding on the left changes nothing."""
    more = start - rollout.start
    if not more:
        return rollout

    def pad(x: jax.Array) -> jax.Array:
        wide = [(0, 0), (more, 0)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, wide) if x.ndim > 1 else x

    return dataclasses.replace(jax.tree.map(pad, rollout), start=start)


@jax.jit
def _pick(first: rl.Rollout, second: rl.Rollout, rows: jax.Array) -> rl.Rollout:
    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return b if a.ndim == 0 else jnp.concatenate([a, b])[rows]

    return jax.tree.map(choose, first, second)


class Loop:
    """The steps of a run; see the module.

    Args:
      run: from :func:`common.start`.
      state: the policy's train state.
      reference: the reference's trainable part, or None.
      schedule: updates tried → learning rate.
      more: further pytrees of arrays that change: a critic, a controller.
    """

    def __init__(
        self,
        run: Run,
        state: rl.TrainState,
        reference: Any = None,
        *,
        schedule: Callable[[Any], Any],
        **more: Any,
    ):
        self.run, self.state, self.reference, self.more = run, state, reference, more
        self.exit_code = 0
        self._schedule = schedule
        self._sampler, self._scorer = passes.make_sampler(run), passes.make_scorer(run)
        self._record: dict[str, Any] = {}
        self._figures: list[dict[str, float]] = []  # held out, at the start and at the end
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Loop:
        run = self.run
        with contextlib.ExitStack() as stack:
            self._checkpoints = stack.enter_context(
                checkpoint.Checkpointer(run.folder / "checkpoints")
            )
            self._first = self._restore() if run.resumed else 0
            display.print_plan(run, first_step=self._first)
            self._interrupts = stack.enter_context(saving.Interrupts())
            resume = self._first if run.config.resume else None
            self._tracker = stack.enter_context(display.tracker(run, first_step=resume))
            before = passes.start_evaluation(run, self._tracker, *self._passes())
            self._figures.append(before)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
        if len(self._figures) == 2:
            display.print_end(self.run, *self._figures)

    def steps(self) -> Iterator[int]:
        """The steps that are left; after the last one evaluate and export."""
        run, last = self.run, self.run.config.steps
        for step in range(self._first, last):
            self._record, self._began = {}, time.perf_counter()
            yield step
            done = step + 1
            stopping = hosts.any_of(self._interrupts.requested)
            if done % run.config.save_every == 0 or done == last or stopping:
                self._save(done)
            if stopping and done < last:
                self._checkpoints.wait()
                self.exit_code = saving.say_resume(run, done)
                return
        after = passes.evaluate(run, *self._passes(), last)
        self._tracker.evaluation(last, after)
        saving.export(run, self.state.params)
        self._figures.append(after)

    def timed(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Add the seconds of a block to the step's record, under a metric's name."""
        return passes.timed(self._record, name)

    def sample(self, step: int, *, position: int | None = None) -> Samples:
        """Sample a group for each prompt, and score every completion.

        Args:
          step: stamps the rollout with its version.
          position: which prompts, and with which key; the step by default.
        """
        run, position = self.run, step if position is None else position
        with self.timed("time/generate"):
            prompts: data.PromptBatch = run.source.batch(position)
            params = partition.merge(self.state.params, run.frozen)
            key = jax.random.fold_in(run.key, position)
            rollout = self._sampler(params, prompts, key, step)
            texts = passes.completions(run, rollout)
        with self.timed("time/score"):
            scores = passes.score(run, prompts, texts)
        return Samples(prompts.prompts, rollout, texts, scores)

    def log_probs(self, rollout: rl.Rollout) -> LogProbs:
        """What the learner and the reference give the sampled tokens; the learner's are π_old."""
        frozen, reference = self.run.frozen, self.reference
        old = self._scorer(self.state.params, frozen, rollout)
        return LogProbs(
            old, None if reference is None else self._scorer(reference, frozen, rollout)
        )

    def log(self, step: int, samples: Samples, log_probs: LogProbs, metrics: Any) -> None:
        """End the step: its record, and two of its samples now and then.

        Args:
          step: the step.
          samples: from :meth:`sample`.
          log_probs: from :meth:`log_probs`.
          metrics: name → scalar or ``Metric``.
        """
        record, rollout = self._record, samples.rollout
        record["time/step"] = time.perf_counter() - self._began
        tokens = int(np.sum(rollout.lengths))
        self._tracker.log(
            step,
            {
                **passes.reward_metrics(samples.scores, hosts.whole(rollout.group_ids)),
                **passes.rollout_metrics(rollout, log_probs.old, log_probs.ref),
                **metrics,
                **record,
                "optim/lr": self._schedule(self.state.step),
                "throughput/tokens_per_s_generate": tokens / record["time/generate"],
                "throughput/tokens_per_s_train": tokens / record["time/train"],
                "memory/peak_bytes": passes.peak_bytes(),
            },
        )
        display.show_samples(
            self.run, self._tracker, step, samples.prompts, samples.texts, samples.rewards
        )

    def _passes(self) -> tuple[Any, Any, Any, Any]:
        return self._sampler, self._scorer, self.state.params, self.reference

    def _restore(self) -> int:
        step, trees = saving.restore(
            self.run, self._checkpoints, self.state, self.reference, **self.more
        )
        self.state, self.reference = trees.pop("state"), trees.pop("reference", None)
        self.more = trees
        return step

    def _save(self, done: int) -> None:
        saving.save(
            self.run,
            self._checkpoints,
            self._tracker,
            self.state,
            self.reference,
            done,
            **self.more,
        )

"""Checkpoints of a run, its export, and stopping without losing anything."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

import rlhf_jax as rl
from common import hosts
from common.config import SMALL_MODEL
from common.setup import Run
from rlhf_jax import checkpoint, partition


def save(
    run: Run,
    checkpoints: checkpoint.Checkpointer,
    tracker: rl.tracking.Tracker,
    state: rl.TrainState,
    reference: Any,
    step: int,
    **more: Any,
) -> None:
    """Checkpoint policy, optimizer and step, the reference if there is one, ``more`` trees."""
    tracker.flush()  # a run killed after this resumes at ``step``: no earlier record may be missing
    trees = {"state": state} | ({} if reference is None else {"reference": reference}) | more
    checkpoints.save(step, trees, {"frozen": run.frozen_digest, "prompts": run.prompts_digest})


def restore(
    run: Run,
    checkpoints: checkpoint.Checkpointer,
    state: rl.TrainState,
    reference: Any,
    **more: Any,
) -> tuple[int, dict[str, Any]]:
    """Load the newest whole checkpoint of a resumed run: its step, and the trees by name.

    Raises:
      CheckpointError: there is none, or it was made over other frozen weights or other prompts.
    """
    targets = {"state": state} | ({} if reference is None else {"reference": reference}) | more
    step, trees, meta = checkpoints.restore(targets)
    if meta["frozen"] != run.frozen_digest:
        raise checkpoint.CheckpointError(
            f"{checkpoints.directory}: its frozen weights are not those of --model "
            f"{run.config.model or SMALL_MODEL}; give the model that the run began with"
        )
    if meta.get("prompts", run.prompts_digest) != run.prompts_digest:
        raise checkpoint.CheckpointError(
            f"{checkpoints.directory}: the prompts of {run.config.prompts or run.config.task} are "
            "not those that the run began with; bring them back, or start a new run from its model"
        )
    return step, trees


def export(run: Run, trainable: Any) -> Path:
    """Write the policy as a Hugging Face folder into the run's folder.

    Raises:
      OSError: it could not be written; the checkpoint is not touched.
    """
    path = run.folder / "model"
    params = hosts.gathered(partition.merge(trainable, run.frozen))
    hosts.first(lambda: _write(run, path, params))
    return path


def _write(run: Run, path: Path, params: Any) -> None:
    try:
        rl.models.save(path, run.model, params, run.tokenizer)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"the model could not be written to {path}: {error}; nothing is lost: "
            f"make room, then --resume {run.folder}"
        ) from error


def say_resume(run: Run, step: int) -> int:
    """Say how an interrupted run goes on; returns its exit code, 130 as for Ctrl-C."""
    if hosts.is_first():
        print(
            f"\nstopped after step {step} of {run.config.steps}; everything is saved. Go on with:"
        )
        print(f"  python {sys.argv[0]} --resume {run.folder}", flush=True)
    return 130


class Interrupts:
    """Ctrl-C (or SIGTERM) once: finish the step, save, say how to resume. Twice: stop now."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping after this step (again to stop at once)", file=sys.stderr, flush=True)

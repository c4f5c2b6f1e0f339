"""Compare the methods on one task that a small model from scratch learns on a CPU: sort six digits.

    python experiments/compare.py                        # every method, three seeds
    python experiments/compare.py --methods rloo ppo --seeds 1 --steps 40
    python experiments/compare.py --folder runs/compare  # what is done is not run again

A seed decides model, supervised warm-up and held-out prompts, so all methods of a seed begin with
the same policy. The folder gets ``results.json``, ``table.md`` and ``curves.png``.

A method has reached the threshold if it answers 75 % of the held-out prompts when sampled at
temperature 1; the warm-up leaves it at 43-48 %.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np

from rlhf_jax import tracking

HERE = Path(__file__).resolve().parent
THRESHOLD = 0.75
WINDOW = 10  # steps that a curve is averaged over

METHODS: dict[str, tuple[str, ...]] = {
    "reinforce": ("reinforce.py",),
    "rloo": ("rloo.py",),
    "grpo": ("grpo.py",),
    # The critic is the baseline, so no groups are needed, and different prompts teach it more. Its
    # learning rate decides: with 1e-3 in place of 3e-4 it learns half as much. It begins before the
    # policy.
    "ppo": (
        *("ppo.py", "--batch-size", "512", "--group-size", "1", "--epochs", "4"),
        *("--minibatches", "16", "--learning-rate", "5e-5", "--critic-learning-rate", "3e-4"),
        *("--critic-warmup", "45"),
    ),
    "dr_grpo": ("variants.py", "--method", "dr_grpo"),
    # One token more than an answer has, so that only what does not end is overlong.
    "dapo": (
        *("variants.py", "--method", "dapo"),
        *("--max-new-tokens", "8", "--overlong-cache", "1"),
    ),
    "gspo": ("variants.py", "--method", "gspo"),
    "cispo": ("variants.py", "--method", "cispo"),
    "sapo": ("variants.py", "--method", "sapo"),
    "gmpo": ("variants.py", "--method", "gmpo"),
    "topr": ("variants.py", "--method", "topr"),
    "reinforce_pp": ("variants.py", "--method", "reinforce_pp"),
}
"""A script and its flags by the name of the method."""


@dataclasses.dataclass(frozen=True)
class Flags:
    """What to compare."""

    methods: tuple[str, ...] = tuple(METHODS)
    """Some of the methods."""
    seeds: int = 3
    """Seeds 0, 1, … of each method."""
    steps: int = 150
    """Steps of each run, of 32 prompts × 8 completions where `METHODS` says nothing else."""
    folder: str = "runs/compare"
    """Where runs and results go; a method and seed with a result is not run again."""


def command(flags: Flags, method: str, seed: int, folder: Path) -> list[str]:
    """What one run is, as a shell would call it."""
    script, *own = METHODS[method]
    shared = ["--task", "sort", "--steps", str(flags.steps), "--seed", str(seed)]
    shared += ["--sample-every", "1000000", "--save-every", "1000000", "--run-dir", str(folder)]
    return [sys.executable, str(HERE / script), *own, *shared]


def run(flags: Flags, method: str, seed: int) -> dict[str, Any]:
    """One run in a process of its own, or its result if there is one."""
    folder = Path(flags.folder) / f"{method}-{seed}"
    call, stored = command(flags, method, seed, folder), folder / "result.json"
    said = [part for part in call[1:] if part != str(folder)]
    said[0] = Path(said[0]).name
    if stored.exists():
        result = json.loads(stored.read_text())
        if result["command"] != said:
            raise ValueError(
                f"{stored} is of other settings ({' '.join(result['command'])}): "
                "choose another --folder, or remove that run"
            )
        return result
    if (folder / "config.json").exists():  # broken off: its CPU-seconds would be unknown
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{time.strftime('%H:%M:%S')}  {method}, seed {seed}", flush=True)
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(call, stdout=log, stderr=subprocess.STDOUT, env=environment())
        try:
            _, status, used = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            process.wait()  # it has been told as well, and ends after its step
            raise
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        last = (folder / "log.txt").read_text().strip().splitlines()[-1:]
        raise ValueError(f"{method}, seed {seed}, ended with {process.returncode}: {''.join(last)}")
    result = {"command": said, "cpu_seconds": used.ru_utime + used.ru_stime, **figures(folder)}
    stored.write_text(json.dumps(result) + "\n")
    return result


def environment() -> dict[str, str]:
    """The runs share what XLA compiled: of twelve methods most programs are the same."""
    return {"JAX_COMPILATION_CACHE_DIR": str(Path(".cache/xla").absolute()), **os.environ}


def figures(folder: Path) -> dict[str, Any]:
    """What the table and the picture show of one run, from its records."""
    records = list(tracking.read_jsonl(folder / "metrics.jsonl"))
    start, end = [r["eval/reward"] for r in tracking.read_jsonl(folder / "eval.jsonl")]
    curve = [round(r["reward/mean"], 4) for r in records]
    rows = json.loads((folder / "config.json").read_text())["batch_size"]
    explained = [r["value/explained_variance"] for r in records if "value/explained_variance" in r]
    return {
        "start": start,
        "end": end,
        "curve": curve,
        "crossed": crossed(curve),
        "explained_variance": float(smooth(explained)[WINDOW - 1 :].max(initial=0.0))
        if explained
        else None,
        "updates": sum(r.get("optim/updates", 1) for r in records),
        "rollouts": rows * sum(r.get("reward/draws", 1) for r in records),
    }


def smooth(curve: Sequence[float]) -> np.ndarray:
    """Running mean over the last ``WINDOW`` steps."""
    total = np.concatenate([[0.0], np.cumsum(curve)])
    ends = np.arange(1, len(curve) + 1)
    begins = np.maximum(ends - WINDOW, 0)
    return (total[ends] - total[begins]) / (ends - begins)


def crossed(curve: Sequence[float]) -> int | None:
    """The first step whose running mean over a full window is at the threshold."""
    above = np.flatnonzero(smooth(curve) >= THRESHOLD)
    above = above[above >= WINDOW - 1]
    return int(above[0]) + 1 if above.size else None


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± sample standard deviation; of one value the value."""
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {np.std(values, ddof=1):.{digits}f}"


def table(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Markdown: a row a method."""
    heads = ("method", "held-out reward: start", "end", "steps", "updates", "rollouts")
    heads += (
        "CPU-s a run",
        f"≥ {THRESHOLD:.2f} at the end",
        "crossed at step",
        "explained variance, highest",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method, runs in results.items():
        reached = sum(r["end"] >= THRESHOLD for r in runs)
        steps = [str(r["crossed"]) if r["crossed"] else "–" for r in runs]
        explained = [r["explained_variance"] for r in runs if r["explained_variance"] is not None]
        cells = [
            method,
            spread([r["start"] for r in runs]),
            spread([r["end"] for r in runs]),
            str(len(runs[0]["curve"])),
            f"{np.mean([r['updates'] for r in runs]):.0f}",
            f"{np.mean([r['rollouts'] for r in runs]):.0f}",
            f"{np.mean([r['cpu_seconds'] for r in runs]):.0f}",
            f"{reached} of {len(runs)}",
            ", ".join(steps),
            spread(explained, 2) if explained else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(results: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """A panel a method: mean and range over the seeds, the other methods behind in grey."""
    from matplotlib.figure import Figure

    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.5 * rows), dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).reshape(-1)
    curves = {m: np.array([smooth(r["curve"]) for r in runs]) for m, runs in results.items()}
    for axis in axes[len(curves) :]:
        axis.set_visible(False)
    for axis, (method, mine) in zip(axes, curves.items(), strict=False):
        for other in curves.values():
            axis.plot(np.arange(1, other.shape[1] + 1), other.mean(0), color="#d8d8d8", linewidth=1)
        steps = np.arange(1, mine.shape[1] + 1)
        axis.fill_between(steps, mine.min(0), mine.max(0), color="#1b6ca8", alpha=0.25, linewidth=0)
        axis.plot(steps, mine.mean(0), color="#1b6ca8", linewidth=2)
        axis.axhline(THRESHOLD, color="#c8553d", linewidth=0.8, linestyle="--")
        axis.set_title(method, loc="left", fontsize=10)
        axis.grid(True, color="#eeeeee", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel(f"sampled accuracy, mean of {WINDOW} steps", fontsize=9)
    figure.savefig(path)


def compare(flags: Flags) -> int:
    """Run what has no result yet, then write the results; returns the exit code."""
    unknown = [m for m in flags.methods if m not in METHODS]
    if unknown:
        raise ValueError(f"--methods {' '.join(unknown)}: there are {', '.join(METHODS)}")
    if flags.seeds < 1 or flags.steps < 1 or not flags.methods:
        raise ValueError("--seeds, --steps and --methods: at least one of each")
    folder = Path(flags.folder)
    results: dict[str, list[dict[str, Any]]] = {method: [] for method in flags.methods}
    for seed in range(flags.seeds):  # all methods of a seed first: stopped early, it is a result
        for method in flags.methods:
            results[method].append(run(flags, method, seed))
        write(results, folder)
    print((folder / "table.md").read_text())
    print(f"results  {folder / 'results.json'}\ncurves   {folder / 'curves.png'}")
    return 0


def write(results: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path) -> None:
    """The results so far: JSON, table, picture."""
    record = {"task": "sort", "threshold": THRESHOLD, "methods": results}
    (folder / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "table.md").write_text(table(results), encoding="utf-8")
    plot(results, folder / "curves.png")


if __name__ == "__main__":
    common.main(compare, Flags)

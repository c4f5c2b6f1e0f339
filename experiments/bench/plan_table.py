"""The planner's table: what fits where, and what moves, for three models on five TPU targets.

    python -m experiments.bench.plan_table --cache runs/plans        # about an hour of compiling
    python -m experiments.bench.plan_table --cache runs/plans --models llama3-8b --targets v5p:4x4x4

Needs ``libtpu``; no TPU. Every plan is kept in the folder, so a table that was broken off goes on
where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import sharding
from experiments.bench.tables import Table
from sharding import plan

GIB = 2**30
TARGETS = {  # topology and slices → layouts; the rows are as many as there are chips
    "v5e:4x4": (("fsdp_tensor", 4),),
    "v5e:16x16": (("fsdp_tensor", 4),),
    "v5p:4x4x4": (("fsdp", None), ("fsdp_tensor", 2), ("fsdp_tensor", 4)),
    "v6e:8x8": (("fsdp", None), ("fsdp_tensor", 2), ("fsdp_tensor", 4)),
    "v5e:8x8*2": (("hsdp", None),),
}
HEADER = (
    *("model", "slice", "layout", "state, GiB a device", "train peak", "fits", "prefill peak"),
    *("round peak", "KV cache", "beside the state", "TFLOP a step", "estimate, ms", "bound by"),
    *("estimated MFU", "gathered, GiB", "reduced", "÷ least", "other axes"),
)


def request(model: str, target: str, name: str, tensor: int | None) -> plan.Request:
    """A row for every chip, four completions a prompt where the prompts then divide."""
    topology, _, count = target.partition("*")
    slices = int(count or 1)
    layout = sharding.get_layout(name)
    layout = layout if tensor is None else layout.with_sizes(tensor=tensor)
    if slices > 1:
        layout = layout.with_sizes(slice=slices)
    rows = len(plan.devices_of(topology, slices))
    group = min(4, tensor or 1)
    return plan.Request(
        name=model,
        config=plan.model_of(model),
        topology=topology,
        slices=slices,
        layout=layout,
        sizes=plan.Sizes(rows=rows, group=group),
    )


def _gib(count: float | None) -> str:
    return "?" if count is None else f"{count / GIB:,.2f}"


def _moved(found: dict[str, Any], rows: set[str]) -> tuple[float, float, float]:
    """GiB received along the rows' axes in gathers and in sums, and along the others."""
    gathered = reduced = others = 0
    for one in found.get("collectives", ()):
        if not set(one["axes"]) <= rows:
            others += one["received"]
        elif "all-gather" in (one["kind"], one["stands_for"]):
            gathered += one["received"]
        else:
            reduced += one["received"]
    return gathered, reduced, others


def line(made: dict[str, Any], asked: plan.Request) -> tuple[object, ...]:
    """One plan as a row of the table."""
    train, held = made["programs"]["train"], made["held"]
    peaks = {name: one.get("memory", {}).get("peak") for name, one in made["programs"].items()}
    if "needs" in train:
        peak = f"needs {_gib(train['needs'])}"
    else:
        peak = _gib(peaks["train"])
    sizes = " × ".join(made["mesh"].partition(" (")[0].split(", "))
    moved = _moved(train, set(asked.layout.rows))
    figures = ["-"] * 8
    if "flops" in train:
        figures = [
            *(f"{train['flops'] / 1e12:,.1f}", f"{1e3 * train['estimate']:,.0f}"),
            *(train["bound by"], f"{train['estimated mfu']:.2f}", *map(_gib, moved[:2])),
            f"{made['least exchange']['ratio']:.2f}" if "least exchange" in made else "-",
            _gib(moved[2]),
        ]
    beside = {True: "fits", False: "no", None: "?"}[made.get("fits beside the state")]
    slice_of = made["topology"] + (f" × {made['slices']}" if made["slices"] > 1 else "")
    return (
        *(made["model"], slice_of, f"{asked.layout.name}: {sizes}", _gib(made["state"]), peak),
        *("yes" if train.get("fits") else "**no**", _gib(peaks.get("prefill"))),
        *(_gib(peaks.get("round")), _gib(held["round"]["cache"]), beside),
        *figures,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="folder that keeps the plans")
    parser.add_argument("--models", nargs="+", default=list(plan.MODELS))
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--json", type=Path, help="also write the plans here")
    args = parser.parse_args()
    if wrong := sorted(set(args.targets) - set(TARGETS)):
        parser.error(f"--targets: unknown {', '.join(wrong)}; known: {', '.join(TARGETS)}")
    rows, plans = [], []
    for model in args.models:
        for target in args.targets:
            for name, tensor in TARGETS[target]:
                told, begun = f"{model} on {target}, {name} {tensor or ''}", time.monotonic()
                try:
                    asked = request(model, target, name, tensor)
                    made = plan.make(asked, args.cache)
                except ValueError as error:
                    print(f"{told}: {error}", file=sys.stderr, flush=True)
                    continue
                spent = time.monotonic() - begun
                print(f"{spent:6.0f} s  {told}", file=sys.stderr, flush=True)
                rows.append(line(made, asked))
                plans.append(made)
    sizes = dataclasses.asdict(plan.Sizes())
    note = (
        f"{sizes['length']} tokens a row, {sizes['prompt']} of them prompt; a row for every chip."
    )
    print(Table(HEADER, rows, note))
    if args.json:
        args.json.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Plans a model on a TPU slice that is not there: memory, work, exchanges and time, by compiling.

    python -m sharding.plan --model llama3-8b --topology v5e:8x8 --layout fsdp_tensor --tensor 4
    python -m sharding.plan --model path/to/config.json --topology v5p:4x4x4 --rows 128 --json F
    python -m sharding.plan --model qwen3-8b --topology v5e:8x8 --search --cache plans/
    python -m sharding.plan --model mine/ --topology cpu:8 --layout fsdp        # without libtpu

Needs ``libtpu`` for TPUs (``pip install '.[tpu-plan]'``) and no TPU; nothing is executed. Compiled
are the update (GRPO, AdamW), the prefill and a token of generation, of ``rl.generate`` or of the
engine. Memory is the compiler's own plan. FLOPs, bytes and collectives are counted in the program's
text, loops as often as they run; the time is a roofline's estimate (:mod:`sharding.hardware`).
``--search`` tries layouts × micro-batches × remat and ranks those that fit. Bad input ends with one
line and exit code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rlhf_jax as rl
import sharding
from sharding._command import Parser, check_files, write_json
from sharding.planner import report, search
from sharding.planner.make import PROGRAMS, Request, make
from sharding.planner.programs import Sizes, grpo_loss_fn, step_shapes
from sharding.planner.targets import MODELS, devices_of, known_of, model_of

__all__ = [
    "MODELS",
    "Request",
    "Sizes",
    "devices_of",
    "grpo_loss_fn",
    "known_of",
    "main",
    "make",
    "model_of",
    "step_shapes",
]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m sharding.plan", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    built_in = ", ".join(MODELS)
    add("--model", default="llama3-8b", help=f"config.json, its folder, or one of {built_in}")
    add("--topology", default="v5e:8x8", help="chip:shape, e.g. v5e:16x16, v5p:4x4x4, cpu:8")
    add("--slices", type=int, default=1, help="slices of that topology")
    add("--layout", help="a named layout, or file.toml:name; fsdp_tensor by default")
    add("--tensor", type=int, help="size of the layout's tensor axis")
    add("--remat", choices=rl.models.Decoder.REMAT, help="full by default")
    add("--attention", choices=("xla", "splash"), help="the update's attention")
    add("--programs", type=_names, help="train,prefill,round by default")
    add("--whole-heads", action="store_true", help="heads that do not divide lie on every device")
    add("--json", type=Path, help="also write the figures here")
    add("--plot", type=Path, help="also draw them here (needs matplotlib)")
    add("--cache", type=Path, help="folder that keeps results: nothing is compiled twice")
    add("--search", action="store_true", help="rank layouts × micro-batches × remat")
    add("--compile", type=int, default=8, help="of the search: how many to compile")
    add("--minutes", type=float, default=25, help="of the search: begin no program after so long")
    add("--try-micro-batches", type=_numbers, default=search.MICRO)
    add("--try-remat", type=_names, default=search.REMAT)
    for field in dataclasses.fields(Sizes):
        add(f"--{field.name.replace('_', '-')}", type=int, help=f"{field.default} by default")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuses before anything is compiled what would end badly afterwards."""
    for name, given, known in (
        ("--programs", args.programs or (), PROGRAMS),
        ("--try-remat", args.try_remat, rl.models.Decoder.REMAT),
    ):
        if wrong := sorted(set(given) - set(known)):
            raise ValueError(f"{name}: unknown {', '.join(wrong)}; known: {', '.join(known)}")
    for name, numbers in (
        ("--tensor", () if args.tensor is None else (args.tensor,)),
        ("--compile", (args.compile,)),
        ("--try-micro-batches", args.try_micro_batches),
    ):
        if wrong := [number for number in numbers if number < 1]:
            raise ValueError(f"{name}: got {wrong[0]}; it must be at least 1")
    if args.search:
        for name in ("layout", "tensor", "programs", "remat", "micro_batches"):
            if getattr(args, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag}: --search chooses that itself; leave one of them out")
    if args.cache is not None and args.cache.exists() and not args.cache.is_dir():
        raise ValueError(f"--cache: {args.cache} is no folder")
    check_files(json=args.json, plot=args.plot)


def _request(args: argparse.Namespace) -> Request:
    layout = sharding.get_layout(args.layout or "fsdp_tensor")
    if args.tensor is not None:
        layout = layout.with_sizes(tensor=args.tensor)
    if "slice" in dict(layout.axes) and args.slices > 1:
        layout = layout.with_sizes(slice=args.slices)
    sizes = {field.name: getattr(args, field.name) for field in dataclasses.fields(Sizes)}
    return Request(
        name=args.model,
        config=model_of(args.model),
        topology=args.topology,
        slices=args.slices,
        layout=layout,
        sizes=Sizes(**{name: size for name, size in sizes.items() if size is not None}),
        remat=args.remat or "full",
        attention=args.attention,
        programs=args.programs or ("train", "prefill", "round"),
        whole_heads=args.whole_heads,
    )


def _searched(args: argparse.Namespace) -> dict[str, Any]:
    return search.ranked(
        _request(args),
        cache=args.cache,
        most=args.compile,
        minutes=args.minutes,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
        micro=args.try_micro_batches,
        remat=args.try_remat,
    )


def _run(args: argparse.Namespace) -> None:
    _check(args)
    if args.search:
        found = _searched(args)
        told = search.table(found)
        plans = [one["plan"] for one in found["ranked"][:1]]
    else:
        found = make(_request(args), args.cache)
        told, plans = report.text(found), [found]
    print(told, flush=True)
    if args.json:
        write_json(args.json, found)
    for best in plans if args.plot else ():
        report.draw(best, args.plot)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
      argv: arguments; those of the process when None.

    Returns:
      0, or 2 after one line about bad input.
    """
    try:
        _run(_parser().parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure layouts on the devices at hand: train step, decode, memory, and that all agree.

    python -m sharding.benchmark --model path/to/config.json --dtype bfloat16 --remat full
    python -m sharding.benchmark --layouts fsdp fsdp_tensor:tensor=4 --json out.json --plot out.png
    python -m sharding.benchmark --devices 8          # a rehearsal on eight host devices of a CPU

Every layout is compiled and run once before any is timed. Then all of them take turns, round after
round, so that what else the machine does hits all alike; printed are median and quartiles. Weights
are random, made from one seed on the devices themselves. A train step is GRPO with its KL in the
loss and AdamW on ``--rows`` rows of prompt and completion; a decode is one call of ``rl.generate``
for as many completions (prefill included). Tokens a second count prompt and completion in training
and new tokens in decoding. Memory is the compiler's plan for one device.

From the same weights, rows and keys all layouts must give the same loss, gradient norm and sampled
tokens: else the benchmark ends with exit code 1. (Where matrices are multiplied in bfloat16, loss
and norm may differ by its rounding, and tokens are counted, not compared.) Bad input ends with one
line and exit code 2; a layout that cannot take the model or the rows is left out with the reason,
unless it is the only one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import sharding
from sharding._command import Parser, check_files, write_json
from sharding.benchmarking import report
from sharding.benchmarking.placement import DisagreementError

__all__ = ["main"]

_COUNT_FLAG = "--xla_force_host_platform_device_count"
_MEMORY = "RESOURCE_EXHAUSTED"


def _parser() -> argparse.ArgumentParser:
    text = (__doc__ or "").split("\n\n")
    parser = Parser(
        prog="python -m sharding.benchmark",
        description=text[0],
        epilog="\n\n".join(text[1:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    known = ", ".join(sharding.LAYOUTS)
    add("--layouts", nargs="+", metavar="NAME", help=f"some of {known}; all by default")
    add("--model", help="config.json, model folder or name; a small Llama by default")
    add("--rows", type=int, default=16, help="rows of a train step, completions of a decode")
    add("--prompt", type=int, default=32, help="tokens of a prompt")
    add("--length", type=int, default=32, help="tokens of a completion")
    add("--group-size", type=int, default=1, help="completions of each prompt")
    add("--micro-batches", type=int, default=1, help="parts of a train step's rows")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="compute dtype")
    add("--remat", default="none", help="what the backward pass recomputes, as for Decoder")
    add("--whole-heads", action="store_true", help="heads that do not divide lie whole everywhere")
    add("--rounds", type=int, default=5, help="turns of every layout")
    add("--steps", type=int, default=1, help="timed train steps of a turn")
    add("--seed", type=int, default=0)
    add("--devices", type=int, metavar="N", help="rehearse on N host devices of this CPU")
    add("--json", type=Path, metavar="FILE", help="write all figures here")
    add("--plot", type=Path, metavar="FILE", help="draw a picture (needs matplotlib)")
    return parser


def _host_devices(count: int) -> None:
    """Split the CPU into so many devices, before JAX starts a backend."""
    if count < 1:
        raise ValueError(f"--devices: expected an int ≥ 1, got {count}")
    flags = [x for x in os.environ.get("XLA_FLAGS", "").split() if not x.startswith(_COUNT_FLAG)]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"{_COUNT_FLAG}={count}"])
    jax.config.update("jax_platforms", "cpu")
    if jax.device_count() != count:
        raise ValueError(
            f"--devices {count}: JAX has started with {jax.device_count()} devices already; "
            "run the benchmark in a process of its own"
        )


def _model(args: argparse.Namespace) -> tuple[str, Any]:
    """The model's name in the output, and a decoder; no weights are read."""
    try:
        import rlhf_jax.models
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'rlhf-jax[models]'") from None
    import rlhf_jax as rl

    if args.model is None:
        name = "a small Llama"
        config = rl.models.DecoderConfig(
            vocab_size=8192,
            hidden_size=256,
            intermediate_size=768,
            num_layers=4,
            num_heads=16,
            num_kv_heads=8,
        )
    else:
        name, path = args.model, Path(args.model).expanduser()
        source = path if path.exists() else rl.models.resolve(args.model)
        config = rl.models.DecoderConfig.from_hf(source)
    model = rl.models.Decoder(config, dtype=args.dtype, remat=args.remat)
    count = rl.partition.count(model.shapes())
    return f"{name} ({count / 1e6:,.1f}M parameters)", model


def _place_all(args: argparse.Namespace, model: Any) -> tuple[list[Any], dict[str, str]]:
    """The layouts that can take model and rows, and why the others cannot."""
    from sharding.benchmarking import programs

    sizes = programs.Sizes(
        rows=args.rows,
        prompt=args.prompt,
        length=args.length,
        group_size=args.group_size,
        micro_batches=args.micro_batches,
    )
    for name, value in (("--rounds", args.rounds), ("--steps", args.steps)):
        if value < 1:
            raise ValueError(f"{name}: expected an int ≥ 1, got {value}")
    names = list(dict.fromkeys(args.layouts or sharding.LAYOUTS))
    layouts = {name: sharding.get_layout(name) for name in names}
    placed, skipped = [], {}
    for name, layout in layouts.items():
        try:
            one = programs.place(model, layout, sizes, whole_heads=args.whole_heads)
            placed.append(dataclasses.replace(one, name=name))
        except ValueError as error:
            if len(layouts) == 1:
                raise
            skipped[name] = str(error)
    return placed, skipped


def _compile_and_run_once(
    placed: Sequence[Any], skipped: dict[str, str], seed: int
) -> list[tuple[Any, Any]]:
    """Programs and outcome of every layout that fits into the devices' memory."""
    from sharding.benchmarking import programs

    ready = []
    for one in placed:
        name = one.name
        _say(f"compiling and warming {name}: {sharding.describe(one.mesh)}")
        try:
            made = programs.compile_all(one, seed=seed)
            ready.append((made, made.outcome()))
        except jax.errors.JaxRuntimeError as error:
            if _MEMORY not in str(error):
                raise
            skipped[name] = f"out of memory: {str(error).splitlines()[0]}"
    return ready


def _check_same(ready: Sequence[tuple[Any, Any]], exact: bool) -> dict[str, int]:
    """Compare every layout's outcome with the first one's.

    Returns:
      Layout → how many of its rows are other tokens than the first layout's.
    """
    (first, want), others = ready[0], {}
    bound = 1e-5 if exact else 2e-2
    for programs, found in ready:
        names = f"layouts {first.placed.name!r} and {programs.placed.name!r}"
        for what in ("loss", "grad_norm"):
            a, b = getattr(want, what), getattr(found, what)
            if not abs(a - b) <= bound * max(1.0, abs(a)):
                raise DisagreementError(f"{names} do not agree: {what} {a:.8g} and {b:.8g}")
        different = (want.tokens != found.tokens).any(axis=1)
        if exact and different.any():
            row = int(np.argmax(different))
            at = int(np.argmax(want.tokens[row] != found.tokens[row]))
            raise DisagreementError(
                f"{names} do not agree: {int(different.sum())} of {len(different)} rows of sampled "
                f"tokens, the first of them row {row} from token {at} on "
                f"({want.tokens[row, at]} and {found.tokens[row, at]})"
            )
        others[programs.placed.name] = int(different.sum())
    return others


def _measure(ready: Sequence[tuple[Any, Any]], rounds: int, steps: int) -> list[dict[str, Any]]:
    """All layouts in turn, round after round; seconds of each."""
    took: list[dict[str, list[float]]] = [{"train": [], "decode": []} for _ in ready]
    for number in range(rounds):
        _say(f"round {number + 1} of {rounds}")
        # The first of a round is another one each time: none always follows the same.
        for index in ((number + i) % len(ready) for i in range(len(ready))):
            for what, seconds in ready[index][0].turn(steps).items():
                took[index][what] += seconds
    return took


def _result(programs: Any, outcome: Any, took: dict[str, list[float]]) -> dict[str, Any]:
    placed, sizes = programs.placed, programs.placed.sizes
    tokens = {"train": sizes.rows * (sizes.prompt + sizes.length)}
    tokens["decode"] = sizes.rows * sizes.length
    found: dict[str, Any] = {
        "name": placed.name,
        "mesh": dict(placed.mesh.shape),
        "loss": outcome.loss,
        "grad_norm": outcome.grad_norm,
        "memory": programs.memory,
    }
    for what, seconds in took.items():
        middle = report.spread(seconds)
        rate = tokens[what] / middle["median"]
        found[what] = {**middle, "tokens_per_second": rate, "seconds": seconds}
    return found


def _say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def _run(args: argparse.Namespace) -> None:
    check_files(json=args.json, plot=args.plot)
    if args.devices is not None:
        _host_devices(args.devices)
    name, model = _model(args)
    device = jax.devices()[0]
    rehearsal = device.platform == "cpu"
    placed, skipped = _place_all(args, model)
    ready = _compile_and_run_once(placed, skipped, args.seed)
    if not ready:
        reasons = "; ".join(skipped.values())
        raise ValueError(f"none of the layouts can be measured: {reasons}")
    precision = getattr(jax.config, "jax_default_matmul_precision")  # noqa: B009
    exact = args.dtype == "float32" and (rehearsal or precision in ("highest", "float32"))
    others = _check_same(ready, exact)
    took = _measure(ready, args.rounds, args.steps)
    flags = {k: v for k, v in vars(args).items() if k not in ("json", "plot", "layouts", "model")}
    results = [_result(*one, seconds) for one, seconds in zip(ready, took, strict=True)]
    record = {
        "model": name,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "jax": jax.__version__,
        "rehearsal": rehearsal,
        "settings": flags,
        "compared exactly": exact,
        "layouts": results,
        "rows of other tokens": others,
        "skipped": skipped,
    }
    if jax.process_index() == 0:
        _print(record)
        if args.json:
            write_json(args.json, record)
        if args.plot:
            report.plot(args.plot, record)


def _print(record: dict[str, Any]) -> None:
    settings, results = record["settings"], record["layouts"]
    what = ", ".join(f"{k} {v}" for k, v in settings.items() if v not in (None, False))
    print(
        f"jax {record['jax']}, {record['devices']} × {record['device']}: {record['model']}; {what}"
    )
    if record["rehearsal"]:
        print(report.REHEARSAL)
    print(f"\n{report.table(results)}\n")
    for name, reason in record["skipped"].items():
        print(f"{name} was left out: {reason}")
    if record["compared exactly"]:
        print("All layouts gave the same loss, gradient norm and sampled tokens.")
    else:
        others = ", ".join(f"{k} {v}" for k, v in record["rows of other tokens"].items())
        print(
            "All layouts gave the same loss and gradient norm, up to bfloat16's rounding. Rows "
            f"whose sampled tokens are not the first layout's: {others} of {settings['rows']}."
        )
    if record["rehearsal"]:
        print(report.REHEARSAL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark.

    Args:
      argv: the flags; those of the command line when None.

    Returns:
      The exit code: 0, 1 if two layouts disagree, 2 for bad input.
    """
    try:
        _run(_parser().parse_args(argv))
    except (DisagreementError, ValueError, OSError, ImportError) as error:
        message = " ".join(str(error).split())
        print(f"sharding.benchmark: {message}", file=sys.stderr)
        return 1 if isinstance(error, DisagreementError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

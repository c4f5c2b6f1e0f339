"""How fast sampling is: against two peers, and against itself where it should not get slower.

    python -m experiments.bench.sampling                     # all of it
    python -m experiments.bench.sampling speed --torch-python PY --tunix-python PY
    python -m experiments.bench.sampling prefill capacity roofline batching

- ``speed``: tokens per CPU-second on the shared workload, this library and the peers in turn. Each
  peer is a script that runs in an interpreter of its own and prints one line of JSON.
- ``prefill``: eight completions of a prompt against one, up to the first token.
- ``capacity``: a decode step after 128 tokens, with room for 4096 and for 256.
- ``roofline``: a decode step of the real model against what the machine's memory and arithmetic
  allow.
- ``batching``: requests of very different lengths, continuously batched against batch by batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rlhf_jax as rl
from experiments.bench import batching, roofline, timing
from experiments.bench.tables import Table
from experiments.bench.timing import Clocks

PEERS = Path(__file__).resolve().parents[2].parent / "shared" / "bench"
SECTIONS = ("speed", "prefill", "capacity", "roofline", "batching")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A random model and random prompts of the shared sizes."""

    model: rl.models.Decoder
    params: Any
    tokens: np.ndarray
    group: int
    new_tokens: int

    def generate(self, seed: int, **changes: Any) -> rl.Rollout:
        """One rollout; `changes` override the workload's own options."""
        options: dict[str, Any] = dict(group_size=self.group, max_new_tokens=self.new_tokens)
        tokens = changes.pop("tokens", self.tokens)
        mask = np.ones_like(tokens, bool)
        return rl.generate(
            self.model, self.params, tokens, mask, jax.random.key(seed), **(options | changes)
        )


def workload(file: Path) -> Workload:
    """The shared workload from its file."""
    sizes = json.loads(file.read_text(encoding="utf-8"))
    fields = {field.name for field in dataclasses.fields(rl.models.DecoderConfig)}
    config = rl.models.DecoderConfig(**{k: v for k, v in sizes.items() if k in fields})
    # A scan copies each layer's weights in every step, which a model this small feels.
    model = rl.models.Decoder(config, stacks=(1,) * config.num_layers)
    rng = np.random.default_rng(0)
    shape = (sizes["prompts"], sizes["prompt_length"])
    return Workload(
        model=model,
        params=model.init(jax.random.key(0)),
        tokens=rng.integers(3, config.vocab_size, shape).astype(np.int32),
        group=sizes["group_size"],
        new_tokens=sizes["new_tokens"],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """Another sampler: its script, its interpreter, and why it cannot run, if so."""

    name: str
    script: Path
    python: str | None
    options: tuple[str, ...] = ()
    bar: float

    @property
    def missing(self) -> str | None:
        """Why it is left out."""
        if self.python is None:
            return "no interpreter given"
        if not self.script.exists():
            return f"{self.script.name} is not in the folder of --peers"
        return None

    def run(self) -> Clocks:
        """Tokens a second, once; the script's own median."""
        done = subprocess.run(
            [str(self.python), str(self.script), *self.options],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        if done.returncode:
            raise RuntimeError(f"{self.name} failed:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return Clocks(wall=found["tokens_per_s"], cpu=found["tokens_per_cpu_s"])


def ours(work: Workload, repeats: int, seed: int = 0) -> Clocks:
    """Tokens a second of this library: median of `repeats` rollouts with different keys."""
    runs = [timing.timed(functools.partial(work.generate, seed + i)) for i in range(repeats)]
    spent = timing.median(runs)
    count = len(work.tokens) * work.group * work.new_tokens
    return Clocks(wall=count / spent.wall, cpu=count / spent.cpu)


def speed(work: Workload, peers: Sequence[Peer], rounds: int, repeats: int) -> Table:
    """Everybody in turn, `rounds` times."""
    ours(work, 1)  # compiles
    found: dict[str, list[Clocks]] = {}
    for index in range(rounds):
        found.setdefault("rlhf-jax", []).append(ours(work, repeats, index * repeats))
        for peer in peers:
            if peer.missing is None:
                found.setdefault(peer.name, []).append(peer.run())
    rates = {name: timing.median(runs) for name, runs in found.items()}
    best = rates["rlhf-jax"]
    rows: list[Sequence[object]] = [("rlhf-jax", f"{best.cpu:.0f}", f"{best.wall:.0f}", "", "")]
    for peer in peers:
        if peer.missing is not None:
            rows.append((peer.name, f"left out: {peer.missing}", "", "", peer.bar))
            continue
        rate = rates[peer.name]
        factor = f"{best.cpu / rate.cpu:.2f}"
        rows.append((peer.name, f"{rate.cpu:.0f}", f"{rate.wall:.0f}", factor, peer.bar))
    header = ("sampler", "tokens per CPU-second", "tokens per second", "ours ÷ it (CPU)", "bar")
    return Table(header, rows)


def prefill(work: Workload, length: int, repeats: int, group: int = 8) -> Table:
    """Prompts of `length` up to the first token of `group` completions, and of one."""
    rng = np.random.default_rng(1)
    shape = (len(work.tokens), length)
    tokens = rng.integers(3, work.model.config.vocab_size, shape).astype(np.int32)
    runs = {
        str(size): functools.partial(
            work.generate, 0, tokens=tokens, group_size=size, max_new_tokens=1
        )
        for size in (1, group)
    }
    found = timing.medians(runs, repeats)
    one, many = found["1"], found[str(group)]
    return Table(
        ("completions of a prompt", "CPU-ms", "ms", "÷ one (CPU)", "bar"),
        (
            (1, f"{1e3 * one.cpu:.1f}", f"{1e3 * one.wall:.1f}", "", ""),
            (
                *(group, f"{1e3 * many.cpu:.1f}", f"{1e3 * many.wall:.1f}"),
                *(f"{many.cpu / one.cpu:.2f}", 1.3),
            ),
        ),
    )


def decode_steps(work: Workload, tokens: np.ndarray, group: int, room: int) -> Callable[..., None]:
    """``run(count)``: `count` decode steps after 128 tokens, in a cache with `room` for all."""
    model, params = work.model, work.params
    shape = (len(tokens), group)

    @functools.partial(jax.jit, donate_argnums=1)
    def steps(params: Any, cache: Any, count: jax.Array) -> Any:
        def body(index: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            token, cache = carry
            hidden, cache = model.decode(params, token, cache, 128 + index)
            token = jnp.argmax(hidden, axis=-1).astype(jnp.int32)
            return token, cache

        return jax.lax.fori_loop(0, count, body, (jnp.zeros(shape, jnp.int32), cache))

    prefill = jax.jit(model.prefill)(params, tokens, np.ones_like(tokens, bool))
    fresh = jax.jit(lambda prefix: model.init_cache(prefix, group_size=group, max_new_tokens=room))(
        prefill[1]
    )
    kept = [jax.tree.map(jnp.copy, fresh)]

    def run(count: int) -> None:
        _, kept[0] = steps(params, kept[0], jnp.int32(count))
        jax.block_until_ready(kept[0])

    return run


def capacity(work: Workload, repeats: int, rooms: tuple[int, int] = (256, 4096)) -> Table:
    """A decode step's cost by the room of its cache, for groups and for single rows."""
    few, many = 8, 72
    rows: list[Sequence[object]] = []
    for group in (work.group, 1):
        tokens = np.repeat(work.tokens, 1 if group > 1 else work.group, axis=0)
        loops = {room: decode_steps(work, tokens, group, room) for room in rooms}
        found = timing.medians(
            {
                f"{room} {count}": functools.partial(loops[room], count)
                for room in rooms
                for count in (few, many)
            },
            repeats,
        )
        steps = {
            room: (found[f"{room} {many}"] - found[f"{room} {few}"]) / (many - few)
            for room in rooms
        }
        for room, step in steps.items():
            call = found[f"{room} {few}"].cpu - few * step.cpu
            times = (f"{1e3 * step.cpu:.2f}", f"{1e3 * step.wall:.2f}", f"{1e3 * call:.1f}")
            first = room == rooms[0]
            bar = ("", "") if first else (f"{step.cpu / steps[rooms[0]].cpu:.2f}", 1.15)
            rows.append((f"{len(tokens)} × {group}", room, *times, *bar))
    header = ("rows", "room", "CPU-ms a step", "ms a step", "CPU-ms a call")
    return Table((*header, f"÷ room {rooms[0]} (CPU)", "bar"), rows)


def sections(args: argparse.Namespace) -> dict[str, Callable[[], Table]]:
    """Title → what measures it and gives its table."""
    work = workload(args.peers / "workload.json")
    peers = (
        Peer(
            name="transformers, torch",
            script=args.peers / "torch_peer.py",
            python=args.torch_python,
            options=("--steps", "1"),
            bar=8.0,
        ),
        Peer(
            name="Tunix 0.1.7",
            script=args.peers / "tunix_sampler.py",
            python=args.tunix_python,
            bar=2.0,
        ),
    )

    def measure_roofline() -> Table:
        model, params = rl.models.load("smollm2-135m")
        return roofline.table(*roofline.measure(model, params, repeats=args.repeats))

    return {
        "speed": lambda: speed(work, peers, args.rounds, args.repeats),
        "prefill": lambda: prefill(work, 512, args.repeats),
        "capacity": lambda: capacity(work, args.repeats),
        "roofline": measure_roofline,
        "batching": lambda: batching.table(
            batching.measure(work.model, work.params, requests=args.requests)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", help=f"any of {', '.join(SECTIONS)}; all when empty")
    parser.add_argument("--peers", type=Path, default=PEERS, help="folder of the shared workload")
    parser.add_argument("--torch-python", help="interpreter with torch and transformers")
    parser.add_argument("--tunix-python", help="interpreter with google-tunix")
    parser.add_argument("--rounds", type=int, default=5, help="turns of the comparison with peers")
    parser.add_argument("--repeats", type=int, default=5, help="runs of which a median is taken")
    parser.add_argument("--requests", type=int, default=2048, help="requests to the engine")
    parser.add_argument("--json", type=Path, help="also write the tables here")
    args = parser.parse_args()
    if wrong := sorted(set(args.what) - set(SECTIONS)):
        parser.error(f"unknown: {', '.join(wrong)}; choose from {', '.join(SECTIONS)}")
    print(f"jax {jax.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    found = {}
    for name, run in sections(args).items():
        if not args.what or name in args.what:
            found[name] = run()
            print(f"\n## {name}\n\n{found[name]}", flush=True)
    if args.json:
        records = {name: {"note": one.note, "rows": one.records()} for name, one in found.items()}
        args.json.write_text(json.dumps(records, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

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
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rlhf_jax as rl
from experiments.bench import batching, roofline, timing
from experiments.bench.peers import FOLDER, Peer, Workload, workload
from experiments.bench.tables import Table, run_sections
from experiments.bench.timing import Clocks

SECTIONS = ("speed", "prefill", "capacity", "roofline", "batching")


def ours(work: Workload, repeats: int, seed: int = 0) -> Clocks:
    """Tokens a second of this library: median of `repeats` rollouts with different keys."""
    runs = [timing.timed(functools.partial(work.generate, seed + i)) for i in range(repeats)]
    spent = timing.median(runs)
    count = len(work.tokens) * work.group * work.new_tokens
    return Clocks(wall=count / spent.wall, cpu=count / spent.cpu)


def rate_of(peer: Peer) -> Clocks:
    """Tokens a second of a peer: its own median."""
    found = peer.run()
    return Clocks(wall=found["tokens_per_s"], cpu=found["tokens_per_cpu_s"])


def speed(work: Workload, peers: Sequence[Peer], rounds: int, repeats: int) -> Table:
    """Everybody in turn, `rounds` times."""
    ours(work, 1)  # compiles
    found: dict[str, list[Clocks]] = {}
    for index in range(rounds):
        found.setdefault("rlhf-jax", []).append(ours(work, repeats, index * repeats))
        for peer in peers:
            if peer.missing is None:
                found.setdefault(peer.name, []).append(rate_of(peer))
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
    parser.add_argument("--peers", type=Path, default=FOLDER, help="folder of the shared workload")
    parser.add_argument("--torch-python", help="interpreter with torch and transformers")
    parser.add_argument("--tunix-python", help="interpreter with google-tunix")
    parser.add_argument("--rounds", type=int, default=5, help="turns of the comparison with peers")
    parser.add_argument("--repeats", type=int, default=5, help="runs of which a median is taken")
    parser.add_argument("--requests", type=int, default=2048, help="requests to the engine")
    parser.add_argument("--json", type=Path, help="also write the tables here")
    args = parser.parse_args()
    if wrong := sorted(set(args.what) - set(SECTIONS)):
        parser.error(f"unknown: {', '.join(wrong)}; choose from {', '.join(SECTIONS)}")
    run_sections(sections(args), args.what, args.json)


if __name__ == "__main__":
    main()

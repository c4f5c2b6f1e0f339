"""What an update costs: against two peers, in memory, and with packed rows.

    python -m experiments.bench.update                       # all of it
    python -m experiments.bench.update speed --torch-python PY --tunix-python PY
    python -m experiments.bench.update memory remat packing

- ``speed``: CPU-seconds of an update on the shared workload, this library and the peers in turn,
  each in a process of its own, and the peak of that process's memory. PyTorch's script times the
  old, the reference and the gradient pass with AdamW; Tunix's times the gradient pass alone.
- ``memory``: temporaries of a whole step with a large vocabulary, by XLA's own analysis, with
  chunked log-probs and with all the logits at once.
- ``remat``: temporaries and time of a step by what the backward pass recomputes.
- ``packing``: time of the same update with a completion a row, and with packed rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rlhf_jax as rl
from experiments.bench import batching, timing
from experiments.bench.peers import FOLDER, Peer, Workload, run_json, workload
from experiments.bench.tables import Table, run_sections
from sharding.plan import grpo_loss_fn, step_shapes

SECTIONS = ("speed", "memory", "remat", "packing")
MIB = 2**20


def grpo_step(policy: Any, work: Workload, **options: Any) -> tuple[Any, Any]:
    """A GRPO train step as the peers do it, and its optimizer."""
    optimizer = optax.adamw(work.learning_rate)
    loss_fn = grpo_loss_fn(kl_coef=work.kl_coef, clip=work.clip)
    step = rl.make_train_step(policy, loss_fn, optimizer, **options)
    return step, optimizer


def batch_of(rollout: rl.Rollout, old: jax.Array, ref: jax.Array) -> rl.Batch:
    """A batch with random advantages."""
    rows = rollout.tokens.shape[0]
    return rl.Batch(
        tokens=rollout.tokens,
        mask=rollout.mask,
        attention_mask=rollout.attention_mask,
        group_ids=rollout.group_ids,
        advantages=jax.random.normal(jax.random.key(7), (rows,)),
        old_log_probs=old,
        sampler_log_probs=rollout.log_probs,
        ref_log_probs=ref,
        denominator=jnp.broadcast_to(rl.masked.denominator(rollout.mask, "token_mean"), (rows,)),
        start=rollout.start,
    )


def own(work: Workload, repeats: int) -> dict[str, Any]:
    """One process's measurement: samples once, then updates; medians and the peak of memory.

    A prompt is computed once a group. Four micro-batches, and blocks of 1024 tokens at the head:
    the same update, but what it works on stays in a CPU's caches.
    """
    group = work.group
    policy = rl.policy.from_decoder(
        work.model, with_entropy=False, group_size=group, chunk_size=1024
    )
    parts = math.gcd(4, work.tokens.shape[0])

    @jax.jit
    def score(params: Any, rollout: rl.Rollout) -> jax.Array:
        rows = rl.train_step.split_rows(dataclasses.replace(rollout, version=None), parts, group)
        found = jax.lax.map(lambda part: policy(params, part).log_probs, rows)
        found = found.reshape(parts, -1, group, found.shape[-1]).swapaxes(0, 1)
        return found.reshape(rollout.tokens.shape)

    step, optimizer = grpo_step(policy, work, micro_batches=parts, group_size=group)
    rollout = work.generate(0)
    reference = rl.partition.copy(work.params)
    state = [rl.init_train_state(work.params, optimizer)]
    batch = batch_of(rollout, rollout.log_probs, rollout.log_probs)

    def gradient() -> Any:
        state[0], _ = step(state[0], batch)
        return state[0]

    def whole() -> Any:
        old, ref = score(state[0].params, rollout), score(reference, rollout)
        state[0], _ = step(state[0], batch_of(rollout, old, ref))
        return state[0]

    found = timing.medians({"gradient": gradient, "whole": whole}, repeats)
    return {
        **{f"{name}_cpu_s": clocks.cpu for name, clocks in found.items()},
        **{f"{name}_s": clocks.wall for name, clocks in found.items()},
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def of_torch(found: dict[str, Any]) -> tuple[float, float, int]:
    """CPU-seconds, seconds and peak MB of the PyTorch script's update."""
    return found["update_cpu_s"], found["update_s"], found["peak_rss_mb"]


def of_tunix(found: dict[str, Any]) -> tuple[float, float, int]:
    """The same of Tunix's script, whose first two updates compile."""
    cpu, wall = (statistics.median(found[name][2:]) for name in ("update_cpu_s", "update_s"))
    return cpu, wall, found["maxrss_mb"]


def speed(
    peers: Sequence[tuple[Peer, str, Callable[[Any], tuple[float, float, int]]]],
    ours: Callable[[], dict[str, Any]],
    rounds: int,
) -> Table:
    """Everybody in turn, `rounds` times, each run a process of its own."""
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        found.setdefault("rlhf-jax", []).append(ours())
        for peer, _, _ in peers:
            if peer.missing is None:
                found.setdefault(peer.name, []).append(peer.run())

    def middle(runs: Sequence[tuple[float, float, int]]) -> list[float]:
        return [statistics.median(values) for values in zip(*runs, strict=True)]

    mine: dict[str, list[float]] = {
        part: middle([(r[f"{part}_cpu_s"], r[f"{part}_s"], r["peak_rss_mb"]) for r in runs])
        for runs in [found["rlhf-jax"]]
        for part in ("gradient", "whole")
    }
    names = {"gradient": "gradient pass and AdamW", "whole": "old, reference, gradient, AdamW"}
    rows: list[Sequence[object]] = [
        ("rlhf-jax", names[part], f"{cpu:.2f}", f"{wall:.2f}", f"{peak:.0f}", "", "", "")
        for part, (cpu, wall, peak) in mine.items()
    ]
    for peer, part, read in peers:
        if peer.missing is not None:
            rows.append((peer.name, f"left out: {peer.missing}", *[""] * 4, peer.bar, ""))
            continue
        cpu, wall, peak = middle([read(run) for run in found[peer.name]])
        factors = (f"{mine[part][0] / cpu:.2f}", peer.bar, f"{mine[part][2] / peak:.2f}")
        rows.append((peer.name, names[part], f"{cpu:.2f}", f"{wall:.2f}", f"{peak:.0f}", *factors))
    header = ("trainer", "parts", "CPU-seconds", "seconds", "peak MB")
    return Table((*header, "ours ÷ it (CPU)", "bar", "ours ÷ it (memory)"), rows)


def compiled(policy: Any, model: rl.models.Decoder, work: Workload, batch: rl.Batch) -> Any:
    """The compiled step for these shapes; nothing is computed."""
    step, optimizer = grpo_step(policy, work)
    state = jax.eval_shape(
        functools.partial(rl.init_train_state, optimizer=optimizer), model.shapes()
    )
    return step.lower(state, batch).compile()  # type: ignore[attr-defined]


def temporaries(program: Any) -> int:
    """Bytes that a compiled program holds besides its inputs and outputs."""
    plan = program.memory_analysis()
    if plan is None:
        raise RuntimeError(f"the {jax.default_backend()} backend has no memory analysis")
    return plan.temp_size_in_bytes


def memory(
    work: Workload, vocab: int = 131072, length: int = 2048, width: int = 512, rows: int = 2
) -> Table:
    """A whole step with chunked log-probs, and with the logits of all tokens at once."""
    config = rl.models.DecoderConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        num_layers=2,
        num_heads=max(1, width // 128),
        num_kv_heads=1,
    )
    model = rl.models.Decoder(config, remat="full")
    batch = step_shapes(model, rows, length, 0)
    sizes = {
        name: temporaries(compiled(policy, model, work, batch))
        for name, policy in (
            ("all logits at once", rl.policy.from_apply(model.logits)),
            ("chunked", rl.policy.from_decoder(model)),
        )
    }
    plain = sizes["all logits at once"]
    lines = [
        (name, f"{size / MIB:.0f}", f"{size / plain:.3f}", "" if size == plain else 0.25)
        for name, size in sizes.items()
    ]
    note = f"V = {vocab}, T = {length}, D = {width}, {rows} rows, 2 layers, remat full, entropy."
    return Table(("log-probs", "temporaries, MiB", "÷ all at once", "bar"), lines, note)


def remat(
    work: Workload, repeats: int, policies: Sequence[str], layers: int = 12, length: int = 512
) -> Table:
    """Temporaries and CPU-seconds of a step by what the backward pass recomputes."""
    config = rl.models.DecoderConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=1024,
        num_layers=layers,
        num_heads=8,
        num_kv_heads=4,
    )
    runs, sizes = {}, {}
    for name in policies:
        model = rl.models.Decoder(config, remat=name)
        shapes = step_shapes(model, 4, length, 64)
        program = compiled(rl.policy.from_decoder(model), model, work, shapes)
        sizes[name] = temporaries(program)
        _, optimizer = grpo_step(None, work)
        state = [rl.init_train_state(model.init(jax.random.key(0)), optimizer)]
        batch = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)

        def run(program: Any = program, state: list[Any] = state, batch: Any = batch) -> Any:
            state[0], _ = program(state[0], batch)
            return state[0]

        runs[name] = run
    found = timing.medians(runs, repeats)
    first = policies[0]
    rows = [
        (
            *(name, f"{sizes[name] / MIB:.0f}", f"{sizes[name] / sizes[first]:.2f}"),
            *(f"{found[name].cpu:.2f}", f"{found[name].cpu / found[first].cpu:.2f}"),
        )
        for name in policies
    ]
    note = f"{layers} layers, D = 256, F = 1024, V = 8192, 4 rows × {length} tokens, float32."
    header = ("remat", "temporaries, MiB", f"÷ {first}", "CPU-seconds a step", f"÷ {first} (CPU)")
    return Table(header, rows, note)


def ragged(work: Workload, rows: int, sizes: np.ndarray) -> rl.Batch:
    """Random rows: the workload's prompts, then as many completion tokens as `sizes` says."""
    prompt = work.tokens.shape[1]
    rng = np.random.default_rng(3)
    columns = np.arange(prompt + int(sizes.max()))
    real = columns < prompt + sizes[:, None]
    tokens = rng.integers(3, work.model.config.vocab_size, real.shape)
    mask = jnp.asarray(real & (columns >= prompt))
    zeros = jnp.zeros(real.shape)
    return rl.Batch(
        tokens=jnp.asarray(np.where(real, tokens, 0), jnp.int32),
        mask=mask,
        attention_mask=jnp.asarray(real),
        group_ids=jnp.arange(rows) // work.group,
        advantages=jax.random.normal(jax.random.key(7), (rows,)),
        old_log_probs=zeros,
        sampler_log_probs=zeros,
        ref_log_probs=zeros,
        denominator=jnp.broadcast_to(rl.masked.denominator(mask, "token_mean"), (rows,)),
        start=prompt,
    )


def packing(work: Workload, repeats: int, rows: int = 64, micro: int = 4) -> Table:
    """One update of `rows` completions of log-normal lengths, `micro` rows at a time."""
    sizes = batching.lengths(rows)
    plain = ragged(work, rows, sizes)
    policy = rl.policy.from_decoder(work.model, with_entropy=False)
    score = jax.jit(lambda params, part: policy(params, part).log_probs)
    parts = [jax.tree.map(lambda x, i=i: x[i : i + micro], plain) for i in range(0, rows, micro)]
    old = jnp.concatenate([score(work.params, part) for part in parts])
    plain = dataclasses.replace(plain, old_log_probs=old, ref_log_probs=old)
    width = plain.tokens.shape[1]

    def packed() -> rl.Batch:
        plan = rl.packing.plan(plain.attention_mask, width, multiple=micro)
        return rl.packing.pack(plain, plan)

    runs: dict[str, Callable[[], Any]] = {}
    norms, shapes = {}, {}
    for name, make in (("a completion a row", lambda: plain), ("packed", packed)):
        count = make().tokens.shape[0]
        step, optimizer = grpo_step(policy, work, micro_batches=count // micro)
        state = [rl.init_train_state(work.params, optimizer)]

        def run(step: Any = step, state: list[Any] = state, make: Any = make) -> Any:
            state[0], found = step(state[0], make())
            return found["optim/grad_norm"]

        norms[name], shapes[name] = float(run().value()), count
        runs[name] = run
    found = timing.medians(runs, repeats)
    first = found["a completion a row"]
    real = int(np.asarray(plain.attention_mask).sum())
    lines = [
        (
            *(name, f"{shapes[name]} × {width}", f"{real / (shapes[name] * width):.2f}"),
            *(f"{found[name].cpu:.2f}", f"{found[name].wall:.2f}"),
            *(f"{first.cpu / found[name].cpu:.2f}", f"{norms[name]:.6f}"),
        )
        for name in runs
    ]
    header = ("rows", "shape", "real tokens", "CPU-seconds", "seconds", "gain (CPU)")
    note = (
        f"{rows} completions, lengths log-normal of mean {sizes.mean():.0f} and at most "
        f"{sizes.max()}, {micro} rows a micro-batch; planning and packing are in the time. The "
        "gradient norm is that of the first update."
    )
    return Table((*header, "gradient norm"), lines, note)


def sections(args: argparse.Namespace) -> dict[str, Callable[[], Table]]:
    """Title → what measures it and gives its table."""
    file = args.peers / "workload.json"
    mine = (sys.executable, "-m", "experiments.bench.update", "own", "--peers", str(args.peers))
    peers = (
        (
            Peer(
                name="torch",
                script=args.peers / "torch_peer.py",
                python=args.torch_python,
                options=("--steps", "3"),
                bar=0.7,
            ),
            "whole",
            of_torch,
        ),
        (
            Peer(
                name="Tunix 0.1.7",
                script=args.peers / "tunix_update.py",
                python=args.tunix_python,
                bar=0.7,
            ),
            "gradient",
            of_tunix,
        ),
    )
    return {
        "speed": lambda: speed(peers, lambda: run_json("this library", *mine), args.rounds),
        "memory": lambda: memory(workload(file)),
        "remat": lambda: remat(workload(file), args.repeats, args.remat),
        "packing": lambda: packing(workload(file), args.repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", help=f"any of {', '.join(SECTIONS)}; all when empty")
    parser.add_argument("--peers", type=Path, default=FOLDER, help="folder of the shared workload")
    parser.add_argument("--torch-python", help="interpreter with torch and transformers")
    parser.add_argument("--tunix-python", help="interpreter with google-tunix")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the comparison with peers")
    parser.add_argument("--repeats", type=int, default=5, help="runs of which a median is taken")
    parser.add_argument("--remat", nargs="+", default=list(rl.models.Decoder.REMAT))
    parser.add_argument("--json", type=Path, help="also write the tables here")
    args = parser.parse_args()
    if args.what == ["own"]:  # what `speed` runs in a process of its own
        print(json.dumps(own(workload(args.peers / "workload.json"), args.repeats)))
        return
    if wrong := sorted(set(args.what) - set(SECTIONS)):
        parser.error(f"unknown: {', '.join(wrong)}; choose from {', '.join(SECTIONS)}")
    run_sections(sections(args), args.what, args.json)


if __name__ == "__main__":
    main()

"""Compiles the train step of an 8B model for a TPU slice that is not there; prints its memory.

Needs ``libtpu``; no TPU. Nothing is executed: shapes go in, the TPU compiler's plan comes out.

    python -m experiments.bench.tpu_train
    python -m experiments.bench.tpu_train --model qwen3-8b --topology v5p:4x4x4 --layout fsdp

Float32 masters and moments, bfloat16 compute, AdamW, GRPO with its KL in the loss. Printed per
chip: bytes of arguments, of what the outputs share with them (the donated state), temporaries and
peak, the collectives of a step, and the largest piece of logits. Ends with an error when the state
is not updated in place, or when an array holds the logits of a good part of the tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import rlhf_jax as rl
import sharding
from experiments.bench import hlo, tpu_decode, update
from experiments.bench.tables import Table

MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The rows of one step."""

    rows: int = 64
    length: int = 4096
    prompt: int = 1024
    micro_batches: int = 1
    chunk: int = 256  # tokens of one chip whose logits exist at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """A train step's shapes, laid out over a mesh."""

    model: rl.models.Decoder
    layout: sharding.Layout
    mesh: Any
    state: rl.TrainState
    shardings: rl.TrainState
    batch: rl.Batch
    optimizer: Any
    sizes: Sizes


def place(
    config: rl.models.DecoderConfig,
    layout: sharding.Layout,
    devices: Sequence[Any],
    sizes: Sizes,
    remat: str = "full",
    attention: str = "xla",
) -> Placed:
    """Shapes with shardings of a state and a batch."""
    mesh = sharding.make_mesh(layout, devices)
    layout = tpu_decode.fitted(layout, config, mesh)
    model = rl.models.Decoder(
        config,
        dtype=jnp.bfloat16,
        remat=remat,
        attention=attention,
        placement=sharding.activation_sharding(layout, mesh),
    )
    shapes = model.shapes()
    where = sharding.tree_shardings(model.logical_axes(), shapes, layout, mesh)
    optimizer = optax.adamw(1e-6)
    shardings = rl.train_step.state_shardings(shapes, optimizer, where)
    state = jax.eval_shape(functools.partial(rl.init_train_state, optimizer=optimizer), shapes)
    sharding.check_rows(
        sizes.rows // sizes.micro_batches, layout, mesh, name="rows of a micro-batch"
    )
    rows = sharding.row_sharding(layout, mesh)
    batch = update.step_shapes(model, sizes.rows, sizes.length, sizes.prompt)

    def put(leaf: Any, at: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)

    return Placed(
        model=model,
        layout=layout,
        mesh=mesh,
        state=jax.tree.map(put, state, shardings),
        shardings=shardings,
        batch=jax.tree.map(lambda leaf: put(leaf, rows), batch),
        optimizer=optimizer,
        sizes=sizes,
    )


def compile_step(placed: Placed) -> Any:
    """The step, compiled for the placed shapes."""
    sizes = placed.sizes
    policy = rl.policy.from_decoder(placed.model, chunk_size=sizes.chunk)
    step = rl.make_train_step(
        policy,
        update.grpo_loss_fn(kl_coef=0.04, clip=0.2),
        placed.optimizer,
        micro_batches=sizes.micro_batches,
        compute_dtype="bfloat16",
        shardings=placed.shardings,
    )
    return step.lower(placed.state, placed.batch).compile()  # type: ignore[attr-defined]


def on_a_chip(tree: Any) -> int:
    """Bytes of one chip's part of a tree of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def vocabulary_arrays(module: hlo.Module, vocab: int, widths: set[int], shards: int) -> list[int]:
    """Elements of every float array with a vocabulary axis (whole or split) that is no weight.

    A weight is two-dimensional, with one of `widths` beside the vocabulary.
    """
    axes = {vocab, vocab // shards}
    found = set()
    for computation in module.computations.values():
        for one in computation.instructions.values():
            for dtype, dims in hlo.arrays(one.shape):
                held = axes & set(dims)
                if dtype not in ("f32", "bf16") or not held:
                    continue
                others = [dim for dim in dims if dim != 1 and dim not in held]
                if len(others) > 1 or (others and others[0] not in widths):
                    found.add(math.prod(dims))
    return sorted(found)


def measure(placed: Placed) -> dict[str, Any]:
    """Memory, aliasing, collectives and the largest piece of logits."""
    program = compile_step(placed)
    plan = program.memory_analysis()
    module = hlo.parse(program.as_text())
    config, sizes = placed.model.config, placed.sizes
    tensor = dict(placed.mesh.shape).get("tensor", 1)
    spread = math.prod(placed.mesh.shape[axis] for axis in placed.layout.rows)
    rows = sizes.rows // sizes.micro_batches // spread
    width = config.hidden_size
    # Whole, split, or the two bfloat16 halves of a float32 matrix side by side.
    widths = {factor * width // parts for factor in (1, 2) for parts in (1, spread, tensor)}
    pieces = vocabulary_arrays(module, config.vocab_size, widths, tensor)
    return {
        "layout": placed.layout.name,
        "mesh": sharding.describe(placed.mesh),
        "state": on_a_chip(placed.state),
        "arguments": plan.argument_size_in_bytes,
        "aliased": plan.alias_size_in_bytes,
        "temporaries": plan.temp_size_in_bytes,
        "peak": getattr(plan, "peak_memory_in_bytes", 0),
        "largest logits": 4 * max(pieces, default=0),
        "all logits": 4 * rows * (sizes.length - sizes.prompt) * config.vocab_size // tensor,
        "traffic": hlo.summary(hlo.transfers(module, module.entry)),
    }


def check(found: dict[str, Any]) -> None:
    """Fail when the state is not donated, or the logits of a quarter of the tokens are held."""
    if found["aliased"] < found["state"]:
        raise AssertionError(
            f"layout {found['layout']!r}: {found['state'] / MIB:,.0f} MiB of state on a chip, but "
            f"only {found['aliased'] / MIB:,.0f} MiB are updated in place"
        )
    if found["largest logits"] > found["all logits"] / 4:
        raise AssertionError(
            f"layout {found['layout']!r}: an array of {found['largest logits'] / MIB:,.0f} MiB "
            "holds the logits of many tokens"
        )


def report(found: dict[str, Any]) -> str:
    """One layout's figures as two small tables."""
    names = ("state", "arguments", "aliased", "temporaries", "peak", "largest logits", "all logits")
    traffic = [
        (kind, times, f"{count / MIB:,.0f}") for kind, (times, count) in found["traffic"].items()
    ]
    parts = (
        f"### {found['layout']}: {found['mesh']}",
        Table(("MiB a chip", *names), [("train step", *(f"{found[n] / MIB:,.0f}" for n in names))]),
        Table(("collectives", "runs", "MiB a chip"), traffic),
    )
    return "\n\n".join(map(str, parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=sorted(tpu_decode.MODELS), default="llama3-8b")
    parser.add_argument("--layout", choices=sorted(tpu_decode.LAYOUTS), default="fsdp_tensor")
    parser.add_argument("--tensor", type=int, help="size of the tensor axis")
    parser.add_argument("--topology", default="v5e:4x8")
    parser.add_argument("--remat", default="full")
    parser.add_argument("--attention", default="splash", choices=("xla", "splash"))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    for field in dataclasses.fields(Sizes):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=field.default)
    args = parser.parse_args()
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Sizes)})
    layout = tpu_decode.LAYOUTS[args.layout]
    layout = layout if args.tensor is None else layout.with_sizes(tensor=args.tensor)
    devices = tpu_decode.topology(args.topology)
    config = tpu_decode.MODELS[args.model]
    found = measure(place(config, layout, devices, sizes, args.remat, args.attention))
    how = f"bf16 compute, attention {args.attention}, remat {args.remat}, {sizes}"
    print(f"jax {jax.__version__}: {args.model} on {args.topology}, {how}\n")
    print(report(found), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    check(found)


if __name__ == "__main__":
    main()

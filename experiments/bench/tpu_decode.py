"""Compiles generation of an 8B model for a TPU slice that is not there; prints memory and traffic.

Needs ``libtpu``; no TPU. Nothing is executed: shapes go in, the TPU compiler's plan comes out.

    python -m experiments.bench.tpu_decode
    python -m experiments.bench.tpu_decode --model qwen3-8b --layout fsdp_tensor --tensor 8

Three programs: the prefill alone, ``rl.generate`` (prefill and decode loop) and a round of the
engine. Printed per chip: bytes of arguments, temporaries and peak, and of the cache that the loop
carries; and the collectives of one trip of the decode loop, which is one token of every row. Ends
with an error when the loop of a layout that does not split the embedding axis moves weights, or
when a loop copies its cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import rlhf_jax as rl
import sharding
from experiments.bench import hlo
from experiments.bench.tables import Table
from rlhf_jax.models.cache import cache_axes
from rlhf_jax.sampling import _slots

MIB = 2**20
LLAMA = dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32)
QWEN = dict(vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36)
GQA: dict[str, Any] = dict(num_heads=32, num_kv_heads=8, head_dim=128, tie_embeddings=False)
MODELS = {
    "llama3-8b": rl.models.DecoderConfig(**LLAMA, **GQA, rope_theta=5e5),
    "qwen3-8b": rl.models.DecoderConfig(
        **QWEN, **GQA, rope_theta=1e6, norm_eps=1e-6, architecture="Qwen3ForCausalLM"
    ),
}
DATA_TENSOR = sharding.Layout(  # whole rows on groups of chips, the weights split inside each group
    name="data_tensor",
    axes=(("data", -1), ("tensor", 8)),
    rules=sharding.get_layout("tensor").rules,
    rows=("data",),
)
LAYOUTS = {**sharding.LAYOUTS, DATA_TENSOR.name: DATA_TENSOR}
fitted = sharding.fitted


PLAN = {  # what the compiler says of a program's memory
    "arguments": "argument_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "output": "output_size_in_bytes",
    "peak": "peak_memory_in_bytes",
}
CACHE = ("cache", "cache of all chips", "copied a token")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The rows of one generation."""

    prompts: int = 32
    group: int = 4
    prompt_length: int = 1024
    new_tokens: int = 1024


def topology(name: str = "v5e:4x4") -> list[Any]:
    """The devices of a TPU slice, as descriptions for the compiler."""
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    return list(topologies.get_topology_desc(name, "tpu").devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """A model's shapes, laid out over a mesh."""

    model: rl.models.Decoder
    layout: sharding.Layout
    params: Any
    tokens: Any
    mask: Any
    key: Any
    group_ids: Any
    sizes: Sizes


def place(
    config: rl.models.DecoderConfig,
    layout: sharding.Layout,
    devices: Sequence[Any],
    sizes: Sizes,
    dtype: Any = jnp.bfloat16,
) -> Placed:
    """Shapes with shardings of everything that ``generate`` takes."""
    mesh = sharding.make_mesh(layout, devices)
    layout = fitted(layout, config, mesh)
    model = rl.models.Decoder(config, dtype=dtype)
    shapes = model.shapes()
    shardings = sharding.tree_shardings(model.logical_axes(), shapes, layout, mesh)
    rows, whole = sharding.row_sharding(layout, mesh), jax.NamedSharding(mesh, jax.P())
    sharding.check_rows(sizes.prompts, layout, mesh, name="prompts")

    def shape(dims: tuple[int, ...], dtype: Any, where: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=where)

    prompts = (sizes.prompts, sizes.prompt_length)
    return Placed(
        model=model,
        layout=layout,
        params=jax.tree.map(lambda leaf, where: shape(leaf.shape, dtype, where), shapes, shardings),
        tokens=shape(prompts, jnp.int32, rows),
        mask=shape(prompts, jnp.bool_, rows),
        key=shape((), jax.random.key(0).dtype, whole),
        group_ids=shape((sizes.prompts,), jnp.int32, rows),
        sizes=sizes,
    )


def compile_prefill(placed: Placed) -> Any:
    """The prefill, alone."""
    function = jax.jit(placed.model.prefill)
    return function.lower(placed.params, placed.tokens, placed.mask).compile()


def compile_generate(placed: Placed) -> Any:
    """``rl.generate``: prefill, first draw and the decode loop."""

    def run(params: Any, tokens: Any, mask: Any, key: Any, group_ids: Any) -> rl.Rollout:
        sizes = placed.sizes
        return rl.generate(
            placed.model,
            params,
            tokens,
            mask,
            key,
            group_size=sizes.group,
            max_new_tokens=sizes.new_tokens,
            stop_ids=(2,),
            group_ids=group_ids,
        )

    args = (placed.params, placed.tokens, placed.mask, placed.key, placed.group_ids)
    return jax.jit(run).lower(*args).compile()


def slots(placed: Placed) -> _slots.Slots:
    """Shapes of an engine's slots, one per row, laid out as its rules say."""
    sizes, model = placed.sizes, placed.model
    count = sizes.prompts * sizes.group

    def make(params: Any, tokens: Any) -> _slots.Slots:
        prompts = rl.sampling.Prompts(tokens, tokens > 0)
        hidden, prefix = model.prefill(params, *prompts)
        cache = model.init_cache(prefix, group_size=1, max_new_tokens=sizes.new_tokens)
        keys = jax.random.split(jax.random.key(0), (count, 1))
        options = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (count, 1, *leaf.shape)),
            rl.sampling.SamplingOptions.make(max_new_tokens=sizes.new_tokens),
        )
        rows = rl.sampling.start(keys, cache, options, sizes.new_tokens)
        parts = dict(step=rows.lengths, versions=rows.tokens, forced=rows.tokens)
        rows = dataclasses.replace(rows, **parts, mask=rows.tokens > 0)
        return _slots.Slots(
            rows=rows, first=hidden[:, None], keys=keys, options=options, prompts=prompts
        )

    tokens = jax.ShapeDtypeStruct((count, sizes.prompt_length), jnp.int32)
    made = jax.eval_shape(make, placed.params, tokens)
    mesh, layout = placed.tokens.sharding.mesh, placed.layout
    rows = sharding.row_sharding(layout, mesh)
    where = jax.tree.map(lambda leaf: rows, made)
    logical = {**layout.rules, "prompt": layout.rows or None}
    cache = jax.tree.map(
        lambda names: jax.NamedSharding(mesh, jax.P(*map(logical.get, names))),
        cache_axes(made.rows.cache),
        is_leaf=lambda names: isinstance(names, tuple) and isinstance(names[0], str),
    )
    where = dataclasses.replace(where, rows=dataclasses.replace(where.rows, cache=cache))
    return jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), made, where
    )


def compile_round(placed: Placed, steps: int = 8) -> Any:
    """A round of the engine: ``steps`` tokens of every slot, each at its own step."""
    state = slots(placed)
    mesh = placed.tokens.sharding.mesh
    whole = jax.NamedSharding(mesh, jax.P())
    flags = jax.ShapeDtypeStruct(state.prompts.tokens.shape[:1], jnp.bool_, sharding=whole)
    version = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    return _slots.run.lower(
        *(placed.model, placed.params, state, flags, flags, version),
        steps=steps,
        placement=tuple(leaf.sharding for leaf in jax.tree.leaves(state)),
    ).compile()


def memory(compiled: Any) -> dict[str, int]:
    """Bytes on one chip, by the compiler's plan."""
    plan = compiled.memory_analysis()
    return {name: getattr(plan, field, 0) for name, field in PLAN.items()}


def generate_cache(placed: Placed) -> Any:
    """Shapes of the cache inside ``rl.generate``."""
    sizes, model = placed.sizes, placed.model
    return jax.eval_shape(
        lambda params, tokens, mask: model.init_cache(
            model.prefill(params, tokens, mask)[1],
            group_size=sizes.group,
            max_new_tokens=sizes.new_tokens,
        ),
        *(placed.params, placed.tokens, placed.mask),
    )


def carried(cache: Any, loop: hlo.Instruction) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays of the decode loop's carry that are the cache's, as they lie on one chip."""
    there, found = hlo.arrays(loop.shape), []
    for leaf in (leaf for leaf in jax.tree.leaves(cache) if leaf.ndim >= 5):
        parts = [
            (dtype, dims)
            for dtype, dims in there
            if len(dims) == leaf.ndim
            and dims[0] == leaf.shape[0]
            and all(whole % part == 0 for whole, part in zip(leaf.shape, dims, strict=True))
        ]
        if parts:  # keys and values may have one shape: each array is taken once
            found.append(max(parts, key=lambda part: hlo.size(*part)))
            there.remove(found[-1])
    return found


def cache_figures(cache: Any, module: hlo.Module, loop: hlo.Instruction) -> dict[str, int]:
    """Bytes of the cache on one chip, of the whole cache, and of its copies in a trip of the loop.

    The loop should write a token's keys and values in place: a copy as large as the cache costs
    more than all weights.
    """
    parts = carried(cache, loop)
    dims = {dims for _, dims in parts}
    copies = hlo.transfers(
        module,
        loop.body,
        wanted=lambda one: (
            one.opcode in ("copy", "transpose") and hlo.arrays(one.shape)[0][1] in dims
        ),
    )
    return {
        "cache": sum(hlo.size(*part) for part in parts),
        "cache of all chips": sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache) if leaf.ndim >= 5
        ),
        "copied a token": hlo.total(copies),
    }


def measure(placed: Placed) -> dict[str, Any]:
    """Memory and traffic of the three programs; of one that does not fit, why."""
    found: dict[str, Any] = {
        "layout": placed.layout.name,
        "mesh": sharding.describe(placed.tokens.sharding.mesh),
        "whole": sorted({"heads", "kv_heads"} - set(placed.layout.rules)),
        "weights": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(placed.params)),
        **{part: {} for part in ("memory", "cache", "traffic", "failed")},
        "moved weights": [],
    }
    programs = {
        "prefill": (compile_prefill, None),
        "generate": (compile_generate, generate_cache),
        "round": (compile_round, lambda placed: slots(placed).rows.cache),
    }
    for name, (build, cache) in programs.items():
        try:
            compiled = build(placed)
        except jax.errors.JaxRuntimeError as error:
            found["failed"][name] = str(error).splitlines()[0]
            continue
        found["memory"][name] = memory(compiled)
        module = hlo.parse(compiled.as_text())
        if cache is None:
            found["traffic"][name] = traffic(module, module.entry)
            continue
        loop = hlo.outer_loop(module)
        found["cache"][name] = cache_figures(cache(placed), module, loop)
        found["traffic"][f"{name}, a token"] = traffic(module, loop.body, dearest=False)
        found["traffic"][f"{name}, a token with filters"] = traffic(module, loop.body)
        moved = hlo.carried_parameters(module, loop.body, "params")
        found["moved weights"] += [dict(program=name, **dataclasses.asdict(one)) for one in moved]
    return found


def traffic(
    module: hlo.Module, computation: str, *, dearest: bool = True
) -> dict[str, tuple[int, int]]:
    """Collectives of a computation by kind."""
    return hlo.summary(hlo.transfers(module, computation, dearest=dearest))


def check_no_weights_move(found: dict[str, Any]) -> None:
    """Fail when the decode loop gathers, scatters or passes on weights."""
    if found["moved weights"]:
        lines = [f"  {one['program']}: {moving(one)}" for one in found["moved weights"]]
        raise AssertionError(
            f"layout {found['layout']!r}: weights move in the decode loop:\n" + "\n".join(lines)
        )


def check_cache_stays(found: dict[str, Any]) -> None:
    """Fail when a trip of the decode loop copies the cache, or a good part of it."""
    for program, figures in found["cache"].items():
        if figures["copied a token"] > figures["cache"] / 8:
            raise AssertionError(
                f"layout {found['layout']!r}: {program} copies "
                f"{figures['copied a token'] / MIB:,.0f} MiB a token of a cache that has "
                f"{figures['cache'] / MIB:,.0f} MiB on a chip; it should be written in place"
            )


def moving(one: dict[str, Any]) -> str:
    """A collective in words."""
    return f"{one['kind']} {one['shape']} of {', '.join(one['sources'])}"


def report(found: dict[str, Any]) -> str:
    """What one layout needs, as two small tables."""
    plans = [
        (
            *(name, *(f"{count / MIB:,.0f}" for count in plan.values())),
            *(f"{found['cache'].get(name, {}).get(key, 0) / MIB:,.0f}" for key in CACHE),
        )
        for name, plan in found["memory"].items()
    ]
    exchanged = [
        (f"{where}: {kind}", times, f"{count / MIB:,.2f}")
        for where, kinds in found["traffic"].items()
        for kind, (times, count) in kinds.items()
    ]
    moved = found["moved weights"]
    weights = f"{found['weights'] / MIB:,.0f} MiB"
    parts = (
        f"### {found['layout']}: {found['mesh']}",
        f"Weights: {weights}, not split: {', '.join(found['whole']) or 'none'}.",
        Table(("MiB a chip", *PLAN, *CACHE), plans),
        *(f"The {name} does not compile: {why}" for name, why in found["failed"].items()),
        Table(("collectives", "runs", "MiB a chip"), exchanged),
        f"Collectives of weights in the decode loops: {len(moved) or 'none'}.",
        "\n".join(f"- {one['program']}: {moving(one)}" for one in moved),
    )
    return "\n\n".join(map(str, filter(None, parts)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="llama3-8b")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="tensor")
    parser.add_argument("--tensor", type=int, help="size of the tensor axis")
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    for field in dataclasses.fields(Sizes):
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=field.default)
    args = parser.parse_args()
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Sizes)})
    layout = LAYOUTS[args.layout]
    layout = layout if args.tensor is None else layout.with_sizes(tensor=args.tensor)
    found = measure(place(MODELS[args.model], layout, topology(args.topology), sizes))
    print(f"jax {jax.__version__}: {args.model} on {args.topology}, bf16, {sizes}\n")
    print(report(found), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if "fsdp" not in layout.rules.values():
        check_no_weights_move(found)
    check_cache_stays(found)


if __name__ == "__main__":
    main()

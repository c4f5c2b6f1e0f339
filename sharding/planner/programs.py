"""The programs that a plan compiles: train step, prefill, generation, a round of the engine.

Everything is a shape with a sharding; nothing is computed. The train step is GRPO with its KL in
the loss, AdamW, float32 masters and moments, bfloat16 compute.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import rlhf_jax as rl
import sharding
from rlhf_jax.models.cache import cache_axes
from rlhf_jax.sampling import _slots

__all__ = [
    "Placed",
    "Rollout",
    "Sizes",
    "compile_generate",
    "compile_prefill",
    "compile_round",
    "compile_train",
    "engine_slots",
    "generate_cache",
    "grpo_loss_fn",
    "on_a_device",
    "place_rollout",
    "place_train",
    "step_shapes",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a plan is made for.

    Args:
      rows: rows of one update; completions of one generation.
      length: tokens of a row.
      prompt: tokens of them that are prompt.
      group: completions of a prompt; prompts are ``rows // group``.
      micro_batches: parts of an update, one after the other.
      chunk: tokens of one device whose logits exist at once.
      steps: tokens of a round of the engine.
    """

    rows: int = 64
    length: int = 4096
    prompt: int = 1024
    group: int = 4
    micro_batches: int = 1
    chunk: int = 256
    steps: int = 8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 1:
                name = field.name.replace("_", "-")
                raise ValueError(f"--{name}: got {value}; it must be at least 1")
        if self.prompt >= self.length:
            raise ValueError(
                f"--prompt: {self.prompt} of --length {self.length} tokens; leave some to generate"
            )
        for name in ("group", "micro_batches"):
            if self.rows % getattr(self, name):
                raise ValueError(
                    f"--{name.replace('_', '-')}: {getattr(self, name)} does not divide --rows "
                    f"{self.rows}"
                )


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """Generation's shapes, laid out over a mesh."""

    model: rl.models.Decoder
    layout: sharding.Layout
    mesh: Any
    params: Any
    tokens: Any
    mask: Any
    key: Any
    group_ids: Any
    sizes: Sizes


def on_a_device(tree: Any) -> int:
    """Bytes of one device's part of a tree of shapes with shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        count = leaf.dtype.itemsize
        for size in leaf.sharding.shard_shape(leaf.shape):
            count *= size
        total += count
    return total


def _put(leaf: Any, at: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)


# the train step


def grpo_loss_fn(*, kl_coef: float, clip: float) -> Any:
    """GRPO with its KL in the loss, per token."""

    def loss_fn(output: rl.types.PolicyOutput, batch: rl.Batch) -> Any:
        return rl.losses.grpo_loss(
            output.log_probs,
            batch.old_log_probs,
            batch.advantages,
            batch.mask,
            ref_log_probs=batch.ref_log_probs,
            kl_coef=kl_coef,
            clip_low=clip,
            clip_high=clip,
            aggregation="token_mean",
            denominator=batch.denominator,
        )

    return loss_fn


def step_shapes(model: rl.models.Decoder, rows: int, length: int, prompt: int) -> rl.Batch:
    """The shapes of a batch of `rows` × `length`."""
    full = (rows, length)

    def of(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    shapes: Any = dict(
        tokens=of(full, jnp.int32),
        mask=of(full, jnp.bool_),
        attention_mask=of(full, jnp.bool_),
        group_ids=of((rows,), jnp.int32),
        advantages=of((rows,)),
        old_log_probs=of(full),
        sampler_log_probs=of(full),
        ref_log_probs=of(full),
        denominator=of((rows,)),
    )
    return rl.Batch(**shapes, start=prompt)


def place_train(
    config: rl.models.DecoderConfig,
    layout: sharding.Layout,
    devices: Sequence[Any],
    sizes: Sizes,
    remat: str = "full",
    attention: str = "xla",
) -> Placed:
    """Shapes with shardings of a state and a batch.

    Raises:
      ValueError: rows or heads that do not divide over the layout's axes.
    """
    mesh = sharding.make_mesh(layout, devices)
    micro = sizes.rows // sizes.micro_batches
    sharding.check_rows(micro, layout, mesh, name="--rows (of a micro-batch)")
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
    rows = sharding.row_sharding(layout, mesh)
    batch = step_shapes(model, sizes.rows, sizes.length, sizes.prompt)
    return Placed(
        model=model,
        layout=layout,
        mesh=mesh,
        state=jax.tree.map(_put, state, shardings),
        shardings=shardings,
        batch=jax.tree.map(lambda leaf: _put(leaf, rows), batch),
        optimizer=optimizer,
        sizes=sizes,
    )


def compile_train(placed: Placed) -> Any:
    """The train step, compiled for the placed shapes."""
    sizes = placed.sizes
    step = rl.make_train_step(
        rl.policy.from_decoder(placed.model, chunk_size=sizes.chunk),
        grpo_loss_fn(kl_coef=0.04, clip=0.2),
        placed.optimizer,
        micro_batches=sizes.micro_batches,
        compute_dtype="bfloat16",
        shardings=placed.shardings,
    )
    return step.lower(placed.state, placed.batch).compile()  # type: ignore[attr-defined]


# generation


def place_rollout(
    config: rl.models.DecoderConfig,
    layout: sharding.Layout,
    devices: Sequence[Any],
    sizes: Sizes,
    dtype: Any = jnp.bfloat16,
) -> Rollout:
    """Shapes with shardings of everything that ``generate`` takes.

    Raises:
      ValueError: prompts or heads that do not divide over the layout's axes.
    """
    mesh = sharding.make_mesh(layout, devices)
    prompts = sizes.rows // sizes.group
    sharding.check_rows(prompts, layout, mesh, name="prompts (--rows ÷ --group)")
    model = rl.models.Decoder(
        config,
        dtype=dtype,
        placement=sharding.activation_sharding(layout, mesh),
        decode_placement=sharding.decode_sharding(layout, mesh),
    )
    shapes = model.shapes()
    shardings = sharding.tree_shardings(model.logical_axes(), shapes, layout, mesh)
    rows, whole = sharding.row_sharding(layout, mesh), jax.NamedSharding(mesh, jax.P())

    def shape(dims: tuple[int, ...], dtype: Any, where: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=where)

    full = (prompts, sizes.prompt)
    return Rollout(
        model=model,
        layout=layout,
        mesh=mesh,
        params=jax.tree.map(lambda leaf, at: shape(leaf.shape, dtype, at), shapes, shardings),
        tokens=shape(full, jnp.int32, rows),
        mask=shape(full, jnp.bool_, rows),
        key=shape((), jax.random.key(0).dtype, whole),
        group_ids=shape((prompts,), jnp.int32, rows),
        sizes=sizes,
    )


def compile_prefill(placed: Rollout) -> Any:
    """The prefill, alone."""
    function = jax.jit(placed.model.prefill)
    return function.lower(placed.params, placed.tokens, placed.mask).compile()


def compile_generate(placed: Rollout) -> Any:
    """``rl.generate``: prefill, first draw and the decode loop."""
    sizes = placed.sizes

    def run(params: Any, tokens: Any, mask: Any, key: Any, group_ids: Any) -> rl.Rollout:
        return rl.generate(
            placed.model,
            params,
            tokens,
            mask,
            key,
            group_size=sizes.group,
            max_new_tokens=sizes.length - sizes.prompt,
            stop_ids=(2,),
            group_ids=group_ids,
            row_sharding=sharding.row_sharding(placed.layout, placed.mesh),
        )

    args = (placed.params, placed.tokens, placed.mask, placed.key, placed.group_ids)
    return jax.jit(run).lower(*args).compile()


def generate_cache(placed: Rollout) -> Any:
    """Shapes of the cache inside ``rl.generate``."""
    sizes, model = placed.sizes, placed.model
    return jax.eval_shape(
        lambda params, tokens, mask: model.init_cache(
            model.prefill(params, tokens, mask)[1],
            group_size=sizes.group,
            max_new_tokens=sizes.length - sizes.prompt,
        ),
        *(placed.params, placed.tokens, placed.mask),
    )


def engine_slots(placed: Rollout) -> _slots.Slots:
    """Shapes of an engine's slots, one per row, laid out as its rules say."""
    sizes, model = placed.sizes, placed.model
    new = sizes.length - sizes.prompt

    def make(params: Any, tokens: Any) -> _slots.Slots:
        prompts = rl.sampling.Prompts(tokens, tokens > 0)
        hidden, prefix = model.prefill(params, *prompts)
        cache = model.init_cache(prefix, group_size=1, max_new_tokens=new)
        keys = jax.random.split(jax.random.key(0), (sizes.rows, 1))
        options = jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (sizes.rows, 1, *leaf.shape)),
            rl.sampling.SamplingOptions.make(max_new_tokens=new),
        )
        rows = rl.sampling.start(keys, cache, options, new)
        parts = dict(step=rows.lengths, versions=rows.tokens, forced=rows.tokens)
        rows = dataclasses.replace(rows, **parts, mask=rows.tokens > 0)
        return _slots.Slots(
            rows=rows, first=hidden[:, None], keys=keys, options=options, prompts=prompts
        )

    tokens = jax.ShapeDtypeStruct((sizes.rows, sizes.prompt), jnp.int32)
    made = jax.eval_shape(make, placed.params, tokens)
    mesh, layout = placed.mesh, placed.layout
    rows = sharding.row_sharding(layout, mesh)
    where = jax.tree.map(lambda leaf: rows, made)
    logical = {**layout.rules, "prompt": layout.rows or None}
    cache = jax.tree.map(
        lambda names: jax.NamedSharding(mesh, jax.P(*map(logical.get, names))),
        cache_axes(made.rows.cache),
        is_leaf=lambda names: isinstance(names, tuple) and isinstance(names[0], str),
    )
    where = dataclasses.replace(where, rows=dataclasses.replace(where.rows, cache=cache))
    return jax.tree.map(_put, made, where)


def compile_round(placed: Rollout) -> Any:
    """A round of the engine: ``steps`` tokens of every slot, each at its own step."""
    state = engine_slots(placed)
    whole = jax.NamedSharding(placed.mesh, jax.P())
    flags = jax.ShapeDtypeStruct(state.prompts.tokens.shape[:1], jnp.bool_, sharding=whole)
    version = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    return _slots.run.lower(
        *(placed.model, placed.params, state, flags, flags, version),
        steps=placed.sizes.steps,
        placement=tuple(leaf.sharding for leaf in jax.tree.leaves(state)),
    ).compile()

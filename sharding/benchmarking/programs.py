"""One layout's programs for the benchmark: placed, compiled, checked and timed."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rlhf_jax as rl
import sharding
from rlhf_jax.models.explicit import rows_of
from sharding.benchmarking.placement import DisagreementError, misplaced

__all__ = ["Outcome", "Placed", "Programs", "Sizes", "compile_all", "place"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a train step and a call of the sampler work on.

    Args:
      rows: rows of a train step, and completions of a call of the sampler.
      prompt: tokens of a prompt.
      length: tokens of a completion.
      group_size: completions of each prompt.
      micro_batches: parts of a train step's rows.

    Raises:
      ValueError: numbers below 1, or rows that are no whole groups in each part.

    >>> Sizes(rows=16, prompt=32, length=64, group_size=4).prompts
    4
    """

    rows: int
    prompt: int
    length: int
    group_size: int = 1
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ValueError(f"{field.name}: expected an int ≥ 1, got {value}")
        whole = self.group_size * self.micro_batches
        if self.rows % whole:
            raise ValueError(
                f"rows: {self.rows} are no whole groups of {self.group_size} in each of "
                f"{self.micro_batches} micro-batches; use a multiple of {whole}"
            )

    @property
    def prompts(self) -> int:
        """Different prompts."""
        return self.rows // self.group_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """A model and a train state's shardings under one layout; ``name`` is the layout's flag."""

    name: str
    layout: sharding.Layout
    mesh: jax.sharding.Mesh
    model: rl.models.Decoder
    states: rl.TrainState
    optimizer: optax.GradientTransformation
    sizes: Sizes

    @property
    def everywhere(self) -> jax.NamedSharding:
        """Whole on every device."""
        return jax.NamedSharding(self.mesh, jax.P())

    @property
    def rows(self) -> jax.NamedSharding:
        """Split by rows."""
        return sharding.row_sharding(self.layout, self.mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What must be the same under every layout."""

    loss: float
    grad_norm: float
    tokens: np.ndarray


def place(
    model: rl.models.Decoder,
    layout: sharding.Layout,
    sizes: Sizes,
    *,
    devices: Sequence[Any] | None = None,
    whole_heads: bool = False,
) -> Placed:
    """Lay a model out, or say why the layout cannot take it.

    Args:
      model: a decoder without a placement.
      layout: any layout.
      sizes: what it is to work on.
      devices: all of them when None.
      whole_heads: let heads that do not divide lie whole on every device.

    Returns:
      Shapes and shardings; nothing is computed.

    Raises:
      ValueError: devices, rows, heads or another axis that do not divide.
    """
    mesh = sharding.make_mesh(layout, devices)
    if whole_heads:
        layout = sharding.fitted(layout, model.config, mesh)
    sharding.check_rows(sizes.prompts, layout, mesh, name="prompts (rows ÷ group size)")
    groups = sizes.prompts // sizes.micro_batches
    sharding.check_rows(groups, layout, mesh, name="groups of a micro-batch")
    shapes = model.shapes()
    where = sharding.tree_shardings(model.logical_axes(), shapes, layout, mesh)
    if mesh.size > 1:
        model = dataclasses.replace(
            model,
            placement=sharding.activation_sharding(layout, mesh),
            decode_placement=sharding.decode_sharding(layout, mesh),
        )
    optimizer = optax.adamw(1e-5)
    states = rl.train_step.state_shardings(shapes, optimizer, where)
    return Placed(
        name=layout.name,
        layout=layout,
        mesh=mesh,
        model=model,
        states=states,
        optimizer=optimizer,
        sizes=sizes,
    )


def _put(array: Any, at: jax.NamedSharding) -> jax.Array:
    """Host values that every process has, on a mesh of all of them."""
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, at, lambda index: array[index])


def _fetch(array: jax.Array) -> np.ndarray:
    if not array.is_fully_addressable:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(array)


def batch_for(sizes: Sizes, vocab: int, seed: int = 0) -> rl.Batch:
    """Random rows for GRPO with its KL in the loss; old log-probs near those of fresh weights.

    >>> batch_for(Sizes(rows=4, prompt=3, length=5, group_size=2), 32).tokens.shape
    (4, 8)
    """
    random = np.random.default_rng(seed)
    rows, shape = sizes.rows, (sizes.rows, sizes.prompt + sizes.length)
    prompts = random.integers(0, vocab, (sizes.prompts, sizes.prompt))
    completions = random.integers(0, vocab, (rows, sizes.length))
    tokens = np.concatenate([np.repeat(prompts, sizes.group_size, axis=0), completions], axis=1)
    mask = np.broadcast_to(np.arange(shape[1]) >= sizes.prompt, shape)
    near = -math.log(vocab) + random.normal(0, 0.1, (2, *shape)).astype(np.float32)
    values: dict[str, Any] = dict(
        tokens=tokens.astype(np.int32),
        mask=mask,
        attention_mask=np.ones(shape, bool),
        group_ids=np.repeat(np.arange(sizes.prompts, dtype=np.int32), sizes.group_size),
        advantages=random.normal(0.5, 1, rows).astype(np.float32),
        old_log_probs=near[0],
        sampler_log_probs=near[0],
        ref_log_probs=near[1],
        denominator=np.full(rows, rows * sizes.length, np.float32),
    )
    return rl.Batch(**values, start=sizes.prompt)


def grpo(output: rl.types.PolicyOutput, batch: rl.Batch) -> Any:
    """The loss of the benchmark's train step."""
    return rl.losses.grpo_loss(
        output.log_probs,
        batch.old_log_probs,
        batch.advantages,
        batch.mask,
        ref_log_probs=batch.ref_log_probs,
        kl_coef=0.04,
        denominator=batch.denominator,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """One layout's compiled programs and the arrays that they all need."""

    placed: Placed
    start: Callable[..., rl.TrainState]  # fresh weights and moments
    train: Any  # (state, batch) → (state, metrics)
    publish: Callable[[Any], Any]  # the learner's weights → the sampler's
    decode: Any  # (params, …) → Rollout
    batch: rl.Batch
    given: tuple[Any, ...]  # what the sampler takes besides its weights
    memory: dict[str, dict[str, int]]

    def sample(self, params: Any) -> rl.Rollout:
        """One call of the sampler."""
        return self.decode(params, *self.given)

    def outcome(self) -> Outcome:
        """Run everything once, from the same weights under every layout.

        Raises:
          DisagreementError: the step has left an array where the layout does not want it.
        """
        state = self.start()
        rollout = self.sample(self.publish(state.params))
        tokens = _fetch(rollout.tokens)[:, rollout.start :]
        state, metrics = self.train(state, self.batch)
        if wrong := misplaced(state, self.placed.states):
            raise DisagreementError(
                f"layout {self.placed.name!r}: after a step {wrong[0]} ({len(wrong)} arrays)"
            )
        found = rl.metrics.compute(metrics)
        loss, norm = (float(found[name]) for name in ("policy/loss", "optim/grad_norm"))
        return Outcome(loss=loss, grad_norm=norm, tokens=tokens)

    def turn(self, steps: int) -> dict[str, list[float]]:
        """Seconds of ``steps`` train steps and of one call of the sampler.

        The weights come and go: only one layout's are on the devices at a time.
        """
        state, _ = self.train(self.start(), self.batch)
        jax.block_until_ready(state)
        took: list[float] = []
        for _ in range(steps):
            begin = time.perf_counter()
            state, metrics = self.train(state, self.batch)
            jax.block_until_ready((state, metrics))
            took.append(time.perf_counter() - begin)
        params = jax.block_until_ready(self.publish(state.params))
        del state
        begin = time.perf_counter()
        jax.block_until_ready(self.sample(params))
        return {"train": took, "decode": [time.perf_counter() - begin]}


def compile_all(placed: Placed, *, seed: int = 0) -> Programs:
    """Compile a layout's programs; runs none of them.

    Args:
      placed: from :func:`place`.
      seed: of weights, rows and keys.

    Returns:
      The :class:`Programs`.
    """
    model, sizes, states = placed.model, placed.sizes, placed.states
    narrow = None if model.dtype == jnp.float32 else model.dtype

    def fresh() -> rl.TrainState:
        return rl.init_train_state(model.init(jax.random.key(seed)), placed.optimizer)

    start = jax.jit(fresh, out_shardings=states)
    state = jax.tree.map(_shape, jax.eval_shape(fresh), states)
    host = batch_for(sizes, model.config.vocab_size, seed)
    batch = jax.tree.map(lambda x: _put(x, placed.rows), host)
    step: Any = rl.make_train_step(
        rl.policy.from_decoder(model, with_entropy=False, group_size=sizes.group_size),
        grpo,
        placed.optimizer,
        micro_batches=sizes.micro_batches,
        group_size=sizes.group_size,
        compute_dtype=narrow,
        shardings=states,
    )
    train = step.lower(state, batch).compile()

    def cast(params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(model.dtype), params)

    publish: Any = (lambda params: params) if narrow is None else jax.jit(cast)
    params = jax.tree.map(_shape, jax.eval_shape(cast, state.params), states.params)
    given, static = _sampler_arguments(placed, host, seed)
    sampler: Any = importlib.import_module("rlhf_jax.sampling.generate")
    decode = sampler._generate.lower(model, params, *given, **static).compile()
    platform = placed.mesh.devices.flat[0].platform
    memory = {"train": _memory(train, platform), "decode": _memory(decode, platform)}
    return Programs(
        placed=placed,
        start=start,
        train=train,
        publish=publish,
        decode=decode,
        batch=batch,
        given=given,
        memory=memory,
    )


def _shape(leaf: Any, at: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)


def _sampler_arguments(
    placed: Placed, batch: rl.Batch, seed: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What ``rl.generate`` hands to its program besides model and weights, on the mesh."""
    sizes, everywhere = placed.sizes, placed.everywhere
    tokens = np.asarray(batch.tokens)[:: sizes.group_size, : sizes.prompt]
    prompts = rl.sampling.Prompts(*(_put(x, placed.rows) for x in (tokens, tokens >= 0)))
    options = rl.sampling.SamplingOptions.make(max_new_tokens=sizes.length)
    key = jax.jit(functools.partial(jax.random.key, seed), out_shardings=everywhere)()
    given = (
        prompts,
        key,
        jax.tree.map(lambda x: _put(x, everywhere), options),
        _put(np.arange(sizes.prompts, dtype=np.int32), placed.rows),
        _put(np.int32(0), everywhere),
    )
    static = dict(
        group_size=sizes.group_size, room=sizes.length, row_sharding=rows_of(prompts.tokens)
    )
    return given, static


def _memory(compiled: Any, platform: str) -> dict[str, int]:
    """Bytes on one device, by the compiler's plan; empty where the backend has none."""
    plan = compiled.memory_analysis()
    if plan is None:
        return {}
    held = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    everything = held + plan.temp_size_in_bytes
    # A CPU's plan counts no temporaries in its peak.
    peak = 0 if platform == "cpu" else getattr(plan, "peak_memory_in_bytes", 0)
    return {
        "arguments": plan.argument_size_in_bytes,
        "updated in place": plan.alias_size_in_bytes,
        "temporaries": plan.temp_size_in_bytes,
        "peak": peak or everything,
    }

"""The engine's arrays and its four jitted functions: prefill, insert, resume and a round.

A slot is one row of a :class:`Rows` with G = 1 and per-row steps. Everything is donated and comes
back where it was, so a round costs no copy of the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.models.cache import cache_axes
from rlhf_jax.models.explicit import auto_inside, placed
from rlhf_jax.sampling.options import SamplingOptions
from rlhf_jax.sampling.rows import Prompts, Rows, draw_next
from rlhf_jax.types import Params

__all__ = [
    "Entering",
    "Prefilled",
    "Report",
    "Resuming",
    "Slots",
    "insert",
    "prefill",
    "read",
    "resume",
    "run",
]

# A slot without a running row samples with these, so that it switches no filter on for the others.
QUIET = dict(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    min_new_tokens=0,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """R slots.

    Args:
      rows: :class:`Rows` ``[R, 1]`` with all optional parts; its cache has one prefix per slot.
      first: ``[R, 1, D]``, the hidden state behind a row's first token.
      keys: ``[R, 1]``.
      options: :class:`SamplingOptions` ``[R, 1]``.
      prompts: :class:`Prompts` ``[R, Tp]``, padded on the right.
    """

    rows: Rows
    first: jax.Array
    keys: jax.Array
    options: SamplingOptions
    prompts: Prompts


class Prefilled(NamedTuple):
    """Prompts that wait for their rows to enter: hidden ``[P, D]``, prefix, prompts ``[P, Tb]``."""

    hidden: jax.Array
    prefix: Any
    prompts: Prompts


class Entering(NamedTuple):
    """Rows that enter slots, filled up to R entries; those from ``count`` on name slot R.

    Args:
      count: int32 scalar.
      slot, source: int32 ``[R]``: where to, and which prompt of the :class:`Prefilled`.
      keys: uint32 ``[R, …]``, the data of the rows' keys.
      options: :class:`SamplingOptions` ``[R]``.
    """

    count: Any
    slot: Any
    source: Any
    keys: Any
    options: SamplingOptions


class Resuming(NamedTuple):
    """Rows that go on after their end, filled up to R entries as in :class:`Entering`.

    Args:
      slot: int32 ``[R]``.
      length: int32 ``[R]``, tokens of the row that stay.
      token: int32 ``[R]``, the last of them.
      forced: int32 ``[R, S]``, -1 where tokens are sampled.
      max_new_tokens: int32 ``[R]``, the new cap of the whole completion.
    """

    slot: Any
    length: Any
    token: Any
    forced: Any
    max_new_tokens: Any


class Report(NamedTuple):
    """What the host learns from a round.

    Args:
      done, terminated: bool ``[R]``.
      lengths: int32 ``[R]``.
      recent: int32 ``[R, steps]``, the tokens of this round, from each row's old length on.
      steps: int32 scalar, decode steps of the round.
    """

    done: Any
    terminated: Any
    lengths: Any
    recent: Any
    steps: Any


@functools.partial(jax.jit, static_argnames="model")
def prefill(model: Any, params: Params, prompts: Prompts) -> Prefilled:
    """Run prompts ``[P, Tb]`` once, whatever the number of their rows."""
    hidden, prefix = model.prefill(params, *prompts)
    return Prefilled(hidden, prefix, prompts)


@functools.partial(jax.jit, static_argnames="placement", donate_argnames="slots")
def insert(
    slots: Slots, prefilled: Prefilled, entering: Entering, *, placement: Any = None
) -> Slots:
    """Put rows into slots: the prompt's keys and values are copied, the rest is small."""

    def change(slots: Slots, prefilled: Prefilled, entering: Entering) -> Slots:
        rows, cache, kind = slots.rows, slots.rows.cache, jax.random.key_impl(slots.keys)

        def put(leaf: jax.Array, value: Any) -> jax.Array:
            return leaf.at[entering.slot].set(value, mode="drop")

        wider = slots.prompts.tokens.shape[1] - prefilled.prompts.tokens.shape[1]
        prompts = [jnp.pad(x, ((0, 0), (0, wider))) for x in prefilled.prompts]
        prefix = dataclasses.replace(prefilled.prefix, mask=prompts[1])
        cache = dataclasses.replace(cache, prefix=_copy_prefix(cache, prefix, entering))
        rows = dataclasses.replace(
            rows,
            step=put(rows.step, 0),
            lengths=put(rows.lengths, 0),
            terminated=put(rows.terminated, False),
            done=put(rows.done, False),
            forced=put(rows.forced, -1),
            cache=cache,
        )
        return Slots(
            rows=rows,
            first=put(slots.first, prefilled.hidden[entering.source][:, None]),
            keys=put(slots.keys, jax.random.wrap_key_data(entering.keys, impl=kind)[:, None]),
            options=jax.tree.map(
                lambda leaf, value: put(leaf, value[:, None]), slots.options, entering.options
            ),
            prompts=Prompts(
                *(put(x, y[entering.source]) for x, y in zip(slots.prompts, prompts, strict=True))
            ),
        )

    return _in_place(change, placement, slots, prefilled, entering)


def _copy_prefix(cache: Any, source: Any, entering: Entering) -> Any:
    """Copy the prefixes of the rows that enter; a loop, so that only their slots are written."""
    axes = cache_axes(cache).prefix

    def one(i: jax.Array, prefix: Any) -> Any:
        def put(leaf: jax.Array, prompts: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
            axis = names.index("prompt")
            row = jax.lax.dynamic_slice_in_dim(prompts, entering.source[i], 1, axis)
            at: list[Any] = [0] * leaf.ndim
            at[axis] = entering.slot[i]
            return jax.lax.dynamic_update_slice(leaf, row, at)

        return jax.tree.map(put, prefix, source, axes)

    return jax.lax.fori_loop(0, entering.count, one, cache.prefix)


@functools.partial(jax.jit, static_argnames="placement", donate_argnames="slots")
def resume(slots: Slots, resuming: Resuming, *, placement: Any = None) -> Slots:
    """Let rows go on from what they have, beginning with forced tokens."""

    def change(slots: Slots, resuming: Resuming) -> Slots:
        def put(leaf: jax.Array, value: Any) -> jax.Array:
            return leaf.at[resuming.slot].set(value, mode="drop")

        rows, length = slots.rows, resuming.length[:, None]
        cap = put(slots.options.max_new_tokens, resuming.max_new_tokens[:, None])
        return dataclasses.replace(
            slots,
            options=dataclasses.replace(slots.options, max_new_tokens=cap),
            rows=dataclasses.replace(
                rows,
                step=put(rows.step, length),
                lengths=put(rows.lengths, length),
                token=put(rows.token, resuming.token[:, None]),
                forced=put(rows.forced, resuming.forced[:, None]),
                terminated=put(rows.terminated, False),
                done=put(rows.done, False),
            ),
        )

    return _in_place(change, placement, slots, resuming)


@functools.partial(
    jax.jit, static_argnames=("model", "steps", "placement"), donate_argnames="slots"
)
def run(
    model: Any,
    params: Params,
    slots: Slots,
    running: jax.Array,
    occupied: jax.Array,
    version: jax.Array,
    *,
    steps: int,
    placement: Any = None,
) -> tuple[Slots, Report]:
    """Up to ``steps`` tokens for every running row; ends when the last of them has ended.

    Args:
      model, params: as for ``generate``.
      slots: :class:`Slots`.
      running: bool ``[R]``, rows that the host still wants tokens of.
      occupied: bool ``[R]``, slots whose cache must be kept.
      version: int32 scalar.
      steps: static.
      placement: where the slots' arrays lie under Auto axes, or None.
    """

    def change(slots: Slots, params: Params, running: Any, occupied: Any, version: Any):
        running, occupied = running[:, None], occupied[:, None]
        rows = dataclasses.replace(
            slots.rows,
            done=slots.rows.done | ~running,
            step=jnp.where(occupied, slots.rows.step, 0),  # attention reads no further than needed
        )
        quiet = {k: jnp.where(running, getattr(slots.options, k), v) for k, v in QUIET.items()}
        options = dataclasses.replace(slots.options, **quiet)

        def advance(carry: tuple[jax.Array, Rows]) -> tuple[jax.Array, Rows]:
            count, rows = carry
            at = jnp.maximum(rows.step - 1, 0)
            hidden, cache = model.decode(params, rows.token, rows.cache, at)
            # A row that has just entered has no token to decode: its prompt says the first one.
            hidden = jnp.where((rows.step == 0)[..., None], slots.first, hidden)
            rows = dataclasses.replace(rows, cache=cache)
            logits = model.project(params, hidden)
            rows = draw_next(rows, logits, slots.keys, options, slots.prompts, version)
            return count + 1, rows

        def unfinished(carry: tuple[jax.Array, Rows]) -> jax.Array:
            return (carry[0] < steps) & ~jnp.all(carry[1].done)

        begin = rows.lengths
        count, rows = jax.lax.while_loop(unfinished, advance, (jnp.int32(0), rows))
        index = jnp.minimum(begin + jnp.arange(steps), rows.tokens.shape[-1] - 1)
        report = Report(
            done=rows.done[:, 0],
            terminated=rows.terminated[:, 0],
            lengths=rows.lengths[:, 0],
            recent=jnp.take_along_axis(rows.tokens[:, 0], index, axis=1),
            steps=count,
        )
        return dataclasses.replace(slots, rows=rows), report

    return _in_place(change, placement, slots, params, running, occupied, version, more=True)


@jax.jit
def read(buffers: dict[str, jax.Array], slot: jax.Array) -> dict[str, jax.Array]:
    """One slot's part of arrays ``[R, 1, …]``."""

    def pick(buffers: dict[str, jax.Array], slot: jax.Array) -> dict[str, jax.Array]:
        at = jax.lax.dynamic_index_in_dim
        return {name: at(buffer[:, 0], slot, 0, False) for name, buffer in buffers.items()}

    like = next(iter(buffers.values()))
    return auto_inside(pick, lambda: _whole(like), like, buffers, slot)


def _in_place(
    change: Callable[..., Any], placement: Any, slots: Slots, *args: Any, more: bool = False
) -> Any:
    """``change(slots, *args)`` with the slots' arrays left where they are, on any kind of mesh."""

    def settled(slots: Slots, *args: Any) -> Any:
        out = change(slots, *args)
        if placement is None:
            return out
        new, rest = out if more else (out, None)
        leaves, tree = jax.tree.flatten(new)
        new = tree.unflatten(map(jax.lax.with_sharding_constraint, leaves, placement))
        return (new, rest) if more else new

    def out() -> Any:
        return (placed(slots), _whole(slots.rows.tokens)) if more else placed(slots)

    return auto_inside(settled, out, slots.rows.tokens, slots, *args)


def _whole(like: jax.Array) -> Any:
    """On every device of the mesh of ``like``."""
    return jax.NamedSharding(jax.typeof(like).sharding.mesh, jax.P())

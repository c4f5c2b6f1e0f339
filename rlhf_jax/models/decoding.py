"""One decode step through the layers: attention reads only the part of the cache in use.

Slots are read in a few static sizes (64, 128, 256, … up to the room), one of which is chosen by a
traced length: so the cost follows the length in use and the program is compiled once. (On TPU all
of the room is read.) The prefix and the suffix each give a partial softmax; the two are merged. The
new token is put into the slots that were read and not read back from the cache, so a scan over
layers only reads it, and all of them are written at once after it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.models.attention import Partial, block_of, fill, merge, partial_softmax, split_groups
from rlhf_jax.models.cache import SLOTS, Cache, Quantized, append, room, unscaled
from rlhf_jax.models.stacks import depth

Array = jax.Array

_FIRST_BUCKET = 64


class Span(NamedTuple):
    """Slots to read: `sizes[choice]` of them from `start`."""

    sizes: tuple[int, ...]
    choice: Array
    start: Array


def buckets(room: int) -> tuple[int, ...]:
    """The sizes in which up to `room` slots are read: powers of two from 64, and the room.

    >>> buckets(95), buckets(128), buckets(600)
    ((95,), (64, 128), (64, 128, 256, 600))
    """
    sizes, size = [], _FIRST_BUCKET
    while 3 * size <= 2 * room:  # a last step of less than half as much again is not worth one
        sizes.append(size)
        size *= 2
    return (*sizes, room)


def span(room: int, first: Array | int, end: Array) -> Span:
    """Read at least the slots from `first` to before `end`."""
    sizes = buckets(room)
    choice = jnp.sum((end - first) > jnp.array(sizes[:-1], jnp.int32), dtype=jnp.int32)
    start = jnp.minimum(first, room - jnp.array(sizes, jnp.int32)[choice])
    return Span(sizes, choice, start)


def prefix_span(mask: Array) -> Span:
    """From the first to the last column in which any row has a real token."""
    used = jnp.any(mask, axis=0)
    end = used.size - jnp.argmax(used[::-1])
    return span(used.size, jnp.argmax(used), jnp.where(jnp.any(used), end, 0))


class Part(NamedTuple):
    """Keys or values to attend to ``[…, S, H]``, and the scales of int8 ones."""

    held: Array
    scales: Array | None

    @classmethod
    def cut(
        cls,
        held: Any,
        layer: Array | int,
        prompts: tuple[Array | int, int],
        slots: tuple[Array | int, int],
        dtype: Any,
    ) -> Part:
        """Prompts and slots (first, count) of one layer, for products with arrays of this dtype."""

        def one(leaf: Array) -> Array:
            at: list[Any] = [layer, prompts[0], *[0] * (leaf.ndim - 2)]
            shape = [1, prompts[1], *leaf.shape[2:]]
            at[SLOTS], shape[SLOTS] = slots
            return jax.lax.dynamic_slice(leaf, at, shape)[0]

        held = jax.tree.map(one, held)
        scales = held.scales if isinstance(held, Quantized) else None
        return cls(unscaled(held, dtype), scales)

    def put(self, new: Array, here: Array) -> Part:
        """With the unrounded token `new` ``[…, H]`` in the slots that are `here` ``[…, S, 1]``."""
        held = jnp.where(here, new[..., None, :].astype(self.held.dtype), self.held)
        return Part(held, None if self.scales is None else jnp.where(here, 1.0, self.scales))


def _attend(q: Array, keys: Part, values: Part, valid: Array) -> Partial:
    """Partial softmax of ``[…, Q, T, H]`` over one part, filled as the learner's."""
    block = block_of(q)
    keys, values = jax.tree.map(lambda x: fill(x, SLOTS, block), (keys, values))
    # Else the CPU compiler transposes the keys as it cuts them out, which takes four times as long.
    held = jax.lax.optimization_barrier(keys.held)
    scales = keys.scales, values.scales
    return partial_softmax(q, held, values.held, fill(valid, -1, block), *scales)


def _read(at: Span, function: Callable[..., Partial]) -> Partial:
    """`function(start, size)` for the size that is chosen."""
    if len(at.sizes) == 1:
        return function(at.start, at.sizes[0])

    def chosen(choice: Array, start: Array) -> Partial:
        branches = [functools.partial(function, size=size) for size in at.sizes]
        return jax.lax.switch(choice, branches, start)

    def whole(choice: Array, start: Array) -> Partial:
        return function(jnp.zeros_like(start), at.sizes[-1])

    # The TPU compiler gives the branches' operand, the cache, a layout of their own: it would copy
    # the whole cache in every layer of every step, which costs far more than reading all of it.
    return jax.lax.platform_dependent(at.choice, at.start, tpu=whole, default=chosen)


class Held(NamedTuple):
    """Keys and values of one stack: the prefix's and the suffix's."""

    past: tuple[Any, Any]
    own: tuple[Any, Any]


class Reader:
    """Attention of one new token per row over what the cache holds of the tokens before it."""

    def __init__(self, cache: Cache, step: Array):
        self.prefix, self.step, self.room, self.block = cache.prefix, step, room(cache), cache.block
        self.past = prefix_span(cache.prefix.mask)
        # 1 + a token's position
        self.places = jnp.cumsum(cache.prefix.mask, axis=1, dtype=jnp.int32)

    def __call__(
        self, held: Held, layer: Array | int, window: Any, q: Array, k: Array, v: Array
    ) -> Array:
        """softmax(q·[prefix, suffix, k]ᵀ/√H)·[prefix, suffix, v].

        Args:
          held: :class:`Held`.
          layer: which layer of it.
          window: how many tokens back a query sees, itself included; None means all.
          q: ``[P, G, N, H]``.
          k, v: ``[P, G, K, H]``, the new token's.

        Returns:
          ``[P, G, N, H]`` in the dtype of q.
        """
        grouped = split_groups(q, k.shape[2])
        past = _read(self.past, functools.partial(self._prefix, held.past, layer, window, grouped))
        own = self._own(held.own, layer, window, (grouped, k, v))
        return merge([past, own]).astype(q.dtype).reshape(q.shape)

    def _prefix(
        self, held: Any, layer: Any, window: Any, q: Array, start: Array, size: int
    ) -> Partial:
        prefix = self.prefix
        columns = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=1
        )
        valid = columns(prefix.mask)[:, None]
        if window is not None:
            oldest = prefix.lengths[:, None] + self.step - window  # [P, 1] or [P, G]
            valid = valid & (columns(self.places)[:, None] > oldest[..., None] + 1)
        everyone, slots = (0, prefix.mask.shape[0]), (start, size)
        keys, values = (Part.cut(x, layer, everyone, slots, q.dtype) for x in held)
        # A prompt's G rows are as many queries of it: its keys are read once.
        found = _attend(q.transpose(0, 2, 3, 1, 4), keys, values, valid[:, None, None])
        return jax.tree.map(lambda x: x.transpose(0, 3, 1, 2, 4), found)

    def _own(self, held: Any, layer: Any, window: Any, new: tuple[Array, ...]) -> Partial:
        """Over the suffix and the new token (its q, k, v), all prompts together or in blocks."""
        count = new[0].shape[0]

        def some(prompts: tuple[Any, int], step: Array, new: tuple[Array, ...]) -> Partial:
            read = functools.partial(self._suffix, held, layer, window, prompts, step, new)
            return _read(span(self.room, 0, jnp.max(step) + 1), read)

        def together() -> Partial:
            return some((0, count), self.step, new)

        if not self.block or self.step.ndim == 0 or count % self.block:
            return together()

        def in_blocks() -> Partial:
            def one(first: Array) -> Partial:
                cut = functools.partial(
                    jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=self.block
                )
                step, part = jax.tree.map(cut, (self.step, new))
                return some((first, self.block), step, part)

            found = jax.lax.map(one, jnp.arange(0, count, self.block))
            return jax.tree.map(lambda x: x.reshape(count, *x.shape[2:]), found)

        # An accelerator would rather read more than do one block after the other.
        return jax.lax.platform_dependent(cpu=in_blocks, default=together)

    def _suffix(
        self,
        held: Any,
        layer: Any,
        window: Any,
        prompts: tuple[Any, int],
        step: Array,
        new: tuple[Array, ...],
        start: Array,
        size: int,
    ) -> Partial:
        # The new token is not in the cache yet, or only rounded to its dtype.
        index, at = jnp.arange(size), jnp.expand_dims(step, -1)
        valid = index <= at
        if window is not None:
            valid = valid & (index > at - window)
        if step.ndim:  # [P, G, S] → [P, G, K, S]
            index, at, valid = index[None, None], at[:, :, None], valid[:, :, None]
        here = (index == at)[..., None]
        q, *tokens = new
        keys, values = (
            Part.cut(x, layer, prompts, (start, size), q.dtype).put(token, here)
            for x, token in zip(held, tokens, strict=True)
        )
        found = _attend(q[..., None, :], keys, values, valid[..., None, None, :])
        return jax.tree.map(lambda x: x[..., 0, :], found)


def check_decode_placement(placement: Any) -> None:
    """Refuse what is no sharding of ``[prompts, group, width]``."""
    if placement is None:
        return
    if not isinstance(placement, jax.NamedSharding) or not 1 <= len(placement.spec) <= 3:
        raise ValueError(
            f"decode_placement: got {placement!r}; give a NamedSharding of [prompts, group, "
            'width], e.g. NamedSharding(mesh, P(None, None, "fsdp"))'
        )


def few_rows(placement: Any, x: Array) -> Array:
    """Hidden states ``[P, G, D]`` of one token per row laid by a ``decode_placement``.

    Rows or weights have to move where one mesh axis splits both. In a layer rows are about 20·P·G·D
    numbers (sent and summed), the weights about 12·D²; with more rows it is left to the compiler.
    """
    prompts, group, width = x.shape
    if placement is None or 2 * prompts * group > width:
        return x
    kinds = (jax.sharding.AxisType.Auto,) * len(placement.mesh.axis_names)
    mesh = placement.mesh.update(axis_types=kinds)
    rows, *others = placement.spec
    names = rows if isinstance(rows, tuple) else (rows,) if rows else ()
    if prompts % math.prod(mesh.shape[name] for name in names):
        rows = None
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(rows, *others)))


def decode_layers(
    layer: Callable[..., tuple[Array, Any]],
    stacks: tuple[Any, ...],
    windows: list[Any],
    x: Array,
    cache: Cache,
    step: Array,
) -> tuple[Array, Cache]:
    """Run every layer on one token per row; scans stacks of several layers, unrolls single ones.

    Args:
      layer: ``(layer parameters, x, attend) -> (x, what attend kept)``.
      stacks: parameters of each stack.
      windows: each stack's windows int32 ``[n]``, or None.
      x: ``[P, G, D]``.
      cache: :class:`Cache`.
      step: int32 scalar or ``[P, G]``.
    """
    reader = Reader(cache, step)

    def write(held: Held, k: Array, v: Array) -> Held:
        keys, values = held.own
        own = append(keys, k, step), append(values, v, step)
        return held._replace(own=own)

    def scanned(held: Held, x: Array, stack: Any, window: Any) -> tuple[Array, Held]:
        def body(x: Array, xs: Any) -> tuple[Array, Any]:
            index, layer_params, window = xs

            def attend(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
                return reader(held, index, window, q, k, v), (k, v)

            return layer(layer_params, x, attend)

        x, (k, v) = jax.lax.scan(body, x, (jnp.arange(depth(stack)), stack, window))
        return x, write(held, k, v)

    def single(held: Held, x: Array, stack: Any, window: Any) -> tuple[Array, Held]:
        layer_params, window = jax.tree.map(lambda leaf: leaf[0], (stack, window))

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, Held]:
            # Written first: else nothing orders the write after the read outside a scan, and the
            # compiler copies the cache to keep both.
            written = write(held, k[None], v[None])
            return reader(written, 0, window, q, k, v), written

        return layer(layer_params, x, attend)

    prefix, owns = cache.prefix, []
    for i, (stack, window) in enumerate(zip(stacks, windows, strict=True)):
        past, own = (prefix.keys[i], prefix.values[i]), (cache.keys[i], cache.values[i])
        run = scanned if depth(stack) > 1 else single
        x, held = run(Held(past, own), x, stack, window)
        owns.append(held.own)
    keys, values = zip(*owns, strict=True)
    return x, dataclasses.replace(cache, keys=keys, values=values)

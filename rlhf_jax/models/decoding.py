"""One decode step through the layers: attention reads only the part of the cache in use.

Slots are read in a few static sizes (64, 128, 256, … up to the room), one of which is chosen by a
traced length: so the cost follows the length in use and the program is compiled once. (On TPU all
of the room is read.) The prefix, the suffix and the new token each give a partial softmax; the
partials are merged. The new token is not read back from the cache, so a scan over layers only reads
it, and all of them are written at once after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.models.cache import (
    KEY_SLOTS,
    VALUE_SLOTS,
    Cache,
    Prefix,
    Quantized,
    append,
    slots,
)
from rlhf_jax.models.layers import NEGATIVE, split_groups
from rlhf_jax.models.stacks import depth

Array = jax.Array

_FIRST_BUCKET = 64


class Span(NamedTuple):
    """Slots to read: `sizes[choice]` of them from `start`."""

    sizes: tuple[int, ...]
    choice: Array
    start: Array


class Partial(NamedTuple):
    """Softmax over some of the keys: Σ wᵢ·vᵢ, max score and Σ wᵢ with wᵢ = exp(scoreᵢ − max)."""

    out: Array
    top: Array
    total: Array


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


def _cut(held: Any, layer: Array | int, start: Array | int, size: int, axis: int) -> Any:
    """`size` slots of one layer."""

    def one(leaf: Array) -> Array:
        at, shape = [layer, *[0] * (leaf.ndim - 1)], [1, *leaf.shape[1:]]
        at[axis], shape[axis] = start, size
        return jax.lax.dynamic_slice(leaf, at, shape)[0]

    return jax.tree.map(one, held)


def _matmul(x: Array, held: Any) -> Array:
    """x · held over batch axes in front, in float32; without the scales of int8."""
    values = held.values if isinstance(held, Quantized) else held
    dtype = x.dtype
    if not isinstance(held, Quantized):
        dtype = jnp.promote_types(x.dtype, values.dtype)
    wide: Any = dict(preferred_element_type=jnp.float32)
    return jnp.matmul(x.astype(dtype), values.astype(dtype), **wide)


def _partial(q: Array, keys: Any, values: Any, valid: Array) -> Partial:
    """Partial softmax of queries ``[…, R, H]`` over keys ``[…, H, S]``, values ``[…, S, H]``."""
    scores = _matmul(q, keys)
    if isinstance(keys, Quantized):
        scores = scores * keys.scales
    scores = jnp.where(valid, scores * q.shape[-1] ** -0.5, NEGATIVE)
    top = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if isinstance(values, Quantized):
        weights = weights * values.scales.swapaxes(-1, -2)
    return Partial(_matmul(weights.astype(q.dtype), values), top, total)


def _merge(parts: list[Partial]) -> Array:
    """The softmax over all the keys; a part without a valid key vanishes against one that has."""
    first, *rest = parts
    top = functools.reduce(jnp.maximum, [part.top for part in rest], first.top)
    factor = jnp.exp(first.top - top)
    out, total = first.out * factor, first.total * factor
    for part in rest:
        factor = jnp.exp(part.top - top)
        out, total = out + part.out * factor, total + part.total * factor
    return out / total


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

    def __init__(self, prefix: Prefix, room: int, step: Array):
        self.prefix, self.step = prefix, step
        self.past, self.own = prefix_span(prefix.mask), span(room, 0, jnp.max(step))
        self.places = jnp.cumsum(prefix.mask, axis=1, dtype=jnp.int32)  # 1 + a token's position

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
        score = jnp.sum(
            grouped.astype(jnp.float32) * k[:, :, :, None].astype(jnp.float32), -1, keepdims=True
        )
        new = Partial(
            v[:, :, :, None].astype(jnp.float32),
            score * q.shape[-1] ** -0.5,
            jnp.ones_like(score),
        )
        past = _read(self.past, functools.partial(self._prefix, held.past, layer, window, grouped))
        own = _read(self.own, functools.partial(self._suffix, held.own, layer, window, grouped))
        return _merge([past, own, new]).astype(q.dtype).reshape(q.shape)

    def _prefix(
        self, held: Any, layer: Any, window: Any, q: Array, start: Array, size: int
    ) -> Partial:
        prefix = self.prefix
        prompts, groups, heads, each, width = q.shape
        # Q before G: with query heads sharded, Q is, and it stays the major part of Q·G.
        rows = q.transpose(0, 2, 3, 1, 4).reshape(prompts, heads, each * groups, width)
        columns = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=1
        )
        valid = columns(prefix.mask)[:, None, None]
        if window is not None:
            oldest = prefix.lengths[:, None] + self.step - window  # [P, 1] or [P, G]
            near = columns(self.places)[:, None] > oldest[..., None] + 1
            near = jnp.broadcast_to(near[:, None, None], (prompts, 1, each, groups, size))
            valid = valid & near.reshape(prompts, 1, each * groups, size)
        found = _partial(
            rows,
            _cut(held[0], layer, start, size, KEY_SLOTS),
            _cut(held[1], layer, start, size, VALUE_SLOTS),
            valid,
        )

        def back(x: Array) -> Array:
            return x.reshape(prompts, heads, each, groups, -1).transpose(0, 3, 1, 2, 4)

        return jax.tree.map(back, found)

    def _suffix(
        self, held: Any, layer: Any, window: Any, q: Array, start: Array, size: int
    ) -> Partial:
        index, step = jnp.arange(size), jnp.expand_dims(self.step, -1)
        valid = index < step
        if window is not None:
            valid = valid & (index > step - window)
        return _partial(
            q,
            _cut(held[0], layer, start, size, KEY_SLOTS),
            _cut(held[1], layer, start, size, VALUE_SLOTS),
            valid if self.step.ndim == 0 else valid[:, :, None, None],
        )


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
    reader = Reader(cache.prefix, slots(cache.keys[0], KEY_SLOTS), step)

    def write(held: Held, k: Array, v: Array) -> Held:
        keys, values = held.own
        own = append(keys, k, step, KEY_SLOTS), append(values, v, step, VALUE_SLOTS)
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
    return x, Cache(prefix=prefix, keys=keys, values=values)

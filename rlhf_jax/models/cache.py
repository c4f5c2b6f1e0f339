"""The key/value cache: one prefix per prompt, shared by its group, and a suffix per row.

Layouts are the reader's: keys ``[…, K, H, S]`` (the score einsum contracts H) and values
``[…, K, S, H]``. For a stack of n layers the prefix is ``[n, P, …]``, the suffix ``[n, P, G, …]``.
Scanning the stacks inside a decode loop copies each layer's weights once a step; measured on CPU
that is no slower than one unrolled loop over separate layers, and compiles several times faster.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models.layers import NEGATIVE, split_groups

Array = jax.Array

__all__ = ["Cache", "Prefix", "cache_axes", "extend_cache"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """Keys and values of P prompts.

    Args:
      keys: per stack ``[n, P, K, H, Tp]``.
      values: per stack ``[n, P, K, Tp, H]``.
      mask: bool ``[P, Tp]``: real prompt tokens.
      lengths: int32 ``[P]``: how many.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    mask: Array
    lengths: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """A shared prefix and each row's own decoded tokens.

    Args:
      prefix: :class:`Prefix`; decode only reads it.
      keys: per stack ``[n, P, G, K, H, S]``.
      values: per stack ``[n, P, G, K, S, H]``.
    """

    prefix: Prefix
    keys: tuple[Array, ...]
    values: tuple[Array, ...]


def depth(stack: Any) -> int:
    """Layers in a stack."""
    return jax.tree.leaves(stack)[0].shape[0]


def restack(stacks: tuple[Any, ...], sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Regroup stacked trees along their leading axis."""
    if tuple(depth(stack) for stack in stacks) == sizes:
        return tuple(stacks)
    bounds = np.cumsum((0, *sizes)).tolist()
    starts = np.cumsum((0, *(depth(stack) for stack in stacks))).tolist()

    def piece(a: int, b: int, *leaves: Any) -> Any:
        cut = [
            leaf[max(a - start, 0) : b - start]
            for leaf, start, end in zip(leaves, starts[:-1], starts[1:], strict=True)
            if start < b and end > a
        ]
        joined = np if all(isinstance(part, np.ndarray) for part in cut) else jnp
        return cut[0] if len(cut) == 1 else joined.concatenate(cut, axis=0)

    return tuple(
        jax.tree.map(lambda *leaves, a=a, b=b: piece(a, b, *leaves), *stacks)
        for a, b in itertools.pairwise(bounds)
    )


def init_cache(prefix: Prefix, group_size: int, max_new_tokens: int) -> Cache:
    """Zeros for the suffix, in the prefix's dtype and grouping."""

    def zeros(leaf: Array, tail: tuple[int, int]) -> Array:
        layers, prompts, heads = leaf.shape[:3]
        return jnp.zeros((layers, prompts, group_size, heads, *tail), leaf.dtype)

    return Cache(
        prefix=prefix,
        keys=tuple(zeros(leaf, (leaf.shape[3], max_new_tokens)) for leaf in prefix.keys),
        values=tuple(zeros(leaf, (max_new_tokens, leaf.shape[4])) for leaf in prefix.values),
    )


def extend_cache(cache: Cache, max_new_tokens: int) -> Cache:
    """The same cache with room for more decoded tokens: the next bucket of a decode loop.

    Args:
      cache: any :class:`Cache`.
      max_new_tokens: the new S, at least the old one.

    Returns:
      A :class:`Cache` whose first slots are the old ones.

    Raises:
      ValueError: when the new room is smaller than the old.

    >>> import jax.numpy as jnp
    >>> prefix = Prefix(
    ...     keys=(jnp.ones((1, 2, 1, 4, 3)),),
    ...     values=(jnp.ones((1, 2, 1, 3, 4)),),
    ...     mask=jnp.ones((2, 3), bool),
    ...     lengths=jnp.full((2,), 3),
    ... )
    >>> extend_cache(init_cache(prefix, 2, 8), 16).keys[0].shape
    (1, 2, 2, 1, 4, 16)
    """
    more = max_new_tokens - cache.keys[0].shape[-1]
    if more < 0:
        raise ValueError(
            f"max_new_tokens: got {max_new_tokens}; the cache already has {cache.keys[0].shape[-1]}"
        )
    keep = [(0, 0)] * 4
    return Cache(
        prefix=cache.prefix,
        keys=tuple(jnp.pad(leaf, [*keep, (0, 0), (0, more)]) for leaf in cache.keys),
        values=tuple(jnp.pad(leaf, [*keep, (0, more), (0, 0)]) for leaf in cache.values),
    )


def cache_axes(cache: Cache) -> Cache:
    """The cache's tree with a tuple of logical axis names for every leaf.

    Args:
      cache: any :class:`Cache` (arrays or shapes).

    Returns:
      Names are ``"layers", "prompt", "group", "kv_heads"`` and None.

    >>> import jax.numpy as jnp
    >>> prefix = Prefix(
    ...     keys=(jnp.ones((1, 2, 1, 4, 3)),),
    ...     values=(jnp.ones((1, 2, 1, 3, 4)),),
    ...     mask=jnp.ones((2, 3), bool),
    ...     lengths=jnp.full((2,), 3),
    ... )
    >>> cache_axes(init_cache(prefix, 2, 8)).prefix.mask
    ('prompt', None)
    """
    shared = ("layers", "prompt", "kv_heads", None, None)
    own = ("layers", "prompt", "group", "kv_heads", None, None)
    count = len(cache.keys)
    axes: Any = Prefix(
        keys=(shared,) * count,  # pyright: ignore[reportArgumentType]
        values=(shared,) * count,  # pyright: ignore[reportArgumentType]
        mask=("prompt", None),  # pyright: ignore[reportArgumentType]
        lengths=("prompt",),  # pyright: ignore[reportArgumentType]
    )
    names: Any = (own,) * count
    return Cache(prefix=axes, keys=names, values=names)


def check_decode(stacks: tuple[Any, ...], token: Array, cache: Cache) -> None:
    """The parameters, the token and the cache must belong together."""
    ours = tuple(depth(stack) for stack in stacks)
    theirs = tuple(leaf.shape[0] for leaf in cache.keys)
    if ours != theirs:
        raise ValueError(
            f"cache: its layers are grouped as {theirs}, the parameters' as {ours}; "
            "prefill and decode take the same parameters"
        )
    rows = cache.keys[0].shape[1:3]
    if token.shape != rows:
        raise ValueError(f"token: shape {token.shape}; the cache has [P, G] = {list(rows)}")


def _write(stacked: Array, layer: Array | int, new: Array, step: Array, axis: int) -> Array:
    """Put `new` [P, G, …] into slot `step` of `layer` ([n, P, G, …]), in place inside a loop.

    `axis` is the slots' axis within one row's [K, ·, ·].
    """
    if step.ndim == 0:
        at: list[Any] = [layer, *[0] * (stacked.ndim - 1)]
        at[3 + axis] = step
        return jax.lax.dynamic_update_slice(stacked, jnp.expand_dims(new, (0, 3 + axis)), at)
    prompts, groups = stacked.shape[1:3]
    p, g = jnp.arange(prompts)[:, None], jnp.arange(groups)[None]
    if axis == 2:
        return stacked.at[layer, p, g, :, :, step].set(new)
    return stacked.at[layer, p, g, :, step, :].set(new)


def _attend(
    q: Array, prefix: tuple[Array, Array], mask: Array, suffix: tuple[Array, Array], step: Array
) -> Array:
    """Softmax over prefix and suffix together, without concatenating them.

    Args:
      q: ``[P, G, N, H]``.
      prefix: keys ``[P, K, H, Tp]``, values ``[P, K, Tp, H]``.
      mask: bool ``[P, Tp]``.
      suffix: keys ``[P, G, K, H, S]``, values ``[P, G, K, S, H]``.
      step: scalar or ``[P, G]``: the last slot a row may read.
    """
    grouped = split_groups(q, prefix[0].shape[1])
    wide: Any = dict(preferred_element_type=jnp.float32)
    scale = q.shape[-1] ** -0.5
    # batch axes (p, k) in front: what XLA's CPU matmul wants of bf16
    past = jnp.einsum("pkgqh,pkht->pkgqt", grouped.swapaxes(1, 2), prefix[0], **wide) * scale
    past = past.swapaxes(1, 2)
    own = jnp.einsum("pgkqh,pgkhs->pgkqs", grouped, suffix[0], **wide) * scale
    past = jnp.where(mask[:, None, None, None], past, NEGATIVE)
    slots = jnp.arange(own.shape[-1]) <= jnp.expand_dims(step, -1)
    own = jnp.where(slots if step.ndim == 0 else slots[:, :, None, None], own, NEGATIVE)
    top = jnp.maximum(past.max(-1, keepdims=True), own.max(-1, keepdims=True))
    past, own = jnp.exp(past - top), jnp.exp(own - top)
    total = past.sum(-1, keepdims=True) + own.sum(-1, keepdims=True)
    weights = past.astype(q.dtype).swapaxes(1, 2)
    out = jnp.einsum("pkgqt,pkth->pkgqh", weights, prefix[1], **wide).swapaxes(1, 2)
    out += jnp.einsum("pgkqs,pgksh->pgkqh", own.astype(q.dtype), suffix[1], **wide)
    return (out / total).astype(q.dtype).reshape(q.shape)


def decode_layers(
    layer: Callable[..., tuple[Array, Any]],
    stacks: tuple[Any, ...],
    x: Array,
    cache: Cache,
    step: Array,
) -> tuple[Array, Cache]:
    """Run every layer on one token per row; scans stacks of several layers, unrolls single ones."""

    def one(x: Array, keys: Array, values: Array, index: Array | int, layer_xs: Any):
        layer_params, prefix_keys, prefix_values = layer_xs

        def attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
            new_keys = _write(keys, index, k, step, 2)
            new_values = _write(values, index, v, step, 1)
            own = tuple(
                jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False)
                for leaf in (new_keys, new_values)
            )
            prefix = (prefix_keys, prefix_values)
            return _attend(q, prefix, cache.prefix.mask, own, step), (new_keys, new_values)

        return layer(layer_params, x, attend)

    def body(carry: tuple[Array, Array, Array], xs: tuple[Array, Any]):
        x, keys, values = carry
        x, (keys, values) = one(x, keys, values, xs[0], xs[1])
        return (x, keys, values), None

    all_keys, all_values = [], []
    parts = zip(
        stacks, cache.prefix.keys, cache.prefix.values, cache.keys, cache.values, strict=True
    )
    for stack, prefix_keys, prefix_values, keys, values in parts:
        xs = (stack, prefix_keys, prefix_values)
        if (count := depth(stack)) == 1:
            x, (keys, values) = one(x, keys, values, 0, jax.tree.map(lambda leaf: leaf[0], xs))
        else:
            (x, keys, values), _ = jax.lax.scan(body, (x, keys, values), (jnp.arange(count), xs))
        all_keys.append(keys)
        all_values.append(values)
    return x, Cache(prefix=cache.prefix, keys=tuple(all_keys), values=tuple(all_values))

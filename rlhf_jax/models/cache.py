"""The key/value cache: one prefix per prompt, shared by its group, and a suffix per row.

Keys and values are ``[…, K, S, H]``: the slots in use are contiguous, so a step's cost does not
depend on the room. For a stack of n layers the prefix is ``[n, P, …]``, the suffix
``[n, P, G, …]``.

What the cache holds is the model's ``kv_dtype``: float32; bfloat16 as its bits in uint16 (to write
a token into a bfloat16 array XLA's CPU backend would widen all of it); or :class:`Quantized` int8
with a float32 scale for every (row, head, slot). Both parts of a ``Quantized`` have their slots on
the same axis as the plain array, so code that cuts, pads or copies slots maps over the tree.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models.explicit import like_rows

Array = jax.Array

__all__ = ["Cache", "Prefix", "Quantized", "cache_axes", "extend_cache"]

SLOTS = -2
"""The axis of the slots in every array of keys or values."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
    """Keys or values as int8: x ≈ values · scales, scales = max|x| / 127 over the head width.

    Args:
      values: int8 ``[…, K, S, H]``.
      scales: float32 ``[…, K, S, 1]``.

    >>> import jax.numpy as jnp
    >>> from rlhf_jax.models.cache import stored
    >>> held = stored(jnp.array([[1.0, -127.0]]), "int8")
    >>> held.values.tolist(), held.scales.tolist()
    ([[1, -127]], [[1.0]])
    """

    values: Array
    scales: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
    """Keys and values of P prompts.

    Args:
      keys, values: per stack ``[n, P, K, Tp, H]``, as the cache holds them.
      mask: bool ``[P, Tp]``: real prompt tokens.
      lengths: int32 ``[P]``: how many.
    """

    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    mask: Array
    lengths: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """A shared prefix and each row's own decoded tokens.

    Args:
      prefix: :class:`Prefix`; decode only reads it.
      keys, values: per stack ``[n, P, G, K, S, H]``, as the cache holds them.
      block: static; how many prompts read as much of the suffix as the longest of them needs. 0
        for all: where prompts lie on several devices, or their rows are equally long.
    """

    prefix: Prefix
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    block: int = dataclasses.field(default=0, metadata={"static": True})


def stored(x: Array, dtype: Any) -> Any:
    """Keys or values ``[…, H]`` as a cache of this dtype holds them."""
    if np.dtype(dtype) == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    if np.dtype(dtype) != np.int8:
        return x.astype(dtype)
    wide = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / 127.0
    values = jnp.round(wide / jnp.where(scales > 0, scales, 1.0))
    return Quantized(values=values.astype(jnp.int8), scales=scales)


def held_dtype(held: Any) -> np.dtype:
    """The dtype that :func:`stored` was given."""
    if isinstance(held, Quantized):
        return np.dtype(np.int8)
    return np.dtype(jnp.bfloat16 if held.dtype == jnp.uint16 else held.dtype)


def unscaled(held: Any, dtype: Any) -> Array:
    """What to multiply queries or weights of this dtype with; of int8 without its scales."""
    if isinstance(held, Quantized):
        return held.values.astype(dtype)
    if held.dtype == jnp.uint16:
        held = jax.lax.bitcast_convert_type(held, jnp.bfloat16)
    return held.astype(jnp.promote_types(dtype, held.dtype))


def room(cache: Cache) -> int:
    """Slots of the suffix."""
    return jax.tree.leaves(cache.keys)[0].shape[SLOTS]


def init_cache(prefix: Prefix, group_size: int, max_new_tokens: int) -> Cache:
    """Zeros for the suffix, in the prefix's dtype and grouping."""

    def zeros(leaf: Array) -> Array:
        layers, prompts, heads, _, width = leaf.shape
        shape = (layers, prompts, group_size, heads, max_new_tokens, width)
        return jnp.zeros(shape, leaf.dtype, device=like_rows(leaf, 0, 1, None, 2))

    keys, values = jax.tree.map(zeros, (prefix.keys, prefix.values))
    return Cache(prefix=prefix, keys=keys, values=values)


def extend_cache(cache: Cache, max_new_tokens: int) -> Cache:
    """The same cache with room for more decoded tokens.

    Args:
      cache: any :class:`Cache`.
      max_new_tokens: the new S, at least the old one.

    Returns:
      A :class:`Cache` whose first slots are the old ones.

    Raises:
      ValueError: when the new room is smaller than the old.

    >>> import jax.numpy as jnp
    >>> prefix = Prefix(
    ...     keys=(jnp.ones((1, 2, 1, 3, 4)),),
    ...     values=(jnp.ones((1, 2, 1, 3, 4)),),
    ...     mask=jnp.ones((2, 3), bool),
    ...     lengths=jnp.full((2,), 3),
    ... )
    >>> extend_cache(init_cache(prefix, 2, 8), 16).keys[0].shape
    (1, 2, 2, 1, 16, 4)
    """
    more = max_new_tokens - room(cache)
    if more < 0:
        raise ValueError(
            f"max_new_tokens: got {max_new_tokens}; the cache already has {room(cache)}"
        )
    widths = [(0, 0)] * 4 + [(0, more), (0, 0)]
    keys, values = jax.tree.map(lambda leaf: jnp.pad(leaf, widths), (cache.keys, cache.values))
    return dataclasses.replace(cache, keys=keys, values=values)


def cache_axes(cache: Cache) -> Cache:
    """The cache's tree with a tuple of logical axis names for every leaf.

    Args:
      cache: any :class:`Cache` (arrays or shapes).

    Returns:
      Names are ``"layers", "prompt", "group", "kv_heads"`` and None.

    >>> import jax.numpy as jnp
    >>> prefix = Prefix(
    ...     keys=(jnp.ones((1, 2, 1, 3, 4)),),
    ...     values=(jnp.ones((1, 2, 1, 3, 4)),),
    ...     mask=jnp.ones((2, 3), bool),
    ...     lengths=jnp.full((2,), 3),
    ... )
    >>> cache_axes(init_cache(prefix, 2, 8)).prefix.mask
    ('prompt', None)
    """
    shared = ("layers", "prompt", "kv_heads", None, None)
    own = ("layers", "prompt", "group", "kv_heads", None, None)

    def named(held: tuple[Any, ...], names: tuple[str | None, ...]) -> tuple[Any, ...]:
        return jax.tree.map(lambda _: names, held)

    prefix = cache.prefix
    axes: Any = Prefix(
        keys=named(prefix.keys, shared),
        values=named(prefix.values, shared),
        mask=("prompt", None),  # pyright: ignore[reportArgumentType]
        lengths=("prompt",),  # pyright: ignore[reportArgumentType]
    )
    return dataclasses.replace(
        cache, prefix=axes, keys=named(cache.keys, own), values=named(cache.values, own)
    )


def keep_rows(cache: Any, rows: Any) -> Any:
    """The cache with its prompts' axis laid as `rows` says; its other axes are the compiler's.

    Under Auto axes the compiler follows the weights: where one mesh axis splits both the weights
    and the rows, every device would hold every row of the cache. Under Explicit axes the cache
    lies with its rows anyway.

    Args:
      cache: a :class:`Cache`, inside ``jit``; anything else is left alone.
      rows: what :func:`rlhf_jax.models.explicit.rows_of` says of the prompts.

    Returns:
      The same cache.
    """
    context = jax.sharding.get_abstract_mesh()
    if rows is None or jax.sharding.AxisType.Explicit in context.axis_types:
        return cache
    if not isinstance(cache, Cache):
        return cache
    mesh = rows.mesh if context.empty else context

    def keep(leaf: Array, names: tuple[str | None, ...]) -> Array:
        free = jax.P.UNCONSTRAINED
        spec = jax.P(*(rows.spec[0] if name == "prompt" else free for name in names))
        return jax.lax.with_sharding_constraint(leaf, jax.NamedSharding(mesh, spec))

    return jax.tree.map(keep, cache, cache_axes(cache))


def append(held: Any, new: Array, step: Array) -> Any:
    """Put the tokens `new` ``[n, P, G, K, H]`` into slot `step` of every row, all layers at once.

    A per-row step beyond the room writes nothing.
    """

    def put(leaf: Array, value: Array) -> Array:
        if step.ndim == 0:
            value = jnp.expand_dims(value, SLOTS)
            return jax.lax.dynamic_update_slice_in_dim(leaf, value, step, axis=leaf.ndim + SLOTS)
        # The TPU compiler would keep all axes of an update beside each other, and copy the cache
        # from and into the layout that attention reads. A CPU would rather have few updates.
        scattered = functools.partial(_scatter, leaf, value, step)
        head_by_head, at_once = (functools.partial(scattered, axes) for axes in ((0, 3), ()))
        return jax.lax.platform_dependent(tpu=head_by_head, default=at_once)

    return jax.tree.map(put, held, stored(new, held_dtype(held)))


def _scatter(leaf: Array, value: Array, step: Array, apart: tuple[int, ...]) -> Array:
    """One scatter with ``[P, G]`` as batch axes: in place, and each device keeps to its own rows.

    `apart` are further axes of `value` along which each element is an update of its own.
    """
    batch = tuple(sorted((1, 2, *apart)))
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(axis for axis in (0, 3, 4) if axis not in batch),
        inserted_window_dims=(4,),
        scatter_dims_to_operand_dims=(4,),
        operand_batching_dims=batch,
        scatter_indices_batching_dims=tuple(range(len(batch))),
    )
    where = jnp.expand_dims(step, [i for i, axis in enumerate(batch) if axis in apart])
    where = jnp.broadcast_to(where, [value.shape[axis] for axis in batch])[..., None]
    mode = jax.lax.GatherScatterMode.FILL_OR_DROP
    return jax.lax.scatter(leaf, where, value, numbers, unique_indices=True, mode=mode)

"""The key/value cache: one prefix per prompt, shared by its group, and a suffix per row.

Layouts are the reader's: keys ``[…, K, H, S]`` (the score einsum contracts H) and values
``[…, K, S, H]``. For a stack of n layers the prefix is ``[n, P, …]``, the suffix ``[n, P, G, …]``.

What the cache holds is the model's ``kv_dtype``: a float array, or :class:`Quantized` int8 with a
float32 scale for every (row, head, slot). Both parts of a ``Quantized`` have their slots on the
same axis as the plain array, so code that cuts, pads or copies slots maps over the tree.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models.explicit import like_rows

Array = jax.Array

__all__ = ["Cache", "Prefix", "Quantized", "cache_axes", "extend_cache"]

KEY_SLOTS, VALUE_SLOTS = -1, -2
"""The axis of the slots in keys and in values."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
    """Keys or values as int8: x ≈ values · scales, scales = max|x| / 127 over the head width.

    Args:
      values: int8 ``[…, K, H, S]`` (keys) or ``[…, K, S, H]`` (values).
      scales: float32 ``[…, K, 1, S]`` or ``[…, K, S, 1]``.

    >>> import jax.numpy as jnp
    >>> from rlhf_jax.models.cache import stored
    >>> held = stored(jnp.array([[1.0, -127.0]]), "int8", axis=-1)
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
      keys: per stack ``[n, P, K, H, Tp]``, an array or a :class:`Quantized`.
      values: per stack ``[n, P, K, Tp, H]``, likewise.
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
      keys: per stack ``[n, P, G, K, H, S]``, an array or a :class:`Quantized`.
      values: per stack ``[n, P, G, K, S, H]``, likewise.
    """

    prefix: Prefix
    keys: tuple[Any, ...]
    values: tuple[Any, ...]


def stored(x: Array, dtype: Any, axis: int) -> Any:
    """Keys or values as a cache of this dtype holds them; `axis` is the head width's."""
    if np.dtype(dtype) != np.int8:
        return x.astype(dtype)
    wide = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=axis, keepdims=True) / 127.0
    values = jnp.round(wide / jnp.where(scales > 0, scales, 1.0))
    return Quantized(values=values.astype(jnp.int8), scales=scales)


def held_dtype(held: Any) -> np.dtype:
    """The dtype that :func:`stored` was given."""
    return np.dtype(held.values.dtype if isinstance(held, Quantized) else held.dtype)


def slots(held: Any, axis: int) -> int:
    """Room of a leaf of the cache."""
    return jax.tree.leaves(held)[0].shape[axis]


def init_cache(prefix: Prefix, group_size: int, max_new_tokens: int) -> Cache:
    """Zeros for the suffix, in the prefix's dtype and grouping."""

    def room(held: Any, axis: int) -> Any:
        def zeros(leaf: Array) -> Array:
            shape = [*leaf.shape[:2], group_size, *leaf.shape[2:]]
            shape[axis] = max_new_tokens
            return jnp.zeros(shape, leaf.dtype, device=like_rows(leaf, 0, 1, None, 2))

        return jax.tree.map(zeros, held)

    return Cache(
        prefix=prefix,
        keys=tuple(room(held, KEY_SLOTS) for held in prefix.keys),
        values=tuple(room(held, VALUE_SLOTS) for held in prefix.values),
    )


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
    ...     keys=(jnp.ones((1, 2, 1, 4, 3)),),
    ...     values=(jnp.ones((1, 2, 1, 3, 4)),),
    ...     mask=jnp.ones((2, 3), bool),
    ...     lengths=jnp.full((2,), 3),
    ... )
    >>> extend_cache(init_cache(prefix, 2, 8), 16).keys[0].shape
    (1, 2, 2, 1, 4, 16)
    """
    old = slots(cache.keys[0], KEY_SLOTS)
    if max_new_tokens < old:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}; the cache already has {old}")

    def longer(held: Any, axis: int) -> Any:
        def pad(leaf: Array) -> Array:
            widths = [(0, 0)] * leaf.ndim
            widths[axis] = (0, max_new_tokens - old)
            return jnp.pad(leaf, widths)

        return jax.tree.map(pad, held)

    return Cache(
        prefix=cache.prefix,
        keys=tuple(longer(held, KEY_SLOTS) for held in cache.keys),
        values=tuple(longer(held, VALUE_SLOTS) for held in cache.values),
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

    def named(held: tuple[Any, ...], names: tuple[str | None, ...]) -> tuple[Any, ...]:
        return jax.tree.map(lambda _: names, held)

    prefix = cache.prefix
    axes: Any = Prefix(
        keys=named(prefix.keys, shared),
        values=named(prefix.values, shared),
        mask=("prompt", None),  # pyright: ignore[reportArgumentType]
        lengths=("prompt",),  # pyright: ignore[reportArgumentType]
    )
    return Cache(prefix=axes, keys=named(cache.keys, own), values=named(cache.values, own))


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


def append(held: Any, new: Array, step: Array, axis: int) -> Any:
    """Put the tokens `new` ``[n, P, G, K, H]`` into slot `step` of every row, all layers at once.

    A per-row step beyond the room writes nothing.
    """

    def put(leaf: Array, value: Array) -> Array:
        if step.ndim == 0:
            at = leaf.ndim + axis
            return jax.lax.dynamic_update_slice_in_dim(leaf, value, step, axis=at)
        # One scatter with [P, G] as batch axes: in place, and each device keeps to its own rows.
        window = tuple(i for i in range(leaf.ndim - 1) if i not in (1, 2))
        numbers = jax.lax.ScatterDimensionNumbers(
            update_window_dims=window,
            inserted_window_dims=(leaf.ndim + axis,),
            scatter_dims_to_operand_dims=(leaf.ndim + axis,),
            operand_batching_dims=(1, 2),
            scatter_indices_batching_dims=(0, 1),
        )
        return jax.lax.scatter(
            leaf,
            step[..., None],
            jnp.squeeze(value, axis),
            numbers,
            unique_indices=True,
            mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
        )

    # The head width's axis in [..., K, H, 1] (keys) and [..., K, 1, H] (values): the other one.
    value = stored(jnp.expand_dims(new, axis), held_dtype(held), axis=-3 - axis)
    return jax.tree.map(put, held, value)

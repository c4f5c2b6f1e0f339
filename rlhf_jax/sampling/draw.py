"""Keys and draws: two uniforms a token instead of one Gumbel number for every vocabulary entry."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["categorical", "row_keys", "token_key_uniforms"]

_BLOCK = 256


def row_keys(key: jax.Array, group_ids: jax.Array, group_size: int) -> jax.Array:
    """One key per completion, a function of (key, prompt id, sample number) alone.

    So a completion does not depend on which other prompts share its batch.

    Args:
      key: the rollout's key.
      group_ids: int32 ``[P]``.
      group_size: completions per prompt.

    Returns:
      keys ``[P, group_size]``.

    >>> import jax, jax.numpy as jnp
    >>> row_keys(jax.random.key(0), jnp.arange(3), 2).shape
    (3, 2)
    """

    def one(group: jax.Array, sample: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, group), sample)

    samples = jnp.arange(group_size)
    return jax.vmap(lambda group: jax.vmap(lambda s: one(group, s))(samples))(group_ids)


def token_key_uniforms(keys: jax.Array, index: jax.Array | int) -> jax.Array:
    """The two uniforms that draw token ``index`` of every row.

    Args:
      keys: ``[...]`` one key per row.
      index: int scalar or ``[...]``, the token's number in its completion.

    Returns:
      float32 ``[..., 2]`` in [0, 1).

    >>> import jax
    >>> token_key_uniforms(jax.random.split(jax.random.key(0), 4), 0).shape
    (4, 2)
    """

    def one(key: jax.Array, index: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(key, index), (2,))

    index = jnp.broadcast_to(index, keys.shape).reshape(-1)
    return jax.vmap(one)(keys.reshape(-1), index).reshape(*keys.shape, 2)


def categorical(logits: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Draw a token from softmax(logits) by a two-level inverse CDF.

    The vocabulary is cut into blocks; the first uniform picks a block by its mass, the second a
    token inside it. Exact up to float32 rounding, with two random numbers and one pass over the
    vocabulary per row; a token of probability 0 is never drawn.

    Args:
      logits: float32 ``[..., V]``.
      uniforms: float32 ``[..., 2]`` in [0, 1).

    Returns:
      The tokens, int32 ``[...]``.

    >>> import jax.numpy as jnp
    >>> logits, uniforms = jnp.log(jnp.array([[0.2, 0.8]] * 2)), jnp.array([[0, 0.1], [0, 0.3]])
    >>> categorical(logits, uniforms).tolist()
    [0, 1]
    """
    vocab = logits.shape[-1]
    top = jnp.max(logits, axis=-1, keepdims=True)
    mass = jnp.exp(logits - top)
    blocks = -(-vocab // _BLOCK)
    mass = jnp.pad(mass, [(0, 0)] * (mass.ndim - 1) + [(0, blocks * _BLOCK - vocab)])
    mass = mass.reshape(*mass.shape[:-1], blocks, _BLOCK)
    masses = jnp.sum(mass, axis=-1)
    block = _invert(masses, uniforms[..., 0])
    inside = jnp.take_along_axis(mass, block[..., None, None], axis=-2)[..., 0, :]
    return (block * _BLOCK + _invert(inside, uniforms[..., 1])).astype(jnp.int32)


def _invert(mass: jax.Array, uniform: jax.Array) -> jax.Array:
    """First index of positive mass whose cumulative mass exceeds ``uniform`` × the total."""
    # A parallel prefix sum is monotone only up to rounding, so entries without mass are ruled out
    # by name, and the target is kept below what some entry with mass reaches.
    cumulative = jnp.where(mass > 0, jnp.cumsum(mass, axis=-1), 0.0)
    total = jnp.max(cumulative, axis=-1, keepdims=True)
    target = jnp.minimum(uniform[..., None] * total, jnp.nextafter(total, jnp.zeros_like(total)))
    return jnp.argmax(cumulative > target, axis=-1)

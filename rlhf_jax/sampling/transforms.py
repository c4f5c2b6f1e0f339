"""Logit transforms of the sampler. Every threshold is traced: a change never recompiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["NEG_INF", "temper", "top_k_top_p"]

NEG_INF = -1e30
"""The logit of a forbidden token: its probability is exactly 0 and no arithmetic gives NaN."""


def temper(logits: jax.Array, temperature: jax.Array | float) -> jax.Array:
    """Divide by the temperature in float32; τ = 0 leaves the logits (the caller then takes argmax).

    z = logits / τ

    Args:
      logits: ``[..., V]``, any float dtype.
      temperature: scalar or broadcastable to ``logits``; ≥ 0.

    Returns:
      float32 ``[..., V]``.

    >>> import jax.numpy as jnp
    >>> temper(jnp.array([2.0, 4.0]), 2.0).tolist(), temper(jnp.array([2.0]), 0.0).tolist()
    ([1.0, 2.0], [2.0])
    """
    temperature = jnp.asarray(temperature, jnp.float32)
    return logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1.0)


def top_k_top_p(logits: jax.Array, top_k: jax.Array | int, top_p: jax.Array | float) -> jax.Array:
    """Forbid all but the k likeliest tokens, then all outside the nucleus of mass p.

    The nucleus is the smallest set of likeliest tokens whose mass, renormalised after top-k,
    reaches p; the likeliest token always stays. Tokens tied with the last one kept stay too.
    The vocabulary is sorted only if a filter is on.

    Args:
      logits: float32 ``[..., V]``, tempered.
      top_k: int scalar or ``[...]``; 0 turns the filter off.
      top_p: float scalar or ``[...]``; 1 turns the filter off.

    Returns:
      ``[..., V]`` with :data:`NEG_INF` on forbidden tokens.

    References:
      Fan et al. 2018 (top-k); Holtzman et al. 2019, "The Curious Case of Neural Text
      Degeneration", eq. 2 (nucleus).

    >>> import jax.numpy as jnp
    >>> z = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))
    >>> (top_k_top_p(z, 0, 0.7) > NEG_INF).tolist(), (top_k_top_p(z, 1, 1.0) > NEG_INF).tolist()
    ([True, True, False, False], [True, False, False, False])
    """
    shape = logits.shape[:-1]
    vocab = logits.shape[-1]
    k = jnp.broadcast_to(jnp.asarray(top_k, jnp.int32), shape)
    p = jnp.broadcast_to(jnp.asarray(top_p, jnp.float32), shape)
    k = jnp.where(k > 0, jnp.minimum(k, vocab), vocab)

    def filtered(z: jax.Array) -> jax.Array:
        ordered = -jnp.sort(-z, axis=-1)
        kth = jnp.take_along_axis(ordered, (k - 1)[..., None], axis=-1)
        kept = jnp.where(ordered >= kth, ordered, NEG_INF)
        mass = jax.nn.softmax(kept, axis=-1)
        # A token is in the nucleus if the mass *before* it has not reached p yet.
        before = jnp.cumsum(mass, axis=-1) - mass
        inside = (before < p[..., None]) & (kept > NEG_INF)
        inside = inside.at[..., 0].set(True)
        last = jnp.min(jnp.where(inside, kept, jnp.inf), axis=-1, keepdims=True)
        return jnp.where(z >= last, z, NEG_INF)

    active = jnp.any((k < vocab) | (p < 1.0))
    return jax.lax.cond(active, filtered, lambda z: z, logits)

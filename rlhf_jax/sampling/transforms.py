"""Logit transforms of the sampler. Every threshold is traced: a change never recompiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = [
    "NEG_INF",
    "min_p",
    "occurring",
    "presence_penalty",
    "repetition_penalty",
    "temper",
    "top_k_top_p",
]

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
    # Times 1/τ, as the learner does it, so that both round alike.
    temperature = jnp.asarray(temperature, jnp.float32)
    return logits.astype(jnp.float32) * (1.0 / jnp.where(temperature > 0, temperature, 1.0))


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


def min_p(logits: jax.Array, threshold: jax.Array | float) -> jax.Array:
    """Forbid tokens whose probability is below ``threshold`` × the likeliest token's.

    keep i  iff  z_i ≥ max z + log p

    Args:
      logits: float32 ``[..., V]``, tempered.
      threshold: scalar or ``[...]`` in [0, 1]; 0 turns the filter off.

    Returns:
      ``[..., V]`` with :data:`NEG_INF` on forbidden tokens; the likeliest one always stays.

    References:
      Nguyen et al. 2024, "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM
      Outputs", section 3.

    >>> import jax.numpy as jnp
    >>> z = jnp.log(jnp.array([0.6, 0.3, 0.1]))
    >>> (min_p(z, 0.4) > NEG_INF).tolist()
    [True, True, False]
    """
    threshold = jnp.expand_dims(jnp.asarray(threshold, jnp.float32), -1)
    floor = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(threshold)
    return jnp.where(logits >= floor, logits, NEG_INF)


def occurring(tokens: jax.Array, mask: jax.Array, vocab_size: int) -> jax.Array:
    """Which tokens of the vocabulary occur in each row.

    Args:
      tokens: int32 ``[..., T]``.
      mask: bool ``[..., T]``: the entries that count.
      vocab_size: V.

    Returns:
      bool ``[..., V]``.

    >>> import jax.numpy as jnp
    >>> occurring(jnp.array([2, 0, 2]), jnp.array([True, False, True]), 4).tolist()
    [False, False, True, False]
    """
    lead = tokens.shape[:-1]
    flat = jnp.where(mask, tokens, vocab_size).reshape(-1, tokens.shape[-1])
    rows = jnp.arange(flat.shape[0])[:, None]
    found = jnp.zeros((flat.shape[0], vocab_size), bool).at[rows, flat].set(True, mode="drop")
    return found.reshape(*lead, vocab_size)


def repetition_penalty(logits: jax.Array, seen: jax.Array, penalty: jax.Array | float) -> jax.Array:
    """Make tokens that were seen less likely: positive logits ÷ penalty, negative ones × penalty.

    Args:
      logits: float32 ``[..., V]``, before the temperature.
      seen: bool ``[..., V]``: tokens of the prompt and of the completion so far.
      penalty: > 0, broadcastable to ``logits``; 1 = off, below 1 rewards repetition.

    Returns:
      float32 ``[..., V]``.

    References:
      Keskar et al. 2019, "CTRL: A Conditional Transformer Language Model for Controllable
      Generation", section 4.1.

    >>> import jax.numpy as jnp
    >>> repetition_penalty(
    ...     jnp.array([2.0, -2.0, 1.0]), jnp.array([True, True, False]), 2.0
    ... ).tolist()
    [1.0, -4.0, 1.0]
    """
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def presence_penalty(
    logits: jax.Array, written: jax.Array, penalty: jax.Array | float
) -> jax.Array:
    """Subtract a constant from the logits of tokens that the completion already holds.

    Args:
      logits: float32 ``[..., V]``, before the temperature.
      written: bool ``[..., V]``: tokens of the completion so far (not of the prompt).
      penalty: broadcastable to ``logits``; 0 = off.

    Returns:
      float32 ``[..., V]``.

    >>> import jax.numpy as jnp
    >>> presence_penalty(jnp.array([2.0, 1.0]), jnp.array([True, False]), 0.5).tolist()
    [1.5, 1.0]
    """
    return jnp.where(written, logits - penalty, logits)

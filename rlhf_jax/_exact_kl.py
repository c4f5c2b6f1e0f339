"""The exact KL divergence over the vocabulary, chunked over tokens; ``kl`` exports it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import checks

DIRECTIONS = ("reverse", "forward")


def _divergence(logits: jax.Array, ref_logits: jax.Array, direction: str) -> jax.Array:
    log_p = jax.nn.log_softmax(logits, axis=-1)
    log_q = jax.nn.log_softmax(ref_logits, axis=-1)
    if direction == "forward":
        log_p, log_q = log_q, log_p
    # A token of probability 0 (logit −∞) adds 0, and its log must not reach the product.
    possible = log_p > -jnp.inf
    safe = jnp.where(possible, log_p, 0.0)
    difference = jnp.where(possible, safe - log_q, 0.0)
    return jnp.sum(jnp.where(possible, jnp.exp(safe), 0.0) * difference, axis=-1)


def _in_chunks(body, rows: tuple[jax.Array, ...], chunk_size: int) -> jax.Array:
    """Map body over chunks along the last but one axis; it is run again in the backward pass."""
    leading, length = rows[0].shape[:-2], rows[0].shape[-2]
    columns = max(1, min(length, chunk_size // max(1, math.prod(leading))))
    chunks = -(-length // columns)
    if chunks <= 1:
        return jax.checkpoint(body)(rows)
    axis = len(leading)

    def split(x):
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, chunks * columns - length)
        x = jnp.pad(x, padding).reshape(*leading, chunks, columns, x.shape[-1])
        return jnp.moveaxis(x, axis, 0)

    out = jax.lax.map(jax.checkpoint(body), tuple(split(x) for x in rows))
    return jnp.moveaxis(out, 0, axis).reshape(*leading, -1)[..., :length]


def _scale(temperature: float | jax.Array, dtype) -> jax.Array:
    """1/τ; 1 for τ = 0, where log-probs are those of the untempered softmax."""
    checks.non_negative("temperature", temperature)
    tau = jax.lax.stop_gradient(jnp.asarray(temperature, dtype))
    return jnp.where(tau > 0, 1.0 / jnp.where(tau > 0, tau, 1.0), 1.0)


def exact(
    logits: ArrayLike,
    ref_logits: ArrayLike,
    *,
    temperature: float | jax.Array = 1.0,
    direction: str = "reverse",
    chunk_size: int = 1024,
) -> jax.Array:
    """The exact KL over the vocabulary, per token.

    reverse: KL(π‖ref) = Σ_v π_v·(log π_v − log ref_v); forward: KL(ref‖π). Value: exact, so the
    variance is that of the states alone. As a loss: the gradient of the direction asked for, given
    the states. In the reward: add it to the reward of the token *before*, as it does not depend on
    the token drawn.

    Args:
      logits: floating [..., V], of the policy.
      ref_logits: floating [..., V], of the reference; stop-gradient.
      temperature: τ ≥ 0, the same on both sides; traced. 0 reads as 1, as in ``logprobs``.
      direction: ``"reverse"`` or ``"forward"``.
      chunk_size: how many tokens are in float32 at a time; static.

    Returns:
      float32 (or float64) [...], ≥ 0 up to rounding.

    Raises:
      TypeError: if logits are not floating.
      ValueError: if shapes differ, the direction is unknown, or an option is not positive.

    References:
      Kullback and Leibler, "On information and sufficiency", 1951.

    Example:
      >>> logits = jnp.log(jnp.array([0.5, 0.5]))
      >>> round(float(exact(logits, jnp.log(jnp.array([0.25, 0.75])))), 4)
      0.1438
    """
    checks.one_of("direction", direction, DIRECTIONS)
    checks.positive("chunk_size", chunk_size)
    x, ref = jnp.asarray(logits), jax.lax.stop_gradient(jnp.asarray(ref_logits))
    dtype = checks.compute_dtype(checks.real("logits", x[:0]))
    checks.real("ref_logits", ref[:0])
    checks.shape("ref_logits", ref, x.shape, like="logits")
    scale = _scale(temperature, dtype)

    def body(rows):
        a, b = (row.astype(dtype) * scale for row in rows)
        return _divergence(a, b, direction)

    if x.ndim == 1:
        return body((x, ref))
    return _in_chunks(body, (x, ref), chunk_size)


def exact_chunked(
    hidden: ArrayLike,
    head: ArrayLike,
    ref_hidden: ArrayLike,
    ref_head: ArrayLike,
    *,
    temperature: float | jax.Array = 1.0,
    direction: str = "reverse",
    chunk_size: int = 1024,
    head_is_embedding: bool = False,
) -> jax.Array:
    """The exact KL over the vocabulary from hidden states, per token, never holding all logits.

    reverse: KL(π‖ref) = Σ_v π_v·(log π_v − log ref_v) with π = softmax(h·W/τ); forward: KL(ref‖π).
    Value, variance and gradients are those of ``exact``. The logits of one chunk exist at a time,
    forward and backward; the head's gradient is accumulated in float32.

    Args:
      hidden: floating [..., D], of the policy.
      head: floating [D, V] ([V, D] if ``head_is_embedding``).
      ref_hidden: floating [..., E], of the reference; stop-gradient.
      ref_head: floating [E, V] (or [V, E]); stop-gradient.
      temperature: τ ≥ 0, the same on both sides; traced. 0 reads as 1, as in ``logprobs``.
      direction: ``"reverse"`` or ``"forward"``.
      chunk_size: tokens at a time; static.
      head_is_embedding: the heads are embedding tables, [V, D]; static.

    Returns:
      float32 (or float64) [...].

    Raises:
      TypeError: if an array is not floating.
      ValueError: if shapes do not fit, the direction is unknown, or an option is not positive.

    References:
      Kullback and Leibler, "On information and sufficiency", 1951.

    Example:
      >>> h, w = jnp.ones((1, 3, 2)), jnp.ones((2, 5))
      >>> exact_chunked(h, w, h, w).tolist()
      [[0.0, 0.0, 0.0]]
    """
    checks.one_of("direction", direction, DIRECTIONS)
    checks.positive("chunk_size", chunk_size)
    h, w = jnp.asarray(hidden), jnp.asarray(head)
    ref_h, ref_w = (jax.lax.stop_gradient(jnp.asarray(a)) for a in (ref_hidden, ref_head))
    checks.shape("ref_hidden", ref_h, (*h.shape[:-1], ref_h.shape[-1]), like="hidden")
    feature, vocabulary = (1, 0) if head_is_embedding else (0, 1)
    for name, matrix, states in (("head", w, h), ("ref_head", ref_w, ref_h)):
        checks.rank(name, matrix, 2, axes="[V, D]" if head_is_embedding else "[D, V]")
        expected = (states.shape[-1], w.shape[vocabulary])
        checks.shape(name, matrix, expected[::-1] if head_is_embedding else expected)
    for name, array in (("hidden", h), ("head", w), ("ref_hidden", ref_h), ("ref_head", ref_w)):
        checks.real(name, array[:0])
    dtype = checks.compute_dtype(h)
    # Cast up outside and back inside: the chunks' head gradients add up in the wide dtype.
    wide, scale = w.astype(dtype), _scale(temperature, dtype)

    def logits(states, matrix):
        axes = (((states.ndim - 1,), (feature,)), ((), ()))
        return jax.lax.dot_general(states, matrix, axes, preferred_element_type=dtype) * scale

    def body(rows):
        states, ref_states = rows
        policy = logits(states, wide.astype(w.dtype).astype(states.dtype))
        reference = logits(ref_states, ref_w.astype(ref_states.dtype))
        return _divergence(policy, reference, direction)

    if h.ndim == 1:
        return body((h, ref_h))
    return _in_chunks(body, (h, ref_h), chunk_size)

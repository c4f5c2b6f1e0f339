"""The exact KL divergence over the vocabulary, chunked over tokens; ``kl`` exports it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlhf_jax import _chunked_head, checks

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
    checks.rank("temperature", temperature, 0, axes="a scalar")
    return _chunked_head.inverse_temperature(temperature, dtype)


def _masked(mask: ArrayLike | None, x: jax.Array, ref: jax.Array, like: str):
    """Both inputs with 0 where the mask is false, before any arithmetic; the mask, if any."""
    if mask is None:
        return x, ref, None
    m = checks.boolean("mask", mask)
    checks.shape("mask", m, x.shape[:-1], like=f"{like} without its last axis")
    return jnp.where(m[..., None], x, 0), jnp.where(m[..., None], ref, 0), m


def _matrix(name: str, head: Any, head_is_embedding: bool) -> tuple[jax.Array, int]:
    """The head's matrix and its axis of features."""
    if isinstance(head, tuple):
        head, layout = head
        checks.one_of(f"{name}'s layout", layout, ("dv", "vd"))
        head_is_embedding = layout == "vd"
    matrix = jnp.asarray(head)
    checks.rank(name, matrix, 2, axes="[V, D]" if head_is_embedding else "[D, V]")
    return matrix, 1 if head_is_embedding else 0


def exact(
    logits: ArrayLike,
    ref_logits: ArrayLike,
    *,
    temperature: float | jax.Array = 1.0,
    direction: str = "reverse",
    chunk_size: int = 1024,
    mask: ArrayLike | None = None,
) -> jax.Array:
    """The exact KL over the vocabulary, per token.

    reverse: KL(π‖ref) = Σ_v π_v·(log π_v − log ref_v); forward: KL(ref‖π). Value: exact, so the
    variance is that of the states alone. As a loss: the gradient of the direction asked for, given
    the states. In the reward: add it to the reward of the token *before*, as it does not depend on
    the token drawn; that yields the other part of ∇KL, through the states, and only that part.

    Args:
      logits: floating [..., V], of the policy.
      ref_logits: floating [..., V], of the reference; stop-gradient.
      temperature: τ ≥ 0, the same on both sides; traced. 0 reads as 1, as in ``logprobs``.
      direction: ``"reverse"`` or ``"forward"``.
      chunk_size: how many tokens are in float32 at a time; static.
      mask: bool [...]; where it is false the result is 0, with gradient 0, whatever the logits.

    Returns:
      float32 (or float64) [...], ≥ 0 up to rounding.

    Raises:
      TypeError: if logits are not floating or ``mask`` not bool.
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
    if not x.ndim:
        raise ValueError("logits must be [..., V]; got a scalar. Check the order of the arguments.")
    checks.shape("ref_logits", ref, x.shape, like="logits")
    dtype = checks.compute_dtype(checks.real("logits", x[:0]))
    checks.real("ref_logits", ref[:0])
    scale = _scale(temperature, dtype)
    x, ref, m = _masked(mask, x, ref, "logits")

    def body(rows):
        a, b = (row.astype(dtype) * scale for row in rows)
        return _divergence(a, b, direction)

    out = body((x, ref)) if x.ndim == 1 else _in_chunks(body, (x, ref), chunk_size)
    return out if m is None else jnp.where(m, out, 0.0)


def exact_chunked(
    hidden: ArrayLike,
    head: ArrayLike | tuple[jax.Array, str],
    ref_hidden: ArrayLike,
    ref_head: ArrayLike | tuple[jax.Array, str],
    *,
    temperature: float | jax.Array = 1.0,
    direction: str = "reverse",
    chunk_size: int = 1024,
    head_is_embedding: bool = False,
    mask: ArrayLike | None = None,
) -> jax.Array:
    """The exact KL over the vocabulary from hidden states, per token, never holding all logits.

    reverse: KL(π‖ref) = Σ_v π_v·(log π_v − log ref_v) with π = softmax(h·W/τ); forward: KL(ref‖π).
    Value, variance and gradients are those of ``exact``. The logits of one chunk exist at a time,
    forward and backward; the head's gradient is accumulated in float32.

    Args:
      hidden: floating [..., D], of the policy.
      head: floating [D, V] ([V, D] if ``head_is_embedding``), or what ``model.head(params)``
        gives: ``(matrix, "dv")`` or ``(matrix, "vd")``.
      ref_hidden: floating [..., E], of the reference; stop-gradient.
      ref_head: floating [E, V] (or [V, E], or a pair of its own); stop-gradient.
      temperature: τ ≥ 0, the same on both sides; traced. 0 reads as 1, as in ``logprobs``.
      direction: ``"reverse"`` or ``"forward"``.
      chunk_size: tokens at a time; static.
      head_is_embedding: the heads are embedding tables, [V, D]; static.
      mask: bool [...]; where it is false the result is 0, with gradient 0, whatever the states.

    Returns:
      float32 (or float64) [...].

    Raises:
      TypeError: if an array is not floating or ``mask`` not bool.
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
    h, ref_h = jnp.asarray(hidden), jax.lax.stop_gradient(jnp.asarray(ref_hidden))
    w, axis = _matrix("head", head, head_is_embedding)
    ref_w, ref_axis = _matrix("ref_head", ref_head, head_is_embedding)
    ref_w = jax.lax.stop_gradient(ref_w)
    checks.shape("ref_hidden", ref_h, (*h.shape[:-1], *ref_h.shape[-1:]), like="hidden")
    vocabulary = w.shape[1 - axis]
    for name, matrix, at, states in (("head", w, axis, h), ("ref_head", ref_w, ref_axis, ref_h)):
        expected = (states.shape[-1], vocabulary)
        checks.shape(name, matrix, expected[::-1] if at else expected)
    for name, array in (("hidden", h), ("head", w), ("ref_hidden", ref_h), ("ref_head", ref_w)):
        checks.real(name, array[:0])
    h, ref_h, m = _masked(mask, h, ref_h, "hidden")
    dtype = _chunked_head.accumulation_dtype(jnp.promote_types(h.dtype, w.dtype))
    # Cast up outside and back inside: the chunks' head gradients add up in the wide dtype.
    wide, scale = w.astype(dtype), _scale(temperature, dtype)

    def logits(states, matrix, feature):
        axes = (((states.ndim - 1,), (feature,)), ((), ()))
        return jax.lax.dot_general(states, matrix, axes, preferred_element_type=dtype) * scale

    def body(rows):
        states, ref_states = rows
        policy = logits(states, wide.astype(w.dtype), axis)
        reference = logits(ref_states, ref_w, ref_axis)
        return _divergence(policy, reference, direction)

    out = body((h, ref_h)) if h.ndim == 1 else _in_chunks(body, (h, ref_h), chunk_size)
    return out if m is None else jnp.where(m, out, 0.0)

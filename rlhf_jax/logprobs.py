"""Tempered token log-probabilities and entropy: from logits, or chunked from hidden states × head.

The policy being trained is the *tempered* one, ``log_softmax(logits / τ)`` in float32, and this
module is the only place that computes it: sampler, learner and reference go through it, so a ratio
of 1 is exactly 1. The shift between logits and tokens is made here once (:func:`token_log_probs`,
:func:`policy_log_probs`).

τ = 0 means greedy sampling: the log-probs are those of the untempered softmax.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax import _chunked_head, checks

__all__ = [
    "LogProbs",
    "chunked",
    "entropy_from_logits",
    "from_logits",
    "policy_log_probs",
    "token_log_probs",
]

Scalar = float | jax.Array
Head = jax.Array | tuple[jax.Array, str]
_PER_TOKEN = "logits without the vocabulary axis"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LogProbs:
    """Log-probabilities of labels and, where asked for, the entropy of their distributions.

    Args:
      log_probs: float32 ``[...]``.
      entropy: float32 ``[...]`` in nats, or None.
    """

    log_probs: jax.Array
    entropy: jax.Array | None = None


def _tempered(logits: jax.Array, temperature: Scalar, mask: jax.Array | None) -> jax.Array:
    logits = checks.real("logits", logits)
    if mask is not None:
        mask = checks.boolean("mask", mask)
        checks.shape("mask", mask, logits.shape[:-1], like=_PER_TOKEN)
        # Before any arithmetic: a NaN in a padded position must not reach the gradient.
        logits = jnp.where(mask[..., None], logits, 0.0)
    scale = _chunked_head.inverse_temperature(temperature, logits.dtype)
    if scale.ndim:
        scale = jnp.broadcast_to(scale, logits.shape[:-1])[..., None]
    return logits * scale


def from_logits(
    logits: jax.Array,
    labels: jax.Array,
    *,
    temperature: Scalar = 1.0,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Log-probability of each label under the tempered softmax.

    ``log π(y) = z_y/τ − log Σ_v exp(z_v/τ)``, in float32 whatever the logits' dtype.

    Args:
      logits: float ``[..., V]``.
      labels: int ``[...]``, ids in ``[0, V)``. That is not checked: where a label is no id (a
        padding's −100, say) the result means nothing and has to be masked.
      temperature: scalar, or broadcastable to ``labels``; traced, never differentiated. 0 means
        the untempered softmax.
      mask: bool ``[...]`` or None. Where false the result is 0, with gradient 0, even if the
        logits there are NaN.

    Returns:
      float32 ``[...]`` (float64 for float64 logits). Differentiable in ``logits``.

    Raises:
      ValueError: shapes that do not fit; TypeError: logits that are no floats, labels no integers.

    Example:
      >>> import jax.numpy as jnp
      >>> print(from_logits(jnp.array([[2.0, 1.0, 0.0]]), jnp.array([0])).round(4))
      [-0.4076]
    """
    labels = checks.integer("labels", labels)
    checks.shape("labels", labels, jnp.shape(logits)[:-1], like=_PER_TOKEN)
    z = _tempered(logits, temperature, mask)
    # Relative to the maximum, so that likely tokens keep their digits; its gradient cancels.
    z = z - jax.lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True))
    log_probs = _chunked_head.select(z, labels) - jnp.log(jnp.sum(jnp.exp(z), axis=-1))
    return log_probs if mask is None else jnp.where(mask, log_probs, 0.0)


def entropy_from_logits(
    logits: jax.Array, *, temperature: Scalar = 1.0, mask: jax.Array | None = None
) -> jax.Array:
    """Entropy of the tempered softmax, in nats.

    ``H = log Σ_v exp(z_v/τ) − Σ_v p_v·z_v/τ``.

    Args:
      logits: float ``[..., V]``; −inf marks an impossible token, which adds nothing.
      temperature: as in :func:`from_logits`.
      mask: bool ``[...]`` or None; where false the entropy is 0, with gradient 0.

    Returns:
      float32 ``[...]``. Differentiable in ``logits``.

    Raises:
      ValueError: shapes that do not fit; TypeError: logits that are no floats.

    Example:
      >>> import jax.numpy as jnp
      >>> print(entropy_from_logits(jnp.zeros((1, 4))).round(4))
      [1.3863]
    """
    z = _tempered(logits, temperature, mask)
    log_p = jax.nn.log_softmax(z, axis=-1)
    # 0·log 0 = 0, and its gradient too: the where is on the input of the product.
    possible = z > -jnp.inf
    plogp = jnp.where(possible, jnp.exp(log_p) * jnp.where(possible, log_p, 0.0), 0.0)
    entropy = -jnp.sum(plogp, axis=-1)
    return entropy if mask is None else jnp.where(mask, entropy, 0.0)


def token_log_probs(
    logits: jax.Array,
    tokens: jax.Array,
    *,
    temperature: Scalar = 1.0,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Log-prob of every token given the tokens before it: the one shift, from logits.

    ``out[b, t] = log π(tokens[b, t] | tokens[b, :t])``, read from ``logits[b, t−1]``;
    ``out[:, 0] = 0``.

    Args:
      logits: float ``[B, T, V]``; ``logits[:, t]`` scores the token at ``t + 1``.
      tokens: int ``[B, T]``.
      temperature: as in :func:`from_logits`.
      mask: bool ``[B, T]`` or None, aligned with ``tokens``; where false the result is 0.

    Returns:
      float32 ``[B, T]``, aligned with ``tokens``.

    Raises:
      ValueError, TypeError: as :func:`from_logits`.

    Example:
      >>> import jax.numpy as jnp
      >>> logits = jnp.array([[[0.0, 0.0], [5.0, 0.0], [9.0, 9.0]]])
      >>> print(token_log_probs(logits, jnp.array([[1, 1, 0]])).round(4))
      [[ 0.     -0.6931 -0.0067]]
    """
    checks.rank("logits", logits, 3, axes="[B, T, V]")
    tokens = checks.integer("tokens", tokens, ndim=2, axes="[B, T]")
    checks.shape("tokens", tokens, logits.shape[:-1], like=_PER_TOKEN)
    log_probs = from_logits(
        logits[:, :-1],
        tokens[:, 1:],
        temperature=temperature,
        mask=None if mask is None else mask[:, 1:],
    )
    return jnp.pad(log_probs, ((0, 0), (1, 0)))


def chunked(
    hidden: jax.Array,
    head: Head,
    labels: jax.Array,
    *,
    temperature: Scalar = 1.0,
    bias: jax.Array | None = None,
    head_is_embedding: bool = False,
    with_entropy: bool = False,
    chunk_size: int | None = None,
    vocab_chunk: int | None = None,
    gradient_dtype: Any = None,
) -> LogProbs:
    """Log-probs (and entropy) from hidden states × head, without ever holding all the logits.

    ``z = hidden·W + b``, then as :func:`from_logits`. Blocks of ``chunk_size`` tokens are scanned;
    a block's logits live only inside its step, forward and backward (custom VJP). With a frozen
    head, ``∂log π/∂hidden = (W_y − Σ_v p_v·W_v)/τ`` is kept from the forward pass, so that the
    backward pass needs no logits; gradients of the head are only computed if they are asked for.
    Reverse mode only: ``jax.jvp`` and second derivatives need :func:`from_logits`.

    Args:
      hidden: float ``[..., D]``. bf16 inputs are multiplied as such and accumulated in float32;
        gradients are as near to the truth as those of :func:`from_logits` on the same inputs.
        With a batch that is sharded over devices keep the batch axis, ``[B, T, D]``: blocks are
        cut along ``T``.
      head: float ``[D, V]``, or ``[V, D]`` with ``head_is_embedding``; may be sharded over ``V``.
        Or what ``model.head(params)`` gives: ``(matrix, "dv")`` or ``(matrix, "vd")``.
      labels: int ``[...]``.
      temperature: scalar, or broadcastable to ``labels``; traced, never differentiated. 0 means
        the untempered softmax.
      bias: float ``[V]`` or None.
      head_is_embedding: static; the head is a tied embedding ``[V, D]``, used as it lies.
      with_entropy: static; also return the entropy (differentiable).
      chunk_size: static; tokens a block, all rows together. Default: as many as keep a block's
        float32 logits within 64 MiB.
      vocab_chunk: static; also cut the vocabulary (online log-sum-exp). For one device with a
        very large vocabulary; leave it None when the head is sharded over its vocabulary.
      gradient_dtype: static; dtype to which the logits' gradients are rounded before their products
        with head and hidden states. None keeps their digits, which takes two products instead of
        one if head and hidden states are bf16. ``jnp.bfloat16`` saves those, for one more rounding
        to 2⁻⁹ inside the gradients.

    Returns:
      :class:`LogProbs` of float32 ``[...]`` arrays.

    Raises:
      ValueError: shapes that do not fit or a chunk below 1; TypeError: wrong dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> hidden, head = jnp.ones((1, 3, 2)), jnp.array([[1.0, 0.0], [1.0, 0.0]])
      >>> out = chunked(hidden, head, jnp.zeros((1, 3), int), with_entropy=True)
      >>> print(out.log_probs.round(4), out.entropy.round(4))
      [[-0.1269 -0.1269 -0.1269]] [[0.3653 0.3653 0.3653]]
    """
    if isinstance(head, tuple):
        head, layout = head
        checks.one_of("head's layout", layout, ("dv", "vd"))
        head_is_embedding = layout == "vd"
    hidden, head, labels = jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(labels)
    bias = None if bias is None else jnp.asarray(bias)
    gradient_dtype = None if gradient_dtype is None else jnp.dtype(gradient_dtype)
    _check_chunked(hidden, head, labels, bias, head_is_embedding, chunk_size, vocab_chunk)
    vocab = head.shape[0 if head_is_embedding else 1]
    if 0 in labels.shape:
        zeros = jnp.zeros(labels.shape, _chunked_head.accumulation_dtype(hidden.dtype))
        return LogProbs(log_probs=zeros, entropy=zeros if with_entropy else None)
    # Blocks are cut along the last token axis; every axis before it stays whole (and sharded).
    squeeze = hidden.ndim == 1
    if squeeze:
        hidden, labels = hidden[None], labels[None]
    spec = _chunked_head.plan(
        labels.shape,
        vocab,
        chunk_size,
        vocab_chunk,
        head_is_embedding,
        with_entropy,
        gradient_dtype,
    )
    dtype = _chunked_head.accumulation_dtype(hidden.dtype)
    scale = _chunked_head.inverse_temperature(temperature, dtype)
    scale = jnp.broadcast_to(scale, labels.shape)
    out: Any = _chunked_head.head_log_probs(spec, hidden, head, bias, labels, scale)
    log_probs, entropy = out
    if squeeze:
        log_probs, entropy = log_probs[0], None if entropy is None else entropy[0]
    return LogProbs(log_probs=log_probs, entropy=entropy)


def policy_log_probs(
    hidden: jax.Array,
    head: Head,
    tokens: jax.Array,
    *,
    start: int = 0,
    temperature: Scalar = 1.0,
    **options: Any,
) -> LogProbs:
    """Log-prob of every token given the tokens before it: the one shift, from hidden states.

    ``out[b, t] = log π(tokens[b, t] | tokens[b, :t])``, read from ``hidden[b, t−1]``. Positions
    before ``max(start, 1)`` are 0 and cost nothing: the head is not computed there.

    Args:
      hidden: float ``[B, T, D]``, after the final norm.
      head: as in :func:`chunked`.
      tokens: int ``[B, T]``.
      start: static; the first position that may hold a completion token (the prompt bucket).
      temperature: as in :func:`chunked`; a scalar, or ``[B, 1]`` for one temperature a row.
      **options: ``bias``, ``head_is_embedding``, ``with_entropy``, ``chunk_size``,
        ``vocab_chunk``, ``gradient_dtype`` of :func:`chunked`.

    Returns:
      :class:`LogProbs` of float32 ``[B, T]`` arrays, aligned with ``tokens``.

    Raises:
      ValueError, TypeError: as :func:`chunked`; ValueError for a ``start`` outside ``[0, T]``.

    Example:
      >>> import jax.numpy as jnp
      >>> hidden, head = jnp.ones((1, 3, 2)), jnp.array([[1.0, 0.0], [1.0, 0.0]])
      >>> print(policy_log_probs(hidden, head, jnp.array([[1, 0, 0]]), start=2).log_probs.round(4))
      [[ 0.      0.     -0.1269]]
    """
    checks.rank("hidden", hidden, 3, axes="[B, T, D]")
    tokens = checks.integer("tokens", tokens, ndim=2, axes="[B, T]")
    checks.shape("tokens", tokens, hidden.shape[:-1], like="hidden without its feature axis")
    if not 0 <= start <= tokens.shape[1]:
        raise ValueError(
            f"start={start} is outside [0, T={tokens.shape[1]}]; pass the width of the prompt "
            "bucket, the first column that can hold a completion token"
        )
    first = max(start, 1)
    out = chunked(
        hidden[:, first - 1 : -1], head, tokens[:, first:], temperature=temperature, **options
    )
    return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (tokens.shape[1] - x.shape[1], 0))), out)


def _check_chunked(hidden, head, labels, bias, head_is_embedding, chunk_size, vocab_chunk) -> None:
    checks.real("hidden", hidden)
    checks.real("head", head, ndim=2, axes="[D, V], or [V, D] with head_is_embedding=True")
    checks.integer("labels", labels)
    checks.shape("labels", labels, hidden.shape[:-1], like="hidden without its feature axis")
    features, vocab = head.shape[::-1] if head_is_embedding else head.shape
    if features != hidden.shape[-1]:
        raise ValueError(
            f"head has shape {head.shape}, which gives {features} features for hidden states of "
            f"{hidden.shape[-1]}; a head is [D, V], or [V, D] with head_is_embedding=True"
        )
    if bias is not None:
        checks.shape("bias", checks.real("bias", bias), (vocab,), like="the head's vocabulary")
    for name, size in (("chunk_size", chunk_size), ("vocab_chunk", vocab_chunk)):
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be at least 1, or None for the default")

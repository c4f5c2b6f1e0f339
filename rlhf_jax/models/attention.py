"""Softmax attention in parts, the same arithmetic for the learner and for one decode step.

A sampler's log-probs are compared with the learner's, and rounding differences grow from layer to
layer. So both sum in the same order: prompt keys and completion keys are summed apart, each part is
filled up to whole blocks, and the parts are merged (as in online softmax, Milakov and Gimelshein
2018).

Letters for dimensions: as in :mod:`rlhf_jax.models.layers`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax._token_pieces import Pieces

Array = jax.Array

NEGATIVE = -0.7 * float(jnp.finfo(jnp.float32).max)  # finite: a fully masked row stays finite

_BLOCK, _NARROW = 64, 32
"""Keys are filled up to whole blocks: a CPU sums any number of them in one order. Where each query
head has narrower keys of its own (a toy model, which would pay the most) smaller ones do."""


@jax.custom_jvp
def settled(x: Array) -> Array:
    """x, computed and rounded here: a select that XLA cannot fold ends the fusion before it."""
    return jnp.where(x == x, x, jnp.nan)


@settled.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return settled(*primals), tangents[0]


class Partial(NamedTuple):
    """Softmax over some of the keys: Σ wᵢ·vᵢ, max score and Σ wᵢ with wᵢ = exp(scoreᵢ − max)."""

    out: Array
    top: Array
    total: Array


def split_groups(q: Array, kv_heads: int) -> Array:
    """[..., N, H] → [..., K, Q, H]: query head n reads key/value head n // Q."""
    return q.reshape(*q.shape[:-2], kv_heads, q.shape[-2] // kv_heads, q.shape[-1])


def block_of(q: Array) -> int:
    """How many keys are a block for queries ``[…, Q, T, H]``."""
    return _BLOCK // 8 if q.shape[-1] < _NARROW and q.shape[-3] == 1 else _BLOCK


def fill(x: Array, axis: int, block: int) -> Array:
    """Zeros at the end of an axis of keys, up to whole blocks."""
    missing = -x.shape[axis] % block
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def partial_softmax(
    q: Array,
    keys: Array,
    values: Array,
    valid: Array,
    key_scales: Array | None = None,
    value_scales: Array | None = None,
) -> Partial:
    """softmax(q·keysᵀ/√H)·values over some of the keys, to be merged.

    Args:
      q: ``[…, Q, T, H]``.
      keys, values: ``[…, S, H]``, filled.
      valid: bool, broadcastable to ``[…, Q, T, S]``.
      key_scales, value_scales: float32 ``[…, S, 1]`` of an int8 cache, or None.

    Returns:
      :class:`Partial`, float32 ``[…, Q, T, H]``, ``[…, Q, T, 1]`` and ``[…, Q, T, 1]``.
    """
    if q.shape[-3] * q.shape[-2] == 1:  # a CPU multiplies one row in another order than several
        twice = jnp.concatenate((q, q), axis=-2)
        both = partial_softmax(twice, keys, values, valid, key_scales, value_scales)
        return Partial(*(x[..., :1, :] for x in both))
    wide: Any = dict(preferred_element_type=jnp.float32)
    scores = jnp.einsum("...qth,...sh->...qts", q.astype(keys.dtype), keys, **wide)
    if key_scales is not None:
        scores = scores * key_scales[..., None, None, :, 0]
    scores = jnp.where(valid, scores * q.shape[-1] ** -0.5, NEGATIVE)
    top = jax.lax.stop_gradient(settled(scores).max(-1, keepdims=True))
    weights = jnp.exp(scores - top)
    total = settled(weights).sum(-1, keepdims=True)
    if value_scales is not None:
        weights = weights * value_scales[..., None, None, :, 0]
    weights = weights.astype(q.dtype).astype(values.dtype)
    return Partial(jnp.einsum("...qts,...sh->...qth", weights, values, **wide), top, total)


def merge(parts: list[Partial]) -> Array:
    """The softmax over all the keys; a part without a valid key vanishes against one that has."""
    if len(parts) == 1:
        return parts[0].out / parts[0].total
    top = functools.reduce(jnp.maximum, [part.top for part in parts])
    factors = [jnp.exp(part.top - top) for part in parts]
    both = [(settled(p.out * f), settled(p.total * f)) for p, f in zip(parts, factors, strict=True)]
    out, total = jax.tree.map(lambda *terms: sum(terms), *both)
    return out / total


def masked_attention(
    q: Array, k: Array, v: Array, mask: Array, split: int = 0, *, together: bool = False
) -> Array:
    """softmax(q·kᵀ/√H + mask)·v with scores and softmax in float32.

    Args:
      q: ``[B, T, N, H]``.
      k, v: ``[B, S, K, H]``.
      mask: bool ``[B, T, S]``, true where the query may read the key; a row without any true is
        finite (a mean over keys), never NaN.
      split: static; keys before it (prompts) and from it on (completions) are summed apart, and
        queries before it read no later keys; 0 for one sum.
      together: static; compute all queries at once, for those that several devices share. They sum
        in the same order.

    Returns:
      ``[B, T, N, H]`` in the dtype of q.
    """
    grouped = split_groups(q, k.shape[-2]).transpose(0, 2, 3, 1, 4)
    k, v, mask = k.swapaxes(1, 2), v.swapaxes(1, 2), mask[:, None, None]
    block = block_of(grouped)

    def over(queries: slice, keys: slice) -> Partial:
        part, values = (fill(x[:, :, keys], 2, block) for x in (k, v))
        valid = fill(mask[..., queries, keys], 4, block)
        return partial_softmax(grouped[..., queries, :], part, values, valid)

    prompt, completion = slice(0, split), slice(split, None)
    everyone = slice(None)
    if together and 0 < split < k.shape[2]:
        out = merge([over(everyone, prompt), over(everyone, completion)])
    elif 0 < split < k.shape[2]:  # no prompt reads its completion
        out = jnp.concatenate(
            (
                merge([over(prompt, prompt)]),
                merge([over(completion, prompt), over(completion, completion)]),
            ),
            axis=-2,
        )
    else:
        out = merge([over(everyone, everyone)])
    return out.astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(q.shape)


def attention_in_pieces(
    pieces: Pieces, q: Array, k: Array, v: Array, mask: Array, split: int = 0
) -> Array:
    """:func:`masked_attention` of rows cut into pieces: keys and values are gathered, not queries.

    Args:
      pieces: which devices hold what.
      q: ``[B·S, T/S, N, H]``.
      k, v: ``[B·S, T/S, K, H]``.
      mask: bool ``[B, T, T]``.
      split: as there.

    Returns:
      ``[B·S, T/S, N, H]`` in the dtype of q.
    """
    rows, tokens, heads = pieces.rows or None, pieces.tokens, pieces.heads
    q = pieces.place(pieces.unfold(q), rows, tokens, heads)
    k, v = (pieces.place(pieces.unfold(x), rows, None, heads) for x in (k, v))
    out = masked_attention(q, k, v, mask, split, together=True)
    return pieces.fold(pieces.place(out, rows, tokens, heads))


def attention_inputs(
    batch: int,
    length: int,
    attention_mask: Array | None,
    positions: Array | None,
    segment_ids: Array | None,
) -> tuple[Array, Array, Array]:
    """Who may read whom, and where everybody stands.

    A query reads a key when the key is not later, is a real token and is of the same segment; its
    place is the number of real tokens of its segment before it.

    Returns:
      mask bool ``[B, T, T]``, positions int ``[B, T]`` (the places, unless given) and places int32
      ``[B, T]``.
    """
    index = jnp.arange(length)
    mask = jnp.broadcast_to(index[:, None] >= index[None, :], (batch, length, length))
    if attention_mask is not None:
        mask = mask & attention_mask[:, None, :].astype(bool)
    if segment_ids is not None:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    if attention_mask is None and segment_ids is None:
        places = jnp.broadcast_to(index, (batch, length))
    else:
        places = jnp.maximum(jnp.sum(mask, axis=-1, dtype=jnp.int32) - 1, 0)
    return mask, places if positions is None else positions, places


def within(mask: Array, places: Array, window: Array | None) -> Array:
    """`mask` without the keys that lie `window` or more real tokens back; None: no such limit."""
    if window is None:
        return mask
    return mask & (places[:, :, None] - places[:, None, :] < window)

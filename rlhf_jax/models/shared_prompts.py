"""Each prompt of a group once, in the learner as in the sampler.

G neighbouring rows with one prompt of S columns and completions of C columns become one row::

    [prompt | completion 0 | … | completion G−1]        [P, S + G·C, …]

Everything but attention works on single tokens and sees fewer of them; completions read the
prompt's keys, which are there once, and their own. The same function of the parameters as with a
prompt in every row, and the same gradient (the idea is that of Prefix Grouper, Liu et al. 2025).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlhf_jax.models.attention import (
    block_of,
    fill,
    masked_attention,
    merge,
    partial_softmax,
    split_groups,
)

Array = jax.Array


def check(rows: int, length: int, split: int, group_size: int, packed: bool, kernel: str) -> None:
    """Refuse rows that are no groups with prompts in columns of their own.

    Raises:
      ValueError: naming what does not fit.
    """
    if group_size < 1 or rows % group_size:
        raise ValueError(
            f"group_size: {rows} rows are no whole groups of {group_size}; give the number of "
            "neighbouring rows that share a prompt, or 1"
        )
    if group_size == 1:
        return
    if not 0 < split < length:
        raise ValueError(
            f"group_size: {group_size} with split={split} of {length} columns; prompts can only "
            "be shared if they end in one column before the last (batch.start)"
        )
    if packed:
        raise ValueError(
            f"group_size: {group_size} with segment_ids; packed rows have their prompts in them, "
            "so use group_size=1"
        )
    if kernel not in ("xla", "auto"):
        raise ValueError(
            f"group_size: {group_size} with attention={kernel!r}; that kernel knows no shared "
            "prompts: use attention='xla', or group_size=1"
        )


def fold(x: Array, split: int, group_size: int) -> Array:
    """``[P·G, S + C, …]`` → ``[P, S + G·C, …]``: prompts of each group's first row."""
    if group_size == 1:
        return x
    x = x.reshape(-1, group_size, *x.shape[1:])
    completions = x[:, :, split:].reshape(x.shape[0], -1, *x.shape[3:])
    return jnp.concatenate((x[:, 0, :split], completions), axis=1)


def unfold(x: Array, split: int, group_size: int) -> Array:
    """``[P, S + G·C, …]`` → ``[P·G, S + C, …]``: every row gets its prompt back."""
    if group_size == 1:
        return x
    count, tail = x.shape[0], x.shape[2:]
    prompts = jnp.broadcast_to(x[:, None, :split], (count, group_size, split, *tail))
    completions = x[:, split:].reshape(count, group_size, -1, *tail)
    return jnp.concatenate((prompts, completions), axis=2).reshape(count * group_size, -1, *tail)


def attention(q: Array, k: Array, v: Array, mask: Array, split: int, group_size: int) -> Array:
    """Attention of folded rows, summed in the order of :func:`masked_attention` with a split.

    Args:
      q: ``[P, S + G·C, N, H]``.
      k, v: ``[P, S + G·C, K, H]``.
      mask: bool ``[P·G, S + C, S + C]``, of the rows before they were folded.
      split: S.
      group_size: G.

    Returns:
      ``[P, S + G·C, N, H]`` in the dtype of q.
    """
    if group_size == 1:
        return masked_attention(q, k, v, mask, split)
    count, kv_heads = q.shape[0], k.shape[-2]
    mask = mask.reshape(count, group_size, *mask.shape[1:])
    prompt, rest = slice(0, split), slice(split, None)
    of_prompts = masked_attention(
        q[:, prompt], k[:, prompt], v[:, prompt], mask[:, 0, prompt, prompt]
    )

    def by_completion(x: Array) -> Array:  # [P, G·C, K, …, H] → [P, K, G, …, C, H]
        x = x[:, rest].reshape(count, group_size, -1, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 2, -2), 2, 1)

    queries = by_completion(split_groups(q, kv_heads))  # [P, K, G, Q, C, H]
    block = block_of(queries)
    shared_k, shared_v = (fill(x[:, prompt].swapaxes(1, 2), 2, block) for x in (k, v))
    own_k, own_v = (fill(by_completion(x), 3, block) for x in (k, v))
    reads = mask[:, None, :, None, rest]  # [P, 1, G, 1, C, S + C]
    # Against the prompt all queries of a group are one product: [P, K, G·Q, C, H].
    lead = (*queries.shape[:2], -1)
    valid = jnp.broadcast_to(reads[..., prompt], (*queries.shape[:-1], split))
    of_shared = partial_softmax(
        queries.reshape(*lead, *queries.shape[4:]),
        shared_k,
        shared_v,
        fill(valid.reshape(*lead, *valid.shape[4:]), 4, block),
    )
    of_shared = jax.tree.map(lambda x: x.reshape(*queries.shape[:5], -1), of_shared)
    of_own = partial_softmax(queries, own_k, own_v, fill(reads[..., rest], 5, block))
    out = merge([of_shared, of_own]).astype(q.dtype)
    out = jnp.moveaxis(jnp.moveaxis(out, 1, 2), -2, 2)  # [P, G, C, K, Q, H]
    return jnp.concatenate((of_prompts, out.reshape(count, -1, *q.shape[2:])), axis=1)

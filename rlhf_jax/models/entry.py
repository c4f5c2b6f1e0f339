"""What the decoder is given must fit together: static checks, whose errors name the argument."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.models.cache import Cache
from rlhf_jax.models.stacks import depth

Array = jax.Array


def check_entry(
    params: dict[str, Any],
    tokens: Array | None,
    inputs: Array | None = None,
    start: int = 0,
    end: int | None = None,
    width: int = 0,
) -> Array:
    """Tokens or inputs ``[B, T, width]``, whichever there is, and a range of stacks that exists."""
    count = len(params["layers"])
    end = count if end is None else end
    if not 0 <= start <= end <= count:
        raise ValueError(
            f"from_stack, to_stack: got {start}, {end}; the parameters have {count} stacks"
        )
    if (tokens is None) == (inputs is None) or (start > 0) != (inputs is not None):
        raise ValueError(
            "tokens, inputs: give tokens to start at the embedding (from_stack=0), or inputs "
            "with tokens=None to start at a later stack"
        )
    if tokens is not None:
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                f"tokens: got {tokens.dtype}{list(tokens.shape)}; give integers [B, T]"
            )
        return tokens
    assert inputs is not None
    if inputs.ndim != 3 or inputs.shape[-1] != width:
        raise ValueError(f"inputs: shape {inputs.shape}; give [B, T, {width}]")
    return inputs


def check_shapes(shape: tuple[int, ...], **arrays: Any) -> None:
    """Each array that is given has the shape of the tokens."""
    for name, value in arrays.items():
        if value is not None and value.shape != shape:
            raise ValueError(f"{name}: shape {value.shape} does not agree with tokens {shape}")


def check_decode(stacks: tuple[Any, ...], token: Array, cache: Cache) -> None:
    """The parameters, the token and the cache must belong together."""
    ours = tuple(depth(stack) for stack in stacks)
    theirs = tuple(depth(held) for held in cache.keys)
    if ours != theirs:
        raise ValueError(
            f"cache: its layers are grouped as {theirs}, the parameters' as {ours}; "
            "prefill and decode take the same parameters"
        )
    rows = jax.tree.leaves(cache.keys[0])[0].shape[1:3]
    if token.shape != rows:
        raise ValueError(f"token: shape {token.shape}; the cache has [P, G] = {list(rows)}")

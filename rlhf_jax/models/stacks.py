"""Layers as stacks: trees whose leaves have the layers of one stack as their leading axis."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def depth(stack: Any) -> int:
    """Layers in a stack."""
    return jax.tree.leaves(stack)[0].shape[0]


def restack(stacks: tuple[Any, ...], sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Regroup stacked trees along their leading axis."""
    if tuple(depth(stack) for stack in stacks) == sizes:
        return tuple(stacks)
    bounds = np.cumsum((0, *sizes)).tolist()
    starts = np.cumsum((0, *(depth(stack) for stack in stacks))).tolist()

    def piece(a: int, b: int, *leaves: Any) -> Any:
        cut = [
            leaf[max(a - start, 0) : b - start]
            for leaf, start, end in zip(leaves, starts[:-1], starts[1:], strict=True)
            if start < b and end > a
        ]
        joined = np if all(isinstance(part, np.ndarray) for part in cut) else jnp
        return cut[0] if len(cut) == 1 else joined.concatenate(cut, axis=0)

    return tuple(
        jax.tree.map(lambda *leaves, a=a, b=b: piece(a, b, *leaves), *stacks)
        for a, b in itertools.pairwise(bounds)
    )


def per_layer(values: tuple[int, ...] | None, stacks: tuple[Any, ...]) -> list[Any]:
    """One number per layer as an int32 ``[n]`` beside each stack; None beside each for None."""
    if values is None:
        return [None] * len(stacks)
    ends = np.cumsum([0, *map(depth, stacks)]).tolist()
    return [jnp.array(values[a:b], jnp.int32) for a, b in itertools.pairwise(ends)]


def scan(body: Callable[..., tuple[Array, Any]], x: Array, xs: Any) -> tuple[Array, Any]:
    """``jax.lax.scan`` over a stack, but a single layer is not put into a loop.

    Scanning inside a decode loop copies each layer's weights once a step. Measured on CPU that is
    no slower for SmolLM2-135M than an unrolled loop, and compiles several times faster; a model of
    8M parameters decodes about a tenth faster as stacks of single layers.
    """
    if depth(xs) > 1:
        return jax.lax.scan(body, x, xs)
    x, kept = body(x, jax.tree.map(lambda leaf: leaf[0], xs))
    return x, jax.tree.map(lambda leaf: leaf[None], kept)

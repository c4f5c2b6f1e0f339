"""What a row samples with. Every option is a traced array: changing one never recompiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from rlhf_jax import checks

__all__ = ["SamplingOptions", "forbid"]

_NO_STOP = -1  # fills stop ids up to a width: no token has this id
_STOP_WIDTH = 8
_LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0, np.inf),
    "top_k": (0, np.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, np.inf),
    "presence_penalty": (-np.inf, np.inf),
    "min_new_tokens": (0, np.inf),
    "max_new_tokens": (0, np.inf),
}
_INTEGERS = ("top_k", "min_new_tokens", "max_new_tokens")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of a draw, each a scalar or one value per row ``[P, 1]`` or ``[P, G]``.

    They apply in this order: bias, repetition and presence penalty, the ban of stop ids below
    ``min_new_tokens``, temperature, top-k, top-p, min-p.

    Args:
      temperature: float32, τ ≥ 0; 0 takes the likeliest token.
      top_k: int32, keep the k likeliest tokens; 0 = off.
      top_p: float32, keep the nucleus of mass p; 1 = off.
      min_p: float32, keep tokens of at least p × the likeliest one's probability; 0 = off.
      repetition_penalty: float32 > 0, divides positive and multiplies negative logits of tokens
        that are in the prompt or the completion so far; 1 = off.
      presence_penalty: float32, subtracted from the logits of tokens in the completion; 0 = off.
      min_new_tokens: int32, no stop id before so many tokens.
      max_new_tokens: int32, the row's own cap.
      stop_ids: int32 ``[n]`` or ``[P, 1 or G, n]``; -1 stands for nothing.
      logit_bias: float32 ``[V]`` or ``[P, 1 or G, V]``, added to the logits, or None.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition_penalty: Any
    presence_penalty: Any
    min_new_tokens: Any
    max_new_tokens: Any
    stop_ids: Any
    logit_bias: Any

    @classmethod
    def make(
        cls,
        *,
        max_new_tokens: ArrayLike,
        temperature: ArrayLike = 1.0,
        top_k: ArrayLike = 0,
        top_p: ArrayLike = 1.0,
        min_p: ArrayLike = 0.0,
        repetition_penalty: ArrayLike = 1.0,
        presence_penalty: ArrayLike = 0.0,
        min_new_tokens: ArrayLike = 0,
        stop_ids: Sequence[int] | ArrayLike = (),
        logit_bias: ArrayLike | None = None,
    ) -> SamplingOptions:
        """Check the values and make arrays of them.

        Args:
          max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
            min_new_tokens: a scalar, or one value per prompt ``[P]`` or per row ``[P, 1 or G]``.
          stop_ids: ``[n]``, or per prompt ``[P, n]``, or per row ``[P, 1 or G, n]``.
          logit_bias: ``[V]``, ``[P, V]`` or ``[P, 1 or G, V]``.

        Returns:
          The options, with the stop ids filled up to a width of 8, 16, 32 …, so that their number
          does not recompile.

        Raises:
          ValueError: for a value out of range, naming the option.

        >>> SamplingOptions.make(max_new_tokens=4, stop_ids=[2]).stop_ids.shape
        (8,)
        """
        given = dict(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            min_new_tokens=min_new_tokens,
            max_new_tokens=max_new_tokens,
        )
        for name, value in given.items():
            _check(name, value)
        scalars = {name: _per_row(value, name in _INTEGERS) for name, value in given.items()}
        bias = None if logit_bias is None else jnp.asarray(logit_bias, jnp.float32)
        return cls(
            **scalars,
            stop_ids=_stop_ids(stop_ids),
            logit_bias=bias[:, None] if bias is not None and bias.ndim == 2 else bias,
        )


def forbid(ids: Sequence[int], vocab_size: int) -> jax.Array:
    """A ``logit_bias`` that makes some tokens impossible.

    Args:
      ids: the forbidden token ids.
      vocab_size: V.

    Returns:
      float32 ``[V]``: -1e30 on the forbidden ids, 0 elsewhere.

    Raises:
      ValueError: for an id outside the vocabulary, or when nothing is left.

    >>> forbid([1], 3).tolist()[0], float(forbid([1], 3)[1]) < -1e29
    (0.0, True)
    """
    from rlhf_jax.sampling.transforms import NEG_INF

    index = np.asarray(ids, np.int64).reshape(-1)
    if index.size and (index.min() < 0 or index.max() >= vocab_size):
        raise ValueError(f"ids: expected ids in [0, {vocab_size}), got {index.tolist()}")
    bias = np.zeros(vocab_size, np.float32)
    bias[index] = NEG_INF
    if not (bias == 0).any():
        raise ValueError("ids: every token is forbidden; leave at least one")
    return jnp.asarray(bias)


def _check(name: str, value: ArrayLike) -> None:
    low, high = _LIMITS[name]
    if not checks.is_concrete(value):
        return
    array = np.asarray(value)
    if not np.all((array >= low) & (array <= high)):
        raise ValueError(f"{name}: expected a value in [{low}, {high}], got {value}")


def _per_row(value: ArrayLike, integer: bool) -> jax.Array:
    array = jnp.asarray(value, jnp.int32 if integer else jnp.float32)
    return array[:, None] if array.ndim == 1 else array


def _stop_ids(ids: Sequence[int] | ArrayLike) -> jax.Array:
    array = jnp.asarray(ids, jnp.int32)
    array = array.reshape(-1) if array.ndim == 0 else array
    width = _STOP_WIDTH
    while width < array.shape[-1]:
        width *= 2
    fill = [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])]
    array = jnp.pad(array, fill, constant_values=_NO_STOP)
    return array[:, None] if array.ndim == 2 else array

"""Checks of arguments: every failure names the argument, what it got and what to do.

Shapes and dtypes are static, so they are checked at trace time too. Values are checked only when
they are known on this host: never on a tracer, never on an array that other hosts hold a part of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike


def describe(x: Any) -> str:
    """Write an array as ``dtype[shape]``, for error messages.

    Args:
      x: anything with a shape and a dtype, or anything at all.

    Returns:
      A short text.

    Example:
      >>> describe(np.zeros((2, 3), np.float32))
      'float32[2,3]'
    """
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{','.join(str(n) for n in x.shape)}]"
    return f"{type(x).__name__} {x!r}"


def is_concrete(x: Any) -> bool:
    """Tell whether the values of ``x`` can be read here and now.

    Args:
      x: an array, a tracer or a Python scalar.

    Returns:
      False for tracers and for arrays whose shards live partly on other hosts.

    Example:
      >>> is_concrete(jnp.ones(2)), bool(jax.eval_shape(lambda x: x, 1.0) is None)
      (True, False)
    """
    if isinstance(x, Tracer):
        return False
    return bool(getattr(x, "is_fully_addressable", True))


def compute_dtype(x: jax.Array) -> Any:
    """Choose the dtype of the arithmetic: float64 stays, everything else becomes float32.

    Args:
      x: a floating array.

    Returns:
      ``jnp.float64`` or ``jnp.float32``.

    Example:
      >>> compute_dtype(jnp.ones(2, jnp.bfloat16)) == jnp.float32
      True
    """
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def _as_array(name: str, x: ArrayLike, expected: str) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        remedy = "Pass one array."
        if isinstance(x, Sequence) and any(item is None for item in x):
            remedy = "Mark missing entries with NaN, or pass valid= with a placeholder."
        raise TypeError(
            f"{name} must be {expected}; got {type(x).__name__} that is no array. {remedy}"
        ) from error


def rank(name: str, x: Any, ranks: int | tuple[int, ...], *, axes: str = "") -> None:
    """Refuse an array of the wrong rank.

    Args:
      name: the argument's name.
      x: an array of any shape.
      ranks: the rank or ranks allowed.
      axes: the shape as the caller's documentation writes it, such as ``"[B, T]"``.

    Raises:
      ValueError: if the rank of ``x`` is not among ``ranks``.

    Example:
      >>> rank("mask", jnp.ones((2, 3)), 2)
    """
    allowed = (ranks,) if isinstance(ranks, int) else ranks
    if jnp.ndim(x) not in allowed:
        wanted = axes or f"of rank {' or '.join(str(r) for r in allowed)}"
        raise ValueError(
            f"{name} must be {wanted}; got {describe(x)} of rank {jnp.ndim(x)}. "
            f"Check the order of the arguments, or reshape {name}."
        )


def shape(name: str, x: Any, expected: tuple[int, ...], *, like: str = "") -> None:
    """Refuse an array of another shape.

    Args:
      name: the argument's name.
      x: an array of any shape.
      expected: the shape it must have.
      like: the argument that sets the shape.

    Raises:
      ValueError: if the shapes differ.

    Example:
      >>> shape("mask", jnp.ones((2, 3)), (2, 3), like="log_probs")
    """
    if tuple(jnp.shape(x)) != tuple(expected):
        source = f" like {like}" if like else ""
        raise ValueError(
            f"{name} must have shape {list(expected)}{source}; got {describe(x)}. "
            f"Check the order of the arguments, or slice or broadcast {name} explicitly."
        )


def real(
    name: str,
    x: ArrayLike,
    *,
    ndim: int | tuple[int, ...] | None = None,
    axes: str = "",
    like: Any = None,
    like_name: str = "",
) -> jax.Array:
    """Check a floating array and convert it to the compute dtype.

    Args:
      name: the argument's name.
      x: floating array of any shape.
      ndim: the rank or ranks allowed, if any.
      axes: the shape as the caller's documentation writes it.
      like: an array whose shape ``x`` must have, if any.
      like_name: the name of ``like``.

    Returns:
      ``x`` in float32, or in float64 if it came in float64.

    Raises:
      TypeError: if ``x`` is of an integer, boolean or complex dtype, or no array.
      ValueError: if rank or shape do not fit.

    Example:
      >>> real("rewards", jnp.ones(2, jnp.bfloat16), ndim=1).dtype
      dtype('float32')
    """
    array = _as_array(name, x, f"a floating array {axes}".rstrip())
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{name} must be a floating array; got {describe(array)}. "
            f"Pass {name}.astype(jnp.float32), and check the order of the arguments."
        )
    if ndim is not None:
        rank(name, array, ndim, axes=axes)
    if like is not None:
        shape(name, array, jnp.shape(like), like=like_name)
    return array.astype(compute_dtype(array))


def boolean(
    name: str,
    x: ArrayLike,
    *,
    ndim: int | tuple[int, ...] | None = None,
    axes: str = "",
    like: Any = None,
    like_name: str = "",
) -> jax.Array:
    """Check a boolean array, such as a mask.

    Args:
      name: the argument's name.
      x: bool array of any shape.
      ndim: the rank or ranks allowed, if any.
      axes: the shape as the caller's documentation writes it.
      like: an array whose shape ``x`` must have, if any.
      like_name: the name of ``like``.

    Returns:
      ``x`` as a jax array.

    Raises:
      TypeError: if the dtype is not bool.
      ValueError: if rank or shape do not fit.

    Example:
      >>> boolean("mask", np.ones((1, 2), bool), ndim=2).shape
      (1, 2)
    """
    array = _as_array(name, x, f"a bool array {axes}".rstrip())
    if array.dtype != jnp.bool_:
        raise TypeError(
            f"{name} must be bool; got {describe(array)}. "
            f"Pass {name}.astype(bool), and check the order of the arguments."
        )
    if ndim is not None:
        rank(name, array, ndim, axes=axes)
    if like is not None:
        shape(name, array, jnp.shape(like), like=like_name)
    return array


def integer(
    name: str,
    x: ArrayLike,
    *,
    ndim: int | tuple[int, ...] | None = None,
    axes: str = "",
    like: Any = None,
    like_name: str = "",
) -> jax.Array:
    """Check an integer array, such as token ids, group ids or lengths.

    Args:
      name: the argument's name.
      x: integer array of any shape.
      ndim: the rank or ranks allowed, if any.
      axes: the shape as the caller's documentation writes it.
      like: an array whose shape ``x`` must have, if any.
      like_name: the name of ``like``.

    Returns:
      ``x`` as a jax array.

    Raises:
      TypeError: if the dtype is not an integer one.
      ValueError: if rank or shape do not fit.

    Example:
      >>> integer("group_ids", [0, 0, 1], ndim=1).shape
      (3,)
    """
    array = _as_array(name, x, f"an integer array {axes}".rstrip())
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"{name} must be an integer array; got {describe(array)}. "
            f"Pass {name}.astype(jnp.int32), and check the order of the arguments."
        )
    if ndim is not None:
        rank(name, array, ndim, axes=axes)
    if like is not None:
        shape(name, array, jnp.shape(like), like=like_name)
    return array


def one_of(name: str, value: Any, options: Sequence[Any]) -> None:
    """Refuse a name that is not among the known ones.

    Args:
      name: the argument's name.
      value: what was passed.
      options: what is allowed.

    Raises:
      ValueError: if ``value`` is none of ``options``; the text lists them.

    Example:
      >>> one_of("aggregation", "token_mean", ("token_mean", "prompt_mean"))
    """
    if value not in options:
        known = ", ".join(repr(option) for option in options)
        raise ValueError(f"{name} is unknown: got {value!r}. Use one of {known}.")


def number(
    name: str,
    value: Any,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
    remedy: str = "",
) -> None:
    """Refuse a scalar option (or any entry of an array of them) outside its interval.

    Values that cannot be read (tracers) pass; NaN never passes.

    Args:
      name: the argument's name.
      value: a Python number, or an array of any shape.
      above: strict lower bound.
      at_least: lower bound.
      at_most: upper bound.
      below: strict upper bound.
      remedy: what to do, for the error's text.

    Raises:
      TypeError: if ``value`` is no number.
      ValueError: if a value is outside the interval.

    Example:
      >>> number("clip_low", 0.2, above=0.0)
    """
    if not is_concrete(value):
        return
    try:
        if isinstance(value, str):  # NumPy would read "0.2" as a number
            raise TypeError
        got = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be a number; got {type(value).__name__}. {remedy}".rstrip()
        ) from error
    ok = (got > above) | (above == -math.inf)
    ok &= (got >= at_least) & (got <= at_most) & ((got < below) | (below == math.inf))
    if np.all(ok):
        return
    bounds = [
        f"{sign} {bound:g}"
        for sign, bound in ((">", above), ("≥", at_least), ("≤", at_most), ("<", below))
        if math.isfinite(bound)
    ]
    wanted = " and ".join(bounds) or "a number that is not NaN"
    raise ValueError(f"{name} must be {wanted}; got {value}. {remedy}".rstrip())


def positive(name: str, value: Any, *, remedy: str = "") -> None:
    """Refuse values that are not above zero; tracers pass.

    Args:
      name: the argument's name.
      value: a Python number, or an array of any shape.
      remedy: what to do, for the error's text.

    Raises:
      TypeError: if ``value`` is no number.
      ValueError: if a value is ≤ 0 or NaN.

    Example:
      >>> positive("clip_low", 0.2)
    """
    number(name, value, above=0.0, remedy=remedy or f"Pass a positive {name}.")


def non_negative(name: str, value: Any, *, remedy: str = "") -> None:
    """Refuse values below zero; tracers pass.

    Args:
      name: the argument's name.
      value: a Python number, or an array of any shape.
      remedy: what to do, for the error's text.

    Raises:
      TypeError: if ``value`` is no number.
      ValueError: if a value is < 0 or NaN.

    Example:
      >>> non_negative("kl_coef", 0.0)
    """
    number(name, value, at_least=0.0, remedy=remedy or f"Pass {name} ≥ 0.")


def finite(name: str, x: Any, *, where: Any = None, remedy: str = "") -> None:
    """Refuse NaN and infinity among the entries that count; tracers pass.

    Args:
      name: the argument's name.
      x: floating array of any shape.
      where: bool array of the same shape: which entries count (all by default).
      remedy: what to do, for the error's text.

    Raises:
      ValueError: if such an entry is not finite; the text gives the first index.

    Example:
      >>> finite("rewards", jnp.ones(2))
    """
    if not is_concrete(x) or (where is not None and not is_concrete(where)):
        return
    bad = ~np.isfinite(np.asarray(x, dtype=np.float64))
    if where is not None:
        bad &= np.asarray(where)
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{name} must be finite; got {np.asarray(x)[index]} at index {list(index)}, "
            f"{int(bad.sum())} such in all. {remedy}".rstrip()
        )

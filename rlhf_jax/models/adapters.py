"""Anybody's Flax module as a function and a plain parameter pytree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

Array = jax.Array

__all__ = ["from_linen", "from_nnx"]


def from_nnx(module: nnx.Module) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Split a Flax NNX module into ``apply(params, tokens, **kw)`` and its parameters.

    Args:
      module: any NNX module whose call takes the tokens first. State other than ``nnx.Param``
        (statistics, counters, random streams) is kept as it is now: a call never changes it.

    Returns:
      ``(apply, params)``: a pure function, and a plain nested dict of arrays.

    Raises:
      TypeError: not an NNX module.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> apply, params = from_nnx(nnx.Embed(8, 4, rngs=nnx.Rngs(0)))
    >>> apply(params, jnp.zeros((2, 3), jnp.int32)).shape
    (2, 3, 4)
    """
    if not isinstance(module, nnx.Module):
        raise TypeError(f"module: got {type(module).__name__}; give a flax.nnx.Module")
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def apply(params: Any, tokens: Array, **options: Any) -> Any:
        return nnx.merge(graph, params, rest)(tokens, **options)

    return apply, nnx.to_pure_dict(params)


def from_linen(
    module: Any, variables: Any = None, *, key: Array | None = None, tokens: Array | None = None
) -> tuple[Callable[..., Any], Any]:
    """Turn a Flax Linen module into ``apply(params, tokens, **kw)`` and its parameters.

    Args:
      module: any Linen module whose call takes the tokens first.
      variables: what ``module.init`` returned (collections other than ``params`` are held fixed);
        None initialises here, and then needs ``key`` and ``tokens``.
      key: a JAX key for the initialisation.
      tokens: int ``[B, T]``, an example for the initialisation.

    Returns:
      ``(apply, params)``: a pure function, and the ``params`` collection. ``rngs`` may be given to
      ``apply`` by keyword.

    Raises:
      TypeError: not a Linen module.
      ValueError: neither variables nor key and tokens, or variables without ``params``.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen
    >>> ids = jnp.zeros((2, 3), jnp.int32)
    >>> apply, params = from_linen(linen.Embed(8, 4), key=jax.random.key(0), tokens=ids)
    >>> apply(params, ids).shape
    (2, 3, 4)
    """
    from flax import linen

    if not isinstance(module, linen.Module):
        raise TypeError(f"module: got {type(module).__name__}; give a flax.linen.Module")
    if variables is None:
        if key is None or tokens is None:
            raise ValueError("variables: give those of module.init, or key and tokens to make them")
        variables = module.init(key, tokens)
    if "params" not in variables:
        raise ValueError(f"variables: no 'params' collection; it has {sorted(variables)}")
    rest = {name: value for name, value in variables.items() if name != "params"}

    def apply(params: Any, tokens: Array, **options: Any) -> Any:
        return module.apply({"params": params, **rest}, tokens, **options)

    return apply, variables["params"]

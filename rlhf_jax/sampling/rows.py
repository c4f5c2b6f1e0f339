"""The state of rows that are being sampled, and the one step that samples them everywhere.

Per-token arrays are ``[P, G, S]``: entry ``i`` is the row's i-th new token, whatever its prompt.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from rlhf_jax.sampling.options import SamplingOptions
from rlhf_jax.sampling.sample import Drawn, History, sample
from rlhf_jax.types import Params

__all__ = ["Prompts", "Rows", "SamplerModel", "advance", "draw_next", "start"]


class SamplerModel(Protocol):
    """What sampling asks of a model: hashable (static under jit), all state in ``params``.

    ``prefill`` runs every distinct prompt once; ``decode`` advances all completions by one token,
    reading the prompt's keys and values where ``prefill`` left them.
    """

    def prefill(self, params: Params, tokens: jax.Array, attention_mask: jax.Array, /) -> Any:
        """Run ``[P, Tp]`` prompts; give the last hidden state ``[P, D]`` and a prefix."""
        ...

    def init_cache(self, prefix: Any, /, *, group_size: int, max_new_tokens: int) -> Any:
        """Make room for ``max_new_tokens`` of each of the P × G completions."""
        ...

    def decode(self, params: Params, token: jax.Array, cache: Any, step: jax.Array, /) -> Any:
        """Append ``[P, G]`` tokens as number ``step``; give hidden ``[P, G, D]`` and the cache."""
        ...

    def project(self, params: Params, hidden: jax.Array, /) -> jax.Array:
        """Hidden states ``[..., D]`` to float32 logits ``[..., V]``."""
        ...


class Prompts(NamedTuple):
    """What the rows were asked.

    Args:
      tokens: int32 ``[P, Tp]``.
      mask: bool ``[P, Tp]``, true on real tokens.
    """

    tokens: jax.Array
    mask: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows that are being sampled; a pytree, the carry of a decode loop.

    Args:
      step: int32, the number of the next token: a scalar when all rows started together, else
        ``[P, G]``.
      token: int32 ``[P, G]``, the last token.
      tokens, log_probs, truncated_log_probs: ``[P, G, S]``.
      lengths: int32 ``[P, G]``, new tokens so far.
      terminated: bool ``[P, G]``, the row ended with a stop id.
      done: bool ``[P, G]``, terminated or at its cap; such a row does not change any more.
      cache: the model's.
      versions: int32 ``[P, G, S]``, the version of the weights behind each token, or None.
      forced: int32 ``[P, G, S]`` or None: an entry ≥ 0 is written instead of a draw, with
        ``mask`` false and log-prob 0 (a tool's or a user's words).
      mask: bool ``[P, G, S]``, sampled tokens; None when nothing is ever forced.
    """

    step: jax.Array
    token: jax.Array
    tokens: jax.Array
    log_probs: jax.Array
    truncated_log_probs: jax.Array
    lengths: jax.Array
    terminated: jax.Array
    done: jax.Array
    cache: Any
    versions: Any = None
    forced: Any = None
    mask: Any = None


def start(keys: jax.Array, cache: Any, options: SamplingOptions, room: int) -> Rows:
    """Rows before their first token; a row whose cap is 0 is done from the start.

    Args:
      keys: ``[P, G]``, one per row.
      cache: the model's, for these rows.
      options: :class:`SamplingOptions`.
      room: S.

    Returns:
      :class:`Rows` with a scalar step.

    >>> options = SamplingOptions.make(max_new_tokens=3)
    >>> start(jax.random.split(jax.random.key(0), (2, 4)), None, options, 3).tokens.shape
    (2, 4, 3)
    """
    # Buffers grow out of the keys' own rows, so that they inherit the rows' sharding instead of
    # ending up replicated as fresh zeros would inside a loop.
    zero = jnp.zeros_like(jax.random.key_data(keys)[..., 0], jnp.int32)
    buffer = jnp.broadcast_to(zero[..., None], (*keys.shape, room))
    return Rows(
        step=jnp.int32(0),
        token=zero,
        tokens=buffer,
        log_probs=buffer.astype(jnp.float32),
        truncated_log_probs=buffer.astype(jnp.float32),
        lengths=zero,
        terminated=zero > 0,
        done=zero >= options.max_new_tokens,
        cache=cache,
    )


def advance(
    model: SamplerModel,
    params: Params,
    rows: Rows,
    keys: jax.Array,
    options: SamplingOptions,
    prompts: Prompts,
    version: jax.Array | int = 0,
) -> Rows:
    """Decode the last token of every row and draw the next one.

    Args:
      model: a :class:`SamplerModel`.
      params: its parameters.
      rows: :class:`Rows`, each with at least one token.
      keys: ``[P, G]``, one per row.
      options: :class:`SamplingOptions`.
      prompts: :class:`Prompts`.
      version: int32 scalar, recorded where ``rows.versions`` is kept.

    Returns:
      The rows, one token longer; those that are done stay as they are.

    >>> class Cycle:  # after token i comes i + 1
    ...     def decode(self, params, token, cache, step):
    ...         return token, cache
    ...
    ...     def project(self, params, hidden):
    ...         return 99.0 * jax.nn.one_hot(hidden + 1, 9)
    >>> options = SamplingOptions.make(max_new_tokens=4, temperature=0.0)
    >>> keys = jax.random.split(jax.random.key(0), (1, 1))
    >>> prompts = Prompts(jnp.array([[5]]), jnp.array([[True]]))
    >>> rows = advance(Cycle(), None, start(keys, None, options, 4), keys, options, prompts)
    >>> advance(Cycle(), None, rows, keys, options, prompts).tokens.tolist()
    [[[1, 2, 0, 0]]]
    """
    hidden, cache = model.decode(params, rows.token, rows.cache, jnp.maximum(rows.step - 1, 0))
    rows = dataclasses.replace(rows, cache=cache)
    return draw_next(rows, model.project(params, hidden), keys, options, prompts, version)


def draw_next(
    rows: Rows,
    logits: jax.Array,
    keys: jax.Array,
    options: SamplingOptions,
    prompts: Prompts,
    version: jax.Array | int = 0,
) -> Rows:
    """Draw the next token of every row and write it down.

    Args:
      rows: :class:`Rows`.
      logits: float32 ``[P, G, V]``, what the model says after the last token.
      keys, options, prompts, version: as for :func:`advance`.

    Returns:
      The rows, one token longer; those that are done stay as they are.

    >>> options = SamplingOptions.make(max_new_tokens=4, temperature=0.0)
    >>> keys = jax.random.split(jax.random.key(0), (1, 1))
    >>> prompts = Prompts(jnp.array([[5]]), jnp.array([[True]]))
    >>> logits = jnp.array([[[0.0, 1.0, 2.0]]])
    >>> draw_next(start(keys, None, options, 4), logits, keys, options, prompts).token.tolist()
    [[2]]
    """
    history = History(*prompts, tokens=rows.tokens, lengths=rows.lengths)
    drawn = sample(logits, keys, rows.step, options, history)
    return _record(rows, drawn, options, version)


def _record(rows: Rows, drawn: Drawn, options: SamplingOptions, version: Any) -> Rows:
    """Write one token into the rows that are still running; the others stay as they are."""
    running = ~rows.done
    sampled, token, changes = running, drawn.token, {}
    if rows.forced is not None:
        forced = _at(rows.forced, rows.step)
        sampled = running & (forced < 0)
        token = jnp.where(forced < 0, token, forced)
        changes["mask"] = _write(rows.mask, rows.step, running, sampled)
    if rows.versions is not None:
        changes["versions"] = _write(rows.versions, rows.step, running, version)
    lengths = rows.lengths + running
    terminated = rows.terminated | (sampled & drawn.stop)
    zero = jnp.zeros_like(drawn.log_prob)
    for name in ("log_prob", "truncated_log_prob"):
        value = jnp.where(sampled, getattr(drawn, name), zero)
        changes[f"{name}s"] = _write(getattr(rows, f"{name}s"), rows.step, running, value)
    return dataclasses.replace(
        rows,
        step=rows.step + (1 if rows.step.ndim == 0 else running),
        token=jnp.where(running, token, rows.token),
        tokens=_write(rows.tokens, rows.step, running, token),
        lengths=lengths,
        terminated=terminated,
        done=rows.done | terminated | (lengths >= options.max_new_tokens),
        **changes,
    )


def _at(buffer: jax.Array, step: jax.Array) -> jax.Array:
    """Entry ``step`` of every row of ``[P, G, S]``."""
    index = jnp.broadcast_to(step, buffer.shape[:-1])[..., None]
    return jnp.take_along_axis(buffer, index, axis=-1, mode="clip")[..., 0]


def _write(buffer: jax.Array, step: jax.Array, running: jax.Array, value: Any) -> jax.Array:
    """Entry ``step`` of the running rows of ``[P, G, S]`` becomes ``value``."""
    value = jnp.broadcast_to(jnp.asarray(value, buffer.dtype), running.shape)
    if step.ndim == 0:
        value = jnp.where(running, value, jax.lax.dynamic_index_in_dim(buffer, step, 2, False))
        return jax.lax.dynamic_update_index_in_dim(buffer, value, step, axis=2)
    here = (jnp.arange(buffer.shape[-1]) == step[..., None]) & running[..., None]
    return jnp.where(here, value[..., None], buffer)

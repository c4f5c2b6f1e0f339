"""``generate``: prompts in, a :class:`~rlhf_jax.types.Rollout` out, in one jitted call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from rlhf_jax import checks, logprobs
from rlhf_jax.sampling import draw, transforms
from rlhf_jax.types import Params, Rollout

__all__ = ["SamplerModel", "generate"]


class SamplerModel(Protocol):
    """What ``generate`` asks of a model: hashable (static under jit), all state in ``params``.

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


class _Filters(NamedTuple):
    """The traced sampling options: changing them never recompiles."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    stop_ids: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loop:
    """The carry of the decode loop; per-token arrays are ``[P, G, S]``, per-row ones ``[P, G]``."""

    step: jax.Array
    token: jax.Array
    tokens: jax.Array
    log_probs: jax.Array
    truncated_log_probs: jax.Array
    lengths: jax.Array
    terminated: jax.Array
    cache: Any


def generate(
    model: SamplerModel,
    params: Params,
    tokens: ArrayLike,
    attention_mask: ArrayLike,
    key: jax.Array,
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: jax.Array | float = 1.0,
    top_k: jax.Array | int = 0,
    top_p: jax.Array | float = 1.0,
    stop_ids: Sequence[int] | jax.Array = (),
    group_ids: ArrayLike | None = None,
    version: jax.Array | int = 0,
) -> Rollout:
    """Sample ``group_size`` completions of every prompt.

    a_t ~ filter(softmax(logits_t / τ)), until a stop id or ``max_new_tokens``

    Each distinct prompt is prefilled once; the loop ends when the last row has ended. A completion
    is a function of (params, prompt, key, its prompt's id, its number in the group): the other
    rows of the batch do not matter. Compiles once per (model, prompt bucket, rows, group size,
    ``max_new_tokens``, number of stop ids); everything else is traced.

    Args:
      model: a :class:`SamplerModel`, e.g. :class:`rlhf_jax.models.Decoder`.
      params: its parameters.
      tokens: int32 ``[P, Tp]`` prompts, padded on either side.
      attention_mask: bool ``[P, Tp]``, true on real prompt tokens; at least one in a row.
      key: a new-style key; the same key repeats the rollout exactly.
      group_size: G, completions per prompt (static).
      max_new_tokens: S, the length cap of a completion (static).
      temperature: τ ≥ 0; 0 takes the likeliest token, its log-prob is the untempered softmax's.
      top_k: keep the k likeliest tokens; 0 = off.
      top_p: keep the nucleus of mass p; 1 = off.
      stop_ids: token ids that end a completion; they stay in it as its last sampled token.
      group_ids: int32 ``[P]``; 0 … P-1 when None.
      version: version of ``params``, recorded in the rollout.

    Returns:
      A :class:`Rollout` of ``B = P*G`` rows and ``T = Tp + S`` columns, prompt-major.

    Raises:
      ValueError: for shapes that do not fit, a prompt without tokens, or options out of range.
      TypeError: for a mask that is not boolean.

    >>> import jax, jax.numpy as jnp, rlhf_jax as rl
    >>> config = rl.models.DecoderConfig(
    ...     vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2
    ... )
    >>> model = rl.models.Decoder(config)
    >>> params = model.init(jax.random.key(0))
    >>> prompts = jnp.array([[0, 5, 6], [7, 8, 9]])
    >>> mask = jnp.array([[False, True, True], [True, True, True]])
    >>> rollout = generate(
    ...     model, params, prompts, mask, jax.random.key(1), group_size=2, max_new_tokens=4
    ... )
    >>> rollout.tokens.shape, rollout.lengths.tolist()
    ((4, 7), [4, 4, 4, 4])
    """
    _check(tokens, attention_mask, group_size, max_new_tokens, temperature, top_k, top_p)
    if group_ids is None:
        group_ids = np.arange(len(np.asarray(tokens)), dtype=np.int32)
    filters = _Filters(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.asarray(top_k, jnp.int32),
        top_p=jnp.asarray(top_p, jnp.float32),
        stop_ids=jnp.asarray(stop_ids, jnp.int32).reshape(-1),
    )
    return _generate(
        model,
        params,
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(attention_mask),
        key,
        filters,
        jnp.asarray(group_ids, jnp.int32),
        jnp.asarray(version, jnp.int32),
        group_size=group_size,
        max_new_tokens=max_new_tokens,
    )


def _check(tokens, attention_mask, group_size, max_new_tokens, temperature, top_k, top_p) -> None:
    if np.ndim(tokens) != 2 or np.shape(tokens) != np.shape(attention_mask):
        raise ValueError(
            f"tokens, attention_mask: expected two arrays of one shape [P, Tp], got "
            f"{np.shape(tokens)} and {np.shape(attention_mask)}"
        )
    if attention_mask.dtype != bool:
        raise TypeError(
            f"attention_mask: expected bool, got {attention_mask.dtype}; use (x > 0) or a "
            "comparison of lengths"
        )
    for name, value in (("group_size", group_size), ("max_new_tokens", max_new_tokens)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected an int ≥ 1, got {value!r}")
    if checks.is_concrete(attention_mask) and not np.asarray(attention_mask).any(axis=1).all():
        empty = np.flatnonzero(~np.asarray(attention_mask).any(axis=1)).tolist()
        raise ValueError(f"attention_mask: prompts {empty} have no token; drop them or add a BOS")
    for name, value, low, high in (
        ("temperature", temperature, 0, np.inf),
        ("top_k", top_k, 0, np.inf),
        ("top_p", top_p, 0, 1),
    ):
        if checks.is_concrete(value) and not np.all(
            (np.asarray(value) >= low) & (np.asarray(value) <= high)
        ):
            raise ValueError(f"{name}: expected a value in [{low}, {high}], got {value}")


@functools.partial(jax.jit, static_argnames=("model", "group_size", "max_new_tokens"))
def _generate(
    model,
    params,
    tokens,
    attention_mask,
    key,
    filters,
    group_ids,
    version,
    *,
    group_size,
    max_new_tokens,
) -> Rollout:
    tokens, attention_mask = _left_padded(tokens, attention_mask)
    keys = draw.row_keys(key, group_ids, group_size)
    hidden, prefix = model.prefill(params, tokens, attention_mask)
    logits = jnp.broadcast_to(
        model.project(params, hidden)[:, None],
        (tokens.shape[0], group_size, model.config.vocab_size),
    )
    loop = _first(model, prefix, keys, logits, filters, group_size, max_new_tokens)

    def unfinished(loop: _Loop) -> jax.Array:
        return (loop.step < max_new_tokens) & ~jnp.all(loop.terminated)

    def advance(loop: _Loop) -> _Loop:
        hidden, cache = model.decode(params, loop.token, loop.cache, loop.step - 1)
        loop = dataclasses.replace(loop, cache=cache)
        return _record(loop, _sample(model.project(params, hidden), keys, loop.step, filters))

    loop = jax.lax.while_loop(unfinished, advance, loop)
    return _rollout(loop, tokens, attention_mask, group_ids, version)


def _left_padded(tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Move every prompt to the right end of its bucket, so that its completion follows directly."""
    order = jnp.argsort(mask, axis=1, stable=True)
    return jnp.take_along_axis(tokens, order, axis=1), jnp.take_along_axis(mask, order, axis=1)


def _first(model, prefix, keys, logits, filters, group_size, max_new_tokens) -> _Loop:
    rows = keys.shape
    # Buffers grow out of the keys' own rows, so that they inherit the rows' sharding instead of
    # ending up replicated as fresh zeros would inside the loop.
    zero = jnp.zeros_like(jax.random.key_data(keys)[..., 0], jnp.int32)
    buffer = jnp.broadcast_to(zero[..., None], (*rows, max_new_tokens))
    loop = _Loop(
        step=jnp.int32(0),
        token=zero,
        tokens=buffer,
        log_probs=buffer.astype(jnp.float32),
        truncated_log_probs=buffer.astype(jnp.float32),
        lengths=zero,
        terminated=zero > 0,
        cache=model.init_cache(prefix, group_size=group_size, max_new_tokens=max_new_tokens),
    )
    return _record(loop, _sample(logits, keys, loop.step, filters))


class _Drawn(NamedTuple):
    token: jax.Array
    log_prob: jax.Array
    truncated_log_prob: jax.Array
    stop: jax.Array


def _sample(logits: jax.Array, keys: jax.Array, index: jax.Array, filters: _Filters) -> _Drawn:
    """Draw one token per row, with its log-prob under the full and under the filtered softmax."""
    tempered = transforms.temper(logits, filters.temperature)
    kept = transforms.top_k_top_p(tempered, filters.top_k, filters.top_p)
    drawn = draw.categorical(kept, draw.token_key_uniforms(keys, index))
    token = jnp.where(filters.temperature > 0, drawn, jnp.argmax(kept, axis=-1)).astype(jnp.int32)
    log_prob = logprobs.from_logits(logits, token, temperature=filters.temperature)
    filtered = jnp.any(filters.top_k > 0) | jnp.any(filters.top_p < 1)
    truncated_log_prob = jax.lax.cond(
        filtered, lambda: logprobs.from_logits(kept, token), lambda: log_prob
    )
    stop = jnp.any(token[..., None] == filters.stop_ids, axis=-1)
    return _Drawn(token, log_prob, truncated_log_prob, stop)


def _record(loop: _Loop, drawn: _Drawn) -> _Loop:
    """Write one token into the rows that are still running; ended rows stay as they are."""
    running = ~loop.terminated

    def write(buffer: jax.Array, value: jax.Array) -> jax.Array:
        value = jnp.where(running, value, 0).astype(buffer.dtype)
        return jax.lax.dynamic_update_index_in_dim(buffer, value, loop.step, axis=2)

    return dataclasses.replace(
        loop,
        step=loop.step + 1,
        token=jnp.where(running, drawn.token, 0),
        tokens=write(loop.tokens, drawn.token),
        log_probs=write(loop.log_probs, drawn.log_prob),
        truncated_log_probs=write(loop.truncated_log_probs, drawn.truncated_log_prob),
        lengths=loop.lengths + running,
        terminated=loop.terminated | drawn.stop,
    )


def _rollout(loop: _Loop, tokens, attention_mask, group_ids, version) -> Rollout:
    prompts, group_size, new = loop.tokens.shape
    start = tokens.shape[1]

    def rows(prompt: jax.Array, completion: jax.Array) -> jax.Array:
        prompt = jnp.broadcast_to(prompt[:, None], (prompts, group_size, start))
        joined = jnp.concatenate([prompt.astype(completion.dtype), completion], axis=-1)
        return joined.reshape(prompts * group_size, start + new)

    sampled = jnp.arange(new) < loop.lengths[..., None]
    nothing = jnp.zeros_like(tokens)
    return Rollout(
        tokens=rows(tokens, loop.tokens),
        mask=rows(nothing, sampled),
        attention_mask=rows(attention_mask, sampled),
        log_probs=rows(nothing, loop.log_probs),
        truncated_log_probs=rows(nothing, loop.truncated_log_probs),
        lengths=loop.lengths.reshape(-1),
        terminated=loop.terminated.reshape(-1),
        truncated=~loop.terminated.reshape(-1),
        group_ids=jnp.repeat(group_ids, group_size, total_repeat_length=prompts * group_size),
        version=version,
        start=start,
    )

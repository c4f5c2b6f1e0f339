"""``generate``: prompts in, a :class:`~rlhf_jax.types.Rollout` out, in one jitted call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from rlhf_jax import checks
from rlhf_jax.models.cache import keep_rows
from rlhf_jax.models.explicit import auto_inside, like_rows, rows_of
from rlhf_jax.sampling import buckets, draw
from rlhf_jax.sampling.options import SamplingOptions
from rlhf_jax.sampling.rows import Prompts, Rows, SamplerModel, advance, draw_next, start
from rlhf_jax.types import Params, Rollout

__all__ = ["compilations", "generate"]


def generate(
    model: SamplerModel,
    params: Params,
    tokens: ArrayLike,
    attention_mask: ArrayLike,
    key: jax.Array,
    *,
    group_size: int,
    max_new_tokens: ArrayLike,
    room: int | None = None,
    temperature: ArrayLike = 1.0,
    top_k: ArrayLike = 0,
    top_p: ArrayLike = 1.0,
    min_p: ArrayLike = 0.0,
    repetition_penalty: ArrayLike = 1.0,
    presence_penalty: ArrayLike = 0.0,
    min_new_tokens: ArrayLike = 0,
    stop_ids: Sequence[int] | ArrayLike = (),
    logit_bias: ArrayLike | None = None,
    group_ids: ArrayLike | None = None,
    version: jax.Array | int = 0,
    prompt_buckets: Sequence[int] | None = None,
    row_buckets: Sequence[int] | None = None,
    row_sharding: jax.NamedSharding | None = None,
) -> Rollout:
    """Sample ``group_size`` completions of every prompt.

    a_t ~ filter(softmax(logits_t / τ)), until a stop id or ``max_new_tokens``

    Each distinct prompt is prefilled once; the loop ends when the last row has ended, and a step
    costs what the tokens so far cost, not the room. A completion is a function of (params, prompt,
    options, key, its prompt's id, its number in the group): the other rows of the batch do not
    matter. Compiles once per (model, prompt bucket, row bucket, group size, room);
    everything else is traced.

    Args:
      model: a :class:`SamplerModel`, e.g. :class:`rlhf_jax.models.Decoder`.
      params: its parameters.
      tokens: int32 ``[P, Tp]`` prompts, padded on either side.
      attention_mask: bool ``[P, Tp]``, true on real prompt tokens; at least one in a row.
      key: a new-style key, or one per row ``[P, G]``; the same key repeats the rollout exactly.
      group_size: G, completions per prompt (static).
      max_new_tokens: the length cap of a completion.
      room: S, the width kept for completions (static). None takes ``max_new_tokens`` when that is
        an int, else the largest cap rounded up to a power of two.
      temperature: τ ≥ 0; 0 takes the likeliest token, its log-prob is the untempered softmax's.
      top_k, top_p, min_p, repetition_penalty, presence_penalty, min_new_tokens, logit_bias: see
        :class:`SamplingOptions`. These, the temperature and the caps are scalars, or one value
        per prompt ``[P]`` or per row ``[P, 1 or G]``.
      stop_ids: token ids that end a completion; they stay in it as its last sampled token.
      group_ids: int32 ``[P]``; 0 … P-1 when None.
      version: version of ``params``, recorded in the rollout.
      prompt_buckets: widths that prompts are padded to, e.g. ``(64, 128, 256)``; None takes the
        width as it is.
      row_buckets: numbers of prompts that the batch is padded to; None takes it as it is.
      row_sharding: where the prompts lie, by its first axis: the cache lies there too. None takes
        it from ``tokens``; inside ``jit`` under Auto axes those do not know.

    Returns:
      A :class:`Rollout` of ``B = P*G`` rows and ``T = Tp + S`` columns, prompt-major.

    Raises:
      ValueError: for shapes that do not fit, a prompt without tokens, options out of range, or
        more tokens or prompts than the largest bucket.
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
    count = _check(tokens, attention_mask, group_size)
    room = _room(max_new_tokens, room)
    options = SamplingOptions.make(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        min_new_tokens=min_new_tokens,
        stop_ids=stop_ids,
        logit_bias=logit_bias,
    )
    if group_ids is None:
        group_ids = np.arange(count, dtype=np.int32)
    given = buckets.pad_batch(
        (jnp.asarray(tokens, jnp.int32), jnp.asarray(attention_mask)),
        jnp.asarray(group_ids, jnp.int32),
        options,
        key if key.ndim else None,
        prompt_buckets=prompt_buckets,
        row_buckets=row_buckets,
    )
    rollout = _generate(
        model,
        params,
        Prompts(*given.prompts),
        key if given.keys is None else given.keys,
        given.options,
        given.group_ids,
        jnp.asarray(version, jnp.int32),
        group_size=group_size,
        room=room,
        row_sharding=rows_of(given.prompts[0]) if row_sharding is None else row_sharding,
    )
    return buckets.cut_rows(rollout, count * group_size)


def compilations() -> int:
    """How many programs ``generate`` has compiled in this process.

    Returns:
      The number: one for every combination of (model, prompt bucket, row bucket, group size, room,
      sharding) met so far.

    >>> compilations() >= 0
    True
    """
    compiled: Any = _generate
    return compiled._cache_size()


def _check(tokens: Any, attention_mask: Any, group_size: int) -> int:
    """The number of prompts, if tokens and mask belong together."""
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
    if not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"group_size: expected an int ≥ 1, got {group_size!r}")
    if checks.is_concrete(attention_mask) and not np.asarray(attention_mask).any(axis=1).all():
        empty = np.flatnonzero(~np.asarray(attention_mask).any(axis=1)).tolist()
        raise ValueError(f"attention_mask: prompts {empty} have no token; drop them or add a BOS")
    return np.shape(tokens)[0]


def _room(max_new_tokens: Any, room: int | None) -> int:
    """Static width for the completions, at least the largest cap."""
    if not checks.is_concrete(max_new_tokens):
        if room is None:
            raise ValueError("room: give the static width when max_new_tokens is traced")
        return room
    largest = int(np.max(max_new_tokens))
    if largest < 1 or np.asarray(max_new_tokens).dtype.kind not in "iu":
        raise ValueError(
            f"max_new_tokens: expected integers, the largest ≥ 1, got {max_new_tokens!r}"
        )
    if room is None:
        return largest if np.ndim(max_new_tokens) == 0 else 1 << (largest - 1).bit_length()
    if room < largest:
        raise ValueError(f"room: got {room}, less than max_new_tokens ({largest})")
    return room


@functools.partial(jax.jit, static_argnames=("model", "group_size", "room", "row_sharding"))
def _generate(
    model: SamplerModel,
    params: Params,
    prompts: Prompts,
    key: jax.Array,
    options: SamplingOptions,
    group_ids: jax.Array,
    version: jax.Array,
    *,
    group_size: int,
    room: int,
    row_sharding: Any = None,
) -> Rollout:
    def run(
        params: Params,
        prompts: Prompts,
        key: jax.Array,
        options: SamplingOptions,
        group_ids: jax.Array,
        version: jax.Array,
    ) -> Rollout:
        prompts = _left_padded(prompts)
        keys = key if key.ndim else draw.row_keys(key, group_ids, group_size)
        hidden, prefix = model.prefill(params, *prompts)
        cache = model.init_cache(prefix, group_size=group_size, max_new_tokens=room)
        cache = keep_rows(cache, row_sharding)
        logits = model.project(params, hidden)[:, None]
        logits = jnp.broadcast_to(logits, (*keys.shape, logits.shape[-1]))
        rows = draw_next(start(keys, cache, options, room), logits, keys, options, prompts)
        rows = jax.lax.while_loop(
            lambda rows: ~jnp.all(rows.done) & (rows.step < room),
            lambda rows: advance(model, params, rows, keys, options, prompts),
            rows,
        )
        return _rollout(rows, prompts, group_ids, version)

    given = (params, prompts, key, options, group_ids, version)
    return auto_inside(run, lambda: _placement(prompts), prompts.tokens, *given)


def _placement(prompts: Prompts) -> Any:
    """Under Explicit axes the rollout's rows lie as the prompts do."""
    rows = like_rows(prompts.tokens, 0)
    fields: dict[str, Any] = {field.name: rows for field in dataclasses.fields(Rollout)}
    whole = jax.NamedSharding(rows.mesh, jax.P())
    fields |= {"version": whole, "trunk": None, "start": prompts.tokens.shape[1]}
    return Rollout(**fields)


def _left_padded(prompts: Prompts) -> Prompts:
    """Move every prompt to the right end of its bucket, so that its completion follows directly."""
    tokens, mask = prompts
    order = jnp.argsort(mask, axis=1, stable=True)
    return Prompts(*(jnp.take_along_axis(x, order, axis=1) for x in (tokens, mask)))


def _rollout(rows: Rows, prompts: Prompts, group_ids: jax.Array, version: jax.Array) -> Rollout:
    count, group_size, new = rows.tokens.shape
    width = prompts.tokens.shape[1]

    def join(prompt: jax.Array, completion: jax.Array) -> jax.Array:
        prompt = jnp.broadcast_to(prompt[:, None], (count, group_size, width))
        joined = jnp.concatenate([prompt.astype(completion.dtype), completion], axis=-1)
        return joined.reshape(count * group_size, width + new)

    sampled = jnp.arange(new) < rows.lengths[..., None]
    nothing = jnp.zeros_like(prompts.tokens)
    return Rollout(
        tokens=join(prompts.tokens, rows.tokens),
        mask=join(nothing, sampled),
        attention_mask=join(prompts.mask, sampled),
        log_probs=join(nothing, rows.log_probs),
        truncated_log_probs=join(nothing, rows.truncated_log_probs),
        lengths=rows.lengths.reshape(-1),
        terminated=rows.terminated.reshape(-1),
        truncated=~rows.terminated.reshape(-1),
        group_ids=jnp.repeat(group_ids, group_size, total_repeat_length=count * group_size),
        version=version,
        start=width,
    )

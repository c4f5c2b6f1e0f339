"""The one sampling function of the library: logits in, a token and its log-probs out."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax import logprobs
from rlhf_jax.sampling import draw, transforms
from rlhf_jax.sampling.options import SamplingOptions

__all__ = ["Drawn", "History", "sample"]


class History(NamedTuple):
    """What a row has read and written so far; only penalties look at it.

    Args:
      prompt: int32 ``[P, Tp]``.
      prompt_mask: bool ``[P, Tp]``.
      tokens: int32 ``[P, G, S]``, the completion.
      lengths: int32 scalar or ``[P, G]``: tokens of it that are there.
    """

    prompt: jax.Array
    prompt_mask: jax.Array
    tokens: jax.Array
    lengths: jax.Array


class Drawn(NamedTuple):
    """One token per row.

    Args:
      token: int32 ``[P, G]``.
      log_prob: float32, log μ(token) under the tempered full softmax of the model's own logits.
      truncated_log_prob: float32, log μ(token) of the distribution it was really drawn from.
      stop: bool, the token is one of the row's stop ids.
    """

    token: jax.Array
    log_prob: jax.Array
    truncated_log_prob: jax.Array
    stop: jax.Array


def sample(
    logits: jax.Array,
    keys: jax.Array,
    index: jax.Array | int,
    options: SamplingOptions,
    history: History,
) -> Drawn:
    """Draw one token per row.

    a ~ filter(softmax(change(z) / τ)),  with log softmax(z / τ)[a] and the log-prob after both

    Args:
      logits: float32 ``[P, G, V]``.
      keys: ``[P, G]``, one per row; the draw depends on (key, index) alone.
      index: int32 scalar or ``[P, G]``: the token's number in its completion.
      options: :class:`SamplingOptions`.
      history: :class:`History`.

    Returns:
      :class:`Drawn`. With τ = 0 the token is the likeliest one and τ counts as 1 in log-probs.

    >>> options = SamplingOptions.make(max_new_tokens=1, temperature=0.0)
    >>> logits, none = jnp.array([[[0.0, 2.0, 1.0]]]), jnp.zeros((1, 1), jnp.int32)
    >>> history = History(none, none > 0, none[None], jnp.int32(0))
    >>> sample(logits, jax.random.split(jax.random.key(0), (1, 1)), 0, options, history).token
    Array([[1]], dtype=int32)
    """
    tempered = transforms.temper(logits, _wide(options.temperature))
    uniforms = draw.token_key_uniforms(keys, index)

    def plain() -> tuple[jax.Array, jax.Array, jax.Array]:
        token, log_prob = _choose(tempered, uniforms, options)
        return token, log_prob, log_prob

    def changed() -> tuple[jax.Array, jax.Array, jax.Array]:
        kept = _change(logits, index, options, history)
        kept = transforms.temper(kept, _wide(options.temperature))
        kept = transforms.top_k_top_p(kept, options.top_k, options.top_p)
        kept = transforms.min_p(kept, options.min_p)
        token, truncated_log_prob = _choose(kept, uniforms, options)
        return token, logprobs.from_logits(tempered, token), truncated_log_prob

    drawn = jax.lax.cond(_is_plain(index, options), plain, changed)
    token, log_prob, truncated_log_prob = drawn
    stop = jnp.any(token[..., None] == options.stop_ids, axis=-1)
    return Drawn(token, log_prob, truncated_log_prob, stop)


def _wide(option: jax.Array) -> jax.Array:
    """An option beside logits: a vocabulary axis at the end."""
    return jnp.expand_dims(option, -1)


def _is_plain(index: jax.Array | int, options: SamplingOptions) -> jax.Array:
    """No row changes the model's own distribution at this token (beyond the temperature)."""
    if options.logit_bias is not None:
        return jnp.bool_(False)
    return (
        jnp.all(options.top_k == 0)
        & jnp.all(options.top_p == 1)
        & jnp.all(options.min_p == 0)
        & jnp.all(options.repetition_penalty == 1)
        & jnp.all(options.presence_penalty == 0)
        & jnp.all(index >= options.min_new_tokens)
    )


def _choose(
    logits: jax.Array, uniforms: jax.Array, options: SamplingOptions
) -> tuple[jax.Array, jax.Array]:
    """The token of every row, and its log-prob under softmax(logits)."""
    greedy = options.temperature == 0
    drawn = draw.categorical(logits, uniforms)
    token = jax.lax.cond(
        jnp.any(greedy),
        lambda: jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), drawn),
        lambda: drawn,
    )
    return token, logprobs.from_logits(logits, token)


def _change(
    logits: jax.Array, index: jax.Array | int, options: SamplingOptions, history: History
) -> jax.Array:
    """Bias, penalties, and the ban of stop ids in a completion that is too short."""
    logits = logits.astype(jnp.float32)
    if options.logit_bias is not None:
        logits = logits + options.logit_bias
    repetition, presence = _wide(options.repetition_penalty), _wide(options.presence_penalty)

    def penalised() -> jax.Array:
        vocab = logits.shape[-1]
        there = jnp.arange(history.tokens.shape[-1]) < jnp.expand_dims(history.lengths, -1)
        written = transforms.occurring(history.tokens, there, vocab)
        read = transforms.occurring(history.prompt, history.prompt_mask, vocab)
        changed = transforms.repetition_penalty(logits, written | read[:, None], repetition)
        return transforms.presence_penalty(changed, written, presence)

    off = jnp.all(repetition == 1) & jnp.all(presence == 0)
    logits = jax.lax.cond(off, lambda: logits, penalised)
    short = jnp.expand_dims(jnp.asarray(index) < options.min_new_tokens, -1)
    stops = jnp.broadcast_to(options.stop_ids, (*logits.shape[:-1], options.stop_ids.shape[-1]))
    banned = transforms.occurring(stops, stops >= 0, logits.shape[-1])
    return jnp.where(short & banned, transforms.NEG_INF, logits)

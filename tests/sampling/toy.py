"""A bigram language model behind the sampler's protocol: every probability is in a table."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class _Config:
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class Bigram:
    """``params`` is a table of logits ``[V, V]``: row = the token before."""

    vocab_size: int
    on_decode: object = None  # a host callback, to count decode steps

    @property
    def config(self):
        return _Config(self.vocab_size)

    def prefill(self, params, tokens, attention_mask):
        last = tokens.shape[1] - 1 - jnp.argmax(attention_mask[:, ::-1], axis=1)
        token = jnp.take_along_axis(tokens, last[:, None], axis=1)[:, 0]
        return jax.nn.one_hot(token, self.vocab_size), None

    def init_cache(self, prefix, *, group_size, max_new_tokens):
        return ()

    def decode(self, params, token, cache, step):
        if self.on_decode is not None:
            jax.debug.callback(self.on_decode, step)
        return jax.nn.one_hot(token, self.vocab_size), cache

    def project(self, params, hidden):
        return hidden @ params

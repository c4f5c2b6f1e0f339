"""A tiny decoder, a tokenizer for its ids and prompts, for the tests of the engine."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import rlhf_jax as rl

# The bytes of each id: single letters, pairs, and parts of the characters é and €.
PIECES = ["a", "b", "ab", "ba", " a", "\n", "\n\n", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac"]
PIECES += [b"\xe2\x82", "é", "c", "d", "ca", "cb", "da", "db", "cc", "dd"]
EOS = len(PIECES)
VOCAB = EOS + 2  # the last id has no token
CONFIG = rl.models.DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
)
MODEL = rl.models.Decoder(CONFIG)
# Every size compiles anew, so the tests share these few besides the usual one of `engine`.
SMALL = dict(slots=2, steps_per_round=1)
LARGE = dict(slots=9, steps_per_round=24)


@functools.cache
def params(seed=0, model=MODEL):
    """Random weights, without the seconds that compiling `init` takes."""
    random = np.random.default_rng(seed)

    def draw(path, leaf):
        centre = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(random.normal(centre, 0.3, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, model.shapes())


@functools.cache
def tokenizer():
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    letter = {b: chr(b) if b in visible else chr(0x100 + others.index(b)) for b in range(256)}
    raw = [piece if isinstance(piece, bytes) else piece.encode() for piece in PIECES]
    vocabulary = {"".join(letter[b] for b in piece): i for i, piece in enumerate(raw)}
    backend = Tokenizer(models.BPE(vocab=vocabulary | {"<eos>": EOS}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def engine(seed=0, model=MODEL, **options):
    given = dict(slots=4, max_prompt_tokens=16, max_new_tokens=24, steps_per_round=4)
    return rl.sampling.Engine(model, params(seed, model), **(given | options))


def prompts(count, most=16, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCAB, random.integers(1, most + 1)) for _ in range(count)]


def rollout(
    prompt, *, key, group_id, group_size=3, seed=0, model=MODEL, room=24, width=16, **options
):
    """What `generate` makes of one prompt."""
    tokens = np.zeros((1, width), np.int32)
    tokens[0, width - len(prompt) :] = prompt
    options.setdefault("max_new_tokens", room)
    return rl.generate(
        model,
        params(seed, model),
        tokens,
        np.arange(width)[None] >= width - len(prompt),
        key,
        group_size=group_size,
        group_ids=np.array([group_id]),
        room=room,
        **options,
    )


def generated(prompt, **options):
    """Its rows: lists of tokens, log-probs and filtered log-probs."""
    made = rollout(prompt, **options)
    arrays = (made.tokens, made.log_probs, made.truncated_log_probs)
    ends = np.asarray(made.lengths) + made.start
    return [
        [np.asarray(array)[row, made.start : end] for array in arrays]
        for row, end in enumerate(ends)
    ]

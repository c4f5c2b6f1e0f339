"""The bytes behind every token id: what stop strings are searched in and text is made of.

Text is not made token by token: a token may hold a part of a UTF-8 character, and a tokenizer's
own ``decode`` of such a part gives replacement characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

__all__ = ["token_bytes"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PLAIN = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}


def token_bytes(tokenizer: Any) -> tuple[bytes, ...]:
    """The bytes that each token id stands for, in the middle of a text.

    Args:
      tokenizer: a Hugging Face tokenizer of the byte-level BPE kind (GPT-2, Llama 3, Qwen, SmolLM)
        or of the sentencepiece kind (with ``▁`` for spaces and ``<0x0A>`` for single bytes).

    Returns:
      One entry per id, empty for special tokens and for ids without a token.

    Raises:
      ValueError: a tokenizer of another kind.

    >>> from tokenizers import Tokenizer, decoders, models
    >>> backend = Tokenizer(models.BPE(vocab={"Ġé": 0, "Ã": 1, "©": 2}, merges=[]))
    >>> backend.decoder = decoders.ByteLevel()
    >>> class Toy:
    ...     backend_tokenizer, added_tokens_decoder = backend, {}
    ...
    ...     def get_vocab(self):
    ...         return backend.get_vocab()
    >>> token_bytes(Toy())
    (b' \\xe9', b'\\xc3', b'\\xa9')
    """
    spell = _speller(tokenizer)
    added = {int(index): token for index, token in tokenizer.added_tokens_decoder.items()}
    vocabulary = tokenizer.get_vocab()
    table = [b""] * (1 + max((*vocabulary.values(), *added), default=-1))
    for piece, index in vocabulary.items():
        table[index] = spell(piece)
    for index, token in added.items():
        table[index] = b"" if token.special else str(token.content).encode()
    return tuple(table)


def _speller(tokenizer: Any) -> Callable[[str], bytes]:
    """How a piece of the vocabulary is spelled in bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"tokenizer: {type(tokenizer).__name__} has no backend_tokenizer; give a fast tokenizer"
        )
    decoder = json.loads(backend.to_str())["decoder"] or {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    if not kinds <= _PLAIN:
        raise ValueError(
            f"tokenizer: decoder {sorted(map(str, kinds))} is not supported; supported: byte-level "
            "BPE, and sentencepiece with byte fallback"
        )
    swaps = [_swap(step) for step in steps if step["type"] in ("Replace", "Metaspace")]
    fallback = "ByteFallback" in kinds

    def spell(piece: str) -> bytes:
        if fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes.fromhex(match[1])
        for old, new in swaps:
            piece = piece.replace(old, new)
        return piece.encode()

    return spell


def _swap(step: dict[str, Any]) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if "String" not in step["pattern"]:
        raise ValueError(f"tokenizer: decoder step {step} is not supported; supported: a string")
    return step["pattern"]["String"], step["content"]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: itself where it is visible, else the next from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    return alphabet | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    if all(character in _ALPHABET for character in piece):
        return bytes(_ALPHABET[character] for character in piece)
    return piece.encode()

"""Prompts: files and generated rows, tokenised into buckets; deterministic, resumable, per host.

The prompts of step n depend on the run's seed and on n alone: not on what was drawn before, not on
the number of hosts, not on the version of NumPy. So the whole state of a source is one integer,
``position``, and a resumed run goes on with exactly the prompts that it would have had.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from rlhf_jax._rows import (
    GeneratedRows,
    PromptFile,
    Row,
    fingerprint,
    permutation,
    read_prompts,
    split,
)

__all__ = [
    "DEFAULT_BUCKETS",
    "Encoded",
    "GeneratedRows",
    "PromptBatch",
    "PromptFile",
    "PromptSource",
    "Row",
    "Tokenizer",
    "encode",
    "fingerprint",
    "permutation",
    "read_prompts",
    "render_chat",
    "split",
    "turn_ids",
]

DEFAULT_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Prompt lengths that a step is compiled for, unless a run declares its own."""

_REPLY = "rlhf-jax-reply"  # stands for the assistant's words; no template changes such a word


class Tokenizer(Protocol):
    """The part of a tokenizer that is used here; every Hugging Face tokenizer has it."""

    pad_token_id: Any
    bos_token_id: Any
    eos_token_id: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
    """Left-padded prompts.

    Attributes:
      tokens: int32 ``[P, Tp]``, ids at the right, pad ids at the left.
      attention_mask: bool ``[P, Tp]``, true on real tokens; made from lengths, never from ids.
      lengths: int32 ``[P]``, at most ``Tp``.
      truncated: how many prompts lost tokens at their left.
    """

    tokens: np.ndarray
    attention_mask: np.ndarray
    lengths: np.ndarray
    truncated: int


def render_chat(tokenizer: Any, prompt: str, *, system: str | None = None) -> str:
    """Put a prompt into the tokenizer's chat template, ready for the assistant's turn.

    Args:
      tokenizer: a tokenizer with a chat template.
      prompt: the user's turn.
      system: an optional system turn.

    Returns:
      The text; tokenise it without adding special tokens (:func:`encode` does), it has its own.

    Raises:
      ValueError: the tokenizer has no chat template.

    Example:
      >>> class Toy:
      ...     chat_template = "yes"
      ...
      ...     def apply_chat_template(self, messages, **_):
      ...         return "|".join(m["content"] for m in messages) + "|"
      >>> render_chat(Toy(), "hi", system="be brief")
      'be brief|hi|'
    """
    messages = [{"role": "system", "content": system}] if system else []
    return _rendered(tokenizer, [*messages, {"role": "user", "content": prompt}])


def _rendered(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "this tokenizer has no chat template; turn the chat option off or use a chat model"
        )
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def turn_ids(
    tokenizer: Any, messages: Sequence[dict[str, Any]], *, stop_id: int | None
) -> list[int]:
    """The ids that stand between the assistant's reply and its next one.

    Put behind the ids of a conversation they continue it: the model's own tokens are never encoded
    again, and no second BOS comes in.

    Args:
      tokenizer: a tokenizer with a chat template.
      messages: what others say next, e.g. ``[{"role": "user", "content": "And then?"}]``.
      stop_id: the reply's last id where a stop id ended it, which is not put in twice; None for a
        reply that was cut, behind which the template's end of a turn comes in.

    Returns:
      The ids, from the end of the reply to the beginning of the next one.

    Raises:
      ValueError: no chat template, no messages, or a template that changes the assistant's words.

    Example:
      >>> class Toy:
      ...     chat_template = "yes"
      ...
      ...     def apply_chat_template(self, messages, **_):
      ...         return "".join(f"[{m['content']}]" for m in messages) + "["
      ...
      ...     def encode(self, text, add_special_tokens=True):
      ...         return list(map(ord, text))
      >>> said = [{"role": "user", "content": "go on"}]
      >>> "".join(map(chr, turn_ids(Toy(), said, stop_id=ord("]"))))
      '[go on]['
    """
    if not messages:
        raise ValueError("messages is empty: give at least one")
    start = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _REPLY}]
    text = _rendered(tokenizer, [*start, *messages])
    if text.count(_REPLY) != 1:
        raise ValueError("this tokenizer's chat template changes or repeats the assistant's words")
    ids = list(tokenizer.encode(text.partition(_REPLY)[2], add_special_tokens=False))
    before = ids[: ids.index(stop_id)] if stop_id in ids else ids
    if len(before) < len(ids) and not (before and tokenizer.decode(before).strip()):
        return ids[len(before) + 1 :]
    return ids


def _ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    ids = list(tokenizer.encode(text, add_special_tokens=special))
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
        ids.pop(0)  # the text began with the BOS that the tokenizer adds
    # Some tokenizers close every text with EOS; a prompt must stay open.
    closed = special and eos is not None and len(ids) > 1 and ids[-1] == eos
    if closed and tokenizer.encode(text, add_special_tokens=False)[-1:] != [eos]:
        ids.pop()
    return ids


def encode(
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    buckets: Sequence[int] = DEFAULT_BUCKETS,
    chat: bool = False,
    system: str | None = None,
    truncate_left: bool = False,
) -> Encoded:
    """Tokenise prompts into the smallest declared bucket that holds them all, padded at the left.

    Exactly one BOS where the tokenizer adds one, also if the text or the chat template has it.

    Args:
      tokenizer: see :class:`Tokenizer`.
      prompts: P texts.
      buckets: the lengths ``Tp`` may take, so that a jitted step compiles for these only.
      chat: put each prompt into the tokenizer's chat template.
      system: the chat's system turn.
      truncate_left: cut a prompt over the largest bucket at its left instead of refusing it; with
        a BOS the BOS stays. ``truncated`` counts them.

    Returns:
      The padded ids and their mask.

    Raises:
      ValueError: no prompts, a prompt without tokens, or one over the largest bucket (named).

    Example:
      >>> class Toy:
      ...     bos_token_id, eos_token_id, pad_token_id = None, None, 0
      ...
      ...     def encode(self, text, add_special_tokens=True):
      ...         return [ord(c) - 96 for c in text]
      >>> encode(Toy(), ["abc", "z"], buckets=(4, 8)).tokens
      array([[ 0,  1,  2,  3],
             [ 0,  0,  0, 26]], dtype=int32)
    """
    if not prompts:
        raise ValueError("prompts is empty: give at least one")
    sizes = sorted({int(b) for b in buckets})
    if not sizes or sizes[0] < 1:
        raise ValueError(f"buckets must be lengths of 1 or more, got {tuple(buckets)}")
    texts = [render_chat(tokenizer, p, system=system) for p in prompts] if chat else prompts
    rows = [_ids(tokenizer, text, special=not chat) for text in texts]
    truncated = 0
    for i, ids in enumerate(rows):
        if not ids:
            raise ValueError(f"prompt {i} ({_short(prompts[i])}) has no tokens")
        if len(ids) > sizes[-1]:
            if not truncate_left:
                raise ValueError(
                    f"prompt {i} ({_short(prompts[i])}) has {len(ids)} tokens, over the largest "
                    f"bucket of {sizes[-1]}: shorten it, declare a larger bucket, or ask for "
                    "truncation at the left"
                )
            head = ids[:1] if ids[0] == tokenizer.bos_token_id and sizes[-1] > 1 else []
            rows[i] = head + ids[len(ids) - sizes[-1] + len(head) :]
            truncated += 1
    lengths = np.array([len(ids) for ids in rows], np.int32)
    width = next(size for size in sizes if size >= lengths.max())
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    tokens = np.full((len(rows), width), pad, np.int32)
    for i, ids in enumerate(rows):
        tokens[i, width - len(ids) :] = ids
    mask = np.arange(width)[None, :] >= width - lengths[:, None]
    return Encoded(tokens=tokens, attention_mask=mask, lengths=lengths, truncated=truncated)


def _short(text: str, limit: int = 40) -> str:
    return repr(text if len(text) <= limit else text[: limit - 1] + "…")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """The prompts of one step, this host's part of them.

    Attributes:
      step: which step they belong to.
      ids: int32 ``[P]``, each prompt's index in the source: the group ids.
      rows: P rows with all their columns.
      prompts: P texts, ``rows[p]["prompt"]``.
      tokens: int32 ``[P, Tp]``, left-padded; None without a tokenizer.
      attention_mask: bool ``[P, Tp]``; None without a tokenizer.
      truncated: prompts of the global batch that were cut at their left.
    """

    step: int
    ids: np.ndarray
    rows: tuple[Row, ...]
    prompts: tuple[str, ...]
    tokens: np.ndarray | None = None
    attention_mask: np.ndarray | None = None
    truncated: int = 0

    def columns(self, repeats: int = 1) -> dict[str, list[Any]]:
        """Return every column but the prompt, each value ``repeats`` times (once a completion).

        Args:
          repeats: the group size G; rows are prompt-major.

        Returns:
          Lists of P·G; a row without the column gives None.
        """
        names = dict.fromkeys(name for row in self.rows for name in row if name != "prompt")
        return {
            name: [row.get(name) for row in self.rows for _ in range(repeats)] for name in names
        }


class PromptSource:
    """Batches of P different prompts, step by step, in an order that (seed, step) alone decides.

    Each epoch is a new permutation; the few prompts that do not fill a batch wait for the next one.
    Iterating moves ``position``, the next step, on; it is all the state there is.

    Args:
      rows: the prompts.
      batch_size: P of all hosts together.
      seed: the run's seed.
      tokenizer: tokenises each batch; without one batches are text only.
      buckets, chat, system, truncate_left: as in :func:`encode`. Every host tokenises the global
        batch, so that all agree on the bucket.
      process_index, process_count: this host's slice of the global batch.
      position: the step to begin with.

    Example:
      >>> rows = [{"prompt": str(i)} for i in range(5)]
      >>> source = PromptSource(rows, batch_size=2, seed=0)
      >>> first, second = next(source), next(source)
      >>> source.position, set(first.prompts) & set(second.prompts)
      (2, set())
      >>> source.batch(0).prompts == first.prompts
      True
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        batch_size: int,
        seed: int,
        tokenizer: Any = None,
        buckets: Sequence[int] = DEFAULT_BUCKETS,
        chat: bool = False,
        system: str | None = None,
        truncate_left: bool = False,
        process_index: int = 0,
        process_count: int = 1,
        position: int = 0,
    ):
        if not 1 <= batch_size <= len(rows):
            raise ValueError(
                f"batch_size={batch_size} prompts a step, but the source has {len(rows)}: "
                "a batch holds different prompts"
            )
        if not 0 <= process_index < process_count or batch_size % process_count:
            raise ValueError(
                f"batch_size={batch_size} must be a multiple of process_count={process_count}, "
                f"and process_index={process_index} below it"
            )
        if position < 0:
            raise ValueError(f"position must be 0 or more, got {position}")
        self.rows = rows
        self.batch_size = batch_size
        self.seed = seed
        self.tokenizer = tokenizer
        self.position = position
        self._encode = functools.partial(
            encode,
            tokenizer,
            buckets=tuple(buckets),
            chat=chat,
            system=system,
            truncate_left=truncate_left,
        )
        share = batch_size // process_count
        self._slice = slice(process_index * share, (process_index + 1) * share)
        self._order: tuple[int, np.ndarray] | None = None  # one epoch's permutation

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one pass over the prompts."""
        return len(self.rows) // self.batch_size

    def batch(self, step: int) -> PromptBatch:
        """Return the prompts of one step without moving ``position``.

        Args:
          step: 0 or more.

        Returns:
          This host's slice.

        Raises:
          ValueError: negative step, or what :func:`encode` refuses.
        """
        if step < 0:
            raise ValueError(f"step must be 0 or more, got {step}")
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, permutation(len(self.rows), seed=self.seed, epoch=epoch))
        ids = self._order[1][index * self.batch_size : (index + 1) * self.batch_size]
        rows = [self.rows[i] for i in ids]
        part = tuple(rows[self._slice])
        batch = PromptBatch(
            step=step,
            ids=ids[self._slice].astype(np.int32),
            rows=part,
            prompts=tuple(row["prompt"] for row in part),
        )
        if self.tokenizer is None:
            return batch
        encoded = self._encode([row["prompt"] for row in rows])
        return dataclasses.replace(
            batch,
            tokens=encoded.tokens[self._slice],
            attention_mask=encoded.attention_mask[self._slice],
            truncated=encoded.truncated,
        )

    def __iter__(self) -> Iterator[PromptBatch]:
        return self

    def __next__(self) -> PromptBatch:
        batch = self.batch(self.position)
        self.position += 1
        return batch

"""Requests and their rows on the host, and the checks of what a user hands in."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.sampling import draw
from rlhf_jax.sampling._stops import StopFinder, decode_text
from rlhf_jax.sampling.groups import FinishedGroup, FinishedRow
from rlhf_jax.sampling.options import SamplingOptions

__all__ = ["PER_TOKEN", "Request", "Row"]

PER_TOKEN = {
    "tokens": np.int32,
    "mask": np.bool_,
    "log_probs": np.float32,
    "truncated_log_probs": np.float32,
    "versions": np.int32,
}


@dataclasses.dataclass(eq=False, kw_only=True)
class Request:
    """A prompt and its rows.

    Attributes:
      number: the request's name.
      entered: rows that have had a slot.
      prefilled: the prompt's keys and values and its index there, until all rows have entered.
    """

    number: int
    prompt: np.ndarray
    group_id: int
    options: SamplingOptions
    stops: tuple[str, ...]
    keep: bool
    rows: list[Row] = dataclasses.field(default_factory=list)
    entered: int = 0
    prefilled: tuple[Any, int] | None = None

    def answer(self) -> FinishedGroup | None:
        """The finished group, once every row has finished."""
        rows = tuple(row.finished for row in self.rows if row.finished is not None)
        if len(rows) < len(self.rows):
            return None
        return FinishedGroup(
            request=self.number, group_id=self.group_id, prompt=self.prompt, rows=rows
        )


@dataclasses.dataclass(eq=False, kw_only=True)
class Row:
    """One completion on its way.

    Attributes:
      key: uint32, the data of the row's key.
      slot: where it is, or None before and after.
      length: tokens that the host has seen and kept.
      turn: where its last turn begins; what was forced since stands before it.
      finder: looks for stop strings in that turn, or None.
      finished: the result, or None while it runs.
    """

    request: Request
    key: np.ndarray
    slot: int | None = None
    length: int = 0
    turn: int = 0
    finder: StopFinder | None = None
    finished: FinishedRow | None = None

    def begin(self, turn: int, table: Sequence[bytes] | None) -> None:
        """Look forward to tokens sampled from number ``turn`` on."""
        self.turn, self.finished = turn, None
        stops = self.request.stops
        self.finder = StopFinder(stops, table) if stops and table is not None else None

    def take(self, new: np.ndarray) -> int | None:
        """Count new tokens in; the row's length if one of them completes a stop string."""
        before, self.length = self.length, self.length + len(new)
        if self.finder is None:
            return None
        forced = max(self.turn - before, 0)
        count = self.finder.feed(new[forced:].tolist())
        if count is None:
            return None
        self.length = before + forced + count
        return self.length

    def finish(
        self, arrays: dict[str, np.ndarray] | None, reason: str, table: Sequence[bytes] | None
    ) -> None:
        """Make the result from the slot's arrays (None for a row that never had one)."""
        kept: dict[str, Any] = {
            name: np.array(arrays[name][: self.length] if arrays else (), dtype)
            for name, dtype in PER_TOKEN.items()
        }
        text = None
        if table is not None:
            end = self.finder.text_end if self.finder is not None else None
            text = decode_text(kept["tokens"][self.turn :].tolist(), table, end)
        self.finished = FinishedRow(**kept, reason=reason, text=text)


@functools.partial(jax.jit, static_argnames="group_size")
def _row_keys(key: jax.Array, group_id: jax.Array, *, group_size: int) -> jax.Array:
    return jax.random.key_data(draw.row_keys(key, group_id[None], group_size)[0])


def row_keys(key: jax.Array, group_id: int, group_size: int, like: jax.Array) -> np.ndarray:
    """The data of each row's key, as ``generate`` derives them; ``like`` tells their kind."""
    kind: Any = getattr(key, "dtype", np.dtype(object))
    if not jnp.issubdtype(kind, jax.dtypes.prng_key):
        raise TypeError("key: give a new-style key, jax.random.key(seed)")
    if jax.random.key_impl(key) != jax.random.key_impl(like):
        raise ValueError(
            f"key: got one of {jax.random.key_impl(key)!r}, the engine was made with "
            f"{jax.random.key_impl(like)!r} (jax_default_prng_impl)"
        )
    if key.shape not in ((), (group_size,)):
        raise ValueError(f"key: shape {key.shape}; give one key, or one per row ({group_size},)")
    if key.ndim:
        return np.asarray(jax.random.key_data(key))
    return np.asarray(_row_keys(key, np.int32(group_id), group_size=group_size))


def token_ids(name: str, ids: Any, vocab_size: int) -> np.ndarray:
    """Check ids: one axis, integers, in the vocabulary."""
    array = np.asarray(ids)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{name}: expected a list of ids, got {array.dtype}{list(array.shape)}")
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        raise ValueError(
            f"{name}: ids from {array.min()} to {array.max()}, but the vocabulary has {vocab_size}"
        )
    return array.astype(np.int32)


def check_size(
    prompt: np.ndarray,
    cap: int,
    group_size: int,
    *,
    max_prompt_tokens: int,
    max_new_tokens: int,
    slots: int | None,
) -> None:
    """Refuse what never fits: each message says the limit and the remedy."""
    if not 1 <= len(prompt) <= max_prompt_tokens:
        raise ValueError(
            f"prompt_ids: {len(prompt)} tokens; the engine takes 1 to {max_prompt_tokens}: shorten "
            f"it yourself, or make the engine with max_prompt_tokens={len(prompt)}"
        )
    if not isinstance(cap, int | np.integer) or not 1 <= cap <= max_new_tokens:
        raise ValueError(
            f"max_new_tokens: got {cap!r}; the engine takes 1 to {max_new_tokens}: ask for less, "
            "or make the engine with a larger max_new_tokens"
        )
    if not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"group_size: expected an int ≥ 1, got {group_size!r}")
    if slots is not None and group_size > slots:
        raise ValueError(
            f"group_size: {group_size} rows to keep in {slots} slots; make the engine with "
            f"slots={group_size} or more"
        )


def scalar_options(
    *, stop_width: int, bias: bool, vocab_size: int, **given: Any
) -> SamplingOptions:
    """One request's options as NumPy scalars, in the widths that the engine has."""
    options: SamplingOptions = jax.tree.map(np.array, SamplingOptions.make(**given))
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value is not None and value.ndim != (field.name in ("stop_ids", "logit_bias")):
            raise ValueError(f"{field.name}: a request has one value, got shape {value.shape}")
    stops = options.stop_ids[options.stop_ids >= 0]
    if len(stops) > stop_width:
        raise ValueError(
            f"stop_ids: got {len(stops)}, the engine has room for {stop_width}; make it with "
            f"max_stop_ids={len(stops)}"
        )
    stops = np.pad(stops, (0, stop_width - len(stops)), constant_values=-1)
    if options.logit_bias is not None and not bias:
        raise ValueError("logit_bias: make the engine with logit_bias=True to keep one per slot")
    value = np.zeros(vocab_size, np.float32) if options.logit_bias is None else options.logit_bias
    if value.shape != (vocab_size,):
        raise ValueError(f"logit_bias: shape {value.shape}; the vocabulary has {vocab_size}")
    return dataclasses.replace(options, stop_ids=stops, logit_bias=value if bias else None)


def stop_strings(stop: str | Sequence[str], table: Sequence[bytes] | None) -> tuple[str, ...]:
    """Check stop strings."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if stops and table is None:
        raise ValueError("stop: make the engine with a tokenizer; stop strings are found in text")
    if any(not isinstance(text, str) or not text for text in stops):
        raise ValueError(f"stop: expected strings that are not empty, got {stops!r}")
    return stops

"""Continuous batching: rows leave when they end and waiting prompts take their slots."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from rlhf_jax.models.token_bytes import token_bytes
from rlhf_jax.sampling import _requests
from rlhf_jax.sampling._pool import SlotPool
from rlhf_jax.sampling._requests import Request, Row
from rlhf_jax.sampling._slots import Resuming
from rlhf_jax.sampling.groups import EngineStats, FinishedGroup
from rlhf_jax.types import Params

__all__ = ["Engine", "QueueFullError"]


class QueueFullError(RuntimeError):
    """More requests than ``max_waiting``; nothing was dropped, submit again after a round."""


class Engine:
    """Sample many requests of different lengths through a fixed number of slots.

    A row's tokens are a function of (parameters, prompt, options, key, group id, its number in the
    group), as with ``generate``, whose tokens they are: which slot a row gets, who else runs, and
    ``steps_per_round`` do not matter. Shapes are fixed when the engine is made: a round compiles
    once, prefill and insert once for each (number, width) bucket of prompts.

    Requests wait in the order in which they came. A row enters as soon as a slot is free; a group's
    prompt is run once, when its first row enters. Between rounds requests may come and go and the
    weights may change: tokens carry the version that made them, keys and values stay as they are.

    Args:
      model: a decoder, as for ``generate``.
      params: its parameters. The engine holds them: give a copy of what a train step donates.
        On a mesh the cache's heads lie as the model's own prefill places them.
      slots: rows that run at the same time.
      max_prompt_tokens: the longest prompt.
      max_new_tokens: the longest completion, with all its turns.
      steps_per_round: tokens of each row between two looks of the host.
      version: version of ``params``.
      max_waiting: requests that may wait; None for any number.
      tokenizer: gives rows their text and finds stop strings; or None.
      max_stop_ids: stop ids of one request.
      logit_bias: keep room for a logit bias per slot.
      prefill_tokens: prompts run together while count × width stays within this.
      row_sharding: where the slots lie on the mesh of ``params`` (a sharding of their axis), or
        None.

    Raises:
      ValueError: for sizes below 1, or a tokenizer of an unknown kind.

    >>> import jax, rlhf_jax as rl
    >>> config = rl.models.DecoderConfig(
    ...     vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2
    ... )
    >>> model = rl.models.Decoder(config)
    >>> params = model.init(jax.random.key(0))
    >>> engine = Engine(model, params, slots=2, max_prompt_tokens=16, max_new_tokens=8)
    >>> for length in (3, 5, 2):
    ...     _ = engine.submit([1, 2, 3], key=jax.random.key(1), max_new_tokens=length)
    >>> [(group.request, len(group.rows[0].tokens)) for group in engine]
    [(0, 3), (1, 5), (2, 2)]
    """

    def __init__(
        self,
        model: Any,
        params: Params,
        *,
        slots: int = 32,
        max_prompt_tokens: int = 256,
        max_new_tokens: int = 1024,
        steps_per_round: int = 8,
        version: int = 0,
        max_waiting: int | None = None,
        tokenizer: Any = None,
        max_stop_ids: int = 8,
        logit_bias: bool = False,
        prefill_tokens: int = 8192,
        row_sharding: jax.sharding.Sharding | None = None,
    ):
        self.model, self.params, self.version = model, params, version
        self.slots, self.max_waiting = slots, max_waiting
        self.max_prompt_tokens, self.max_new_tokens = max_prompt_tokens, max_new_tokens
        self._table = None if tokenizer is None else token_bytes(tokenizer)
        self._widths: dict[str, Any] = dict(
            stop_width=max_stop_ids, bias=logit_bias, vocab_size=model.config.vocab_size
        )
        self._pool = SlotPool(
            model,
            params,
            slots=slots,
            width=max_prompt_tokens,
            room=max_new_tokens,
            steps=steps_per_round,
            stop_width=max_stop_ids,
            bias=logit_bias,
            prefill_tokens=prefill_tokens,
            row_sharding=row_sharding,
        )
        self._stats = EngineStats()
        self._requests: dict[int, Request] = {}  # not answered yet
        self._kept: dict[int, Request] = {}  # answered, their slots held
        self._waiting: collections.deque[Request] = collections.deque()  # rows still to enter
        self._cancelled: dict[int, Request] = {}
        self._answers: collections.deque[FinishedGroup] = collections.deque()
        self._next = 0

    # requests

    def submit(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        *,
        key: jax.Array,
        group_size: int = 1,
        group_id: int | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        keep: bool = False,
        **options: Any,
    ) -> int:
        """Ask for ``group_size`` completions of a prompt.

        Args:
          prompt_ids: ``[t]``.
          key: a new-style key, from which each row's is derived as in ``generate``; or ``[G]``, one
            per row.
          group_size: G.
          group_id: the prompt's id; None takes the request's number.
          max_new_tokens: the length cap; None takes the engine's.
          stop: strings that end a completion with the token that completes one of them.
          keep: hold the slots after the end, for :meth:`extend`, until :meth:`release`.
          **options: temperature, stop_ids and the others of :class:`SamplingOptions`.

        Returns:
          The request's number.

        Raises:
          ValueError: a prompt or a cap over the engine's limits, ids outside the vocabulary, or
            options out of range.
          QueueFullError: ``max_waiting`` requests wait already.
        """
        prompt = _requests.token_ids("prompt_ids", prompt_ids, self.model.config.vocab_size)
        cap = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        _requests.check_size(
            prompt,
            cap,
            group_size,
            max_prompt_tokens=self.max_prompt_tokens,
            max_new_tokens=self.max_new_tokens,
            slots=self.slots if keep else None,
        )
        given = _requests.scalar_options(max_new_tokens=cap, **options, **self._widths)
        stops = _requests.stop_strings(stop, self._table)
        number = self._next
        group_id = number if group_id is None else group_id
        keys = _requests.row_keys(key, group_id, group_size, self._pool.keys)
        if self.max_waiting is not None and len(self._waiting) >= self.max_waiting:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait, max_waiting is {self.max_waiting}; run "
                "engine.step() or iterate, then submit again"
            )
        request = Request(
            number=number, prompt=prompt, group_id=group_id, options=given, stops=stops, keep=keep
        )
        request.rows = [Row(request=request, key=data) for data in keys]
        for row in request.rows:
            row.begin(0, self._table)
        self._next += 1
        self._stats.submitted += 1
        self._requests[number] = request
        self._waiting.append(request)
        return number

    def cancel(self, request: int) -> bool:
        """Stop a request: the next step frees its slots and answers it with what it has.

        Returns:
          Whether it was still unanswered.
        """
        found = self._requests.get(request)
        if found is not None:
            self._cancelled[request] = found
        return found is not None

    def extend(
        self,
        request: int,
        forced: Sequence[Sequence[int] | np.ndarray | None],
        *,
        max_new_tokens: int,
    ) -> None:
        """Go on with an answered request that was kept, from its cache; it is answered once more.

        Args:
          request: its number.
          forced: per row the ids to put in before sampling goes on, e.g. of
            :func:`rlhf_jax.data.turn_ids` (mask false, log-prob 0); None leaves a row as it is.
          max_new_tokens: tokens that may be sampled after them.

        Raises:
          ValueError: the request is not kept, or not answered yet; another number of rows; no
            room left for the tokens.
        """
        found = self._kept.get(request)
        if found is None:
            state = "not answered yet" if request in self._requests else "not kept"
            raise ValueError(
                f"request: {request} is {state}; submit with keep=True and wait for it"
            )
        if len(forced) != len(found.rows) or all(ids is None for ids in forced):
            raise ValueError(
                f"forced: give ids, or None, for each of the {len(found.rows)} rows, and ids for "
                f"one at least; got {len(forced)} entries"
            )
        vocab_size = self.model.config.vocab_size
        going = [
            (row, _requests.token_ids("forced", ids, vocab_size))
            for row, ids in zip(found.rows, forced, strict=True)
            if ids is not None
        ]
        self._pool.resume([self._resuming(row, ids, max_new_tokens) for row, ids in going])
        for row, ids in going:
            row.begin(row.length + len(ids), self._table)
        self._requests[request] = self._kept.pop(request)
        self._stats.submitted += 1

    def _resuming(self, row: Row, ids: np.ndarray, max_new_tokens: int) -> Resuming:
        """What a row goes on with."""
        begin = row.length + len(ids)
        if max_new_tokens < 1 or begin + max_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"max_new_tokens: {row.length} tokens, {len(ids)} forced and {max_new_tokens} new "
                f"ones; there is room for {self.max_new_tokens}: make the engine with more"
            )
        assert row.finished is not None and row.slot is not None
        forced = np.full(self.max_new_tokens, -1, np.int32)
        forced[row.length : begin] = ids
        return Resuming(
            slot=row.slot,
            length=row.length,
            token=int(row.finished.tokens[-1]),
            forced=forced,
            max_new_tokens=begin + max_new_tokens,
        )

    def release(self, request: int) -> None:
        """Give the slots of a kept request to others; one that still runs gives them at its end.

        Raises:
          ValueError: for a request that is not kept.
        """
        found = self._kept.pop(request, None) or self._requests.get(request)
        if found is None or not found.keep:
            raise ValueError(f"request: {request} is not kept")
        found.keep = False
        for row in found.rows:
            if row.finished is not None:
                self._pool.vacate(row)

    def update(self, params: Params, version: int) -> None:
        """Change the weights from the next round on; rows go on with the keys and values they have.

        Args:
          params: parameters like the old ones, placed alike.
          version: their version.

        Raises:
          ValueError: parameters of another structure, shape or dtype.
        """
        for what, old, new in (
            ("structure", jax.tree.structure(self.params), jax.tree.structure(params)),
            ("shapes and dtypes", _kinds(self.params), _kinds(params)),
        ):
            if old != new:
                raise ValueError(
                    f"params: their {what} are not those that the engine was made with"
                )
        self.params, self.version = params, version

    # answers

    def __iter__(self) -> Iterator[FinishedGroup]:
        """Finished groups as they come, until no request is left unanswered."""
        while self._answers or self._requests:
            if not self._answers:
                self._answers.extend(self.step())
            while self._answers:
                yield self._answers.popleft()

    @property
    def pending(self) -> int:
        """Requests that are not answered yet."""
        return len(self._requests)

    @property
    def stats(self) -> EngineStats:
        """A copy of the counters."""
        return dataclasses.replace(self._stats)

    @property
    def compilations(self) -> dict[str, int]:
        """Programs compiled in this process, by function: ``prefill, insert, resume, round``."""
        return self._pool.compilations()

    def step(self) -> list[FinishedGroup]:
        """Admit waiting rows, run one round, and return the groups that are finished now.

        Returns:
          Groups in the order of their requests; often none.

        Raises:
          RuntimeError: requests wait, but every slot is held by kept ones.
        """
        groups = self._drop_cancelled()
        self._admit()
        running = self._pool.running()
        if running:
            return groups + self._round(running)
        if self._waiting and not groups:
            raise RuntimeError(
                f"{len(self._waiting)} requests wait, but kept requests {sorted(self._kept)} hold "
                f"all {self.slots} slots: release or extend one of them"
            )
        return groups

    def _drop_cancelled(self) -> list[FinishedGroup]:
        dropped = [r for r in self._cancelled.values() if r.number in self._requests]
        self._cancelled = {}
        if not dropped:
            return []
        self._waiting = collections.deque(r for r in self._waiting if r not in dropped)
        self._stats.cancelled += len(dropped)
        for request in dropped:
            request.keep, request.prefilled = False, None
        rows = [row for request in dropped for row in request.rows]
        groups = self._finish([(row, "cancelled") for row in rows if row.finished is None])
        for row in rows:
            self._pool.vacate(row)
        return groups

    def _admit(self) -> None:
        """Give free slots to waiting rows, first come, first served."""
        entering: list[Row] = []
        while self._waiting and len(entering) < self._pool.free:
            request = self._waiting[0]
            entering.append(request.rows[request.entered])
            request.entered += 1
            if request.entered == len(request.rows):
                self._waiting.popleft()
        requests = list(dict.fromkeys(row.request for row in entering))
        new = [request for request in requests if request.prefilled is None]
        self._stats.prefill_calls += self._pool.prefill(self.params, new)
        self._stats.prefills += len(new)
        self._pool.insert(entering)
        self._stats.admitted += len(entering)
        for request in requests:
            if request.entered == len(request.rows):
                request.prefilled = None

    def _round(self, running: list[Row]) -> list[FinishedGroup]:
        """Up to ``steps_per_round`` tokens for the running rows; the groups that this finishes."""
        report = self._pool.run(self.params, self.version)
        ended: list[tuple[Row, str]] = []
        for row in running:
            before, slot = row.length, row.slot
            new = report.recent[slot, : report.lengths[slot] - before]
            if row.take(new):
                ended.append((row, "stop_string"))
            elif report.done[slot]:
                ended.append((row, "stop" if report.terminated[slot] else "length"))
            self._stats.tokens += row.length - before
        self._stats.rounds += 1
        self._stats.decode_steps += int(report.steps)
        self._stats.slot_steps += int(report.steps) * self.slots
        return self._finish(ended)

    def _finish(self, ended: list[tuple[Row, str]]) -> list[FinishedGroup]:
        """Take the results of ended rows out of their slots; answer the requests that are whole."""
        arrays = self._pool.read([row for row, _ in ended])
        for (row, reason), values in zip(ended, arrays, strict=True):
            row.finish(values, reason, self._table)
            if not row.request.keep:
                self._pool.vacate(row)
        groups = []
        for request in sorted({row.request for row, _ in ended}, key=lambda r: r.number):
            if (group := request.answer()) is not None:
                groups.append(group)
                del self._requests[request.number]
                if request.keep:
                    self._kept[request.number] = request
        self._stats.finished += len(groups)
        return groups


def _kinds(params: Params) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(params)]

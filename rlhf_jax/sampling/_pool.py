"""The engine's slots as the host sees them: which row is where, and what the device is asked."""

from __future__ import annotations

import dataclasses
import functools
import heapq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models.cache import Cache, cache_axes
from rlhf_jax.sampling import _slots
from rlhf_jax.sampling._requests import PER_TOKEN, Request, Row
from rlhf_jax.sampling._slots import QUIET, Entering, Report, Resuming, Slots, prefill
from rlhf_jax.sampling.buckets import round_up
from rlhf_jax.sampling.options import SamplingOptions
from rlhf_jax.sampling.rows import Prompts, Rows
from rlhf_jax.types import Params

__all__ = ["SlotPool", "empty_slots"]

_SMALLEST_WIDTH = 16
_BLOCKS = 32  # at most, in which rows read their caches


class SlotPool:
    """R slots, their arrays, and the rows in them.

    Args:
      model, params: as for ``generate``.
      slots: R.
      width: Tp, the longest prompt.
      room: S, the longest completion.
      steps: decode steps of a round.
      stop_width: stop ids of a row.
      bias: keep a logit bias for every slot.
      prefill_tokens: prompts run together while count × width stays within this.
      row_sharding: where the slots lie, or None.
    """

    def __init__(
        self,
        model: Any,
        params: Params,
        *,
        slots: int,
        width: int,
        room: int,
        steps: int,
        stop_width: int,
        bias: bool,
        prefill_tokens: int,
        row_sharding: Any,
    ):
        sizes = dict(slots=slots, max_prompt_tokens=width, max_new_tokens=room)
        sizes |= dict(steps_per_round=steps, max_stop_ids=stop_width)
        for name, value in sizes.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an int ≥ 1, got {value!r}")
        self._model, self._slots, self._steps = model, slots, steps
        self._prefill_tokens = prefill_tokens
        self._widths = _doubling(min(_SMALLEST_WIDTH, width), width)
        self._everywhere = _everywhere(params)
        self._state = empty_slots(
            model,
            params,
            slots=slots,
            width=width,
            room=room,
            stop_width=stop_width,
            bias=bias,
            sharding=self._everywhere if row_sharding is None else row_sharding,
        )
        self._placement = _placement(self._state)
        self._rows: list[Row | None] = [None] * slots
        self._free = list(range(slots))

    @property
    def free(self) -> int:
        """Slots without a row."""
        return len(self._free)

    @property
    def keys(self) -> jax.Array:
        """The slots' keys, of the kind that requests must have."""
        return self._state.keys

    def running(self) -> list[Row]:
        """Rows that have not ended."""
        return [row for row in self._rows if row is not None and row.finished is None]

    def vacate(self, row: Row) -> None:
        """Free a row's slot, if it has one."""
        if row.slot is not None:
            self._rows[row.slot] = None
            heapq.heappush(self._free, row.slot)
            row.slot = None

    def prefill(self, params: Params, requests: list[Request]) -> int:
        """Run prompts in buckets of their width and number; gives the number of calls."""
        by_width: dict[int, list[Request]] = {}
        for request in requests:
            width = round_up(len(request.prompt), self._widths)
            by_width.setdefault(width, []).append(request)
        calls = 0
        for width, alike in by_width.items():
            most = min(max(self._prefill_tokens // width, 1), self._slots)
            for begin in range(0, len(alike), most):
                some = alike[begin : begin + most]
                count = round_up(len(some), _doubling(1, most))
                prompts = self._put(_padded(some, count, width))
                prefilled = prefill(self._model, params, prompts)
                for index, request in enumerate(some):
                    request.prefilled = (prefilled, index)
                calls += 1
        return calls

    def insert(self, rows: list[Row]) -> None:
        """Put rows, whose prompts have been run, into free slots."""
        batches: dict[int, list[Row]] = {}
        for row in rows:
            assert row.request.prefilled is not None
            row.slot = heapq.heappop(self._free)
            self._rows[row.slot] = row
            batches.setdefault(id(row.request.prefilled[0]), []).append(row)
        for batch in batches.values():
            sources: Any = [row.request.prefilled for row in batch]
            entries = [
                Entering(len(batch), row.slot, index, row.key, row.request.options)
                for row, (_, index) in zip(batch, sources, strict=True)
            ]
            entering = self._stacked(entries)
            entering = entering._replace(count=np.int32(len(batch)))
            self._state = _slots.insert(
                self._state, sources[0][0], self._put(entering), placement=self._placement
            )

    def resume(self, entries: list[Resuming]) -> None:
        """Let ended rows go on."""
        resuming = self._put(self._stacked(entries))
        self._state = _slots.resume(self._state, resuming, placement=self._placement)

    def run(self, params: Params, version: int) -> Report:
        """One round; the report is NumPy."""
        occupied = np.array([row is not None for row in self._rows])
        running = np.array([row is not None and row.finished is None for row in self._rows])
        self._state, report = _slots.run(
            self._model,
            params,
            self._state,
            *self._put((running, occupied, np.int32(version))),
            steps=self._steps,
            placement=self._placement,
        )
        return jax.device_get(report)

    def read(self, rows: list[Row]) -> list[dict[str, np.ndarray] | None]:
        """The per-token arrays of some rows; None for one that never had a slot."""
        buffers = {name: getattr(self._state.rows, name) for name in PER_TOKEN}
        slots = [row.slot for row in rows]
        return jax.device_get([None if s is None else _slots.read(buffers, s) for s in slots])

    def compilations(self) -> dict[str, int]:
        """Programs compiled so far in this process, by function."""
        functions: dict[str, Any] = dict(
            prefill=prefill, insert=_slots.insert, resume=_slots.resume, round=_slots.run
        )
        return {name: function._cache_size() for name, function in functions.items()}

    def _stacked(self, entries: list[Any]) -> Any:
        """Stack some rows' entries, and fill up to R with ones that name no slot."""
        some = [*entries, *[entries[0]._replace(slot=self._slots)] * (self._slots - len(entries))]
        return jax.tree.map(lambda *leaves: _compact(np.stack(leaves)), *some)

    def _put(self, tree: Any) -> Any:
        """Host arrays for every device of the mesh."""
        on_mesh = isinstance(self._everywhere, jax.NamedSharding)
        return jax.device_put(tree, self._everywhere) if on_mesh else tree


def _padded(requests: list[Request], count: int, width: int) -> Prompts:
    """Prompts padded on the right, and in their number."""
    tokens = np.zeros((count, width), np.int32)
    mask = np.zeros((count, width), bool)
    mask[:, 0] = True  # every prompt has a token, also one that only fills the bucket
    for i, request in enumerate(requests):
        tokens[i, : len(request.prompt)] = request.prompt
        mask[i, : len(request.prompt)] = True
    return Prompts(tokens, mask)  # pyright: ignore[reportArgumentType]


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """first, 2·first, 4·first, … and last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def _compact(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int32) if array.dtype == np.int64 else array


def _everywhere(params: Params) -> Any:
    """Every device that the parameters are on, or None for host arrays."""
    sharding: Any = getattr(jax.tree.leaves(params)[0], "sharding", None)
    if isinstance(sharding, jax.NamedSharding):
        return jax.NamedSharding(sharding.mesh, jax.P())
    return sharding


def _placement(slots: Slots) -> tuple[Any, ...] | None:
    """The static ``placement`` of the jitted functions: for slots on a mesh with Auto axes."""
    shardings = [leaf.sharding for leaf in jax.tree.leaves(slots)]
    explicit = jax.sharding.AxisType.Explicit
    if all(
        isinstance(s, jax.NamedSharding) and explicit not in s.mesh.axis_types for s in shardings
    ):
        return tuple(shardings)
    return None


def empty_slots(
    model: Any,
    params: Params,
    *,
    slots: int,
    width: int,
    room: int,
    stop_width: int,
    bias: bool,
    sharding: Any,
) -> Slots:
    """Slots without rows.

    Args:
      model, params: as for ``generate``.
      slots: R.
      width: Tp, room for a prompt.
      room: S, room for a completion.
      stop_width: stop ids of a row.
      bias: keep a logit bias for every row.
      sharding: where the slots lie (a sharding of the leading axis), or None.
    """

    def fill(value: Any, dtype: Any, *tail: int) -> jax.Array:
        return jnp.full((slots, *tail), value, dtype, device=sharding)

    hidden, cache = _empty_cache(model, params, slots, width, room, sharding)
    keys = jax.random.split(jax.random.key(0), (slots, 1))
    options = {name: fill(0, jnp.float32, 1) for name in QUIET}
    options |= {name: fill(0, jnp.int32, 1) for name in ("top_k", "min_new_tokens")}
    rows = Rows(
        step=fill(0, jnp.int32, 1),
        token=fill(0, jnp.int32, 1),
        tokens=fill(0, jnp.int32, 1, room),
        log_probs=fill(0, jnp.float32, 1, room),
        truncated_log_probs=fill(0, jnp.float32, 1, room),
        lengths=fill(0, jnp.int32, 1),
        terminated=fill(False, bool, 1),
        done=fill(True, bool, 1),
        cache=cache,
        versions=fill(0, jnp.int32, 1, room),
        forced=fill(-1, jnp.int32, 1, room),
        mask=fill(False, bool, 1, room),
    )
    return Slots(
        rows=rows,
        first=fill(0, hidden.dtype, 1, hidden.shape[-1]),
        keys=keys if sharding is None else jax.device_put(keys, sharding),
        options=SamplingOptions(
            **options,
            max_new_tokens=fill(0, jnp.int32, 1),
            stop_ids=fill(-1, jnp.int32, 1, stop_width),
            logit_bias=fill(0, jnp.float32, 1, model.config.vocab_size) if bias else None,
        ),
        prompts=Prompts(fill(0, jnp.int32, width), fill(False, bool, width)),
    )


def _empty_cache(
    model: Any, params: Params, slots: int, width: int, room: int, sharding: Any
) -> tuple[Any, Any]:
    """The shape of the hidden states, and a cache of zeros, never whole on one device of a mesh."""

    def make(params: Params, tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, Any]:
        hidden, prefix = model.prefill(params, tokens, mask)
        return hidden, model.init_cache(prefix, group_size=1, max_new_tokens=room)

    def prompts(make_one: Any, columns: int) -> list[Any]:
        return [make_one((slots, columns), dtype) for dtype in (jnp.int32, jnp.bool_)]

    some = prompts(functools.partial(jax.ShapeDtypeStruct, sharding=sharding), width)
    hidden, shapes = jax.eval_shape(make, params, *some)
    if not isinstance(sharding, jax.NamedSharding):
        zero = functools.partial(jnp.zeros, device=sharding)
        cache = jax.tree.map(lambda leaf: zero(leaf.shape, leaf.dtype), shapes)
        if isinstance(cache, Cache):  # rows of all lengths: the longest should not cost all of them
            few = range(-(-slots // _BLOCKS), slots + 1)
            cache = dataclasses.replace(cache, block=next(n for n in few if slots % n == 0))
        return hidden, cache
    # Prompts of one column show which axes of the mesh the model spreads a prefix over.
    short = Prompts(*prompts(functools.partial(jnp.ones, device=sharding), 1))
    prefix = prefill(model, params, short).prefix
    axes, where = cache_axes(shapes), {}

    def look(leaf: jax.Array, names: tuple[str | None, ...]) -> None:
        spec = (*leaf.sharding.spec, *[None] * leaf.ndim)  # pyright: ignore[reportAttributeAccessIssue]
        where.update({name: spec[i] for i, name in enumerate(names) if name is not None})

    jax.tree.map(look, prefix, axes.prefix)
    where["prompt"] = sharding.spec[0] if sharding.spec else None  # whatever the compiler chose

    def zeros(leaf: Any, names: tuple[str | None, ...]) -> jax.Array:
        place = jax.NamedSharding(sharding.mesh, jax.P(*(where.get(name) for name in names)))
        return jnp.zeros(leaf.shape, leaf.dtype, device=place)

    return hidden, jax.tree.map(zeros, shapes, axes)

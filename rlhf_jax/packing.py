"""Sequence packing: several rows' real tokens in one row, so that padding costs little.

    packing = rl.packing.plan(rollout.attention_mask, width=1024, multiple=8)   # on the host
    packed = rl.packing.pack(batch, packing)                                    # on the device
    state, metrics = step(state, packed)
    old = rl.packing.unpack(policy_fn(params, packed).log_probs, packing)       # [B, T] again

A row of a batch is one *sequence*: a prompt and its completion. A packed row holds several, told
apart by ``segment_ids``: tokens read only their own segment, positions start anew in each, and the
statistics of a sequence are those of its segment. What held one number a row then holds it on each
of the sequence's tokens. A loss with a global denominator, and the gradient, are as they were.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from rlhf_jax import checks
from rlhf_jax._sequences import gathered
from rlhf_jax.types import Batch

__all__ = ["Packing", "pack", "plan", "unpack"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """Where each token of packed rows comes from.

    Args:
      source_row, source_col: int32 ``[R, W]``: the token's place in the rows ``[B, T]``; 0 on
        padding.
      segment_ids: int32 ``[R, W]``: 0, 1, … along each row; −1 on padding, which ends the row.
      shape: ``(B, T)`` of the rows (static).
    """

    source_row: Any
    source_col: Any
    segment_ids: Any
    shape: tuple[int, int] = dataclasses.field(metadata=dict(static=True))


def plan(
    attention_mask: ArrayLike,
    width: int,
    *,
    rows: int | None = None,
    multiple: int = 1,
    mask: ArrayLike | None = None,
) -> Packing:
    """Lay sequences into rows of one width, the longest first, each into the first row with room.

    First-fit decreasing uses at most 11/9 of the fewest rows possible, plus one. It runs on the
    host: the arrays' shapes depend on the lengths, through ``rows`` or ``multiple`` alone.

    Args:
      attention_mask: bool ``[B, T]``, real tokens; padding may be on any side.
      width: W, columns of a packed row.
      rows: R exactly, for one shape in every step; the rest is padding.
      multiple: else R is the least multiple of this that holds all, e.g. devices × micro-batches.
      mask: bool ``[B, T]``, sampled tokens; given, sequences without one are left out.

    Returns:
      A :class:`Packing` of NumPy arrays.

    Raises:
      TypeError: if a mask is not bool.
      ValueError: a sequence longer than ``width``, more sequences than ``rows`` hold, or no
        sequence at all.

    References:
      Johnson, "Near-optimal bin packing algorithms", 1973, for the bound; Krell et al., "Efficient
      sequence packing without cross-contamination", 2021.

    Example:
      >>> real = np.array([[1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0]], bool)
      >>> packing = plan(real, width=4)
      >>> packing.segment_ids.tolist()
      [[0, 0, 0, 1], [0, 0, -1, -1]]
      >>> packing.source_row.tolist(), packing.source_col.tolist()
      ([[0, 0, 0, 2], [1, 1, 0, 0]], [[0, 1, 2, 0], [2, 3, 0, 0]])
    """
    for name, value in (("width", width), ("multiple", multiple)):
        if value < 1:
            raise ValueError(f"{name}: got {value}; it must be at least 1")
    real = np.asarray(checks.boolean("attention_mask", attention_mask, ndim=2, axes="[B, T]"))
    lengths = real.sum(axis=1)
    if mask is not None:
        sampled = checks.boolean("mask", mask, like=real, like_name="attention_mask")
        lengths = np.where(np.asarray(sampled).any(axis=1), lengths, 0)
    if lengths.max(initial=0) > width:
        longest = int(lengths.argmax())
        raise ValueError(
            f"width: got {width}, but row {longest} has {lengths[longest]} real tokens "
            f"({int((lengths > width).sum())} rows are too long); use width ≥ {lengths[longest]}, "
            "or cut the completions before the log-probs are taken"
        )
    bins = _first_fit(lengths, width)
    return _arrays(real, bins, width, _row_count(len(bins), rows, multiple, width))


def _first_fit(lengths: np.ndarray, width: int) -> list[list[int]]:
    """Which sequences go into each row, longest first; empty ones go nowhere."""
    order = [int(i) for i in np.argsort(-lengths, kind="stable") if lengths[i]]
    room = np.full(len(order), width)
    bins: list[list[int]] = []
    for sequence in order:
        row = int(np.argmax(room >= lengths[sequence]))
        room[row] -= lengths[sequence]
        if row == len(bins):
            bins.append([])
        bins[row].append(sequence)
    return bins


def _row_count(needed: int, rows: int | None, multiple: int, width: int) -> int:
    if not needed:
        raise ValueError(
            "attention_mask: no row has a token to pack; check the masks, or leave out this update"
        )
    if rows is None:
        return -(-needed // multiple) * multiple
    if rows < needed:
        raise ValueError(
            f"rows: got {rows}, but the sequences fill {needed} rows of width {width}; raise rows "
            "or width, or use multiple= to let the rows grow"
        )
    return rows


def _arrays(real: np.ndarray, bins: list[list[int]], width: int, rows: int) -> Packing:
    source_row, source_col = np.zeros((2, rows, width), np.int32)
    segment_ids = np.full((rows, width), -1, np.int32)
    for row, sequences in enumerate(bins):
        at = 0
        for segment, sequence in enumerate(sequences):
            columns = np.flatnonzero(real[sequence])
            here = slice(at, at + len(columns))
            source_row[row, here], source_col[row, here] = sequence, columns
            segment_ids[row, here] = segment
            at += len(columns)
    return Packing(
        source_row=source_row,
        source_col=source_col,
        segment_ids=segment_ids,
        shape=(real.shape[0], real.shape[1]),
    )


@jax.jit
def pack(batch: Batch, packing: Packing) -> Batch:
    """Move a batch into packed rows: ``y[r, w] = x[source_row[r, w], source_col[r, w]]``.

    Every per-token array ``[B, T, …]`` becomes ``[R, W, …]``. What holds one entry a row becomes
    per token, as the losses take it: ``advantages``, ``denominator`` and ``group_ids`` ``[B]`` →
    ``[R, W]``, an ``extra`` ``[B, …]`` → ``[R, W, …]`` unless its second axis is T long.

    Count ``denominator`` from the rows *before* packing (``masked.denominator``), in particular for
    ``fixed_length`` with empty completions. Hand ``batch.segment_ids`` to the loss.

    Args:
      batch: rows ``[B, T]``.
      packing: a :func:`plan` of these rows.

    Returns:
      A Batch with ``segment_ids`` and ``start`` 0. Padding is false in both masks, 1 in
      ``denominator`` (so that a division is safe), −1 in ``group_ids`` and 0 elsewhere. Lay it over
      devices with ``jax.device_put``.

    Raises:
      ValueError: if the batch is packed already, or of another shape than the plan's rows.

    Example:
      >>> ones = jnp.ones((2, 2))
      >>> real = jnp.array([[True, True], [True, False]])
      >>> batch = Batch(
      ...     tokens=jnp.array([[5, 6], [7, 0]]),
      ...     mask=real,
      ...     attention_mask=real,
      ...     group_ids=jnp.array([0, 1]),
      ...     advantages=jnp.array([1.0, -1.0]),
      ...     old_log_probs=-ones,
      ...     sampler_log_probs=-ones,
      ... )
      >>> packed = pack(batch, plan(real, width=4))
      >>> packed.tokens.tolist(), packed.advantages.tolist()
      ([[5, 6, 7, 0]], [[1.0, 1.0, -1.0, 0.0]])
    """
    if batch.segment_ids is not None:
        raise ValueError("batch.segment_ids: the batch is packed already; pack the rows [B, T]")
    if batch.tokens.shape != packing.shape:
        raise ValueError(
            f"packing: it was planned for rows {packing.shape}, the batch has "
            f"{batch.tokens.shape}; plan from this batch's attention_mask"
        )
    segment_ids = jnp.asarray(packing.segment_ids)

    def move(x: Any, fill: Any = 0) -> Any:
        if x is None:
            return None
        x = gathered(jnp.asarray(x))
        per_token = x.ndim > 1 and x.shape[1] == packing.shape[1]
        index = (packing.source_row, packing.source_col) if per_token else (packing.source_row,)
        y = x[index]
        real = (segment_ids >= 0).reshape(segment_ids.shape + (1,) * (y.ndim - 2))
        return jnp.where(real, y, jnp.asarray(fill, y.dtype))

    return Batch(
        tokens=move(batch.tokens),
        mask=move(batch.mask),
        attention_mask=move(batch.attention_mask),
        group_ids=move(batch.group_ids, -1),
        advantages=move(batch.advantages),
        old_log_probs=move(batch.old_log_probs),
        sampler_log_probs=move(batch.sampler_log_probs),
        ref_log_probs=move(batch.ref_log_probs),
        denominator=move(batch.denominator, 1),
        trunk=move(batch.trunk),
        extra={name: move(x) for name, x in batch.extra.items()},
        segment_ids=segment_ids,
    )


@jax.jit
def unpack(x: ArrayLike, packing: Packing) -> jax.Array:
    """Move per-token results back to the rows that were packed; 0 where nothing comes from.

    Args:
      x: ``[R, W, …]``: old log-probs, values, … of the packed rows.
      packing: the plan by which they were packed.

    Returns:
      ``[B, T, …]`` in the dtype of ``x``.

    Raises:
      ValueError: if ``x`` does not have the shape of the packed rows.

    Example:
      >>> packing = plan(np.array([[False, True], [True, True]]), width=3)
      >>> unpack(jnp.array([[1.0, 2.0, 3.0]]), packing).tolist()
      [[0.0, 3.0], [1.0, 2.0]]
    """
    x = gathered(jnp.asarray(x))
    segment_ids = jnp.asarray(packing.segment_ids)
    checks.shape("x", x, (*segment_ids.shape, *x.shape[2:]), like="packing.segment_ids")
    rows, length = packing.shape
    # Padding is written to a row that is not there.
    row = jnp.where(segment_ids >= 0, packing.source_row, rows)
    empty = jnp.zeros((rows, length, *x.shape[2:]), x.dtype)
    return empty.at[row, packing.source_col].set(x, mode="drop")

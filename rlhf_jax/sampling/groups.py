"""What the engine gives back: finished groups, and how they become a ``Rollout``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.types import Rollout

__all__ = ["EngineStats", "FinishedGroup", "FinishedRow", "to_rollout"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FinishedRow:
    """One completion, in NumPy; per-token arrays are ``[n]``.

    Args:
      tokens: int32, the completion: sampled tokens, and those that :meth:`Engine.extend` put in.
      mask: bool, true on sampled tokens, the stop id included.
      log_probs: float32, log μ under the tempered full softmax; 0 outside ``mask``.
      truncated_log_probs: float32, log μ of the distribution that was really drawn from.
      versions: int32, the version of the weights that made each token.
      reason: ``"stop"`` (a stop id), ``"stop_string"``, ``"length"`` or ``"cancelled"``.
      text: what was sampled since the last :meth:`Engine.extend`, up to the stop string and without
        special tokens; None in an engine without a tokenizer.
    """

    tokens: np.ndarray
    mask: np.ndarray
    log_probs: np.ndarray
    truncated_log_probs: np.ndarray
    versions: np.ndarray
    reason: str
    text: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FinishedGroup:
    """All completions of one request.

    Args:
      request: what :meth:`Engine.submit` returned.
      group_id: the prompt's id.
      prompt: int32 ``[t]``.
      rows: G completions, in the order of their sample number.
    """

    request: int
    group_id: int
    prompt: np.ndarray
    rows: tuple[FinishedRow, ...]


@dataclasses.dataclass(kw_only=True)
class EngineStats:
    """Counters since the engine was made.

    Args:
      rounds: calls of the jitted round.
      decode_steps: decode steps in them; each costs all slots.
      tokens: tokens of rows, forced ones included.
      slot_steps: decode steps × slots.
      prefills: prompts run; one per request, whatever its group size.
      prefill_calls: calls of the jitted prefill.
      submitted, finished, cancelled: requests; an extension counts once more.
      admitted: rows that entered a slot.
    """

    rounds: int = 0
    decode_steps: int = 0
    tokens: int = 0
    slot_steps: int = 0
    prefills: int = 0
    prefill_calls: int = 0
    submitted: int = 0
    admitted: int = 0
    finished: int = 0
    cancelled: int = 0

    @property
    def utilisation(self) -> float:
        """Share of the slot-steps that made a token which was kept."""
        return self.tokens / self.slot_steps if self.slot_steps else 0.0


def to_rollout(
    groups: Sequence[FinishedGroup], *, width: int | None = None, length: int | None = None
) -> Rollout:
    """Finished groups as the ``Rollout`` that ``generate`` would have given.

    Args:
      groups: in the order wanted; rows are group-major.
      width: prompt columns, left-padded; None takes the longest prompt's.
      length: completion columns; None takes the longest completion's.

    Returns:
      A :class:`Rollout` of ``width + length`` columns. ``lengths`` counts a completion's tokens,
      forced ones included; ``terminated`` is true for both kinds of stop; ``version`` is the oldest
      among the tokens.

    Raises:
      ValueError: no groups, or one that does not fit.

    >>> row = FinishedRow(
    ...     tokens=np.array([7, 2]),
    ...     mask=np.array([True, True]),
    ...     log_probs=np.array([-0.5, -0.1]),
    ...     truncated_log_probs=np.array([-0.5, -0.1]),
    ...     versions=np.array([3, 4]),
    ...     reason="stop",
    ... )
    >>> group = FinishedGroup(request=0, group_id=5, prompt=np.array([8, 9]), rows=(row,))
    >>> rollout = to_rollout([group], width=3, length=4)
    >>> rollout.tokens.tolist(), rollout.mask.sum().item(), rollout.version.item()
    ([[0, 8, 9, 7, 2, 0, 0]], 2, 3)
    """
    if not groups:
        raise ValueError("groups: got none; give at least one finished group")
    pairs = [(group, row) for group in groups for row in group.rows]
    width = _fit("width", width, [len(group.prompt) for group in groups], "prompt")
    length = _fit("length", length, [len(row.tokens) for _, row in pairs], "completion")

    def join(
        dtype: type,
        completion: Callable[[FinishedRow], np.ndarray],
        prompt: Callable[[FinishedGroup], Any] | None = None,
    ) -> jax.Array:
        out = np.zeros((len(pairs), width + length), dtype)
        for line, (group, row) in zip(out, pairs, strict=True):
            line[width : width + len(row.tokens)] = completion(row)
            if prompt is not None:
                line[width - len(group.prompt) : width] = prompt(group)
        return jnp.asarray(out)

    terminated = np.array([row.reason in ("stop", "stop_string") for _, row in pairs])
    versions = [int(row.versions.min()) for _, row in pairs if len(row.versions)]
    return Rollout(
        tokens=join(np.int32, lambda row: row.tokens, lambda group: group.prompt),
        mask=join(np.bool_, lambda row: row.mask),
        attention_mask=join(np.bool_, lambda row: np.ones_like(row.mask), lambda group: True),
        log_probs=join(np.float32, lambda row: row.log_probs),
        truncated_log_probs=join(np.float32, lambda row: row.truncated_log_probs),
        lengths=jnp.asarray([len(row.tokens) for _, row in pairs], jnp.int32),
        terminated=jnp.asarray(terminated),
        truncated=jnp.asarray(~terminated),
        group_ids=jnp.asarray([group.group_id for group, _ in pairs], jnp.int32),
        version=jnp.int32(min(versions, default=0)),
        start=width,
    )


def _fit(name: str, size: int | None, needed: list[int], what: str) -> int:
    longest = max(needed)
    if size is None:
        return longest
    if longest > size:
        raise ValueError(
            f"{name}: got {size}, but a {what} has {longest} tokens; give at least that"
        )
    return size

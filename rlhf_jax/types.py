"""The pytrees that travel through the library, and the alignment rule, stated once.

**Alignment.** Every per-token array is ``[B, T]`` and shares one index: ``x[b, t]`` belongs to
``tokens[b, t]``. ``log_probs[b, t]`` is the log-probability of ``tokens[b, t]`` given the tokens
before it, so ``log_probs[:, 0]`` is 0 by definition. The shift between logits and tokens is made
once, in :mod:`rlhf_jax.logprobs`, and nowhere else.

**Masks.** ``mask`` is true on tokens that the policy *sampled*, including the EOS that ended a
completion; false on the prompt, on padding, and on tokens that were forced or came from a tool.
``attention_mask`` is true on every real token, prompt or completion. Both come from lengths, never
from comparing ids with a pad id (pad and EOS may be one id).

**Rows.** ``B`` rows are ``P`` prompts × ``G`` completions, prompt-major (row ``p*G + g``), and each
row carries its prompt's id in ``group_ids``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

__all__ = ["ApplyFn", "Batch", "PolicyOutput", "Rollout", "TrainState"]

Params = Any
"""A plain pytree of arrays."""


class ApplyFn(Protocol):
    """Anybody's model: parameters and token ids in, logits out.

    Args:
      params: a pytree of arrays.
      tokens: int32 ``[B, T]``.

    Returns:
      logits ``[B, T, V]``; ``logits[:, t]`` scores the token at ``t + 1``.
    """

    def __call__(self, params: Params, tokens: jax.Array, /, **kwargs: Any) -> jax.Array:
        """Apply the model."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """What the sampler really did: ids, masks, and the log-probs it drew them with.

    Args:
      tokens: int32 ``[B, T]``: left-padded prompt bucket (``start`` columns), then the completion.
      mask: bool ``[B, T]``: sampled tokens, EOS included.
      attention_mask: bool ``[B, T]``: real tokens.
      log_probs: float32 ``[B, T]``: log μ under the tempered *full* softmax; 0 outside ``mask``.
      truncated_log_probs: float32 ``[B, T]``: log μ of the distribution that top-k/top-p really
        drew from (renormalised); equals ``log_probs`` when no filter is on.
      lengths: int32 ``[B]``: sampled tokens in each row.
      terminated: bool ``[B]``: the row ended with a stop id.
      truncated: bool ``[B]``: the row was cut by the length cap; the complement of ``terminated``.
      group_ids: int32 ``[B]``: the prompt's id.
      version: int32 scalar: version of the weights that sampled it.
      trunk: float ``[B, T, D]`` or None: hidden states below the first trainable layer, computed
        once for every later pass over these rows (:func:`rlhf_jax.policy.trunk`).
      start: the prompt bucket's width ``Tp`` (static): columns before it hold no completion.
    """

    tokens: jax.Array
    mask: jax.Array
    attention_mask: jax.Array
    log_probs: jax.Array
    truncated_log_probs: jax.Array
    lengths: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    group_ids: jax.Array
    version: jax.Array
    trunk: Any = None
    start: int = dataclasses.field(metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """What one train step consumes. Every array has the rows first, so that it splits by rows.

    Where rows are packed (:mod:`rlhf_jax.packing`), what is ``[B]`` below is ``[B, T]``.

    Args:
      tokens, mask, attention_mask, group_ids, trunk, start: as in :class:`Rollout`.
      advantages: float32 ``[B]`` or ``[B, T]``.
      old_log_probs: float32 ``[B, T]``: log π_old as the learner computes it.
      sampler_log_probs: float32 ``[B, T]``: log μ from sampling time.
      ref_log_probs: float32 ``[B, T]`` or None when the loss holds no KL to a reference.
      denominator: float32 ``[B]``: the aggregation's *global* denominator, repeated per row
        (``masked.denominator``), so that any split into micro-batches keeps the gradient.
      extra: any further row-first arrays that a loss of one's own wants.
      segment_ids: int32 ``[B, T]`` or None: which sequence of a packed row a token belongs to; −1
        on padding. Policy and value functions read them; hand them to the loss too.
    """

    tokens: jax.Array
    mask: jax.Array
    attention_mask: jax.Array
    group_ids: jax.Array
    advantages: jax.Array
    old_log_probs: jax.Array
    sampler_log_probs: jax.Array
    ref_log_probs: Any = None
    denominator: Any = None
    trunk: Any = None
    extra: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    segment_ids: Any = None
    start: int = dataclasses.field(default=0, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyOutput:
    """What the learner's forward pass hands to a loss.

    Args:
      log_probs: float32 ``[B, T]``, aligned with ``tokens``, tempered.
      entropy: float32 ``[B, T]`` or None.
    """

    log_probs: jax.Array
    entropy: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """What a train step changes; donated to it.

    Args:
      params: the *trainable* parameters, float32 (``None`` where a leaf is frozen).
      opt_state: the optimizer's state over ``params``.
      step: int32 scalar: updates tried so far; also the version of ``params``.
      skipped: int32 scalar: updates dropped because a gradient was not finite.
    """

    params: Params
    opt_state: Any
    step: Any
    skipped: Any

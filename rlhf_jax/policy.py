"""From a model to what the learner needs: tempered log-probs and entropy, aligned with the tokens.

A *policy function* takes ``(params, batch)`` and returns a :class:`~rlhf_jax.types.PolicyOutput`.
``batch`` is anything with ``tokens``, ``attention_mask`` and ``start``: a Rollout or a Batch, whose
rows may be packed (:mod:`rlhf_jax.packing`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax import logprobs
from rlhf_jax._token_pieces import Pieces
from rlhf_jax.types import ApplyFn, Batch, Params, PolicyOutput, Rollout

__all__ = ["PolicyFn", "from_apply", "from_decoder", "trunk"]

PolicyFn = Callable[[Params, Batch | Rollout], PolicyOutput]


def from_decoder(
    model: Any,
    *,
    temperature: Any = 1.0,
    with_entropy: bool = True,
    trunk_stacks: int = 0,
    group_size: int = 1,
    **head_options: Any,
) -> PolicyFn:
    """Policy function of a :class:`rlhf_jax.models.Decoder`, through the chunked head.

    log π(a_t | s_t) = log softmax(h_t W / τ)[a_t], never holding ``[B, T, V]``

    Args:
      model: a decoder with ``hidden`` and ``head``.
      temperature: τ the sampler used: the trained policy is the tempered one.
      with_entropy: also compute the entropy (costs one more reduction over the vocabulary).
      trunk_stacks: start from ``batch.trunk``, the output of that many frozen stacks; 0 starts
        from the tokens.
      group_size: that many neighbouring rows share a prompt, which is then computed once for all of
        them (``model.hidden``); 1 computes it in every row. Micro-batches must hold whole groups:
        give ``make_train_step`` the same number.
      **head_options: handed to :func:`rlhf_jax.logprobs.policy_log_probs`, e.g. ``chunk_size``
        (tokens of one device, if the model has a ``placement``).

    Returns:
      A :data:`PolicyFn`. The head is computed from column ``batch.start`` on only. In packed rows
      (``batch.segment_ids``) a segment's first token has log-prob 0, as a row's first one has.

    Raises:
      ValueError: when called, if ``trunk_stacks`` > 0 and the batch holds no trunk.
    """

    def policy(params: Params, batch: Batch | Rollout) -> PolicyOutput:
        if trunk_stacks and batch.trunk is None:
            raise ValueError(
                f"batch.trunk: None, but trunk_stacks={trunk_stacks}; fill it with policy.trunk "
                "or use trunk_stacks=0"
            )
        start: dict[str, Any] = (
            dict(tokens=None, inputs=batch.trunk, from_stack=trunk_stacks)
            if trunk_stacks
            else dict(tokens=batch.tokens)
        )
        segment_ids = getattr(batch, "segment_ids", None)
        hidden = model.hidden(
            params,
            **start,
            attention_mask=batch.attention_mask,
            segment_ids=segment_ids,
            split=batch.start,
            **_shared(group_size),
        )
        matrix, layout = model.head(params)

        def head(
            hidden: jax.Array, matrix: jax.Array, tokens: jax.Array, tau: Any, start: int
        ) -> Any:
            return logprobs.policy_log_probs(
                hidden,
                (matrix, layout),
                tokens,
                start=start,
                temperature=tau,
                with_entropy=with_entropy,
                **head_options,
            )

        pieces = Pieces.of(getattr(model, "placement", None))
        # Without a token to score there is nothing to cut.
        cut = pieces.count > 1 and batch.start < batch.tokens.shape[1]
        head = (_by_pieces if cut else _on_own_rows)(head, pieces, batch.start)
        if pieces.mesh is not None:
            head = _under_auto_axes(head, batch.tokens)
        out = head(hidden, matrix, batch.tokens, temperature)
        if segment_ids is not None:
            # What stands before a segment's first token is another sequence.
            within = jnp.pad(segment_ids[:, 1:] == segment_ids[:, :-1], ((0, 0), (1, 0)))
            out = jax.tree.map(lambda x: jnp.where(within, x, 0.0), out)
        return PolicyOutput(log_probs=out.log_probs, entropy=out.entropy)

    return policy


def _under_auto_axes(head: Callable[..., Any], tokens: jax.Array) -> Callable[..., Any]:
    """What names its devices runs where mesh axes are the compiler's, as the decoder does."""
    where: Any = jax.typeof(tokens).sharding
    if jax.sharding.AxisType.Explicit not in where.mesh.axis_types:
        return head
    return jax.sharding.auto_axes(head, out_sharding=where)


def _by_pieces(head: Callable[..., Any], pieces: Pieces, start: int) -> Callable[..., Any]:
    """Every device takes the same piece of each of its rows, of what is scored from ``start`` on.

    A token's log-prob is read from the state before it, which may lie on another device: so states
    and labels are cut out first, and cut into pieces then.
    """
    first = max(start, 1)

    def run(hidden: jax.Array, matrix: jax.Array, tokens: jax.Array, temperature: Any) -> Any:
        rows, length = tokens.shape
        tau = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (rows, pieces.count))
        cut = [pieces.fold(pieces.fill(x)) for x in (hidden[:, first - 1 : -1], tokens[:, first:])]
        # In a piece of its own a label stands one column after its state.
        states, labels = (
            jnp.pad(x, ((0, 0), side, *((0, 0),) * (x.ndim - 2)))
            for x, side in zip(cut, ((0, 1), (1, 0)), strict=True)
        )
        every = dataclasses.replace(pieces, rows=(*pieces.rows, *pieces.tokens))
        out = _on_own_rows(head, every, 0)(pieces.by_rows(states), matrix, labels, pieces.fold(tau))
        return jax.tree.map(
            lambda x: jnp.pad(pieces.unfold(x[:, 1:])[:, : length - first], ((0, 0), (first, 0))),
            out,
        )

    return run


def _on_own_rows(head: Callable[..., Any], pieces: Pieces, start: int) -> Callable[..., Any]:
    """Every device takes its own rows and the whole width of the head.

    Left to the compiler, a head whose width is split is gathered anew for every block of tokens,
    and so is the sum of its gradient over devices. Here both happen once.
    """
    names, mesh = pieces.rows, pieces.mesh
    head = functools.partial(head, start=start)
    if not names:
        return head

    parts = math.prod(mesh.shape[name] for name in names)

    def run(hidden: jax.Array, matrix: jax.Array, tokens: jax.Array, temperature: Any) -> Any:
        if tokens.shape[0] % parts:  # fewer rows than devices: right, but not fast
            return head(hidden, matrix, tokens, temperature)
        tau = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (tokens.shape[0], 1))
        by_rows, whole, dtype = jax.P(names), jax.P(), matrix.dtype
        # XLA's CPU compiler aborts on a bfloat16 sum over devices whose other axes are the
        # compiler's ("Invalid binary instruction opcode copy"): there the gradient crosses wide.
        if mesh.devices.flat[0].platform == "cpu":
            matrix = matrix.astype(jnp.promote_types(dtype, jnp.float32))
        return jax.shard_map(
            lambda hidden, matrix, *rest: head(hidden, matrix.astype(dtype), *rest),
            mesh=mesh,
            in_specs=(by_rows, whole, by_rows, by_rows),
            out_specs=by_rows,
            axis_names=set(names),
            check_vma=False,
        )(hidden, matrix, tokens, tau)

    return run


def _shared(group_size: int) -> dict[str, int]:
    """The option of ``model.hidden``, which a model of one's own need not know."""
    return {} if group_size == 1 else {"group_size": group_size}


def trunk(
    model: Any, params: Params, batch: Batch | Rollout, stacks: int, *, group_size: int = 1
) -> jax.Array:
    """Hidden states after the first ``stacks`` stacks of layers, for ``batch.trunk``.

    While those stacks are frozen, the policy, the old policy and the reference share them: their
    output is computed once a rollout instead of once a pass.

    Args:
      model: a decoder.
      params: parameters that hold at least the embedding and those stacks.
      batch: the rows.
      stacks: how many leading stacks are frozen.
      group_size: as for :func:`from_decoder`.

    Returns:
      ``[B, T, D]`` in the compute dtype.
    """
    return model.hidden(
        params,
        batch.tokens,
        attention_mask=batch.attention_mask,
        segment_ids=getattr(batch, "segment_ids", None),
        to_stack=stacks,
        split=batch.start,
        **_shared(group_size),
    )


def from_apply(apply: ApplyFn, *, temperature: Any = 1.0) -> PolicyFn:
    """Policy function of anybody's ``apply(params, tokens) -> logits``.

    Args:
      apply: a model that needs no padding mask (right-padded rows), or closes over its own.
      temperature: τ the sampler used.

    Returns:
      A :data:`PolicyFn`; it holds the logits ``[B, T, V]`` in float32.

    Raises:
      ValueError: when called with packed rows, which such a model would read as one sequence.

    >>> import jax, jax.numpy as jnp, rlhf_jax as rl
    >>> apply = lambda params, tokens: params[tokens]  # a bigram model
    >>> tokens = jnp.array([[0, 1]])
    >>> ones = jnp.ones((1, 2), bool)
    >>> policy = from_apply(apply)
    >>> batch = rl.Batch(
    ...     tokens=tokens,
    ...     mask=ones,
    ...     attention_mask=ones,
    ...     group_ids=jnp.zeros(1, int),
    ...     advantages=jnp.ones(1),
    ...     old_log_probs=jnp.zeros((1, 2)),
    ...     sampler_log_probs=jnp.zeros((1, 2)),
    ... )
    >>> policy(jnp.zeros((4, 4)), batch).log_probs.round(3).tolist()
    [[0.0, -1.3860000371932983]]
    """

    def policy(params: Params, batch: Batch | Rollout) -> PolicyOutput:
        if getattr(batch, "segment_ids", None) is not None:
            raise ValueError(
                "batch.segment_ids: apply(params, tokens) knows no segments; pass unpacked rows, "
                "or write a policy function that hands batch.segment_ids to the model"
            )
        logits = apply(params, batch.tokens)
        entropy = logprobs.entropy_from_logits(logits[:, :-1], temperature=temperature)
        return PolicyOutput(
            log_probs=logprobs.token_log_probs(logits, batch.tokens, temperature=temperature),
            entropy=jnp.pad(entropy, ((0, 0), (1, 0))),
        )

    return policy

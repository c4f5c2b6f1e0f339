"""The engine under :func:`rlhf_jax.logprobs.chunked`: blocks of tokens, custom VJP.

Shapes inside a block: ``h [..., C, D]``, labels ``y [..., C]``, scale ``s [..., C]`` (1/τ),
logits ``z [..., C, V]``. With ``p = softmax(z·s)``, ``L = log p_y`` and entropy ``H``:

    ∂L/∂z_v = s·(1[v = y] − p_v)        ∂H/∂z_v = −s·p_v·(log p_v + H)

Two backward passes exist. *Recompute*: the logits of each block are computed again, which serves
every gradient. *Direct*: when only ``h`` is differentiated, ``∂L/∂h = s·(W_y − Σ_v p_v·W_v)`` does
not depend on the incoming gradient but for a factor, so the forward pass stores it ([N, D]) and
the backward pass is a product. That saves one of three products with the head.

If one block holds all tokens, its logits are kept instead of computed again: the backward pass
needs the room for them in any case.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rlhf_jax import checks

LOGITS_BYTES = 64 * 2**20
"""Default budget for one block's float32 logits."""


class Spec(NamedTuple):
    """Static choices: blocks of ``block`` columns, ``count`` of them, vocabulary in pieces."""

    block: int
    count: int
    vocab: int
    vocab_chunk: int | None
    head_is_embedding: bool
    with_entropy: bool
    gradient_dtype: Any = None


def plan(
    shape, vocab, chunk_size, vocab_chunk, head_is_embedding, with_entropy, gradient_dtype=None
) -> Spec:
    """Cuts the last axis of ``shape`` into equal blocks of about ``chunk_size`` tokens."""
    rows, length = math.prod(shape[:-1]), shape[-1]
    if vocab_chunk is not None and vocab_chunk >= vocab:
        vocab_chunk = None
    if chunk_size is None:
        chunk_size = LOGITS_BYTES // (4 * (vocab_chunk or vocab))
    columns = max(1, min(length, chunk_size // rows))
    count = -(-length // columns)
    block = -(-length // count)  # as equal as they can be: the least padding
    return Spec(block, count, vocab, vocab_chunk, head_is_embedding, with_entropy, gradient_dtype)


def accumulation_dtype(dtype) -> jnp.dtype:
    """float64 stays float64; everything else accumulates in float32."""
    return jnp.promote_types(dtype, jnp.float32)


def inverse_temperature(temperature, dtype) -> jax.Array:
    """1/τ, and 1 for τ = 0 (greedy: log-probs of the untempered softmax). No gradient."""
    checks.non_negative("temperature", temperature, remedy="Pass τ > 0, or 0 for greedy sampling.")
    tau = lax.stop_gradient(jnp.asarray(temperature, dtype))
    return jnp.where(tau > 0, 1.0 / jnp.where(tau > 0, tau, 1.0), 1.0).astype(dtype)


def select(z: jax.Array, labels: jax.Array, first: Any = 0) -> jax.Array:
    """``z[..., labels − first]``; 0 where the label lies elsewhere.

    A comparison and a sum, not a gather: it partitions when the vocabulary is sharded.
    """
    return jnp.sum(jnp.where(_is_label(z, labels, first), z, 0.0), axis=-1)


def _is_label(z: jax.Array, labels: jax.Array, first: Any) -> jax.Array:
    # In int32: the ids of a whole vocabulary would wrap around in the labels' int8 or uint16.
    ids = lax.broadcasted_iota(jnp.int32, z.shape, z.ndim - 1) + first
    return ids == labels.astype(jnp.int32)[..., None]


# -- Products with the head ------------------------------------------------------------------------


def _product(a: jax.Array, b: jax.Array, contract, out_sharding=None) -> jax.Array:
    dtype = accumulation_dtype(jnp.promote_types(a.dtype, b.dtype))
    return lax.dot_general(
        a,
        b,
        (contract, ((), ())),
        preferred_element_type=dtype,
        out_sharding=out_sharding,
    )


def _explicit_sharding(x: jax.Array):
    """The array's sharding when its mesh axes are Explicit (products must then name theirs)."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return None
    explicit = all(kind == jax.sharding.AxisType.Explicit for kind in sharding.mesh.axis_types)
    return sharding if explicit else None


def _logits(spec: Spec, h: jax.Array, head: jax.Array, bias: Any, scale: jax.Array) -> jax.Array:
    """Tempered logits ``[..., C, V]`` in float32."""
    sharding = _explicit_sharding(h)
    if sharding is not None:
        vocab = jax.typeof(head).sharding.spec[0 if spec.head_is_embedding else 1]
        leading = tuple(None if axis == vocab else axis for axis in sharding.spec[:-1])
        sharding = sharding.update(spec=jax.P(*leading, vocab))
    axis = 1 if spec.head_is_embedding else 0
    z = _product(h, head, ((h.ndim - 1,), (axis,)), sharding)
    if bias is not None:
        z = z + bias.astype(z.dtype)
    return z * scale[..., None]


def _terms(spec: Spec, dz: jax.Array, factor: jax.Array, result: jax.Array) -> list[jax.Array]:
    """``dz`` as a sum of factors for its product with ``factor``, which becomes like ``result``.

    Autodiff multiplies float32 by bf16, for which a float32 copy of the head is made. If all else
    is bf16, two bf16 terms are as good: together they hold 16 of the 24 bits, the result keeps 8.
    """
    if spec.gradient_dtype is not None:
        return [dz.astype(spec.gradient_dtype)]
    if not factor.dtype == result.dtype == jnp.bfloat16 or dz.dtype != jnp.float32:
        return [dz]
    # A cast down and up again would be optimised away, and the second term with it.
    high = lax.reduce_precision(dz, exponent_bits=8, mantissa_bits=7)
    return [term.astype(jnp.bfloat16) for term in (high, dz - high)]


def _times_head(spec: Spec, dz: jax.Array, head: jax.Array, like: jax.Array) -> jax.Array:
    """``dz·Wᵀ`` → ``[..., C, D]``, float32."""
    contract = ((dz.ndim - 1,), (0 if spec.head_is_embedding else 1,))
    first, *rest = (
        _product(term, head, contract, _explicit_sharding(like))
        for term in _terms(spec, dz, head, like)
    )
    return functools.reduce(jnp.add, rest, first)


def _head_gradient(spec: Spec, h: jax.Array, dz: jax.Array, head: jax.Array) -> jax.Array:
    axes = tuple(range(h.ndim - 1))
    terms = _terms(spec, dz, h, head)
    # One product over all terms, side by side along the tokens: its result is as large as the head.
    h, dz = (jnp.concatenate(x, -2) if len(x) > 1 else x[0] for x in ([h] * len(terms), terms))
    a, b = (dz, h) if spec.head_is_embedding else (h, dz)
    if _explicit_sharding(head) is not None:
        return _product(a, b, (axes, axes), _explicit_sharding(head))
    # One token axis, as in models.layers.Linear.
    a, b = (x.reshape(-1, x.shape[-1]) for x in (a, b))
    return lax.platform_dependent(a, b, cpu=_outer_on_cpu, default=_outer)


def _outer(a: jax.Array, b: jax.Array) -> jax.Array:
    return _product(a, b, ((0,), (0,)))


def _outer_on_cpu(a: jax.Array, b: jax.Array) -> jax.Array:
    """The same. A CPU is much quicker with more columns than rows; XLA must not swap them back."""
    if a.shape[1] <= b.shape[1]:
        return _outer(a, b)
    return lax.optimization_barrier(_outer(b, a)).T


# -- Vocabulary pieces -----------------------------------------------------------------------------


def _pieces(spec: Spec) -> int:
    return 1 if spec.vocab_chunk is None else -(-spec.vocab // spec.vocab_chunk)


def _piece(spec: Spec, index: Any, head: jax.Array, bias: Any):
    """The ``index``-th piece of the head, its first id, and which of its ids are its own.

    The last piece is as wide as the others and starts earlier, so no padded copy of the head is
    made; the ids it shares with the piece before are masked.
    """
    if spec.vocab_chunk is None:
        return head, bias, 0, None
    width = spec.vocab_chunk
    start = jnp.minimum(index * width, spec.vocab - width)
    own = jnp.arange(width) + start >= index * width
    axis = 0 if spec.head_is_embedding else 1
    head = lax.dynamic_slice_in_dim(head, start, width, axis)
    bias = None if bias is None else lax.dynamic_slice_in_dim(bias, start, width, 0)
    return head, bias, start, own


class Stats(NamedTuple):
    """Of one block: logit of the label, maximum m, Σ exp(z − m), Σ exp(z − m)·(z − m).

    Everything is kept relative to the maximum: sums of absolute logits would lose digits.
    """

    label: jax.Array
    top: jax.Array
    total: jax.Array
    weighted: jax.Array


def _piece_stats(spec: Spec, z: jax.Array, labels, start, own) -> Stats:
    label = select(z if own is None else jnp.where(own, z, 0.0), labels, start)
    z = z if own is None else jnp.where(own, z, -jnp.inf)
    top = jnp.max(z, axis=-1)
    z = z - jnp.where(top > -jnp.inf, top, 0.0)[..., None]
    e = jnp.exp(z)
    weighted = jnp.zeros_like(top)
    if spec.with_entropy:
        weighted = jnp.sum(jnp.where(e > 0, e * z, 0.0), axis=-1)
    return Stats(label, top, jnp.sum(e, axis=-1), weighted)


def _merge_stats(a: Stats, b: Stats) -> Stats:
    top = jnp.maximum(a.top, b.top)

    def rebase(x: Stats):
        # A piece without a finite logit (top = −inf) has total 0 and adds nothing.
        shift = jnp.where(x.top > -jnp.inf, x.top - top, 0.0)
        factor = jnp.exp(shift)
        return x.total * factor, (x.weighted + x.total * shift) * factor

    (total_a, weighted_a), (total_b, weighted_b) = rebase(a), rebase(b)
    return Stats(a.label + b.label, top, total_a + total_b, weighted_a + weighted_b)


def _finish(spec: Spec, stats: Stats):
    log_total = jnp.log(stats.total)
    entropy = log_total - stats.weighted / stats.total if spec.with_entropy else None
    return (stats.label - stats.top) - log_total, entropy, stats.top + log_total


def _block_forward(spec: Spec, head, bias, direct: bool, block):
    """log-probs, entropy, log-sum-exp of one block; if ``direct`` ∂log-prob/∂h, and the logits."""
    h, labels, scale = block
    if spec.vocab_chunk is not None:

        def step(index, stats):
            w, b, start, own = _piece(spec, index, head, bias)
            z = _logits(spec, h, w, b, scale)
            return _merge_stats(stats, _piece_stats(spec, z, labels, start, own))

        zero = jnp.zeros_like(scale)
        first = Stats(zero, jnp.full_like(scale, -jnp.inf), zero, zero)
        stats = lax.fori_loop(0, _pieces(spec), step, first)
        return *_finish(spec, stats), None, None
    z = _logits(spec, h, head, bias, scale)
    log_probs, entropy, lse = _finish(spec, _piece_stats(spec, z, labels, 0, None))
    slope = None
    if direct:
        dz = _logits_gradient(z, labels, 0, scale, lse, None, scale, None)
        slope = _times_head(spec, dz, head, h)
    keep = spec.count == 1 and (slope is None or spec.with_entropy)
    return log_probs, entropy, lse, slope, z if keep else None


def _logits_gradient(z, labels, start, scale, lse, entropy, g, g_entropy):
    """Gradient of the untempered logits; ``g`` already holds the factor 1/τ."""
    p = jnp.exp(z - lse[..., None])
    dz = -g[..., None] * p
    if g_entropy is not None:
        inner = jnp.where(p > 0, z - lse[..., None] + entropy[..., None], 0.0)
        dz = dz - (g_entropy * scale)[..., None] * p * inner
    return dz + jnp.where(_is_label(z, labels, start), g[..., None], 0.0)


def _block_backward(spec: Spec, head, bias, needs, logits, block, grads):
    """Recomputes a block's logits, unless given; its dh and the accumulated (dhead, dbias)."""
    h, labels, scale, lse, entropy, g, g_entropy = block
    need_h, need_head, need_bias = needs
    # A masked position (no incoming gradient) may hold NaN: keep it out of every product.
    live = g != 0 if g_entropy is None else (g != 0) | (g_entropy != 0)
    h = jnp.where(live[..., None], h, 0.0)
    lse = jnp.where(live, lse, jnp.inf)
    logits = None if logits is None else jnp.where(live[..., None], logits, 0.0)

    def step(index, carry):
        dh, dhead, dbias = carry
        w, b, start, own = _piece(spec, index, head, bias)
        z = _logits(spec, h, w, b, scale) if logits is None else logits
        dz = _logits_gradient(z, labels, start, scale, lse, entropy, g * scale, g_entropy)
        if own is not None:
            dz = jnp.where(own, dz, 0.0)
        if need_h:
            dh = dh + _times_head(spec, dz, w, h)
        if need_head:
            dhead = _add_piece(spec, dhead, _head_gradient(spec, h, dz, w), start, 1)
        if need_bias:
            dbias = _add_piece(spec, dbias, jnp.sum(dz, axis=range(dz.ndim - 1)), start, 0)
        return dh, dhead, dbias

    dh = jnp.zeros_like(h, dtype=lse.dtype) if need_h else None
    if spec.vocab_chunk is None:
        dh, *grads = step(0, (dh, *grads))
    else:
        dh, *grads = lax.fori_loop(0, _pieces(spec), step, (dh, *grads))
    return tuple(grads), dh


def _add_piece(spec: Spec, total, piece, start, rank: int):
    if spec.vocab_chunk is None:
        return total + piece
    axis = 0 if spec.head_is_embedding or rank == 0 else 1
    old = lax.dynamic_slice_in_dim(total, start, spec.vocab_chunk, axis)
    return lax.dynamic_update_slice_in_dim(total, old + piece, start, axis)


# -- Scan over blocks ------------------------------------------------------------------------------


def _cut(spec: Spec, x: jax.Array, axis: int) -> jax.Array:
    """``[..., T, ...]`` → ``[count, ..., block, ...]``, zero-padded."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, spec.block * spec.count - x.shape[axis])
    x = jnp.pad(x, pad) if pad[axis][1] else x
    x = x.reshape(*x.shape[:axis], spec.count, spec.block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _join(x: jax.Array, axis: int, length: int) -> jax.Array:
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, length, axis=axis)


def _scan(spec: Spec, step, init, arrays, axis: int, length: int):
    """Runs ``step(carry, block) → carry, outputs`` over the blocks and joins the outputs."""
    if spec.count == 1:
        return step(init, arrays)
    carry, outputs = lax.scan(step, init, jax.tree.map(lambda x: _cut(spec, x, axis), arrays))
    return carry, jax.tree.map(lambda x: _join(x, axis, length), outputs)


def _forward(spec: Spec, hidden, head, bias, labels, scale, direct: bool):
    axis, length = labels.ndim - 1, labels.shape[-1]

    def step(carry, block):
        return carry, _block_forward(spec, head, bias, direct, block)

    return _scan(spec, step, (), (hidden, labels, scale), axis, length)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def head_log_probs(spec: Spec, hidden, head, bias, labels, scale):
    """log-probs and entropy (or None) of ``labels``; see :func:`rlhf_jax.logprobs.chunked`."""
    log_probs, entropy, *_ = _forward(spec, hidden, head, bias, labels, scale, False)
    return log_probs, entropy


def _fwd(spec: Spec, hidden, head, bias, labels, scale):
    args = jax.tree.map(lambda x: x.value, (hidden, head, bias, labels, scale), is_leaf=_is_primal)
    # Which inputs are differentiated is known while tracing: None or () keeps it static.
    needs = tuple(() if _perturbed(x) else None for x in (hidden, head, bias))
    direct = needs[1] is None and needs[2] is None and spec.vocab_chunk is None
    hidden, head, bias, labels, scale = args
    direct = direct and needs[0] is not None
    log_probs, entropy, lse, *kept = _forward(spec, hidden, head, bias, labels, scale, direct)
    return (log_probs, entropy), (args, needs, lse, entropy, *kept)


def _is_primal(x) -> bool:
    return hasattr(x, "perturbed")


def _perturbed(x) -> bool:
    return x is not None and x.perturbed


def _bwd(spec: Spec, residuals, cotangents):
    (hidden, head, bias, labels, scale), needs, lse, entropy, slope, logits = residuals
    needs = tuple(need is not None for need in needs)
    _, need_head, need_bias = needs
    zero = lambda g: g is None or isinstance(g, jax.custom_derivatives.SymbolicZero)  # noqa: E731
    g, g_entropy = cotangents
    g_entropy = None if zero(g_entropy) else g_entropy
    if slope is not None and g_entropy is None:
        g = jnp.zeros_like(lse) if zero(g) else g
        # where: a masked position has no incoming gradient, and may hold NaN.
        dh = jnp.where((g != 0)[..., None], g[..., None] * slope, 0.0).astype(hidden.dtype)
        return dh, None, None, None, None
    g = jnp.zeros_like(lse) if zero(g) else g
    grads = (
        jnp.zeros_like(head, dtype=lse.dtype) if need_head else None,
        jnp.zeros_like(bias, dtype=lse.dtype) if need_bias else None,
    )

    def step(carry, block):
        return _block_backward(spec, head, bias, needs, logits, block, carry)

    if g_entropy is None:
        entropy = None
    arrays = (hidden, labels, scale, lse, entropy, g, g_entropy)
    grads, dh = _scan(spec, step, grads, arrays, labels.ndim - 1, labels.shape[-1])
    dhead, dbias = grads
    pairs = ((dh, hidden), (dhead, head), (dbias, bias))
    return *(None if d is None else d.astype(x.dtype) for d, x in pairs), None, None


head_log_probs.defvjp(_fwd, _bwd, symbolic_zeros=True)

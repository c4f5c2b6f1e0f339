"""The layers of the decoder as Flax NNX modules.

Letters for dimensions: B rows, T tokens, S keys, D hidden size, N query heads, K key/value heads,
Q = N / K query heads for each of them, H head width, F hidden width of the MLP, V vocabulary.

Weights are stored output-first, ``[*out, *in]``: the order of Hugging Face files, and the one XLA's
CPU matmul reads fastest. Each parameter carries the logical names of its axes as metadata.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from rlhf_jax.models.attention import settled
from rlhf_jax.models.config import DecoderConfig

Array = jax.Array
# (q [B,T,N,H], k [B,T,K,H], v [B,T,K,H]) → (attended values [B,T,N,H], anything to keep)
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """y = x / √(mean(x²) + ε) · scale over the last axis, in float32; returned in x's dtype."""
    wide = x.astype(jnp.float32)
    squares = settled(jnp.square(settled(wide)))
    total = jax.lax.platform_dependent(squares, cpu=_sum_in_lanes, default=_sum)
    mean = settled(total / x.shape[-1])
    return (wide / settled(jnp.sqrt(mean + eps)) * scale.astype(jnp.float32)).astype(x.dtype)


def _sum(x: Array) -> Array:
    return jnp.sum(x, axis=-1, keepdims=True)


def _sum_in_lanes(x: Array) -> Array:
    """The same in one order whatever the other axes are, which a CPU's own order depends on."""
    lanes = 16
    widths = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % lanes)]
    x = jnp.pad(x, widths).reshape(*x.shape[:-1], -1, lanes).sum(-2)
    while lanes > 1:
        lanes //= 2
        x = x[..., :lanes] + x[..., lanes:]
    return x


class RMSNorm(nnx.Module):
    """RMS normalisation with a learned scale."""

    def __init__(self, width: int, eps: float, axis: str):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32), axes=(axis,))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """Normalise the last axis."""
        return rms_norm(x, self.scale[...], self.eps)


@jax.custom_jvp
def matmul(x: Array, weight: Array) -> Array:
    """x·weightᵀ: ``[N, I]``, ``[O, I]`` → ``[N, O]``."""
    return _times(x, weight)


@functools.partial(matmul.defjvp, symbolic_zeros=True)
def _(primals: Any, tangents: Any) -> Any:
    # Written out for the sake of the weight's gradient alone.
    (x, weight), (x_dot, weight_dot) = primals, tangents
    y = _times(x, weight)  # not by `matmul`, in which a remat policy would not see the product
    y_dot = jnp.zeros_like(y)
    if not isinstance(x_dot, jax.custom_derivatives.SymbolicZero):
        y_dot = _times(x_dot, weight)
    if not isinstance(weight_dot, jax.custom_derivatives.SymbolicZero):
        y_dot = y_dot + jax.lax.platform_dependent(x, weight_dot, cpu=_times_on_cpu, default=_times)
    return y, y_dot


def _times(x: Array, weight: Array) -> Array:
    return jnp.einsum("ni,oi->no", x, weight)


def _times_on_cpu(x: Array, weight: Array) -> Array:
    """The same. Its transpose, the weight's gradient, has as few rows as can be: a CPU multiplies
    that 1.7 times faster, and XLA must not swap it back."""
    if weight.shape[0] <= weight.shape[1]:
        return _times(x, weight)
    return jnp.einsum("ni,io->no", x, jax.lax.optimization_barrier(weight.T))


class Linear(nnx.Module):
    """y[..., *out] = Σ_in x[..., *in] · weight[*out, *in] (+ bias), in the dtype of x.

    With a rank also + Σ_r (Σ_in x·a[r, *in]) · b[*out, r]: an adapter beside the weight, which is
    itself never changed, copied or differentiated for it.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        out: dict[str, int],
        into: dict[str, int],
        *,
        std: float,
        bias: bool = False,
        rank: int = 0,
    ):
        shape = (*out.values(), *into.values())
        value = std * jax.random.normal(rngs.params(), shape, jnp.float32)
        self.weight = nnx.Param(value, axes=(*out, *into))
        self.bias = nnx.data(
            nnx.Param(jnp.zeros(tuple(out.values()), jnp.float32), axes=tuple(out))
            if bias
            else None
        )
        sides = (((rank, *into.values()), (None, *into)), ((*out.values(), rank), (*out, None)))
        self.a, self.b = (
            nnx.data(nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes) if rank else None)
            for shape, axes in sides
        )
        self.contracted = len(into)

    def __call__(self, x: Array) -> Array:
        """Contract the last axes of ``x`` with those of the weight."""
        weight = self.weight[...].astype(x.dtype)
        out, into = weight.shape[: -self.contracted], weight.shape[-self.contracted :]
        # As one matrix: with more axes XLA's CPU backend copies it, and may sum in another order.
        flat = weight.reshape(math.prod(out), math.prod(into))
        lead = x.shape[: -self.contracted]
        # All tokens on one axis: the weight's gradient then sums over it as it lies. For a sum over
        # two axes XLA's CPU backend first writes a transposed copy, fused with whatever made it.
        x = x.reshape(-1, flat.shape[1])
        y = matmul(x, flat)
        if self.a is not None and self.b is not None:
            a, b = self.a[...].astype(x.dtype), self.b[...].astype(x.dtype)
            low = jnp.einsum("ni,ri->nr", x, a.reshape(a.shape[0], -1))
            y = y + jnp.einsum("nr,or->no", low, b.reshape(-1, b.shape[-1]))
        y = y.reshape(*lead, *out)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class Attention(nnx.Module):
    """Projections, q/k norm and rotary positions; how to attend is the caller's function."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, ranks: Mapping[str, int]):
        embed = {"embed": config.hidden_size}
        queries = {"heads": config.num_heads, "head_dim": config.head_dim}
        keys = {"kv_heads": config.num_kv_heads, "head_dim": config.head_dim}
        std, bias = config.initializer_range, config.qkv_bias
        rank = {name: ranks.get(name, 0) for name in "qkvo"}
        self.q = Linear(rngs, queries, embed, std=std, bias=bias, rank=rank["q"])
        self.k = Linear(rngs, keys, embed, std=std, bias=bias, rank=rank["k"])
        self.v = Linear(rngs, keys, embed, std=std, bias=bias, rank=rank["v"])
        self.o = Linear(rngs, embed, queries, std=std, rank=rank["o"])
        norm = functools.partial(RMSNorm, config.head_dim, config.norm_eps, "head_dim")
        self.q_norm = nnx.data(norm() if config.qk_norm else None)
        self.k_norm = nnx.data(norm() if config.qk_norm else None)

    def __call__(self, x: Array, angles: tuple[Array, Array], attend: Attend) -> tuple[Array, Any]:
        """``[B, T, D]`` → ``[B, T, D]``, and whatever ``attend`` kept."""
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, kept = attend(rotate(q, angles), rotate(k, angles), v)
        return self.o(out), kept


class MLP(nnx.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, ranks: Mapping[str, int]):
        embed, wide = {"embed": config.hidden_size}, {"mlp": config.intermediate_size}
        std = config.initializer_range
        rank = {name: ranks.get(name, 0) for name in ("gate", "up", "down")}
        self.gate = Linear(rngs, wide, embed, std=std, rank=rank["gate"])
        self.up = Linear(rngs, wide, embed, std=std, rank=rank["up"])
        self.down = Linear(rngs, embed, wide, std=std, rank=rank["down"])

    def __call__(self, x: Array) -> Array:
        """``[B, T, D]`` → ``[B, T, D]``."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """One pre-norm decoder layer; ``ranks`` says which projections have adapters."""

    def __init__(
        self, config: DecoderConfig, rngs: nnx.Rngs, ranks: Mapping[str, int] = MappingProxyType({})
    ):
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps, "embed")
        self.attn = Attention(config, rngs, ranks)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, "embed")
        self.mlp = MLP(config, rngs, ranks)

    def __call__(self, x: Array, angles: tuple[Array, Array], attend: Attend) -> tuple[Array, Any]:
        """``[B, T, D]`` → ``[B, T, D]``, and whatever ``attend`` kept."""
        attended, kept = self.attn(self.attn_norm(x), angles, attend)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), kept


class Shell(nnx.Module):
    """What lies around the layers: embedding, final norm, and the head when it is not tied."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        vocab, embed = {"vocab": config.vocab_size}, {"embed": config.hidden_size}
        std = config.initializer_range
        self.embed = Linear(rngs, vocab, embed, std=std)
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps, "embed")
        self.head = nnx.data(None if config.tie_embeddings else Linear(rngs, vocab, embed, std=std))


@functools.lru_cache(maxsize=64)
def definitions(config: DecoderConfig) -> tuple[Any, Any, Any]:
    """Static structure of a block, and the abstract states of block and shell."""
    block = nnx.eval_shape(lambda: Block(config, nnx.Rngs(0)))
    shell = nnx.eval_shape(lambda: Shell(config, nnx.Rngs(0)))
    graph, state = nnx.split(block)
    return graph, state, nnx.state(shell)


@functools.lru_cache(maxsize=64)
def _adapted(config: DecoderConfig, ranks: tuple[tuple[str, int], ...]) -> Any:
    """Static structure of a block with adapters."""
    block = nnx.eval_shape(lambda: Block(config, nnx.Rngs(0), dict(ranks)))
    return nnx.split(block)[0]


def layer_of(config: DecoderConfig, params: Any) -> Block:
    """The layer that one layer's parameters make: with adapters where they hold ``a`` and ``b``."""
    ranks = tuple(
        (name, held["a"].shape[0])
        for part in ("attn", "mlp")
        for name, held in params[part].items()
        if "a" in held
    )
    graph = _adapted(config, ranks) if ranks else definitions(config)[0]
    return nnx.merge(graph, params)


def logical_axes(state: Any, leading: tuple[str, ...]) -> Any:
    """The logical axis names that each parameter of an abstract state carries."""
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda variable: (*leading, *variable.get_metadata()["axes"]),
            state,
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )
    )


def rotary_frequencies(config: DecoderConfig) -> Array:
    """Inverse wavelengths θ^(−2i/H), i < H/2, stretched as ``config.rope_scaling`` says: [H/2]."""
    half = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**half)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: keep the fast ones, divide the slow ones, blend linearly in between
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def rotary_angles(config: DecoderConfig, positions: Array) -> tuple[Array, Array]:
    """cos and sin of position × frequency: float32 ``[..., 1, H/2]`` for positions ``[...]``."""
    angles = positions.astype(jnp.float32)[..., None, None] * rotary_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Array, angles: tuple[Array, Array]) -> Array:
    """Rotary positions: the pair (x_i, x_{i+H/2}) turned by its angle. x ``[..., heads, H]``."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)

"""The learner's attention by a fused kernel of a maintained library, behind one argument.

| ``attention`` | what computes it | where it runs |
|---|---|---|
| ``"xla"`` | :func:`rlhf_jax.models.attention.masked_attention` | everywhere |
| ``"splash"`` | JAX's Pallas splash attention | TPU; elsewhere interpreted, which is slow |
| ``"cudnn"`` | cuDNN through ``jax.nn.dot_product_attention`` | NVIDIA GPUs, bfloat16 |
| ``"auto"`` | the backend's kernel where it can do the model, else xla | everywhere |

No kernel holds the ``[T, T]`` scores. Prefill and decode keep their own attention: the log-probs of
sampler and learner then agree to the kernel's rounding instead of bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax._token_pieces import Pieces

Array = jax.Array

ATTENTION = ("xla", "cudnn", "splash", "auto")
_LANES, _LONGEST_BLOCK = 128, 512


def choose(model: Any) -> str:
    """A decoder's kernel; ``"auto"`` by the backend, for what the kernel can do."""
    if model.attention != "auto":
        return model.attention
    backend, windowed = jax.default_backend(), model.config.windows is not None
    if split_tokens(model.placement):
        return "xla"
    if backend == "gpu" and model.dtype == jnp.bfloat16 and not windowed:
        return "cudnn"
    placed = jax.device_count() == 1 or model.placement is not None
    return "splash" if backend == "tpu" and placed and not windowed else "xla"


def check(attention: str, dtype: Any, windowed: bool) -> None:
    """Refuse what a kernel cannot do.

    Raises:
      ValueError: an unknown name, sliding windows, or cuDNN in another dtype than bfloat16.
    """
    if attention not in ATTENTION:
        raise ValueError(f"attention: got {attention!r}; choose one of {', '.join(ATTENTION)}")
    if attention in ("splash", "cudnn") and windowed:
        raise ValueError(
            f"attention: {attention!r} knows no sliding windows, which this model has; use 'xla'"
        )
    if attention == "cudnn" and jnp.dtype(dtype) != jnp.bfloat16:
        raise ValueError(
            f"attention: 'cudnn' computes in bfloat16, the model in {jnp.dtype(dtype).name}; "
            "give dtype='bfloat16', or attention='xla'"
        )


def split_tokens(placement: Any) -> bool:
    """Whether a placement splits the tokens of a row over devices."""
    return Pieces.of(placement).count > 1


def check_placement(placement: Any, attention: str) -> None:
    """Refuse what is no sharding of ``[rows, tokens, heads, width]`` by the first three.

    Raises:
      ValueError: no ``NamedSharding``, one that splits the width, or one that splits tokens, for a
        kernel that reads whole rows.
    """
    spec = getattr(placement, "spec", None)
    if not isinstance(placement, jax.NamedSharding) or spec is None:
        raise ValueError(
            f"placement: got {placement!r}; give a NamedSharding of [rows, tokens, heads, width], "
            'e.g. NamedSharding(mesh, P("fsdp", None, "tensor"))'
        )
    if len(spec) > 4 or any(axis is not None for axis in spec[3:]):
        raise ValueError(
            f"placement: {spec} splits the width; only the first three axes (rows, tokens, heads) "
            "of [rows, tokens, heads, width] can be split"
        )
    if split_tokens(placement) and attention in ("splash", "cudnn"):
        raise ValueError(
            f"placement: {spec} splits tokens, and attention={attention!r} reads whole rows; use "
            "attention='xla', or a layout that does not split tokens"
        )


def segments(mask: Array | None, segment_ids: Array | None, shape: tuple[int, int]) -> Array:
    """int32 ``[B, T]``: which tokens may see each other; 0 is padding, which sees only itself."""
    ids = jnp.zeros(shape, jnp.int32) if segment_ids is None else segment_ids.astype(jnp.int32)
    ids = ids - jnp.min(ids) + 1
    return ids if mask is None else jnp.where(mask.astype(bool), ids, 0)


def cudnn(q: Array, k: Array, v: Array, mask: Array) -> Array:
    """Attention by cuDNN.

    Args:
      q: bfloat16 ``[B, T, N, H]``.
      k, v: bfloat16 ``[B, T, K, H]``.
      mask: bool ``[B, T, T]``.

    Returns:
      ``[B, T, N, H]``.
    """
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")


def splash(q: Array, k: Array, v: Array, ids: Array, placement: Any = None) -> Array:
    """Causal attention within segments, by JAX's Pallas kernel for TPUs.

    Args:
      q: ``[B, T, N, H]``.
      k, v: ``[B, T, K, H]``.
      ids: int32 ``[B, T]``, from :func:`segments`.
      placement: ``NamedSharding`` of the axes ``[B, T, heads, H]``, with B and heads split at most;
        every device then runs the kernel on its own rows and heads. None for one device.

    Returns:
      ``[B, T, N, H]`` in the dtype of q.
    """
    length = q.shape[1]
    missing = -length % _LANES
    if missing:  # a segment of their own: nobody reads them
        q, k, v = (jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in (q, k, v))
        ids = jnp.pad(ids, ((0, 0), (0, missing)))
    run: Callable[..., Array] = _splash
    if placement is not None:
        wide, rows = placement.spec, jax.P(*placement.spec[:1])
        run = jax.shard_map(
            run,
            mesh=placement.mesh,
            in_specs=(wide, wide, wide, rows),
            out_specs=wide,
            check_vma=False,
        )
    return run(q, k, v, ids)[:, :length]


@functools.lru_cache(maxsize=16)
def _blocks(length: int) -> Any:
    """Block sizes: the largest that divide the length, forward and backward."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    size = _LONGEST_BLOCK
    while length % size:
        size //= 2
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": size for name in names}
    return library.BlockSizes(**sizes)


def _splash(q: Array, k: Array, v: Array, ids: Array) -> Array:
    """The kernel on one device; interpreted where the program is not compiled for a TPU."""
    return jax.lax.platform_dependent(
        *(q, k, v, ids),
        tpu=functools.partial(_run, interpret=False),
        default=functools.partial(_run, interpret=True),
    )


def _run(q: Array, k: Array, v: Array, ids: Array, *, interpret: bool) -> Array:
    """Query heads that share a key head go together."""
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    batch, length, count, width = q.shape
    shared = count // k.shape[2]
    # Outside of any trace: the mask's tables are constants.
    with jax.ensure_compile_time_eval():
        kernel = library.make_splash_mqa(
            mask=library.MultiHeadMask([library.CausalMask((length, length))] * shared),
            block_sizes=_blocks(length),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
    grouped = q.transpose(0, 2, 1, 3).reshape(batch, -1, shared, length, width) * width**-0.5
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)

    def row(q: Array, k: Array, v: Array, ids: Array) -> Any:
        both = library.SegmentIds(q=ids, kv=ids)
        return jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=both))(q, k, v)

    out: Any = jax.vmap(row)(grouped.astype(q.dtype), keys, values, ids)
    return out.reshape(batch, count, length, width).transpose(0, 2, 1, 3).astype(q.dtype)

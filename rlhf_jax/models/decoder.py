"""One decoder for all families: Flax NNX layers, stacked and scanned, functional at the boundary.

``Decoder`` is a small hashable description; its methods are pure functions of a plain nested dict::

    params = {
        "embed": {"weight": [V, D]},
        "layers": (stack_0, stack_1, …),   # each a dict of leaves [layers in the stack, …]
        "final_norm": {"scale": [D]},
        "head": {"weight": [V, D]},        # only when the head is not tied
    }

The layers are held as one or more stacks, scanned one after the other. When only the last stack is
differentiated, no backward pass runs through the ones before it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rlhf_jax._token_pieces import Pieces
from rlhf_jax.models import cache as caching
from rlhf_jax.models import kernels, shared_prompts
from rlhf_jax.models.attention import (
    attention_in_pieces,
    attention_inputs,
    masked_attention,
    within,
)
from rlhf_jax.models.cache import Cache, Prefix
from rlhf_jax.models.config import DecoderConfig
from rlhf_jax.models.decoding import check_decode_placement, decode_layers, few_rows
from rlhf_jax.models.entry import check_decode, check_entry, check_shapes
from rlhf_jax.models.explicit import auto_inside, like_rows, placed, sharded_as
from rlhf_jax.models.layers import (
    Attend,
    Block,
    Shell,
    definitions,
    layer_of,
    logical_axes,
    rms_norm,
    rotary_angles,
)
from rlhf_jax.models.remat import REMAT, attention, input_tagged, recomputed
from rlhf_jax.models.stacks import depth, per_layer, restack, scan

Array = jax.Array
Params = dict[str, Any]

__all__ = ["Decoder"]
_KV_DTYPES = ("float32", "bfloat16", "int8")


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder-only language model as pure functions over a plain parameter dict.

    Args:
      config: :class:`DecoderConfig`.
      stacks: layers in each stack, e.g. ``(22, 8)``; they sum to ``config.num_layers``.
        Empty means one stack. A method takes parameters of any stacking: it follows the tree.
      dtype: compute dtype of the matmuls; norms, softmax and logits are float32 in any case.
      remat: what the backward pass recomputes, one of ``Decoder.REMAT``: ``"none"``, attention's
        scores and weights (``"attention"``), all but the weight matmuls (``"dots"``), all but each
        layer's input (``"full"``), or that with the input in the host's memory (``"offload"``).
      kv_dtype: what the key/value cache holds: None (the compute dtype), float32, bfloat16 or
        ``"int8"`` (with a float32 scale per row, head and token). Only keys and values that are
        read back in a later step are rounded: prompts attend to themselves, and a new token to
        itself, with unrounded ones, as the learner does.

      attention: how :meth:`hidden` attends: ``"xla"``, or by a fused kernel that holds no scores,
        ``"splash"`` (TPU), ``"cudnn"`` (GPU) or ``"auto"``; see :mod:`rlhf_jax.models.kernels`.
      placement: ``NamedSharding`` of whole rows' activations ``[rows, tokens, heads, width]``, e.g.
        ``NamedSharding(mesh, P("fsdp", None, "tensor"))``; all but the width may be split.
        With it every layer's input lies by its rows, so that devices gather weights and not each
        other's activations, a kernel runs on each device's part, and the log-probs of a device's
        rows gather the head once (where the rows divide over the devices). If it splits tokens,
        each device has a part of each of its rows, and gathers only their keys and values: for
        rows too long for one device. Attention is then ``"xla"``. None leaves it all to the
        compiler: right for one device, and for layouts that do not split the weights' embedding
        axis.
      decode_placement: ``NamedSharding`` of a decode step's hidden states ``[prompts, group,
        width]``, e.g. ``NamedSharding(mesh, P(None, None, "fsdp"))``: as the weights' embedding
        axis lies. A token of a few rows then goes to the weights, instead of all weights to the
        rows at every token; the cache stays with its rows. None leaves it to the compiler.

    Raises:
      ValueError: stacks that do not sum to the layers, an unknown remat, cache dtype or kernel, or
        a placement that splits the width, or tokens for a kernel that reads whole rows, or a decode
        placement that is no sharding of three axes.

    >>> import jax, jax.numpy as jnp, rlhf_jax as rl
    >>> config = rl.models.DecoderConfig(
    ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_layers=3, num_heads=2
    ... )
    >>> model = rl.models.Decoder(config, stacks=(2, 1))
    >>> params = model.init(jax.random.key(0))
    >>> model.logits(params, jnp.zeros((1, 4), jnp.int32)).shape
    (1, 4, 16)
    """

    config: DecoderConfig
    _: dataclasses.KW_ONLY
    stacks: tuple[int, ...] = ()
    dtype: Any = jnp.float32
    remat: str = "none"
    kv_dtype: Any = None
    attention: str = "xla"
    placement: Any = None
    decode_placement: Any = None

    REMAT: ClassVar[tuple[str, ...]] = REMAT

    def __post_init__(self) -> None:
        stacks = tuple(int(n) for n in self.stacks) or (self.config.num_layers,)
        object.__setattr__(self, "stacks", self._check_stacks(stacks))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if self.remat not in REMAT:
            raise ValueError(f"remat: got {self.remat!r}; choose one of {REMAT}")
        kernels.check(self.attention, self.dtype, self.config.windows is not None)
        if self.placement is not None:
            kernels.check_placement(self.placement, self.attention)
        check_decode_placement(self.decode_placement)
        if self.kv_dtype is not None:
            object.__setattr__(self, "kv_dtype", np.dtype(self.kv_dtype))
            if self.kv_dtype.name not in _KV_DTYPES:
                raise ValueError(
                    f"kv_dtype: got {self.kv_dtype.name!r}; choose None or one of {_KV_DTYPES}"
                )

    def _check_stacks(self, stacks: tuple[int, ...]) -> tuple[int, ...]:
        count = self.config.num_layers
        if any(n <= 0 for n in stacks) or sum(stacks) != count:
            raise ValueError(
                f"stacks: got {stacks}; give positive numbers that sum to the {count} layers"
            )
        return stacks

    # parameters

    @functools.partial(jax.jit, static_argnums=0)
    def init(self, key: Array) -> Params:
        """Fresh float32 parameters: normal with ``config.initializer_range``, norms at 1.

        Args:
          key: a JAX key; the values do not depend on ``stacks`` beyond their grouping.

        Returns:
          The parameter dict.
        """

        def block(layer_key: Array) -> Any:
            return nnx.to_pure_dict(nnx.state(Block(self.config, nnx.Rngs(layer_key))))

        shell_key, layers_key = jax.random.split(key)
        params = nnx.to_pure_dict(nnx.state(Shell(self.config, nnx.Rngs(shell_key))))
        keys = jax.random.split(layers_key, self.config.num_layers)
        bounds = np.cumsum((0, *self.stacks)).tolist()
        params["layers"] = tuple(jax.vmap(block)(keys[a:b]) for a, b in itertools.pairwise(bounds))
        return params

    def shapes(self) -> Params:
        """The parameter dict with ``jax.ShapeDtypeStruct`` leaves; computes nothing."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def logical_axes(self) -> Params:
        """The parameter dict with a tuple of logical axis names for every leaf.

        Returns:
          Names are ``"layers", "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp"``.
        """
        _, block, shell = definitions(self.config)
        layers = (logical_axes(block, ("layers",)),) * len(self.stacks)
        return {**logical_axes(shell, ()), "layers": layers}

    def restack(self, params: Params, stacks: tuple[int, ...]) -> Params:
        """The same parameters with the layers grouped into other stacks.

        Args:
          params: the parameter dict, of any stacking.
          stacks: layers in each new stack.

        Returns:
          The parameter dict; leaves are copies where the grouping changes.

        Raises:
          ValueError: stacks that do not sum to the layers.
        """
        stacks = self._check_stacks(tuple(stacks))
        return {**params, "layers": restack(params["layers"], stacks)}

    def head(self, params: Params) -> tuple[Array, str]:
        """The output matrix and its layout, tied or not.

        Returns:
          ``(matrix [V, D], "vd")``; logits = hidden · matrixᵀ.
        """
        return (params["embed"] if self.config.tie_embeddings else params["head"])["weight"], "vd"

    # forward

    def hidden(
        self,
        params: Params,
        tokens: Array | None,
        *,
        attention_mask: Array | None = None,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        from_stack: int = 0,
        to_stack: int | None = None,
        inputs: Array | None = None,
        split: int = 0,
        group_size: int = 1,
    ) -> Array:
        """Hidden states; after the final norm unless ``to_stack`` ends before the last stack.

        A frozen trunk is computed once and shared: ``trunk = hidden(params, tokens, to_stack=1)``,
        then ``hidden(params, None, inputs=trunk, from_stack=1)`` for policy and reference.

        Args:
          params: the parameter dict.
          tokens: int ``[B, T]``; None when ``inputs`` is given.
          attention_mask: bool ``[B, T]``, true on real tokens; None means all.
          positions: int ``[B, T]``; None counts the real tokens before each one (of its segment).
          segment_ids: int ``[B, T]`` for packed rows: tokens read only their own segment.
          from_stack, to_stack: run only ``layers[from_stack:to_stack]``.
          inputs: ``[B, T, D]``, what an earlier call with ``to_stack=from_stack`` returned.
          split: static; where prompts end and completions begin (``batch.start``), if they all do
            in one column. Attention then sums in the order of :meth:`decode`, so that log-probs
            round as the sampler's.
          group_size: static; that many neighbouring rows have the same prompt in the columns before
            ``split``. Each prompt is then computed once, not in every row: the same result for
            less. Not with packed rows, nor by a fused kernel (``"auto"`` takes ``"xla"``). Where
            the placement splits tokens, every row computes its prompt all the same.

        Returns:
          ``[B, T, D]`` in the compute dtype. Padding has finite, meaningless values.

        Raises:
          ValueError: shapes that do not agree, a range of stacks that is not there, neither or
            both of tokens and inputs, or groups whose prompts cannot be shared.
        """
        to_stack = len(params["layers"]) if to_stack is None else to_stack
        source = check_entry(params, tokens, inputs, from_stack, to_stack, self.config.hidden_size)
        batch, length = source.shape[:2]
        check_shapes(
            (batch, length),
            attention_mask=attention_mask,
            positions=positions,
            segment_ids=segment_ids,
        )

        packed = segment_ids is not None
        shared_prompts.check(batch, length, split, group_size, packed, self.attention)
        pieces = Pieces.of(self.placement)
        group_size = 1 if pieces.count > 1 else group_size

        def fold(x: Array) -> Array:
            return pieces.fold(shared_prompts.fold(x, split, group_size))

        def run(params: Params, source: Array, given: tuple[Any, Any, Any]) -> Array:
            source, given = jax.tree.map(pieces.fill, (source, given))
            rows, filled = source.shape[:2]
            mask, where, places = attention_inputs(rows, filled, *given)
            mask = pieces.by_tokens(mask)
            source = fold(source)
            if inputs is None:
                x = pieces.looked_up(self._embed(params, source))
            else:
                x = source.astype(self.dtype)
            kernel = "xla" if group_size > 1 else kernels.choose(self)
            ids = kernels.segments(given[0], given[2], (rows, filled))

            def attend(window: Any, q: Array, k: Array, v: Array) -> tuple[Array, None]:
                if kernel == "splash":
                    return kernels.splash(q, k, v, ids, self.placement), None
                if kernel == "cudnn":
                    return kernels.cudnn(q, k, v, mask), None
                reads = within(mask, places, window)
                if pieces.count > 1:
                    return attention_in_pieces(pieces, q, k, v, reads, split), None
                return shared_prompts.attention(q, k, v, reads, split, group_size), None

            part = slice(from_stack, to_stack)
            x, _ = self._run(params["layers"], x, fold(where), attend, part, pieces.by_rows)
            x = self._final_norm(params, x) if to_stack == len(params["layers"]) else x
            x = pieces.unfold(shared_prompts.unfold(x, split, group_size))
            return x if x.shape[1] == length else x[:, :length]

        given = (attention_mask, positions, segment_ids)
        return auto_inside(run, lambda: like_rows(source, 0, 1), source, params, source, given)

    def logits(self, params: Params, tokens: Array | None, **options: Any) -> Array:
        """Logits of the next token at every position: float32 ``[B, T, V]``.

        Args:
          params: the parameter dict.
          tokens: int ``[B, T]``.
          **options: as for :meth:`hidden`.

        Returns:
          float32 ``[B, T, V]``; ``logits[:, t]`` scores the token at ``t + 1``.
        """
        return self.project(params, self.hidden(params, tokens, **options))

    def project(self, params: Params, hidden: Array) -> Array:
        """Hidden states after the final norm → float32 logits: ``[..., D]`` → ``[..., V]``."""

        def run(matrix: Array, hidden: Array) -> Array:
            matrix = matrix.astype(hidden.dtype)
            if hidden.ndim == 3:  # a decode step's rows, which go to the head's weights too
                hidden = few_rows(self.decode_placement, hidden)
            wide: Any = dict(preferred_element_type=jnp.float32)
            return jnp.einsum("...d,vd->...v", hidden, matrix, **wide)

        matrix, _ = self.head(params)
        lead = range(hidden.ndim - 1)
        return auto_inside(run, lambda: like_rows(hidden, *lead), hidden, matrix, hidden)

    # generation

    def prefill(
        self, params: Params, tokens: Array, attention_mask: Array | None = None
    ) -> tuple[Array, Prefix]:
        """One pass over the prompts that keeps their keys and values.

        Args:
          params: the parameter dict.
          tokens: int ``[P, Tp]``, padded on either side.
          attention_mask: bool ``[P, Tp]``; None means all real.

        Returns:
          The hidden state of each prompt's last real token ``[P, D]`` (after the final norm) and
          the :class:`Prefix` for :meth:`init_cache`.
        """
        check_entry(params, tokens)
        check_shapes(tokens.shape, attention_mask=attention_mask)
        valid = jnp.ones_like(tokens, bool) if attention_mask is None else attention_mask

        def out() -> Any:
            row = like_rows(tokens, 0)
            heads = (params["layers"][0]["attn"]["k"]["weight"], 1)
            layer: Any = sharded_as(None, (tokens, 0), heads)
            return row, Prefix(keys=layer, values=layer, mask=row, lengths=row)

        return auto_inside(self._prefill, out, tokens, params, tokens, valid.astype(bool))

    def _prefill(self, params: Params, tokens: Array, valid: Array) -> tuple[Array, Prefix]:
        batch, length = tokens.shape
        pieces = Pieces.of(self.placement).whole_rows(batch)
        x = pieces.looked_up(self._embed(params, tokens))
        mask, positions, _ = attention_inputs(batch, length, valid, None, None)
        dtype = self.dtype if self.kv_dtype is None else self.kv_dtype

        def attend(window: Any, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
            kept = tuple(caching.stored(x.swapaxes(1, 2), dtype) for x in (k, v))
            return masked_attention(q, k, v, within(mask, positions, window)), kept

        everything = slice(None)
        x, kept = self._run(params["layers"], x, positions, attend, everything, pieces.by_rows)
        last = jnp.max(jnp.where(valid, jnp.arange(tokens.shape[1]), 0), axis=1)
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
        prefix = Prefix(
            keys=tuple(keys for keys, _ in kept),
            values=tuple(values for _, values in kept),
            mask=valid,
            lengths=jnp.sum(valid, axis=1, dtype=jnp.int32),
        )
        return self._final_norm(params, x), prefix

    def init_cache(self, prefix: Prefix, *, group_size: int, max_new_tokens: int) -> Cache:
        """An empty suffix cache for ``group_size`` completions of each prefilled prompt.

        Args:
          prefix: what :meth:`prefill` returned; it is shared by the group, never copied.
          group_size: G, completions of each prompt.
          max_new_tokens: S, room for decoded tokens; :func:`extend_cache` adds more.

        Returns:
          The :class:`Cache`.
        """
        for name, value in (("group_size", group_size), ("max_new_tokens", max_new_tokens)):
            if value < 1:
                raise ValueError(f"{name}: got {value}; it must be at least 1")
        return caching.init_cache(prefix, group_size, max_new_tokens)

    def decode(
        self, params: Params, token: Array, cache: Cache, step: Array | int
    ) -> tuple[Array, Cache]:
        """One token for every row: reads the shared prefix and the row's own suffix.

        Args:
          params: the parameter dict, stacked as the cache is.
          token: int ``[P, G]``, the token to append.
          cache: from :meth:`init_cache` or the step before.
          step: int scalar or ``[P, G]`` (traced): suffix tokens already written. A row only ever
            reads slots up to its own step, so a finished row may go on with any token.

        Returns:
          The hidden state ``[P, G, D]`` after the final norm, and the cache with the token's keys
          and values in slot ``step``.

        Raises:
          ValueError: shapes or stacks that do not agree.
        """
        check_decode(params["layers"], token, cache)
        step = jnp.asarray(step, jnp.int32)

        def out() -> Any:
            return like_rows(token, 0, 1), placed(cache)

        return auto_inside(self._decode, out, token, params, token, cache, step)

    def _decode(
        self, params: Params, token: Array, cache: Cache, step: Array
    ) -> tuple[Array, Cache]:
        x = self._embed(params, token)
        positions = jnp.broadcast_to(cache.prefix.lengths[:, None] + step, token.shape)
        angles = rotary_angles(self.config, positions)

        settle = functools.partial(few_rows, self.decode_placement)

        def layer(layer_params: Any, x: Array, attend: Attend) -> tuple[Array, Any]:
            x, kept = layer_of(self.config, layer_params)(settle(x), angles, attend)
            return settle(x), kept

        windows = per_layer(self.config.windows, params["layers"])
        x, cache = decode_layers(layer, params["layers"], windows, x, cache, step)
        return self._final_norm(params, x), cache

    # parts

    def _embed(self, params: Params, tokens: Array) -> Array:
        return jnp.take(params["embed"]["weight"], tokens, axis=0, mode="clip").astype(self.dtype)

    def _run(
        self,
        stacks: tuple[Any, ...],
        x: Array,
        positions: Array,
        attend: Callable[..., tuple[Array, Any]],
        part: slice = slice(None),
        settle: Callable[[Array], Array] = lambda x: x,
    ) -> tuple[Array, list[Any]]:
        """Scan the stacks in `part`; also what `attend` kept, one stacked tree per stack.

        `settle` is applied to the residual stream wherever it enters or leaves a layer.
        """
        angles = rotary_angles(self.config, positions)

        def body(looped: bool, x: Array, xs: Any) -> tuple[Array, Any]:
            layer_params, window = xs
            inner = attention(functools.partial(attend, window), self.remat, looped=looped)
            x, own = layer_of(self.config, layer_params)(input_tagged(settle(x)), angles, inner)
            return settle(x), own

        kept = []
        for xs in list(zip(stacks, per_layer(self.config.windows, stacks), strict=True))[part]:
            looped = depth(xs) > 1
            layer = recomputed(functools.partial(body, looped), self.remat, looped=looped)
            x, own = scan(layer, x, xs)
            kept.append(own)
        return x, kept

    def _final_norm(self, params: Params, x: Array) -> Array:
        return rms_norm(x, params["final_norm"]["scale"], self.config.norm_eps)

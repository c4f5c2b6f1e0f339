"""The value function: a scalar head over a decoder's hidden states, aligned with the tokens.

    critic = rl.models.ValueModel(model)
    params = critic.init(policy_params)              # or a reward model's body
    trainable, frozen = rl.partition.split(params, "^score|^body/layers")
    out = critic.outputs(params, rollout)            # old values and what bootstraps
    step = rl.make_train_step(critic.values, value_loss_fn, optimizer)

Which parameters learn is the partition's choice: the head alone (``"^score"``), the last stacks, or
all. Beside a policy whose leading stacks are frozen, ``trunk_stacks`` starts from ``batch.trunk``.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax import masked
from rlhf_jax.models.config import DecoderConfig, _read_json
from rlhf_jax.models.decoder import Decoder
from rlhf_jax.models.explicit import auto_inside, like_rows
from rlhf_jax.models.hf import _weight_files, resolve
from rlhf_jax.models.hf_tensors import from_hf_tensors
from rlhf_jax.models.refusals import unsupported
from rlhf_jax.models.tensor_files import check_tensors, open_tensors
from rlhf_jax.types import Batch, Rollout

Array = jax.Array
Params = dict[str, Any]

__all__ = ["ValueModel", "ValueOutput", "load_value_model"]

_CLASSIFIER, _CAUSAL = "ForSequenceClassification", "ForCausalLM"
_HEAD = "score.weight"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueOutput:
    """What a critic's forward pass gives.

    Args:
      values: float32 ``[B, T]``: V_t, the value *before* token t is emitted. 0 on padding and on a
        row's first token, before which nothing was read.
      bootstrap: float32 ``[B]``: the value after the row's last real token, for
        ``gae(truncation="bootstrap", bootstrap_value=…)``; of a reward model, its score. In packed
        rows ``[B, T]``: each real token holds its segment's.
    """

    values: jax.Array
    bootstrap: jax.Array


@dataclasses.dataclass(frozen=True)
class ValueModel:
    """V_t = w · h_{t−1}, with h the hidden states of a decoder after its final norm.

    The parameters are ``{"body": …, "score": {"weight": [1, D]}}``: the decoder's without its
    output head, and a head without a bias, as in a Hugging Face sequence classifier.

    Args:
      model: the :class:`Decoder` of the body.
      trunk_stacks: start from ``batch.trunk``, the output of that many leading stacks; they are the
        policy's frozen ones, and must be frozen here as well. 0 starts from the tokens.

    >>> import jax, jax.numpy as jnp, rlhf_jax as rl
    >>> config = rl.models.DecoderConfig(
    ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2
    ... )
    >>> critic = ValueModel(rl.models.Decoder(config))
    >>> body = jax.tree.map(lambda x: jnp.ones(x.shape), critic.model.shapes())
    >>> params = critic.init(body)
    >>> tokens, ones = jnp.array([[3, 5, 7]]), jnp.ones((1, 3), bool)
    >>> batch = rl.Batch(
    ...     tokens=tokens,
    ...     mask=ones,
    ...     attention_mask=ones,
    ...     group_ids=jnp.zeros(1, int),
    ...     advantages=jnp.zeros(1),
    ...     old_log_probs=jnp.zeros((1, 3)),
    ...     sampler_log_probs=jnp.zeros((1, 3)),
    ... )
    >>> critic.values(params, batch).tolist()
    [[0.0, 0.0, 0.0]]
    """

    model: Any
    trunk_stacks: int = 0

    def init(self, body: Params) -> Params:
        """A critic with this body and a head of zeros: every value is exactly 0.

        Args:
          body: a policy's or a reward model's parameters; an output head is left out.

        Returns:
          The parameters. The body's arrays are not copied: ``init_train_state`` copies what is
          trained, and what stays frozen is shared with its owner.
        """
        width = self.model.config.hidden_size
        kept = {name: part for name, part in body.items() if name != "head"}
        return {"body": kept, "score": {"weight": jnp.zeros((1, width), jnp.float32)}}

    def logical_axes(self) -> Params:
        """The parameters with a tuple of logical axis names for every leaf.

        Returns:
          The names of :meth:`Decoder.logical_axes`.
        """
        body = {name: axes for name, axes in self.model.logical_axes().items() if name != "head"}
        return {"body": body, "score": {"weight": (None, "embed")}}

    def values(self, params: Params, batch: Batch | Rollout) -> Array:
        """The values alone, as :func:`rlhf_jax.make_train_step` wants them.

        Args:
          params: from :meth:`init` or :func:`load_value_model`.
          batch: anything with ``tokens``, ``attention_mask``, ``start`` and ``trunk``.

        Returns:
          float32 ``[B, T]``, see :class:`ValueOutput`.

        Raises:
          ValueError: if ``trunk_stacks`` > 0 and the batch holds no trunk.
        """
        return self.outputs(params, batch).values

    def outputs(self, params: Params, batch: Batch | Rollout) -> ValueOutput:
        """Values before every token and after the last one, in one pass.

        Args:
          params: from :meth:`init` or :func:`load_value_model`.
          batch: anything with ``tokens``, ``attention_mask``, ``start`` and ``trunk``.

        Returns:
          :class:`ValueOutput`.

        Raises:
          ValueError: if ``trunk_stacks`` > 0 and the batch holds no trunk.
        """
        if self.trunk_stacks and batch.trunk is None:
            raise ValueError(
                f"batch.trunk: None, but trunk_stacks={self.trunk_stacks}; fill it with "
                "policy.trunk or use trunk_stacks=0"
            )
        start: dict[str, Any] = (
            dict(tokens=None, inputs=batch.trunk, from_stack=self.trunk_stacks)
            if self.trunk_stacks
            else dict(tokens=batch.tokens)
        )
        segment_ids = getattr(batch, "segment_ids", None)
        hidden = self.model.hidden(
            params["body"],
            **start,
            attention_mask=batch.attention_mask,
            segment_ids=segment_ids,
            split=batch.start,
        )

        def out() -> ValueOutput:
            rows, whole = like_rows(batch.tokens, 0), like_rows(batch.tokens, 0, 1)
            return ValueOutput(values=whole, bootstrap=rows if segment_ids is None else whole)

        arrays = hidden, params["score"]["weight"], batch.attention_mask, segment_ids
        return auto_inside(_aligned, out, batch.tokens, *arrays)


def _aligned(
    hidden: Array, weight: Array, real: Array, segment_ids: Array | None = None
) -> ValueOutput:
    """Read the head at every real token and shift once: what was read at t−1 is V_t."""
    # Before any arithmetic: a NaN in padding must not reach the head's gradient.
    hidden = jnp.where(real[..., None], hidden, 0.0).astype(jnp.float32)
    # At full precision: a TPU would round a float32 product's factors to bfloat16.
    full = jax.lax.Precision.HIGHEST
    after = jnp.einsum("btd,d->bt", hidden, weight[0].astype(jnp.float32), precision=full)
    before = jnp.pad(after[:, :-1], ((0, 0), (1, 0)))
    if segment_ids is not None:
        first, last = (f(real, segment_ids) for f in (masked.first_valid, masked.last_valid))
        return ValueOutput(
            values=jnp.where(real & ~first, before, 0.0),
            bootstrap=masked.sequence_sum(jnp.where(last, after, 0.0), real, segment_ids),
        )
    index = jnp.arange(real.shape[1])
    last = jnp.max(jnp.where(real, index, -1), axis=1, keepdims=True)
    return ValueOutput(
        values=jnp.where(real, before, 0.0),
        bootstrap=jnp.sum(jnp.where(index == last, after, 0.0), axis=1),
    )


def load_value_model(
    name: str | os.PathLike[str],
    *,
    stacks: tuple[int, ...] | None = None,
    dtype: Any = jnp.float32,
    remat: str = "none",
    param_dtype: Any = jnp.float32,
) -> tuple[ValueModel, Params]:
    """Load a Hugging Face sequence classifier with one label: a reward model, or a critic.

    Its score of a row is ``outputs(params, batch).bootstrap``. For a critic that starts from the
    reward model's body but not from its head: ``critic.init(params["body"])``.

    Args:
      name: a folder or hub name, as for :func:`load`, of e.g. a LlamaForSequenceClassification.
      stacks: layers in each stack; None means one stack.
      dtype: compute dtype of the body; the head is float32.
      remat: as for :class:`Decoder`.
      param_dtype: dtype of the parameters.

    Returns:
      ``(critic, params)``.

    Raises:
      ValueError: no such model, another architecture, more than one label, or tensors that do not
        fit: missing, extra and misshapen ones are all listed.

    >>> load_value_model("no/such/folder")
    Traceback (most recent call last):
    ...
    ValueError: model: no folder 'no/such/folder'; give a folder with a config.json, a hub name...
    """
    folder = resolve(name)
    model = Decoder(_body_config(folder), stacks=stacks or (), dtype=dtype, remat=remat)
    found, read = open_tensors(_weight_files(folder), what="model")
    where, width = repr(str(folder)), model.config.hidden_size
    head = {key: shape for key, shape in found.items() if key.startswith("score.")}
    check_tensors(head, {_HEAD: (1, width)}, f"the head in {where} is no single score")
    body = {key: shape for key, shape in found.items() if key not in head}
    params = from_hf_tensors(model, body, read, param_dtype=param_dtype, where=where)
    score = np.asarray(read(_HEAD)).astype(np.dtype(param_dtype))
    params = {"body": params, "score": {"weight": score}}
    return ValueModel(model), jax.tree.map(jnp.asarray, params)


def _body_config(folder: Path) -> DecoderConfig:
    """The decoder of a classifier: a config that says nothing of an output head of its own."""
    raw = _read_json(folder)
    named = (raw.get("architectures") or [""])[0]
    if not named.endswith(_CLASSIFIER):
        raise unsupported("architectures", named, f"a name that ends in {_CLASSIFIER}")
    causal = named.removesuffix(_CLASSIFIER) + _CAUSAL
    return DecoderConfig.from_hf(raw | {"architectures": [causal], "tie_word_embeddings": True})

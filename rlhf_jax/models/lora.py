"""LoRA: low-rank additions to named projections, trained while the weights themselves stay.

The adapters are a plain tree beside the base's, with the same stacks of layers::

    adapters = {"layers": ({"attn": {"q": {"a": [n, r, *in], "b": [n, *out, r]}}, …}, …)}

Policy and sampler both run on :meth:`LoRA.merge` of the two; the reference is the base alone::

    lora = rl.models.LoRA(rank=8, targets=("q", "v"))
    params = {"base": base, "adapters": lora.init(key, model)}
    trainable, frozen = rl.partition.split(params, "^adapters/")
    state = rl.init_train_state(trainable, optimizer)
    step = rl.make_train_step(lora.adapted(policy_fn), loss_fn, optimizer)
    state, metrics = step(state, batch, frozen)
    rollout = rl.generate(model, lora.merge(base, state.params["adapters"]), …)
    reference = policy_fn(base, batch).log_probs

Merging holds one more copy of the adapted weights while a pass runs, and its backward pass their
whole gradient, of which only its products with A and B are kept: what LoRA saves is the optimizer's
moments, the float32 masters, the second copy for the reference, and what a checkpoint holds.
:meth:`LoRA.attach` needs neither copy nor gradient: A and B lie beside W, y = x·Wᵀ + (x·Aᵀ)·Bᵀ, for
two thin products more per token. The two round differently (in bf16 a merged weight is rounded once
more), so policy and sampler should run on the same one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.models.decoder import Decoder
from rlhf_jax.models.explicit import auto_inside, placed

Array = jax.Array
Tree = dict[str, Any]

__all__ = ["LoRA"]

GROUPS = dict.fromkeys("qkvo", "attn") | dict.fromkeys(("gate", "up", "down"), "mlp")
"""Projection → the part of a layer that holds it."""
_INITS = ("kaiming", "gaussian")


def input_axes(target: str) -> int:
    """How many axes of a projection's weight ``[*out, *in]`` are its input's."""
    return 2 if target == "o" else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA:
    """Which projections have adapters, of what rank and how strong: W' = W + (α/r)·B·A.

    Args:
      rank: r, the rows of A and columns of B.
      alpha: α; the product is scaled by α/r, or by α/√r with ``rank_stabilized``.
      targets: projections, any of ``q, k, v, o, gate, up, down``.
      layers: numbers of the layers that have adapters; empty means all. They must fill whole stacks
        of the model, e.g. ``tuple(range(22, 30))`` for stacks ``(22, 8)``: no backward pass runs
        through the layers below, and ``batch.trunk`` serves policy and reference.
      init_a: how A begins: ``"kaiming"``, uniform in ±1/√in, or ``"gaussian"``, normal with
        standard deviation 1/r. B begins at 0, so that W' = W exactly.
      rank_stabilized: scale by α/√r.

    Raises:
      ValueError: a rank, α, target, layer or ``init_a`` that cannot be.

    References:
      Hu et al., "LoRA: Low-rank adaptation of large language models", 2021, eq. 3; Kalajdzievski,
      "A rank stabilization scaling factor for fine-tuning with LoRA", 2023, for α/√r. The ways to
      begin are those of the PEFT library.

    >>> import jax, rlhf_jax as rl
    >>> config = rl.models.DecoderConfig(
    ...     vocab_size=16, hidden_size=8, intermediate_size=16, num_layers=3, num_heads=2
    ... )
    >>> model, lora = rl.models.Decoder(config), LoRA(rank=2, targets=("q", "v"))
    >>> base = jax.tree.map(lambda x: jax.numpy.ones(x.shape), model.shapes())
    >>> adapters = lora.init(jax.random.key(1), model)
    >>> rl.partition.count(base), rl.partition.count(adapters)
    (2104, 192)
    >>> weights = [tree["layers"][0]["attn"]["q"] for tree in (base, lora.merge(base, adapters))]
    >>> bool((weights[0]["weight"] == weights[1]["weight"]).all())
    True
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q", "v")
    layers: tuple[int, ...] = ()
    init_a: str = "kaiming"
    rank_stabilized: bool = False

    def __post_init__(self) -> None:
        given = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        if not given or (unknown := sorted(set(given) - set(GROUPS))):
            named = f"{unknown} among them" if given else "nothing"
            raise ValueError(f"targets: got {named}; choose from {', '.join(GROUPS)}")
        # One order, so that equal sets are equal descriptions.
        object.__setattr__(self, "targets", tuple(t for t in GROUPS if t in given))
        object.__setattr__(self, "layers", tuple(sorted({int(n) for n in self.layers})))
        object.__setattr__(self, "alpha", float(self.alpha))
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank: got {self.rank!r}; it must be an integer ≥ 1")
        if not math.isfinite(self.alpha) or self.alpha <= 0:
            raise ValueError(f"alpha: got {self.alpha!r}; it must be positive")
        if self.init_a not in _INITS:
            raise ValueError(f"init_a: got {self.init_a!r}; choose one of {_INITS}")

    @property
    def scale(self) -> float:
        """What B·A is multiplied by: α/r or α/√r."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    # the tree

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def init(self, key: Array, model: Decoder) -> Tree:
        """Fresh float32 adapters with B = 0.

        Args:
          key: a JAX key; the values do not depend on the model's stacks beyond their grouping.
          model: the decoder that is adapted.

        Returns:
          The adapter tree.

        Raises:
          ValueError: layers that the model has not, or that do not fill whole stacks of it.
        """
        count, block = model.config.num_layers, model.shapes()["layers"][0]
        into = {t: _sides(t, block[GROUPS[t]][t]["weight"].shape[1:])[1] for t in self.targets}
        ends = np.cumsum([self.rank * math.prod(into[t]) for t in self.targets]).tolist()

        # One draw per layer for all its projections: a program of many draws compiles for long.
        def draw(layer_key: Array) -> Array:
            if self.init_a == "gaussian":
                return jax.random.normal(layer_key, (ends[-1],), jnp.float32)
            return jax.random.uniform(layer_key, (ends[-1],), jnp.float32, -1.0, 1.0)

        drawn = jnp.split(jax.vmap(draw)(jax.random.split(key, count)), ends[:-1], axis=1)
        by_target = dict(zip(self.targets, drawn, strict=True))

        def make(target: str, first: int, n: int, shape: tuple[int, ...]) -> Tree:
            size = into[target]
            spread = self.rank if self.init_a == "gaussian" else math.sqrt(math.prod(size))
            a = by_target[target][first : first + n].reshape(n, self.rank, *size) / spread
            return {"a": a, "b": jnp.zeros((n, *_sides(target, shape)[0], self.rank), jnp.float32)}

        return self._tree(model, make)

    def shapes(self, model: Decoder) -> Tree:
        """The adapter tree with ``jax.ShapeDtypeStruct`` leaves; computes nothing.

        Args:
          model: the decoder that is adapted.

        Returns:
          The tree.
        """
        return jax.eval_shape(lambda key: self.init(key, model), jax.random.key(0))

    def logical_axes(self, model: Decoder) -> Tree:
        """The adapter tree with a tuple of logical axis names for every leaf.

        Args:
          model: the decoder that is adapted.

        Returns:
          The names of :meth:`Decoder.logical_axes`, and ``"rank"``: A is split as the weight's
          input is and B as its output, so that a merged weight lies as the weight does.
        """
        names = model.logical_axes()["layers"]

        def make(target: str, first: int, n: int, shape: tuple[int, ...]) -> Tree:
            lead, *rest = names[0][GROUPS[target]][target]["weight"]
            out, into = _sides(target, tuple(rest))
            return {"a": (lead, "rank", *into), "b": (lead, *out, "rank")}

        return self._tree(model, make)

    def _tree(self, model: Decoder, make: Callable[[str, int, int, tuple[int, ...]], Tree]) -> Tree:
        """``make(target, first layer, layers, weight shape)`` for each adapted projection."""
        weights, adapted = model.shapes()["layers"], self._adapted(model)
        stacks = []
        for stack, first, size in zip(weights, _firsts(model), model.stacks, strict=True):
            tree: Tree = {}
            for target in self.targets if first in adapted else ():
                group = GROUPS[target]
                shape = stack[group][target]["weight"].shape[1:]
                tree.setdefault(group, {})[target] = make(target, first, size, shape)
            stacks.append(tree)
        return {"layers": tuple(stacks)}

    def _adapted(self, model: Decoder) -> set[int]:
        """The layers that have adapters: all of a stack or none of it."""
        count = model.config.num_layers
        chosen = set(self.layers or range(count))
        whole = [set(range(a, a + n)) for a, n in zip(_firsts(model), model.stacks, strict=True)]
        if beyond := sorted(chosen - set(range(count))):
            raise ValueError(f"layers: got {beyond}; the model's are 0 to {count - 1}")
        if split := [sorted(stack) for stack in whole if stack & chosen and stack - chosen]:
            raise ValueError(
                f"layers: {sorted(chosen)} are a part of the stack of layers {split[0][0]} to "
                f"{split[0][-1]}; choose the model's stacks (now {model.stacks}) so that they are "
                "whole ones"
            )
        return chosen

    # use

    def merge(self, base: Tree, adapters: Tree) -> Tree:
        """The base with W + (α/r)·B·A in the place of each adapted W.

        A pure function, for use inside ``jit`` and ``grad``: with respect to the adapters only
        A and B get a gradient.

        Args:
          base: the decoder's parameters, of the stacking of ``adapters``.
          adapters: from :meth:`init` or :func:`load_adapters`.

        Returns:
          The parameter dict; leaves without an adapter are the base's own, and a merged weight has
          the base's dtype: sums are made in float32 and rounded once.

        Raises:
          ValueError: stacks, projections or shapes that do not agree.
        """

        def merged(held: Tree, pair: Tree, name: str) -> Tree:
            return {**held, "weight": self._merged(name, held["weight"], pair["a"], pair["b"])}

        return self._with(base, adapters, merged)

    def attach(self, base: Tree, adapters: Tree) -> Tree:
        """The base with A and (α/r)·B beside each adapted W, which the layers then add up.

        A pure function like :meth:`merge`, for everything a :class:`Decoder` does with parameters:
        with respect to the adapters no weight gets a gradient, and none is copied.

        Args:
          base: the decoder's parameters, of the stacking of ``adapters``.
          adapters: from :meth:`init` or :func:`load_adapters`.

        Returns:
          The parameter dict; all its leaves but A and B are the base's own.

        Raises:
          ValueError: stacks, projections or shapes that do not agree.
        """

        def attached(held: Tree, pair: Tree, name: str) -> Tree:
            self._check_sides(name, held["weight"], pair["a"], pair["b"])
            return {**held, "a": pair["a"], "b": self.scale * pair["b"]}

        return self._with(base, adapters, attached)

    def _with(self, base: Tree, adapters: Tree, join: Callable[[Tree, Tree, str], Tree]) -> Tree:
        """``join(projection, its adapter, name)`` in the place of each adapted projection."""
        ours, theirs = len(adapters["layers"]), len(base["layers"])
        if ours != theirs:
            raise ValueError(f"adapters: they have {ours} stacks, the base has {theirs}")
        stacks = []
        for stack, extra in zip(base["layers"], adapters["layers"], strict=True):
            joined = dict(stack)
            for group, target in [(group, t) for group, held in extra.items() for t in held]:
                new = join(stack[group][target], extra[group][target], f"{group}/{target}")
                joined[group] = {**joined[group], target: new}
            stacks.append(joined)
        return {**base, "layers": tuple(stacks)}

    def _check_sides(self, name: str, weight: Array, a: Array, b: Array) -> None:
        n, into, out = len(weight), a.shape[2:], b.shape[1:-1]
        sides = (a.shape[:2], (len(b), b.shape[-1]), weight.shape)
        if sides != ((n, self.rank), (n, self.rank), (n, *out, *into)):
            raise ValueError(
                f"adapters: {name} has a {a.shape} and b {b.shape}, which do not fit rank "
                f"{self.rank} and the base's weight {weight.shape}"
            )

    def _merged(self, name: str, weight: Array, a: Array, b: Array) -> Array:
        self._check_sides(name, weight, a, b)
        n = len(weight)

        def run(weight: Array, a: Array, b: Array) -> Array:
            # As matrices: with more axes XLA's CPU backend copies them. At full precision: the sum
            # over r terms is cheap, and a TPU would else round A and B to bfloat16.
            wide = jnp.promote_types(jnp.result_type(weight, a, b), jnp.float32)
            product = jnp.matmul(
                b.reshape(n, -1, self.rank).astype(wide),
                a.reshape(n, self.rank, -1).astype(wide),
                precision=jax.lax.Precision.HIGHEST,
            )
            total = weight.astype(wide) + self.scale * product.reshape(weight.shape)
            return total.astype(weight.dtype)

        return auto_inside(run, lambda: placed(weight), weight, jnp.asarray(weight), a, b)

    def adapted(self, function: Callable[..., Any], *, merged: bool = True) -> Callable[..., Any]:
        """``function(params, …)`` of adapted parameters as one of ``{"base": …, "adapters": …}``.

        Args:
          function: takes the decoder's parameters first: a policy function, ``model.hidden``, …
          merged: the parameters are those of :meth:`merge`, else of :meth:`attach`.

        Returns:
          The function of the two trees, for :func:`rlhf_jax.make_train_step`.
        """
        join = self.merge if merged else self.attach

        @functools.wraps(function)
        def call(params: Tree, *args: Any, **options: Any) -> Any:
            return function(join(params["base"], params["adapters"]), *args, **options)

        return call

    def off(self, adapters: Tree) -> Tree:
        """Adapters that change nothing: the reference, where a function wants the same two trees.

        With them one jitted function serves policy and reference, and only A and B are held twice.

        Args:
          adapters: any adapter tree.

        Returns:
          Zeros in its structure, dtypes and layout.
        """
        return jax.tree.map(jnp.zeros_like, adapters)


def _firsts(model: Decoder) -> list[int]:
    """The number of each stack's first layer."""
    return np.cumsum((0, *model.stacks[:-1])).tolist()


def _sides(target: str, axes: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """A weight's axes ``[*out, *in]`` in their two parts."""
    cut = len(axes) - input_axes(target)
    return axes[:cut], axes[cut:]

"""A loss and an optimizer become one jitted, donated, sharded, micro-batched step.

The step imports no loss: it is handed one, a function of arrays, and knows nothing of algorithms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlhf_jax import metrics as metrics_lib
from rlhf_jax import partition
from rlhf_jax.metrics import Metrics
from rlhf_jax.policy import PolicyFn
from rlhf_jax.types import Batch, Params, PolicyOutput, TrainState

__all__ = ["LossFn", "TrainStep", "init_train_state", "make_train_step", "state_shardings"]

LossFn = Callable[[PolicyOutput, Batch], tuple[jax.Array, Metrics]]
TrainStep = Callable[..., tuple[TrainState, Metrics]]


def state_shardings(
    params: Params, optimizer: optax.GradientTransformation, shardings: Any
) -> TrainState:
    """Shardings of a whole :class:`TrainState`: moments lie where their parameters lie.

    Args:
      params: trainable parameters (arrays or ``ShapeDtypeStruct``).
      optimizer: the optax transformation.
      shardings: ``NamedSharding`` for each parameter, in the structure of ``params``.

    Returns:
      A TrainState with a ``NamedSharding`` in every leaf's place; counters are replicated.
    """
    mesh = jax.tree.leaves(shardings)[0].mesh
    whole = jax.NamedSharding(mesh, jax.P())

    def masked(leaf: Any) -> bool:  # a parameter of another group of optax.multi_transform
        return isinstance(leaf, optax.MaskedNode)

    moments = optax.tree.map_params(
        optimizer,
        lambda moment, sharding: moment if masked(moment) else sharding,
        jax.eval_shape(optimizer.init, params),
        shardings,
        transform_non_params=lambda _: whole,
        is_leaf=masked,
    )
    return TrainState(params=shardings, opt_state=moments, step=whole, skipped=whole)


def init_train_state(
    params: Params, optimizer: optax.GradientTransformation, *, shardings: Any = None
) -> TrainState:
    """Start a :class:`TrainState` at step 0.

    Args:
      params: the trainable parameters; cast to float32 (master weights). The state takes a copy:
        the step donates its state, and ``params`` must outlive that.
      optimizer: the optax transformation; its moments are float32 because the masters are.
      shardings: ``NamedSharding`` for each parameter; None keeps the arrays where they are.

    Returns:
      The state, laid out by ``shardings``.

    >>> import jax.numpy as jnp, optax
    >>> state = init_train_state({"w": jnp.ones(2, jnp.bfloat16)}, optax.adam(1e-3))
    >>> state.params["w"].dtype.name, int(state.step)
    ('float32', 0)
    """

    def init(params: Params) -> TrainState:
        return TrainState(
            params=params,
            opt_state=optimizer.init(params),
            step=jnp.int32(0),
            skipped=jnp.int32(0),
        )

    masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
    # Without out_shardings jit would put the moments, which depend on no input's values, on one
    # device, and the step would compile twice.
    out = None if shardings is None else state_shardings(masters, optimizer, shardings)
    if shardings is not None:
        masters = jax.device_put(masters, shardings)
    return jax.jit(init, out_shardings=out)(masters)


def make_train_step(
    policy_fn: PolicyFn,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    micro_batches: int = 1,
    group_size: int = 1,
    max_grad_norm: float | None = 1.0,
    compute_dtype: Any = None,
    shardings: TrainState | None = None,
) -> TrainStep:
    """Build ``step(state, batch, frozen=None) -> (state, metrics)``.

    g = Σ_micro ∇ loss_fn(policy_fn(merge(params, frozen), micro), micro); params ← params + u(g)

    The batch's rows are split into ``micro_batches`` scanned one after the other. Their gradients
    are *added*: a loss that divides by a global denominator (``batch.denominator``) gives the same
    gradient for every split. An update with a non-finite gradient is dropped and counted; the
    parameters and moments stay as they were.

    Args:
      policy_fn: ``(params, batch) -> PolicyOutput``; see :mod:`rlhf_jax.policy`.
      loss_fn: ``(output, batch) -> (scalar, Metrics)``, any function of arrays.
      optimizer: the optax transformation, without clipping (that is ``max_grad_norm``'s). Groups
        of parameters: ``optax.multi_transform`` with :func:`rlhf_jax.partition.labels`.
      micro_batches: how many parts the rows are split into; must divide them.
      group_size: that many neighbouring rows go into one micro-batch, for a ``policy_fn`` that
        computes their prompt once.
      max_grad_norm: clip the global gradient norm to this; None turns clipping off.
      compute_dtype: e.g. ``"bfloat16"``: ``policy_fn`` gets all wider floating parameters, trained
        and frozen, in this dtype. They are cast once a step, where they lie, so that devices send
        each other half the bytes. Each micro-batch's gradient comes in this dtype and is added in
        float32; masters, moments and update stay float32. None casts nothing. (The dtype of the
        activations is the model's own: ``Decoder(dtype=…)``.)
      shardings: from :func:`state_shardings`; keeps the state in its layout. None on one device.

    Returns:
      A jitted function. Its first argument is donated: use the state that it returns. ``frozen``
      holds the parameters that are not trained (see :func:`rlhf_jax.partition.split`) and is
      neither changed nor donated. Metrics gain ``policy/loss``, ``optim/grad_norm`` (before
      clipping), ``optim/update_norm`` and ``optim/skipped``.

    Raises:
      ValueError: a ``compute_dtype`` that is no floating dtype, a number below 1; when called, if
        the rows do not make ``micro_batches`` of whole groups.
    """
    for name, value in (("micro_batches", micro_batches), ("group_size", group_size)):
        if value < 1:
            raise ValueError(f"{name}: expected an int ≥ 1, got {value!r}")
    dtype = _floating(compute_dtype)

    def step(state: TrainState, batch: Batch, frozen: Params = None) -> tuple[TrainState, Metrics]:
        rest = _narrowed(frozen, dtype)

        def objective(params: Params, part: Batch) -> tuple[jax.Array, Metrics]:
            loss, found = loss_fn(policy_fn(partition.merge(params, rest), part), part)
            return loss, {**found, "policy/loss": metrics_lib.sum_(loss)}

        params = _narrowed(state.params, dtype)
        grads, found = _gradients(objective, params, batch, (micro_batches, group_size), shardings)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm)
        if max_grad_norm is not None:
            scale = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * scale, grads)
        # Zeros, not NaN, go through the optimizer of a dropped update: NaN * 0 is NaN.
        safe = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), grads)
        updates, opt_state = optimizer.update(safe, state.opt_state, state.params)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, 0.0), updates)
        opt_state = jax.tree.map(lambda n, o: jnp.where(finite, n, o), opt_state, state.opt_state)
        new = TrainState(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            step=state.step + 1,
            skipped=state.skipped + ~finite,
        )
        found |= {
            "optim/grad_norm": metrics_lib.mean(norm),
            "optim/update_norm": metrics_lib.mean(optax.tree.norm(updates)),
            "optim/skipped": metrics_lib.sum_((~finite).astype(jnp.float32)),
        }
        return new, found

    out = None if shardings is None else (shardings, None)
    return jax.jit(step, donate_argnums=0, out_shardings=out)


def _floating(name: Any) -> Any:
    """The dtype of that name, or None."""
    if name is None:
        return None
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"compute_dtype: got {name!r}; use a floating dtype such as 'bfloat16', or None"
        )
    return dtype


def _narrowed(params: Params, dtype: Any) -> Params:
    """Floating leaves that are wider than ``dtype`` in ``dtype``; the others as they are."""

    def cast(x: Any) -> Any:
        wide = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > dtype.itemsize
        return x.astype(dtype) if wide else x

    return params if dtype is None else jax.tree.map(cast, params)


def _gradients(
    objective: Callable[[Params, Batch], tuple[jax.Array, Metrics]],
    params: Params,
    batch: Batch,
    split: tuple[int, int],
    shardings: TrainState | None,
) -> tuple[Params, Metrics]:
    """Sum the gradients over micro-batches, in float32; reduce each metric by its own rule."""

    def grad(part: Batch) -> tuple[Params, Metrics]:
        grads, found = jax.grad(objective, has_aux=True)(params, part)
        grads = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
        # Said outright, or the compiler may leave whole gradients on every device.
        if shardings is not None:
            grads = _laid_out(grads, shardings.params)
        return grads, found

    if split[0] == 1:
        return grad(batch)

    def add(total: Params, part: Batch) -> tuple[Params, Metrics]:
        grads, found = grad(part)
        return jax.tree.map(jnp.add, total, grads), found

    zeros = jax.tree.map(
        lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32)), params
    )
    if shardings is not None:
        zeros = _laid_out(zeros, shardings.params)
    total, stacked = jax.lax.scan(add, zeros, split_rows(batch, *split))
    return total, metrics_lib.stack_reduce(stacked)


def _laid_out(tree: Params, shardings: Any) -> Params:
    """The tree where ``shardings`` puts it, under Auto and Explicit mesh axes."""
    explicit = jax.sharding.AxisType.Explicit in jax.tree.leaves(shardings)[0].mesh.axis_types
    place = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
    return jax.tree.map(place, tree, shardings)


def split_rows(batch: Any, parts: int, group_size: int = 1) -> Any:
    """Give every array a leading micro-batch axis: ``[B, ...]`` → ``[parts, B/parts, ...]``.

    Micro-batch ``i`` takes rows (or groups of neighbouring rows) ``i, i + parts, …``, so that rows
    split over devices stay on their device.

    Args:
      batch: any pytree of row-first arrays.
      parts: must divide the rows.
      group_size: neighbouring rows that stay together; a part must hold whole groups.

    Returns:
      The same pytree with one more axis in front.

    Raises:
      ValueError: naming the rows, ``micro_batches`` and ``group_size``.
    """

    def split(x: jax.Array) -> jax.Array:
        rows = x.shape[0]
        if rows % parts:
            raise ValueError(
                f"micro_batches: {parts} does not divide the batch's {rows} rows; "
                f"use a divisor of {rows}"
            )
        if (rows // parts) % group_size:
            raise ValueError(
                f"group_size: {rows // parts} rows a micro-batch are no whole groups of "
                f"{group_size}; use fewer micro_batches, or group_size=1"
            )
        x = x.reshape(-1, parts, group_size, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(parts, rows // parts, *x.shape[3:])

    return jax.tree.map(split, batch)

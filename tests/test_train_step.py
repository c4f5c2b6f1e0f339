"""The step, with a bigram table and an embedding × head as policies and losses written here."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlhf_jax as rl
import sharding

V, B, T, D = 32, 16, 10, 16


def _params(seed=0):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "embed": jax.random.normal(keys[0], (V, D)),
        "head": jax.random.normal(keys[1], (D, V)) / 4,
    }


AXES = {"embed": ("vocab", "embed"), "head": ("embed", "vocab")}


def _apply(params, tokens):
    return params["embed"][tokens] @ params["head"]


def _batch(seed=0, **changes):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, T, B)
    mask = np.arange(T) >= T - lengths[:, None]
    fields = dict(
        tokens=rng.integers(0, V, (B, T)),
        mask=mask,
        attention_mask=np.ones((B, T), bool),
        group_ids=np.repeat(np.arange(B // 4), 4),
        advantages=rng.normal(size=B).astype(np.float32),
        old_log_probs=rng.normal(size=(B, T)).astype(np.float32) - 3,
        sampler_log_probs=np.zeros((B, T), np.float32),
        denominator=np.full(B, mask.sum(), np.float32),
    )
    return rl.Batch(**jax.tree.map(jnp.asarray, fields | changes))


def _loss(output, batch):
    """A plain policy gradient with the global denominator."""
    per_token = -batch.advantages[:, None] * output.log_probs / batch.denominator[:, None]
    loss = jnp.sum(jnp.where(batch.mask, per_token, 0.0))
    return loss, {"policy/entropy": rl.metrics.mean(output.entropy, batch.mask)}


def _optimizer():
    return optax.adamw(1e-2, weight_decay=0.01)


def _run(steps=3, layout=None, trainable=None, optimizer=None, **options):
    params, optimizer, batch = _params(), optimizer or _optimizer(), _batch()
    frozen, shardings, state_shardings = None, None, None
    if trainable:
        params, frozen = rl.partition.split(params, trainable)
    if layout:
        layout = sharding.get_layout(layout)
        mesh = sharding.make_mesh(layout)
        shardings = sharding.tree_shardings(AXES, params, layout, mesh)
        state_shardings = rl.train_step.state_shardings(params, optimizer, shardings)
        batch = jax.device_put(batch, sharding.row_sharding(layout, mesh))
    state = rl.init_train_state(params, optimizer, shardings=shardings)
    traces = []

    def loss(output, batch):
        traces.append(1)  # runs when the step is traced, never when it is called again
        return _loss(output, batch)

    policy = rl.policy.from_apply(_apply)
    step = rl.make_train_step(policy, loss, optimizer, shardings=state_shardings, **options)
    state, metrics = step(state, batch, frozen)
    first = len(traces)
    for _ in range(steps - 1):
        state, metrics = step(state, batch, frozen)
    return state, rl.metrics.compute(metrics), len(traces) - first


@pytest.fixture(scope="module")
def plain():
    return _run()


def _close(first, second, rtol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), first, second)


@pytest.mark.fault(23)
@pytest.mark.fault(58)
@pytest.mark.parametrize("micro_batches", [2, 4, 8, 16])
def test_micro_batches_change_nothing(plain, micro_batches):
    state, metrics, _ = _run(micro_batches=micro_batches)
    _close(state.params, plain[0].params, rtol=2e-6)
    _close(metrics, plain[1], rtol=1e-5)


@pytest.mark.fault(23)
@pytest.mark.fault(51)
@pytest.mark.parametrize("layout", ["single", "dp", "fsdp", "tensor", "fsdp_tensor"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_layouts_change_nothing_and_compile_once(plain, layout, micro_batches):
    state, metrics, retraced = _run(layout=layout, micro_batches=micro_batches)
    _close(state.params, plain[0].params, rtol=2e-6)
    _close(metrics, plain[1], rtol=1e-5)
    assert retraced == 0


@pytest.mark.fault(51)
@pytest.mark.fault(57)
def test_moments_lie_where_their_parameters_lie():
    state, _, _ = _run(layout="fsdp_tensor")
    adam = state.opt_state[0]
    for name, spec in (("embed", jax.P("tensor", "fsdp")), ("head", jax.P("fsdp", "tensor"))):
        for tree in (state.params, adam.mu, adam.nu):
            assert tree[name].sharding.spec == spec
            assert tree[name].addressable_shards[0].data.size == V * D // 8


@pytest.mark.fault(52)
def test_masters_and_moments_are_float32():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _params())
    state = rl.init_train_state(params, _optimizer())
    dtypes = {x.dtype.name for x in jax.tree.leaves((state.params, state.opt_state[0].mu))}
    assert dtypes == {"float32"}


def test_frozen_leaves_have_no_moments_and_do_not_move():
    state, _, _ = _run(trainable="head")
    assert state.params["embed"] is None
    assert state.opt_state[0].mu["embed"] is None
    assert (state.params["head"] != _params()["head"]).any()


@pytest.mark.fault(50)
def test_reference_and_caller_parameters_survive_ten_donated_steps():
    params = _params()
    optimizer = _optimizer()
    state = rl.init_train_state(params, optimizer)
    reference = rl.partition.copy(state.params)
    before = jax.tree.map(np.array, reference)
    step = rl.make_train_step(rl.policy.from_apply(_apply), _loss, optimizer)
    for _ in range(10):
        old = state
        state, _ = step(state, _batch())
    assert old.params["head"].is_deleted()
    for kept in (reference, params):
        jax.tree.map(np.testing.assert_array_equal, kept, before)


@pytest.mark.parametrize("where", ["advantages", "old_log_probs", "denominator"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_nan_never_reaches_the_parameters(where, micro_batches):
    def loss(output, batch):
        value, metrics = _loss(output, batch)
        return value + jnp.sum(batch.old_log_probs * output.log_probs), metrics

    optimizer = _optimizer()
    state = rl.init_train_state(_params(), optimizer)
    step = rl.make_train_step(
        rl.policy.from_apply(_apply), loss, optimizer, micro_batches=micro_batches
    )
    state, _ = step(state, _batch())
    before = jax.tree.map(np.array, (state.params, state.opt_state))
    bad = getattr(_batch(), where).at[3].set(jnp.nan)
    state, metrics = step(state, _batch(**{where: bad}))
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)
    assert (int(state.step), int(state.skipped)) == (2, 1)
    assert float(rl.metrics.compute(metrics)["optim/skipped"]) == 1
    state, _ = step(state, _batch())
    assert (state.params["head"] != before[0]["head"]).any()


@jax.custom_vjp
def _with_gradient(x, extra):
    """x, with a gradient to which ``extra`` is added."""
    return x


_with_gradient.defvjp(lambda x, extra: (x, extra), lambda extra, g: (g + extra, jnp.zeros_like(g)))


@pytest.fixture(scope="module")
def poisonable():
    """A whole step from rewards on, and clean arrays of which any one may get a NaN."""

    def loss(output, batch):
        log_probs = _with_gradient(output.log_probs + batch.extra["log_prob"], batch.extra["grad"])
        advantages = rl.advantages.group_normalized(batch.extra["reward"], batch.group_ids, ddof=1)
        return rl.losses.ppo_loss(log_probs, batch.old_log_probs, advantages, batch.mask)

    rewards = np.random.default_rng(1).normal(size=B).astype(np.float32)
    zeros = np.zeros((B, T), np.float32)
    clean = dict(reward=rewards, log_prob=zeros, grad=zeros)
    return rl.make_train_step(rl.policy.from_apply(_apply), loss, _optimizer()), clean


@pytest.mark.parametrize("where", ["reward", "log_prob", "grad"])
def test_one_nan_reaches_neither_parameters_nor_moments(poisonable, where):
    step, clean = poisonable
    bad = clean[where].copy()
    # group_normalized takes a NaN for a missing reward; an infinite one makes NaN advantages.
    bad[(3,) if where == "reward" else (3, 5)] = np.inf if where == "reward" else np.nan
    mask = np.ones((B, T), bool)
    state = rl.init_train_state(_params(), _optimizer())
    state, _ = step(state, _batch(mask=mask, extra=clean))
    assert int(state.skipped) == 0
    before = jax.tree.map(np.array, (state.params, state.opt_state))
    state, metrics = step(state, _batch(mask=mask, extra={**clean, where: bad}))
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)
    assert (int(state.step), int(state.skipped)) == (2, 1)
    assert float(rl.metrics.compute(metrics)["optim/skipped"]) == 1


def test_gradient_clipping_equals_optax():
    optimizer = optax.sgd(1.0)
    policy = rl.policy.from_apply(_apply)
    batch, params = _batch(), _params()
    grads = jax.grad(lambda p: _loss(policy(p, batch), batch)[0])(params)
    limit = float(optax.tree.norm(grads)) / 3
    clipped, _ = optax.clip_by_global_norm(limit).update(grads, optax.EmptyState())
    step = rl.make_train_step(policy, _loss, optimizer, max_grad_norm=limit)
    state, metrics = step(rl.init_train_state(params, optimizer), batch)
    _close(state.params, jax.tree.map(lambda p, g: p - g, params, clipped), rtol=1e-5)
    reported = float(rl.metrics.compute(metrics)["optim/grad_norm"])
    assert reported == pytest.approx(3 * limit, rel=1e-5)


def test_rows_that_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="micro_batches: 3 does not divide the batch's 16 rows"):
        _run(micro_batches=3)
    with pytest.raises(ValueError, match="micro_batches"):
        _run(micro_batches=0)


# ---- compute dtype ----


@pytest.mark.fault(52)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_bf16_compute_keeps_float32_masters_moments_and_updates(micro_batches):
    seen = []

    def apply(params, tokens):
        seen.append({leaf.dtype.name for leaf in jax.tree.leaves(params)})
        return _apply(params, tokens)

    params, optimizer = _params(), _optimizer()
    trainable, frozen = rl.partition.split(params, "head")
    state = rl.init_train_state(trainable, optimizer)
    step = rl.make_train_step(
        rl.policy.from_apply(apply),
        _loss,
        optimizer,
        micro_batches=micro_batches,
        compute_dtype="bfloat16",
    )
    for _ in range(3):
        state, _ = step(state, _batch(), frozen)
    assert seen and all(dtypes == {"bfloat16"} for dtypes in seen), "trained and frozen alike"
    adam = state.opt_state[0]
    kept = jax.tree.leaves((state.params, adam.mu, adam.nu))
    assert {leaf.dtype.name for leaf in kept} == {"float32"}
    rounded = state.params["head"].astype(jnp.bfloat16).astype(jnp.float32)
    assert (rounded != state.params["head"]).any(), "steps below bf16's resolution are kept"
    exact, _, _ = _run(trainable="head")
    moved = exact.params["head"] - params["head"]
    gap = np.linalg.norm(state.params["head"] - exact.params["head"])
    assert gap < 0.05 * np.linalg.norm(moved)


@pytest.mark.fault(52)
def test_gradients_of_micro_batches_are_added_in_float32():
    """256 + 15 × 1: a sum in bf16 would stay at 256."""

    def policy(params, batch):
        return rl.types.PolicyOutput(log_probs=params["w"] * batch.advantages)

    def loss(output, batch):
        return jnp.sum(output.log_probs.astype(jnp.float32)), {}

    state = rl.init_train_state({"w": jnp.zeros(())}, optax.sgd(1.0))
    step = rl.make_train_step(
        policy,
        loss,
        optax.sgd(1.0),
        micro_batches=B,
        max_grad_norm=None,
        compute_dtype=jnp.bfloat16,
    )
    advantages = jnp.ones(B, jnp.bfloat16).at[0].set(256)
    state, _ = step(state, _batch(advantages=advantages))
    assert float(state.params["w"]) == -(256 + 15)


@pytest.mark.parametrize("name", ["int8", "half-float", 3.5])
def test_a_compute_dtype_that_is_none_is_named(name):
    with pytest.raises(ValueError, match=r"compute_dtype: got .*bfloat16"):
        _run(compute_dtype=name)


@pytest.mark.fault(57)
@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
def test_gradients_are_split_as_their_parameters_are(compute_dtype):
    layout = sharding.get_layout("fsdp")
    mesh = sharding.make_mesh(layout)
    params, optimizer = _params(), _optimizer()
    shardings = sharding.tree_shardings(AXES, params, layout, mesh)
    state = rl.init_train_state(params, optimizer, shardings=shardings)
    step = rl.make_train_step(
        rl.policy.from_apply(_apply),
        _loss,
        optimizer,
        micro_batches=2,
        compute_dtype=compute_dtype,
        shardings=rl.train_step.state_shardings(params, optimizer, shardings),
    )
    batch = jax.device_put(_batch(), sharding.row_sharding(layout, mesh))
    text = step.lower(state, batch).compile().as_text()
    loops = [line for line in text.splitlines() if " while(" in line]
    # A micro-batch loop carries the sums and, in the compute dtype, the parameters.
    least = 2 if compute_dtype is None else 1
    for part in (f"f32[{V},{D // 8}]", f"f32[{D // 8},{V}]"):
        assert any(line.count(part) >= least for line in loops), "sums are split eight ways"


# ---- parameter groups and schedules ----


def _groups(params):
    """No decay and another rate for the head."""
    labels = rl.partition.labels(params, {"^head": "plain"}, default="decay")
    groups = {"decay": optax.adamw(1e-2, weight_decay=0.5), "plain": optax.adam(3e-3)}
    return optax.multi_transform(groups, labels)


def test_parameter_groups_have_their_own_optimizer():
    found, _, _ = _run(steps=1, optimizer=_groups(_params()))
    decayed, _, _ = _run(steps=1, optimizer=optax.adamw(1e-2, weight_decay=0.5))
    undecayed, _, _ = _run(steps=1, optimizer=optax.adam(3e-3))
    _close(found.params["embed"], decayed.params["embed"])
    _close(found.params["head"], undecayed.params["head"])


@pytest.mark.fault(51)
@pytest.mark.fault(57)
def test_parameter_groups_under_a_layout():
    optimizer = _groups(_params())
    expected, _, _ = _run(optimizer=optimizer)
    state, _, retraced = _run(optimizer=optimizer, layout="fsdp_tensor", micro_batches=2)
    _close(state.params, expected.params, rtol=2e-6)
    assert retraced == 0
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == (V, D)]
    assert len(moments) == 2
    assert all(x.addressable_shards[0].data.size == V * D // 8 for x in moments)


def test_parameter_groups_leave_frozen_leaves_alone():
    trainable, _ = rl.partition.split(_params(), "head")
    state, _, _ = _run(
        steps=1,
        trainable="head",
        optimizer=optax.multi_transform(
            {"plain": optax.adam(3e-3)}, rl.partition.labels(trainable, {"head": "plain"})
        ),
    )
    assert state.params["embed"] is None
    assert (state.params["head"] != _params()["head"]).any()


def test_schedules_count_the_updates_that_were_made():
    schedule = optax.linear_schedule(0.0, 1.0, transition_steps=4)
    optimizer = optax.sgd(schedule)
    state = rl.init_train_state(_params(), optimizer)
    step = rl.make_train_step(rl.policy.from_apply(_apply), _loss, optimizer)
    bad = _batch(advantages=jnp.full(B, jnp.nan))
    norms = []
    for batch in (_batch(), _batch(), bad, _batch()):
        state, metrics = step(state, batch)
        found = rl.metrics.compute(metrics)
        norms.append(float(found["optim/update_norm"] / min(1.0, found["optim/grad_norm"])))
    # The rate of updates 0, 1 and 2: the dropped one has not been counted.
    assert norms[0] == 0
    assert norms[1] == pytest.approx(0.25, rel=1e-4)
    assert norms[2] == 0
    assert norms[3] == pytest.approx(0.5, rel=1e-4)

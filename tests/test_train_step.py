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
    return rl.Batch(**{k: jnp.asarray(v) for k, v in (fields | changes).items()})


def _loss(output, batch):
    """A plain policy gradient with the global denominator."""
    per_token = -batch.advantages[:, None] * output.log_probs / batch.denominator[:, None]
    loss = jnp.sum(jnp.where(batch.mask, per_token, 0.0))
    return loss, {"policy/entropy": rl.metrics.mean(output.entropy, batch.mask)}


def _optimizer():
    return optax.adamw(1e-2, weight_decay=0.01)


def _run(steps=3, layout=None, trainable=None, **options):
    params, optimizer, batch = _params(), _optimizer(), _batch()
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

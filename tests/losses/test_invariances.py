"""What must not change a loss: padding, poison under the mask, packing, order, splits, devices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlhf_jax as rl
from tests.losses.common import (
    ALL,
    KINDS,
    LOSSES,
    MODES,
    QUICK,
    batch,
    evaluate,
    everything,
    reduction,
    run,
    same,
    tokens,
)

seeds = st.integers(0, 2**31 - 1)
PER_TOKEN = ("log_probs", "old_log_probs", "ref_log_probs", "sampler_log_probs", "mask")


def readings(out):
    """The same with metrics read out: padding may move a metric's weight of nothing."""
    return {
        name: (value, grad, rl.metrics.compute(found)) for name, (value, grad, found) in out.items()
    }


def poison(data, with_):
    """Garbage where the mask is false."""
    out = dict(data)
    for name in PER_TOKEN[:-1]:
        out[name] = jnp.where(data["mask"], data[name], with_)
    return out


@pytest.mark.fault(5, 9, 10)
@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 4), (2, 1)])
def test_padding_side_and_amount(left, right):
    data = batch(0)
    want = readings(run(data, "seq_mean_token_mean"))
    padded = dict(data)
    for name in PER_TOKEN:
        fill = False if name == "mask" else np.nan
        padded[name] = jnp.pad(data[name], ((0, 0), (left, right)), constant_values=fill)
    got = readings(run(padded, "seq_mean_token_mean"))
    got = {
        name: (value, grad[:, left : left + 6], found) for name, (value, grad, found) in got.items()
    }
    same(got, want)


@pytest.mark.fault(2, 6, 8)
@pytest.mark.parametrize("with_", [np.nan, np.inf, -np.inf, 1e30])
@given(seed=seeds)
def test_poison_under_the_mask(with_, seed):
    data = batch(seed)
    got = readings(run(poison(data, with_), "token_mean"))
    same(got, readings(run(data, "token_mean")))
    for _, grad, _ in got.values():
        np.testing.assert_array_equal(np.asarray(grad)[~np.asarray(data["mask"])], 0.0)


@pytest.mark.fault(6)
def test_poisoned_advantages_of_masked_rows():
    data = batch(0)  # row 0 is fully masked: a dropped reward's advantage may be NaN
    bad = {**data, "advantages": data["advantages"].at[0].set(jnp.nan)}
    same(readings(run(bad, "token_mean")), readings(run(data, "token_mean")))


@pytest.mark.fault(20, 23)
@pytest.mark.parametrize("mode", MODES)
@given(seed=seeds)
def test_order_of_rows(mode, seed):
    data = batch(seed)
    order = np.random.default_rng(seed).permutation(8)
    got = readings(run({k: v[order] for k, v in data.items()}, mode, KINDS))
    got = {name: (value, grad[np.argsort(order)], m) for name, (value, grad, m) in got.items()}
    same(got, readings(run(data, mode, KINDS)))


def pack(data):
    """Rows 2i and 2i+1 side by side in one row: per-token advantages and segment ids."""
    out = {k: v.reshape(4, 12) for k, v in data.items() if k in PER_TOKEN}
    out["advantages"] = jnp.repeat(data["advantages"], 6).reshape(4, 12)
    out["group_ids"] = jnp.repeat(data["group_ids"], 6).reshape(4, 12)
    return out, jnp.tile(jnp.repeat(jnp.array([7, 3]), 6), (4, 1))


@pytest.mark.long
@pytest.mark.fault(23, 27)
@pytest.mark.parametrize("mode", MODES)
@given(seed=seeds)
def test_packing(mode, seed):
    data = batch(seed)
    want = readings(run(data, mode, KINDS))
    packed, segments = pack(data)
    # A packed row keeps no trace of an empty sequence: the constant of fixed_length is handed in.
    whole = rl.masked.denominator(data["mask"], **{**reduction(mode, data), "segment_ids": None})
    options = {"denominator": whole} if mode == "fixed_length" else {}
    got = readings(run(packed, mode, KINDS, segment_ids=segments, **options))
    got = {name: (value, grad.reshape(8, 6), m) for name, (value, grad, m) in got.items()}
    same(got, want, rtol=1e-5)


@functools.partial(jax.jit, static_argnames=("mode", "names"), compiler_options=QUICK)
def accumulate(split, whole, mode, names):
    def step(_, part):
        rows, denominator = part
        return None, everything(rows, mode, names, denominator=denominator)

    _, out = jax.lax.scan(step, None, (split, whole))
    return {
        name: (value.sum(), grad.reshape(8, 6), rl.metrics.stack_reduce(found))
        for name, (value, grad, found) in out.items()
    }


@pytest.mark.long
@pytest.mark.fault(23, 24, 26)
@pytest.mark.parametrize(
    ("mode", "parts", "names"),
    [(mode, 4, KINDS) for mode in MODES] + [("token_mean", 2, ALL), ("prompt_mean", 8, KINDS)],
)
@given(seed=seeds)
def test_micro_batches_add_up(mode, parts, names, seed):
    data = batch(seed)
    want = run(data, mode, names)
    whole = rl.masked.denominator(data["mask"], **reduction(mode, data))
    whole = jnp.broadcast_to(whole, (8,))  # travels with the rows
    split = {k: v.reshape(parts, 8 // parts, *v.shape[1:]) for k, v in data.items()}
    got = accumulate(split, whole.reshape(parts, -1), mode, names)
    same(readings(got), readings(want))


@pytest.mark.long
@pytest.mark.fault(23, 24)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_eight_devices(mode, kind):
    data = batch(5)
    want = readings(run(data, mode, KINDS))
    whole = jnp.broadcast_to(rl.masked.denominator(data["mask"], **reduction(mode, data)), (8,))
    types = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((8,), ("data",), axis_types=types)
    with jax.set_mesh(mesh):
        rows, whole = jax.device_put((data, whole), jax.NamedSharding(mesh, jax.P("data")))
        # Counting groups sorts the rows of all devices: done once, before they are sharded.
        options = {"denominator": whole} if mode == "prompt_mean" else {}
        got = readings(run(rows, mode, KINDS, **options))
    for _, grad, _ in got.values():
        assert len(grad.sharding.device_set) == 8
    same(got, want)


@pytest.mark.parametrize(("mode", "names"), [(mode, KINDS) for mode in MODES] + [(MODES[0], ALL)])
def test_nothing_is_valid(mode, names):
    data = batch(0)
    data["mask"] = jnp.zeros_like(data["mask"])
    for name, (value, grad, found) in readings(run(data, mode, names)).items():
        assert value == 0, name
        np.testing.assert_array_equal(grad, 0.0)
        assert all(np.isfinite(x) for x in found.values()), name


@given(seed=seeds)
def test_completions_of_one_token(seed):
    data = batch(seed)
    data["mask"] = jnp.zeros_like(data["mask"]).at[jnp.arange(8), jnp.arange(8) % 6].set(True)
    out = run(data, "seq_mean_token_mean", ("ppo", "gspo", "gspo_token", "rloo_clipped"))
    for name in ("gspo", "gspo_token", "rloo_clipped"):  # one token: its ratio is the sequence's
        same(out[name][:2], out["ppo"][:2])


@pytest.mark.parametrize("name", LOSSES)
def test_bfloat16_log_probs(name):
    data = batch(1)
    rounded = {k: v.astype(jnp.bfloat16) if v.dtype == jnp.float32 else v for k, v in data.items()}
    back = {k: v.astype(jnp.float32) if v.dtype == jnp.bfloat16 else v for k, v in rounded.items()}
    (value, found), grad = evaluate(LOSSES[name], rounded, aggregation="token_mean")
    (want, want_found), want_grad = evaluate(LOSSES[name], back, aggregation="token_mean")
    assert value.dtype == jnp.float32 and value == want
    assert grad.dtype == jnp.bfloat16
    same(grad.astype(jnp.float32), want_grad, rtol=2**-8)
    same(rl.metrics.compute(found), rl.metrics.compute(want_found))


@pytest.mark.long
@pytest.mark.parametrize("name", LOSSES)
def test_eager_equals_jit_and_the_twin(name):
    case, data = LOSSES[name], batch(2)
    options = {"aggregation": "seq_mean_token_sum"}
    (value, _), grad = evaluate(case, data, **options)
    jitted = jax.jit(functools.partial(evaluate, case, **options))(data)
    same((jitted[0][0], jitted[1]), (value, grad))
    per_token = tokens(case, data)
    assert per_token.shape == data["mask"].shape and per_token.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(per_token)[~np.asarray(data["mask"])], 0.0)
    same(rl.masked.aggregate(per_token, data["mask"], "seq_mean_token_sum"), value)


@pytest.mark.parametrize("name", LOSSES)
def test_float64_stays_float64(name):
    with jax.enable_x64(True):
        data = {
            k: v.astype(jnp.float64) if v.dtype == jnp.float32 else v for k, v in batch(2).items()
        }
        (value, _), grad = evaluate(LOSSES[name], data, aggregation="token_mean")
    assert value.dtype == jnp.float64 and grad.dtype == jnp.float64


@pytest.mark.fault(17, 25)
def test_a_filtered_row_leaves_numerator_and_denominator():
    # An overlong completion is filtered by its mask, after the advantages were made.
    data = batch(4)
    keep = jnp.arange(8) != 3
    filtered = {**data, "mask": data["mask"] & keep[:, None]}
    rows = {k: v[keep] for k, v in data.items()}
    for mode in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "prompt_mean"):
        got, want = readings(run(filtered, mode, KINDS)), readings(run(rows, mode, KINDS))
        got = {name: (value, grad[keep], found) for name, (value, grad, found) in got.items()}
        same(got, want)


@pytest.mark.fault(21)
def test_a_dropped_group_feeds_neither_kl_nor_denominator():
    data = batch(4)
    dropped = data["group_ids"] == 20
    zeroed = {**data, "mask": data["mask"] & ~dropped[:, None]}
    zeroed["ref_log_probs"] = jnp.where(dropped[:, None], 50.0, data["ref_log_probs"])
    rows = {k: v[~dropped] for k, v in data.items()}
    got, want = (
        run(zeroed, "token_mean", ("grpo",))["grpo"],
        run(rows, "token_mean", ("grpo",))["grpo"],
    )
    same(got[0], want[0])
    same(rl.metrics.compute(got[2]), rl.metrics.compute(want[2]))

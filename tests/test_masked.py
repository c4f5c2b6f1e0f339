"""Masked statistics, sequences and aggregations."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlhf_jax as rl
from tests import reference

MODES = rl.masked.AGGREGATIONS
LOSS = jnp.array([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]])
MASK = jnp.array([[True, True, True], [True, False, False]])


def batch(seed, rows=6, length=8):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(rows, length)).astype(np.float32)
    mask = rng.random((rows, length)) < 0.6
    mask[rng.integers(rows)] = False  # a fully masked row
    mask[rng.integers(rows)] = np.arange(length) == 3  # a one-token completion
    segments = np.cumsum(rng.random((rows, length)) < 0.3, axis=1).astype(np.int32) * 7
    groups = rng.permutation(np.repeat(np.arange(rows // 2) * 1000, 2)).astype(np.int32)
    return values, mask, segments, groups


def options(mode, groups):
    return {"fixed_length": {"length": 8}, "prompt_mean": {"group_ids": groups}}.get(mode, {})


@pytest.mark.parametrize("statistic", [rl.masked.sum, rl.masked.mean, rl.masked.var])
@pytest.mark.parametrize("axis", [None, 0, 1, (0, 1)])
def test_statistics_agree_with_numpy(statistic, axis):
    values, mask, _, _ = batch(0)
    got = statistic(values, mask, axis=axis)
    x = np.ma.array(values.astype(np.float64), mask=~mask)
    want = {"sum": x.sum, "mean": x.mean, "var": x.var}[statistic.__name__](
        axis=None if axis == (0, 1) else axis
    )
    np.testing.assert_allclose(got, np.ma.filled(want, 0.0), rtol=1e-5, atol=1e-6)


@pytest.mark.fault(6, 12)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "function",
    [
        rl.masked.sum,
        rl.masked.mean,
        rl.masked.var,
        rl.masked.whiten,
        rl.masked.deviations,
        rl.masked.sequence_sum,
        rl.masked.sequence_mean,
        *(functools.partial(rl.masked.aggregate, aggregation=m, length=3) for m in MODES[:4]),
    ],
)
def test_poison_under_the_mask_reaches_neither_value_nor_gradient(function, poison):
    x = jnp.where(MASK, LOSS, poison)

    def total(x):
        return jnp.sum(jnp.square(function(x, MASK)))

    np.testing.assert_array_equal(function(x, MASK), function(LOSS, MASK))
    gradient = jax.grad(total)(x)
    np.testing.assert_array_equal(gradient, jax.grad(total)(LOSS))
    assert not np.any(np.asarray(gradient)[~np.asarray(MASK)])


@pytest.mark.fault(3)
def test_mean_and_variance_use_the_same_mask():
    x = jnp.array([1.0, 3.0, 1000.0])
    mask = jnp.array([True, True, False])
    assert float(rl.masked.mean(x, mask)) == 2.0
    assert float(rl.masked.var(x, mask)) == 1.0
    np.testing.assert_allclose(rl.masked.whiten(x, mask, shift_mean=False), [1.0, 3.0, 0.0])


@pytest.mark.fault(15)
def test_variance_is_two_pass():
    x = jnp.array([10000.0, 10000.5, 10001.0])
    assert float(jnp.mean(x**2) - jnp.mean(x) ** 2) != pytest.approx(1 / 6, rel=0.5)
    assert float(rl.masked.var(x, jnp.ones(3, bool))) == pytest.approx(1 / 6, rel=1e-3)


@pytest.mark.fault(7)
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_one_valid_token_whitens_to_zero(ddof, eps):
    mask = jnp.array([False, True, False])
    x = jnp.array([5.0, 0.1, 7.0])
    out, gradient = jax.value_and_grad(
        lambda x: jnp.sum(rl.masked.whiten(x, mask, ddof=ddof, eps=eps))
    )(x)
    assert float(out) == 0.0
    assert np.isfinite(gradient).all()
    assert float(rl.masked.var(x, mask, ddof=ddof)) == 0.0


@pytest.mark.fault(14)
def test_equal_entries_whiten_to_exactly_zero():
    x = jnp.full((3, 7), 0.1)  # the float32 mean of these is not 0.1
    mask = jnp.ones((3, 7), bool)
    np.testing.assert_array_equal(rl.masked.whiten(x, mask), 0.0)
    np.testing.assert_array_equal(rl.masked.deviations(x, mask, axis=1), 0.0)
    assert float(rl.masked.var(x, mask)) == 0.0


def test_deviations_whose_squares_vanish_stay_finite():
    x = jnp.array([0.0, 1e-25])  # its float32 square is 0
    for eps in (0.0, 1e-8):
        assert np.abs(rl.masked.whiten(x, jnp.ones(2, bool), eps=eps)).max() < 1e-20


def test_nothing_valid_gives_zero():
    x, mask = jnp.full((2, 3), jnp.nan), jnp.zeros((2, 3), bool)
    assert float(rl.masked.sum(x, mask)) == float(rl.masked.mean(x, mask)) == 0.0
    assert float(rl.masked.var(x, mask)) == 0.0
    np.testing.assert_array_equal(rl.masked.whiten(x, mask), 0.0)
    for mode in MODES:
        extra = options(mode, jnp.array([0, 0]))
        value, gradient = jax.value_and_grad(rl.masked.aggregate)(x, mask, mode, **extra)
        assert float(value) == 0.0
        np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_half_precision_is_computed_in_float32(dtype):
    x = jnp.linspace(0.0, 1.0, 4096).astype(dtype).reshape(2, -1)
    mask = jnp.ones(x.shape, bool)
    for out in (
        rl.masked.sum(x, mask),
        rl.masked.whiten(x, mask),
        rl.masked.aggregate(x, mask, "token_mean"),
    ):
        assert out.dtype == jnp.float32
    np.testing.assert_allclose(rl.masked.mean(x, mask), x.astype(jnp.float32).mean(), rtol=1e-6)


def test_float64_is_kept():
    with jax.enable_x64(True):
        x, mask = jnp.ones((2, 3), jnp.float64), jnp.ones((2, 3), bool)
        assert rl.masked.mean(x, mask).dtype == jnp.float64
        assert rl.masked.aggregate(x, mask, "seq_mean_token_mean").dtype == jnp.float64


# ---- sequences ----


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_sequences_agree_with_loops(packed, seed):
    values, mask, segments, _ = batch(seed, length=13)
    ids = segments if packed else None
    total, mean = np.zeros_like(values), np.zeros_like(values)
    first, last = np.zeros_like(mask), np.zeros_like(mask)
    for b, where in reference.sequences(mask, ids):
        total[b, where], mean[b, where] = values[b, where].sum(), values[b, where].mean()
        first[b, where[0]] = last[b, where[-1]] = True
    np.testing.assert_allclose(
        rl.masked.sequence_sum(values, mask, ids), total, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        rl.masked.sequence_mean(values, mask, ids), mean, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(rl.masked.first_valid(mask, ids), first)
    np.testing.assert_array_equal(rl.masked.last_valid(mask, ids), last)


def test_all_tokens_of_a_packed_sequence_hold_the_same_sum():
    values = jnp.asarray(np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32))
    ids = jnp.repeat(jnp.array([[5, 2]]), 25, axis=1)
    out = rl.masked.sequence_sum(values, jnp.ones((1, 50), bool), ids)
    assert len(np.unique(np.asarray(out))) == 2


def test_padding_may_have_any_segment_id():
    mask = jnp.array([[True, False, True, True, False, True]])
    ids = jnp.array([[3, -1, 3, 8, 3, 8]])
    np.testing.assert_array_equal(
        rl.masked.last_valid(mask, ids), [[False, False, True, False, False, True]]
    )


def test_gradient_of_a_packed_sequence_mean():
    mask = jnp.array([[True, True, True, False]])
    ids = jnp.array([[0, 0, 1, 1]])
    gradient = jax.grad(lambda x: rl.masked.sequence_mean(x, mask, ids)[0, 0])(jnp.ones((1, 4)))
    np.testing.assert_allclose(gradient, [[0.5, 0.5, 0.0, 0.0]])


def test_group_sum_takes_any_ids_in_any_order():
    out = rl.masked.group_sum(jnp.array([1.0, 2.0, 4.0, 8.0]), jnp.array([-3, 10**6, -3, 0]))
    np.testing.assert_array_equal(out, [5.0, 2.0, 5.0, 8.0])


# ---- aggregation ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packed", [False, True])
@given(seed=st.integers(0, 10_000))
def test_aggregation_agrees_with_loops(mode, packed, seed):
    values, mask, segments, groups = batch(seed)
    extra = options(mode, groups)
    if packed:
        extra["segment_ids"] = segments
        if mode == "prompt_mean":
            extra["group_ids"] = segments % 3
    want = reference.aggregate(values, mask, mode, **extra)
    assert float(rl.masked.aggregate(values, mask, mode, **extra)) == pytest.approx(want, abs=2e-6)


@pytest.mark.fault(23, 24, 25)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_micro_batches_add_up(mode, parts):
    values, mask, _, groups = batch(3)
    extra = options(mode, groups)
    whole = jax.value_and_grad(lambda v: rl.masked.aggregate(v, mask, mode, **extra))
    count = rl.masked.denominator(mask, mode, **extra)
    value, gradients = 0.0, []
    for rows in np.split(np.arange(len(mask)), parts):
        part = count if count.ndim == 0 else count[rows]
        v, g = jax.value_and_grad(rl.masked.aggregate)(
            values[rows], mask[rows], mode, denominator=part
        )
        value, gradients = value + v, [*gradients, g]
    want, gradient = whole(values)
    np.testing.assert_allclose(value, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.concatenate(gradients), gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.fault(23, 24)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_eight_devices_give_what_one_gives(mode, explicit):
    values, mask, _, groups = batch(5, rows=16)
    extra = options(mode, groups)
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    rows = jax.NamedSharding(mesh, jax.P("data"))

    @jax.jit
    def step(values, mask, groups):
        ids = {"group_ids": groups} if mode == "prompt_mean" else extra
        count = rl.masked.denominator(mask, mode, **ids)
        return jax.value_and_grad(rl.masked.aggregate)(values, mask, mode, denominator=count)

    want = step(values, mask, groups)
    with jax.set_mesh(mesh):
        got = step(*jax.device_put((values, mask, groups), rows))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.fault(23)
@pytest.mark.parametrize("mode", MODES)
def test_packed_rows_give_what_rows_give(mode):
    values, mask, _, groups = batch(7)
    mask[0, 0] = mask[1, 0] = True
    keep = mask.any(axis=1)  # an empty sequence cannot be seen in a packed row
    values, mask, groups = values[keep], mask[keep], groups[keep]
    if len(mask) % 2:
        values, mask, groups = values[:-1], mask[:-1], groups[:-1]

    def pack(x):
        return x.reshape(len(x) // 2, -1)

    ids = np.repeat(np.arange(len(mask), dtype=np.int32)[:, None], mask.shape[1], axis=1)
    extra = options(mode, groups)
    packed = dict(extra)
    if "group_ids" in packed:
        packed["group_ids"] = pack(np.repeat(groups[:, None], mask.shape[1], axis=1))
    want = jax.value_and_grad(rl.masked.aggregate)(values, mask, mode, **extra)
    got = jax.value_and_grad(rl.masked.aggregate)(
        pack(values), pack(mask), mode, segment_ids=pack(ids), **packed
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    np.testing.assert_allclose(got[1], pack(np.asarray(want[1])), rtol=1e-6, atol=1e-7)


@pytest.mark.fault(9)
@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 10_000), left=st.sampled_from([0, 3]), right=st.sampled_from([0, 3]))
def test_padding_changes_nothing(mode, seed, left, right):
    values, mask, segments, groups = batch(seed)

    def pad(x, fill):
        return np.pad(x, ((0, 0), (left, right)), constant_values=fill)

    extra = options(mode, groups)
    for ids in (None, segments):
        if mode == "prompt_mean" and ids is not None:
            continue
        want = rl.masked.aggregate(values, mask, mode, segment_ids=ids, **extra)
        padded = None if ids is None else pad(ids, -1)
        got = rl.masked.aggregate(
            pad(values, np.nan), pad(mask, False), mode, segment_ids=padded, **extra
        )
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.fault(25)
def test_fully_masked_rows_leave_the_sequence_count_only():
    mask = jnp.array([[True, True], [False, False]])
    assert float(rl.masked.denominator(mask, "token_mean")) == 2.0
    assert float(rl.masked.denominator(mask, "seq_mean_token_mean")) == 1.0
    assert float(rl.masked.denominator(mask, "fixed_length", length=2)) == 4.0
    prompt = rl.masked.denominator(mask, "prompt_mean", group_ids=jnp.array([4, 9]))
    np.testing.assert_array_equal(prompt, [2.0, 0.0])


def test_any_mode_takes_one_denominator_per_row():
    for mode in MODES:
        got = rl.masked.aggregate(LOSS, MASK, mode, denominator=jnp.array([2.0, 4.0]))
        first = 2.0 if mode == "seq_mean_token_mean" else 6.0
        assert float(got) == pytest.approx(first / 2 + 4.0 / 4)


# ---- errors ----


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (TypeError, "mask.*astype", lambda: rl.masked.mean(LOSS, MASK.astype(jnp.int32))),
        (TypeError, "x must be a floating", lambda: rl.masked.mean(MASK, LOSS)),
        (ValueError, "mask must have shape", lambda: rl.masked.mean(LOSS, MASK[:1])),
        (
            ValueError,
            "aggregation is unknown.*'token_mean'",
            lambda: rl.masked.aggregate(LOSS, MASK, "mean"),
        ),
        (ValueError, "aggregation is unknown", lambda: rl.masked.denominator(MASK, "token")),
        (ValueError, "length is missing", lambda: rl.masked.aggregate(LOSS, MASK, "fixed_length")),
        (
            ValueError,
            "length must be > 0",
            lambda: rl.masked.denominator(MASK, "fixed_length", length=0),
        ),
        (
            ValueError,
            "group_ids is missing",
            lambda: rl.masked.aggregate(LOSS, MASK, "prompt_mean"),
        ),
        (ValueError, "values must be", lambda: rl.masked.aggregate(LOSS[0], MASK[0], "token_mean")),
        (
            ValueError,
            "denominator must have shape",
            lambda: rl.masked.aggregate(LOSS, MASK, "token_mean", denominator=jnp.ones(3)),
        ),
        (TypeError, "segment_ids must be an integer", lambda: rl.masked.last_valid(MASK, LOSS)),
        (ValueError, "mask must be", lambda: rl.masked.last_valid(MASK[0])),
        (ValueError, "eps must be", lambda: rl.masked.whiten(LOSS, MASK, eps=-1.0)),
        (ValueError, "ddof is unknown", lambda: rl.masked.whiten(LOSS, MASK, ddof=2)),
        (ValueError, "ddof is unknown", lambda: rl.masked.var(LOSS, MASK, ddof=-1)),
    ],
)
def test_errors_name_the_argument_and_the_remedy(error, text, call):
    with pytest.raises(error, match=text):
        call()

"""Metrics reduce over any split as the whole batch would."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlhf_jax as rl

m = rl.metrics


def all_kinds(x, y, mask):
    return {
        "mean": m.mean(x, mask),
        "sum": m.sum_(x, mask),
        "max": m.maximum(x, mask),
        "min": m.minimum(x, mask),
        "std": m.std(x, mask),
        "explained": m.explained_variance(x, y, mask),
        "ess": m.effective_share(jnp.exp(x), mask),
    }


def data(seed, rows=6, length=5):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, rows, length)).astype(np.float32)
    mask = rng.random((rows, length)) < 0.6
    mask[0] = False
    return x, y, mask


def expected(x, y, mask):
    v, w = x[mask].astype(np.float64), y[mask].astype(np.float64)
    e = np.exp(v)
    return {
        "mean": v.mean(),
        "sum": v.sum(),
        "max": v.max(),
        "min": v.min(),
        "std": v.std(),
        "explained": 1 - np.var(v - w) / np.var(v),
        "ess": e.sum() ** 2 / (len(e) * (e**2).sum()),
    }


@pytest.mark.fault(8)
@given(seed=st.integers(0, 10_000))
def test_values_are_masked(seed):
    x, y, mask = data(seed)
    poisoned = np.where(mask, x, np.nan), np.where(mask, y, np.inf)
    got = m.compute(jax.jit(all_kinds)(*poisoned, mask))
    for name, want in expected(x, y, mask).items():
        assert float(got[name]) == pytest.approx(want, rel=1e-4, abs=1e-5), name


@pytest.mark.long
@pytest.mark.fault(26, 58)
@pytest.mark.parametrize("parts", [2, 3, 6])
def test_any_split_gives_what_the_whole_gives(parts):
    x, y, mask = data(11)
    pieces = [jnp.stack(np.split(a, parts)) for a in (x, y, mask)]
    stacked = jax.vmap(all_kinds)(*pieces)
    _, scanned = jax.lax.scan(lambda carry, p: (carry, all_kinds(*p)), None, tuple(pieces))
    merged = {}
    for i in range(parts):
        merged = m.merge(merged, all_kinds(*(p[i] for p in pieces)))
    want = expected(x, y, mask)
    for metrics in (m.stack_reduce(stacked), m.stack_reduce(scanned), merged):
        got = m.compute(metrics)
        for name in want:
            assert float(got[name]) == pytest.approx(want[name], rel=1e-4, abs=1e-5), name


def test_nothing_valid_reads_zero_and_does_not_disturb_a_merge():
    x, y, mask = data(2)
    empty = all_kinds(x, y, np.zeros_like(mask))
    assert all(float(v) == 0.0 for v in m.compute(empty).values())
    got = m.compute(m.merge(all_kinds(x, y, mask), empty))
    for name, want in expected(x, y, mask).items():
        assert float(got[name]) == pytest.approx(want, rel=1e-4, abs=1e-5)


def test_std_is_not_the_difference_of_squares():
    x = jnp.array([10000.0, 10000.5, 10001.0])
    assert float(m.std(x).value()) == pytest.approx(np.sqrt(1 / 6), rel=1e-3)


@pytest.mark.fault(14, 26)
@pytest.mark.parametrize("parts", [[7], [1, 2, 3], [5, 1, 1], [2, 0, 3]])
def test_equal_returns_do_not_vary_however_they_are_split(parts):
    # The float32 mean of seven times 0.1 is not 0.1, nor is a weighted mean of such means.
    merged = {}
    for i, size in enumerate(parts):
        x = jnp.full(size, 0.1)
        part = {"std": m.std(x), "explained": m.explained_variance(x, x * i)}
        merged = m.merge(merged, part)
    assert {k: float(v) for k, v in m.compute(merged).items()} == {"std": 0.0, "explained": 0.0}


def test_no_gradient_flows_through_a_metric():
    gradient = jax.grad(lambda x: m.mean(x).value() + m.std(x).value())(jnp.array([1.0, 2.0]))
    np.testing.assert_array_equal(gradient, 0.0)


def test_merge_keeps_the_names_of_either_part():
    a = {"x": m.mean(jnp.array([1.0])), "y": m.sum_(jnp.array([1.0]))}
    out = m.merge(a, {"z": m.maximum(jnp.array([3.0]))})
    assert list(out) == ["x", "y", "z"]
    assert isinstance(out["x"], m.Metric)


def test_a_metric_is_a_pytree_with_a_static_kind():
    metric = m.mean(jnp.array([1.0]))
    leaves, _ = jax.tree.flatten(metric)
    assert len(leaves) == 2
    assert jax.jit(lambda x: x)(metric).kind == "mean"
    assert float(m.mean(3).value()) == 3.0


def test_errors():
    x = jnp.ones(2)
    with pytest.raises(TypeError, match=r"mask.*astype\(bool\)"):
        m.mean(x, jnp.ones(2, int))
    with pytest.raises(ValueError, match="mask must have shape"):
        m.mean(x, jnp.ones(3, bool))
    with pytest.raises(ValueError, match="values must have shape"):
        m.explained_variance(x, jnp.ones(3))
    with pytest.raises(ValueError, match="metric 'x' is 'mean' in one part and 'max'"):
        m.merge({"x": m.mean(x)}, {"x": m.maximum(x)})
    with pytest.raises(ValueError, match="kind is unknown"):
        m.stack_reduce({"x": m.Metric(total=x, weight=x, kind="median")})

"""Checks: each failure names the argument, what it got and what to do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl

checks = rl.checks


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (
            TypeError,
            r"rewards.*int32\[2\].*astype\(jnp.float32\)",
            lambda: checks.real("rewards", [1, 0]),
        ),
        (
            TypeError,
            r"mask.*int32\[1,2\].*mask.astype\(bool\)",
            lambda: checks.boolean("mask", [[1, 0]]),
        ),
        (
            TypeError,
            r"group_ids.*float32.*astype\(jnp.int32\)",
            lambda: checks.integer("group_ids", [0.0]),
        ),
        (TypeError, "rewards.*NaN", lambda: checks.real("rewards", [1.0, None])),
        (TypeError, "rewards must be.*dict", lambda: checks.real("rewards", {"a": 1})),
        (
            ValueError,
            r"mask must be \[B, T\].*rank 1.*order",
            lambda: checks.boolean("mask", [True], ndim=2, axes="[B, T]"),
        ),
        (
            ValueError,
            r"values must have shape \[2\] like rewards; got float32\[1\]",
            lambda: checks.real("values", [1.0], like=jnp.ones(2), like_name="rewards"),
        ),
        (
            ValueError,
            r"segment_ids must have shape",
            lambda: checks.integer("segment_ids", [1], like=jnp.ones(2)),
        ),
        (ValueError, "of rank 1 or 2", lambda: checks.rank("x", jnp.ones(()), (1, 2))),
        (
            ValueError,
            "aggregation is unknown: got 'x'. Use one of 'a', 'b'",
            lambda: checks.one_of("aggregation", "x", ("a", "b")),
        ),
        (
            ValueError,
            "clip_low must be > 0; got 0.*positive clip_low",
            lambda: checks.positive("clip_low", 0),
        ),
        (ValueError, "kl_coef must be ≥ 0; got -0.1", lambda: checks.non_negative("kl_coef", -0.1)),
        (
            ValueError,
            "gamma must be ≥ 0 and ≤ 1",
            lambda: checks.number("gamma", 1.5, at_least=0.0, at_most=1.0),
        ),
        (ValueError, "decay must be < 1", lambda: checks.number("decay", 1.0, below=1.0)),
        (ValueError, "score must be a number", lambda: checks.number("score", float("nan"))),
        (TypeError, "kl_coef must be a number; got str", lambda: checks.number("kl_coef", "0.1x")),
        (TypeError, "kl_coef must be a number; got str", lambda: checks.number("kl_coef", "0.1")),
        (
            ValueError,
            r"rewards must be finite; got nan at index \[1\], 2 such",
            lambda: checks.finite("rewards", jnp.array([0.0, np.nan, np.inf])),
        ),
    ],
)
def test_errors_name_argument_value_and_remedy(error, text, call):
    with pytest.raises(error, match=text):
        call()


def test_good_arguments_pass():
    assert checks.real("x", np.ones(2, np.float16)).dtype == jnp.float32
    assert checks.boolean("m", [True]).dtype == jnp.bool_
    assert checks.integer("i", np.ones(2, np.int8), like=jnp.ones(2)).dtype == jnp.int8
    checks.finite("x", jnp.array([1.0, jnp.nan]), where=jnp.array([True, False]))
    checks.number("clip", jnp.array([0.1, 0.2]), above=0.0, below=1.0)


@pytest.mark.fault(19)
def test_float_dtypes_are_never_narrowed_to_integers():
    assert checks.real("rewards", jnp.array([0.5], jnp.bfloat16))[0] == 0.5
    with jax.enable_x64(True):
        assert checks.real("rewards", jnp.array([0.1], jnp.float64)).dtype == jnp.float64
        assert checks.compute_dtype(jnp.ones(1, jnp.float64)) == jnp.float64
    assert checks.compute_dtype(jnp.ones(1, jnp.float16)) == jnp.float32


def test_values_are_checked_only_where_they_can_be_read():
    @jax.jit
    def f(x):
        assert not checks.is_concrete(x)
        checks.positive("x", x)
        checks.finite("x", x)
        return checks.real("x", x, ndim=1)

    assert float(f(jnp.array([-1.0]))[0]) == -1.0
    with pytest.raises(ValueError, match="x must be of rank 1"):
        f(jnp.ones((1, 1)))
    assert checks.is_concrete(0.5)


def test_describe():
    assert checks.describe(jnp.ones((2, 3))) == "float32[2,3]"
    assert checks.describe("x") == "str 'x'"
    checks.shape("x", jnp.ones(2), (2,))

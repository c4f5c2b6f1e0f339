"""Reward functions are called with what they ask for, and checked before they are believed."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl

functions = rl.rewards.functions
PROMPTS = ["a", "b", "c"]
COMPLETIONS = ["one", "two", "three"]


def call(function, **options):
    return functions.call(function, PROMPTS, COMPLETIONS, **options)


def lengths(prompts, completions):
    return [len(c) for c in completions]


@pytest.mark.parametrize(
    "values",
    [
        [3, 3.0, 5],
        (3, 3, 5),
        np.array([3, 3, 5]),
        np.array([3, 3, 5], np.float16),
        jnp.array([3.0, 3.0, 5.0], jnp.bfloat16),
        [np.float32(3), jnp.float32(3), np.int64(5)],
    ],
)
def test_numbers_of_any_kind(values):
    got = call(lambda prompts, completions: values)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, [3, 3, 5])


@pytest.mark.fault(19)
def test_booleans_and_fractions_keep_their_value():
    np.testing.assert_array_equal(call(lambda p, c: [True, False, 0.25]), [1, 0, 0.25])


@pytest.mark.fault(18, 22)
def test_none_is_marked_and_is_not_zero():
    np.testing.assert_array_equal(call(lambda p, c: [None, 0, 1]), [np.nan, 0, 1])


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    ("values", "match"),
    [
        ([1, 2], r"'broken' returned 2 rewards for 3 completions"),
        ([1, 2, float("nan")], r"'broken', row 2 \(completion 'three'\), returned nan"),
        ([1, float("inf"), 2], r"'broken', row 1 .* finite"),
        ([1, 1e300, 2], r"row 1 .* finite"),
        (["1", 2, 3], r"row 0 .*'1' \(str\); a number or None"),
        ([1, 2, [3]], r"row 2 .* \(list\)"),
        ([1, 2j, 3], r"row 1 .* \(complex\)"),
        (np.ones((3, 1)), r"shape \(3, 1\)"),
        (np.array([1, np.nan, 2]), r"row 1 .* nan"),
        ("abc", r"returned a str"),
        ({"a": 1}, r"returned a dict"),
        (None, r"returned a NoneType; a list of 3 numbers"),
        (1.0, r"returned a float"),
    ],
)
def test_what_is_no_reward_is_refused(values, match):
    def broken(prompts, completions):
        return values

    with pytest.raises(functions.RewardError, match=match):
        call(broken)


@pytest.mark.fault(22)
def test_an_exception_names_function_and_row():
    def picky(prompts, completions):
        return [{"one": 1.0, "three": 2.0}[c] for c in completions]

    message = r"'picky', row 1 \(completion 'two'\), raised KeyError: 'two'"
    with pytest.raises(functions.RewardError, match=message) as error:
        call(picky)
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.fault(22)
def test_an_exception_of_the_whole_batch_names_the_function():
    def pairs(prompts, completions):
        assert len(prompts) != 3, "three is a crowd"
        return [0.0] * len(prompts)

    with pytest.raises(functions.RewardError, match=r"^reward function 'pairs' raised Assertion"):
        call(pairs)


def test_columns_go_where_they_are_asked_for():
    columns = {"answer": ["one", "x", "three"], "level": [1, 2, 3]}

    def one(prompts, completions, answer):
        return [c == a for c, a in zip(completions, answer, strict=True)]

    def optional(prompts, completions, *, level=None, other=7):
        return [x * other for x in level]

    def everything(prompts, completions, **rest):
        return [len(rest)] * 3

    np.testing.assert_array_equal(call(one, columns=columns), [1, 0, 1])
    np.testing.assert_array_equal(call(optional, columns=columns), [7, 14, 21])
    np.testing.assert_array_equal(call(everything, columns=columns), [2, 2, 2])
    np.testing.assert_array_equal(call(lengths, columns=columns), [3, 3, 5])
    with pytest.raises(ValueError, match=r"'one' asks for the column 'answer'.*there: level"):
        call(one, columns={"level": [1, 2, 3]})


def test_rows_must_agree():
    with pytest.raises(ValueError, match="completions has 2 rows, prompts has 3"):
        functions.call(lengths, PROMPTS, COMPLETIONS[:2])
    with pytest.raises(ValueError, match="answer has 1 rows"):
        call(lengths, columns={"answer": [1]})


def test_names():
    class Judge:
        def __call__(self, prompts, completions):
            return [0.5] * len(prompts)

    assert functions.name_of(lengths) == "lengths"
    assert functions.name_of(functools.partial(lengths)) == "lengths"
    assert functions.name_of(Judge()) == "Judge"
    np.testing.assert_array_equal(call(Judge()), [0.5] * 3)
    number_match = functools.partial(rl.rewards.verifiers.number_match, tolerance=0.1)
    assert call(number_match, columns={"answer": ["1", "2", "3"]}).tolist() == [0, 0, 0]


@pytest.mark.fault(18)
def test_score_leaves_missing_rewards_out_of_sum_and_metrics():
    scores = functions.score(
        {"long": lambda p, c: [3, None, None], "kind": lambda p, c: [1, 2, None]},
        PROMPTS,
        COMPLETIONS,
        weights={"kind": 0.5},
    )
    np.testing.assert_array_equal(scores.rewards, [3.5, 1.0, np.nan])
    assert scores.rewards.dtype == np.float32
    metrics = scores.metrics()
    assert metrics["reward/long/mean"] == 3 and metrics["reward/long/std"] == 0
    assert metrics["reward/kind/mean"] == 1.5 and metrics["reward/kind/std"] == 0.5
    nothing = functions.score(lambda p, c: [None] * 3, PROMPTS, COMPLETIONS)
    assert set(nothing.metrics().values()) == {0.0}
    assert isinstance(nothing, functions.Scores)


def test_score_refuses_weights_that_fit_nothing():
    with pytest.raises(ValueError, match="names 'x'; the functions are lengths"):
        functions.score(lengths, PROMPTS, COMPLETIONS, weights={"x": 1})
    with pytest.raises(ValueError, match="must be finite"):
        functions.score(lengths, PROMPTS, COMPLETIONS, weights={"lengths": float("nan")})


def test_load_from_module_file_and_current_folder(tmp_path, monkeypatch):
    file = tmp_path / "mine_for_this_test.py"
    file.write_text(
        "def brevity(prompts, completions):\n    return [-len(c) for c in completions]\n"
    )
    assert functions.load(f"{file}:brevity")(["a"], ["xyz"]) == [-3]
    monkeypatch.chdir(tmp_path)
    assert functions.load("mine_for_this_test:brevity")(["a"], ["x"]) == [-1]
    loaded = functions.load("rlhf_jax.rewards.verifiers:exact_match")
    assert loaded is rl.rewards.verifiers.exact_match


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("nothing", "write module:function"),
        (":f", "write module:function"),
        ("no_such_module_here:f", "no module 'no_such_module_here'"),
        ("rlhf_jax.nowhere:f", "fails on import"),
        ("nowhere.py:f", "no file 'nowhere.py'"),
        ("rlhf_jax.rewards.verifiers:nope", "has no 'nope'; it has .*exact_match"),
        ("rlhf_jax.data:DEFAULT_BUCKETS", "is a tuple, no function"),
    ],
)
def test_load_says_what_is_wrong(spec, match):
    with pytest.raises(ValueError, match=match) as error:
        functions.load(spec)
    assert "\n" not in str(error.value)


def test_load_reports_a_file_that_fails(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ValueError, match="fails on import: ZeroDivisionError"):
        functions.load(f"{file}:f")


class Unreadable:
    """As a torch tensor that requires a gradient, is in bfloat16 or lies on a GPU."""

    ndim = 0

    def __array__(self, *_, **__):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.\nAnd more.")


@pytest.mark.fault(22)
@pytest.mark.parametrize("result", [Unreadable(), [1.0, Unreadable()]])
def test_what_numpy_cannot_read_is_an_error_that_says_what_to_do(result):
    with pytest.raises(functions.RewardError, match=r"requires grad.*return plain numbers"):
        functions.call(lambda prompts, completions: result, ["a", "b"], ["c", "d"])


@pytest.mark.fault(22)
def test_an_integer_beyond_every_float_is_refused():
    with pytest.raises(functions.RewardError, match=r"row 1 .*must be finite") as caught:
        functions.call(lambda prompts, completions: [1, 10**400], ["a", "b"], ["c", "d"])
    assert len(str(caught.value)) < 200

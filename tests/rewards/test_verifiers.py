"""Verifiers: what counts as right."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlhf_jax as rl

v = rl.rewards.verifiers


def rate(function, completions, answer, **options):
    return function([""] * len(completions), completions, answer, **options)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("x = 1,234.50.", Decimal("1234.50")),
        ("1,2,3", 3),
        ("-7", -7),
        ("from 3 to .5", Decimal(".5")),
        ("v1.2.3", Decimal("0.3")),
        ("1234567", 1234567),
        ("none at all", None),
        ("", None),
        ("...", None),
    ],
)
def test_extract_number(text, wanted):
    assert v.extract_number(text) == wanted


@given(st.integers(-(10**12), 10**12))
def test_numbers_are_read_back(n):
    assert v.extract_number(f"so it is {n}.") == n
    assert v.extract_number(f"so it is {n:,}.") == n
    assert v.extract_integer(f"{n} of them") == n


@given(st.text())
def test_no_text_breaks_a_verifier(text):
    for function in (v.exact_match, v.integer_match, v.number_match, v.boxed_match):
        assert rate(function, [text], ["7"])[0] in (0.0, 1.0)
    v.extract_tag(text)
    v.first_line(text)


@pytest.mark.parametrize("function", [v.exact_match, v.integer_match, v.number_match])
def test_none_leaves_a_row_unjudged(function):
    assert rate(function, ["7", "7"], [None, "7"]) == [None, 1.0]


def test_exact_match():
    assert rate(v.exact_match, ["ab ", "a b", "AB"], ["ab", "ab", "ab"]) == [1, 0, 0]


def test_integer_match_reads_the_head_of_the_first_line():
    texts = ["57", " 57\n99", "57+1=", "+57", "057", "570", "5 7", "is 57", "", "\n57"]
    assert rate(v.integer_match, texts, ["57"] * 10) == [1, 1, 1, 1, 1, 0, 0, 0, 0, 1]
    assert rate(v.integer_match, ["-3"], [-3]) == [1]


def test_number_match_takes_the_last_number_and_a_tolerance():
    assert rate(v.number_match, ["2 or 3", "3 or 2"], ["3", "3"]) == [1, 0]
    assert rate(v.number_match, ["3.14"], ["3.14159"], tolerance=1e-3) == [1]
    assert rate(v.number_match, ["0.10"], [0.1]) == [1]
    with pytest.raises(ValueError, match="holds no number"):
        rate(v.number_match, ["3"], ["three"])


def test_boxed_match_balances_braces():
    texts = [r"\boxed{1} then \boxed{\frac{1}{2}}", r"\boxed{\frac{1}{2}", "1/2"]
    assert rate(v.boxed_match, texts, [r"\frac{1} {2}"] * 3) == [1, 0, 0]
    assert v.extract_boxed("none") is None


def test_extract_tag_takes_the_last_whole_one():
    assert v.extract_tag("<a>1</a><a>2</a><a>3", "a") == "2"
    assert v.extract_tag("<answer>\n4\n</answer>") == "4"
    assert v.extract_tag("4") is None


def test_first_line():
    assert v.first_line("\n \n one \n two") == "one"
    assert v.first_line(" \n") == ""


def test_pattern_match_wants_the_whole_text():
    reward = v.pattern_match(r"\d+")
    assert reward(["", "", ""], ["12 ", "12a", ""]) == [1, 0, 0]


def test_very_long_digits_hold_no_answer():
    assert v.extract_integer("9" * 5000) is None
    assert rate(v.integer_match, ["9" * 5000], ["9"]) == [0]

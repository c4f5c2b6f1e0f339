"""Rewards that check an answer: 1 if it is right, 0 if not, no model involved.

Each is a reward function by itself (see :mod:`rlhf_jax.rewards.functions`) over an ``answer``
column, built on an extractor that is public too, so that a check of one's own is a line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation

__all__ = [
    "boxed_match",
    "exact_match",
    "extract_boxed",
    "extract_integer",
    "extract_number",
    "extract_tag",
    "first_line",
    "integer_match",
    "number_match",
    "pattern_match",
]

_INTEGER = re.compile(r"[-+]?\d+")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)\.\d+|(?<!\d)\.\d+)?")


def first_line(text: str) -> str:
    """Return the first line that is not blank, stripped; "" if there is none.

    Example:
      >>> first_line("\\n 42 \\nand so on")
      '42'
    """
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def extract_integer(text: str) -> int | None:
    """Return the first integer of a text, or None.

    Example:
      >>> extract_integer("is 57, not 58"), extract_integer("none")
      (57, None)
    """
    found = _INTEGER.search(text)
    # Python refuses to read integers of thousands of digits; such a text holds no answer.
    return int(found.group()) if found and len(found.group()) <= 1000 else None


def extract_number(text: str) -> Decimal | None:
    """Return the last number of a text (an answer follows its reasoning), or None.

    Thousands separators are read as such.

    Example:
      >>> extract_number("2 of 3 makes 1,234.50.")
      Decimal('1234.50')
    """
    found = [m.group() for m in _NUMBER.finditer(text) if re.search(r"\d", m.group())]
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None


def extract_boxed(text: str) -> str | None:
    r"""Return what the last ``\boxed{…}`` holds, with its braces balanced, or None.

    Example:
      >>> extract_boxed(r"so \boxed{\frac{1}{2}}.")
      '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin + 1 : i].strip()
    return None


def extract_tag(text: str, tag: str = "answer") -> str | None:
    """Return what the last ``<tag>…</tag>`` holds, stripped, or None.

    Example:
      >>> extract_tag("<answer>4</answer> no, <answer> 5 </answer>")
      '5'
    """
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return found[-1].strip() if found else None


def _rate(
    completions: Sequence[str], answers: Sequence[object], right: Callable[[str, object], bool]
) -> list[float | None]:
    return [
        None if answer is None else float(right(completion, answer))
        for completion, answer in zip(completions, answers, strict=True)
    ]


def exact_match(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str | None]
) -> list[float | None]:
    """1 if the completion is the answer, blanks at both ends aside.

    Args:
      prompts: B texts, not looked at.
      completions: B texts.
      answer: B texts; None leaves a row unjudged.

    Returns:
      B numbers.

    Example:
      >>> exact_match(["", ""], [" abc\\n", "abcd"], ["abc", "abc"])
      [1.0, 0.0]
    """
    return _rate(completions, answer, lambda text, wanted: text.strip() == str(wanted).strip())


def integer_match(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[object]
) -> list[float | None]:
    """1 if the first line that is not blank begins with the right integer.

    Args:
      prompts: B texts, not looked at.
      completions: B texts.
      answer: B integers, or texts of them; None leaves a row unjudged.

    Returns:
      B numbers.

    Example:
      >>> integer_match([""] * 3, [" 57\\n12+", "570", "it is 57"], ["57", 57, 57])
      [1.0, 0.0, 0.0]
    """

    def right(text: str, wanted: object) -> bool:
        found = _INTEGER.match(first_line(text))
        return found is not None and extract_integer(found.group()) == int(str(wanted))

    return _rate(completions, answer, right)


def number_match(
    prompts: Sequence[str],
    completions: Sequence[str],
    answer: Sequence[object],
    *,
    tolerance: float = 0.0,
) -> list[float | None]:
    """1 if the last number of the completion equals the answer up to a tolerance.

    Args:
      prompts: B texts, not looked at.
      completions: B texts.
      answer: B numbers, or texts that end in one; None leaves a row unjudged.
      tolerance: largest relative difference.

    Returns:
      B numbers.

    Raises:
      ValueError: an answer holds no number.

    Example:
      >>> number_match([""] * 2, ["3 · 4 = 12.0", "thirteen"], ["12", "13"])
      [1.0, 0.0]
    """

    def right(text: str, wanted: object) -> bool:
        target = extract_number(str(wanted))
        if target is None:
            raise ValueError(f"answer {wanted!r} holds no number")
        found = extract_number(text)
        if found is None:
            return False
        return found == target or (
            tolerance > 0 and math.isclose(float(found), float(target), rel_tol=tolerance)
        )

    return _rate(completions, answer, right)


def boxed_match(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str | None]
) -> list[float | None]:
    r"""1 if the last ``\boxed{…}`` holds the answer, blanks aside.

    Args:
      prompts: B texts, not looked at.
      completions: B texts.
      answer: B texts; None leaves a row unjudged.

    Returns:
      B numbers.

    Example:
      >>> boxed_match([""] * 2, [r"\boxed{ 7 }", "7"], ["7", "7"])
      [1.0, 0.0]
    """

    def right(text: str, wanted: object) -> bool:
        found = extract_boxed(text)
        return found is not None and "".join(found.split()) == "".join(str(wanted).split())

    return _rate(completions, answer, right)


def pattern_match(pattern: str, *, flags: int = re.DOTALL) -> Callable[..., list[float]]:
    """Make a reward that is 1 where the whole completion (blanks aside) has a form.

    Args:
      pattern: a regular expression.
      flags: flags of :mod:`re`.

    Returns:
      A reward function.

    Example:
      >>> form = pattern_match(r"<think>.*</think>\\s*<answer>.*</answer>")
      >>> form([""] * 2, ["<think>a</think> <answer>b</answer>", "b"])
      [1.0, 0.0]
    """
    compiled = re.compile(pattern, flags)

    def pattern_reward(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        return [float(compiled.fullmatch(text.strip()) is not None) for text in completions]

    return pattern_reward

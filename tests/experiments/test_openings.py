"""experiments/data/openings.txt keeps what its README says."""

from __future__ import annotations

from collections import Counter

import tasks

import rlhf_jax as rl

OPENINGS = [r["prompt"] for r in rl.data.read_prompts(tasks.HERE / "data" / "openings.txt").rows]


def test_neutral_by_themselves():
    scored = dict(zip(OPENINGS, tasks.sentiment(OPENINGS, [""] * len(OPENINGS)), strict=True))
    assert {text: score for text, score in scored.items() if score} == {}


def test_form():
    assert len(OPENINGS) == 320 == len({text.lower() for text in OPENINGS})
    for text in OPENINGS:
        assert 5 <= len(text.split()) <= 12, text
        assert text == text.strip() and text[-1] not in ".!?;:", text


def test_no_negation_and_no_one_pattern():
    words = {word.strip(",.'").lower() for text in OPENINGS for word in text.split()}
    assert not words & {"no", "not", "never", "nothing", "without", "hardly", "cannot", "but"}
    endings = Counter(tuple(text.split()[-2:]) for text in OPENINGS)
    assert endings.most_common(1)[0][1] <= len(OPENINGS) // 8
    beginnings = Counter(tuple(text.split()[:3]) for text in OPENINGS)
    assert beginnings.most_common(1)[0][1] <= 4

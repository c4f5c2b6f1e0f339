"""A reward with partial credit, so that even an untrained model has something to learn from."""

import os
import signal

calls = 0


def positions(prompts, completions, answer):
    """The share of positions that are right."""
    return [
        sum(c == a for c, a in zip(text, wanted, strict=False)) / len(wanted)
        for text, wanted in zip(completions, answer, strict=True)
    ]


def interrupted(prompts, completions, answer):
    """The same, and the signal ``RLHF_TEST_SIGNAL`` at call number ``RLHF_TEST_AT``."""
    global calls
    calls += 1
    if calls == int(os.environ["RLHF_TEST_AT"]):
        os.kill(os.getpid(), getattr(signal, os.environ["RLHF_TEST_SIGNAL"]))
    return positions(prompts, completions, answer)

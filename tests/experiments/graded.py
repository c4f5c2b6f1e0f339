"""A reward with partial credit, so that even an untrained model has something to learn from."""

import os
import pathlib
import signal

import jax

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


def weighed(prompts, completions, answer):
    """The same; writes how many arrays jax holds into the file ``RLHF_TEST_LIVE``."""
    with pathlib.Path(os.environ["RLHF_TEST_LIVE"]).open("a") as file:
        print(len(jax.live_arrays()), file=file)
    return positions(prompts, completions, answer)

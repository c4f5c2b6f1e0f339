"""Continuous batching against batch by batch, on requests whose lengths are log-normal.

Every request is forced to its length: no stop ids, a cap of its own. A static batch waits for its
longest row; the engine fills a slot again as soon as its row has ended.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

import rlhf_jax as rl
from experiments.bench import timing
from experiments.bench.tables import Table
from experiments.bench.timing import Clocks
from rlhf_jax.sampling.engine import Engine

MEAN, LONGEST, SIGMA = 128, 1024, 1.0
PROMPT = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """Tokens and time of one way to serve requests; `busy` is the share of slot-steps used."""

    name: str
    requests: int
    tokens: int
    spent: Clocks
    busy: float
    busy_while_waiting: float | None = None

    @property
    def rate(self) -> Clocks:
        """Tokens a second."""
        return Clocks(wall=self.tokens / self.spent.wall, cpu=self.tokens / self.spent.cpu)


def lengths(count: int, seed: int = 0) -> np.ndarray:
    """Log-normal lengths in [1, 1024] whose mean is 128 after the cut."""
    normal = np.random.default_rng(seed).standard_normal(count)
    low, high = 0.0, np.log(LONGEST)
    for _ in range(50):  # the cut takes from the mean, so the scale is found by halving
        middle = (low + high) / 2
        drawn = np.clip(np.exp(middle + SIGMA * normal), 1, LONGEST)
        low, high = (middle, high) if drawn.mean() < MEAN else (low, middle)
    return np.clip(np.round(np.exp(low + SIGMA * normal)), 1, LONGEST).astype(np.int32)


def prompts(count: int, vocab: int) -> np.ndarray:
    """Random prompts of one length."""
    return np.random.default_rng(1).integers(3, vocab, (count, PROMPT)).astype(np.int32)


def batch_by_batch(
    model: Any, params: Any, tokens: np.ndarray, sizes: np.ndarray, slots: int
) -> Served:
    """``rl.generate`` on one batch of `slots` rows after the other."""

    def batch(start: int) -> rl.Rollout:
        part = slice(start, start + slots)
        return rl.generate(
            *(model, params, tokens[part], np.ones_like(tokens[part], bool), jax.random.key(start)),
            group_size=1,
            max_new_tokens=sizes[part],
            room=LONGEST,
        )

    starts = range(0, len(sizes), slots)
    batches = [sizes[start : start + slots] for start in starts]
    jax.block_until_ready(batch(0))  # compiles
    spent = timing.timed(lambda: [jax.block_until_ready(batch(start)) for start in starts])
    return Served(
        name="batch by batch",
        requests=len(sizes),
        tokens=int(sizes.sum()),
        spent=spent,
        busy=float(sizes.sum() / sum(slots * part.max() for part in batches)),
    )


def continuously(
    model: Any, params: Any, tokens: np.ndarray, sizes: np.ndarray, slots: int
) -> Served:
    """All requests at once to an engine of `slots` slots."""
    engine = Engine(model, params, slots=slots, max_prompt_tokens=PROMPT, max_new_tokens=LONGEST)
    key = jax.random.key(0)
    for count in (2**power for power in range(slots.bit_length())):
        for row in tokens[:count]:  # compiles the prefill of this many prompts
            engine.submit(row, key=key, max_new_tokens=1)
        list(engine)
    before, at_last = engine.stats, None

    def serve() -> None:
        nonlocal at_last
        for row, size in zip(tokens, sizes.tolist(), strict=True):
            engine.submit(row, key=key, max_new_tokens=size)
        finished = 0
        while finished < len(sizes):
            finished += len(engine.step())
            if at_last is None and engine.stats.admitted - before.admitted == len(sizes):
                at_last = engine.stats  # nothing waits any more: from here on slots stay empty

    spent, after = timing.timed(serve), engine.stats
    waiting = after if at_last is None else at_last

    def busy(until: Any) -> float:
        return (until.tokens - before.tokens) / (until.slot_steps - before.slot_steps)

    return Served(
        name="continuously",
        requests=len(sizes),
        tokens=after.tokens - before.tokens,
        spent=spent,
        busy=busy(after),
        busy_while_waiting=busy(waiting),
    )


def measure(
    model: Any, params: Any, *, requests: int, slots: int = 32, static: int | None = None
) -> list[Served]:
    """Both ways; batch by batch only the first `static` requests, a quarter of all when None."""
    tokens, sizes = prompts(requests, model.config.vocab_size), lengths(requests)
    some = slots * max(1, requests // (4 * slots)) if static is None else static
    return [
        batch_by_batch(model, params, tokens[:some], sizes[:some], slots),
        continuously(model, params, tokens, sizes, slots),
    ]


def table(served: list[Served]) -> Table:
    """What was served, and how much faster than the first way."""
    first = served[0].rate
    percent = "{:.1%}".format
    return Table(
        (
            *("way", "requests", "tokens", "slots busy", "while requests wait"),
            *("tokens per CPU-second", "tokens per second", "÷ the first (CPU)"),
        ),
        [
            (
                *(one.name, one.requests, one.tokens, percent(one.busy)),
                "" if one.busy_while_waiting is None else percent(one.busy_while_waiting),
                *(f"{one.rate.cpu:.0f}", f"{one.rate.wall:.0f}"),
                f"{one.rate.cpu / first.cpu:.2f}",
            )
            for one in served
        ],
        note=f"Lengths: log-normal, σ = {SIGMA}, mean {MEAN}, at most {LONGEST}.",
    )

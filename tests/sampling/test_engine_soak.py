"""Many short requests with cancellations and new weights: nothing lost, nothing kept."""

import collections
import gc
import hashlib
import resource
import sys

import jax
import numpy as np
import pytest

from .served import EOS, VOCAB, engine, params


def soak(count, watch=lambda answered: None):
    """Serve ``count`` requests; a digest of each answer, and how often each reason was given."""
    random = np.random.default_rng(0)
    server = engine(slots=32, steps_per_round=8)
    answers, reasons, version = {}, collections.Counter(), 0
    while server.stats.submitted < count or server.pending:
        while server.stats.submitted < count and server.pending < 64:
            number = server.submit(
                random.integers(0, VOCAB, random.integers(1, 17)),
                key=jax.random.key(0),
                group_size=int(random.integers(1, 4)),
                max_new_tokens=int(random.integers(1, 17)),
                temperature=float(random.choice([0.0, 1.0])),
                stop_ids=[EOS, 3],
            )
            if random.random() < 0.1:
                server.cancel(int(random.integers(max(number - 60, 0), number + 1)))
        if random.random() < 0.1:
            version += 1
            server.update(params(version % 2), version)
        for group in server.step():
            assert group.request not in answers
            rows = [(row.reason, row.tokens.tolist(), row.versions.tolist()) for row in group.rows]
            answers[group.request] = hashlib.sha1(repr(rows).encode()).hexdigest()
            reasons.update(row.reason for row in group.rows)
            watch(len(answers))
    assert sorted(answers) == list(range(count))
    assert server.stats.finished == count and server._pool.free == 32
    return answers, reasons


@pytest.mark.long
def test_the_same_keys_give_the_same_answers():
    answers, reasons = soak(200)
    assert (answers, reasons) == soak(200)
    assert set(reasons) == {"stop", "length", "cancelled"}


@pytest.mark.slow
@pytest.mark.fault(48, 55)
def test_ten_thousand_requests_leave_no_memory_behind():
    seen = []

    def watch(answered):
        if answered in (3_000, 10_000):
            gc.collect()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            kib = peak // 1024 if sys.platform == "darwin" else peak
            seen.append((kib, len(jax.live_arrays())))

    answers, _ = soak(10_000, watch)
    (early, arrays), (late, arrays_late) = seen
    assert arrays_late <= arrays + 8
    assert late - early < 16 * 1024  # KiB; the digests alone are about 1 MB
    # Requests that were answered before either run saw its end went the same way in both.
    again, _ = soak(2_000)
    assert {n: again[n] for n in range(1_500)} == {n: answers[n] for n in range(1_500)}

"""Random inputs: rows with holes, packed ids, ragged groups in any order."""

from __future__ import annotations

import numpy as np


def tokens(seed, rows=4, length=9):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, rows, length)).astype(np.float32)
    mask = rng.random((rows, length)) < 0.6
    mask[0] = False
    mask[1] = np.arange(length) == rng.integers(length)
    segments = np.cumsum(rng.random((rows, length)) < 0.3, axis=1).astype(np.int32) * 5
    return rewards, values, mask, segments


def groups(seed, prompts=3, sizes=(2, 3, 4)):
    """Ragged groups, rows interleaved, ids far from 0, 1, 2."""
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.array([70, -4, 900]), sizes).astype(np.int32)
    order = rng.permutation(len(ids))
    rewards = rng.choice([0.0, 0.3, 1.0], size=len(ids)).astype(np.float32)
    return rewards, ids[order]

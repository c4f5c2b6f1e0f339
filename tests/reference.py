"""Slow, obvious NumPy versions: loops over rows, sequences and tokens, in float64."""

from __future__ import annotations

import numpy as np


def sequences(mask, segment_ids=None):
    """Yield (row, positions of valid tokens) of every sequence, in order."""
    mask = np.asarray(mask)
    for b in range(mask.shape[0]):
        valid = np.flatnonzero(mask[b])
        if segment_ids is None:
            if len(valid):
                yield b, valid
            continue
        ids = np.asarray(segment_ids)[b][valid]
        for cut in np.split(valid, np.flatnonzero(np.diff(ids)) + 1):
            if len(cut):
                yield b, cut


def aggregate(values, mask, aggregation, *, length=None, group_ids=None, segment_ids=None):
    values, mask = np.asarray(values, np.float64), np.asarray(mask)
    parts = [values[b, t] for b, t in sequences(mask, segment_ids)]
    if not parts:
        return 0.0
    if aggregation == "token_mean":
        return np.concatenate(parts).mean()
    if aggregation == "seq_mean_token_mean":
        return np.mean([p.mean() for p in parts])
    if aggregation == "seq_mean_token_sum":
        return np.mean([p.sum() for p in parts])
    if aggregation == "fixed_length":
        rows = len(mask) if segment_ids is None else len(parts)
        return sum(p.sum() for p in parts) / (rows * length)
    ids = np.broadcast_to(
        np.asarray(group_ids)[:, None] if np.ndim(group_ids) == 1 else group_ids, mask.shape
    )
    return np.mean([values[(ids == g) & mask].mean() for g in np.unique(ids[mask])])


def gae(rewards, values, mask, *, gamma, lam, bootstrap=None, segment_ids=None):
    """GAE of the compressed sequences, put back; bootstrap is [B] or None."""
    advantages = np.zeros(np.shape(rewards))
    for b, where in sequences(mask, segment_ids):
        r, v = np.asarray(rewards, float)[b, where], np.asarray(values, float)[b, where]
        after, running = 0.0 if bootstrap is None else bootstrap[b], 0.0
        for i in reversed(range(len(where))):
            following = v[i + 1] if i + 1 < len(where) else after
            running = r[i] + gamma * following - v[i] + gamma * lam * running
            advantages[b, where[i]] = running
    returns = np.where(mask, advantages + np.where(mask, values, 0), 0)
    return advantages, returns


def monte_carlo(rewards, mask, *, gamma, segment_ids=None):
    out = np.zeros(np.shape(rewards))
    for b, where in sequences(mask, segment_ids):
        running = 0.0
        for t in where[::-1]:
            running = float(np.asarray(rewards)[b, t]) + gamma * running
            out[b, t] = running
    return out


def by_group(rewards, group_ids, function):
    """Apply function to the known rewards of each group; 0 for missing ones."""
    rewards, group_ids = np.asarray(rewards, np.float64), np.asarray(group_ids)
    out = np.zeros(len(rewards))
    for g in np.unique(group_ids):
        rows = np.flatnonzero((group_ids == g) & ~np.isnan(rewards))
        if len(rows) >= 2 and np.ptp(rewards[rows]) > 0:
            out[rows] = function(rewards[rows])
    return out


def leave_one_out(rewards, group_ids):
    def others(r):
        return [r[i] - np.delete(r, i).mean() for i in range(len(r))]

    return by_group(rewards, group_ids, others)


def group_normalized(rewards, group_ids, *, ddof, eps):
    return by_group(rewards, group_ids, lambda r: (r - r.mean()) / (r.std(ddof=ddof) + eps))


def centered(rewards, group_ids):
    return by_group(rewards, group_ids, lambda r: r - r.mean())


def max_rl(rewards, group_ids):
    return by_group(rewards, group_ids, lambda r: (r - r.mean()) / r.mean())


def vtrace(rewards, values, log_ratios, *, gamma, rho_bar, c_bar):
    """One sequence, all tokens valid."""
    n = len(rewards)
    rho = np.minimum(np.exp(log_ratios), rho_bar)
    c = np.minimum(np.exp(log_ratios), c_bar)
    v = np.append(values, 0.0)
    targets = np.zeros(n + 1)
    for t in reversed(range(n)):
        delta = rho[t] * (rewards[t] + gamma * v[t + 1] - v[t])
        targets[t] = v[t] + delta + gamma * c[t] * (targets[t + 1] - v[t + 1])
    return targets[:n], rho * (rewards + gamma * targets[1:] - v[:n])


# ---- softmax bandits: one state, a few tokens; expectations by enumeration ----


def softmax(logits):
    e = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return e / e.sum()


def kl(p, q):
    return float(np.sum(p * np.log(p / q)))


def score(p):
    """∇ log π(a) with respect to the logits, one row for each a."""
    return np.eye(len(p)) - p


def numeric_gradient(function, x, step=1e-6):
    x = np.asarray(x, np.float64)
    out = np.zeros_like(x)
    for i in range(len(x)):
        e = np.zeros_like(x)
        e[i] = step
        out[i] = (function(x + e) - function(x - e)) / (2 * step)
    return out

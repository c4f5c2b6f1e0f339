import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl


def _kept(logits, top_k, top_p):
    out = jax.jit(rl.sampling.top_k_top_p)(jnp.asarray(logits), top_k, top_p)
    return np.asarray(out) > rl.sampling.NEG_INF


@pytest.mark.parametrize("top_k", [0, 1, 5, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_filters_equal_a_plain_numpy_version(top_k, top_p):
    logits = np.random.default_rng(top_k).normal(size=(6, 40)).astype(np.float32) * 2
    expected = np.zeros(logits.shape, bool)
    for row, z in enumerate(logits):
        order = np.argsort(-z)[: top_k or 40]
        mass = np.exp(z[order] - z.max())
        before = np.cumsum(mass / mass.sum()) - mass / mass.sum()
        inside = before < top_p if top_p < 1 else np.ones(len(order), bool)
        inside[0] = True
        expected[row, order[inside]] = True
    assert (_kept(logits, top_k, top_p) == expected).all()


@pytest.mark.parity
@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.8), (10, 0.5), (1, 0.1)])
def test_filters_equal_transformers(top_k, top_p):
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    logits = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32) * 3
    scores = torch.tensor(logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    assert (_kept(logits, top_k, top_p) == np.isfinite(scores.numpy())).all()


def test_thresholds_may_differ_by_row_and_are_traced():
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1])), (3, 4))
    traces = []

    @jax.jit
    def filtered(z, k, p):
        traces.append(1)
        return rl.sampling.top_k_top_p(z, k, p)

    kept = filtered(logits, jnp.array([0, 1, 3]), jnp.array([0.6, 1.0, 1.0]))
    assert (np.asarray(kept) > rl.sampling.NEG_INF).sum(axis=1).tolist() == [2, 1, 3]
    filtered(logits, jnp.array([2, 2, 2]), jnp.array([0.1, 0.2, 1.0]))
    assert len(traces) == 1


@pytest.mark.fault(37)
def test_temperature_zero_leaves_the_logits_finite():
    assert rl.sampling.temper(jnp.array([1.0, -2.0]), 0.0).tolist() == [1.0, -2.0]
    assert rl.sampling.temper(jnp.array([1.0, -2.0], jnp.bfloat16), 0.5).dtype == jnp.float32


def test_occurring_ignores_what_the_mask_hides():
    tokens = np.array([[[1, 2, 1], [0, 3, 3]]], np.int32)
    mask = np.array([[[True, False, True], [False, True, True]]])
    found = rl.sampling.occurring(jnp.asarray(tokens), jnp.asarray(mask), 4)
    assert found.tolist() == [[[False, True, False, False], [False, False, False, True]]]


def test_penalties_change_only_what_occurred():
    logits = jnp.array([3.0, -3.0, 0.5, -0.5])
    seen = jnp.array([True, True, False, False])
    repeated = rl.sampling.repetition_penalty(logits, seen, 1.5)
    assert repeated.tolist() == [2.0, -4.5, 0.5, -0.5]
    assert rl.sampling.presence_penalty(logits, seen, 1.0).tolist() == [2.0, -4.0, 0.5, -0.5]
    assert (rl.sampling.min_p(logits, 0.0) == logits).all()


def test_round_up():
    assert [rl.sampling.round_up(n, (8, 4)) for n in (1, 4, 5, 8)] == [4, 4, 8, 8]
    assert rl.sampling.round_up(7, None) == 7
    with pytest.raises(ValueError, match="width: 9 does not fit"):
        rl.sampling.round_up(9, (4, 8), "width")

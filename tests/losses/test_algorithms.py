"""What is particular to one method, against its formula written out."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from tests.losses.common import LOSSES, batch, evaluate, same

L = rl.losses


def defaults(function):
    return {
        k: p.default
        for k, p in inspect.signature(function).parameters.items()
        if p.default is not inspect.Parameter.empty
    }


@pytest.mark.parametrize(
    ("loss", "want"),
    [
        (L.reinforce_loss, {"aggregation": "seq_mean_token_sum"}),
        (L.reinforce_pp_loss, {"aggregation": "token_mean", "kl_coef": 0.0}),
        (L.rloo_loss, {"aggregation": "seq_mean_token_sum", "clip_low": None}),
        (L.ppo_loss, {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
        (L.value_loss, {"clip": 0.2, "aggregation": "token_mean"}),
        (L.grpo_loss, {"aggregation": "seq_mean_token_mean", "kl_estimator": "k3"}),
        (L.dr_grpo_loss, {"aggregation": "fixed_length"}),
        (L.dapo_loss, {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean"}),
        (L.gspo_loss, {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq_mean_token_mean"}),
        (L.cispo_loss, {"cap": None, "aggregation": "token_mean"}),
        (L.sapo_loss, {"tau_positive": 1.0, "tau_negative": 1.05}),
        (L.topr_loss, {"ratio_max": 1.0}),
        (L.off_policy_weights, {"mode": "truncate", "level": "token", "high": 2.0}),
    ],
)
def test_defaults_are_the_papers(loss, want):
    assert want.items() <= defaults(loss).items()


@pytest.mark.parametrize("name", LOSSES)
def test_arrays_come_first_and_in_one_order(name):
    for function in (LOSSES[name].loss, LOSSES[name].per_token):
        parameters = list(inspect.signature(function).parameters.values())
        assert [p.name for p in parameters[:4]] == [
            "log_probs",
            "old_log_probs",
            "advantages",
            "mask",
        ]
        assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters[4:])


@pytest.mark.fault(27)
def test_rloo_clip_is_of_the_whole_sequence():
    new = jnp.array([[-1.0, -1.0, -9.0], [-1.0, -1.0, -1.0]])
    old = jnp.array([[-1.1, -1.1, -5.0], [-1.2, -0.9, -1.3]])
    mask = jnp.array([[True, True, False], [True, True, True]])
    a = jnp.array([1.0, -2.0])
    loss, found = L.rloo_loss(new, old, a, mask, clip_low=0.2, clip_high=0.1)
    r = np.exp([0.2, 0.4])
    want = [-min(r[0], 1.1), 2.0 * r[1]]  # the first is clipped, the second (A < 0) never above
    np.testing.assert_allclose(loss, np.mean(want), rtol=1e-6)
    values = rl.metrics.compute(found)
    np.testing.assert_allclose(values["policy/ratio_mean"], r.mean(), rtol=1e-6)
    assert values["policy/clip_high"] == 0.5 and values["policy/clip_low"] == 0.0
    assert values["policy/outside_clip"] == 1.0


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    ratios = np.array([[0.5, 1.2, 3.0], [0.5, 1.2, 3.0]])
    x, zero = jnp.log(jnp.asarray(ratios)), jnp.zeros((2, 3))
    mask = jnp.array([[True, True, True], [True, True, False]])
    per_token = L.gmpo_per_token(x, zero, jnp.array([2.0, -1.0]), mask)
    up = np.minimum(ratios[0], np.exp(0.4)).prod() ** (1 / 3)
    down = np.maximum(ratios[1, :2], np.exp(-0.4)).prod() ** (1 / 2)
    np.testing.assert_allclose(per_token[0], -2.0 * up, rtol=1e-6)
    np.testing.assert_allclose(per_token[1], [down, down, 0.0], rtol=1e-6)


def test_topr_tapers_bad_samples_only():
    x = jnp.full((3, 2), -1.0)
    old = jnp.array([[-3.0, -3.0], [-0.5, -0.5], [-3.0, -3.0]])
    a, mask = jnp.array([1.0, -1.0, -1.0]), jnp.ones((3, 2), bool)
    grad = jax.grad(lambda x: L.topr_per_token(x, old, a, mask).sum())(x)
    # A ≥ 0: weight 1 whatever the ratio; A < 0: min(ratio of the sequence, 1).
    np.testing.assert_allclose(grad[:, 0], [-1.0, np.exp(-1.0), 1.0], rtol=1e-6)
    np.testing.assert_allclose(grad[:, 0], grad[:, 1])


def test_cispo_caps():
    x, old = jnp.log(jnp.array([[0.1, 1.2, 3.0, 9.0]])), jnp.zeros((1, 4))
    a, mask = jnp.ones(1), jnp.ones((1, 4), bool)

    def weight(**options):
        return -jax.grad(lambda x: L.cispo_per_token(x, old, a, mask, **options).sum())(x)[0]

    np.testing.assert_allclose(weight(), [0.8, 1.2, 1.28, 1.28], rtol=1e-6)
    absolute = {"clip_low": None, "clip_high": None, "cap": 5.0}
    np.testing.assert_allclose(weight(**absolute), [0.1, 1.2, 3.0, 5.0], rtol=1e-6)
    np.testing.assert_allclose(weight(clip_high=4.0, cap=3.5), [0.8, 1.2, 3.0, 3.5], rtol=1e-6)


@pytest.mark.fault(24)
def test_dr_grpo_and_dapo_divide_once():
    data = batch(6)
    args = [data[k] for k in ("log_probs", "old_log_probs", "advantages", "mask")]
    per_token = L.dapo_per_token(*args)
    loss, _ = L.dapo_loss(*args)
    same(loss, per_token.sum() / data["mask"].sum())
    per_token = L.dr_grpo_per_token(*args)
    loss, _ = L.dr_grpo_loss(*args, length=100)
    same(loss, per_token.sum() / (8 * 100))  # all rows, the empty one too


@pytest.mark.fault(38)
def test_the_logged_kl_is_the_trained_kl():
    data = batch(6)
    (loss, found), _ = evaluate(LOSSES["grpo"], data, aggregation="token_mean", kl_coef=0.3)
    values = rl.metrics.compute(found)
    np.testing.assert_allclose(
        values["policy/loss_kl"], 0.3 * values["policy/kl_ref_k3"], rtol=1e-5
    )
    np.testing.assert_allclose(values["policy/loss_kl"] + values["policy/loss_surrogate"], loss)
    want = rl.masked.mean(rl.kl.k3(data["log_probs"], data["ref_log_probs"]), data["mask"])
    np.testing.assert_allclose(values["policy/kl_ref_k3"], want, rtol=1e-5)


@pytest.mark.fault(31)
def test_the_kl_pulls_towards_the_reference():
    # Two tokens, π = (.9, .1), reference uniform: following −∇loss must lower π(0).
    logits = jnp.array([2.2, 0.0])
    ref = jnp.log(jnp.array([0.5, 0.5]))
    both = jnp.array([[0], [1]])
    p = jax.nn.softmax(logits)
    for estimator in ("k2", "k3", "k3_straight_through"):

        def loss(logits, estimator=estimator):
            x = jax.nn.log_softmax(logits)[both]
            return L.grpo_loss(
                x,
                x,
                jnp.zeros(2),
                jnp.ones((2, 1), bool),
                ref_log_probs=ref[both],
                kl_coef=1.0,
                kl_estimator=estimator,
                weights=p * 2,  # the exact expectation over samples of π
            )[0]

        grad = jax.grad(loss)(logits)
        assert grad[0] > 0 and grad[1] < 0, estimator


@pytest.mark.parametrize("loss", [L.grpo_loss, L.reinforce_pp_loss])
def test_the_off_policy_kl_has_the_gradient_of_the_kl_after_many_steps(loss):
    # π has moved away from π_old, which sampled: exact expectation over its three actions.
    logits, old, ref = (
        jnp.array(x) for x in ([0.5, -0.4, 0.1], [0.1, 0.8, -0.3], [0.0, -0.5, 0.3])
    )
    q, ref_log_probs = jax.nn.softmax(old), jax.nn.log_softmax(ref)

    def penalty(logits, estimator):
        return loss(
            jax.nn.log_softmax(logits)[:, None],
            jax.nn.log_softmax(old)[:, None],
            jnp.zeros(3),
            jnp.ones((3, 1), bool),
            ref_log_probs=ref_log_probs[:, None],
            kl_coef=1.0,
            kl_estimator=estimator,
            weights=q * 3,
        )

    value, want = jax.value_and_grad(rl.kl.exact)(logits, ref)
    (got, found), grad = jax.value_and_grad(penalty, has_aux=True)(logits, "k3_off_policy")
    np.testing.assert_allclose(got, value, rtol=1e-5)
    np.testing.assert_allclose(found["policy/loss_kl"].value(), value, rtol=1e-5)
    np.testing.assert_allclose(grad, want, rtol=1e-4, atol=1e-6)
    for name in ("k2", "k3", "k3_straight_through"):  # blind to who sampled
        assert np.abs(jax.grad(lambda z, n=name: penalty(z, n)[0])(logits) - want).max() > 0.01


@pytest.mark.fault(3, 8, 26)
def test_value_metrics_are_of_the_global_batch():
    rng = np.random.default_rng(0)
    v, r = (jnp.asarray(rng.normal(size=(8, 5)), jnp.float32) for _ in range(2))
    r = r + jnp.arange(8.0)[:, None]  # means differ between micro-batches
    mask = jnp.asarray(rng.random((8, 5)) < 0.7)
    whole = rl.masked.denominator(mask, "token_mean")
    want, found = L.value_loss(v, None, r, mask, clip=None)
    total, merged = 0.0, {}
    for rows in (slice(0, 1), slice(1, 3), slice(3, 8)):  # of unlike sizes
        loss, part = L.value_loss(v[rows], None, r[rows], mask[rows], clip=None, denominator=whole)
        total, merged = total + loss, rl.metrics.merge(merged, part)
    np.testing.assert_allclose(total, want, rtol=1e-6)
    same(rl.metrics.compute(merged), rl.metrics.compute(found), rtol=1e-5)
    m = np.asarray(mask)
    residual, spread = np.asarray(r - v)[m].var(), np.asarray(r)[m].var()
    np.testing.assert_allclose(
        found["value/explained_variance"].value(), 1 - residual / spread, rtol=1e-5
    )


def test_entropy_bonus():
    h, mask = jnp.array([[1.0, 2.0, jnp.nan]]), jnp.array([[True, True, False]])
    loss, found = L.entropy_loss(h, mask, entropy_coef=0.1)
    np.testing.assert_allclose(loss, -0.15, rtol=1e-6)
    assert found["policy/entropy"].value() == 1.5
    grad = jax.grad(lambda h: L.entropy_loss(h, mask, entropy_coef=0.1)[0])(h)
    np.testing.assert_allclose(grad, [[-0.05, -0.05, 0.0]], rtol=1e-6)


def test_options_are_traced():
    data, traces = batch(0), []

    @jax.jit
    def run(options):
        traces.append(1)
        return evaluate(LOSSES["grpo"], data, **options)[0][0]

    for eps, beta in ((0.2, 0.1), (0.1, 0.0), (0.3, 0.5)):
        got = run({"clip_low": eps, "clip_high": eps, "kl_coef": beta})
        want = evaluate(LOSSES["grpo"], data, clip_low=eps, clip_high=eps, kl_coef=beta)[0][0]
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert len(traces) == 1


def test_a_method_of_ones_own_takes_one_function():
    def my_loss(log_probs, old_log_probs, advantages, mask, *, power=2.0, **reduce):
        ratio = jnp.exp(jnp.where(mask, log_probs - old_log_probs, 0.0))
        losses = -(jnp.minimum(ratio, 1.0) ** power) * advantages[:, None]
        loss = rl.masked.aggregate(losses, mask, "token_mean", **reduce)
        return loss, {"policy/ratio_mean": rl.metrics.mean(ratio, mask)}

    data = batch(0)
    args = [data[k] for k in ("log_probs", "old_log_probs", "advantages", "mask")]
    loss, found = jax.jit(my_loss)(*args)
    assert np.isfinite(loss) and np.isfinite(found["policy/ratio_mean"].value())

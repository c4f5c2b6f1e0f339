"""Gradients: finite differences, what is detached, and where methods must coincide."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from tests.losses.common import (
    LOSSES,
    MODES,
    QUICK,
    batch,
    evaluate,
    everything,
    reduction,
    same,
    tokens,
)

L = rl.losses
# Their value depends on log_probs through a detached weight too: exact formulas below instead.
DETACHED = {"cispo", "topr", "gspo_token", "grpo_straight_through"}


def doubled(seed):
    return {
        k: v.astype(jnp.float64) if v.dtype == jnp.float32 else v for k, v in batch(seed).items()
    }


def difference(function, x, direction, step=1e-6):
    return (function(x + step * direction) - function(x - step * direction)) / (2 * step)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - DETACHED))
def test_finite_differences(name):
    with jax.enable_x64(True):
        data = doubled(7)
        _, grad = evaluate(LOSSES[name], data, aggregation="token_mean")
        rng = np.random.default_rng(0)
        for _ in range(3):
            direction = jnp.asarray(rng.normal(size=grad.shape))

            def value(x):
                return evaluate(LOSSES[name], {**data, "log_probs": x}, aggregation="token_mean")[
                    0
                ][0]

            want = difference(value, data["log_probs"], direction)
            np.testing.assert_allclose(jnp.sum(grad * direction), want, rtol=1e-6, atol=1e-9)


def test_finite_differences_of_value_and_entropy():
    with jax.enable_x64(True):
        data = doubled(7)
        v, mask = data["log_probs"], data["mask"]
        old, returns, direction = (
            data["old_log_probs"],
            data["ref_log_probs"],
            data["sampler_log_probs"],
        )
        for loss in (
            lambda x: L.value_loss(x, old, returns, mask, clip=0.2)[0],
            lambda x: L.value_loss(x, None, returns, mask, clip=None)[0],
            lambda x: L.entropy_loss(x, mask, entropy_coef=0.3)[0],
        ):
            want = difference(loss, v, direction)
            np.testing.assert_allclose(jnp.sum(jax.grad(loss)(v) * direction), want, rtol=1e-6)


@pytest.mark.fault(29)
def test_weight_clipped_losses_have_the_gradient_of_log_pi_only():
    data = batch(7)
    ratio = jnp.exp(data["log_probs"] - data["old_log_probs"])
    a = data["advantages"][:, None]
    count = data["mask"].sum()
    _, grad = evaluate(LOSSES["cispo"], data, aggregation="token_mean")
    weight = jnp.minimum(jnp.clip(ratio, 0.8, 1.3), 5.0)
    same(grad, jnp.where(data["mask"], -weight * a / count, 0.0))
    _, grad = evaluate(LOSSES["topr"], data, aggregation="token_mean")
    total = jnp.where(data["mask"], jnp.log(ratio), 0.0).sum(1, keepdims=True)
    weight = jnp.where(a >= 0, 1.0, jnp.exp(jnp.minimum(total, 0.0)))
    same(grad, jnp.where(data["mask"], -weight * a / count, 0.0))


def test_gspo_token_equals_gspo_for_one_advantage_a_sequence():
    data = batch(7)
    got, want = (evaluate(LOSSES[name], data) for name in ("gspo_token", "gspo"))
    same(got[0][0], want[0][0])
    same(got[1], want[1])


def test_gspo_token_takes_per_token_advantages():
    data = batch(7)
    a = jnp.asarray(np.random.default_rng(0).normal(size=data["mask"].shape), jnp.float32)
    _, grad = evaluate(
        LOSSES["gspo_token"], {**data, "advantages": a}, clip_low=0.99, clip_high=9.0
    )
    s = jnp.exp(rl.masked.sequence_mean(data["log_probs"] - data["old_log_probs"], data["mask"]))
    n = data["mask"].sum(1, keepdims=True)
    want = -s * a / jnp.maximum(n, 1) / 7  # seven rows have tokens
    same(grad, jnp.where(data["mask"], want, 0.0))


def test_straight_through_has_k3s_value_and_k2s_gradient():
    data = batch(7)
    at = {"kl_coef": 0.5, "aggregation": "token_mean"}
    case = LOSSES["grpo"]
    both = evaluate(case, data, kl_estimator="k3_straight_through", **at)
    k3, k2 = (evaluate(case, data, kl_estimator=name, **at) for name in ("k3", "k2"))
    same(both[0][0], k3[0][0])
    same(both[1], k2[1])


@pytest.mark.fault(32)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("per_token_advantages", [False, True])
def test_on_policy_one_step_all_coincide(mode, per_token_advantages):
    data = batch(7)
    data["old_log_probs"] = data["sampler_log_probs"] = data["log_probs"]
    per_token = {"ppo", "grpo", "cispo", "gspo_token", "reinforce", "reinforce_pp", "dapo"}
    per_token |= {"dr_grpo", "decoupled_ppo", "sapo", "ppo_dual", "rloo", "topr"}
    if per_token_advantages:
        rng = np.random.default_rng(0)
        data["advantages"] = jnp.asarray(rng.normal(size=data["mask"].shape), jnp.float32)
    names = per_token if per_token_advantages else per_token | {"gspo", "gmpo"}
    options = reduction(mode, data)
    _, want = evaluate(LOSSES["reinforce"], data, **options)
    assert np.abs(want).sum() > 0.1
    for name in names:
        extra = (
            {"kl_coef": 0.0}
            if ("grpo" in name and name != "dr_grpo") or name == "reinforce_pp"
            else {}
        )
        (_, found), grad = evaluate(LOSSES[name], data, **options, **extra)
        # GSPO's and GMPO's sequence mean spreads a gradient evenly: the same for one A a sequence
        # and an aggregation that weighs the tokens of a sequence alike, as all here do.
        same(grad, want, what=name)
        if "policy/ratio_mean" in found:
            assert found["policy/ratio_min"].value() == found["policy/ratio_max"].value() == 1.0


def test_rloo_clipped_is_reinforce_on_policy():
    data = batch(7)
    data["old_log_probs"] = data["log_probs"]
    options = {"aggregation": "seq_mean_token_sum"}
    _, want = evaluate(LOSSES["reinforce"], data, **options)
    _, got = evaluate(LOSSES["rloo_clipped"], data, **options)
    same(got, want)


@pytest.mark.parametrize("name", LOSSES)
def test_everything_else_is_detached(name):
    case, data = LOSSES[name], batch(7)
    floats = {
        k: v
        for k, v in data.items()
        if v.dtype == jnp.float32 and (k in case.arrays or k in ("old_log_probs", "advantages"))
    }
    floats["weights"] = jnp.full(data["mask"].shape, 0.5)

    def value(floats):
        inner = {**data, **{k: v for k, v in floats.items() if k != "weights"}}
        (loss, _), _ = evaluate(
            case,
            inner,
            aggregation="token_mean",
            weights=floats["weights"],
            denominator=floats["weights"].sum(),
        )
        return loss

    for grad in jax.tree.leaves(jax.grad(value)(floats)):
        np.testing.assert_array_equal(grad, 0.0)


@pytest.mark.parametrize("name", LOSSES)
def test_weights_multiply_every_token(name):
    case, data = LOSSES[name], batch(7)
    weights = jnp.abs(data["sampler_log_probs"])
    (loss, _), _ = evaluate(case, data, aggregation="token_mean", weights=weights)
    want = rl.masked.aggregate(tokens(case, data) * weights, data["mask"], "token_mean")
    same(loss, want)
    (rows, _), _ = evaluate(case, data, aggregation="token_mean", weights=jnp.full(8, 2.0))
    (once, _), _ = evaluate(case, data, aggregation="token_mean")
    same(rows, 2.0 * once)


@pytest.mark.fault(4, 11, 12, 13)
def test_gradient_reaches_sampled_tokens_and_eos_and_nothing_else():
    # prompt prompt | a b <tool> c EOS | pad; the pad's id is the EOS's, which must not matter.
    tokens_ = jnp.array([[5, 6, 1, 2, 9, 3, 0, 0]])
    mask = jnp.array([[0, 0, 1, 1, 0, 1, 1, 0]], bool)
    logits = jax.random.normal(jax.random.key(0), (1, 8, 10))

    def losses(logits):
        x = rl.logprobs.token_log_probs(logits, tokens_)
        data = {
            "log_probs": x,
            "old_log_probs": x - 0.01,
            "ref_log_probs": x - 0.1,
            "sampler_log_probs": x,
            "advantages": jnp.ones(1),
            "mask": mask,
            "group_ids": jnp.zeros(1, jnp.int32),
        }
        out = everything(data, "token_mean", length=None)
        return {name: value for name, (value, _, _) in out.items()}

    jacobian = jax.jit(jax.jacrev(losses), compiler_options=QUICK)
    for name, grad in jacobian(logits).items():
        moved = np.abs(np.asarray(grad))[0].sum(-1) > 0
        # The logits at t score the token at t + 1.
        np.testing.assert_array_equal(moved, [0, 1, 1, 0, 1, 1, 0, 0], err_msg=name)


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("ppo", 0.8, 1.3),
        ("grpo", 0.8, 1.3),
        ("dapo", 0.8, 1.28),
        ("dr_grpo", 0.8, 1.2),
        ("reinforce_pp", 0.8, 1.2),
        ("decoupled_ppo", 0.8, 1.2),
        # A sequence of one token: its ratio is the token's.
        ("gspo", 0.8, 1.3),
        ("gspo_token", 0.8, 1.3),
        ("rloo_clipped", 0.8, 1.3),
        ("gmpo", np.exp(-0.4), np.exp(0.4)),
    ],
)
@pytest.mark.parametrize(
    ("sign", "ratio", "slope"),
    [(1, 0.5, -0.5), (1, 1.0, -1.0), (1, 1.6, 0.0), (-1, 0.5, 0.0), (-1, 1.0, 1.0), (-1, 1.6, 1.6)],
)
def test_six_regions(name, low, high, sign, ratio, slope):
    x = jnp.log(jnp.array([[ratio]]))
    zero = jnp.zeros((1, 1))
    data = {
        "log_probs": x,
        "old_log_probs": zero,
        "ref_log_probs": x,
        "sampler_log_probs": zero,
        "advantages": jnp.array([float(sign)]),
        "mask": jnp.ones((1, 1), bool),
    }
    options = {"aggregation": "token_mean"}
    (value, _), grad = evaluate(LOSSES[name], data, **options)
    np.testing.assert_allclose(grad, [[slope]], rtol=1e-6)
    kept = np.clip(ratio, low, high) if slope == 0 else ratio
    np.testing.assert_allclose(value, -sign * kept, rtol=1e-6)


def test_dual_clip_bounds_the_loss_of_bad_tokens():
    x, old = jnp.log(jnp.array([[5.0, 2.0, 5.0]])), jnp.zeros((1, 3))
    a, mask = jnp.array([[-1.0, -1.0, 1.0]]), jnp.ones((1, 3), bool)

    def losses(x):
        return L.ppo_per_token(x, old, a, mask, dual_clip=3.0)

    np.testing.assert_allclose(losses(x), [[3.0, 2.0, -1.2]], rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: losses(x).sum())(x), [[0.0, 2.0, 0.0]], rtol=1e-6)
    _, found = L.ppo_loss(x, old, a, mask, dual_clip=3.0)
    np.testing.assert_allclose(found["policy/dual_clip"].value(), 1 / 3, rtol=1e-6)


@pytest.mark.fault(35)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("gap", [300.0, -300.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_extreme_ratios_stay_finite(name, gap, sign):
    data = batch(7)
    data["log_probs"] = data["old_log_probs"] + gap
    data["sampler_log_probs"] = data["old_log_probs"] - gap
    data["advantages"] = jnp.full(8, sign)
    (value, found), grad = evaluate(LOSSES[name], data, aggregation="seq_mean_token_sum")
    assert np.isfinite(value) and np.isfinite(grad).all()
    assert all(np.isfinite(x) for x in rl.metrics.compute(found).values())

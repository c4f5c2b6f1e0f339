"""The golden cases of the losses, through the public API."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from tests.vectors import boolean, load

L = rl.losses
ONE = np.ones((1, 1), bool)


def column(x):
    """[N] → [N, 1]: each entry is a sequence of one token."""
    return x[:, None]


def loss_and_grad(numerics, loss, x, *args, **options):
    """(value, metrics), gradient by the first argument, in the mode under test."""
    run = jax.value_and_grad(functools.partial(loss, **options), has_aux=True)
    return numerics.call(run, x, *args)


@pytest.mark.fault(28)
def test_ppo_clip_regions(numerics):
    given, want = load("ppo_clip_regions")
    rows = want["rows"]
    a = numerics.array([r["A"] for r in rows])
    log_ratio = jnp.log(numerics.array([[r["ratio"]] for r in rows]))
    mask = np.ones(log_ratio.shape, bool)
    eps = {"clip_low": given["eps"], "clip_high": given["eps"]}

    def losses(x):
        return L.ppo_per_token(x, jnp.zeros_like(x), a, mask, **eps)

    numerics.equal(numerics.call(losses, log_ratio), [[-r["objective"]] for r in rows])
    grad = numerics.call(jax.grad(lambda x: losses(x).sum()), log_ratio)
    numerics.equal(grad, [[-r["d_obj_d_logp"]] for r in rows])
    # By the ratio itself: d log ρ/dρ = 1/ρ.
    ratio = jnp.exp(log_ratio)
    by_ratio = numerics.call(jax.grad(lambda r: losses(jnp.log(r)).sum()), ratio)
    numerics.equal(by_ratio, [[-r["d_obj_d_ratio"]] for r in rows])
    for i, row in enumerate(rows):
        _, found = L.ppo_loss(
            log_ratio[i : i + 1], jnp.zeros((1, 1), a.dtype), a[i : i + 1], ONE, **eps
        )
        active = found["policy/clip_low"].value() + found["policy/clip_high"].value()
        assert bool(active) == row["clipped_branch_active"]
        assert bool(found["policy/outside_clip"].value()) == row["ratio_outside_band"]


def test_ppo_clipfrac_two_definitions(numerics):
    given, want = load("ppo_clipfrac_two_definitions")
    log_ratio = jnp.log(numerics.array([given["ratio"]]))
    a, eps = numerics.array([given["A"]]), given["eps"]
    (loss, found), _ = loss_and_grad(
        numerics,
        L.ppo_loss,
        log_ratio,
        jnp.zeros_like(log_ratio),
        a,
        np.ones(a.shape, bool),
        clip_low=eps,
        clip_high=eps,
    )
    numerics.equal(loss, want["loss"])
    values = rl.metrics.compute(found)
    active = values["policy/clip_low"] + values["policy/clip_high"]
    np.testing.assert_allclose(active, want["clipfrac_active"], rtol=1e-6)
    np.testing.assert_allclose(values["policy/outside_clip"], want["clipfrac_ratio"], rtol=1e-6)


def test_value_loss_clipping(numerics):
    given, want = load("value_loss_clipping")
    v, old, returns = (numerics.array([given[k]]) for k in ("values", "old_values", "targets"))
    mask = boolean([given["mask"]])
    per_token = numerics.call(
        functools.partial(L.value_per_token, clip=given["eps"]), v, old, returns, mask
    )
    numerics.equal(per_token, np.where(mask, [want["per_token"]], 0.0))
    (loss, found), grad = loss_and_grad(
        numerics, L.value_loss, v, old, returns, mask, clip=given["eps"]
    )
    numerics.equal(loss, want["masked_mean"])
    numerics.equal(grad * mask.sum(), [want["grad_per_token"]])
    assert found["value/clip_fraction"].value() == want["clipfrac"]


def test_value_figure_numbers(numerics):
    given, want = load("value_figure_numbers")
    v, targets = numerics.array([given["values"]]), numerics.array([want["targets"]])
    (loss, found), _ = loss_and_grad(
        numerics, L.value_loss, v, v, targets, np.ones(v.shape, bool), clip=None
    )
    numerics.equal(loss, want["value_loss_half_mse"])
    np.testing.assert_allclose(found["value/return_mean"].value(), 0.73, rtol=1e-6)


# −A·log π with A = 1 and log π = −ℓ is ℓ: any per-token loss can be aggregated by a policy loss.
def aggregated(numerics, losses, mask, **options):
    x = -numerics.array(losses)
    ones = jnp.ones(x.shape[0], x.dtype)
    (loss, _), grad = loss_and_grad(
        numerics, L.reinforce_loss, x, None, ones, boolean(mask), **options
    )
    return loss, -grad


def test_aggregation_book_example(numerics):
    given, want = load("aggregation_book_example")
    run = functools.partial(aggregated, numerics, given["loss"], given["mask"])
    for mode, value, weights in (
        ("seq_mean_token_mean", "seq_mean", "token_weight_seq_mean"),
        ("token_mean", "token_mean", "token_weight_token_mean"),
        ("fixed_length", "fixed_len", "token_weight_fixed"),
        ("seq_mean_token_sum", "seq_sum_mean", None),
    ):
        options = {"length": given["L_max"]} if mode == "fixed_length" else {}
        loss, weight = run(aggregation=mode, **options)
        numerics.equal(loss, want[value])
        if weights:
            numerics.equal(weight, np.array(want[weights])[:, None] * np.array(given["mask"]))


def test_aggregation_fully_masked_row(numerics):
    given, want = load("aggregation_fully_masked_row")
    run = functools.partial(aggregated, numerics, given["loss"], given["mask"])
    numerics.equal(run(aggregation="seq_mean_token_mean")[0], want["seq_mean_over_nonempty"])
    numerics.equal(run(aggregation="token_mean")[0], want["token_mean"])
    loss, weights = run(aggregation="fixed_length", length=given["L_max"])
    numerics.equal(loss, want["fixed"])
    assert np.isfinite(np.asarray(weights)).all()


@pytest.mark.fault(23)
def test_aggregation_gradient_accumulation(numerics):
    given, want = load("aggregation_gradient_accumulation")
    whole = rl.masked.denominator(boolean(given["mask"]), "token_mean")
    parts, wrong = [], []
    for row in (slice(0, 1), slice(1, 2)):
        part = functools.partial(aggregated, numerics, given["loss"][row], given["mask"][row])
        parts.append(part(aggregation="token_mean", denominator=whole)[0])
        wrong.append(part(aggregation="token_mean")[0])
    numerics.equal(sum(parts), want["global_token_mean"])
    numerics.equal(sum(wrong) / 2, want["mean_of_micro_token_means"])


@pytest.mark.parametrize("loss", [L.gspo_loss, L.gspo_token_loss])
@pytest.mark.fault(27)
def test_gspo(numerics, loss):
    given, want = load("gspo")
    x, a = numerics.array(given["log_ratio"]), numerics.array(given["A"])
    eps = {"clip_low": given["eps"], "clip_high": given["eps"]}
    (got, found), grad = loss_and_grad(
        numerics, loss, x, jnp.zeros_like(x), a, boolean(given["mask"]), **eps
    )
    numerics.equal(got, -want["objective"])
    numerics.equal(grad, -np.array(want["grad_token_logp"]))
    np.testing.assert_allclose(
        [found["policy/ratio_min"].value(), found["policy/ratio_max"].value()],
        want["seq_ratio"],
        rtol=1e-6,
    )


@pytest.mark.fault(29)
def test_cispo(numerics):
    given, want = load("cispo")
    x, old = numerics.array(given["logp_new"]), numerics.array(given["logp_old"])
    a, mask = numerics.array(given["A"]), boolean(given["mask"])
    clip = {"clip_low": given["eps_low"], "clip_high": given["eps_high"]}
    (loss, _), grad = loss_and_grad(numerics, L.cispo_loss, x, old, a, mask, **clip)
    numerics.equal(loss, want["loss"])
    numerics.equal(grad, want["grad_loss_logp"])
    per_token = numerics.call(functools.partial(L.cispo_per_token, **clip), x, old, a, mask)
    numerics.equal(per_token / (-column(a) * x), want["weights"])


def test_sapo(numerics):
    given, want = load("sapo")
    rows = want["rows"]
    a = numerics.array([r["A"] for r in rows])
    x = jnp.log(numerics.array([[r["ratio"]] for r in rows]))
    tau = {"tau_positive": given["tau_pos"], "tau_negative": given["tau_neg"]}

    def losses(x):
        return L.sapo_per_token(x, jnp.zeros_like(x), a, np.ones(x.shape, bool), **tau)

    numerics.equal(numerics.call(losses, x), [[-r["A"] * r["gate"]] for r in rows])
    grad = numerics.call(jax.grad(lambda x: losses(x).sum()), x)
    numerics.equal(grad, [[-r["d_obj_d_logp"]] for r in rows])


@pytest.mark.fault(35)
def test_tis(numerics):
    given, want = load("tis")
    gap = numerics.array([given["logratio"]])
    mask = np.ones(gap.shape, bool)
    for mode, expected in (("truncate", "weights"), ("mask", "mis")):
        run = functools.partial(L.off_policy_weights, mode=mode, high=given["C"])
        weights, _ = numerics.call(run, gap, jnp.zeros_like(gap), mask)
        numerics.equal(weights, [want[expected]])


def test_approx_kl_logging_in_the_losses_metrics(numerics):
    given, want = load("approx_kl_logging")
    d = numerics.array([given["d"]])
    ones = jnp.ones(1, d.dtype)
    run = functools.partial(L.ppo_loss)
    _, found = numerics.call(run, d, jnp.zeros_like(d), ones, np.ones(d.shape, bool))
    np.testing.assert_allclose(
        found["policy/kl_old"].value(), want["k3_mean"], rtol=1e-5, atol=1e-8
    )


@pytest.mark.parametrize("name", ["rloo", "none", "constant_0_5", "group_mean", "grpo_std"])
def test_bandit_estimators_expected_gradient(name):
    """Exact expectation of the RLOO loss's gradient over all groups of four actions."""
    given, want = load("bandit_estimator_enumeration")
    k, rewards = given["K"], np.asarray(given["rewards"])
    logits = jnp.asarray(given["logits"], jnp.float32)
    arms = np.stack(np.meshgrid(*[np.arange(3)] * k, indexing="ij"), -1).reshape(-1, k)
    r = jnp.asarray(rewards[arms], jnp.float32)
    a = {
        "none": r,
        "constant_0_5": r - 0.5,
        "rloo": (r - r.mean(1, keepdims=True)) * k / (k - 1),
        "group_mean": r - r.mean(1, keepdims=True),
        "grpo_std": (r - r.mean(1, keepdims=True)) / (r.std(1, keepdims=True) + 1e-12),
    }[name]
    a = (
        jnp.where(r.max(1, keepdims=True) == r.min(1, keepdims=True), 0.0, a)
        if name
        in (
            "rloo",
            "group_mean",
            "grpo_std",
        )
        else a
    )

    def loss(logits, group, advantages):
        x = rl.logprobs.from_logits(jnp.broadcast_to(logits, (k, 3)), group)
        return L.rloo_loss(x[:, None], None, advantages, jnp.ones((k, 1), bool))[0]

    grads = -jax.vmap(jax.grad(loss), (None, 0, 0))(logits, jnp.asarray(arms), a)
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    probability = p[arms].prod(1)
    expected = probability @ np.asarray(grads, np.float64)
    np.testing.assert_allclose(
        expected, want["estimators"][name]["expected_grad"], rtol=2e-5, atol=2e-6
    )

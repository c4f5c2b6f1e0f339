"""Golden cases of masks, KL, advantages, rewards and schedules, through the public API.

Each runs eagerly and under jit, in float32 and float64. tests/losses/test_vectors.py holds the
cases about log-probs, losses and aggregation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from rlhf_jax import schedule
from tests import reference
from tests.vectors import CASES, boolean, load

adv = rl.advantages

HERE = {
    "per_token_reward_placement",
    "gae_masked_gamma1.0_lambda0.95",
    "gae_masked_gamma1.0_lambda1.0",
    "gae_masked_gamma1.0_lambda0.0",
    "gae_truncation_bootstrap",
    "gae_5token_simple",
    "value_figure_numbers",
    "masked_whiten",
    "whiten_shift_mean_false_hf_blog",
    "group_advantages_r1001",
    "rloo_3",
    "group_zero_std",
    "group_k1",
    "group_layout_prompt_major",
    "grpo_process_supervision",
    "kl_near",
    "k3_float32_cancellation",
    "approx_kl_logging",
    "adaptive_kl_controller",
    "dapo_soft_overlong",
    "vapo_length_adaptive_lambda",
    "bandit_estimator_enumeration",
    "kl_regularised_optimum",
    "vtrace",
    "async_makespan",
    "static_batch_waste",
}
IN_LOSSES = {
    "token_logprob_temperature_1.0",
    "value_loss_clipping",
    "ppo_clip_regions",
    "ppo_clipfrac_two_definitions",
    "aggregation_book_example",
    "aggregation_fully_masked_row",
    "aggregation_gradient_accumulation",
    "gspo",
    "cispo",
    "sapo",
    "tis",
}


def test_every_case_has_its_place():
    assert set(CASES) == HERE | IN_LOSSES
    assert not HERE & IN_LOSSES


@pytest.mark.fault(2, 10)
def test_per_token_reward_placement(numerics):
    i, want = load("per_token_reward_placement")
    arrays = [numerics.array(i[k]) for k in ("scores", "logprobs", "ref_logprobs")]
    mask, coef = boolean(i["mask"]), {"kl_coef": i["beta"]}
    shaping = rl.rewards.shaping
    numerics.equal(numerics.call(shaping.kl_in_reward, *arrays, mask, **coef), want["rewards"])
    got = numerics.call(shaping.sequence_kl_in_reward, *arrays, mask, **coef)
    numerics.equal(got, want["shaped_seq_reward"])
    k1 = numerics.call(rl.kl.k1, *arrays[1:])
    numerics.equal(rl.masked.sum(k1, mask, axis=1), want["seq_kl_k1"])


@pytest.mark.fault(1)
@pytest.mark.parametrize("name", [n for n in sorted(HERE) if n.startswith("gae_masked")])
def test_gae_masked(numerics, name):
    i, want = load(name)
    rewards, values = numerics.array(i["rewards"]), numerics.array(i["values"])
    options = {"gamma": i["gamma"], "gae_lambda": i["lam"]}
    got = numerics.call(adv.gae, rewards, values, boolean(i["mask"]), **options)
    numerics.equal(got.advantages, want["advantages"])
    numerics.equal(got.returns, want["returns"])


def test_gae_truncation_bootstrap(numerics):
    i, want = load("gae_truncation_bootstrap")
    rewards, values = numerics.array(i["rewards"]), numerics.array(i["values"])
    after = numerics.array(i["bootstrap_value"])

    def run(rewards, values, mask, after):
        options = {"truncation": "bootstrap", "bootstrap_value": after}
        return adv.gae(rewards, values, mask, gae_lambda=i["lam"], **options)

    got = numerics.call(run, rewards, values, boolean(i["mask"]), after)
    numerics.equal(got.advantages, want["advantages"])
    numerics.equal(got.returns, want["returns"])


def test_gae_5token_simple(numerics):
    i, want = load("gae_5token_simple")
    rewards, values = numerics.array([i["rewards"]]), numerics.array([i["values"]])
    mask = boolean([i["mask"]])
    for lam, key in ((0.95, "lam0_95"), (1.0, "lam1"), (0.0, "lam0")):
        got = numerics.call(adv.gae, rewards, values, mask, gae_lambda=lam)
        numerics.equal(got.advantages[0], want[f"advantages_{key}"])
        if lam == 0.95:
            numerics.equal(got.returns[0], want["returns_lam0_95"])
        if lam == 0.0:
            numerics.equal(got.advantages[0], want["deltas"])


def test_value_figure_numbers(numerics):
    i, want = load("value_figure_numbers")
    rewards, values = numerics.array([i["rewards"]]), numerics.array([i["values"]])
    mask = np.ones((1, 6), bool)
    returns = numerics.call(adv.monte_carlo_returns, rewards, mask, gamma=i["gamma"])
    numerics.equal(returns[0], want["targets"])
    for lam, key in ((1.0, "advantages"), (0.95, "advantages_lam0_95")):
        got = numerics.call(adv.gae, rewards, values, mask, gae_lambda=lam)
        numerics.equal(got.advantages[0], want[key])
    half = numerics.call(rl.masked.mean, 0.5 * (values - returns) ** 2, mask)
    numerics.equal(half, want["value_loss_half_mse"])


def test_masked_whiten(numerics):
    i, want = load("masked_whiten")
    x, mask, eps = numerics.array(i["x"]), boolean(i["mask"]), i["eps"]
    numerics.equal(numerics.call(rl.masked.mean, x, mask), want["mean"])
    for ddof, name in ((0, "pop"), (1, "bessel")):
        numerics.equal(numerics.call(rl.masked.var, x, mask, ddof=ddof), want[f"var_{name}"])
        got = numerics.call(rl.masked.whiten, x, mask, ddof=ddof, eps=eps)
        numerics.equal(got, want[f"whitened_{name}"])
    got = numerics.call(rl.masked.whiten, x, mask, shift_mean=False, eps=eps)
    numerics.equal(got, want["whitened_pop_shift_mean_false"])


def test_whiten_shift_mean_false(numerics):
    i, want = load("whiten_shift_mean_false_hf_blog")
    x = numerics.array(i["x"])
    got = numerics.call(rl.masked.whiten, x, np.ones(x.shape, bool), shift_mean=False)
    numerics.equal(got, want["out"], rtol=5e-6)


def test_group_advantages_r1001(numerics):
    i, want = load("group_advantages_r1001")
    rewards, ids = numerics.array(i["rewards"]), np.zeros(4, np.int32)
    for ddof, eps, key in (
        (0, 0.0, "grpo_pop_std_eps0"),
        (1, 0.0, "grpo_bessel_std_eps0"),
        (1, 1e-4, "grpo_bessel_std_eps1e_4"),
        (0, 1e-8, "grpo_pop_std_eps1e_8"),
    ):
        got = numerics.call(adv.group_normalized, rewards, ids, ddof=ddof, eps=eps)
        numerics.equal(got, want[key])
    numerics.equal(numerics.call(adv.centered, rewards, ids), want["dr_grpo"])
    numerics.equal(numerics.call(adv.leave_one_out, rewards, ids), want["rloo"])
    numerics.equal(numerics.call(adv.max_rl, rewards, ids), want["maxrl"])


def test_rloo_3(numerics):
    i, want = load("rloo_3")
    rewards = numerics.array(i["rewards"])
    got = numerics.call(adv.leave_one_out, rewards, np.zeros(3, np.int32))
    numerics.equal(got, want["advantage"])
    numerics.equal(rewards - got, want["baseline"])


@pytest.mark.fault(14)
def test_group_zero_std(numerics):
    i, want = load("group_zero_std")
    rewards = numerics.array(i["rewards"]).reshape(-1)
    ids, zero = np.repeat([0, 1], 4), np.reshape(want["advantages"], -1)
    for function, options in (
        (adv.leave_one_out, {}),
        (adv.centered, {}),
        (adv.max_rl, {}),
        *((adv.group_normalized, {"ddof": d, "eps": e}) for d in (0, 1) for e in (0.0, 1e-8, 1e-4)),
    ):
        np.testing.assert_array_equal(numerics.call(function, rewards, ids, **options), zero)


@pytest.mark.fault(16)
def test_group_k1(numerics):
    i, want = load("group_k1")
    rewards, ids = numerics.array(i["rewards"]), np.array([0])
    for function, options, key in (
        (adv.group_normalized, {"ddof": 0}, "grpo"),
        (adv.centered, {}, "dr_grpo"),
        (adv.leave_one_out, {}, "rloo"),
    ):
        with pytest.raises(ValueError, match="has one row"):
            function(rewards, ids, **options)
        # Traced ids cannot be refused: such a row gets 0.
        traced = jax.jit(lambda r, g, f=function, o=options: f(r, g, **o))(rewards, ids)
        np.testing.assert_array_equal(traced, [0.0] if want[key] == "error" else want[key])


@pytest.mark.fault(20)
def test_group_layout_prompt_major(numerics):
    i, want = load("group_layout_prompt_major")
    rewards, size = numerics.array(i["flat"]), i["G"]
    right = np.repeat(np.arange(len(i["flat"]) // size), size)
    numerics.equal(numerics.call(adv.leave_one_out, rewards, right), want["rloo_prompt_major"])
    wrong = np.tile(np.arange(len(i["flat"]) // size), size)
    numerics.equal(numerics.call(adv.leave_one_out, rewards, wrong), want["WRONG_k_major"])


def test_grpo_process_supervision(numerics):
    i, want = load("grpo_process_supervision")
    width = max(i["lengths"])
    rewards, ends = np.zeros((2, width)), np.zeros((2, width), bool)
    expected = np.zeros((2, width))
    for b, (values, at) in enumerate(zip(i["step_rewards"], i["step_end_index"], strict=True)):
        rewards[b, at], ends[b, at] = values, True
        expected[b, : i["lengths"][b]] = want["advantages"][b]
    mask = np.asarray(rl.masked.from_lengths(np.array(i["lengths"]), width))
    args = (numerics.array(rewards), ends, mask, np.array([0, 0]))
    numerics.equal(numerics.call(adv.process_supervision, *args, ddof=0, eps=0.0), expected)


def test_kl_near(numerics):
    i, want = load("kl_near")
    logits, ref = numerics.array(i["pi_logits"]), numerics.array(i["ref_logits"])
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(ref)
    p = np.exp(np.asarray(log_p))
    for name in ("k1", "k2", "k3"):
        values = np.asarray(numerics.call(getattr(rl.kl, name), log_p, log_q))
        numerics.equal(values, want[name])
        numerics.equal(p @ values, want[f"E_{name}"])
        numerics.equal(p @ values**2 - (p @ values) ** 2, want[f"var_{name}"])
        in_reward = (p * values) @ reference.score(p)
        numerics.equal(in_reward, want[f"grad_{name}_reward"])

        def as_loss(x, name=name):
            x = jax.nn.log_softmax(x)
            return jnp.sum(jax.lax.stop_gradient(jnp.exp(x)) * getattr(rl.kl, name)(x, log_q))

        numerics.equal(numerics.call(jax.grad(as_loss), logits), want[f"grad_{name}_loss"])
    for direction in rl.kl.DIRECTIONS:

        def exact(x, direction=direction):
            return rl.kl.exact(x, ref, direction=direction)

        value, gradient = numerics.call(jax.value_and_grad(exact), logits)
        numerics.equal(value, want[f"exact_{direction}_kl"])
        numerics.equal(gradient, want[f"grad_exact_{direction}_kl"])
    # The opposite sign is another estimator: -u is not k1, and expm1(u) - u estimates a χ².
    assert np.abs(np.asarray(rl.kl.k1(log_p, log_q)) - want["rlhf_book_code_kl1"]).max() > 0.1


def test_k3_float32_cancellation():
    i, want = load("k3_float32_cancellation")
    for run in (rl.kl.k3, jax.jit(rl.kl.k3)):
        got = float(run(jnp.float32(i["u"]), jnp.float32(0.0)))
        assert got == pytest.approx(want["true"], rel=1e-3)
        assert abs(got - want["true"]) < abs(want["naive_f32"] - want["true"]) / 100


@pytest.mark.fault(31)
def test_approx_kl_logging(numerics):
    i, want = load("approx_kl_logging")
    d = numerics.array(i["d"])
    for name in ("k1", "k2", "k3"):
        run = lambda new, old, name=name: rl.kl.old_to_new(name, new, old).mean()  # noqa: E731
        numerics.equal(numerics.call(run, d, jnp.zeros_like(d)), want[f"{name}_mean"])


def test_adaptive_kl_controller(numerics):
    i, want = load("adaptive_kl_controller")
    controller = rl.kl.AdaptiveKL(
        coef=numerics.array(i["init"]), target=i["target"], horizon=i["horizon"]
    )
    for measured, expected in zip(i["kl"], want["beta"], strict=True):
        update = lambda c, kl: c.update(kl, i["n"])  # noqa: E731
        controller = numerics.call(update, controller, numerics.array(measured))
        numerics.equal(controller.coef, expected)


def test_dapo_soft_overlong(numerics):
    i, want = load("dapo_soft_overlong")
    lengths = np.array(i["lengths"])
    options = {"max_length": 20480, "cache": 4096}
    got = numerics.call(rl.rewards.shaping.overlong_soft, lengths, **options)
    numerics.equal(got, want["penalty"])


def test_vapo_length_adaptive_lambda(numerics):
    i, want = load("vapo_length_adaptive_lambda")
    got = numerics.call(adv.length_adaptive_lambda, numerics.array(i["lengths"]))
    numerics.equal(got, want["lam"])


def test_bandit_estimator_enumeration(numerics):
    """Exact expectation and variance of the gradient estimate over all 3⁴ groups."""
    i, want = load("bandit_estimator_enumeration")
    p, size = reference.softmax(i["logits"]), i["K"]
    arms = np.stack(np.meshgrid(*[np.arange(3)] * size, indexing="ij"), -1).reshape(-1, size)
    chance = p[arms].prod(axis=1)
    rewards = numerics.array(np.array(i["rewards"])[arms].reshape(-1))
    ids = np.repeat(np.arange(len(arms)), size)
    estimators = {
        "none": rewards,
        "constant_0_5": rewards - 0.5,
        "rloo": numerics.call(adv.leave_one_out, rewards, ids),
        "group_mean": numerics.call(adv.centered, rewards, ids),
        "grpo_std": numerics.call(adv.group_normalized, rewards, ids, ddof=0, eps=0.0),
    }
    for name, advantages in estimators.items():
        per_arm = np.asarray(advantages, np.float64).reshape(-1, size)
        gradients = np.einsum("nk,nka->na", per_arm, reference.score(p)[arms]) / size
        mean = chance @ gradients
        numerics.equal(mean, want["estimators"][name]["expected_grad"])
        variance = chance @ ((gradients - mean) ** 2).sum(axis=1)
        numerics.equal(variance, want["estimators"][name]["total_variance"])
    numerics.equal(want["estimators"]["rloo"]["expected_grad"], want["true_grad"])


@pytest.mark.fault(30)
def test_kl_regularised_optimum(numerics):
    """Gradient ascent with exact expectations: where each use of the KL comes to rest."""
    i, want = load("kl_regularised_optimum")
    ref, rewards = jnp.log(numerics.array(i["ref"])), numerics.array(i["rewards"])
    ones = np.ones((3, 1), bool)

    def in_reward(x):
        shaped = rl.rewards.shaping.sequence_kl_in_reward(
            rewards, x[:, None], ref[:, None], ones, kl_coef=i["beta"]
        )
        return shaped * x

    def in_loss(name):
        return lambda x: rewards * x - i["beta"] * rl.kl.loss_term(name, x, ref)

    def fixed_point(surrogate):
        def step(_, logits):
            def objective(z):
                x = jax.nn.log_softmax(z)
                return jnp.sum(jax.lax.stop_gradient(jnp.exp(x)) * surrogate(x))

            return logits + 1.0 * jax.grad(objective)(logits)

        return jax.nn.softmax(jax.lax.fori_loop(0, 2000, step, ref))

    optimum = want["k1_reward_fixed_point"]
    numerics.equal(want["optimum"], optimum)
    for surrogate, expected in (
        (in_reward, optimum),
        (in_loss("k2"), optimum),
        (in_loss("k3_straight_through"), optimum),
        (in_loss("k3"), want["k3_loss_fixed_point"]),
    ):
        got = fixed_point(surrogate)
        numerics.equal(got, expected, rtol=1e-5 if numerics.dtype == "float32" else 1e-9)
    p = fixed_point(in_reward)
    value = jnp.sum(p * rewards) - i["beta"] * rl.kl.exact(jnp.log(p), ref)
    numerics.equal(value, want["log_partition_objective"], rtol=1e-6)


def test_vtrace(numerics):
    i, want = load("vtrace")
    rewards, values = numerics.array([i["rewards"]]), numerics.array([i["values"]])
    mask = np.ones((1, 5), bool)
    for scale, suffix in ((1.0, ""), (0.0, "_on_policy")):
        ratios = numerics.array([i["log_rhos"]]) * scale
        options = {"gamma": i["gamma"], "rho_bar": i["rho_bar"], "c_bar": i["c_bar"]}
        got = numerics.call(adv.vtrace, rewards, values, ratios, mask, **options)
        numerics.equal(got.targets[0], want[f"vs{suffix}"])
        numerics.equal(got.advantages[0], want[f"pg_adv{suffix}"])


def test_async_makespan():
    i, want = load("async_makespan")
    for k, steps in enumerate(i["N"]):
        for overlapped, key in ((False, "alternating"), (True, "asynchronous")):
            got = schedule.makespan(i["g"], i["t"], steps, overlapped=overlapped)
            assert got.duration == want[key][k]
    other = want["g3_t2_N10"]
    assert schedule.makespan(3, 2, 10, overlapped=False).duration == other["alternating"]
    overlapped = schedule.makespan(3, 2, 10, overlapped=True)
    assert overlapped == (other["asynchronous"], other["gen_util"], other["train_util"])


def test_static_batch_waste(numerics):
    i, want = load("static_batch_waste")
    numerics.equal(numerics.call(schedule.batch_waste, np.array(i["lengths"])), want["waste"])

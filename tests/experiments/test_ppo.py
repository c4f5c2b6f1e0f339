"""PPO end to end on the small model: critic, epochs, controller, early stop, resume."""

import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from tests.experiments.scripts import SMALL, records, run, same

FLAGS = [*SMALL, "--epochs", 2, "--minibatches", 2, "--kl-coef", 0.05]
FLAGS += ["--kl-target", 0.001, "--kl-horizon", 40]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Three steps; the first trains the critic only."""
    folder = tmp_path_factory.mktemp("runs") / "ppo"
    flags = [*FLAGS, "--critic-warmup", 1, "--steps", 3, "--save-every", 2]
    assert run("ppo", *flags, "--run-dir", folder) == 0
    return folder


@pytest.mark.long
def test_the_records_hold_policy_and_critic(plain):
    steps = records(plain)
    expected = {"reward/mean", "policy/entropy", "policy/kl_old", "policy/clip_high", "optim/lr"}
    expected |= {"value/loss", "value/explained_variance", "value/clip_fraction", "value/mean"}
    expected |= {"value/return_mean", "value/grad_norm", "policy/kl_coef", "optim/grad_norm"}
    assert expected <= set(steps[2])
    assert all(record["optim/updates"] == 4 for record in steps)  # 2 epochs of 2 minibatches
    assert [r["step"] for r in records(plain, "eval")] == [0, 3]
    assert (plain / "model" / "model.safetensors").exists()


@pytest.mark.long
def test_the_warm_up_trains_the_critic_alone(plain):
    first, second, third = records(plain)
    assert first["value/update_norm"] > 0.0 and "policy/ratio_max" not in first
    assert first["value/explained_variance"] == 0.0  # a head of zeros explains nothing
    assert second["policy/kl_ref_sum"] == 0.0  # the policy has not moved
    assert third["policy/kl_ref_k3"] > 0.0 and second["policy/ratio_max"] > 1.0


@pytest.mark.long
def test_the_controller_steers_towards_its_target(plain):
    """A KL below the target for two steps, then above it; each moves β by a fifth · 32/40."""
    coefs = [record["policy/kl_coef"] for record in records(plain)]
    assert coefs[0] == pytest.approx(0.05) and coefs[1] == pytest.approx(0.05 * (1 - 0.2 * 0.8))
    assert coefs[2] == pytest.approx(coefs[1] * (1 - 0.2 * 0.8))


@pytest.mark.slow
@pytest.mark.fault(53)
def test_a_resumed_run_is_the_same_run(plain, tmp_path):
    """Critic, its optimizer, controller and the order of the minibatches go on where they were."""
    flags = [*FLAGS, "--critic-warmup", 1, "--steps", 2, "--save-every", 2]
    assert run("ppo", *flags, "--run-dir", tmp_path / "run") == 0
    assert run("ppo", "--resume", tmp_path / "run", "--steps", 3) == 0
    same(records(tmp_path / "run"), records(plain))
    first, second = (
        (folder / "model" / "model.safetensors").read_bytes()
        for folder in (plain, tmp_path / "run")
    )
    assert first == second


@pytest.mark.slow
def test_a_head_alone_early_stop_and_bootstrap_on_devices(plain, tmp_path):
    """The other branches, on eight devices: a run by itself, and equal to one device."""
    flags = [*FLAGS, "--critic", "shared", "--max-kl", 1e-9, "--truncation", "bootstrap"]
    flags += ["--steps", 2]
    assert run("ppo", *flags, "--run-dir", tmp_path / "one") == 0
    assert run("ppo", *flags, "--layout", "fsdp", "--run-dir", tmp_path / "many") == 0
    one = records(tmp_path / "one")
    # The first update has ratio 1 and so KL 0; the second one's forward pass sees it.
    assert all(record["optim/updates"] == 2 for record in one)
    assert one[1]["value/mean"] != 0.0
    same(one, records(tmp_path / "many"), atol=1e-4)


def rollout(mask, truncated):
    rows, width = mask.shape
    zeros = jnp.zeros((rows, width))
    return rl.Rollout(
        tokens=jnp.zeros((rows, width), jnp.int32),
        mask=mask,
        attention_mask=jnp.ones_like(mask),
        log_probs=zeros,
        truncated_log_probs=zeros,
        lengths=mask.sum(1),
        terminated=~truncated,
        truncated=truncated,
        group_ids=jnp.arange(rows),
        version=jnp.int32(0),
        start=1,
    )


def test_the_batch_is_gae_over_kl_shaped_rewards():
    """By hand: one token row, one of two tokens, one that no function judged, one cut."""
    import common
    import ppo

    mask = jnp.array([[0, 1, 0], [0, 1, 1], [0, 1, 1], [0, 1, 1]], bool)
    truncated = jnp.array([False, False, False, True])
    old = jnp.where(mask, -1.0, 0.0)
    log_probs = common.LogProbs(old, jnp.where(mask, -1.5, 0.0))  # k1 = .5 a token
    values = jnp.array([[0, 0.5, 0], [0, 0.2, 0.4], [0, 9.0, 9.0], [0, 0.1, 0.3]])
    critic = rl.models.ValueOutput(values=values, bootstrap=jnp.array([7.0, 7.0, 7.0, 0.6]))
    rewards = jnp.array([1.0, 0.0, jnp.nan, 0.0])
    config = ppo.Config(truncation="bootstrap", gae_lambda=0.5)
    kl = rl.kl.AdaptiveKL(coef=0.2, target=0.1, horizon=100.0)
    batch, after, found = ppo.make_batch(
        rollout(mask, truncated), rewards, log_probs, critic, kl, config
    )
    beta = 0.2 * 0.5
    last = [-beta - 0.4, 0.6 - beta - 0.3]
    advantages = [1 - beta - 0.5]
    advantages += [0.4 - beta - 0.2 + 0.5 * last[0], last[0]]
    advantages += [0.3 - beta - 0.1 + 0.5 * last[1], last[1]]
    on = np.asarray(batch.mask)
    np.testing.assert_array_equal(on[2], False)  # not judged: not learned from
    white = (np.array(advantages) - np.mean(advantages)) / np.std(advantages)
    np.testing.assert_allclose(batch.advantages[on], white, rtol=1e-4)
    returns = [1 - beta, -2 * beta, -beta, 0.6 - 2 * beta, 0.6 - beta]  # Monte Carlo: λ 1
    np.testing.assert_allclose(batch.extra["returns"][on], returns, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(batch.extra["old_values"], values)
    np.testing.assert_allclose(batch.denominator, 5.0)
    explained = 1 - np.var(returns - np.asarray(values)[on]) / np.var(returns)
    np.testing.assert_allclose(found["value/explained_variance"].value(), explained, rtol=1e-4)
    # KL .5 + 1 + 1 + 1 over four rows: far above the target, so β grows by a fifth · 4/100.
    np.testing.assert_allclose(after.coef, 0.2 * (1 + 0.2 * 4 / 100), rtol=1e-6)
    cut, _, _ = ppo.make_batch(
        rollout(mask, truncated),
        rewards,
        log_probs,
        critic,
        kl,
        ppo.Config(truncation="mask"),
    )
    np.testing.assert_array_equal(cut.mask[3], False)
    np.testing.assert_allclose(cut.denominator, 3.0)

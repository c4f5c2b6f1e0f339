"""REINFORCE, RLOO and the variants end to end: a few tiny steps each, and their bad input."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from rlhf_jax.rewards.functions import Scores
from tests.experiments.scripts import GRADED, SMALL, records, run, same

EXPECTED = {"reward/mean", "policy/entropy", "policy/loss", "policy/advantage_std", "optim/lr"}
EXPECTED |= {"completion/truncated", "optim/grad_norm", "off_policy/logprob_diff_max", "time/train"}


@pytest.mark.parametrize(
    "script, flags",
    [
        pytest.param("rloo", [], marks=pytest.mark.long),
        pytest.param("reinforce", ["--baseline", "moving"], marks=pytest.mark.slow),
        pytest.param("variants", ["--method", "gspo", "--minibatches", 2], marks=pytest.mark.slow),
    ],
)
@pytest.mark.fault(53, 55)
def test_a_script_learns_something_and_resumes(script, flags, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_TEST_LIVE", str(tmp_path / "live"))
    flags = [*SMALL, "--kl-coef", 0.05, *flags]
    whole = [*flags, "--reward", f"{GRADED}:weighed"]
    assert run(script, *whole, "--steps", 4, "--run-dir", tmp_path / "whole") == 0
    steps = records(tmp_path / "whole")
    assert [r["step"] for r in steps] == [0, 1, 2, 3] and set(steps[0]) >= EXPECTED
    assert steps[0]["policy/kl_ref_sum"] == 0.0 and steps[1]["policy/kl_ref_k3"] > 0.0
    assert steps[1]["optim/update_norm"] > 0.0
    assert [r["step"] for r in records(tmp_path / "whole", "eval")] == [0, 4]
    # The start's evaluation calls the reward 32 times, then each step once.
    live = [int(line) for line in (tmp_path / "live").read_text().split()][32:36]
    assert live[1] == live[2] == live[3]
    assert run(script, *flags, "--steps", 2, "--run-dir", tmp_path / "run") == 0
    assert run(script, "--resume", tmp_path / "run", "--steps", 4) == 0
    ours = [{k: v for k, v in r.items() if "reward/" not in k} for r in records(tmp_path / "run")]
    same(ours, steps)


@pytest.mark.slow
@pytest.mark.fault(53)
def test_dapo_fills_the_batch_with_mixed_groups_and_resumes_with_its_next_prompts(tmp_path):
    flags = [*SMALL, "--method", "dapo", "--draws", 3, "--max-new-tokens", 8]
    flags += ["--overlong-cache", 1]
    assert run("variants", *flags, "--steps", 3, "--run-dir", tmp_path / "whole") == 0
    assert run("variants", *flags, "--steps", 2, "--run-dir", tmp_path / "run") == 0
    assert run("variants", "--resume", tmp_path / "run", "--steps", 3) == 0
    whole = records(tmp_path / "whole")
    same(records(tmp_path / "run"), whole)
    for record in whole:
        assert 1 <= record["reward/draws"] <= 3
        assert record["reward/draws"] == 3 or record["reward/mixed_groups"] == 1.0
        # No group without a difference is left where all are said to be mixed.
        assert record["reward/zero_std_groups"] == pytest.approx(1 - record["reward/mixed_groups"])


def test_dapo_samples_on_until_all_groups_are_mixed():
    """Which groups stay, and when it ends, with a sampler that gives what the test wants."""
    import variants

    def samples(rewards, position):
        rows = len(rewards)
        ids = jnp.repeat(jnp.arange(rows // 2), 2) + 100 * position
        rollout = type("Rollout", (), {"group_ids": ids})
        return FakeSamples(
            tuple(f"{position}.{g}" for g in range(rows // 2)), rollout, np.float32(rewards)
        )

    class FakeSamples(typing.NamedTuple):
        prompts: tuple
        rollout: typing.Any
        rewards: np.ndarray

        def pick(self, other, groups, _):
            prompts = np.array([*self.prompts, *other.prompts])[groups]
            rewards = np.concatenate([self.rewards, other.rewards]).reshape(-1, 2)[groups]
            return FakeSamples(tuple(prompts), self.rollout, rewards.reshape(-1))

    class Loop:
        run = type(
            "Run",
            (),
            {
                "config": type("Config", (), {"group_size": 2}),
                "place_rows": staticmethod(lambda x: x),
            },
        )

        def __init__(self, draws):
            self.draws, self.more = draws, {"position": jnp.int32(5)}

        def sample(self, step, *, position):
            return samples(self.draws[position - 5], position)

    flat, first, last = [1, 1, 0, 0], [1, 1, 0, 1], [1, 0, 0, 0]
    kept, found = variants.sample_mixed(Loop([first]), 0, 1)
    assert kept.prompts == ("5.0", "5.1") and found["reward/mixed_groups"] == 0.5
    loop = Loop([first, flat, last, first])
    kept, found = variants.sample_mixed(loop, 0, 4)
    assert kept.prompts == ("5.1", "7.0")  # the mixed ones, in the order they came
    assert found["reward/draws"] == 3 and found["reward/mixed_groups"] == 1.0
    assert found["reward/mean"] == pytest.approx(np.mean([first, flat, last]))
    assert int(loop.more["position"]) == 8  # the next step goes on behind what was drawn
    kept, found = variants.sample_mixed(Loop([flat, last, flat]), 0, 3)
    assert kept.prompts == ("6.0", "5.0") and found["reward/mixed_groups"] == 0.5


def rollout(start, width=4, rows=4, first=0):
    tokens = first + jnp.arange(rows * width).reshape(rows, width)
    mask = jnp.arange(width) >= start
    mask = jnp.broadcast_to(mask, tokens.shape)
    zeros, flags = jnp.zeros(tokens.shape), jnp.zeros(rows, bool)
    return rl.Rollout(
        tokens=tokens,
        mask=mask,
        attention_mask=jnp.ones_like(mask),
        log_probs=zeros,
        truncated_log_probs=zeros,
        lengths=jnp.full(rows, width - start),
        terminated=~flags,
        truncated=flags,
        group_ids=jnp.repeat(jnp.arange(rows // 2), 2),
        version=jnp.int32(1),
        start=start,
    )


def test_groups_of_two_samplings_make_one_batch():
    """Rows, texts and rewards of a group stay together, also behind prompts of other widths."""
    import common

    def samples(rollout, name):
        rewards = np.arange(4, dtype=np.float32)
        texts = [f"{name}{i}" for i in range(4)]
        return common.Samples(
            (f"{name}0", f"{name}2"),
            rollout,
            texts,
            Scores(rewards=rewards, by_function={"f": rewards}),
        )

    run_ = type(
        "Run",
        (),
        {"config": type("C", (), {"group_size": 2}), "place_rows": staticmethod(lambda x: x)},
    )
    first, second = samples(rollout(1), "a"), samples(rollout(2, width=5, first=100), "b")
    both = first.pick(second, np.array([1, 2]), run_)
    assert both.prompts == ("a2", "b0") and both.texts == ["a2", "a3", "b0", "b1"]
    np.testing.assert_array_equal(both.rewards, [2, 3, 0, 1])
    np.testing.assert_array_equal(both.scores.by_function["f"], both.rewards)
    assert both.rollout.start == 2 and both.rollout.tokens.shape == (4, 5)
    np.testing.assert_array_equal(both.rollout.tokens[0], [0, 8, 9, 10, 11])
    np.testing.assert_array_equal(both.rollout.attention_mask[0], [False, True, True, True, True])
    np.testing.assert_array_equal(both.rollout.tokens[2], np.arange(100, 105))
    assert not both.rollout.mask[:, :2].any()


def test_every_variant_is_in_the_table_and_gives_a_finite_gradient():
    import variants

    hints = typing.get_type_hints(variants.Config)
    assert set(typing.get_args(hints["method"])) == set(variants.METHODS)
    mask = jnp.array([[False, True, True], [False, True, False]] * 2)
    old = jnp.where(mask, -0.7, 0.0)
    ids, rewards = jnp.array([0, 0, 1, 1]), jnp.array([1.0, 0.0, 0.5, 0.0])
    for name, method in variants.METHODS.items():
        advantages = method.advantages(rewards, ids, mask)
        length = 2 if method.aggregation == "fixed_length" else None
        empty = rl.Batch(
            tokens=jnp.zeros(mask.shape, jnp.int32),
            mask=mask,
            attention_mask=mask,
            group_ids=ids,
            advantages=advantages,
            old_log_probs=old,
            sampler_log_probs=old,
        )
        batch = rl.minibatch.counted(empty, method.aggregation, length=length)
        loss_fn = variants.make_loss(method)

        def loss(log_probs, loss_fn=loss_fn, batch=batch):
            output = rl.types.PolicyOutput(log_probs=log_probs, entropy=jnp.zeros(mask.shape))
            return loss_fn(output, batch)[0]

        grad = jax.grad(loss)(old)
        assert np.isfinite(grad).all(), name
        assert (grad[0, 1] < 0) and (grad[1, 1] > 0), (
            name
        )  # up with the better, down with the worse


def test_the_loss_of_several_updates_is_their_mean_and_drops_are_counted():
    import common

    collected = common.Collected()
    for loss, tokens in ((2.0, [1.0, 3.0]), (4.0, [8.0])):
        collected.add(
            {
                "policy/loss": rl.metrics.sum_(jnp.float32(loss)),
                "optim/skipped": rl.metrics.sum_(jnp.float32(1)),
                "policy/ratio_mean": rl.metrics.mean(jnp.array(tokens)),
            }
        )
    assert collected.latest("policy/loss") == 4.0 and collected.latest("other") == 0.0
    found = {name: float(value) for name, value in collected.compute().items()}
    assert found == {
        "policy/loss": 3.0,
        "optim/skipped": 2.0,
        "policy/ratio_mean": 4.0,
        "optim/updates": 2.0,
    }


BAD = {
    "loss's KL": ("rloo", ["--kl-place", "loss"], "--kl-place loss"),
    "decay of one": ("reinforce", ["--baseline-decay", "1"], "--baseline-decay 1.0"),
    "no draw": ("variants", ["--draws", "0"], "--draws 0: it must be at least 1"),
    "cache over the cap": ("variants", ["--overlong-cache", "9"], "it must be at most 7"),
    "groups in minibatches": ("variants", ["--minibatches", "16"], "no whole groups of 4"),
    "no epoch": ("ppo", ["--epochs", "0"], "--epochs 0"),
    "minibatches": ("ppo", ["--minibatches", "5"], "--minibatches 5 does not divide"),
    "micro-batches": ("ppo", ["--micro-batches", "16"], "does not divide a minibatch of 8"),
    "devices": (
        "ppo",
        ["--minibatches", "8", "--layout", "dp"],
        "4 rows of a minibatch",
    ),
    "lambda": ("ppo", ["--gae-lambda", "1.5"], "--gae-lambda 1.5: it must be at most 1"),
    "lambda is NaN": ("ppo", ["--gae-lambda", "nan"], "--gae-lambda nan"),
    "clip of zero": ("ppo", ["--clip", "0"], "--clip 0.0: it must be above 0"),
    "target without KL": ("ppo", ["--kl-target", "3"], "give where it begins, --kl-coef"),
    "short horizon": (
        "ppo",
        ["--kl-target", "3", "--kl-coef", ".1", "--kl-horizon", "6"],
        "--kl-horizon 6",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_flags_are_one_clear_line_and_exit_code_2(name, tmp_path, capsys):
    script, flags, says = BAD[name]
    assert run(script, *SMALL, *flags, "--run-dir", tmp_path / "run") == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("error: ") and says in error[-1]
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_with_the_script_that_began_it(tmp_path, capsys):
    import common
    from common import setup

    own = dataclasses.replace(common.Config(), run_dir=str(tmp_path))
    setup._write_config(tmp_path, own, "rloo")
    assert run("reinforce", "--resume", tmp_path) == 2
    assert "rloo.py began that run" in capsys.readouterr().err

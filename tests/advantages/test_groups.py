"""Group baselines against loops; ragged groups, any order, missing rewards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlhf_jax as rl
from tests import reference
from tests.advantages.inputs import groups

adv = rl.advantages
SEED = st.integers(0, 10_000)


GROUP_FUNCTIONS = {
    "leave_one_out": (adv.leave_one_out, reference.leave_one_out),
    "group_normalized_0": (
        lambda r, g, **k: adv.group_normalized(r, g, ddof=0, eps=0.0, **k),
        lambda r, g: reference.group_normalized(r, g, ddof=0, eps=0.0),
    ),
    "group_normalized_1": (
        lambda r, g, **k: adv.group_normalized(r, g, ddof=1, eps=1e-4, **k),
        lambda r, g: reference.group_normalized(r, g, ddof=1, eps=1e-4),
    ),
    "centered": (adv.centered, reference.centered),
    "max_rl": (adv.max_rl, reference.max_rl),
}
each_group_function = pytest.mark.parametrize("name", list(GROUP_FUNCTIONS))


@each_group_function
@given(seed=SEED)
def test_groups_agree_with_loops(name, seed):
    function, slow = GROUP_FUNCTIONS[name]
    rewards, ids = groups(seed)
    np.testing.assert_allclose(function(rewards, ids), slow(rewards, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.fault(17, 20)
@each_group_function
def test_rows_may_be_in_any_order(name):
    function, _ = GROUP_FUNCTIONS[name]
    rewards, ids = groups(1)
    want = np.asarray(function(rewards, ids))
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(ids))
        np.testing.assert_allclose(function(rewards[order], ids[order]), want[order], rtol=1e-5)


@pytest.mark.fault(14)
@each_group_function
@pytest.mark.parametrize("spread", [1e-25, 1e-42])
def test_rewards_that_hardly_differ_stay_finite(name, spread):
    # The float32 square of such a deviation is 0, and so would be the standard deviation.
    function, _ = GROUP_FUNCTIONS[name]
    got = np.asarray(function(jnp.array([0.0, spread]), jnp.array([0, 0])))
    assert np.isfinite(got).all() and np.abs(got).max() <= 1.0


@pytest.mark.fault(18)
@each_group_function
def test_missing_rewards_leave_the_statistics(name):
    function, slow = GROUP_FUNCTIONS[name]
    ids = np.array([3, 3, 3, 3, 8, 8])
    known = np.array([1.0, np.nan, 0.0, 0.0, np.nan, 1.0])
    want = slow(known, ids)
    as_list = [None if np.isnan(x) else float(x) for x in known]
    as_valid = {"valid": ~np.isnan(known)}
    for got in (
        function(known.astype(np.float32), ids),
        function(as_list, ids),
        function(np.nan_to_num(known, nan=0.5).astype(np.float32), ids, **as_valid),
        jax.jit(function)(known.astype(np.float32), ids),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
        assert float(got[1]) == float(got[4]) == float(got[5]) == 0.0  # 5 is left alone


@pytest.mark.fault(14)
@each_group_function
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, 1 / 3, 12345.678])
def test_equal_rewards_give_exactly_zero(name, reward):
    function, _ = GROUP_FUNCTIONS[name]
    rewards = jnp.concatenate([jnp.full(7, reward, jnp.float32), jnp.array([0.0, 1.0])])
    out = function(rewards, jnp.array([5] * 7 + [6] * 2))
    np.testing.assert_array_equal(out[:7], 0.0)
    assert abs(float(out[7])) > 0.1


@pytest.mark.fault(15)
def test_group_variance_is_two_pass():
    rewards = jnp.array([10000.0, 10000.5, 10001.0])
    out = adv.group_normalized(rewards, jnp.zeros(3, int), ddof=0, eps=0.0)
    np.testing.assert_allclose(out, [-np.sqrt(1.5), 0.0, np.sqrt(1.5)], rtol=1e-3)


@pytest.mark.fault(16)
@each_group_function
def test_groups_of_one_are_refused(name):
    function, _ = GROUP_FUNCTIONS[name]
    with pytest.raises(ValueError, match=r"group_ids: group 7 has one row.*at least 2"):
        function(jnp.array([0.7, 0.1, 0.2]), jnp.array([7, 2, 2]))
    # Where the ids cannot be read, the row gets no reward as its advantage, but 0.
    out = jax.jit(function)(jnp.array([0.7, 0.1, 0.2]), jnp.array([7, 2, 2]))
    assert float(out[0]) == 0.0


@pytest.mark.fault(19)
def test_integer_rewards_are_refused_and_fractions_kept():
    ids = jnp.array([0, 0])
    with pytest.raises(TypeError, match=r"rewards.*int32.*astype\(jnp.float32\)"):
        adv.leave_one_out(jnp.array([1, 0]), ids)
    out = adv.centered(jnp.array([0.75, 0.25], jnp.bfloat16), ids)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, [0.25, -0.25])


@pytest.mark.fault(21)
def test_dropped_groups_leave_loss_kl_and_denominator_and_are_counted():
    rng = np.random.default_rng(0)
    rewards = jnp.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    ids = jnp.array([4, 4, 9, 9, 2, 2])
    log_probs, ref = rng.normal(size=(2, 6, 5)).astype(np.float32)
    mask = rng.random((6, 5)) < 0.7
    mask[:, 0] = True
    keep, metrics = jax.jit(adv.dynamic_sampling)(rewards, ids)
    np.testing.assert_array_equal(keep, [True, True, False, False, False, False])
    read = rl.metrics.compute(metrics)
    assert float(read["reward/zero_std_groups"]) == pytest.approx(2 / 3)
    assert float(read["reward/dropped_rows"]) == 4.0
    kept = mask & np.asarray(keep)[:, None]
    kl = rl.kl.k3(log_probs, ref, mask=kept)
    got = rl.masked.aggregate(kl, kept, "token_mean")
    alone = rl.masked.aggregate(rl.kl.k3(log_probs[:2], ref[:2]), mask[:2], "token_mean")
    assert float(got) == pytest.approx(float(alone), rel=1e-6)
    # Advantages of the kept rows are those from before the filter.
    full = adv.leave_one_out(rewards, ids)
    np.testing.assert_array_equal(full[:2], adv.leave_one_out(rewards[:2], ids[:2]))


def test_dynamic_sampling_does_not_keep_missing_rewards_or_lone_rows():
    keep, metrics = adv.dynamic_sampling([1.0, None, 0.0, None, None, 0.5], [0, 0, 0, 1, 1, 5])
    np.testing.assert_array_equal(keep, [True, False, True, False, False, False])
    assert float(metrics["reward/zero_std_groups"].value()) == 0.5  # of groups 0 and 5


def test_process_supervision_with_missing_steps_and_padding():
    ids = np.array([1, 1])
    rewards = np.array([[9.0, 0.1, np.nan, 0.9, 0.0], [0.4, 9.0, 0.2, 0.0, 0.7]], np.float32)
    ends = np.array([[0, 1, 1, 1, 0], [1, 0, 1, 0, 1]], bool)
    mask = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], bool)
    steps = np.array([0.1, 0.9, 0.4, 0.2, 0.7])
    white = (steps - steps.mean()) / (steps.std(ddof=1) + 1e-4)
    want = [
        [white[0] + white[1]] * 2 + [white[1]] * 2 + [0.0],
        [white[2:].sum(), white[3:].sum(), white[3:].sum(), white[4], white[4]],
    ]
    got = adv.process_supervision(rewards, ends, mask, ids, ddof=1)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)

    def pad(x, fill):
        return np.pad(x, ((0, 0), (2, 1)), constant_values=fill)

    padded = adv.process_supervision(
        pad(rewards, np.nan), pad(ends, False), pad(mask, False), ids, ddof=1
    )
    np.testing.assert_allclose(padded, pad(np.asarray(got), 0.0), rtol=1e-5)
    same = adv.process_supervision(np.full((2, 5), 0.1, np.float32), ends, mask, ids, ddof=0, eps=0)
    np.testing.assert_array_equal(same, 0.0)


def test_leave_one_out_is_unbiased_by_enumeration():
    logits, rewards, k = np.array([0.2, -0.1, 0.4]), np.array([1.0, 0.0, 0.3]), 3
    p = reference.softmax(logits)
    drawn = np.stack(np.meshgrid(*[np.arange(3)] * k, indexing="ij"), -1).reshape(-1, k)
    chance = p[drawn].prod(axis=1)
    ids = np.repeat(np.arange(len(drawn)), k)
    with jax.enable_x64(True):
        a = np.asarray(adv.leave_one_out(rewards[drawn].reshape(-1), ids)).reshape(-1, k)
    scores = reference.score(p)[drawn]
    got = np.einsum("n,nk,nka->a", chance, a, scores) / k
    want = reference.numeric_gradient(lambda x: reference.softmax(x) @ rewards, logits)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("explicit", [False, True])
def test_groups_may_be_spread_over_devices(explicit):
    rewards, ids = groups(2, sizes=(5, 5, 6))
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    placed = jax.device_put((rewards, ids), jax.NamedSharding(mesh, jax.P("data")))
    for name, (function, _) in GROUP_FUNCTIONS.items():
        with jax.set_mesh(mesh):
            got = jax.jit(function)(*placed)
        np.testing.assert_allclose(got, function(rewards, ids), rtol=1e-5, err_msg=name)

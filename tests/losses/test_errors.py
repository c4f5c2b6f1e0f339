"""Every wrong argument is an error that names it and says what to do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rlhf_jax as rl
from tests.losses.common import LOSSES, batch, evaluate

L = rl.losses
DATA = batch(0)
CLIPPED = ["ppo", "grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "cispo", "gmpo", "rloo_clipped"]


def call(name, changes=(), **options):
    data = {**DATA, **dict(changes)}
    return evaluate(LOSSES[name], data, **{"aggregation": "token_mean", **options})


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("kind", "argument", "value"),
    [
        (ValueError, "log_probs", DATA["log_probs"][0]),  # wrong rank
        (TypeError, "log_probs", DATA["group_ids"]),
        (TypeError, "mask", DATA["mask"].astype(jnp.int32)),  # int mask
        (TypeError, "mask", DATA["log_probs"]),  # swapped
        (ValueError, "mask", DATA["mask"][:, :-1]),
        (ValueError, "old_log_probs", DATA["advantages"]),  # swapped: unlike shape
        (ValueError, "old_log_probs", DATA["old_log_probs"][:, 1:]),
        (TypeError, "advantages", jnp.ones(8, int)),  # integer rewards
        (ValueError, "advantages", jnp.ones(7)),
        (ValueError, "advantages", jnp.ones((8, 1))),
        (TypeError, "advantages", [1.0, None]),
    ],
)
def test_arrays(name, kind, argument, value):
    case = LOSSES[name]
    data = {**DATA, argument: value}
    args = [data[k] for k in ("log_probs", "old_log_probs", "advantages", "mask")]
    arrays = {k: data[k] for k in case.arrays}
    for function in (case.loss, case.per_token):
        with pytest.raises(kind, match=argument) as caught:
            function(*args, **arrays, **case.options)
        assert (
            "Pass" in str(caught.value)
            or "Check" in str(caught.value)
            or "Mark" in str(caught.value)
        )


@pytest.mark.parametrize("name", LOSSES)
def test_a_ratio_needs_the_old_log_probs(name):
    if name in ("reinforce", "rloo"):
        call(name, [("old_log_probs", None)])
        return
    case = LOSSES[name]
    args = [DATA["log_probs"], None, DATA["advantages"], DATA["mask"]]
    for function in (case.loss, case.per_token):
        with pytest.raises(ValueError, match="old_log_probs is None"):
            function(*args, **{k: DATA[k] for k in case.arrays}, **case.options)


@pytest.mark.parametrize("name", LOSSES)
def test_reduction_options(name):
    with pytest.raises(ValueError, match=r"aggregation.*token_mean"):
        call(name, aggregation="mean")
    with pytest.raises(ValueError, match="length"):
        call(name, aggregation="fixed_length")
    with pytest.raises(ValueError, match="group_ids"):
        call(name, aggregation="prompt_mean")
    with pytest.raises(ValueError, match="weights"):
        call(name, weights=jnp.ones(3))
    with pytest.raises(ValueError, match="denominator"):
        call(name, denominator=jnp.ones(3))
    with pytest.raises(TypeError, match="segment_ids"):
        call(name, aggregation="seq_mean_token_mean", segment_ids=DATA["log_probs"])


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("which", ["clip_low", "clip_high"])
@pytest.mark.parametrize("value", [0.0, -0.2, float("nan"), jnp.float32(0.0)])
def test_clip_not_positive(name, which, value):
    with pytest.raises(ValueError, match=which):
        call(name, **{which: value})


def test_clip_values_under_jit_are_not_read():
    loss = jax.jit(lambda eps: call("ppo", clip_low=eps, clip_high=eps)[0][0])
    assert loss(0.2) == loss(0.2)
    with pytest.raises(ValueError, match=r"clip_low.*1 ± ε"):
        call("ppo", clip_low=1.2)  # a bound of the ratio, not an ε


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp"])
def test_kl_options(name):
    with pytest.raises(ValueError, match=r"kl_coef.*drift"):
        call(name, kl_coef=-0.1)
    with pytest.raises(ValueError, match=r"kl_estimator.*'k3'"):
        call(name, kl_estimator="k4")
    with pytest.raises(ValueError, match="ref_log_probs"):
        call(name, [("ref_log_probs", None)], kl_coef=0.1)
    with pytest.raises(ValueError, match="ref_log_probs"):
        call(name, [("ref_log_probs", DATA["ref_log_probs"][:, 1:])])
    call(name, [("ref_log_probs", None)], kl_coef=0.0)


@pytest.mark.fault(30)
def test_k1_in_the_loss_warns():
    with pytest.warns(UserWarning, match="zero gradient"):
        call("grpo", kl_estimator="k1")


def test_specific_options():
    with pytest.raises(ValueError, match="dual_clip"):
        call("ppo", dual_clip=1.0)
    with pytest.raises(ValueError, match=r"clip_low.*neither"):
        call("rloo", clip_low=0.2)
    with pytest.raises(ValueError, match="old_log_probs"):
        call("rloo_clipped", [("old_log_probs", None)])
    with pytest.raises(ValueError, match="cap"):
        call("cispo", cap=0.0)
    with pytest.raises(ValueError, match="tau_negative"):
        call("sapo", tau_negative=0.0)
    with pytest.raises(ValueError, match="ratio_max"):
        call("topr", ratio_max=0.0)
    with pytest.raises(ValueError, match="weight_cap"):
        call("decoupled_ppo", weight_cap=-1.0)
    with pytest.raises(ValueError, match="sampler_log_probs"):
        call("decoupled_ppo", [("sampler_log_probs", DATA["advantages"])])


def test_value_and_entropy_options():
    v, old, mask = DATA["log_probs"], DATA["old_log_probs"], DATA["mask"]
    with pytest.raises(ValueError, match="clip"):
        L.value_loss(v, old, old, mask, clip=0.0)
    with pytest.raises(ValueError, match="old_values"):
        L.value_loss(v, None, old, mask)
    with pytest.raises(ValueError, match="returns"):
        L.value_loss(v, old, DATA["advantages"], mask)
    with pytest.raises(TypeError, match="mask"):
        L.value_per_token(v, old, old, v)
    with pytest.raises(ValueError, match="entropy_coef"):
        L.entropy_loss(-v, mask, entropy_coef=-0.1)
    with pytest.raises(ValueError, match="entropy"):
        L.entropy_loss(-v[0], mask)


def test_off_policy_options():
    old, mu, mask = DATA["old_log_probs"], DATA["sampler_log_probs"], DATA["mask"]
    for match, options in (
        ("mode.*truncate", {"mode": "clip"}),
        ("level.*token", {"level": "row"}),
        ("low", {"low": -0.1}),
        ("high", {"high": 0.0}),
        ("low.*below", {"low": 3.0}),
        ("log_clamp", {"log_clamp": 0.0}),
    ):
        with pytest.raises(ValueError, match=match):
            L.off_policy_weights(old, mu, mask, **options)
    with pytest.raises(ValueError, match="sampler_log_probs"):
        L.off_policy_weights(old, mu[:, 1:], mask)
    with pytest.raises(TypeError, match="version"):
        L.staleness_metrics(1.5, jnp.array([1]))


@pytest.mark.fault(16)
def test_a_group_of_one_is_refused_before_any_loss():
    rewards = jnp.array([1.0, 0.0, 0.5])
    ids = jnp.array([0, 0, 1])
    with pytest.raises(ValueError, match="group"):
        rl.advantages.group_normalized(rewards, ids, ddof=0)
    with pytest.raises(ValueError, match="group"):
        rl.advantages.leave_one_out(rewards, ids)

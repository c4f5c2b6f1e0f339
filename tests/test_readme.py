"""The README's code runs, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rlhf_jax as rl

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


MODEL = rl.models.Decoder(
    rl.models.DecoderConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2
    )
)


def namespace() -> dict:
    names: dict = {"model": MODEL, "optimizer": optax.sgd(0.1)}
    for block in CODE:
        exec(compile(block, "README.md", "exec"), names)
    return names


def test_a_reward_of_ones_own():
    reward = namespace()["my_reward"]
    got = rl.rewards.functions.call(
        reward, ["p", "p"], ["yes 4", "no"], columns={"answer": ["4", "4"]}
    )
    np.testing.assert_array_equal(got, [1, 0])


def test_a_method_of_ones_own():
    names = namespace()
    mask = jnp.array([[False, True, True], [False, True, False]])
    old = jnp.log(jnp.full((2, 3), 0.5))
    batch = rl.Batch(
        tokens=jnp.zeros((2, 3), jnp.int32),
        mask=mask,
        attention_mask=jnp.ones((2, 3), bool),
        group_ids=jnp.array([0, 0]),
        advantages=jnp.array([1.0, -1.0]),
        old_log_probs=old,
        sampler_log_probs=old,
    )
    policy = rl.types.PolicyOutput(log_probs=jnp.where(mask, old, jnp.nan))

    def scalar(log_probs):
        return names["loss_fn"](rl.types.PolicyOutput(log_probs=log_probs), batch)[0]

    loss, metrics = names["loss_fn"](policy, batch)
    np.testing.assert_allclose(loss, (-1 - 1 + 1) / 3, rtol=1e-6)
    assert float(metrics["policy/ratio_mean"].value()) == 1.0
    gradient = jax.grad(scalar)(policy.log_probs)
    np.testing.assert_allclose(
        gradient, np.where(mask, [[-1 / 3], [1 / 3]], 0), rtol=1e-6, atol=1e-7
    )


def test_shared_prompts():
    names = namespace()
    batch = rl.Batch(
        tokens=jnp.arange(32 * 3).reshape(32, 3) % 4,
        mask=jnp.ones((32, 3), bool).at[:, :2].set(False),
        attention_mask=jnp.ones((32, 3), bool),
        group_ids=jnp.arange(32) // 8,
        advantages=jnp.arange(32.0),
        old_log_probs=jnp.zeros((32, 3)),
        sampler_log_probs=jnp.zeros((32, 3)),
        denominator=jnp.full(32, 32.0),
        start=2,
    )
    state = rl.init_train_state(MODEL.init(jax.random.key(0)), names["optimizer"])
    state, metrics = names["step"](state, batch)
    assert int(state.step) == 1 and float(metrics["optim/grad_norm"].value()) > 0


def test_its_map_is_the_territory():
    tree = README.split("## Where things are")[1].split("```")[1]
    top = re.findall(r"^(\w+/)", tree, re.MULTILINE)
    assert {"rlhf_jax/", "sharding/", "experiments/", "tests/"} <= set(top)
    for folder in top:
        assert (ROOT / folder).is_dir(), folder
    for name in re.findall(r"^  ([\w.]+/?)", tree, re.MULTILINE):
        assert (ROOT / "rlhf_jax" / name).exists(), name


def test_its_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^    make ([a-z-]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target

"""The losses take arrays, so any model will do: a Linen toy and an NNX toy learn a bandit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import rlhf_jax as rl

L = rl.losses
VOCAB, WIDTH = 7, 8


class LinenToy(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCAB, WIDTH)(tokens)
        return linen.Dense(VOCAB)(jnp.tanh(linen.Dense(WIDTH)(x)))


class NNXToy(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.outer = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return self.outer(jnp.tanh(self.inner(self.embed(tokens))))


def linen_toy():
    model = LinenToy()
    params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    return params, model.apply


def nnx_toy():
    graph, params = nnx.split(NNXToy(nnx.Rngs(0)))
    return params, lambda params, tokens: nnx.merge(graph, params)(tokens)


LOSSES = [
    (L.reinforce_loss, {}),
    (L.rloo_loss, {}),
    (L.ppo_loss, {}),
    (L.grpo_loss, {}),
    (L.dr_grpo_loss, {"length": 3}),
    (L.dapo_loss, {}),
    (L.gspo_loss, {"clip_low": 0.2, "clip_high": 0.2}),
    (L.gspo_token_loss, {"clip_low": 0.2, "clip_high": 0.2}),
    (L.cispo_loss, {}),
    (L.sapo_loss, {}),
    (L.gmpo_loss, {}),
    (L.topr_loss, {}),
    (L.reinforce_pp_loss, {}),
    (L.decoupled_ppo_loss, {}),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("toy", "loss", "options"),
    [  # every loss learns on one of the toys in the quick run, on both in the slow one
        pytest.param(toy, *case, marks=() if index % 2 == quick else pytest.mark.slow)
        for quick, toy in enumerate((linen_toy, nnx_toy))
        for index, case in enumerate(LOSSES)
    ],
)
def test_foreign_models_learn(toy, loss, options):
    params, apply = toy()
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, VOCAB, (32, 4)))
    mask = jnp.broadcast_to(jnp.arange(4) > 0, (32, 4))
    rewards = jnp.mean((tokens[:, 1:] == 3).astype(jnp.float32), axis=1)
    advantages = rl.advantages.centered(rewards, jnp.repeat(jnp.arange(4), 8))
    old = rl.logprobs.token_log_probs(apply(params, tokens), tokens)
    if loss is L.decoupled_ppo_loss:
        options = {"sampler_log_probs": old}
    optimizer = optax.sgd(1.0)

    def objective(params):
        x = rl.logprobs.token_log_probs(apply(params, tokens), tokens)
        return loss(x, old, advantages, mask, **options)

    @jax.jit
    def step(params, state):
        grads, _ = jax.grad(objective, has_aux=True)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    def preference(params):
        return jax.nn.softmax(apply(params, tokens))[..., 3].mean()

    before, state = preference(params), optimizer.init(params)
    for _ in range(3):
        params, state = step(params, state)
    assert preference(params) > before

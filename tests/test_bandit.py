"""The KL-regularised bandit: the trained policy is π_ref·exp(R/β)/Z, through the real pieces.

One token of a vocabulary is drawn after each of a few contexts. With k1 in the reward the gradient
is that of E[R] − β·KL(π‖π_ref), whose optimum is known; there every advantage is 0, so that even
sampled batches come to rest on it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlhf_jax as rl
from rlhf_jax import policy

CONTEXTS, ARMS, BETA = 3, 5, 0.5
RNG = np.random.default_rng(7)
REFERENCE = jnp.asarray(RNG.normal(size=(CONTEXTS, ARMS)), jnp.float32)
REWARDS = jnp.asarray(RNG.uniform(-1, 1, size=(CONTEXTS, ARMS)), jnp.float32)
OPTIMUM = jax.nn.softmax(REFERENCE + REWARDS / BETA)
POLICY = policy.from_apply(lambda params, tokens: params["logits"][tokens % CONTEXTS])


def rollout(params, key, group):
    """A group of completions of one token for every context, with the sampler's log-probs."""
    contexts = jnp.repeat(jnp.arange(CONTEXTS), group)
    arms = jax.random.categorical(key, params["logits"][contexts])
    return contexts, jnp.stack([contexts, arms], axis=1)


def make_batch(params, key, group, method):
    contexts, tokens = rollout(params, key, group)
    rows = tokens.shape[0]
    mask = jnp.zeros((rows, 2), bool).at[:, 1].set(True)
    empty = rl.Batch(
        tokens=tokens,
        mask=mask,
        attention_mask=jnp.ones((rows, 2), bool),
        group_ids=contexts,
        advantages=jnp.zeros(rows),
        old_log_probs=jnp.zeros((rows, 2)),
        sampler_log_probs=jnp.zeros((rows, 2)),
    )
    log_probs = POLICY(params, empty).log_probs
    reference = POLICY({"logits": REFERENCE}, empty).log_probs
    shaped = rl.rewards.shaping.sequence_kl_in_reward(
        REWARDS[contexts, tokens[:, 1]], log_probs, reference, mask, kl_coef=BETA
    )
    advantages = rl.advantages.leave_one_out(shaped, contexts)
    if method == "reinforce":  # a baseline of the whole batch
        advantages = rl.advantages.batch_centered(shaped)
    return rl.minibatch.counted(
        rl.Batch(
            **{
                **vars(empty),
                "advantages": advantages,
                "old_log_probs": log_probs,
                "sampler_log_probs": log_probs,
            }
        ),
        "seq_mean_token_sum",
    )


LOSSES = {"rloo": rl.losses.rloo_loss, "reinforce": rl.losses.reinforce_loss}


@pytest.mark.long
@pytest.mark.parametrize("method", LOSSES)
def test_the_policy_comes_to_the_kl_regularised_optimum(method):
    def loss_fn(output, batch):
        return LOSSES[method](
            output.log_probs,
            batch.old_log_probs,
            batch.advantages,
            batch.mask,
            denominator=batch.denominator,
        )

    steps = 300
    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, steps))
    step = rl.make_train_step(POLICY, loss_fn, optimizer)
    state = rl.init_train_state({"logits": REFERENCE}, optimizer)
    sample = jax.jit(make_batch, static_argnums=(2, 3))
    key = jax.random.key(0)
    for index in range(steps):
        batch = sample(state.params, jax.random.fold_in(key, index), 64, method)
        state, _ = step(state, batch)
    got = jax.nn.softmax(state.params["logits"])
    assert np.abs(jax.nn.softmax(REFERENCE) - OPTIMUM).max() > 0.1  # there was a way to go
    np.testing.assert_allclose(got, OPTIMUM, atol=1e-2)
    kl = jnp.sum(got * jnp.log(got / jax.nn.softmax(REFERENCE)), axis=1)
    value = jnp.sum(got * REWARDS, axis=1) - BETA * kl
    best = BETA * jax.nn.logsumexp(jax.nn.log_softmax(REFERENCE) + REWARDS / BETA, axis=1)
    np.testing.assert_allclose(value, best, atol=1e-3)  # β·log Z

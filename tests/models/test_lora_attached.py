"""Adapters beside the weights: what merged ones give, without a merged weight or its gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlhf_jax as rl

MODEL = rl.models.Decoder(
    rl.models.DecoderConfig(
        architecture="Qwen2ForCausalLM",  # with biases
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        initializer_range=0.2,
    ),
    stacks=(1, 2),
)
LORA = rl.models.LoRA(rank=3, alpha=5, targets=("q", "k", "v", "o", "gate", "up", "down"))


def _trees(lora=LORA, model=MODEL):
    """Base and adapters; B is not 0, which would hide A."""
    base = model.init(jax.random.key(0))
    adapters = lora.init(jax.random.key(1), model)
    rng = np.random.default_rng(0)
    return base, jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), adapters)


def _batch():
    rng = np.random.default_rng(1)
    mask = np.arange(12) >= np.array([[2], [5], [3], [4]])
    zeros = jnp.zeros((4, 12))
    return rl.Batch(
        tokens=jnp.asarray(rng.integers(0, 48, (4, 12))),
        mask=jnp.asarray(mask),
        attention_mask=jnp.ones((4, 12), bool),
        group_ids=jnp.zeros(4, int),
        advantages=jnp.asarray(rng.normal(size=4), jnp.float32),
        old_log_probs=zeros,
        sampler_log_probs=zeros,
        start=2,
    )


def _loss(output, batch):
    terms = batch.advantages[:, None] * output.log_probs
    return jnp.sum(jnp.where(batch.mask, terms, 0.0)), {}


@pytest.fixture(scope="module")
def gradients():
    """Loss and gradient of the adapters both ways, and XLA's count of operations."""
    model = dataclasses.replace(MODEL, stacks=(3,))
    base, adapters = _trees(model=model)
    found = {}
    for merged in (True, False):
        policy = LORA.adapted(rl.policy.from_decoder(model), merged=merged)

        def loss(adapters, base, batch, policy=policy):
            out = policy({"base": base, "adapters": adapters}, batch)
            return _loss(out, batch)[0]

        compiled = jax.jit(jax.value_and_grad(loss)).lower(adapters, base, _batch()).compile()
        found[merged] = *compiled(adapters, base, _batch()), compiled.cost_analysis()["flops"]
    return found


def test_loss_and_gradients_are_those_of_merged_adapters(gradients):
    (merged, expected, _), (attached, found, _) = gradients[True], gradients[False]
    assert attached == pytest.approx(float(merged), rel=1e-5)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(b) > 0
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def test_no_weight_is_merged_or_differentiated(gradients):
    assert gradients[False][2] < gradients[True][2]
    base, adapters = _trees()
    params = LORA.attach(base, adapters)
    for stack, original in zip(params["layers"], base["layers"], strict=True):
        assert stack["attn"]["q"]["weight"] is original["attn"]["q"]["weight"]
        assert stack["mlp"]["down"]["a"].shape[1:] == (3, 64)


@pytest.mark.slow
def test_a_step_trains_adapters_of_one_stack_and_leaves_the_base():
    lora = dataclasses.replace(LORA, layers=(1, 2), targets=("q", "down"))
    base, adapters = _trees(lora)
    assert adapters["layers"][0] == {}
    trainable, frozen = rl.partition.split({"base": base, "adapters": adapters}, "^adapters/")
    before = jax.tree.map(np.array, base)
    optimizer = optax.adam(1e-2)
    policy = lora.adapted(rl.policy.from_decoder(MODEL), merged=False)
    step = rl.make_train_step(policy, lambda *args: (-_loss(*args)[0], {}), optimizer)
    state, seen = rl.init_train_state(trainable, optimizer), []
    for _ in range(3):
        state, metrics = step(state, _batch(), frozen)
        seen.append(float(rl.metrics.compute(metrics)["policy/loss"]))
    assert seen[2] < seen[1] < seen[0]
    jax.tree.map(np.testing.assert_array_equal, base, before)


@pytest.mark.slow
def test_the_sampler_runs_on_both():
    base, adapters = _trees()
    prompts = np.arange(10).reshape(2, 5) + 1
    options = dict(group_size=3, max_new_tokens=12)
    rollouts = [
        rl.generate(MODEL, params, prompts, np.ones((2, 5), bool), jax.random.key(2), **options)
        for params in (LORA.merge(base, adapters), LORA.attach(base, adapters), base)
    ]
    merged, attached, plain = rollouts
    np.testing.assert_array_equal(attached.tokens, merged.tokens)
    np.testing.assert_allclose(attached.log_probs, merged.log_probs, atol=2e-5)
    assert (plain.tokens != merged.tokens).any()
    policy = jax.jit(rl.policy.from_decoder(MODEL))
    learner = policy(LORA.attach(base, adapters), attached).log_probs
    np.testing.assert_allclose(
        np.where(attached.mask, learner, 0),
        np.where(attached.mask, attached.log_probs, 0),
        atol=2e-5,
    )


def test_adapters_that_do_not_fit_are_named():
    base, adapters = _trees()
    with pytest.raises(ValueError, match="adapters: they have 2 stacks, the base has 1"):
        LORA.attach(MODEL.restack(base, (3,)), adapters)
    with pytest.raises(ValueError, match=r"adapters: attn/. has a .* do not fit rank 2"):
        dataclasses.replace(LORA, rank=2).attach(base, adapters)

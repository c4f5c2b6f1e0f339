"""The learner's pass agrees with the sampler's record, in whole and from a shared trunk."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from rlhf_jax import partition, policy

CONFIGS = {
    "tied": dict(tie_embeddings=True),
    "untied, grouped": dict(num_kv_heads=2),
    "qwen2": dict(architecture="Qwen2ForCausalLM", num_kv_heads=2),
    "qwen3": dict(architecture="Qwen3ForCausalLM", num_kv_heads=2),
}


SLOW = pytest.mark.slow
QUICK = ("qwen3", 0.6)


def _model(**options):
    sizes = dict(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, head_dim=8
    )
    config = rl.models.DecoderConfig(**(sizes | options))
    model = rl.models.Decoder(config, stacks=(3, 1))
    # Larger weights than the usual start, so that the distributions are far from uniform.
    params = jax.tree.map(lambda x: x * 2, model.init(jax.random.key(0)))
    return model, params


def _rollout(model, params, **options):
    tokens = np.array([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5], [0, 9, 8, 7, 6]])
    mask = np.array([[False, False, True, True, True], [True] * 5, [False] + [True] * 4])
    return rl.generate(
        model, params, tokens, mask, jax.random.key(1), group_size=4, max_new_tokens=24, **options
    )


@pytest.mark.long
@pytest.mark.fault(13)
@pytest.mark.fault(32)
@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        pytest.param(name, temperature, marks=() if (name, temperature) == QUICK else SLOW)
        for name in CONFIGS
        for temperature in (0.6, 1.0)
    ],
)
def test_sampler_and_learner_agree(name, temperature):
    model, params = _model(**CONFIGS[name])
    rollout = _rollout(model, params, temperature=temperature, stop_ids=[3])
    assert rollout.truncated.any()
    out = policy.from_decoder(model, temperature=temperature)(params, rollout)
    gap = jnp.abs(out.log_probs - rollout.log_probs)[rollout.mask]
    assert float(gap.max()) < 2e-5
    logits = model.logits(params, rollout.tokens, attention_mask=rollout.attention_mask)
    plain = rl.logprobs.token_log_probs(logits, rollout.tokens, temperature=temperature)
    np.testing.assert_allclose(out.log_probs[rollout.mask], plain[rollout.mask], atol=1e-5)
    assert (out.log_probs[:, : rollout.start] == 0).all(), "the prompt is not trained on"


@pytest.mark.long
def test_a_shared_trunk_changes_neither_values_nor_gradients():
    model, params = _model()
    rollout = _rollout(model, params)
    trainable, frozen = partition.split(params, "^layers/1/")
    with_trunk = dataclasses.replace(rollout, trunk=policy.trunk(model, params, rollout, 1))

    def total(trainable, rollout, stacks):
        out = policy.from_decoder(model, trunk_stacks=stacks)(
            partition.merge(trainable, frozen), rollout
        )
        return jnp.sum(jnp.where(rollout.mask, out.log_probs, 0.0))

    whole = jax.value_and_grad(total)(trainable, rollout, 0)
    shared = jax.value_and_grad(total)(trainable, with_trunk, 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), whole, shared)


def test_a_missing_trunk_is_named():
    model, params = _model()
    with pytest.raises(ValueError, match=r"batch\.trunk"):
        policy.from_decoder(model, trunk_stacks=1)(params, _rollout(model, params))


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", ["fsdp_tensor", *(pytest.param(n, marks=SLOW) for n in ("dp", "fsdp", "tensor"))]
)
def test_rollouts_are_the_same_under_every_layout(layout):
    import sharding

    model, params = _model(num_heads=8, num_kv_heads=8, vocab_size=64, intermediate_size=64)
    tokens = np.arange(16 * 5).reshape(16, 5) % 64
    mask = np.ones((16, 5), bool)

    def run(params, *rows):
        return rl.generate(model, params, *rows, jax.random.key(1), group_size=2, max_new_tokens=6)

    plain = run(params, tokens, mask)
    found_layout = sharding.get_layout(layout)
    mesh = sharding.make_mesh(found_layout)
    shardings = sharding.tree_shardings(model.logical_axes(), params, found_layout, mesh)
    rows = sharding.row_sharding(found_layout, mesh)
    split = run(jax.device_put(params, shardings), *jax.device_put((jnp.array(tokens), mask), rows))
    assert (plain.tokens == split.tokens).all()
    np.testing.assert_allclose(plain.log_probs, split.log_probs, rtol=1e-5, atol=1e-5)
    if found_layout.rows:
        assert not split.tokens.sharding.is_fully_replicated, "rows stay split over the devices"

"""A prompt computed once a group: the same function and gradient as with one in every row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlhf_jax as rl
import sharding

P, G, START, T, VOCAB = 4, 3, 7, 18, 50
PLAIN = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    initializer_range=0.2,
)


def config(family, **own):
    return rl.models.DecoderConfig(**PLAIN, architecture=f"{family}ForCausalLM", **own)


CONFIGS = {
    "wide heads": rl.models.DecoderConfig(**PLAIN, head_dim=32),
    "norms, narrow heads": config("Qwen3", head_dim=8),
    "biases, tied": config("Qwen2", head_dim=32, tie_embeddings=True),
    "windows": config("Qwen2", head_dim=32, layer_windows=(0, 5, 5)),
}


def batch_of(groups=P, size=G, seed=0):
    """Ragged prompts, left-padded, each in `size` rows; ragged completions, one of them empty."""
    rng = np.random.default_rng(seed)
    rows, column = groups * size, np.arange(T)
    prompts = np.repeat(rng.integers(1, START + 1, groups), size)
    lengths = np.concatenate([[0, T - START], rng.integers(1, T - START + 1, rows - 2)])
    tokens = rng.integers(0, VOCAB, (rows, T))
    tokens[:, :START] = np.repeat(tokens[::size, :START], size, axis=0)
    mask = (column >= START) & (column < START + lengths[:, None])
    real = mask | ((column < START) & (column >= START - prompts[:, None]))
    zeros = jnp.zeros((rows, T))
    return rl.Batch(
        tokens=jnp.asarray(tokens),
        mask=jnp.asarray(mask),
        attention_mask=jnp.asarray(real),
        group_ids=jnp.repeat(jnp.arange(groups), size),
        advantages=jnp.asarray(rng.normal(size=rows), jnp.float32),
        old_log_probs=zeros,
        sampler_log_probs=zeros,
        denominator=jnp.full(rows, float(mask.sum())),
        start=START,
    )


def loss(output, batch):
    total = jnp.sum(output.log_probs * batch.mask * batch.advantages[:, None])
    total = total + 0.1 * jnp.sum(output.entropy * batch.mask)
    return -total / batch.denominator[0], {}


def close(actual, expected, tolerance=2e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        actual,
        expected,
    )


@pytest.mark.parametrize(
    "name, remat",
    [*((name, "none") for name in CONFIGS), ("windows", "attention"), ("windows", "full")],
)
def test_same_values_and_gradient(name, remat):
    model = rl.models.Decoder(CONFIGS[name], remat=remat)
    params, batch = model.init(jax.random.key(1)), batch_of()

    def run(size):
        policy = rl.policy.from_decoder(model, group_size=size)

        def objective(params):
            output = policy(params, batch)
            return loss(output, batch)[0], jax.tree.map(lambda x: x * batch.mask, output)

        return jax.jit(jax.value_and_grad(objective, has_aux=True))(params)

    close(run(G), run(1))


def test_hidden_states_of_every_column_and_given_positions():
    model = rl.models.Decoder(CONFIGS["wide heads"])
    params, batch = model.init(jax.random.key(2)), batch_of()
    positions = jnp.broadcast_to(jnp.arange(T) * 2, batch.tokens.shape)
    for options in ({}, {"positions": positions}):
        options |= {"attention_mask": batch.attention_mask, "split": START}
        once = model.hidden(params, batch.tokens, group_size=G, **options)
        each = model.hidden(params, batch.tokens, **options)
        real = batch.attention_mask[..., None]
        close(once * real, each * real)


def test_a_frozen_trunk_is_shared_too():
    model = rl.models.Decoder(CONFIGS["wide heads"], stacks=(2, 1))
    params, batch = model.init(jax.random.key(3)), batch_of()
    whole = rl.policy.from_decoder(model, group_size=G)(params, batch)
    trunk = rl.policy.trunk(model, params, batch, 1, group_size=G)
    close(trunk * batch.attention_mask[..., None], trunk_of_rows(model, params, batch))
    rest = rl.policy.from_decoder(model, trunk_stacks=1, group_size=G)
    close(rest(params, dataclasses.replace(batch, trunk=trunk)), whole)


def trunk_of_rows(model, params, batch):
    return rl.policy.trunk(model, params, batch, 1) * batch.attention_mask[..., None]


@pytest.mark.parametrize("parts", [2, 4])
def test_micro_batches_of_whole_groups(parts):
    model = rl.models.Decoder(CONFIGS["wide heads"])
    batch, optimizer = batch_of(), optax.sgd(0.1)

    def after(size, parts):
        policy = rl.policy.from_decoder(model, group_size=size)
        step = rl.make_train_step(policy, loss, optimizer, micro_batches=parts, group_size=size)
        state = rl.init_train_state(model.init(jax.random.key(4)), optimizer)
        return step(state, batch)[0].params

    close(after(G, parts), after(1, 1))


@pytest.mark.long
@pytest.mark.parametrize("name", ["fsdp", "fsdp_tensor"])
def test_over_devices(name):
    model = rl.models.Decoder(CONFIGS["wide heads"])
    params, batch = model.init(jax.random.key(5)), batch_of(groups=8)
    expected = rl.policy.from_decoder(model)(params, batch)
    layout = sharding.get_layout(name)
    mesh = sharding.make_mesh(layout)
    where = sharding.tree_shardings(model.logical_axes(), params, layout, mesh)
    placed = dataclasses.replace(model, placement=sharding.activation_sharding(layout, mesh))
    policy = jax.jit(rl.policy.from_decoder(placed, group_size=G))
    rows = sharding.row_sharding(layout, mesh)
    actual = policy(jax.device_put(params, where), jax.device_put(batch, rows))
    close(*(jax.tree.map(lambda x: x * batch.mask, out) for out in (actual, expected)))


def test_fewer_operations():
    model = rl.models.Decoder(CONFIGS["wide heads"])

    def flops(size):
        policy = rl.policy.from_decoder(model, group_size=size, with_entropy=False)
        batch = batch_of(size=8)
        return jax.jit(policy).lower(model.shapes(), batch).compile().cost_analysis()["flops"]

    # .66 of the tokens, but as many at the head, and keys are filled up to whole blocks
    assert flops(8) < 0.8 * flops(1)


@pytest.mark.parametrize(
    "options, told",
    [
        (dict(group_size=5, split=START), "whole groups of 5"),
        (dict(group_size=0, split=START), "whole groups of 0"),
        (dict(group_size=G), "split=0"),
        (dict(group_size=G, split=T), f"split={T}"),
        (dict(group_size=G, split=START, segment_ids=jnp.zeros((P * G, T), int)), "packed"),
    ],
)
def test_what_cannot_be_shared(options, told):
    model = rl.models.Decoder(CONFIGS["norms, narrow heads"])
    with pytest.raises(ValueError, match=told):
        model.hidden(model.init(jax.random.key(0)), batch_of().tokens, **options)


def test_kernels_know_no_shared_prompts():
    model = rl.models.Decoder(CONFIGS["norms, narrow heads"], attention="splash")
    params, tokens = model.shapes(), batch_of().tokens
    with pytest.raises(ValueError, match="attention='splash'"):
        model.hidden(params, tokens, split=START, group_size=G)


def test_micro_batches_that_split_groups():
    with pytest.raises(ValueError, match="6 rows a micro-batch are no whole groups of 4"):
        rl.train_step.split_rows(jnp.zeros(12), 2, 4)
    assert rl.train_step.split_rows(jnp.arange(8), 2, 2).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize("name", ["micro_batches", "group_size"])
def test_numbers_below_one(name):
    with pytest.raises(ValueError, match=f"{name}: expected an int ≥ 1, got 0"):
        rl.make_train_step(None, loss, optax.sgd(0.1), **{name: 0})

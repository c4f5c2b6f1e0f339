"""The value model: where its values stand, what reaches them, what learns."""

import dataclasses
import json
import shutil
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import rlhf_jax as rl
import sharding
from rlhf_jax import partition, policy

CLASSIFIER = Path(__file__).resolve().parents[1] / "data" / "adapters" / "classifier"
CONFIG = rl.models.DecoderConfig(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=2,
    tie_embeddings=False,
)  # fmt: skip
MODEL = rl.models.Decoder(CONFIG, stacks=(2, 1))
CRITIC = rl.models.ValueModel(MODEL)
START = 4


def make_batch(tokens, real, start=START, **changes):
    real = np.asarray(real)
    zeros = np.zeros(real.shape, np.float32)
    fields = dict(
        tokens=tokens,
        mask=real & (np.arange(real.shape[1]) >= start),
        attention_mask=real,
        group_ids=np.arange(len(real)),
        advantages=zeros,
        old_log_probs=zeros,
        sampler_log_probs=zeros,
    )
    return rl.Batch(**jax.tree.map(jnp.asarray, fields | changes), start=start)


@pytest.fixture(scope="module")
def body():
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(0.4 * rng.normal(size=x.shape), x.dtype)  # noqa: E731
    return jax.tree.map(draw, MODEL.shapes())


@pytest.fixture(scope="module")
def params(body):
    score = jnp.asarray(np.random.default_rng(1).normal(size=(1, 16)), jnp.float32)
    return {**CRITIC.init(body), "score": {"weight": score}}


@pytest.fixture(scope="module")
def batch():
    """Rows padded on both sides."""
    rng = np.random.default_rng(2)
    index = np.arange(10)
    real = (index >= np.array([[0], [3], [1], [2]])) & (index < np.array([[10], [10], [6], [8]]))
    return make_batch(rng.integers(0, 40, (4, 10)), real)


outputs = jax.jit(lambda params, batch: CRITIC.outputs(params, batch))


# where values stand


class Positions:
    """A model whose hidden state at column t says t + 1, and whose padding is NaN."""

    config = types.SimpleNamespace(hidden_size=2)

    def hidden(self, params, tokens, *, attention_mask, split, segment_ids):
        assert split == START and segment_ids is None
        index = jnp.arange(1.0, tokens.shape[1] + 1)
        states = jnp.stack(
            jnp.broadcast_arrays(index, params["one"] * jnp.ones(tokens.shape[1])), -1
        )
        return jnp.where(attention_mask[..., None], states, jnp.nan)


@pytest.mark.fault(6)
@pytest.mark.fault(60)
def test_values_stand_before_their_tokens():
    critic = rl.models.ValueModel(Positions())
    params = critic.init({"one": jnp.float32(1.0)})
    params["score"]["weight"] = jnp.array([[1.0, 0.5]])  # V after column t is t + 1.5
    real = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [0] * 7], bool)
    found = critic.outputs(params, make_batch(np.zeros((3, 7), int), real))
    assert found.values.tolist() == [
        [0, 0, 0, 3.5, 4.5, 5.5, 6.5],  # the first token has nothing before it
        [0, 1.5, 2.5, 3.5, 4.5, 0, 0],
        [0] * 7,
    ]
    assert found.bootstrap.tolist() == [7.5, 5.5, 0]
    assert found.values.dtype == found.bootstrap.dtype == jnp.float32
    grads = jax.grad(lambda p: jnp.sum(critic.values(p, make_batch(np.zeros((3, 7), int), real))))(
        params
    )
    assert grads["score"]["weight"].tolist() == [[3 + 4 + 5 + 6 + 1 + 2 + 3 + 4, 8]], "no NaN"


def test_a_value_knows_the_tokens_before_it_and_no_others(params, batch):
    plain = outputs(params, batch)
    for column in (5, 7):
        tokens = batch.tokens.at[0, column].add(1)
        other = outputs(params, dataclasses.replace(batch, tokens=tokens))
        same = plain.values[0] == other.values[0]
        assert same[: column + 1].all() and not same[column + 1]
        np.testing.assert_array_equal(plain.values[1:], other.values[1:])
        assert plain.bootstrap[0] != other.bootstrap[0]


def test_values_are_the_head_on_the_states_before(params, batch):
    hidden = jax.jit(MODEL.hidden)(
        params["body"], batch.tokens, attention_mask=batch.attention_mask
    )
    after = np.asarray(hidden, np.float64) @ np.asarray(params["score"]["weight"][0], np.float64)
    found = outputs(params, batch)
    for row, real in enumerate(np.asarray(batch.attention_mask)):
        columns = np.flatnonzero(real)
        want = [0.0, *after[row, columns[:-1]]]
        np.testing.assert_allclose(found.values[row, columns], want, atol=2e-5)
        np.testing.assert_allclose(found.bootstrap[row], after[row, columns[-1]], atol=2e-5)
        assert (found.values[row, ~real] == 0).all()


def test_bootstrap_is_what_gae_wants(params, batch):
    """A row that was cut: at γ = 1, λ = 1 its returns are the value after its last token."""
    found = outputs(params, batch)
    estimates = rl.advantages.gae(
        jnp.zeros_like(found.values), found.values, batch.mask, gae_lambda=1.0,
        truncation="bootstrap", bootstrap_value=found.bootstrap,
    )  # fmt: skip
    want = np.where(batch.mask, np.asarray(found.bootstrap)[:, None], 0)
    np.testing.assert_allclose(estimates.returns, want, atol=1e-5)


# what does not matter


def test_a_fresh_head_values_everything_at_exactly_0(body, batch):
    fresh = CRITIC.init(body)
    found = outputs(fresh, batch)
    assert (found.values == 0).all() and (found.bootstrap == 0).all()
    assert "head" not in fresh["body"]
    assert fresh["body"]["layers"] is body["layers"], "no copy of the body"


@pytest.mark.fault(9)
def test_padding_changes_nothing(params, batch):
    width = ((0, 0), (2, 3))
    padded = make_batch(
        jnp.pad(batch.tokens, width, constant_values=7),
        np.pad(batch.attention_mask, width),
        start=START + 2,
    )
    plain, found = outputs(params, batch), outputs(params, padded)
    np.testing.assert_allclose(found.values[:, 2:-3], plain.values, atol=2e-5)
    np.testing.assert_allclose(found.bootstrap, plain.bootstrap, atol=2e-5)
    assert (found.values[:, :2] == 0).all() and (found.values[:, -3:] == 0).all()


def test_a_shared_trunk_changes_nothing(params, batch):
    critic = dataclasses.replace(CRITIC, trunk_stacks=1)
    trunk = policy.trunk(MODEL, params["body"], batch, 1)
    found = jax.jit(critic.outputs)(params, dataclasses.replace(batch, trunk=trunk))
    plain = outputs(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, plain)
    with pytest.raises(ValueError, match=r"batch\.trunk: None, but trunk_stacks=1"):
        critic.values(params, batch)


@pytest.mark.parametrize("kind", ["Explicit", pytest.param("Auto", marks=pytest.mark.slow)])
def test_layouts_change_nothing(params, batch, kind):
    layout = sharding.get_layout("fsdp_tensor")
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType[kind],) * 2)
    shardings = sharding.tree_shardings(CRITIC.logical_axes(), params, layout, mesh)
    rows = jax.device_put(batch, sharding.row_sharding(layout, mesh))
    found = outputs(jax.device_put(params, shardings), rows)
    plain = outputs(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, plain)
    assert not found.values.sharding.is_fully_replicated, "rows stay split over the devices"


# what learns


def gradient(critic, params, batch, trainable):
    chosen, frozen = partition.split(params, trainable)

    @jax.jit
    def grad(chosen):
        def total(chosen):
            return jnp.sum(critic.values(partition.merge(chosen, frozen), batch) ** 2)

        return jax.grad(total)(chosen)

    return grad(chosen)


def largest(grads):
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return {partition.path_name(path): float(jnp.abs(leaf).max()) for path, leaf in leaves}


def test_the_gradient_reaches_head_and_top(params, batch):
    critic = dataclasses.replace(CRITIC, trunk_stacks=1)
    trunk = policy.trunk(MODEL, params["body"], batch, 1)
    chosen = "^score|^body/(layers/1|final_norm)"
    found = largest(gradient(critic, params, dataclasses.replace(batch, trunk=trunk), chosen))
    assert {"score/weight", "body/final_norm/scale", "body/layers/1/attn/q/weight"} <= set(found)
    assert not any(name.startswith(("body/layers/0", "body/embed")) for name in found)
    assert min(found.values()) > 1e-3, found


@pytest.mark.slow
def test_what_is_frozen_changes_nothing_of_the_rest(params, batch):
    whole = gradient(CRITIC, params, batch, ".*")
    assert min(largest(whole).values()) > 1e-3
    for trainable in ("^score", "^score|^body/(layers/1|final_norm)"):
        want, _ = partition.split(whole, trainable)
        found = gradient(CRITIC, params, batch, trainable)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, want
        )


@pytest.mark.slow
def test_the_step_learns_what_there_is_to_know(body):
    """Return: 1 where the first completion token is even. The variance explained goes to 1."""
    tokens = np.random.default_rng(0).integers(0, 40, (64, 10))
    returns = np.broadcast_to((tokens[:, START] % 2 == 0)[:, None], tokens.shape).astype(np.float32)
    extra = {"returns": jnp.asarray(returns)}
    mask = np.arange(10) > START  # a value stands before its token: it has seen the first one
    batch = make_batch(
        tokens, np.ones(tokens.shape, bool), extra=extra, mask=np.broadcast_to(mask, tokens.shape)
    )

    def loss(values, batch):
        return rl.losses.value_loss(values, None, batch.extra["returns"], batch.mask, clip=None)

    optimizer = optax.adam(1e-2)
    state = rl.init_train_state(CRITIC.init(body), optimizer)
    step = rl.make_train_step(CRITIC.values, loss, optimizer)
    explained = []
    for _ in range(150):
        state, metrics = step(state, batch)
        explained.append(rl.metrics.compute(metrics)["value/explained_variance"])
    assert explained[0] == pytest.approx(0, abs=1e-6)
    assert explained[-1] > 0.9


# Hugging Face sequence classifiers


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(CLASSIFIER, tmp_path / "classifier"))


@pytest.mark.fault(60)
@pytest.mark.parametrize("stacks", [None, pytest.param((1, 1), marks=pytest.mark.slow)])
def test_a_sequence_classifier_gives_its_reference_scores(stacks):
    critic, params = rl.models.load_value_model(CLASSIFIER, stacks=stacks)
    data = np.load(CLASSIFIER / "golden.npz")
    mask = data["mask"]
    found = jax.jit(critic.outputs)(params, make_batch(data["tokens"], mask, start=0))
    np.testing.assert_allclose(found.bootstrap, data["scores"], atol=1e-4)
    np.testing.assert_allclose(
        found.values[:, 1:], np.where(mask, data["states"], 0)[:, :-1] * mask[:, 1:], atol=1e-4
    )
    assert partition.count(critic.init(params["body"])) == partition.count(params)


@pytest.mark.fault(61)
def test_what_is_no_classifier_of_one_label_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    wide = {**tensors, "score.weight": np.ones((2, 32), np.float32)}
    save_file(wide, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"score.weight: file \[2, 32\], expected \[1, 32\]"):
        rl.models.load_value_model(folder)
    save_file({**tensors, "score.bias": np.ones(1, np.float32)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"extra score.bias \[1\]"):
        rl.models.load_value_model(folder)
    del tensors["score.weight"], tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing score.weight \[1, 32\]"):
        rl.models.load_value_model(folder)
    save_file({**tensors, "score.weight": wide["score.weight"][:1]}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing model.norm.weight \[32\]"):
        rl.models.load_value_model(folder)
    config = json.loads((folder / "config.json").read_text())
    for name in ("LlamaForCausalLM", "MambaForSequenceClassification"):
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        with pytest.raises(ValueError, match=r"config: architectures='(Llama|Mamba)For"):
            rl.models.load_value_model(folder)

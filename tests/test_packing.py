"""Packed rows: every token once, and losses, values and gradients as in rows of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlhf_jax as rl
from rlhf_jax.packing import pack, plan, unpack

T, START, VOCAB = 20, 6, 48


def _rows(lengths):
    """The attention mask of rows whose padding is on either side."""
    lengths = np.asarray(lengths)
    left = np.arange(len(lengths)) % 2 == 0
    column, size = np.arange(T), lengths[:, None]
    return np.where(left[:, None], column >= T - size, column < size)


@given(st.lists(st.integers(0, T), min_size=1, max_size=40), st.integers(T, 40))
def test_every_real_token_is_packed_once_and_in_order(lengths, width):
    real = _rows(lengths)
    if not real.any():
        return
    packing = plan(real, width)
    valid = packing.segment_ids >= 0
    row, col = packing.source_row[valid], packing.source_col[valid]
    places, counts = np.unique(row * T + col, return_counts=True)
    np.testing.assert_array_equal(places, np.flatnonzero(real))
    assert counts.max() == 1
    # A segment is one source row's run of columns, and padding ends a row.
    same = (packing.segment_ids[:, 1:] == packing.segment_ids[:, :-1]) & valid[:, 1:]
    assert (np.diff(packing.source_row, axis=1)[same] == 0).all()
    assert (np.diff(packing.source_col, axis=1)[same] == 1).all()
    assert (valid[:, :-1] >= valid[:, 1:]).all()
    # Two rows that are both less than half full would have gone into one.
    assert (valid.sum(axis=1) * 2 <= width).sum() <= 1


def test_the_longest_come_first_and_rows_are_filled():
    packing = plan(_rows([4, 20, 6, 10, 10]), 20)
    assert packing.source_row[:, 0].tolist() == [1, 3, 2]
    assert (packing.segment_ids >= 0).sum(axis=1).tolist() == [20, 20, 10]
    assert packing.segment_ids[1].tolist() == [0] * 10 + [1] * 10


def test_rows_have_the_shape_that_was_asked_for():
    real = _rows([20, 20, 5])
    assert plan(real, 20, multiple=4).source_row.shape == (4, 20)
    assert plan(real, 20, multiple=3).source_row.shape == (3, 20)
    packing = plan(real, 32, rows=8)
    assert packing.segment_ids.shape == (8, 32)
    assert (packing.segment_ids[3:] == -1).all()


def test_sequences_without_a_sampled_token_can_be_left_out():
    real = _rows([20, 7, 12])
    mask = real & np.array([[True], [False], [True]])
    packing = plan(real, 20, mask=mask)
    assert set(packing.source_row[packing.segment_ids >= 0]) == {0, 2}
    assert not unpack(jnp.ones(packing.segment_ids.shape), packing)[1].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(width=11), r"width: got 11, but row 1 has 15 real tokens \(2 rows are too long\)"),
        (dict(width=0), "width: got 0"),
        (dict(width=20, multiple=0), "multiple: got 0"),
        (dict(width=20, rows=1), "rows: got 1, but the sequences fill 2 rows of width 20"),
        (dict(width=20, mask=np.zeros((3, T), bool)), "attention_mask: no row has a token"),
        (dict(width=20, mask=np.zeros((2, T), bool)), "mask"),
    ],
)
def test_what_cannot_be_packed_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        plan(_rows([3, 15, 12]), **change)
    with pytest.raises(TypeError, match="attention_mask"):
        plan(np.ones((1, 2)), 3)


# ---- batches ----


def _batch(rows=8, seed=0, **changes):
    """Left-padded prompts, ragged completions, one of them empty."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(1, START + 1, rows)
    lengths = np.append(rng.integers(1, T - START + 1, rows - 1), 0)
    column = np.arange(T)
    mask = (column >= START) & (column < START + lengths[:, None])
    prompt = (column < START) & (column >= START - prompts[:, None])
    per_token = rng.normal(size=(3, rows, T)).astype(np.float32)
    fields = dict(
        tokens=rng.integers(1, VOCAB, (rows, T)),
        mask=mask,
        attention_mask=mask | prompt,
        group_ids=np.repeat(np.arange(rows // 2), 2),
        advantages=rng.normal(size=rows).astype(np.float32),
        old_log_probs=per_token[0] - 3,
        sampler_log_probs=per_token[1] - 3,
        ref_log_probs=per_token[2] - 3,
        denominator=np.full(rows, mask.sum(), np.float32),
        extra=dict(values=per_token[0], score=per_token[0, :, 0], pair=per_token[0, :, :2]),
    )
    arrays = {k: jax.tree.map(jnp.asarray, v) for k, v in (fields | changes).items()}
    return rl.Batch(**arrays, start=START)


def test_arrays_of_a_batch_move_together():
    batch = _batch()
    packing = plan(batch.attention_mask, 24, rows=8)
    packed = pack(batch, packing)
    assert packed.start == 0
    valid = packing.segment_ids >= 0
    place = packing.source_row[valid], packing.source_col[valid]
    for name in ("tokens", "mask", "old_log_probs", "ref_log_probs", "sampler_log_probs"):
        np.testing.assert_array_equal(getattr(packed, name)[valid], getattr(batch, name)[place])
    for name in ("advantages", "group_ids", "denominator"):
        np.testing.assert_array_equal(getattr(packed, name)[valid], getattr(batch, name)[place[0]])
    np.testing.assert_array_equal(packed.extra["values"][valid], batch.extra["values"][place])
    np.testing.assert_array_equal(packed.extra["score"][valid], batch.extra["score"][place[0]])
    assert packed.extra["pair"].shape == (8, 24, 2)
    padding = jax.tree.map(lambda x: x[~valid], packed)
    assert not padding.mask.any() and not padding.attention_mask.any()
    assert (padding.denominator == 1).all() and (padding.group_ids == -1).all()
    assert (padding.advantages == 0).all()


def test_a_batch_packed_by_a_strange_plan_is_an_error():
    batch = _batch()
    packing = plan(batch.attention_mask, 24)
    with pytest.raises(ValueError, match="packed already"):
        pack(pack(batch, packing), packing)
    with pytest.raises(ValueError, match=r"planned for rows \(8, 20\), the batch has \(4, 20\)"):
        pack(_batch(rows=4), packing)
    with pytest.raises(ValueError, match=r"x must have shape \[5, 24\]"):
        unpack(jnp.ones((8, 20)), packing)
    policy = rl.policy.from_apply(lambda params, tokens: params[tokens])
    with pytest.raises(ValueError, match=r"batch\.segment_ids"):
        policy(jnp.zeros((VOCAB, VOCAB)), pack(batch, packing))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_rows_are_packed_as_whole_ones(kind):
    batch = _batch()
    packing = plan(batch.attention_mask, 24, multiple=8)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    with jax.set_mesh(mesh):
        split = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
        found = pack(split, packing)
        back = unpack(found.old_log_probs, packing)
    jax.tree.map(np.testing.assert_array_equal, found, pack(batch, packing))
    expected = np.where(batch.attention_mask, batch.old_log_probs, 0.0)
    np.testing.assert_array_equal(back, expected)


@pytest.mark.fault(23)
@pytest.mark.parametrize("aggregation", rl.masked.AGGREGATIONS)
@pytest.mark.parametrize("counted", ["before", "after"])
def test_every_aggregation_is_that_of_the_unpacked_rows(aggregation, counted):
    batch = _batch()
    packing = plan(batch.attention_mask, 24)
    options: dict = dict(length=T - START) if aggregation == "fixed_length" else {}
    of_rows = rl.masked.denominator(batch.mask, aggregation, group_ids=batch.group_ids, **options)
    whole = jnp.broadcast_to(of_rows, (8,))
    packed = pack(dataclasses.replace(batch, denominator=whole), packing)
    total = packed.denominator
    if counted == "after":
        if aggregation == "fixed_length":  # which leaves the empty completion out
            whole = whole - (T - START)
        total = rl.masked.denominator(
            packed.mask,
            aggregation,
            group_ids=packed.group_ids,
            segment_ids=packed.segment_ids,
            **options,
        )

    def loss(batch, denominator):
        return rl.masked.aggregate(
            batch.old_log_probs,
            batch.mask,
            aggregation,
            denominator=denominator,
            segment_ids=batch.segment_ids,
        )

    np.testing.assert_allclose(loss(packed, total), loss(batch, whole), rtol=1e-6)


# ---- models ----


def _model(**options):
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        initializer_range=0.3,
    )
    return rl.models.Decoder(rl.models.DecoderConfig(**(sizes | options)))


MODELS = {
    "qwen3, windows": dict(
        architecture="Qwen3ForCausalLM", tie_embeddings=False, layer_windows=(5, 0)
    ),
    "llama": dict(num_kv_heads=1),
    "wide heads, summed in parts": dict(head_dim=32, num_heads=2),
    "qwen2, windows": dict(architecture="Qwen2ForCausalLM", layer_windows=(3, 4)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * bool(i)) for i, name in enumerate(MODELS)],
)
def test_log_probs_entropy_and_gradients_are_those_of_unpacked_rows(name):
    model = _model(**MODELS[name])
    params, batch = model.init(jax.random.key(0)), _batch()
    packing = plan(batch.attention_mask, 32, rows=4)
    policy = rl.policy.from_decoder(model, chunk_size=8)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(params, batch):
        out = policy(params, batch)
        advantages = jnp.where(batch.mask, _per_token(batch.advantages, batch), 0.0)
        terms = advantages * out.log_probs + 0.1 * out.entropy
        return jnp.sum(jnp.where(batch.mask, terms, 0.0))

    alone, packed = (loss_and_gradient(params, b) for b in (batch, pack(batch, packing)))
    np.testing.assert_allclose(packed[0], alone[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(packed[1]), jax.tree.leaves(alone[1]), strict=True):
        assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(b)


def _per_token(x, batch):
    return x if batch.segment_ids is not None else x[:, None]


def test_values_and_what_bootstraps_are_those_of_unpacked_rows():
    critic = rl.models.ValueModel(_model(num_layers=1))
    batch = _batch()
    params = critic.init(critic.model.init(jax.random.key(0)))
    params["score"]["weight"] = jax.random.normal(jax.random.key(1), (1, 32))
    packing = plan(batch.attention_mask, 32, rows=4)
    outputs = jax.jit(critic.outputs)
    alone, packed = outputs(params, batch), outputs(params, pack(batch, packing))
    np.testing.assert_allclose(unpack(packed.values, packing), alone.values, atol=1e-5)
    after = np.where(batch.attention_mask, alone.bootstrap[:, None], 0.0)
    np.testing.assert_allclose(unpack(packed.bootstrap, packing), after, atol=1e-5)
    assert np.abs(after).max() > 0.1


def test_a_sequence_begins_with_log_prob_0_whatever_stands_before_it():
    model = _model(num_layers=1)
    real = np.ones((2, T), bool)
    batch = _batch(rows=2, attention_mask=real, mask=real)
    packed = pack(batch, plan(real, 2 * T))
    out = jax.jit(rl.policy.from_decoder(model))(model.init(jax.random.key(0)), packed)
    assert out.log_probs[0, [0, T]].tolist() == [0.0, 0.0]
    assert out.entropy[0, [0, T]].tolist() == [0.0, 0.0]
    assert (out.log_probs[0, 1:T] < 0).all() and (out.log_probs[0, T + 1 :] < 0).all()

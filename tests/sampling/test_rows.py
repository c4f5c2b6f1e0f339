"""The shared step: rows at steps of their own, forced tokens, versions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from rlhf_jax.sampling import Prompts, SamplingOptions, advance, draw_next, start

CONFIG = rl.models.DecoderConfig(
    vocab_size=30, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2
)
MODEL = rl.models.Decoder(CONFIG)
ROOM = 8


def prepared(steps_of_their_own, stop_ids=()):
    params = MODEL.init(jax.random.key(0))
    tokens = jnp.array([[1, 2, 3], [4, 5, 6], [0, 7, 8]])
    prompts = Prompts(tokens, jnp.array([[True] * 3, [True] * 3, [False, True, True]]))
    options = SamplingOptions.make(max_new_tokens=ROOM, stop_ids=stop_ids)
    keys = rl.sampling.row_keys(jax.random.key(1), jnp.arange(3), 1)
    hidden, prefix = MODEL.prefill(params, *prompts)
    cache = MODEL.init_cache(prefix, group_size=1, max_new_tokens=ROOM)
    rows = start(keys, cache, options, ROOM)
    if steps_of_their_own:
        rows = dataclasses.replace(rows, step=jnp.zeros((3, 1), jnp.int32))
    return params, prompts, options, keys, rows, MODEL.project(params, hidden)[:, None]


def run(rows, params, prompts, options, keys, logits, **more):
    rows = draw_next(rows, logits, keys, options, prompts, **more)
    step = jax.jit(advance, static_argnums=0)
    for _ in range(ROOM - 1):
        rows = step(MODEL, params, rows, keys, options, prompts, **more)
    return rows


@pytest.mark.long
@pytest.mark.parametrize(
    "stop_ids", [pytest.param((), marks=pytest.mark.slow), tuple(range(0, 30, 4))]
)
def test_a_scalar_step_and_a_step_per_row_agree(stop_ids):
    params, prompts, options, keys, rows, logits = prepared(False, stop_ids)
    scalar = run(rows, params, prompts, options, keys, logits)
    _, _, _, _, rows, _ = prepared(True, stop_ids)
    own = run(rows, params, prompts, options, keys, logits)
    for name in ("tokens", "lengths", "terminated", "done"):
        assert (getattr(scalar, name) == getattr(own, name)).all(), name
    np.testing.assert_allclose(scalar.log_probs, own.log_probs, atol=5e-6)
    assert (own.step == own.lengths).all()


@pytest.mark.long
@pytest.mark.fault(12)
def test_forced_tokens_are_written_but_never_trained_on():
    params, prompts, options, keys, rows, logits = prepared(True, stop_ids=(9,))
    forced = np.full((3, 1, ROOM), -1, np.int32)
    forced[0, 0, 2:4] = [9, 11]  # a stop id that was not sampled ends nothing
    forced[1, 0, 0] = 5
    rows = dataclasses.replace(
        rows,
        forced=jnp.asarray(forced),
        mask=jnp.zeros((3, 1, ROOM), bool),
        versions=jnp.zeros((3, 1, ROOM), jnp.int32),
    )
    rows = run(rows, params, prompts, options, keys, logits, version=jnp.int32(3))
    tokens, mask = np.asarray(rows.tokens)[:, 0], np.asarray(rows.mask)[:, 0]
    assert tokens[0, 2:4].tolist() == [9, 11] and tokens[1, 0] == 5
    there = np.arange(ROOM) < np.asarray(rows.lengths)
    assert (mask == (there & (forced[:, 0] < 0))).all()
    assert (np.asarray(rows.log_probs)[:, 0][~mask] == 0).all()
    assert (np.asarray(rows.versions)[:, 0] == np.where(there, 3, 0)).all()

    # what follows is drawn from the model that has read them
    whole = jnp.concatenate([prompts.tokens, rows.tokens[:, 0]], axis=1)
    valid = jnp.concatenate([prompts.mask, jnp.asarray(there)], axis=1)
    expected = rl.logprobs.token_log_probs(
        MODEL.logits(params, whole, attention_mask=valid), whole
    )[:, 3:]
    np.testing.assert_allclose(
        np.asarray(rows.log_probs)[:, 0][mask], np.asarray(expected)[mask], atol=1e-5
    )

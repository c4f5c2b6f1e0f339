import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl


def _chi_square(draws, probs):
    """Pearson's statistic over the tokens with an expected count of at least 5."""
    expected = probs * len(draws)
    keep = expected >= 5
    counts = np.bincount(draws, minlength=len(probs))
    return ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum(), keep.sum() - 1


@pytest.mark.parametrize("vocab", [3, 256, 257, 1000])
def test_draws_have_the_softmax_frequencies(vocab):
    logits = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 2
    uniforms = jax.random.uniform(jax.random.key(vocab), (100_000, 2))
    draws = np.asarray(
        jax.jit(jax.vmap(lambda u: rl.sampling.categorical(jnp.asarray(logits), u)))(uniforms)
    )
    probs = np.exp(logits - logits.max()).astype(np.float64)
    statistic, freedom = _chi_square(draws, probs / probs.sum())
    # Mean of chi-square is its degrees of freedom, its standard deviation sqrt(2·freedom).
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def test_forbidden_tokens_are_never_drawn_even_at_the_edges():
    logits = np.full(600, rl.sampling.NEG_INF, np.float32)
    logits[[0, 255, 256, 599]] = 0.0
    edge = np.nextafter(np.float32(1), np.float32(0))
    uniforms = jnp.array([[a, b] for a in (0.0, 0.25, 0.5, edge) for b in (0.0, 0.5, edge)])
    draws = jax.vmap(lambda u: rl.sampling.categorical(jnp.asarray(logits), u))(uniforms)
    assert set(np.asarray(draws).tolist()) <= {0, 255, 256, 599}
    assert len(set(np.asarray(draws).tolist())) == 4


def test_one_hot_distribution_is_certain():
    logits = jnp.full((50, 1000), rl.sampling.NEG_INF).at[:, 777].set(3.0)
    draws = rl.sampling.categorical(logits, jax.random.uniform(jax.random.key(0), (50, 2)))
    assert (np.asarray(draws) == 777).all()


def test_row_keys_depend_on_prompt_id_and_number_alone():
    data = lambda keys: np.asarray(jax.random.key_data(keys))  # noqa: E731
    key = jax.random.key(3)
    both = rl.sampling.row_keys(key, jnp.array([7, 2]), 4)
    alone = rl.sampling.row_keys(key, jnp.array([2]), 3)
    assert (data(both)[1, :3] == data(alone)[0]).all()
    assert len(np.unique(data(both).reshape(-1, 2), axis=0)) == 8


def test_every_token_has_uniforms_of_its_own():
    keys = rl.sampling.row_keys(jax.random.key(0), jnp.arange(2), 3)
    found = np.stack([rl.sampling.token_key_uniforms(keys, step) for step in range(50)])
    assert found.shape == (50, 2, 3, 2)
    assert (found >= 0).all() and (found < 1).all()
    assert len(np.unique(found)) == found.size

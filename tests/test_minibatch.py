"""Minibatches: every row once an epoch, groups whole, the key decides, denominators anew."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl
from rlhf_jax import minibatch


@pytest.mark.parametrize(
    "rows, parts, group_size", [(24, 1, 1), (24, 4, 1), (24, 4, 3), (24, 8, 3)]
)
def test_every_row_once_an_epoch_and_groups_whole(rows, parts, group_size):
    index = minibatch.shuffle(jax.random.key(3), rows=rows, parts=parts, group_size=group_size)
    assert index.shape == (parts, rows // parts) and index.dtype == jnp.int32
    np.testing.assert_array_equal(np.sort(np.ravel(index)), np.arange(rows))
    groups = np.asarray(index).reshape(-1, group_size)
    np.testing.assert_array_equal(groups, groups[:, :1] + np.arange(group_size))
    np.testing.assert_array_equal(groups[:, 0] % group_size, 0)


def test_the_key_alone_decides_the_order():
    def order(seed):
        return minibatch.shuffle(jax.random.key(seed), rows=32, parts=4, group_size=2)

    np.testing.assert_array_equal(order(1), order(1))
    assert not np.array_equal(order(1), order(2))


def test_without_groups_neighbours_part():
    index = np.ravel(minibatch.shuffle(jax.random.key(0), rows=64, parts=4))
    assert np.mean(np.diff(index) == 1) < 0.2


@pytest.mark.parametrize(
    "options, says",
    [
        (dict(rows=10, parts=4), "parts: 4 does not divide 10 rows"),
        (dict(rows=12, parts=4, group_size=2), "3 rows a minibatch are no whole groups of 2"),
        (dict(rows=12, parts=0), "parts"),
        (dict(rows=12, parts=2, group_size=0), "group_size"),
    ],
)
def test_shuffle_says_what_does_not_fit(options, says):
    with pytest.raises(ValueError, match=says):
        minibatch.shuffle(jax.random.key(0), **options)


def batch(rows=6, width=4):
    rng = np.random.default_rng(0)
    lengths = jnp.array([1, 4, 2, 3, 4, 1][:rows])
    mask = rl.masked.from_lengths(lengths, width)
    log_probs = jnp.asarray(-rng.random((rows, width)), jnp.float32)
    return rl.Batch(
        tokens=jnp.arange(rows * width).reshape(rows, width),
        mask=mask,
        attention_mask=mask,
        group_ids=jnp.arange(rows) // 2,
        advantages=jnp.asarray(rng.normal(size=rows), jnp.float32),
        old_log_probs=log_probs,
        sampler_log_probs=log_probs,
        extra={"returns": jnp.arange(rows, dtype=jnp.float32)},
        start=1,
    )


def test_take_keeps_the_arrays_of_a_row_together():
    whole, index = batch(), jnp.array([4, 1, 3])
    part = minibatch.take(whole, index)
    assert part.start == whole.start and part.ref_log_probs is None
    np.testing.assert_array_equal(part.tokens, whole.tokens[index])
    np.testing.assert_array_equal(part.mask, whole.mask[index])
    np.testing.assert_array_equal(part.extra["returns"], index)
    with pytest.raises(TypeError, match="index"):
        minibatch.take(whole, jnp.array([0.0]))


@pytest.mark.parametrize("aggregation", rl.masked.AGGREGATIONS)
def test_a_minibatch_is_the_whole_batch_of_its_update(aggregation):
    """The loss with the counted denominator is that of the rows by themselves."""
    length = 4 if aggregation == "fixed_length" else None
    part = minibatch.take(batch(), jnp.array([0, 1, 4, 5]))
    part = minibatch.counted(part, aggregation, length=length)
    assert part.denominator.shape == (4,)
    options = dict(length=length)
    if aggregation == "prompt_mean":
        options["group_ids"] = part.group_ids
    losses = part.old_log_probs * part.advantages[:, None]
    alone = rl.masked.aggregate(losses, part.mask, aggregation, **options)
    counted = rl.masked.aggregate(losses, part.mask, aggregation, denominator=part.denominator)
    np.testing.assert_allclose(counted, alone, rtol=1e-6)


def test_epochs_of_shuffled_minibatches_are_one_program():
    compiled = []

    @jax.jit
    def update(part):
        compiled.append(1)
        return part.advantages.sum()

    whole, total = batch(), 0.0
    for epoch in range(3):
        for index in minibatch.shuffle(jax.random.key(epoch), rows=6, parts=3, group_size=2):
            total += float(update(minibatch.take(whole, index)))
    np.testing.assert_allclose(total, 3 * float(whole.advantages.sum()), rtol=1e-5)
    assert len(compiled) == 1

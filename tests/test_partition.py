import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlhf_jax as rl


@pytest.fixture
def tree():
    return {"embed": jnp.ones((3, 2)), "layers": ({"w": jnp.ones(2)}, {"w": jnp.zeros(2)})}


def test_split_and_merge_are_inverse(tree):
    trainable, frozen = rl.partition.split(tree, r"layers/1")
    assert rl.partition.count(trainable) == 2
    assert rl.partition.count(frozen) == 8
    merged = rl.partition.merge(trainable, frozen)
    assert jax.tree.structure(merged) == jax.tree.structure(tree)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all(), merged, tree)))


def test_split_by_function_sees_path_and_leaf(tree):
    trainable, _ = rl.partition.split(tree, lambda path, leaf: leaf.ndim == 2)
    assert rl.partition.count(trainable) == 6


def test_nothing_trainable_is_an_error_that_shows_paths(tree):
    with pytest.raises(ValueError, match="layers/0/w"):
        rl.partition.split(tree, "decoder")


@pytest.mark.fault(50)
def test_a_copy_outlives_the_donation_of_the_original():
    params = {"w": jnp.arange(4.0)}
    reference = rl.partition.copy(params)
    step = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    step(params)
    assert np.asarray(reference["w"]).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_copy_keeps_the_sharding():
    from sharding import get_layout, make_mesh, row_sharding

    layout = get_layout("fsdp")
    sharding = row_sharding(layout, make_mesh(layout))
    array = jax.device_put(jnp.arange(16.0), sharding)
    assert rl.partition.copy({"w": array})["w"].sharding == sharding


def test_sizes_and_paths(tree):
    assert rl.partition.count(tree) == 10
    assert rl.partition.nbytes(tree) == 40
    paths = [p for p, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    names = [rl.partition.path_name(path) for path in paths]
    assert names == ["embed", "layers/0/w", "layers/1/w"]


def test_labels_take_the_first_rule_that_matches(tree):
    rules = {r"layers/\d+/w": "slow", "layers": "never", "embed": "fast"}
    with pytest.raises(ValueError, match=r"'head' matches none of the 3 parameters.*layers/0/w"):
        rl.partition.labels(tree, {"head": "fast"}, default="slow")
    found = rl.partition.labels(tree, rules)
    assert found == {"embed": "fast", "layers": ({"w": "slow"}, {"w": "slow"})}
    with pytest.raises(ValueError, match=r"no expression matches 'embed' \(1 of 3"):
        rl.partition.labels(tree, {"layers": "slow"})
    trainable, _ = rl.partition.split(tree, "layers/1")
    assert rl.partition.labels(trainable, {}, default="all") == {
        "embed": None,
        "layers": ({"w": None}, {"w": "all"}),
    }

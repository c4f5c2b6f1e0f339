import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharding

AXES = {"w": ("mlp", "embed"), "b": ("mlp",), "frozen": None, "key": ()}


def tree():
    w = jnp.arange(16 * 32.0).reshape(16, 32)
    return {"w": w, "b": jnp.arange(16.0), "frozen": None, "key": jax.random.key(3)}


def places(name, devices=None, *, explicit=False):
    layout = sharding.get_layout(name)
    mesh = sharding.make_mesh(layout, devices, explicit=explicit)
    return sharding.tree_shardings(AXES, tree(), layout, mesh)


def buffers(x):
    return {(s.device, s.data.unsafe_buffer_pointer()) for s in x.addressable_shards}


def check(found, targets):
    for name, x in tree().items():
        if x is None:
            assert found[name] is None
        else:
            assert found[name].sharding == targets[name]
            plain = jax.random.key_data if name == "key" else np.asarray
            np.testing.assert_array_equal(plain(found[name]), plain(x))


def test_bytes_from_fsdp_to_tensor_by_hand():
    """w is [16, 32] float32: a device has 4 of the 32 columns, and wants 2 of the 16 rows.

    Of its 2 × 32 elements it held 2 × 4. b [16] was whole everywhere; its parts are there already.
    """
    placed = jax.device_put(tree(), places("fsdp"))
    found, moved = sharding.reshard(placed, targets := places("tensor"))
    check(found, targets)
    assert moved.total == 4 * 16 * 32 + 4 * 16 + 8
    assert moved.received == {device.id: 4 * 2 * (32 - 4) for device in jax.devices()}
    assert str(moved) == "2,120 bytes laid out anew: 1,792 received, at most 224 by one device"


@pytest.mark.parametrize(
    ("source", "target", "received"),
    [
        ("fsdp", "fsdp", [0] * 8),
        ("fsdp", "dp", [2048 - 256] * 8),
        ("dp", "fsdp_tensor", [0] * 8),
        ("fsdp", "single", [2048 - 256]),
        # all but what it holds; the key as well, which has 8 bytes
        ("single", "dp", [0] + [2048 + 64 + 8] * 7),
    ],
)
def test_bytes_by_hand(source, target, received):
    placed = jax.device_put(tree(), places(source))
    found, moved = sharding.reshard(placed, targets := places(target))
    check(found, targets)
    assert list(moved.received.values()) == received


@pytest.mark.parametrize("explicit", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("donate", [False, True])
def test_auto_and_explicit_meshes(explicit, donate):
    first, second = explicit
    placed = sharding.reshard(tree(), places("fsdp_tensor", explicit=first))[0]
    found, _ = sharding.reshard(placed, to := places("sequence", explicit=second), donate=donate)
    check(found, to)


MOVES = [
    ("fsdp", "fsdp"),
    ("fsdp", "tensor"),
    ("fsdp", "dp"),
    ("dp", "sequence"),
    ("single", "single"),
    ("single", "dp"),
    ("dp", "single"),
]


@pytest.mark.fault(57)
@pytest.mark.parametrize(("source", "target"), MOVES)
def test_the_result_outlives_a_donation_of_the_source(source, target):
    placed = jax.tree.map(jnp.copy, jax.device_put(tree(), places(source)))
    found, _ = sharding.reshard(placed, targets := places(target))
    for name in ("w", "b"):
        assert not buffers(placed[name]) & buffers(found[name])
    again = functools.partial(jax.tree.map, lambda x: x if x.ndim == 0 else x + 1)
    jax.block_until_ready(jax.jit(again, donate_argnums=0)(placed))
    assert placed["w"].is_deleted()
    check(found, targets)


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_donated_arrays_are_handed_on_or_deleted(source, target):
    placed = jax.tree.map(jnp.copy, jax.device_put(tree(), places(source)))
    before = buffers(placed["w"])
    stays = placed["w"].sharding.is_equivalent_to(places(target)["w"], 2)
    found, _ = sharding.reshard(placed, targets := places(target), donate=True)
    check(found, targets)
    assert placed["w"].is_deleted() != stays
    assert not stays or before == buffers(found["w"])


def test_memory_is_used_again_where_it_is_as_large():
    placed = jax.tree.map(jnp.copy, jax.device_put(tree(), places("fsdp")))
    before = buffers(placed["w"])
    found, _ = sharding.reshard(placed, places("tensor"), donate=True)
    assert buffers(found["w"]) & before


@pytest.mark.parametrize("target", ["fsdp", "tensor", "single"])
def test_an_array_in_two_leaves_is_not_given_up(target):
    """Tied weights: their buffer can be donated once only, and either leaf may still need it."""
    tied, other = jax.device_put((tree()["w"], tree()["w"] + 1), places("fsdp")["w"])
    there = places(target)["w"]
    found, _ = sharding.reshard({"a": tied, "b": tied, "c": other}, there, donate=True)
    np.testing.assert_array_equal(found["a"], tied)
    np.testing.assert_array_equal(found["b"], tied)
    np.testing.assert_array_equal(found["c"], tied + 1)
    assert not buffers(found["a"]) & buffers(tied)
    assert other.is_deleted() or target == "fsdp"


def test_other_devices_and_another_order():
    w = tree()["w"]
    here = places("fsdp")["w"]
    placed = jax.device_put(w, here)
    backwards = sharding.make_mesh(sharding.get_layout("fsdp"), jax.devices()[::-1])
    found, moved = sharding.reshard(placed, where := jax.NamedSharding(backwards, here.spec))
    assert found.sharding == where
    np.testing.assert_array_equal(found, w)
    assert set(moved.received.values()) == {w.nbytes // 8}
    half = sharding.make_mesh(sharding.get_layout("fsdp"), jax.devices()[4:])
    found, moved = sharding.reshard(placed, jax.NamedSharding(half, here.spec))
    np.testing.assert_array_equal(found, w)
    # a quarter each; the last devices had the columns that the last of them wants: 28:32 of 24:32
    assert list(moved.received.values()) == [512, 512, 512, 256]


def test_numpy_arrays_are_copied():
    array = np.ones((8, 8), np.float32)
    found, moved = sharding.reshard(array, sharding_of := places("fsdp")["w"], donate=True)
    array[:] = 0
    assert found.sharding == sharding_of and float(found.sum()) == 64
    assert sum(moved.received.values()) == moved.total == 256


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"shardings: their structure .* is not the tree's"):
        sharding.reshard(tree(), {"w": places("fsdp")["w"]})
    with pytest.raises(ValueError, match=r"w: \(3, 9\) does not fit"):
        sharding.reshard({"w": jnp.ones((3, 9))}, places("fsdp")["w"])


def test_received_bytes_are_what_the_shards_lack():
    """Counted element by element, for layouts that no one would choose."""
    layouts = [sharding.get_layout(name) for name in ("hsdp", "sequence", "fsdp_tensor")]
    ids = jnp.arange(16 * 32).reshape(16, 32)
    for source in layouts:
        for target in layouts:
            a, b = (
                jax.NamedSharding(sharding.make_mesh(each), jax.P(*spec))
                for each, spec in (
                    (source, (source.axes[0][0], source.axes[1][0])),
                    (target, ((target.axes[1][0], target.axes[0][0]), None)),
                )
            )
            placed = jax.device_put(ids, a)
            found, moved = sharding.reshard(placed, b)
            held, has = (
                {
                    shard.device.id: set(np.ravel(shard.data).tolist())
                    for shard in x.addressable_shards
                }
                for x in (placed, found)
            )
            assert moved.received == {i: 4 * len(has[i] - held[i]) for i in has}

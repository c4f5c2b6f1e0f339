"""Meshes on one host, over slices that are not there, and on TPUs that are not there."""

import dataclasses
import importlib.util
import re

import jax
import numpy as np
import pytest

import sharding
from sharding.planner import targets


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a device as a mesh looks at."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "none"


def cluster(slices, each):
    return [Device(i, i // each) for i in range(slices * each)]


def where(mesh):
    """The slice of every place of a mesh."""
    return np.vectorize(lambda device: device.slice_index)(mesh.devices)


@pytest.mark.parametrize("explicit", [False, True])
def test_axes_are_auto_or_explicit(explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = sharding.make_mesh(sharding.get_layout("fsdp_tensor"), explicit=explicit)
    assert mesh.axis_types == (kind, kind)
    rows = jax.device_put(np.ones((8, 2)), sharding.row_sharding(sharding.get_layout("fsdp"), mesh))
    spec = jax.P("fsdp", None) if explicit else jax.P(None, None)
    assert jax.typeof(rows).sharding.spec == spec  # part of the type, or not


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("hsdp:slice=4", (4, 4)),
        ("fsdp_tensor:tensor=4", (4, 4)),
        ("sequence", (8, 2)),
        ("dp", (16,)),
        ("fsdp", (16,)),
    ],
)
def test_the_first_axis_of_rows_or_the_slice_axis_runs_over_slices(name, shape):
    mesh = sharding.make_mesh(sharding.get_layout(name), cluster(4, 4))
    assert mesh.devices.shape == shape
    assert len({device.id for device in mesh.devices.flat}) == 16
    # the leading axis in order of the slices, no other axis leaves one
    expected = np.repeat(np.arange(4), 4).reshape(shape)
    np.testing.assert_array_equal(where(mesh), expected)


def test_a_slice_axis_need_not_come_first():
    layout = sharding.Layout(
        name="inside", axes=(("fsdp", -1), ("slice", 2)), rules={}, rows=("fsdp", "slice")
    )
    mesh = sharding.make_mesh(layout, cluster(2, 4))
    np.testing.assert_array_equal(where(mesh), np.tile([0, 1], (4, 1)))


def test_devices_given_out_of_order_are_sorted_into_slices():
    mesh = sharding.make_mesh(sharding.get_layout("hsdp"), cluster(2, 4)[::-1])
    np.testing.assert_array_equal(where(mesh), [[0] * 4, [1] * 4])
    assert [device.id for device in mesh.devices.flat] == list(range(8))
    assert sharding.describe(mesh) == "slice=2, fsdp=4 (8 × none in 2 slices)"


def test_without_slices_a_slice_axis_is_an_axis_as_any():
    for devices in (cluster(1, 8), jax.devices()):
        mesh = sharding.make_mesh(sharding.get_layout("hsdp"), devices)
        assert dict(mesh.shape) == {"slice": 2, "fsdp": 4}
        assert list(mesh.devices.flat) == list(devices)


@pytest.mark.parametrize(
    ("name", "devices", "message"),
    [
        ("hsdp", cluster(4, 2), r"'slice' runs over the 4 slices .* size must be 4, not 2"),
        ("hsdp:slice=8", cluster(4, 2), r"'slice' runs over the 4 slices .* must be 4, not 8"),
        ("fsdp_tensor:tensor=4", cluster(4, 2), r"'fsdp' runs .* must be a multiple of 4, not 2"),
        ("tensor", cluster(2, 4), r"in 2 slices, and it has neither .*'hsdp' or 'fsdp_tensor'"),
        ("fsdp:fsdp=6", cluster(2, 4), r"its 6 devices lie unevenly in 2 slices \(4, 2\)"),
        ("hsdp:slice=3", cluster(2, 4), r"slice=3, fsdp=-1\) take 3 devices, .* the 8 at hand"),
        ("fsdp:fsdp=16", cluster(2, 4), r"fsdp=16\) take 16 devices, .* the 8 at hand"),
    ],
)
def test_what_does_not_fit_the_slices_is_named(name, devices, message):
    with pytest.raises(ValueError, match=rf"layout '{name.split(':')[0]}': .*{message}"):
        sharding.make_mesh(sharding.get_layout(name), devices)


@pytest.fixture
def tpu(monkeypatch):
    """The devices of a TPU that is not there."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # else a second process is turned away

    def devices(name, **options):
        from jax.experimental import topologies

        targets.devices_of("v5e:2x2")  # sets what libtpu asks for
        return list(topologies.get_topology_desc(name, "tpu", **options).devices)

    return devices


@pytest.mark.parametrize(
    ("topology", "name"),
    [
        ("v5e:4x4", "fsdp_tensor:tensor=4"),
        ("v5e:16x16", "fsdp_tensor:tensor=8"),
        ("v5p:4x4x4", "fsdp_tensor:tensor=4"),
        ("v5p:4x4x4", "fsdp_tensor:tensor=8"),  # no product of the torus's axes
        ("v6e:8x8", "fsdp_tensor:tensor=4"),
    ],
)
def test_neighbours_in_the_tensor_axis_are_neighbours_on_the_tpu(tpu, topology, name):
    devices = tpu(topology)
    mesh = sharding.make_mesh(sharding.get_layout(name), devices)
    assert set(mesh.devices.flat) == set(devices)
    for group in mesh.devices:
        # a whole box of the torus, as narrow as can be: no group is spread over the slice
        corners = np.array([device.coords for device in group])
        sides = corners.max(0) - corners.min(0) + 1
        assert np.prod(sides) == len(group), corners


def test_slices_of_a_tpu(tpu):
    devices = tpu("v5e:4x4", num_slices=2)
    mesh = sharding.make_mesh(sharding.get_layout("hsdp"), devices)
    np.testing.assert_array_equal(where(mesh), np.repeat([0, 1], 16).reshape(2, 16))
    assert re.fullmatch(
        r"slice=2, fsdp=16 \(32 × TPU v5 lite in 2 slices\)", sharding.describe(mesh)
    )
    tensors = sharding.make_mesh(sharding.get_layout("fsdp_tensor:tensor=8"), devices)
    assert all(len(set(group)) == 1 for group in where(tensors))


def test_weights_are_gathered_inside_a_slice(tpu):
    """The compiler's program for two slices: only a slice's 16 chips gather the weight."""
    layout = sharding.get_layout("hsdp")
    mesh = sharding.make_mesh(layout, tpu("v5e:4x4", num_slices=2))
    weight = jax.ShapeDtypeStruct((256, 256), "float32")
    at = sharding.tree_shardings(("mlp", "embed"), weight, layout, mesh)
    weight = jax.ShapeDtypeStruct((256, 256), "float32", sharding=at)
    rows = jax.ShapeDtypeStruct((64, 256), "float32", sharding=sharding.row_sharding(layout, mesh))

    def loss(w, x):
        return ((x @ w.T) ** 2).sum()

    text = jax.jit(jax.grad(loss), out_shardings=at).lower(weight, rows).compile().as_text()
    groups = re.findall(r" all-gather\(.*replica_groups=\{(.*?)\}\}?,", text)
    assert groups and all(len(group.strip("{}").split(",")) == 16 for group in groups)

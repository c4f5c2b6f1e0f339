import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

import sharding


def _mesh(name, **sizes):
    layout = sharding.get_layout(name)
    layout = layout.with_sizes(**sizes) if sizes else layout
    return layout, sharding.make_mesh(layout)


def test_every_layout_builds_a_mesh_on_eight_devices():
    shapes = {name: dict(_mesh(name)[1].shape) for name in sharding.LAYOUTS}
    assert shapes == {
        "single": {"data": 1},
        "dp": {"data": 8},
        "fsdp": {"fsdp": 8},
        "tensor": {"tensor": 8},
        "fsdp_tensor": {"fsdp": 4, "tensor": 2},
    }


def test_a_tree_is_laid_out_by_its_logical_axes():
    layout, mesh = _mesh("fsdp_tensor")
    axes = {"w": ("layers", "embed", "mlp"), "scale": (None,), "frozen": ("embed",)}
    tree = {"w": jnp.ones((3, 8, 4)), "scale": jnp.ones(5), "frozen": None}
    found = sharding.tree_shardings(axes, tree, layout, mesh)
    assert found["w"].spec == jax.P(None, "fsdp", "tensor")
    assert found["scale"].spec == jax.P(None)
    assert found["frozen"] is None
    placed = jax.device_put(tree, found)
    assert placed["w"].addressable_shards[0].data.shape == (3, 2, 2)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("dp", jax.P("data", None, None)),
        ("tensor", jax.P(None, None, "tensor")),
        ("fsdp_tensor", jax.P("fsdp", None, "tensor")),
    ],
)
def test_activations_lie_by_rows_and_heads(name, spec):
    layout, mesh = _mesh(name)
    where = sharding.activation_sharding(layout, mesh)
    assert where.is_equivalent_to(jax.NamedSharding(mesh, spec), 4)


def test_heads_stay_whole_where_key_heads_do():
    layout, mesh = _mesh("fsdp_tensor")
    rules = {axis: to for axis, to in layout.rules.items() if axis != "kv_heads"}
    where = sharding.activation_sharding(dataclasses.replace(layout, rules=rules), mesh)
    assert where.is_equivalent_to(jax.NamedSharding(mesh, jax.P("fsdp")), 4)


@pytest.mark.fault(54)
def test_a_size_that_does_not_divide_names_tensor_axis_size_and_remedy():
    layout, mesh = _mesh("tensor")
    with pytest.raises(ValueError, match=r"layers/q: axis 'heads' has size 9.*'tensor' of size 8"):
        sharding.tree_shardings(
            {"layers": {"q": ("embed", "heads")}}, {"layers": {"q": jnp.ones((4, 9))}}, layout, mesh
        )


@pytest.mark.fault(54)
def test_rows_that_do_not_divide_are_named():
    layout, mesh = _mesh("fsdp")
    sharding.check_rows(16, layout, mesh)
    with pytest.raises(ValueError, match="prompts: 6 do not divide over fsdp = 8"):
        sharding.check_rows(6, layout, mesh, name="prompts")


def test_two_axes_on_one_mesh_axis_are_refused():
    layout, mesh = _mesh("tensor")
    with pytest.raises(ValueError, match="two axes"):
        sharding.spec_for(("heads", "mlp"), (8, 8), layout, mesh, name="w")


def test_rank_mismatch_is_named():
    layout, mesh = _mesh("dp")
    with pytest.raises(ValueError, match="w: 1 logical axes"):
        sharding.spec_for(("embed",), (8, 8), layout, mesh, name="w")


@pytest.mark.parametrize("name", ["fsd", ""])
def test_unknown_layout_lists_the_known_ones(name):
    with pytest.raises(ValueError, match="known layouts: single, dp, fsdp"):
        sharding.get_layout(name)


def test_mesh_sizes_that_do_not_fit_the_devices():
    layout = sharding.get_layout("fsdp_tensor").with_sizes(tensor=3)
    with pytest.raises(ValueError, match=r"fsdp=-1, tensor=3.*does not divide the 8"):
        sharding.make_mesh(layout)
    with pytest.raises(ValueError, match="no mesh axis 'expert'"):
        layout.with_sizes(expert=2)


def test_fitted_leaves_out_the_heads_that_do_not_divide():
    layout, mesh = _mesh("tensor")
    few = types.SimpleNamespace(num_heads=16, num_kv_heads=4)
    found = sharding.fitted(layout, few, mesh)
    assert set(layout.rules) - set(found.rules) == {"kv_heads"}
    assert found.rules["heads"] == "tensor"
    many = types.SimpleNamespace(num_heads=16, num_kv_heads=8)
    assert sharding.fitted(layout, many, mesh) is layout

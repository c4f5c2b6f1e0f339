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
        "hsdp": {"slice": 2, "fsdp": 4},
        "sequence": {"fsdp": 4, "sequence": 2},
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
        ("hsdp", jax.P(("slice", "fsdp"))),
        ("sequence", jax.P("fsdp", "sequence")),
    ],
)
def test_activations_lie_by_rows_and_heads(name, spec):
    layout, mesh = _mesh(name)
    where = sharding.activation_sharding(layout, mesh)
    assert where.is_equivalent_to(jax.NamedSharding(mesh, spec), 4)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("dp", jax.P("data")),
        ("fsdp", jax.P(None, None, "fsdp")),
        ("tensor", jax.P()),
        ("fsdp_tensor", jax.P(None, None, "fsdp")),
        ("hsdp", jax.P("slice", None, "fsdp")),
        ("sequence", jax.P(None, None, ("fsdp", "sequence"))),
    ],
)
def test_a_decode_steps_states_lie_as_the_weights_width(name, spec):
    layout, mesh = _mesh(name)
    where = sharding.decode_sharding(layout, mesh)
    assert where.is_equivalent_to(jax.NamedSharding(mesh, spec), 3)


def test_heads_stay_whole_where_key_heads_do():
    layout, mesh = _mesh("fsdp_tensor")
    rules = {axis: to for axis, to in layout.rules.items() if axis != "kv_heads"}
    where = sharding.activation_sharding(dataclasses.replace(layout, rules=rules), mesh)
    assert where.is_equivalent_to(jax.NamedSharding(mesh, jax.P("fsdp")), 4)


def test_one_mesh_axis_cannot_split_heads_and_rows_of_an_activation():
    layout, mesh = _mesh("tensor")
    with pytest.raises(
        ValueError, match=r"'tensor' puts heads and rows on mesh axis 'tensor'; drop"
    ):
        sharding.activation_sharding(dataclasses.replace(layout, rows=("tensor",)), mesh)


def test_a_rule_may_name_several_mesh_axes():
    layout, mesh = _mesh("sequence")
    spec = sharding.spec_for(("mlp", "embed"), (3, 16), layout, mesh)
    assert spec == jax.P(None, ("fsdp", "sequence"))
    placed = jax.device_put(jnp.ones((3, 16)), jax.NamedSharding(mesh, spec))
    assert placed.addressable_shards[0].data.shape == (3, 2)
    with pytest.raises(
        ValueError, match=r"w: axis 'embed' has size 12.*'fsdp' × 'sequence' of size 8"
    ):
        sharding.spec_for(("embed",), (12,), layout, mesh, name="w")


def test_a_replica_lies_in_each_slice():
    layout, mesh = _mesh("hsdp")
    where = sharding.tree_shardings({"w": ("mlp", "embed")}, {"w": jnp.ones((2, 8))}, layout, mesh)
    placed = jax.device_put(jnp.arange(16.0).reshape(2, 8), where["w"])
    held = {shard.device: shard.data.tolist() for shard in placed.addressable_shards}
    first, second = mesh.devices
    assert [held[a] == held[b] for a, b in zip(first, second, strict=True)] == [True] * 4
    assert len({str(held[a]) for a in first}) == 4
    rows = jax.device_put(jnp.arange(8), sharding.row_sharding(layout, mesh))
    assert len({shard.data.item() for shard in rows.addressable_shards}) == 8


def test_a_layout_prints_as_a_table():
    assert str(sharding.get_layout("sequence")).splitlines() == [
        "sequence: fsdp=-1, sequence=2",
        "  rows    fsdp",
        "  tokens  sequence",
        "  embed   fsdp × sequence",
        "  others  whole",
    ]


def test_layouts_compare_by_what_they_say():
    layout = sharding.get_layout("fsdp")
    same = dataclasses.replace(layout, rules={"embed": ("fsdp",)}, rows="fsdp", tokens=[])
    assert same == layout and hash(same) == hash(layout)
    assert dataclasses.replace(layout, rules={}) != layout
    assert layout.with_sizes(fsdp=4) != layout
    mine = {"embed": "fsdp"}
    kept = dataclasses.replace(layout, rules=mine)
    mine["mlp"] = "fsdp"
    assert kept == layout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(axes=(("fdsp", -1),)), r"unknown mesh axis 'fdsp'; choose from: slice, data, fsdp"),
        (dict(axes=(("fsdp", 0),)), r"'fsdp' has size 0; give a positive number, or -1"),
        (dict(axes=(("fsdp", -2),)), r"'fsdp' has size -2"),
        (dict(axes=(("fsdp", 2.0),)), r"'fsdp' has size 2.0"),
        (dict(axes=(("fsdp", True),)), r"'fsdp' has size True"),
        (dict(axes=(("fsdp", -1), ("tensor", -1))), r"only one .* not fsdp and tensor"),
        (dict(axes=(("fsdp", 2), ("fsdp", 2))), r"named twice: fsdp, fsdp"),
        (dict(axes=()), r"no mesh axes"),
        (dict(rules={"heads": "tensor"}), r"rule for 'heads': no mesh axis 'tensor' .* has: fsdp"),
        (dict(rules={"embed": ("fsdp", "fsdp")}), r"rule for 'embed': .* twice: fsdp, fsdp"),
        (dict(rows=("data",)), r"rows: no mesh axis 'data'"),
        (dict(tokens=("sequence",)), r"tokens: no mesh axis 'sequence'"),
        (dict(tokens=("fsdp",)), r"rows and tokens are both split over fsdp"),
        (dict(name="a b"), r"letters, digits"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=rf"layout '.*': .*{message}"):
        dataclasses.replace(sharding.get_layout("fsdp"), **changes)


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


def test_rows_fewer_than_the_data_axis_are_named():
    layout, mesh = _mesh("hsdp")
    with pytest.raises(ValueError, match="rows: 4 do not divide over slice × fsdp = 8 devices"):
        sharding.check_rows(4, layout, mesh)


def test_tokens_that_do_not_divide_are_named():
    layout, mesh = _mesh("sequence")
    sharding.check_tokens(10, layout, mesh)
    with pytest.raises(
        ValueError, match=r"length: 9 do not divide over sequence = 2 .*multiple of 2"
    ):
        sharding.check_tokens(9, layout, mesh, name="length")


def test_two_axes_on_one_mesh_axis_are_refused():
    layout, mesh = _mesh("tensor")
    message = (
        r"w: layout 'tensor' puts two axes, 'heads' of size 8 and 'mlp' of size 16, on.*'tensor'"
    )
    with pytest.raises(ValueError, match=message):
        sharding.spec_for(("heads", "mlp"), (8, 16), layout, mesh, name="w")
    layout, mesh = _mesh("sequence")
    layout = dataclasses.replace(layout, rules={"embed": ("fsdp", "sequence"), "mlp": "sequence"})
    with pytest.raises(ValueError, match=r"on mesh axis 'sequence'; drop one"):
        sharding.spec_for(("embed", "mlp"), (8, 8), layout, mesh, name="w")


def test_an_unknown_axis_is_named_and_not_left_whole():
    layout, mesh = _mesh("fsdp")
    with pytest.raises(
        ValueError, match=r"w: unknown logical axis 'embd'; use one of layers, vocab"
    ):
        sharding.spec_for(("embd",), (8,), layout, mesh, name="w")
    for target, spec in (("fsdp", jax.P("fsdp")), ((), jax.P(None))):
        own = dataclasses.replace(layout, rules={"state": target})
        assert sharding.spec_for(("state",), (8,), own, mesh) == spec


def test_the_mesh_of_another_layout_is_named():
    with pytest.raises(ValueError, match=r"'tensor' splits over mesh axis 'tensor', .* only fsdp;"):
        sharding.spec_for(("heads",), (8,), sharding.get_layout("tensor"), _mesh("fsdp")[1])


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
    with pytest.raises(ValueError, match="'tensor' has size 0"):
        layout.with_sizes(tensor=0)


def test_fitted_leaves_out_the_heads_that_do_not_divide():
    layout, mesh = _mesh("tensor")
    few = types.SimpleNamespace(num_heads=16, num_kv_heads=4)
    found = sharding.fitted(layout, few, mesh)
    assert set(layout.rules) - set(found.rules) == {"kv_heads"}
    assert found.rules["heads"] == "tensor"
    many = types.SimpleNamespace(num_heads=16, num_kv_heads=8)
    assert sharding.fitted(layout, many, mesh) is layout

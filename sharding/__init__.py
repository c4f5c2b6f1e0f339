"""Sharding as data: meshes, logical-axis rules and named layouts.

Knows axis names and shapes; no model, no loss.

    from sharding import LAYOUTS, make_mesh, tree_shardings

    layout = LAYOUTS["fsdp"]
    mesh = make_mesh(layout)
    shardings = tree_shardings(model.logical_axes(), params, layout, mesh)
    params = jax.device_put(params, shardings)
    placement, decoding = activation_sharding(layout, mesh), decode_sharding(layout, mesh)
    model = dataclasses.replace(model, placement=placement, decode_placement=decoding)
"""

from sharding.files import get_layout, load_layouts, to_toml
from sharding.layouts import LAYOUTS, LOGICAL_AXES, MESH_AXES, Layout
from sharding.mesh import describe, make_mesh
from sharding.paths import axes_by_path
from sharding.reshard import Moved, reshard
from sharding.rules import (
    activation_sharding,
    check_rows,
    check_tokens,
    decode_sharding,
    fitted,
    row_sharding,
    spec_for,
    tree_shardings,
)

__all__ = [
    "LAYOUTS",
    "LOGICAL_AXES",
    "MESH_AXES",
    "Layout",
    "Moved",
    "activation_sharding",
    "axes_by_path",
    "check_rows",
    "check_tokens",
    "decode_sharding",
    "describe",
    "fitted",
    "get_layout",
    "load_layouts",
    "make_mesh",
    "reshard",
    "row_sharding",
    "spec_for",
    "to_toml",
    "tree_shardings",
]

"""Sharding as data: meshes, logical-axis rules and named layouts.

Knows axis names and shapes; no model, no loss.

    from sharding import LAYOUTS, make_mesh, tree_shardings

    layout = LAYOUTS["fsdp"]
    mesh = make_mesh(layout)
    shardings = tree_shardings(model.logical_axes(), params, layout, mesh)
    params = jax.device_put(params, shardings)
    model = dataclasses.replace(model, placement=activation_sharding(layout, mesh))
"""

from sharding.layouts import LAYOUTS, Layout, get_layout
from sharding.mesh import describe, make_mesh
from sharding.rules import (
    activation_sharding,
    check_rows,
    fitted,
    row_sharding,
    spec_for,
    tree_shardings,
)

__all__ = [
    "LAYOUTS",
    "Layout",
    "activation_sharding",
    "check_rows",
    "describe",
    "fitted",
    "get_layout",
    "make_mesh",
    "row_sharding",
    "spec_for",
    "tree_shardings",
]

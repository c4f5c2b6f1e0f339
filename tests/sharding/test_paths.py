import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import sharding


class Foreign(linen.Module):
    """A model that knows nothing of this library."""

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(64, 16, name="wte")(tokens)
        for i in range(2):
            h = linen.LayerNorm(name=f"h_{i}_ln")(x)
            x = x + linen.Dense(16, name=f"h_{i}_down")(
                linen.gelu(linen.Dense(32, name=f"h_{i}_up")(h))
            )
        return linen.Dense(64, name="head", use_bias=False)(x)


RULES = [
    ("wte/embedding$", ("vocab", "embed")),
    ("up/kernel$", ("embed", "mlp")),
    ("down/kernel$", ("mlp", "embed")),
    ("head/kernel$", ("embed", "vocab")),
    ("up/bias$", ("mlp",)),
    ("bias$|scale$", None),
]


def test_a_foreign_model_is_laid_out_and_computes_the_same():
    model, tokens = Foreign(), jnp.arange(24).reshape(8, 3)
    params = model.init(jax.random.key(0), tokens)
    layout = sharding.get_layout("fsdp_tensor")
    mesh = sharding.make_mesh(layout)
    axes = sharding.axes_by_path(params, RULES)
    assert axes["params"]["h_1_up"] == {"kernel": ("embed", "mlp"), "bias": ("mlp",)}
    assert axes["params"]["h_0_ln"] == {"scale": (None,), "bias": (None,)}
    placed = jax.device_put(params, sharding.tree_shardings(axes, params, layout, mesh))
    assert placed["params"]["h_0_down"]["kernel"].sharding.spec == jax.P("tensor", "fsdp")
    assert placed["params"]["wte"]["embedding"].addressable_shards[0].data.shape == (32, 4)
    rows = jax.device_put(tokens, sharding.row_sharding(layout, mesh))
    found, wanted = jax.jit(model.apply)(placed, rows), model.apply(params, tokens)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_the_first_rule_takes_a_leaf_and_none_stays_none():
    tree = {"a": jnp.ones(2), "b": (None, jnp.ones(2)), "c": jnp.float32(1)}
    axes = sharding.axes_by_path(tree, [("a", ("mlp",)), ("b/1", ("embed",)), (".", None)])
    assert axes == {"a": ("mlp",), "b": (None, ("embed",)), "c": ()}


SHAPES = {"a": {"w": jax.ShapeDtypeStruct((4, 2), "float32")}, "b": np.ones(3)}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("a", None)], r"no expression matches b \(3,\); add one"),
        ([("c", None), ("a|b", None)], r"'c' matches none of the 2 leaves; .*: a/w, b"),
        ([("a|b", None), ("b$", ("mlp",))], r"'b\$' only matches what expressions before it take"),
        (
            [("a", ("mlp",)), ("b", None)],
            r"a/w: rule 'a' names 1 axes .* for 2 dimensions \(4, 2\)",
        ),
        ([("(", None)], r"'\(' is no regular expression"),
    ],
)
def test_rules_that_do_not_fit(rules, message):
    with pytest.raises(ValueError, match=message):
        sharding.axes_by_path(SHAPES, rules)


def test_many_leaves_without_a_rule_are_counted():
    tree = {f"w{i:02}": np.ones(1) for i in range(11)}
    with pytest.raises(ValueError, match=r"w00 \(1,\), .*w07 \(1,\) and 3 more"):
        sharding.axes_by_path(tree, [])

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import rlhf_jax as rl

TOKENS = jnp.array([[1, 2, 3], [4, 5, 6]])


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(8, 4, rngs=rngs)
        self.head = nnx.Linear(4, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs, deterministic=True)

    def __call__(self, tokens, scale=1.0):
        return scale * self.head(self.drop(self.embed(tokens)))


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, tokens, scale=1.0):
        return scale * linen.Dense(8)(linen.Embed(8, 4)(tokens))


def check(apply, params):
    logits = jax.jit(apply)(params, TOKENS)
    assert logits.shape == (2, 3, 8)
    np.testing.assert_allclose(apply(params, TOKENS, scale=2.0), 2 * logits, rtol=1e-6)
    gradient = jax.grad(lambda p: jnp.sum(apply(p, TOKENS) ** 2))(params)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))


def test_from_nnx():
    module = NNXModel(nnx.Rngs(0))
    apply, params = rl.models.from_nnx(module)
    assert isinstance(params, dict) and set(params) == {"embed", "head"}
    np.testing.assert_allclose(apply(params, TOKENS), module(TOKENS), rtol=1e-6)
    check(apply, params)


def test_from_linen():
    module = LinenModel()
    variables = module.init(jax.random.key(0), TOKENS)
    apply, params = rl.models.from_linen(module, variables)
    np.testing.assert_allclose(apply(params, TOKENS), module.apply(variables, TOKENS), rtol=1e-6)
    check(apply, params)
    check(*rl.models.from_linen(module, key=jax.random.key(0), tokens=TOKENS))


def test_bad_modules_are_named():
    with pytest.raises(TypeError, match="module: got int"):
        rl.models.from_nnx(3)
    with pytest.raises(TypeError, match="module: got NNXModel"):
        rl.models.from_linen(NNXModel(nnx.Rngs(0)))
    with pytest.raises(ValueError, match="key and tokens"):
        rl.models.from_linen(LinenModel())
    with pytest.raises(ValueError, match="no 'params'"):
        rl.models.from_linen(LinenModel(), {"cache": {}})

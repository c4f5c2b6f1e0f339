"""Sampling: logit transforms, draws, and ``generate``, one jitted rollout."""

from rlhf_jax.sampling.draw import categorical, row_keys, token_key_uniforms
from rlhf_jax.sampling.generate import generate
from rlhf_jax.sampling.transforms import NEG_INF, temper, top_k_top_p

__all__ = [
    "NEG_INF",
    "categorical",
    "generate",
    "row_keys",
    "temper",
    "token_key_uniforms",
    "top_k_top_p",
]

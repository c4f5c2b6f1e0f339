"""Sampling: logit transforms, draws, and ``generate``, one jitted rollout."""

from rlhf_jax.sampling.buckets import round_up
from rlhf_jax.sampling.draw import categorical, row_keys, token_key_uniforms
from rlhf_jax.sampling.engine import Engine, QueueFullError
from rlhf_jax.sampling.generate import compilations, generate
from rlhf_jax.sampling.groups import EngineStats, FinishedGroup, FinishedRow, to_rollout
from rlhf_jax.sampling.options import SamplingOptions, forbid
from rlhf_jax.sampling.rows import Prompts, Rows, SamplerModel, advance, draw_next, start
from rlhf_jax.sampling.sample import Drawn, History, sample
from rlhf_jax.sampling.transforms import (
    NEG_INF,
    min_p,
    occurring,
    presence_penalty,
    repetition_penalty,
    temper,
    top_k_top_p,
)

__all__ = [
    "NEG_INF",
    "Drawn",
    "Engine",
    "EngineStats",
    "FinishedGroup",
    "FinishedRow",
    "History",
    "Prompts",
    "QueueFullError",
    "Rows",
    "SamplerModel",
    "SamplingOptions",
    "advance",
    "categorical",
    "compilations",
    "draw_next",
    "forbid",
    "generate",
    "min_p",
    "occurring",
    "presence_penalty",
    "repetition_penalty",
    "round_up",
    "row_keys",
    "sample",
    "start",
    "temper",
    "to_rollout",
    "token_key_uniforms",
    "top_k_top_p",
]

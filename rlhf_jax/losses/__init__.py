"""Policy-gradient losses: pure functions of arrays, one file per algorithm.

Two tiers. ``X_per_token`` returns ``[B, T]``; ``X_loss`` reduces it to ``(scalar, Metrics)``. The
arrays come first, in one order: ``log_probs, old_log_probs, advantages, mask``. ``log_probs[b, t]``
belongs to ``tokens[b, t]``; only ``log_probs`` (and ``entropy``, ``values``) are differentiated.
Objectives are maximised, so losses are their negatives.

A method of one's own is one more function of arrays, anywhere; nothing here needs to know it.
"""

from rlhf_jax.losses.cispo import cispo_loss, cispo_per_token
from rlhf_jax.losses.dapo import dapo_loss, dapo_per_token
from rlhf_jax.losses.decoupled_ppo import decoupled_ppo_loss, decoupled_ppo_per_token
from rlhf_jax.losses.dr_grpo import dr_grpo_loss, dr_grpo_per_token
from rlhf_jax.losses.entropy import entropy_loss
from rlhf_jax.losses.gmpo import gmpo_loss, gmpo_per_token
from rlhf_jax.losses.grpo import grpo_loss, grpo_per_token
from rlhf_jax.losses.gspo import gspo_loss, gspo_per_token, gspo_token_loss, gspo_token_per_token
from rlhf_jax.losses.off_policy import LEVELS, MODES, off_policy_weights, staleness_metrics
from rlhf_jax.losses.ppo import ppo_loss, ppo_per_token
from rlhf_jax.losses.reinforce import reinforce_loss, reinforce_per_token
from rlhf_jax.losses.reinforce_pp import reinforce_pp_loss, reinforce_pp_per_token
from rlhf_jax.losses.rloo import rloo_loss, rloo_per_token
from rlhf_jax.losses.sapo import sapo_loss, sapo_per_token
from rlhf_jax.losses.topr import topr_loss, topr_per_token
from rlhf_jax.losses.value import value_loss, value_per_token

__all__ = [
    "LEVELS",
    "MODES",
    "cispo_loss",
    "cispo_per_token",
    "dapo_loss",
    "dapo_per_token",
    "decoupled_ppo_loss",
    "decoupled_ppo_per_token",
    "dr_grpo_loss",
    "dr_grpo_per_token",
    "entropy_loss",
    "gmpo_loss",
    "gmpo_per_token",
    "grpo_loss",
    "grpo_per_token",
    "gspo_loss",
    "gspo_per_token",
    "gspo_token_loss",
    "gspo_token_per_token",
    "off_policy_weights",
    "ppo_loss",
    "ppo_per_token",
    "reinforce_loss",
    "reinforce_per_token",
    "reinforce_pp_loss",
    "reinforce_pp_per_token",
    "rloo_loss",
    "rloo_per_token",
    "sapo_loss",
    "sapo_per_token",
    "staleness_metrics",
    "topr_loss",
    "topr_per_token",
    "value_loss",
    "value_per_token",
]

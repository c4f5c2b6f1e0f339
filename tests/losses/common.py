"""Every policy loss in one table, and batches with all the trouble that a batch can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rlhf_jax as rl

L = rl.losses


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss, its per-token twin, and options that exercise it.

    Attributes:
      arrays: names of further ``[B, T]`` arrays that it takes by keyword.
      per_sequence: its advantages must be equal within a sequence.
      segmented: its per-token twin needs ``segment_ids`` for packed rows.
    """

    loss: Callable[..., Any]
    per_token: Callable[..., Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    per_sequence: bool = False
    segmented: bool = False


CLIP = {"clip_low": 0.2, "clip_high": 0.3}
SEQUENCE = {"per_sequence": True, "segmented": True}
LOSSES = {
    "reinforce": Case(L.reinforce_loss, L.reinforce_per_token),
    "reinforce_pp": Case(
        L.reinforce_pp_loss, L.reinforce_pp_per_token, {"kl_coef": 0.1}, ("ref_log_probs",)
    ),
    "rloo": Case(L.rloo_loss, L.rloo_per_token, {}, (), True, True),
    "rloo_clipped": Case(L.rloo_loss, L.rloo_per_token, CLIP, **SEQUENCE),
    "ppo": Case(L.ppo_loss, L.ppo_per_token, CLIP),
    "ppo_dual": Case(L.ppo_loss, L.ppo_per_token, {**CLIP, "dual_clip": 1.5}),
    "grpo": Case(L.grpo_loss, L.grpo_per_token, {**CLIP, "kl_coef": 0.1}, ("ref_log_probs",)),
    "grpo_straight_through": Case(
        L.grpo_loss,
        L.grpo_per_token,
        {"kl_coef": 0.1, "kl_estimator": "k3_straight_through"},
        ("ref_log_probs",),
    ),
    "dr_grpo": Case(L.dr_grpo_loss, L.dr_grpo_per_token),
    "dapo": Case(L.dapo_loss, L.dapo_per_token),
    "gspo": Case(L.gspo_loss, L.gspo_per_token, CLIP, **SEQUENCE),
    "gspo_token": Case(L.gspo_token_loss, L.gspo_token_per_token, CLIP, segmented=True),
    "cispo": Case(L.cispo_loss, L.cispo_per_token, {**CLIP, "cap": 5.0}),
    "sapo": Case(L.sapo_loss, L.sapo_per_token),
    "gmpo": Case(L.gmpo_loss, L.gmpo_per_token, **SEQUENCE),
    "topr": Case(L.topr_loss, L.topr_per_token, **SEQUENCE),
    "decoupled_ppo": Case(
        L.decoupled_ppo_loss,
        L.decoupled_ppo_per_token,
        {"weight_cap": 3.0},
        ("sampler_log_probs",),
    ),
}
MODES = rl.masked.AGGREGATIONS


def batch(seed: int, rows: int = 8, length: int = 6, group: int = 2) -> dict[str, jax.Array]:
    """Log-probs near each other, a fully masked row, a one-token completion, holes."""
    rng = np.random.default_rng(seed)
    new = -rng.gamma(1.0, 1.0, (rows, length))
    mask = rng.random((rows, length)) < 0.8
    mask[0] = False
    mask[1] = np.arange(length) == 2
    mask[2] = True
    noise = lambda scale: rng.normal(scale=scale, size=(rows, length))  # noqa: E731
    out = {
        "log_probs": new,
        "old_log_probs": new + noise(0.3),
        "ref_log_probs": new + noise(0.5),
        "sampler_log_probs": new + noise(0.4),
        "advantages": rng.normal(size=rows),
        "mask": mask,
        "group_ids": np.repeat(np.arange(rows // group), group).astype(np.int32) * 10,
    }
    return {k: jnp.asarray(v, jnp.float32 if v.dtype == float else v.dtype) for k, v in out.items()}


def reduction(mode: str, data: dict[str, jax.Array]) -> dict[str, Any]:
    """The options that an aggregation needs."""
    extra = {
        "fixed_length": {"length": 6},
        "prompt_mean": {"group_ids": data["group_ids"]},
    }.get(mode, {})
    return {"aggregation": mode, **extra}


def evaluate(case: Case, data: dict[str, jax.Array], **options):
    """``(loss, metrics), gradient`` by ``log_probs``, through the case's own options."""

    def value(log_probs):
        return case.loss(
            log_probs,
            data["old_log_probs"],
            data["advantages"],
            data["mask"],
            **{name: data[name] for name in case.arrays},
            **{**case.options, **options},
        )

    return jax.value_and_grad(value, has_aux=True)(data["log_probs"])


def tokens(case: Case, data: dict[str, jax.Array], **options):
    """The per-token twin's ``[B, T]``."""
    return case.per_token(
        data["log_probs"],
        data["old_log_probs"],
        data["advantages"],
        data["mask"],
        **{name: data[name] for name in case.arrays},
        **{**case.options, **options},
    )


ALL = tuple(LOSSES)
# One of each kind, for sweeps over every aggregation: token ratio, KL, sequence ratio as a mean and
# as a sum, detached weight, geometric mean.
KINDS = ("ppo", "grpo", "gspo", "rloo_clipped", "cispo", "gmpo")


def everything(
    data: dict[str, jax.Array], mode: str, names: tuple[str, ...] = ALL, **options: Any
) -> dict[str, Any]:
    """Many losses at once: name → (value, gradient by log_probs, metrics). Jittable."""
    out = {}
    for name in names:
        (value, found), grad = evaluate(LOSSES[name], data, **{**reduction(mode, data), **options})
        out[name] = (value, grad, found)
    return out


# Compiling is what these tests spend their time on; the arithmetic is the same.
QUICK = {"xla_backend_optimization_level": 0}
run = jax.jit(everything, static_argnames=("mode", "names", "length"), compiler_options=QUICK)


def same(got: Any, want: Any, *, rtol: float = 1e-6, atol: float = 1e-6, what: str = "") -> None:
    """Compares two pytrees of arrays, naming the leaf that differs."""
    flat_got, flat_want = jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(want)
    assert len(flat_got) == len(flat_want)
    for (path, g), (_, w) in zip(flat_got, flat_want, strict=True):
        np.testing.assert_allclose(
            g, w, rtol=rtol, atol=atol, err_msg=what + jax.tree_util.keystr(path)
        )

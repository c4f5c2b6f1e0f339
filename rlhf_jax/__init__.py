"""rlhf-jax: policy-gradient RLHF for language models as pure functions on JAX.

    import rlhf_jax as rl

Every submodule loads on first use (PEP 562), so that composing losses never pays for the import of
a model library: ``rl.losses``, ``rl.advantages``, ``rl.kl``, ``rl.logprobs`` and ``rl.train_step``
need jax and optax alone; ``rl.models``, ``rl.sampling`` and ``rl.checkpoint`` load flax, orbax or
transformers when they are touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# The few names that nearly every script needs, without their module.
_NAMES = {
    "Batch": "types",
    "Rollout": "types",
    "TrainState": "types",
    "generate": "sampling",
    "init_train_state": "train_step",
    "make_train_step": "train_step",
}

__all__ = [
    "Batch",
    "Rollout",
    "TrainState",
    "__version__",
    "advantages",
    "checkpoint",
    "checks",
    "console",
    "data",
    "generate",
    "init_train_state",
    "kl",
    "logprobs",
    "losses",
    "make_train_step",
    "masked",
    "metrics",
    "minibatch",
    "models",
    "packing",
    "partition",
    "policy",
    "report",
    "rewards",
    "sampling",
    "schedule",
    "tracking",
    "train_step",
    "types",
]

_SUBMODULES = set(__all__) - set(_NAMES) - {"__version__"}

if TYPE_CHECKING:
    from rlhf_jax import (
        advantages,
        checkpoint,
        checks,
        console,
        data,
        kl,
        logprobs,
        losses,
        masked,
        metrics,
        minibatch,
        models,
        packing,
        partition,
        policy,
        report,
        rewards,
        sampling,
        schedule,
        tracking,
        train_step,
        types,
    )
    from rlhf_jax.sampling import generate
    from rlhf_jax.train_step import init_train_state, make_train_step
    from rlhf_jax.types import Batch, Rollout, TrainState


def __getattr__(name: str):
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted(__all__)

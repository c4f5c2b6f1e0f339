"""What a layer's backward pass recomputes, by name.

What is kept lies in memory once a layer from the forward pass on; what is not is computed again. So
the names go from the fastest to the leanest, and ``"offload"`` moves what ``"full"`` keeps out of
the accelerator's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

__all__ = ["REMAT", "attention", "input_tagged", "memory_kinds", "recomputed"]

_INPUT, _HOST = "layer_input", "pinned_host"

_POLICIES: dict[str, Any] = {
    "none": None,
    "attention": None,  # applied to attention alone
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_INPUT],
        offload_src="device",
        offload_dst=_HOST,
    ),
}

REMAT = tuple(_POLICIES)
"""The names that ``Decoder(remat=…)`` takes."""


def attention(attend: Callable[..., Any], name: str, *, looped: bool) -> Callable[..., Any]:
    """``attend(q, k, v)``; under ``"attention"`` its scores and weights are not kept.

    They are what grows with the square of the length, and cost little to compute again
    (Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022,
    section 5). Keeping attention's *output* instead would save no work: its gradient needs the
    weights again in any case.

    Args:
      attend: gives the attended values and anything to keep.
      name: one of :data:`REMAT`.
      looped: as for :func:`recomputed`.

    Returns:
      ``attend`` itself, or ``jax.checkpoint`` of it.
    """
    return jax.checkpoint(attend, prevent_cse=not looped) if name == "attention" else attend


def input_tagged(x: jax.Array) -> jax.Array:
    """Tag the residual stream that enters a layer: ``"offload"`` moves it to the host."""
    return checkpoint_name(x, _INPUT)


def memory_kinds() -> set[str]:
    """The kinds of memory that the default backend's devices can address."""
    return {memory.kind for memory in jax.local_devices()[0].addressable_memories()}


def recomputed(body: Callable[..., Any], name: str, *, looped: bool) -> Callable[..., Any]:
    """One layer's function under the named policy.

    Args:
      body: the function of a scan over layers.
      name: one of :data:`REMAT`.
      looped: whether it really is the body of a loop.

    Returns:
      ``body`` itself for ``"none"``, else ``jax.checkpoint`` of it.

    Raises:
      ValueError: ``"offload"`` where no memory of the host can be addressed.
    """
    if name == "offload" and _HOST not in (kinds := memory_kinds()):
        raise ValueError(
            f"remat: 'offload' needs a backend with memory of kind {_HOST!r}, and "
            f"{jax.default_backend()!r} has {sorted(kinds)}; use 'full'"
        )
    policy = _POLICIES[name]
    if policy is None:
        return body
    # Outside a loop XLA would find the forward pass's values equal and keep them after all.
    return jax.checkpoint(body, policy=policy, prevent_cse=not looped)

"""Sliding windows: layers that see only the last tokens, and their fields in ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_jax.models.refusals import unsupported

WINDOWED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
ALL = 2**30  # tokens back: more than any context
_WINDOW, _FIRST_WINDOWED = 4096, 28  # what the reference implementation takes for silent fields


def from_hf(raw: Mapping[str, Any], architecture: str, layers: int) -> tuple[int, ...]:
    """Each layer's window as the reference implementation understands the fields; () = none."""
    kinds, on = raw.get("layer_types"), bool(raw.get("use_sliding_window"))
    size = raw.get("sliding_window", _WINDOW if architecture in WINDOWED else None)
    known = ["full_attention", "sliding_attention"][: 2 if architecture in WINDOWED else 1]
    if others := sorted(set(kinds or ()) - set(known)):
        raise unsupported("layer_types", others, f"{', '.join(known)} in {architecture}")
    if architecture not in WINDOWED:
        if on and size:
            raise unsupported("use_sliding_window", True, f"full attention in {architecture}")
        return ()
    if kinds is None:
        first = int(raw.get("max_window_layers", _FIRST_WINDOWED))
        sliding = [on and bool(size) and layer >= first for layer in range(layers)]
    else:
        sliding = [kind == "sliding_attention" for kind in kinds]
    if len(sliding) != layers:
        raise ValueError(f"config: layer_types has {len(sliding)} entries for {layers} layers")
    if any(sliding) and not (on and size):
        raise ValueError(
            f"config: layer_types has sliding_attention, but use_sliding_window={on} and "
            f"sliding_window={size!r}; give both"
        )
    return tuple(int(size or 0) if layer else 0 for layer in sliding) if any(sliding) else ()


def to_hf(windows: tuple[int, ...]) -> dict[str, Any]:
    """The fields that :func:`from_hf` and transformers read back."""
    if not windows:
        return {}
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    return {
        "use_sliding_window": True,
        "sliding_window": max(windows),
        "max_window_layers": kinds.index("sliding_attention"),
        "layer_types": kinds,
    }


def checked(windows: tuple[int, ...], architecture: str, layers: int) -> tuple[int, ...]:
    """One window for each layer, of one size, in a family that has them; () when all are 0."""
    windows = tuple(int(window) for window in windows)
    if not any(windows):
        return ()
    if len(windows) != layers or min(windows) < 0 or len(set(windows) - {0}) > 1:
        raise ValueError(
            f"config: layer_windows={windows}; give one number ≥ 0 for each of the {layers} "
            "layers, and one size of window"
        )
    if architecture not in WINDOWED:
        raise unsupported("layer_windows", windows, f"windows in {', '.join(WINDOWED)}")
    return windows

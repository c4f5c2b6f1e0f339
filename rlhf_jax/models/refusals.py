"""How a configuration is refused."""

from __future__ import annotations

from typing import Any


def unsupported(field: str, value: Any, supported: str) -> ValueError:
    """The error that names a field, its value and what would do."""
    return ValueError(f"config: {field}={value!r} is not supported; supported: {supported}")

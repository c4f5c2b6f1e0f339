"""Layouts by name, and a user's own in a TOML file.

[pod]                                   # the layout's name
axes = { fsdp = -1, tensor = 4 }        # mesh axes in mesh order; -1: what the others leave
rows = ["fsdp"]                         # what splits the batch's rows
tokens = []                             # what splits the tokens in training (may be left out)

[pod.rules]                             # logical axis = mesh axis, or a list of them
embed = "fsdp"
heads = "tensor"
kv_heads = "tensor"
mlp = "tensor"
vocab = ["fsdp", "tensor"]
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from sharding.layouts import LAYOUTS, LOGICAL_AXES, Layout

__all__ = ["get_layout", "load_layouts", "to_toml"]

_KEYS = ("axes", "rows", "tokens", "rules")


def get_layout(name: str) -> Layout:
    """Look a layout up, as a ``--layout`` flag names it.

    Args:
      name: one of :data:`LAYOUTS`, ``"FILE.toml:NAME"``, or ``"FILE.toml"`` if the file has one
        layout; other mesh sizes may follow: ``"fsdp_tensor:tensor=4"``.

    Returns:
      The layout.

    Raises:
      ValueError: for an unknown name (the message lists the known ones), sizes that do not fit, or
        a file that cannot be used.

    >>> get_layout("fsdp").rows
    ('fsdp',)
    >>> get_layout("hsdp:slice=4").axes
    (('slice', 4), ('fsdp', -1))
    """
    before, _, last = name.rpartition(":")
    source, sizes = (before, last) if "=" in last and before else (name, "")
    if match := re.fullmatch(r"(.+\.toml)(?::(.*))?", source):
        layout = _from_file(*match.groups())
    elif source in LAYOUTS:
        layout = LAYOUTS[source]
    else:
        raise ValueError(
            f"layout: unknown name {source!r}; known layouts: {', '.join(LAYOUTS)}, "
            "or FILE.toml:NAME"
        )
    return layout.with_sizes(**_sizes(sizes)) if sizes else layout


def _from_file(path: str, name: str | None) -> Layout:
    found = load_layouts(path)
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name not in found:
        asked = "which of them?" if name is None else f"there is no {name!r};"
        raise ValueError(f"layout: {asked} {path} holds: {', '.join(found)}; give {path}:NAME")
    return found[name]


def _sizes(text: str) -> dict[str, int]:
    pairs = [part.split("=") for part in text.split(",")]
    if not all(len(pair) == 2 and re.fullmatch(r"\s*-?\d+\s*", pair[1]) for pair in pairs):
        raise ValueError(f"layout: sizes {text!r} are not of the form AXIS=NUMBER,AXIS=NUMBER")
    names = [axis.strip() for axis, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"layout: {twice[0]!r} is given twice in {text!r}; give one size for it")
    return {name: int(size) for name, (_, size) in zip(names, pairs, strict=True)}


def load_layouts(
    path: str | os.PathLike[str], *, logical_axes: Collection[str] = LOGICAL_AXES
) -> dict[str, Layout]:
    """Read the layouts of a TOML file.

    Args:
      path: the file; :mod:`sharding.files` shows its form.
      logical_axes: the names that rules may be for; add a foreign model's own.

    Returns:
      Layouts by name, in the file's order.

    Raises:
      ValueError: a file that is not there or no TOML, a key, mesh axis or logical axis that is not
        known, or sizes that cannot be; the message names file and layout.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "mine.toml")
    >>> _ = path.write_text('[pod]\\naxes = { fsdp = -1 }\\nrows = ["fsdp"]\\n')
    >>> load_layouts(path)["pod"].axes
    (('fsdp', -1),)
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"layout: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"layout: {path} is no valid TOML: {error}") from None
    if not tables:
        raise ValueError(f"layout: {path} holds no layout; begin one with [NAME]")
    layouts = {}
    for name, table in tables.items():
        try:
            layouts[name] = _layout(name, table, logical_axes)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return layouts


def _layout(name: str, table: Any, logical_axes: Collection[str]) -> Layout:
    """One table of a file."""
    if not isinstance(table, dict) or name in _KEYS:
        raise ValueError(f"{name!r} stands outside a layout; each begins with [NAME]")
    if unknown := [key for key in table if key not in _KEYS]:
        raise ValueError(
            f"layout {name!r}: unknown key {unknown[0]!r}; a layout has: {', '.join(_KEYS)}"
        )
    if missing := [key for key in ("axes", "rows") if key not in table]:
        raise ValueError(f"layout {name!r}: no {missing[0]}")
    rules = table.get("rules", {})
    for key, value in (("axes", table["axes"]), ("rules", rules)):
        if not isinstance(value, dict):
            raise ValueError(f"layout {name!r}: {key} is no table but {value!r}")
    places = {"rows": table["rows"], "tokens": table.get("tokens", ())}
    for what, over in (*places.items(), *rules.items()):
        if not isinstance(over, str) and not _is_list_of_names(over):
            raise ValueError(
                f"layout {name!r}: {what} is {over!r}; give a mesh axis or a list of them"
            )
    if unknown := [axis for axis in rules if axis not in logical_axes]:
        raise ValueError(
            f"layout {name!r}: a rule for {unknown[0]!r}, which is no logical axis; "
            f"choose from: {', '.join(logical_axes)}"
        )
    return Layout(name=name, axes=tuple(table["axes"].items()), rules=rules, **places)


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)


def to_toml(*layouts: Layout) -> str:
    """Layouts in the form that :func:`load_layouts` reads.

    Args:
      *layouts: any layouts of different names.

    Returns:
      The text of a TOML file.

    Raises:
      ValueError: for two layouts of one name.

    >>> print(to_toml(LAYOUTS["fsdp"]))
    [fsdp]
    axes = { fsdp = -1 }
    rows = ["fsdp"]
    tokens = []
    <BLANKLINE>
    [fsdp.rules]
    embed = "fsdp"
    <BLANKLINE>
    """
    names = [layout.name for layout in layouts]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"layout: {twice[0]!r} is given twice; rename one (dataclasses.replace)")
    return "\n".join(map(_table, layouts))


def _table(layout: Layout) -> str:
    name = _key(layout.name)
    axes = ", ".join(f"{axis} = {size}" for axis, size in layout.axes)
    lines = [
        f"[{name}]",
        f"axes = {{ {axes} }}",
        f"rows = {_list(layout.rows)}",
        f"tokens = {_list(layout.tokens)}",
        "",
        f"[{name}.rules]",
    ]
    for axis, target in layout.rules.items():
        lines.append(
            f"{_key(axis)} = {_list((target,))[1:-1] if isinstance(target, str) else _list(target)}"
        )
    return "\n".join([*lines, ""])


def _list(names: Iterable[str]) -> str:
    return json.dumps(list(names))


def _key(name: str) -> str:
    """A bare key where TOML allows one."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)

"""A plan as tables and as a picture."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharding._command import canvas

__all__ = ["draw", "markdown", "sized", "text"]

GIB, MIB = 2**30, 2**20
CLOCKS = ("arithmetic", "memory", "ici", "network")


def sized(count: float, unit: int = GIB) -> str:
    """Bytes in GiB, or in MiB with `unit`.

    >>> sized(3 * 2**29), sized(2**20), sized(2**20, MIB)
    ('1.50', '0.001', '1.00')
    """
    amount = count / unit
    return f"{amount:,.2f}" if amount >= 0.1 or not amount else f"{amount:.3f}"


def _unit(plan: dict[str, Any]) -> tuple[int, str]:
    """GiB, or MiB where that says more."""
    peaks = [one["memory"]["peak"] for one in plan["programs"].values() if "memory" in one]
    small = bool(peaks) and max(peaks) < GIB / 4
    return (MIB, "MiB") if small else (GIB, "GiB")


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table: the first column is text, the others are aligned right.

    >>> print(markdown(("a", "b"), [("x", 1)]))
    | a | b |
    | --- | ---: |
    | x | 1 |
    """
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (header, rule, *rows))


def _milliseconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{1e3 * seconds:,.2f}"


def _memory(plan: dict[str, Any]) -> str:
    rows, (unit, told) = [], _unit(plan)
    gib = functools.partial(sized, unit=unit)
    for name, found in plan["programs"].items():
        held = plan["held"][name]
        if "failed" in found:
            needs = gib(found["needs"]) if "needs" in found else "?"
            cells = [gib(held[part]) for part in ("parameters", "optimizer", "cache")]
            fits = "**no**" if "needs" in found else "does not compile"
            rows.append((name, *cells, "?", f"needs {needs}", fits))
            continue
        sizes = found["memory"]
        fits = {True: "yes", False: "**no**", None: "?"}[found.get("fits")]
        parts = (held["parameters"], held["optimizer"], held["cache"], sizes["temporaries"])
        rows.append((name, *map(gib, parts), gib(sizes["peak"]), fits))
    header = (f"{told} a device", "parameters", "optimizer", "KV cache")
    table = markdown((*header, "activations (temporaries)", "peak", "fits"), rows)
    beside = plan.get("generation beside the state")
    if beside is None:
        return table
    fits = {True: ": fits", False: ": does **not** fit", None: ""}[plan["fits beside the state"]]
    return f"{table}\n\nGeneration beside the resident train state: {gib(beside)} {told}{fits}."


def _work(plan: dict[str, Any]) -> str:
    rows, (unit, told) = [], _unit(plan)
    gib = functools.partial(sized, unit=unit)
    work, tera = ("TFLOP", 1e12) if unit == GIB else ("GFLOP", 1e9)
    for found in plan["programs"].values():
        if "failed" in found:
            continue
        bound, clocks = found.get("estimated mfu"), found.get("seconds", {})
        rows.append(
            (
                *(found["counted"], f"{found['flops'] / tera:,.3f}"),
                *(f"{found['model flops'] / tera:,.3f}", gib(found["bytes"])),
                *(_milliseconds(clocks.get(name)) for name in CLOCKS),
                *(_milliseconds(found.get("estimate")), found.get("bound by", "?")),
                _milliseconds(found.get("without overlap")),
                "?" if bound is None else f"{bound:.2f}",
            )
        )
    header = ("one device", work, "of the model", f"{told} of memory", "arithmetic, ms", "memory")
    more = ("ICI", "network", "**estimate, ms**", "bound by", "without overlap", "estimated MFU")
    return markdown((*header, *more), rows)


def _collectives(plan: dict[str, Any]) -> str:
    unit, told = _unit(plan)
    gib = functools.partial(sized, unit=unit)
    rows = [
        (
            f"{found['counted']}: {one['kind']}"
            + (f" ({one['stands_for']})" if one["stands_for"] else ""),
            *(" × ".join(one["axes"]) or "none", one["runs"]),
            *(gib(one["bytes"]), gib(one["received"])),
        )
        for found in plan["programs"].values()
        for one in found.get("collectives", ())
    ]
    return markdown(
        ("collectives", "mesh axis", "runs", f"{told} of results", f"{told} received"), rows
    )


def _remarks(plan: dict[str, Any]) -> list[str]:
    lines, (unit, told) = list(plan["remarks"]), _unit(plan)
    gib = functools.partial(sized, unit=unit)
    least = plan.get("least exchange")
    if least:
        lines.append(
            f"Weights and their gradients: {gib(least['measured'])} {told} received a device and "
            f"step, {least['ratio']:.2f} times the least that the layout needs "
            f"({gib(least['gathered'])} gathered, {gib(least['scattered'])} reduced)."
        )
    for name, found in plan["programs"].items():
        if "failed" in found:
            lines.append(f"The {name} does not compile: {found['failed']}")
        for target, runs in found.get("not counted", {}).items():
            lines.append(f"Not counted in the {name}: {runs} runs of custom call {target!r}.")
        if loops := found.get("open loops"):
            told = ", ".join(loops)
            lines.append(f"Counted once in the {name}, as their trips are not known: loops {told}.")
        moved = found.get("moved weights")
        if moved is not None:
            lines.append(f"Weights moved in the decode loop of the {name}: {len(moved) or 'none'}.")
            lines += [f"- {one}" for one in moved[:8]]
        if found.get("copied a token"):
            copied = gib(found["copied a token"])
            lines.append(f"The {name} copies {copied} {told} of its cache a token.")
    return lines


def text(plan: dict[str, Any]) -> str:
    """The whole plan in markdown."""
    parts = (
        f"## {plan['model']} on {plan['topology']}"
        + (f" × {plan['slices']} slices" if plan["slices"] > 1 else "")
        + f", layout {plan['layout']}",
        f"{plan['mesh']}. {plan['settings']}.",
        _memory(plan),
        _work(plan),
        _collectives(plan),
        "\n".join(_remarks(plan)),
    )
    return "\n\n".join(filter(None, parts))


def draw(plan: dict[str, Any], file: Path) -> None:
    """Memory and clocks of every program as bars.

    Raises:
      ValueError: matplotlib is not installed, or cannot write such a file.
    """
    figure = canvas(file)
    left, right = figure.subplots(1, 2)
    names = [name for name, found in plan["programs"].items() if "failed" not in found]
    found = [plan["programs"][name] for name in names]
    bottom = [0.0] * len(names)
    held = {
        part: [plan["held"][name][part] / GIB for name in names]
        for part in ("parameters", "optimizer")
    }
    rest = [one["memory"]["peak"] / GIB for one in found]
    held["cache, activations, other"] = [
        max(0.0, peak - a - b)
        for peak, a, b in zip(rest, held["parameters"], held["optimizer"], strict=True)
    ]
    for part, sizes in held.items():
        left.bar(names, sizes, bottom=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    if plan["hbm"]:
        left.axhline(plan["hbm"] / GIB, color="black", linestyle="--", label="HBM")
    left.set_ylabel("GiB a device")
    left.legend()
    width = 0.2
    for index, part in enumerate(CLOCKS):
        seconds = [one.get("seconds", {}).get(part) or 0.0 for one in found]
        places = [place + (index - 1.5) * width for place in range(len(names))]
        right.bar(places, [1e3 * value for value in seconds], width, label=part)
    right.set_xticks(range(len(names)), [one["counted"].replace(", ", ",\n") for one in found])
    if plan["chip"]:
        right.set_yscale("log")
        right.set_ylim(bottom=1e-3)
        right.legend()
    right.set_ylabel("ms, by the roofline" if plan["chip"] else "ms: not known of host devices")
    figure.suptitle(f"{plan['model']} on {plan['topology']}, {plan['layout']}: {plan['mesh']}")
    figure.savefig(file)

"""Calling reward functions: found by name, given what they ask for, checked before use.

A reward function is ``reward(prompts, completions, **columns) -> list[float]``: texts in, one
number a row out; ``None`` where a row cannot be judged (it is excluded, not counted as 0). It names
the columns of the prompt rows that it wants (``answer``, …) as parameters, or takes them all with
``**columns``. Whatever else it does (raise, return NaN, text, a wrong length) is an error that
names the function and the row, so that nothing odd reaches the optimizer.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import math
import numbers
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

__all__ = ["RewardError", "RewardFunction", "Scores", "call", "load", "name_of", "score"]

RewardFunction = Callable[..., Sequence[float | None]]


class RewardError(ValueError):
    """A reward function broke its contract; the text names the function and the row."""


def name_of(function: RewardFunction) -> str:
    """Return the name that metrics and errors use for a reward function.

    Example:
      >>> def brevity(prompts, completions): ...
      >>> name_of(brevity)
      'brevity'
    """
    name = getattr(function, "__name__", None)
    inner = getattr(function, "func", None)  # functools.partial
    if name is None and inner is not None:
        return name_of(inner)
    return name or type(function).__name__


def call(
    function: RewardFunction,
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    columns: Mapping[str, Sequence[Any]] | None = None,
    name: str | None = None,
) -> np.ndarray:
    """Call a reward function and check what it gives.

    Args:
      function: see the module's text.
      prompts: B texts.
      completions: B texts, row by row.
      columns: further columns, each of length B; the function gets those that it names.
      name: how to call it in errors; its own name by default.

    Returns:
      float32 ``[B]``; NaN marks the rows for which the function gave ``None``, and nothing else.

    Raises:
      RewardError: it raised, or gave a wrong length, a non-number, NaN or infinity.
      ValueError: the inputs differ in length, or a column that it needs is missing.

    Example:
      >>> def length(prompts, completions):
      ...     return [len(c) if c else None for c in completions]
      >>> call(length, ["a", "b"], ["four", ""])
      array([ 4., nan], dtype=float32)
    """
    name = name or name_of(function)
    columns = dict(columns or {})
    rows = len(prompts)
    for label, values in {"completions": completions, **columns}.items():
        if len(values) != rows:
            raise ValueError(f"{label} has {len(values)} rows, prompts has {rows}")
    wanted = _wanted(function, columns, name)
    try:
        result = function(list(prompts), list(completions), **wanted)
    except Exception as error:
        row = _failing_row(function, prompts, completions, wanted)
        where = _where(name, row, completions)
        raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
    return _checked(result, rows, name, completions)


def _wanted(function: Any, columns: dict[str, Any], name: str) -> dict[str, list[Any]]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin that tells no signature
        return {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return {key: list(values) for key, values in columns.items()}
    extra = [p for p in parameters if p.kind is not p.VAR_POSITIONAL][2:]
    missing = [p.name for p in extra if p.default is p.empty and p.name not in columns]
    if missing:
        raise ValueError(
            f"reward function {name!r} asks for the column {missing[0]!r}, which the prompts do "
            f"not have; columns there: {', '.join(columns) or 'none'}"
        )
    return {p.name: list(columns[p.name]) for p in extra if p.name in columns}


def _failing_row(function, prompts, completions, wanted) -> int | None:
    """Find the first row that fails by itself, for the error's text."""
    for i in range(len(prompts)):
        try:
            function([prompts[i]], [completions[i]], **{k: [v[i]] for k, v in wanted.items()})
        except Exception:
            return i
    return None


def _where(name: str, row: int | None, completions: Sequence[str]) -> str:
    if row is None:
        return f"reward function {name!r}"
    text = completions[row]
    shown = repr(text if len(text) <= 40 else text[:39] + "…")
    return f"reward function {name!r}, row {row} (completion {shown}),"


def _checked(result: Any, rows: int, name: str, completions: Sequence[str]) -> np.ndarray:
    values = result
    if hasattr(values, "__array__") and not isinstance(values, np.ndarray):
        values = _to_numpy(values, f"reward function {name!r}")
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise RewardError(
                f"reward function {name!r} returned an array of shape {values.shape}; "
                f"one number a row is wanted: shape ({rows},)"
            )
        values = values.tolist()
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise RewardError(
            f"reward function {name!r} returned a {type(result).__name__}; "
            f"a list of {rows} numbers is wanted"
        )
    if len(values) != rows:
        raise RewardError(
            f"reward function {name!r} returned {len(values)} rewards for {rows} completions; "
            "return one for each, None where a row cannot be judged"
        )
    checked = np.full(rows, np.nan, np.float32)
    for row, value in enumerate(values):
        if value is not None:
            checked[row] = _number(value, lambda row=row: _where(name, row, completions))
    return checked


def _to_numpy(value: Any, where: str) -> np.ndarray:
    """A jax array or a torch tensor as NumPy."""
    try:
        return np.asarray(value)
    except Exception as error:  # a torch tensor with a gradient, in bfloat16 or on a GPU
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise RewardError(
            f"{where} returned a {type(value).__name__} that NumPy cannot read ({reason}); "
            "return plain numbers, e.g. by .tolist()"
        ) from error


def _number(value: Any, where: Callable[[], str]) -> float:
    if hasattr(value, "__array__") and getattr(value, "ndim", None) == 0:
        value = _to_numpy(value, where()).item()
    if not isinstance(value, numbers.Real):
        shown = reprlib.repr(value)
        raise RewardError(
            f"{where()} returned {shown} ({type(value).__name__}); a number or None is wanted"
        )
    try:
        number = float(value)
    except OverflowError:  # an integer beyond every float
        number = math.inf
    if not math.isfinite(number) or abs(number) > float(np.finfo(np.float32).max):
        shown = reprlib.repr(value)
        raise RewardError(
            f"{where()} returned {shown}; rewards must be finite (None excludes a row)"
        )
    return number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """Rewards of B rows, in total and by function.

    Attributes:
      rewards: float32 ``[B]``, the weighted sum over functions; NaN where every function passed.
      by_function: name → float32 ``[B]``, unweighted; NaN where that function passed.
    """

    rewards: np.ndarray
    by_function: dict[str, np.ndarray]

    def metrics(self) -> dict[str, float]:
        """Return ``reward/<function>/mean|std`` without the missing rows (0 if all are missing)."""
        out = {}
        for name, values in self.by_function.items():
            seen = values[~np.isnan(values)].astype(np.float64)
            out[f"reward/{name}/mean"] = float(seen.mean()) if seen.size else 0.0
            out[f"reward/{name}/std"] = float(seen.std()) if seen.size else 0.0
        return out


def score(
    functions: RewardFunction | Mapping[str, RewardFunction],
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    columns: Mapping[str, Sequence[Any]] | None = None,
    weights: Mapping[str, float] | None = None,
) -> Scores:
    """Score rows by one or several reward functions: r = Σ_f w_f · r_f.

    Args:
      functions: one function, or name → function.
      prompts: B texts.
      completions: B texts.
      columns: as in :func:`call`.
      weights: name → w_f; 1 by default.

    Returns:
      The sum and its parts. A function that gives ``None`` for a row is left out of its sum.

    Raises:
      RewardError: as in :func:`call`.
      ValueError: a weight for an unknown function, or one that is not finite.

    Example:
      >>> def long(prompts, completions):
      ...     return [float(len(c)) for c in completions]
      >>> def polite(prompts, completions):
      ...     return [1.0 if "please" in c else None for c in completions]
      >>> scores = score(
      ...     {"long": long, "polite": polite}, ["a", "b"], ["please", "no"], weights={"long": 0.5}
      ... )
      >>> scores.rewards
      array([4., 1.], dtype=float32)
    """
    named = dict(functions) if isinstance(functions, Mapping) else {name_of(functions): functions}
    weights = dict(weights or {})
    for name, weight in weights.items():
        if name not in named:
            raise ValueError(f"weights names {name!r}; the functions are {', '.join(named)}")
        if not math.isfinite(weight):
            raise ValueError(f"weights[{name!r}] must be finite, got {weight}")
    parts = {
        name: call(function, prompts, completions, columns=columns, name=name)
        for name, function in named.items()
    }
    total = np.zeros(len(prompts), np.float64)
    judged = np.zeros(len(prompts), bool)
    for name, values in parts.items():
        here = ~np.isnan(values)
        total[here] += weights.get(name, 1.0) * values[here]
        judged |= here
    rewards = np.where(judged, total, np.nan).astype(np.float32)
    return Scores(rewards=rewards, by_function=parts)


def load(spec: str) -> RewardFunction:
    """Find a reward function by name: ``module:function`` or ``path/to/file.py:function``.

    Modules are also looked for in the current folder.

    Args:
      spec: where it is.

    Returns:
      The function.

    Raises:
      ValueError: the text has another form, or there is no such module, file or function.

    Example:
      >>> load("rlhf_jax.rewards.verifiers:exact_match").__name__
      'exact_match'
    """
    place, _, attribute = spec.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"reward {spec!r}: write module:function or path/to/file.py:function")
    module = _load_file(place, spec) if place.endswith(".py") else _load_module(place, spec)
    function: Any = module
    for part in attribute.split("."):
        if not hasattr(function, part):
            names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            have = ", ".join(names) or "none"
            raise ValueError(f"reward {spec!r}: {place} has no {attribute!r}; it has {have}")
        function = getattr(function, part)
    if not callable(function):
        raise ValueError(
            f"reward {spec!r}: {attribute} is a {type(function).__name__}, no function"
        )
    return cast(RewardFunction, function)


def _load_file(place: str, spec: str) -> Any:
    path = Path(place)
    if not path.is_file():
        raise ValueError(f"reward {spec!r}: no file {place!r}")
    found = importlib.util.spec_from_file_location(path.stem, path)
    if found is None or found.loader is None:
        raise ValueError(f"reward {spec!r}: {place!r} is no Python file")
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"reward {spec!r}: {place} fails on import: {error!r}") from error
    return module


def _load_module(place: str, spec: str) -> Any:
    here = str(Path.cwd())
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.append(here)
    try:
        return importlib.import_module(place)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and place.split(".")[0] == error.name:
            raise ValueError(
                f"reward {spec!r}: no module {place!r} (looked here as well)"
            ) from None
        raise ValueError(f"reward {spec!r}: {place} fails on import: {error!r}") from error
    finally:
        if added:
            sys.path.remove(here)

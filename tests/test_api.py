"""Every public name is documented, shows an example, and is used by a test.

Public is what a package lists in `__all__`; of a module without that list, what it defines itself
under a name without an underscore. What a package keeps in its inner modules is its own affair.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

import rlhf_jax as rl
import sharding

TESTS = Path(__file__).resolve().parent

# Functions that need a model, files or several devices: their tests are the example.
NO_EXAMPLE = {
    "rlhf_jax.models.extend_cache",
    "rlhf_jax.policy.from_decoder",
    "rlhf_jax.policy.trunk",
    "rlhf_jax.train_step.make_train_step",
    "rlhf_jax.train_step.state_shardings",
    "sharding.row_sharding",
    "sharding.tree_shardings",
}


def entries() -> list[ModuleType]:
    """The modules that a user names: `rl.data`, `rl.losses`, `rl.rewards.shaping`, `sharding`."""
    found = [sharding]
    for info in pkgutil.iter_modules(rl.__path__, "rlhf_jax."):
        if not info.name.rpartition(".")[2].startswith("_"):
            module = importlib.import_module(info.name)
            if info.ispkg and not hasattr(module, "__all__"):
                inner = pkgutil.iter_modules(module.__path__, f"{info.name}.")
                found += [
                    importlib.import_module(i.name) for i in inner if f"{info.name}._" not in i.name
                ]
            else:
                found.append(module)
    return found


def public(module: ModuleType) -> dict[str, object]:
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return {f"{module.__name__}.{name}": getattr(module, name) for name in names}


ENTRIES = entries()
OBJECTS = {
    name: value
    for module in ENTRIES
    for name, value in public(module).items()
    if inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value))
}
FUNCTIONS = {
    name: inspect.unwrap(value)  # behind jax.jit
    for name, value in OBJECTS.items()
    if inspect.isfunction(inspect.unwrap(value)) and inspect.signature(value).parameters
}


@functools.cache
def all_tests() -> str:
    files = [path for path in sorted(TESTS.rglob("*.py")) if path != Path(__file__)]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def test_the_listed_names_exist():
    for module in ENTRIES:
        assert public(module), module.__name__
    for name in rl.__all__:
        assert getattr(rl, name) is not None
    assert set(rl.__all__) <= set(dir(rl))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        rl.nonsense  # noqa: B018


@pytest.mark.parametrize("module", ENTRIES, ids=lambda module: module.__name__)
def test_module_says_what_it_is(module):
    assert module.__doc__ and module.__doc__.splitlines()[0].rstrip().endswith((".", ":"))


@pytest.mark.parametrize("name", OBJECTS)
def test_documented(name):
    doc = inspect.getdoc(OBJECTS[name])
    # A dataclass without a docstring of its own is given its signature.
    assert doc and not doc.startswith(f"{name.rpartition('.')[2]}("), f"{name} has no docstring"
    assert len(doc.splitlines()[0]) <= 100


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_has_an_example(name):
    doc = inspect.getdoc(FUNCTIONS[name]) or ""
    assert ">>>" in doc or name in NO_EXAMPLE, f"{name} shows no example"


def test_no_example_names_are_still_there():
    assert set(FUNCTIONS) >= NO_EXAMPLE, NO_EXAMPLE - set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tested(name):
    short = name.rpartition(".")[2]
    used = bool(re.search(rf"\b{re.escape(short)}\b", all_tests()))
    assert used, f"no test uses {name}"

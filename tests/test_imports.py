"""Imports run one way, and importing the library is quick and light."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rlhf_jax", "sharding", "experiments")

# What a part of the library may import of ours, besides itself. A private module (`_name`) belongs
# to the parts that use it, so what it imports counts as theirs.
ARRAYS = {"types", "checks", "metrics", "masked"}
LOSS_PARTS = ARRAYS | {"logprobs", "kl", "advantages"}
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "checks": set(),
    "metrics": {"checks", "types"},
    "masked": {"checks", "types"},
    "logprobs": ARRAYS,
    "kl": ARRAYS | {"logprobs"},
    "advantages": ARRAYS,
    "rewards": ARRAYS | {"advantages", "kl", "logprobs"},
    "losses": LOSS_PARTS,
    "tracking": set(),
    "console": set(),
    "report": {"tracking"},
    "data": set(),
}
MAY_NOT_IMPORT: dict[str, set[str]] = {
    "models": {"losses", "sampling", "train_step", "rewards", "advantages"},
    "sampling": {"losses", "train_step", "rewards", "advantages"},
    "train_step": {"losses", "rewards", "advantages", "sampling", "models"},
    "checkpoint": {"losses", "models", "sampling", "train_step"},
    "rollouts": {"losses", "train_step"},
    "partition": {"losses", "models", "sampling", "train_step"},
    "policy": {"losses", "sampling", "train_step", "rewards", "advantages"},
}
SHARDING_DATA = ("mesh", "rules", "layouts", "files", "paths", "reshard")


def modules(package: str) -> dict[str, Path]:
    """Dotted name → file of every module of a package."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


ALL = {name: path for package in PACKAGES for name, path in modules(package).items()}


def imported(name: str, path: Path) -> set[str]:
    """Names that a module imports anywhere in it, absolute; `if TYPE_CHECKING` does not run."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in ALL else base)
    return found


def parts_of(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """The public parts of `rlhf_jax` that a module imports, through private modules as well."""
    parts = set()
    for target in imported(name, ALL[name]):
        pieces = target.split(".")
        if pieces[0] != "rlhf_jax" or len(pieces) == 1:
            continue
        private = pieces[1].startswith("_")
        if private and target in ALL and target not in seen:
            parts |= parts_of(target, seen | {name, target})
        elif not private:
            parts.add(pieces[1])
    return parts


def part_modules(part: str) -> list[str]:
    return [n for n in ALL if n == f"rlhf_jax.{part}" or n.startswith(f"rlhf_jax.{part}.")]


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_arrays_flow_one_way(part):
    for name in part_modules(part):
        extra = parts_of(name) - MAY_IMPORT[part] - {part}
        assert not extra, f"{name} imports {sorted(extra)}"


@pytest.mark.parametrize("part", MAY_NOT_IMPORT)
def test_models_samplers_and_steps_know_no_loss(part):
    for name in part_modules(part):
        wrong = parts_of(name) & MAY_NOT_IMPORT[part]
        assert not wrong, f"{name} imports {sorted(wrong)}"


def test_sharding_knows_names_and_shapes_only():
    for name in SHARDING_DATA:
        module = f"sharding.{name}"
        if module in ALL:
            assert not parts_of(module) & {"losses", "models", "sampling", "train_step"}, module


def test_only_experiments_know_experiments():
    for name, path in ALL.items():
        if not name.startswith("experiments"):
            tops = {target.split(".")[0] for target in imported(name, path)}
            assert "experiments" not in tops, name
            assert not tops & {"tests", "torch", "tensorflow", "pickle"}, name


def test_heavy_packages_stay_where_they_belong():
    allowed = {
        "flax": {"models"},
        "transformers": {"models"},
        "orbax": {"checkpoint"},
        "matplotlib": {"report"},
        "rich": {"console", "report"},
        "tensorboardX": {"tracking"},
        "wandb": {"tracking"},
    }
    for name, path in ALL.items():
        if name.startswith("rlhf_jax."):
            part = name.split(".")[1]
            tops = {target.split(".")[0] for target in imported(name, path)}
            wrong = [top for top in tops if part not in allowed.get(top, {part})]
            assert not wrong, f"{name} imports {wrong}"


HEAVY = ("transformers", "torch", "flax", "orbax", "tensorflow", "matplotlib", "rich", "tyro")
PROBE = f"""
import sys, time
start = time.perf_counter()
import rlhf_jax
took = time.perf_counter() - start
rlhf_jax.losses, rlhf_jax.data, rlhf_jax.tracking, rlhf_jax.rewards.functions
print(took, *[name for name in {HEAVY} if name in sys.modules])
"""


@pytest.mark.long
def test_import_is_quick_and_light():
    """Best of three, jax included: under 2 s, and nothing heavy, not even after the array parts."""
    times, loaded = [], set()
    for _ in range(3):
        ran = subprocess.run(
            [sys.executable, "-c", PROBE + "import jax\n"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        took, *names = ran.stdout.split()
        times.append(float(took))
        loaded |= set(names)
    assert min(times) < 2.0, times
    assert not loaded

"""The project's own files: pins, environment markers, set-up scripts."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = sorted((ROOT / "requirements").glob("*.txt"))


def pins(path: Path, python: str) -> dict[str, str]:
    """Package → version that a file pins for a Python version on Linux."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    found = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                assert requirement.name not in found, f"{path.name}: {requirement.name} twice"
                found[requirement.name] = str(requirement.specifier).removeprefix("==")
    return found


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_core_is_at_most_25_packages(python):
    core = pins(ROOT / "requirements" / "core.txt", python)
    assert {"jax", "numpy", "optax", "chex", "safetensors"} <= set(core)
    assert len(core) + 1 <= 25  # and the library itself


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("path", PINS, ids=lambda path: path.stem)
def test_pins_agree_and_name_no_host(path, python):
    text = path.read_text()
    assert "://" not in text and "--" not in text and "@" not in text
    mine, all_of_them = pins(path, python), pins(ROOT / "requirements" / "dev.txt", python)
    assert mine
    for name, version in mine.items():
        assert all_of_them.get(name, version) == version, name
    jax = mine.get("jax", "0.10.2" if python == "3.11" else "0.12")
    assert jax.startswith("0.10." if python == "3.11" else "0.12")


def test_pins_satisfy_the_project():
    listed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["models"]]
    for python in ("3.11", "3.12"):
        found = pins(ROOT / "requirements" / "dev.txt", python)
        for requirement in map(Requirement, listed):
            if requirement.marker is None or requirement.marker.evaluate(
                {"python_version": python, "python_full_version": f"{python}.1"}
            ):
                assert requirement.specifier.contains(found[requirement.name]), requirement


def test_this_environment_is_the_declared_line_of_jax():
    jax = importlib.metadata.version("jax")
    for requirement in map(Requirement, PROJECT["dependencies"]):
        if requirement.name == "jax" and requirement.marker.evaluate():
            assert requirement.specifier.contains(jax)


def test_versions_agree():
    import rlhf_jax

    assert rlhf_jax.__version__ == PROJECT["version"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"## \[(Unreleased|{re.escape(PROJECT['version'])})\]", changes)


def script(name: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(ROOT / "requirements" / name), *arguments], capture_output=True, text=True
    )


def test_find_python_runs_its_candidates(tmp_path):
    broken = tmp_path / "python3.13"  # as a version manager leaves it: found, but cannot start
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    found = script("find-python.sh", "11", str(broken), "no-such-python", sys.executable)
    assert found.returncode == 0
    assert Path(found.stdout.strip()).resolve() == Path(sys.executable).resolve()


def test_install_refuses_an_unfit_python(tmp_path):
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    ran = script("install.sh", str(tmp_path / "venv"), "experiments", str(old))
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: PYTHON=") and ran.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")
def test_core_install_really_is_that_small(tmp_path):
    """Into an empty environment: what `pip install rlhf-jax` brings."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = str(venv / "bin" / "python")
    subprocess.run(["uv", "pip", "install", "-q", "-p", python, str(ROOT)], check=True)
    listed = subprocess.run(
        ["uv", "pip", "list", "-p", python], capture_output=True, text=True, check=True
    )
    packages = [line.split()[0] for line in listed.stdout.splitlines()[2:]]
    assert "rlhf-jax" in packages and "flax" not in packages
    assert len(packages) <= 25, packages
    probe = "import rlhf_jax as rl; rl.losses; rl.advantages; rl.kl; rl.masked; rl.data"
    subprocess.run([python, "-c", probe], check=True, cwd=tmp_path)

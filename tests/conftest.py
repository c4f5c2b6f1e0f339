"""Settings that must stand before jax is imported, and what many tests share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_FLAG = "--xla_force_host_platform_device_count=8"
if "jax" in sys.modules:  # pytest loads this file first, unless a plugin was quicker
    raise RuntimeError("jax was imported before tests/conftest.py could set eight CPU devices")
os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()
# Tests never ask a model hub, and a fork of the tokenizers' threads warns.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax
import pytest
from hypothesis import settings

from tests.numerics import Numerics

collect_ignore = ["data"]  # recorded values, and the scripts that make them: no tests, no doctests

# Property-based inputs: the same on every machine, and no deadline while jax compiles.
settings.register_profile(
    "rlhf", deadline=None, derandomize=True, max_examples=15, database=None, print_blob=False
)
settings.load_profile("rlhf")


@pytest.fixture(params=["eager-float32", "jit-float32", "eager-float64", "jit-float64"])
def numerics(request):
    """Run a computation eagerly or under jit, in float32 or float64."""
    mode, dtype = request.param.split("-")
    with jax.enable_x64(dtype == "float64"):
        yield Numerics(jit=mode == "jit", dtype=dtype)


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled_functions():
    """Hold the memory of one module's programs at a time, not those of the whole suite."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _forget_before_memory_maps_run_out():
    """Drop programs long before the kernel's limit of 65,530 memory maps, where XLA crashes.

    A program for eight host devices takes hundreds, so a module of many such tests gets there.
    """
    yield
    if _memory_maps() > 25_000:
        jax.clear_caches()


def _memory_maps() -> int:
    """Memory maps of this process; 0 where the kernel does not list them."""
    try:
        with Path("/proc/self/maps").open("rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0

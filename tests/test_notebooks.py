"""Notebooks run from top to bottom as scripts, and write the figures they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.py"))
FIGURES = {"losses": {"ppo_regions", "kl_estimators", "aggregation_weights"}}


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    environment = {
        **os.environ,
        "MPLBACKEND": "Agg",
        "RLHF_JAX_FIGURES": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error::DeprecationWarning:__main__",
    }
    done = subprocess.run(
        [sys.executable, str(path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    written = {file.stem for file in tmp_path.glob("*.png") if file.stat().st_size > 5000}
    assert FIGURES.get(path.stem, set()) <= written


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_in_percent_format(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# %% [markdown]\n# # ")
    assert text.count("\n# %%\n") >= 1

"""The golden cases: inputs and outputs computed in float64 from the published formulas."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

_FILE = Path(__file__).parent / "data" / "policy_gradients.json"
CASES = {case["name"]: case for case in json.loads(_FILE.read_text())["cases"]}


def load(name: str) -> tuple[dict, dict]:
    """The inputs and the expected outputs of a case."""
    return CASES[name]["inputs"], CASES[name]["expected"]


def boolean(mask) -> np.ndarray:
    return np.asarray(mask) > 0

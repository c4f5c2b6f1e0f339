"""Call an experiment as a shell would, and read what it left; for the tests of all scripts."""

import importlib
import json
import pathlib
import sys

import numpy as np
import pytest

GRADED = str(pathlib.Path(__file__).with_name("graded.py"))
SMALL = ["--task", "sort", "--batch-size", "32", "--group-size", "4", "--warmup-steps", "3"]
SMALL += ["--reward", f"{GRADED}:positions"]


def run(script, *flags):
    """Its exit code."""
    import common

    module = importlib.import_module(script)
    before = sys.argv
    sys.argv = [f"experiments/{script}.py", *map(str, flags)]
    try:
        with pytest.raises(SystemExit) as stopped:
            common.main(module.train, getattr(module, "Config", common.Config))
    finally:
        sys.argv = before
    return stopped.value.code


def records(folder, name="metrics"):
    lines = (pathlib.Path(folder) / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def same(first, second, atol=0.0):
    """Compare two runs' records, times left out."""
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        names = {n for n in a if not n.startswith(("time/", "throughput/", "memory/", "wall"))}
        assert names <= set(b)
        for name in names:
            np.testing.assert_allclose(a[name], b[name], atol=atol, rtol=atol, err_msg=name)

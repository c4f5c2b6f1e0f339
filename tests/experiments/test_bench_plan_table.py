"""The planner's table: a row of a plan that fits and of one that does not."""

import sharding
from experiments.bench import plan_table
from sharding import plan

GIB = 2**30
ASKED = plan.Request(
    name="llama3-70b",
    config=plan.MODELS["llama3-70b"],
    topology="v5e:4x4",
    layout=sharding.get_layout("fsdp_tensor"),
    sizes=plan.Sizes(rows=16),
)


def made(train):
    held = {"parameters": GIB, "optimizer": 2 * GIB, "cache": GIB}
    return {
        "model": "llama3-70b",
        "topology": "v5e:4x4",
        "slices": 1,
        "mesh": "fsdp=8, tensor=2 (16 × cpu)",
        "state": 3 * GIB,
        "held": dict.fromkeys(("train", "round"), held),
        "programs": {
            "train": train,
            "prefill": {"memory": {"peak": 4 * GIB}},
            "round": {"failed": "RESOURCE_EXHAUSTED"},
        },
    }


def test_a_step_that_does_not_fit_is_a_row_too():
    row = plan_table.line(made({"failed": "too large", "needs": 52 * GIB}), ASKED)
    assert len(row) == len(plan_table.HEADER)
    assert row[4:6] == ("needs 52.00", "**no**")
    assert row[-8:] == ("-",) * 8


def test_a_step_that_fits_has_its_figures():
    exchange = {"kind": "all-gather", "stands_for": "", "axes": ["fsdp"], "received": 2 * GIB}
    train = {
        "memory": {"peak": 12 * GIB},
        "fits": True,
        "flops": 2e12,
        "estimate": 0.5,
        "bound by": "memory",
        "estimated mfu": 0.25,
        "collectives": [exchange],
    }
    row = plan_table.line(made(train), ASKED)
    assert row[4:7] == ("12.00", "yes", "4.00")
    assert row[-8:] == ("2.0", "500", "memory", "0.25", "2.00", "0.00", "-", "0.00")

"""What processes share, without a model; test_distributed_parts.py runs it as one and as two."""

import contextlib
import dataclasses
import json
import pathlib
import sys
import types
from unittest import mock

import common
import jax
import jax.numpy as jnp
import numpy as np
from common import hosts, pod, setup

import sharding
from rlhf_jax import checkpoint


@dataclasses.dataclass(frozen=True)
class Flags:
    distributed: bool = False
    coordinator: str | None = None
    process_id: int | None = None
    processes: int | None = None
    heartbeat_timeout: int = 25


def trees(mesh):
    """An array in pieces over all devices, one that is whole on each, and a scalar."""
    split = jax.NamedSharding(mesh, jax.P("fsdp", None))
    across = jax.NamedSharding(mesh, jax.P(None, None, "fsdp"))
    whole = jax.NamedSharding(mesh, jax.P())
    tree = {
        "split": np.arange(48, dtype=np.float32).reshape(16, 3) / 7,
        "across": np.arange(96).reshape(3, 4, 8).astype(jnp.bfloat16),
        "whole": np.arange(5, dtype=np.int32),
        "one": np.float32(0.5),
    }
    return hosts.place(tree, {"split": split, "across": across, "whole": whole, "one": whole})


def half_readable(folder, place):
    """The step that both restore when process 1 neither lists them nor reads its part of one."""
    noise = np.random.default_rng(0).normal(size=(16, 4096))  # what is small lies in no data file
    tree = {"split": hosts.place(noise.astype(np.float32), place)}
    with checkpoint.Checkpointer(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"tree": tree})
    if hosts.is_first():
        for path in (folder / "2" / "tree" / "ocdbt.process_1" / "d").iterdir():
            path.write_bytes(b"")
    hosts.exchange("damaged")
    listing = mock.patch("os.listdir", lambda _: [])
    with contextlib.nullcontext() if hosts.is_first() else listing:  # as a slow network's disk
        checkpoints = checkpoint.Checkpointer(folder)
    with checkpoints:
        assert checkpoints.steps() == [1, 2]
        step, found, _ = checkpoints.restore({"tree": jax.tree.map(jnp.zeros_like, tree)})
    return [step, checkpoint.digest(found["tree"]) == checkpoint.digest(tree)]


def main(folder):
    index, count = jax.process_index(), jax.process_count()
    layout = sharding.get_layout("fsdp")
    mesh = sharding.make_mesh(layout)
    said = {"devices": mesh.size}
    said["exchanged"] = hosts.exchange(
        {"me": index, "nan": float("nan"), "long": "ä" * 999 * index}
    )
    said["first"] = hosts.first(lambda: f"from {jax.process_index()}")
    said["together"] = hosts.together(lambda: index * 10)
    said["any"] = [hosts.any_of(index == 1), hosts.any_of(False)]
    prompts = types.SimpleNamespace(train=[{"prompt": f"prompt {index}"}], held_out=[])
    no_prompts = types.SimpleNamespace(train=[], held_out=[])
    model = types.SimpleNamespace(config="the same")
    for name, function in (
        ("first", lambda: hosts.first(lambda: int("x"))),
        ("together", lambda: hosts.together(lambda: 1 // (1 - index))),
        ("same", lambda: setup._check_same(prompts, layout, model, (8,))),
        ("same width", lambda: setup._check_same(no_prompts, layout, model, (8 << index,))),
    ):
        try:
            function()
        except ValueError as error:
            said[f"error of {name}"] = str(error)
    owners = hosts.owners(16, layout, mesh)
    said["owners"] = owners.tolist()
    tree = trees(mesh)
    said["whole"] = hosts.whole(tree["split"])[:, 0].tolist()
    seen, mine = hosts.visible(tree["split"]), owners == index
    said["mine"] = bool((seen[mine] == hosts.whole(tree["split"])[mine]).all())
    said["not mine"] = float(np.abs(seen[~mine]).sum())
    said["gathered"] = [x.size for x in jax.tree.leaves(hosts.gathered(tree))]
    said["texts"] = hosts.all_texts([f"{row}ß" if own else None for row, own in enumerate(mine)])
    said["digest"] = checkpoint.digest(tree)
    with checkpoint.Checkpointer(folder / f"from{count}") as checkpoints:
        checkpoints.save(1, {"tree": tree}, {"by": count})
    other = folder / f"from{3 - count}"
    if other.exists():
        with checkpoint.Checkpointer(other) as checkpoints:
            step, found, meta = checkpoints.restore({"tree": jax.tree.map(jnp.zeros_like, tree)})
        said["restored"] = [step, meta["by"], checkpoint.digest(found["tree"])]
        said["laid out"] = found["tree"]["split"].sharding.is_equivalent_to(
            tree["split"].sharding, 2
        )
    if count == 2:
        said["half readable"] = half_readable(folder / "half", tree["split"].sharding)
    (folder / f"said-{count}-{index}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    assert common  # the experiments' imports start no backend before the processes have joined
    pod.join(Flags())
    main(pathlib.Path(sys.argv[1]))
    pod.leave()

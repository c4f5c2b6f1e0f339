"""Chunked log-probs at scale: vocabulary sharded over devices, and memory."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import rlhf_jax as rl
from rlhf_jax import _chunked_head
from tests.test_logprobs import weighted

lp = rl.logprobs


# ---- sharding ----


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(
    ("tied", "trained", "layout"),
    [
        (True, (0, 1), "vocab"),
        (False, (0,), "vocab"),
        (True, (0, 1), "fsdp"),
        (False, (0,), "fsdp"),
    ],
)
def test_sharded_vocabulary(kind, tied, trained, layout):
    keys = jax.random.split(jax.random.key(1), 4)
    hidden = jax.random.normal(keys[0], (4, 6, 16))
    head = jax.random.normal(keys[1], (64, 16) if tied else (16, 64))
    labels = jax.random.randint(keys[2], (4, 6), 0, 64)
    cotangents = jax.random.normal(keys[3], (2, 4, 6))

    def value(hidden, head, labels, cotangents):
        out = lp.chunked(
            hidden, head, labels, head_is_embedding=tied, with_entropy=True, chunk_size=8
        )
        return weighted((out.log_probs, out.entropy), cotangents)

    want = jax.value_and_grad(value, trained)(hidden, head, labels, cotangents)
    mesh = mesh_of(getattr(jax.sharding.AxisType, kind))
    names = {"vocab": ("model", None), "fsdp": (None, "data")}[layout]
    spec = jax.P(*(names if tied else names[::-1]))

    def put(x, spec):
        return jax.device_put(x, jax.NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        args = (
            put(hidden, jax.P("data")),
            put(head, spec),
            put(labels, jax.P("data")),
            put(cotangents, jax.P(None, "data")),
        )
        step = jax.jit(jax.value_and_grad(value, trained))
        got = step(*args)
        text = step.lower(*args).compile().as_text()
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for g, w in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)
    if layout == "vocab":
        # No device ever holds a whole vocabulary: neither the head nor a block of logits.
        for line in text.splitlines():
            if "all-gather" in line:
                assert ",64]" not in line and "[64," not in line, line


# ---- memory ----


@pytest.mark.long
def test_memory_at_a_large_vocabulary():
    from experiments.bench import logprobs_memory

    for what, row in logprobs_memory.measure(8, 1024, 1024, 131072).items():
        assert row["chunked"] <= row["plain"] / 8, (what, row)
        assert row["chunked, vocabulary too"] <= row["plain"] / 8, (what, row)


def test_default_blocks_keep_to_the_budget():
    spec = _chunked_head.plan((8, 1000), 49152, None, None, True, False)
    assert 4 * 8 * spec.block * 49152 <= _chunked_head.LOGITS_BYTES
    assert spec.block * spec.count - 1000 < spec.count  # hardly any padding
    assert _chunked_head.plan((4096, 8), 2**17, None, None, True, False).block == 1

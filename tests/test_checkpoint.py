import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rlhf_jax as rl
from rlhf_jax.checkpoint import Checkpointer, CheckpointError


def _trees(seed=0):
    params = {"a": jax.random.normal(jax.random.key(seed), (300, 7)), "frozen": None}
    state = rl.init_train_state(params, optax.adamw(1e-3))
    return {"state": state, "reference": rl.partition.copy(params)}


def _equal(first, second):
    same = jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), first, second)
    return all(jax.tree.leaves(same)) and jax.tree.structure(first) == jax.tree.structure(second)


def test_round_trip_with_optimizer_state_and_meta(tmp_path):
    saved = _trees(1)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(5, saved, {"position": 40})
        step, found, meta = checkpoints.restore(_trees(2))
    assert (step, meta) == (5, {"position": 40})
    assert _equal(found, saved)
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.read_meta() == {"position": 40}


def test_donating_right_after_save_is_safe(tmp_path):
    saved = _trees(1)
    expected = np.asarray(saved["state"].params["a"]).copy()
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, saved)
        double = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s), donate_argnums=0)
        double(saved["state"])
        _, found, _ = checkpoints.restore(_trees(2))
    np.testing.assert_array_equal(found["state"].params["a"], expected)


def test_restored_arrays_lie_where_the_target_lies(tmp_path):
    from sharding import get_layout, make_mesh, row_sharding

    layout = get_layout("fsdp")
    sharding = row_sharding(layout, make_mesh(layout))
    array = jnp.arange(32.0)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"policy": {"w": jax.device_put(array, sharding)}})
        _, whole, _ = checkpoints.restore({"policy": {"w": array}})
        target = jax.ShapeDtypeStruct((32,), jnp.float32, sharding=sharding)
        _, split, _ = checkpoints.restore({"policy": {"w": target}})
    assert whole["policy"]["w"].sharding.is_fully_replicated
    assert split["policy"]["w"].sharding == sharding
    np.testing.assert_array_equal(split["policy"]["w"], array)


@pytest.mark.fault(62)
def test_an_empty_step_folder_is_not_taken_for_the_latest(tmp_path, caplog):
    saved = _trees()
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(2, saved, {"ok": True})
    (tmp_path / "9").mkdir()
    with Checkpointer(tmp_path) as checkpoints:
        step, found, _ = checkpoints.restore(_trees(2))
        assert checkpoints.read_meta() == {"ok": True}
    assert step == 2 and _equal(found, saved)
    assert "step 9" in caplog.text


def _damage(folder: pathlib.Path) -> None:
    """Flip one bit in the middle of the largest data file of a step."""
    data = max(
        (p for p in folder.rglob("*") if p.is_file() and "/d/" in p.as_posix()),
        key=lambda p: p.stat().st_size,
    )
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


@pytest.mark.fault(62)
def test_a_damaged_step_is_skipped_and_said(tmp_path, caplog):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, _trees(1))
        checkpoints.save(2, _trees(2))
    _damage(tmp_path / "2")
    with Checkpointer(tmp_path) as checkpoints:
        step, found, _ = checkpoints.restore(_trees(3))
    assert step == 1 and _equal(found, _trees(1))
    assert "step 2" in caplog.text


def test_a_step_with_the_earlier_digests_is_not_called_damaged(tmp_path, monkeypatch):
    with monkeypatch.context() as earlier, Checkpointer(tmp_path) as checkpoints:
        earlier.setattr("rlhf_jax._digests.of", lambda arrays: dict.fromkeys(arrays, 3632233996))
        checkpoints.save(1, _trees(1))
    refused = pytest.raises(CheckpointError, match="written by an rlhf-jax before")
    with Checkpointer(tmp_path) as checkpoints, refused:
        checkpoints.restore(_trees(1))


def test_nothing_to_restore_is_an_error_that_says_where(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="holds no step"):
            checkpoints.restore({"state": {"a": jnp.zeros(1)}})
        checkpoints.save(1, {"state": {"a": jnp.zeros(1)}})
        with pytest.raises(CheckpointError, match="no step 4"):
            checkpoints.restore({"state": {"a": jnp.zeros(1)}}, step=4)
        with pytest.raises(CheckpointError, match="step 1"):
            checkpoints.restore({"state": {"b": jnp.zeros(1)}})


def test_old_steps_are_deleted(tmp_path):
    with Checkpointer(tmp_path, max_to_keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"a": {"x": jnp.full(2, step)}})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]


def test_a_digest_sees_values_and_names():
    digest = rl.checkpoint.digest
    tree = {"a": jnp.arange(4.0), "b": None}
    assert digest(tree) == digest({"a": np.arange(4, dtype=np.float32)})
    assert digest(tree) != digest({"c": jnp.arange(4.0)})
    assert digest(tree) != digest({"a": jnp.arange(4.0).at[3].set(np.nextafter(3, 4, dtype="f"))})


@pytest.mark.fault(62)
def test_after_a_damaged_step_later_ones_are_saved_again(tmp_path):
    """Orbax saves nothing before its latest step, be it an empty folder, and does not say so."""
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, _trees(1))
        checkpoints.save(2, _trees(2))
    _damage(tmp_path / "2")
    (tmp_path / "9").mkdir()
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore(_trees(3))[0] == 1
        assert checkpoints.steps() == [1, 2, 9]  # reading alone moves nothing
        checkpoints.save(2, _trees(4))
        step, found, _ = checkpoints.restore(_trees(3))
        assert step == 2 and _equal(found, _trees(4))
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "unusable-2", "unusable-9"}


def test_a_step_before_the_latest_is_refused_aloud(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(5, {"a": {"x": jnp.zeros(1)}})
        with pytest.raises(CheckpointError, match=r"step 3 cannot .* later steps \(5\)"):
            checkpoints.save(3, {"a": {"x": jnp.zeros(1)}})


def test_a_failed_save_is_one_line_and_keeps_the_earlier_steps(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, _trees(1))
        checkpoints.wait()

        def full(*_, **__):
            raise OSError(28, "No space left on device\nin three\nlines")

        monkeypatch.setattr(checkpoints._manager, "save", full)
        with pytest.raises(CheckpointError, match=r"MiB free.*No space left.*there: 1") as caught:
            checkpoints.save(2, _trees(2))
        assert "\n" not in str(caught.value)
        assert _equal(checkpoints.restore(_trees(3))[1], _trees(1))


def test_an_error_without_a_text_is_named(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": {"x": jnp.zeros(1)}})

        def silent(*_, **__):
            raise EOFError

        monkeypatch.setattr(checkpoints, "_read", silent)
        with pytest.raises(CheckpointError, match="step 1: EOFError"):
            checkpoints.restore({"a": {"x": jnp.zeros(1)}})

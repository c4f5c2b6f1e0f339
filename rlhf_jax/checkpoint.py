"""Orbax checkpoints of named pytrees, with digests and a fall-back to the last whole one.

With several processes all of them save and restore, on a disk that they share. A checkpoint does
not depend on how many there were: neither do its arrays' digests (:mod:`rlhf_jax._digests`).

Orbax writes a step into a temporary folder and renames it, so a killed run leaves no half step.
It does not notice a damaged file or an empty step folder; the digest kept beside each array does,
and :meth:`Checkpointer.restore` then says so and takes the step before.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import shutil
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from rlhf_jax import _digests
from rlhf_jax.partition import path_name

__all__ = ["CheckpointError", "Checkpointer", "digest"]

logger = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """No checkpoint could be restored; the message says why and what to do."""


class Checkpointer:
    """Saves and restores ``{name: pytree}`` by step, e.g. policy, reference, optimizer.

    Args:
      directory: where the steps go; made when missing.
      max_to_keep: older steps are deleted when there are more.

    >>> import tempfile, jax.numpy as jnp
    >>> with Checkpointer(tempfile.mkdtemp()) as checkpoints:
    ...     checkpoints.save(3, {"policy": {"w": jnp.arange(2.0)}}, {"task": "toy"})
    ...     step, trees, meta = checkpoints.restore({"policy": {"w": jnp.zeros(2)}})
    >>> step, trees["policy"]["w"].tolist(), meta["task"]
    (3, [0.0, 1.0], 'toy')
    """

    def __init__(self, directory: str | pathlib.Path, *, max_to_keep: int = 2):
        # Orbax takes a second to import and is of no use to who only composes losses.
        import orbax.checkpoint as ocp

        self._ocp = ocp
        self.directory = pathlib.Path(directory).absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep,
            create=True,
            cleanup_tmp_directories=True,
            single_host_load_and_broadcast=True,  # hosts may see a shared disk's folders later
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        # The manager's reading ends with a barrier, which a process that could not read never gets
        # to; here each reads for itself, and then they vote.
        me = jax.process_index()
        self._reader = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(),
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=me, active_processes={me}
            ),
        )
        self._unusable: set[int] = set()  # steps that restore() had to pass over

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Steps on disk, oldest first, as process 0 found them."""
        return sorted(map(int, self._manager.all_steps()))

    def save(self, step: int, trees: dict[str, Any], meta: dict[str, Any] | None = None) -> None:
        """Save, in the background: the arrays are copied before this returns and may be donated.

        Args:
          step: the number to save under; a step that is there already is left as it is.
          trees: pytrees of arrays by name; ``None`` leaves are skipped.
          meta: anything JSON can hold.

        Raises:
          CheckpointError: if this save or the one before it failed, e.g. on a full disk, or if the
            folder holds later steps. What was saved earlier stays as it is.
        """
        self._set_aside()
        if step in self.steps():
            return
        flat = {name: _flatten(tree) for name, tree in trees.items()}
        digests = {name: _digests.of(tree) for name, tree in flat.items()}
        items = {name: self._ocp.args.StandardSave(tree) for name, tree in flat.items()}
        record = {"step": step, "digests": digests, "user": meta or {}}
        args = self._ocp.args.Composite(**items, meta=self._ocp.args.JsonSave(record))
        with self._saving():
            saved = self._manager.save(step, args=args)
        if not saved:  # Orbax passes over a step before its latest without a word
            raise CheckpointError(
                f"step {step} cannot be saved in {self.directory}: it holds later steps "
                f"({', '.join(map(str, self.steps()))}); use another folder"
            )

    def wait(self) -> None:
        """Block until what was saved is on disk; raises :class:`CheckpointError` if it failed."""
        with self._saving():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the last save and release Orbax's threads."""
        try:
            self.wait()
        finally:
            self._manager.close()
            self._reader.close()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Turn whatever Orbax and its storage raise into one line."""
        try:
            yield
        except Exception as error:
            free = shutil.disk_usage(self.directory).free / 2**20
            raise CheckpointError(
                f"a checkpoint could not be saved in {self.directory} ({free:,.0f} MiB free): "
                f"{_reason(error)}; whole ones there: {', '.join(map(str, self.steps())) or 'none'}"
            ) from error

    def _set_aside(self) -> None:
        """Move steps that could not be read out of the way: Orbax saves no step before them."""
        for step in sorted(self._unusable) if jax.process_index() == 0 else ():
            number, path = 0, self.directory / f"unusable-{step}"
            while path.exists():
                number += 1
                path = self.directory / f"unusable-{step}-{number}"
            (self.directory / str(step)).rename(path)
            logger.warning("checkpoint step %s could not be read; it is now %s", step, path)
        if self._unusable:
            _digests.everywhere(True)  # nobody looks before process 0 has moved them
            self._unusable.clear()
            self._manager.reload()

    def restore(
        self, targets: dict[str, Any], *, step: int | None = None
    ) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """Restore the newest whole step (or one given step) into the targets' structure.

        A newer step that cannot be read stays where it is until the next :meth:`save`, which
        renames it to ``unusable-STEP``.

        Args:
          targets: pytrees of arrays or ``ShapeDtypeStruct`` by name: structure, shapes, dtypes and
            shardings of what comes back.
          step: a step of :meth:`steps`; the newest that is whole when None.

        Returns:
          ``(step, trees, meta)``.

        Raises:
          CheckpointError: if there is no step, or none that can be read; names each and why.
        """
        self.wait()
        steps = self.steps()
        if step is not None and step not in steps:
            raise CheckpointError(
                f"no step {step} in {self.directory}; there are: {steps or 'none'}"
            )
        reasons = []
        for candidate in [step] if step is not None else reversed(steps):
            try:
                trees, meta = self._take(candidate, targets)
            except ValueError as error:
                reasons.append(f"step {candidate}: {_reason(error)}")
                logger.warning("checkpoint %s is unusable, trying an older one", reasons[-1])
                continue
            if step is None:
                self._unusable = {later for later in steps if later > candidate}
            return candidate, trees, meta
        raise CheckpointError(
            f"no usable checkpoint in {self.directory}"
            + (": " + "; ".join(reasons) if reasons else " (it holds no step)")
        )

    def read_meta(self) -> dict[str, Any]:
        """The ``meta`` of the newest step that has one; ``{}`` if there is none."""
        self.wait()
        for step in reversed(self.steps()):
            try:
                args = self._ocp.args.Composite(meta=self._ocp.args.JsonRestore())
                found = self._reader.restore(self.directory / str(step), args=args)
                return found["meta"]["user"]
            except Exception as error:
                logger.warning("checkpoint step %s has no readable meta: %s", step, error)
        return {}

    def _take(self, step: int, targets: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read one step; all processes do, or all raise ValueError."""
        found, reason = None, "another process could not read it"
        try:
            found = self._read(step, targets)
        except Exception as error:  # whatever Orbax meets in a damaged folder
            reason = _reason(error)
        if not _digests.everywhere(found is not None) or found is None:
            raise ValueError(reason)
        record = found["meta"]
        digests = {name: _digests.of(found[name]) for name in targets}  # all, before any raises
        for name, those in digests.items():
            for path, digest_ in those.items():
                expected = record["digests"][name][path]
                if not isinstance(expected, str):  # a CRC-32, which knew one process only
                    raise ValueError("written by an rlhf-jax before layout-free digests")
                if expected != digest_:
                    raise ValueError(f"{name}/{path} does not match its digest (damaged file)")
        trees = {name: _unflatten(found[name], tree) for name, tree in targets.items()}
        return trees, record["user"]

    def _read(self, step: int, targets: dict[str, Any]) -> dict[str, Any]:
        flat = {name: jax.tree.map(_abstract, _flatten(tree)) for name, tree in targets.items()}
        args = {name: self._ocp.args.StandardRestore(tree) for name, tree in flat.items()}
        found = self._reader.restore(
            self.directory / str(step),
            args=self._ocp.args.Composite(**args, meta=self._ocp.args.JsonRestore()),
        )
        record = found["meta"]
        for name, tree in flat.items():  # what is missing is an error of this step, not of the run
            _ = [record["digests"][name][path] for path in tree], record["user"]
        return {name: found[name] for name in (*targets, "meta")}


def digest(tree: Any) -> str:
    """A short digest of a pytree's names and values, to notice that weights are not the same.

    Args:
      tree: a pytree of arrays, laid out in any way; with several processes all must call.

    Returns:
      Eight hexadecimal digits.

    >>> import jax.numpy as jnp
    >>> digest({"w": jnp.ones(2)}) == digest({"w": jnp.zeros(2)})
    False
    """
    found = 0
    for path, one in sorted(_digests.of(_flatten(tree)).items()):
        found = zlib.crc32(f"{path}={one};".encode(), found)
    return f"{found:08x}"


def _reason(error: Exception) -> str:
    """An error's first line, shortened in the middle, or its kind if it says nothing."""
    text = next(iter(str(error).splitlines()), "") or type(error).__name__
    return text if len(text) <= 200 else f"{text[:100]} … {text[-98:]}"


def _flatten(tree: Any) -> dict[str, Any]:
    """A flat dict by path: Optax states and ``None`` leaves need no special case on disk."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _unflatten(flat: dict[str, Any], target: Any) -> Any:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(target)
    return treedef.unflatten([flat[path_name(path)] for path, _ in leaves])


def _abstract(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)

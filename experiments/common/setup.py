"""Everything before the first step: task, model, layout, prompts, folder."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tasks

import rlhf_jax as rl
import sharding
from common import hosts, pod
from common.config import SMALL_MODEL, Config, Filled, fill, flag
from rlhf_jax import checkpoint, data, partition, policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that was set up before the first step."""

    config: Filled  # the flags that all scripts share
    own: Any  # the script's Config as the run began with it, its own flags included
    folder: Path
    resumed: bool  # there are checkpoints to go on from
    task: tasks.Task
    model: rl.models.Decoder
    params: Any
    tokenizer: Any
    trainable: Any  # the part of params that is trained (None elsewhere)
    frozen: Any
    trunk_stacks: int  # leading stacks that are frozen and shared by policy and reference
    layout: sharding.Layout
    mesh: jax.sharding.Mesh
    shardings: Any  # of the trainable part
    source: data.PromptSource
    held_out: data.PromptSource
    stop_ids: tuple[int, ...]
    key: jax.Array

    def place_rows(self, tree: Any) -> Any:
        """Put row-first arrays where the layout wants them; scalars go everywhere."""
        rows = sharding.row_sharding(self.layout, self.mesh)
        whole = jax.NamedSharding(self.mesh, jax.P())
        return hosts.place(tree, jax.tree.map(lambda x: rows if np.ndim(x) else whole, tree))

    def owners(self, rows: int) -> np.ndarray:
        """Which process decodes and scores each of so many rows; int [rows]."""
        return hosts.owners(rows, self.layout, self.mesh)

    def sharing(self, rows: int) -> int:
        """How many of ``rows`` compute a prompt together: a group, if devices hold whole ones."""
        group = self.config.group_size
        parts = math.prod(self.mesh.shape[axis] for axis in self.layout.rows)
        return 1 if rows % (group * parts) else group

    @functools.cached_property
    def frozen_digest(self) -> str:
        """Names the frozen weights: a resumed run must go on with the same ones."""
        return checkpoint.digest(self.frozen)

    @functools.cached_property
    def prompts_digest(self) -> str | None:
        """Names the prompts, for the same reason; generated ones depend on the seed alone."""
        rows = self.task.train
        return None if isinstance(rows, data.GeneratedRows) else data.fingerprint(rows)


def start(config: Config, *, algorithm: str, name: str | None = None) -> Run:
    """Set a run up: task, model, tokenizer, layout, prompts, folder.

    Args:
      config: the flags.
      algorithm: the script's name; a run goes on with the script that began it.
      name: begins the name of a new folder; the algorithm by default.

    Raises:
      ValueError, OSError, ImportError: one line that says what is wrong with the input.
    """
    folder, own, resumed = _opened(config, algorithm, name or algorithm)
    task = tasks.build(own.task, seed=own.seed, prompts=own.prompts, reward=own.reward)
    config = fill(own, task.defaults)
    layout = sharding.get_layout(config.layout)
    mesh = sharding.make_mesh(layout)
    hosts.check_mesh(layout, mesh)
    prompts = config.prompts_per_step
    _check_sizes(config, task, layout, mesh)
    model, params, tokenizer = _load(config, task)
    buckets = _bucket(task, tokenizer)
    _check_length(config, model, max(buckets))
    _check_same(task, layout, model, buckets)
    shardings = sharding.tree_shardings(model.logical_axes(), params, layout, mesh)
    params = hosts.place(params, shardings)
    # A checkpoint holds what is trained; layers that the warm-up taught and RL froze are redone.
    warm = not resumed or bool(config.trainable_layers)
    if task.scratch is not None and config.model is None and warm:
        params = _warm_up(config, task.scratch, model, params)
    if mesh.size > 1:
        model = dataclasses.replace(
            model,
            placement=sharding.activation_sharding(layout, mesh),
            decode_placement=sharding.decode_sharding(layout, mesh),
        )
    trainable, frozen = partition.split(params, _is_trainable(config, model))
    shared = jax.tree.leaves(trainable["embed"]) == [] and len(model.stacks) > 1
    held_out = list(task.held_out)
    held_out *= -(-prompts // len(held_out))  # at least one batch of them
    train_source, held_out_source = (
        data.PromptSource(
            rows,
            batch_size=prompts,
            seed=config.seed,
            tokenizer=tokenizer,
            buckets=buckets,
            chat=task.defaults.chat,
            system=task.defaults.system,
        )
        for rows in (task.train, held_out)
    )
    own = dataclasses.replace(own, **vars(config))
    hosts.first(lambda: _write_config(folder, own, algorithm))
    hosts.together(lambda: _check_shared(folder))
    pod.can_resume(folder)
    return Run(
        config=config,
        own=own,
        folder=folder,
        resumed=resumed,
        task=task,
        model=model,
        params=params,
        tokenizer=tokenizer,
        trainable=trainable,
        frozen=frozen,
        trunk_stacks=1 if shared else 0,
        layout=layout,
        mesh=mesh,
        shardings=jax.tree.map(lambda x: x.sharding, trainable),
        source=train_source,
        held_out=held_out_source,
        stop_ids=_stop_ids(task, tokenizer),
        key=jax.random.key(config.seed),
    )


def _opened(config: Config, algorithm: str, name: str) -> tuple[Path, Config, bool]:
    """The run's folder, its flags, and whether it goes on; as process 0 finds them."""
    # Where a run is, is no part of what it is.
    flags = {f.name: f.default for f in dataclasses.fields(config) if f.name in pod.FLAGS}
    config = dataclasses.replace(config, **flags)

    def look() -> dict[str, Any]:
        folder, own = _folder(config, algorithm, name)
        own = dataclasses.asdict(own)
        return {"folder": str(folder), "own": own, "resumed": bool(_saved_steps(folder))}

    found = hosts.first(look)
    return Path(found["folder"]), type(config)(**found["own"]), found["resumed"]


def _folder(config: Config, algorithm: str, name: str) -> tuple[Path, Config]:
    if config.resume is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"{name}-{config.task.replace(':', '-')}-{stamp}"
        folder = Path(config.run_dir or Path("runs") / name)
        if (folder / "config.json").exists() or _saved_steps(folder):
            raise FileExistsError(
                f"--run-dir {folder} already holds a run: go on with --resume {folder}, "
                "or choose another folder"
            )
        return folder, config
    return Path(config.resume), _stored(config, Path(config.resume), algorithm)


def _stored(config: Config, folder: Path, algorithm: str) -> Config:
    """The flags that a resumed run began with; only --steps may be new."""
    given = [
        flag(field.name)
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default and field.name not in ("resume", "steps")
    ]
    if given:
        raise ValueError(
            f"--resume {folder} goes on with the flags that the run began with; "
            f"drop {', '.join(given)} (only --steps can change)"
        )
    try:
        stored = json.loads((folder / "config.json").read_text())
        began = stored.get("algorithm", algorithm)
        known = {field.name for field in dataclasses.fields(config)}
        stored = {name: value for name, value in stored.items() if name in known}
        if not isinstance(stored["task"], str):
            raise TypeError
    except OSError:
        raise FileNotFoundError(
            f"--resume {folder}: there is no run (no config.json) in that folder"
        ) from None
    except (ValueError, AttributeError, KeyError, TypeError):
        raise ValueError(
            f"--resume {folder}: its config.json is damaged; write the run's flags into it again"
        ) from None
    if began != algorithm:
        raise ValueError(
            f"--resume {folder}: {began}.py began that run; go on with it, not with {algorithm}.py"
        )
    steps = stored.get("steps") if config.steps is None else config.steps
    done = max(_saved_steps(folder), default=0)
    if isinstance(steps, int) and steps < done:
        raise ValueError(f"--steps {steps}: the run in {folder} has already done {done}")
    return type(config)(**{**stored, "steps": steps, "resume": str(folder)})


def _saved_steps(folder: Path) -> list[int]:
    """Steps that a run saved; not an empty folder, nor the temporary one of a killed save."""
    found = (folder / "checkpoints").glob("*/*")
    return [int(name) for name in {path.parent.name for path in found} if name.isdecimal()]


def _check_sizes(
    config: Filled, task: tasks.Task, layout: sharding.Layout, mesh: jax.sharding.Mesh
) -> None:
    """Check what the prompts and the layout allow."""
    rows, group, prompts = config.batch_size, config.group_size, config.prompts_per_step
    if prompts > len(task.train):
        raise ValueError(
            f"--batch-size {rows} takes {prompts} different prompts a step ({group} completions "
            f"each), but there are {len(task.train)}; use at most {len(task.train) * group}"
        )
    sharding.check_rows(prompts, layout, mesh, name=f"{prompts} prompts a step")
    part = rows // config.micro_batches
    sharding.check_rows(part, layout, mesh, name=f"{part} rows a micro-batch")


def _check_length(config: Filled, model: rl.models.Decoder, prompt: int) -> None:
    most = model.config.max_position_embeddings
    if prompt + config.max_new_tokens > most:
        raise ValueError(
            f"--max-new-tokens {config.max_new_tokens} after prompts of {prompt} tokens is more "
            f"than the {most} positions of the model"
        )


def _check_same(
    task: tasks.Task, layout: sharding.Layout, model: rl.models.Decoder, buckets: tuple[int, ...]
) -> None:
    """Check that all hosts read the same; other shapes would leave them waiting for each other."""
    if jax.process_count() == 1:
        return
    files = [x for x in (task.train, task.held_out) if not isinstance(x, data.GeneratedRows)]
    mine = {
        "--prompts": " ".join(map(data.fingerprint, files)),
        "--layout": repr(layout),
        "--model": repr(model.config),
        "tokenizer (width of the prompts)": repr(buckets),
    }
    found = hosts.exchange({"who": hosts.own_name(), **mine})
    for other in found:
        for name in mine:
            if other[name] != found[0][name]:
                raise ValueError(
                    f"{other['who']} does not read the same {name} as process 0; bring the same "
                    "files to all hosts"
                )


def _write_config(folder: Path, config: Config, algorithm: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stored = dataclasses.asdict(dataclasses.replace(config, resume=None))
    stored = {name: value for name, value in stored.items() if name not in pod.FLAGS}
    stored["algorithm"] = algorithm
    temporary = folder / "config.json.tmp"
    temporary.write_text(json.dumps(stored, indent=1) + "\n")
    temporary.replace(folder / "config.json")


def _check_shared(folder: Path) -> None:
    """Check that this process sees what process 0 wrote; a network's disk may take a while."""
    for _ in range(20):
        if (folder / "config.json").exists():
            return
        time.sleep(0.5)
    raise ValueError(
        f"{folder.absolute()} is not the folder that process 0 writes to: give a --run-dir on a "
        "disk that all hosts share"
    )


def _load(config: Filled, task: tasks.Task) -> tuple[rl.models.Decoder, Any, Any]:
    if task.scratch is not None and config.model is None:
        name = "the model from scratch"
        hf_config = rl.models.DecoderConfig.from_hf(dict(task.scratch.config))
        model = rl.models.Decoder(hf_config, dtype=config.dtype)
        params = model.init(jax.random.fold_in(jax.random.key(config.seed), 2**31 - 1))
        tokenizer = task.scratch.tokenizer()
    else:
        name = config.model or SMALL_MODEL
        model, params = rl.models.load(name, dtype=config.dtype)
        tokenizer = rl.models.load_tokenizer(name, config=model.config)
    layers, last = model.config.num_layers, config.trainable_layers or 0
    if last > layers:
        raise ValueError(f"--trainable-layers {last}: {name} has {layers} layers")
    if 0 < last < layers:
        params = model.restack(params, (layers - last, last))
        model = dataclasses.replace(model, stacks=(layers - last, last))
    return model, params, tokenizer


def _is_trainable(config: Filled, model: rl.models.Decoder) -> str:
    if not config.trainable_layers:
        return ".*"
    return rf"^layers/{len(model.stacks) - 1}/"


def _bucket(task: tasks.Task, tokenizer: Any) -> tuple[int, ...]:
    """One prompt width for the run where the prompts can be counted, so that nothing recompiles."""
    sizes = task.defaults.buckets
    if isinstance(task.train, data.GeneratedRows) or task.defaults.chat:
        return sizes
    texts = [row["prompt"] for row in (*task.train, *task.held_out)]
    longest = data.encode(tokenizer, texts, buckets=(*sizes, *data.DEFAULT_BUCKETS))
    return (longest.tokens.shape[1],)


def _stop_ids(task: tasks.Task, tokenizer: Any) -> tuple[int, ...]:
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for text in task.defaults.stop:
        found = tokenizer.encode(text, add_special_tokens=False)
        if len(found) != 1:
            raise ValueError(
                f"the task stops at {text!r}, which is {len(found)} tokens for this tokenizer; "
                "a stop must be one token"
            )
        ids.append(int(found[0]))
    return tuple(ids)


def _warm_up(config: Filled, scratch: tasks.Scratch, model: Any, params: Any) -> Any:
    """Supervised steps on solved examples: RL needs something to start from."""
    optimizer = optax.adamw(scratch.warmup_learning_rate, weight_decay=0.0)

    def loss_fn(output: rl.types.PolicyOutput, batch: rl.Batch):
        denominator = batch.denominator
        return rl.masked.aggregate(
            -output.log_probs, batch.mask, "token_mean", denominator=denominator
        ), {}

    step = rl.make_train_step(policy.from_decoder(model, with_entropy=False), loss_fn, optimizer)
    state = rl.init_train_state(params, optimizer)
    steps = scratch.warmup_steps if config.warmup_steps is None else config.warmup_steps
    for index in range(steps):
        rows = scratch.warmup_batch(config.seed, index)
        tokens, mask = jnp.asarray(rows["tokens"]), jnp.asarray(rows["mask"])
        zeros = jnp.zeros(tokens.shape, jnp.float32)
        batch = rl.Batch(
            tokens=tokens,
            mask=mask,
            attention_mask=jnp.ones_like(mask),
            group_ids=jnp.arange(len(tokens)),
            advantages=zeros,
            old_log_probs=zeros,
            sampler_log_probs=zeros,
            denominator=jnp.full(len(tokens), mask.sum(), jnp.float32),
        )
        state, _ = step(state, batch)
    shardings = jax.tree.map(lambda x: x.sharding, params)
    return hosts.place(state.params, shardings)

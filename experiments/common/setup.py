"""Everything before the first step: task, model, layout, prompts, folder."""

from __future__ import annotations

import dataclasses
import functools
import json
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
from common.config import SMALL_MODEL, Config, Filled, fill
from rlhf_jax import checkpoint, data, partition, policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that was set up before the first step."""

    config: Filled
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
        return jax.device_put(tree, jax.tree.map(lambda x: rows if np.ndim(x) else whole, tree))

    @functools.cached_property
    def frozen_digest(self) -> str:
        """Names the frozen weights: a resumed run must go on with the same ones."""
        return checkpoint.digest(self.frozen)


def start(config: Config, *, algorithm: str) -> Run:
    """Set a run up: task, model, tokenizer, layout, prompts, folder.

    Raises:
      ValueError, OSError, ImportError: one line that says what is wrong with the input.
    """
    folder, config = _folder(config, algorithm)
    resumed = config.resume is not None and any((folder / "checkpoints").glob("[0-9]*"))
    task = tasks.build(config.task, seed=config.seed, prompts=config.prompts, reward=config.reward)
    config = fill(config, task.defaults)
    layout = sharding.get_layout(config.layout)
    mesh = sharding.make_mesh(layout)
    prompts = config.prompts_per_step
    sharding.check_rows(prompts, layout, mesh, name=f"{prompts} prompts a step")
    model, params, tokenizer = _load(config, task)
    shardings = sharding.tree_shardings(model.logical_axes(), params, layout, mesh)
    params = jax.device_put(params, shardings)
    trainable, frozen = partition.split(params, _is_trainable(config, model))
    if task.scratch is not None and config.model is None and not resumed:
        trainable = _warm_up(config, task.scratch, model, trainable)
        params = partition.merge(trainable, frozen)
    shared = jax.tree.leaves(trainable["embed"]) == [] and len(model.stacks) > 1
    held_out = list(task.held_out)
    held_out *= -(-prompts // len(held_out))  # at least one batch of them
    train_source, held_out_source = (
        data.PromptSource(
            rows,
            batch_size=prompts,
            seed=config.seed,
            tokenizer=tokenizer,
            buckets=_bucket(task, tokenizer),
            chat=task.defaults.chat,
            system=task.defaults.system,
        )
        for rows in (task.train, held_out)
    )
    folder.mkdir(parents=True, exist_ok=True)
    _write_config(folder, config)
    return Run(
        config=config,
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


def _folder(config: Config, algorithm: str) -> tuple[Path, Config]:
    if config.resume is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"{algorithm}-{config.task.replace(':', '-')}-{stamp}"
        folder = Path(config.run_dir or Path("runs") / name)
        if (folder / "config.json").exists():
            raise FileExistsError(
                f"--run-dir {folder} already holds a run: go on with --resume {folder}, "
                "or choose another folder"
            )
        return folder, config
    folder = Path(config.resume)
    try:
        stored = json.loads((folder / "config.json").read_text())
    except OSError:
        raise FileNotFoundError(
            f"--resume {folder}: there is no run (no config.json) in that folder"
        ) from None
    known = {field.name for field in dataclasses.fields(Config)}
    stored = {name: value for name, value in stored.items() if name in known}
    given = {} if config.steps is None else {"steps": config.steps}
    return folder, Config(**{**stored, **given, "resume": str(folder)})


def _write_config(folder: Path, config: Filled) -> None:
    stored = dataclasses.asdict(dataclasses.replace(config, resume=None))
    temporary = folder / "config.json.tmp"
    temporary.write_text(json.dumps(stored, indent=1) + "\n")
    temporary.replace(folder / "config.json")


def _load(config: Filled, task: tasks.Task) -> tuple[rl.models.Decoder, Any, Any]:
    if task.scratch is not None and config.model is None:
        hf_config = rl.models.DecoderConfig.from_hf(dict(task.scratch.config))
        model = rl.models.Decoder(hf_config, dtype=config.dtype)
        key = jax.random.fold_in(jax.random.key(config.seed), 2**31 - 1)
        return model, model.init(key), task.scratch.tokenizer()
    name = config.model or SMALL_MODEL
    model, params = rl.models.load(name, dtype=config.dtype)
    layers, last = model.config.num_layers, config.trainable_layers or 0
    if last > layers:
        raise ValueError(f"--trainable-layers {last}: {name} has {layers} layers")
    if 0 < last < layers:
        params = model.restack(params, (layers - last, last))
        model = dataclasses.replace(model, stacks=(layers - last, last))
    return model, params, rl.models.load_tokenizer(name, config=model.config)


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
    return jax.device_put(state.params, shardings)

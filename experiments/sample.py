"""Sample from a trained run, a Hugging Face folder, or a hub name; without a prompt, ask for some.

python experiments/sample.py runs/NAME "The hotel stands behind the station"
python experiments/sample.py                              # the latest run, an interactive prompt
python experiments/sample.py smollm2-135m --chat "What is the capital of France?"
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import common
import jax
import numpy as np
import tyro

import rlhf_jax as rl
from rlhf_jax import data


@dataclasses.dataclass(frozen=True)
class Flags:
    """What to sample from, and how."""

    model: Annotated[str | None, tyro.conf.Positional] = None
    """A run's folder, a model folder or hub name; the latest run when left out."""
    prompt: Annotated[str | None, tyro.conf.Positional] = None
    """The text to continue; asked for when left out."""
    number: int = 3
    """Completions of each prompt."""
    max_new_tokens: int | None = None
    """Length cap; by default twice what the run trained with, else 64."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample from the nucleus of mass p; 1 is off."""
    chat: bool = False
    """Put the prompt into the model's chat template."""
    seed: int = 0
    """The same seed repeats the same samples."""


def latest_run() -> Path:
    """The newest run that has a model."""
    found = sorted(Path("runs").glob("*/model/config.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError("no finished run in runs/: give a folder, or train one first")
    return found[-1].parent.parent


def locate(flags: Flags) -> tuple[str, int]:
    """The model's folder or name, and the length cap."""
    name = str(latest_run()) if flags.model is None else flags.model
    length = 64
    if (Path(name) / "model" / "config.json").exists():
        settings = Path(name) / "config.json"
        if settings.exists():
            try:
                length = 2 * int(json.loads(settings.read_text())["max_new_tokens"])
            except (ValueError, TypeError, KeyError):
                raise ValueError(
                    f"{settings} is damaged or no run's; give {name}/model instead"
                ) from None
        name = str(Path(name) / "model")
    elif (Path(name) / "checkpoints").exists():
        raise FileNotFoundError(
            f"{name} has no model yet: finish the run with its script and --resume {name}"
        )
    return name, length if flags.max_new_tokens is None else flags.max_new_tokens


def sample(flags: Flags, model: Any, params: Any, tokenizer: Any, prompt: str, length: int) -> None:
    """Print completions of one prompt."""
    encoded = data.encode(tokenizer, [prompt], chat=flags.chat)
    stop = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    rollout = rl.generate(
        model,
        params,
        encoded.tokens,
        encoded.attention_mask,
        jax.random.key(flags.seed),
        group_size=flags.number,
        max_new_tokens=length,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        stop_ids=stop,
    )
    for row, count in zip(rollout.tokens, rollout.lengths, strict=True):
        ids = np.asarray(row)[rollout.start : rollout.start + int(count)]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        print(f"{'' if flags.chat else prompt}{text}\n", flush=True)


def asked() -> Iterator[str]:
    """Prompts that a person types, until an empty line or the end of the input."""
    print("Type the beginning of a text; an empty line ends.", file=sys.stderr)
    while True:
        try:
            prompt = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not prompt.strip():
            return
        yield prompt


def main(flags: Flags) -> int:
    """Load and sample; returns the exit code."""
    name, length = locate(flags)
    if not 0 <= flags.seed < 2**63:
        raise ValueError(f"--seed {flags.seed}: it must be 0 or more, of 64 bits")
    model, params = rl.models.load(name)
    tokenizer = rl.models.load_tokenizer(name, config=model.config)
    if flags.prompt is not None:
        sample(flags, model, params, tokenizer, flags.prompt, length)
        return 0
    for prompt in asked():
        try:
            sample(flags, model, params, tokenizer, prompt, length)
        except ValueError as error:  # e.g. a text that is too long: ask for another one
            print(f"error: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    common.main(main, Flags)

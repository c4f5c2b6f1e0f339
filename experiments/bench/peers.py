"""The shared workload, and the scripts of others that run on it in interpreters of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np

import rlhf_jax as rl

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "bench"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A random model and random prompts of the shared sizes."""

    model: rl.models.Decoder
    params: Any
    tokens: np.ndarray
    group: int
    new_tokens: int
    kl_coef: float
    clip: float
    learning_rate: float

    def generate(self, seed: int, **changes: Any) -> rl.Rollout:
        """One rollout; `changes` override the workload's own options."""
        options: dict[str, Any] = dict(group_size=self.group, max_new_tokens=self.new_tokens)
        tokens = changes.pop("tokens", self.tokens)
        mask = np.ones_like(tokens, bool)
        return rl.generate(
            self.model, self.params, tokens, mask, jax.random.key(seed), **(options | changes)
        )


def workload(file: Path) -> Workload:
    """The shared workload from its file."""
    sizes = json.loads(file.read_text(encoding="utf-8"))
    fields = {field.name for field in dataclasses.fields(rl.models.DecoderConfig)}
    config = rl.models.DecoderConfig(**{k: v for k, v in sizes.items() if k in fields})
    # A scan copies each layer's weights in every step, which a model this small feels.
    model = rl.models.Decoder(config, stacks=(1,) * config.num_layers)
    rng = np.random.default_rng(0)
    shape = (sizes["prompts"], sizes["prompt_length"])
    return Workload(
        model=model,
        params=model.init(jax.random.key(0)),
        tokens=rng.integers(3, config.vocab_size, shape).astype(np.int32),
        group=sizes["group_size"],
        new_tokens=sizes["new_tokens"],
        kl_coef=sizes["kl_coef"],
        clip=sizes["clip"],
        learning_rate=sizes["learning_rate"],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """A script that prints one line of JSON: its interpreter, and why it cannot run, if so.

    `bar` is what this library has to reach in comparison.
    """

    name: str
    script: Path
    python: str | None
    options: tuple[str, ...] = ()
    bar: float

    @property
    def missing(self) -> str | None:
        """Why it is left out."""
        if self.python is None:
            return "no interpreter given"
        if not self.script.exists():
            return f"{self.script.name} is not in the folder of --peers"
        return None

    def run(self) -> dict[str, Any]:
        """Run it once and read what it found."""
        return run_json(self.name, str(self.python), str(self.script), *self.options)


def run_json(name: str, *command: str) -> dict[str, Any]:
    """The JSON in the last line that a command prints; it computes on the CPU.

    Raises:
      RuntimeError: it failed; with the end of what it said.
    """
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])

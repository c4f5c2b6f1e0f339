"""Flags, their defaults by task, and bad input turned into one line."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import tasks

from common import pod
from rlhf_jax import checkpoint

SMALL_MODEL = "smollm2-135m"


@dataclasses.dataclass(frozen=True)
class Config:
    """Flags of every experiment. What is None takes the task's own default.

    A script with flags of its own inherits from this class and checks them in `check_own`.
    """

    least_group: ClassVar[int] = 2
    """A method whose baseline is the group needs two completions of a prompt."""

    task: str = "sentiment"
    """sentiment, addition, sort, or reasoning:NAME."""
    model: str | None = None
    """A Hugging Face folder or hub name; by default smollm2-135m, or the task's own small model."""
    prompts: str | None = None
    """A .txt or .jsonl file of prompts that replaces the task's."""
    reward: str | None = None
    """module:function or file.py:function that replaces the task's reward."""
    steps: int | None = None
    """Optimizer steps of the whole run."""
    batch_size: int | None = None
    """Completions a step: prompts × group_size."""
    group_size: int | None = None
    """Completions of one prompt."""
    max_new_tokens: int | None = None
    """Length cap of a completion."""
    temperature: float | None = None
    """Sampling temperature; the policy that is trained is the tempered one."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0 is off. Update and KL still use the full softmax, for
    which such samples are off-policy: nothing corrects that, and the KL's mean is biased."""
    top_p: float = 1.0
    """Sample from the nucleus of mass p; 1 is off. Off-policy samples, as with --top-k."""
    learning_rate: float | None = None
    """AdamW's learning rate, constant after a short warm-up."""
    kl_coef: float | None = None
    """β, the weight of the KL to the reference; 0 never loads a reference."""
    kl_place: Literal["reward", "loss"] = "reward"
    """k1 in the reward (the gradient of KL(π‖ref)) or k3 in the loss (that of KL(ref‖π))."""
    warmup_steps: int | None = None
    """Supervised steps before RL, for a model from scratch."""
    trainable_layers: int | None = None
    """Train the last N layers only; 0 trains everything."""
    micro_batches: int = 1
    """Parts that the rows of a step are split into; changes memory, never the gradient."""
    layout: str = "single"
    """How to lay model and batch over the devices: single, dp, fsdp, tensor, fsdp_tensor, hsdp,
    sequence, or FILE.toml:NAME; other mesh sizes may follow, as in fsdp_tensor:tensor=4."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of the matmuls; weights and moments stay float32."""
    seed: int = 0
    """Decides prompts, samples and the held-out split."""
    sample_every: int = 5
    """Show two completions every so many steps."""
    save_every: int = 20
    """Checkpoint every so many steps, and at the end."""
    run_dir: str | None = None
    """Folder of the run; by default a new one in runs/."""
    resume: str | None = None
    """Folder of a run to go on with; its own flags count, but for steps."""
    distributed: bool = False
    """One of many processes, which a TPU pod or SLURM numbers; see docs/pods.md."""
    coordinator: str | None = None
    """HOST:PORT of process 0, where nobody numbers them (or JAX_COORDINATOR_ADDRESS)."""
    process_id: int | None = None
    """Which process this is, from 0 on (or JAX_PROCESS_ID)."""
    processes: int | None = None
    """How many there are (or JAX_NUM_PROCESSES)."""
    heartbeat_timeout: int = 25
    """Seconds after which a silent process counts as dead, and all end."""

    def check_own(self, filled: Filled) -> None:
        """Check a script's own flags; ``filled`` has the shared ones with their defaults.

        Raises:
          ValueError: one line that names the flag.
        """


@dataclasses.dataclass(frozen=True)
class Filled(Config):
    """Flags with the task's defaults in the empty places."""

    steps: int = 0
    batch_size: int = 0
    group_size: int = 0
    max_new_tokens: int = 0
    temperature: float = 0.0
    learning_rate: float = 0.0
    kl_coef: float = 0.0
    trainable_layers: int = 0

    @property
    def prompts_per_step(self) -> int:
        """Different prompts in a batch."""
        return self.batch_size // self.group_size


def fill(config: Config, defaults: tasks.Defaults) -> Filled:
    """The shared flags, with the task's defaults where none was given; checks both kinds."""
    group = defaults.group_size if config.group_size is None else config.group_size
    values = dict(
        steps=defaults.steps,
        group_size=group,
        batch_size=defaults.prompts_per_step * group,
        max_new_tokens=defaults.max_new_tokens,
        temperature=defaults.temperature,
        learning_rate=defaults.learning_rate,
        kl_coef=defaults.kl_coef,
        trainable_layers=defaults.trainable_layers or 0,
    )
    shared = [field.name for field in dataclasses.fields(Config)]
    given = {name: value for name in shared if (value := getattr(config, name)) is not None}
    filled = Filled(**{**values, **given})
    _check(filled, config.least_group)
    config.check_own(filled)
    return filled


def check_numbers(
    config: Config,
    *,
    least: Mapping[str, float],
    most: Mapping[str, float] | None = None,
    positive: tuple[str, ...] = (),
) -> None:
    """Check numeric flags: at least, at most, above 0; a flag that is None was not given.

    Raises:
      ValueError: naming the flag as it is written on the command line.
    """
    most = most or {}
    for name in dict.fromkeys((*least, *positive, *most)):
        value, low, high = getattr(config, name), least.get(name), most.get(name, math.inf)
        if value is None:
            continue
        if not isinstance(value, int | float):  # in a config.json that was edited
            raise ValueError(f"{flag(name)} {value!r}: it must be a number")
        if low is not None and not value >= low:  # also refuses NaN
            raise ValueError(f"{flag(name)} {value}: it must be at least {low}")
        if low is None and not value > 0:
            raise ValueError(f"{flag(name)} {value}: it must be above 0")
        if value > high:
            raise ValueError(f"{flag(name)} {value}: it must be at most {high}")
        if math.isinf(value):
            raise ValueError(f"{flag(name)} {value}: it must be finite")


def _check(config: Filled, least_group: int) -> None:
    least = {
        "steps": 1,
        "group_size": least_group,
        "batch_size": 1,
        "max_new_tokens": 1,
        "micro_batches": 1,
        "sample_every": 1,
        "save_every": 1,
        "trainable_layers": 0,
        "warmup_steps": 0,
        "kl_coef": 0,
        "top_k": 0,
        "seed": 0,
    }
    most = {"top_p": 1, "top_k": 2**31 - 1, "seed": 2**63 - 1}
    check_numbers(
        config, least=least, most=most, positive=("temperature", "learning_rate", "top_p")
    )
    rows, group = config.batch_size, config.group_size
    if rows % group:
        raise ValueError(
            f"--batch-size {rows} is not a multiple of --group-size {group}; "
            f"try --batch-size {max(group, rows // group * group)}"
        )
    if rows % config.micro_batches:
        raise ValueError(
            f"--micro-batches {config.micro_batches} does not divide the batch of {rows} rows"
        )


def check_kl_in_reward(config: Config) -> None:
    """Refuse ``--kl-place loss`` for a method that has the KL in its reward.

    Raises:
      ValueError: naming the flag.
    """
    if config.kl_place == "loss":
        raise ValueError("--kl-place loss is grpo.py's: this method has the KL in the reward")


def flag(name: str) -> str:
    """A setting's name as it is written on the command line."""
    return "--" + name.replace("_", "-")


def main(run: Callable[[Any], int], config_class: type = Config) -> None:
    """Parse the flags, run, and turn bad input into one line and exit code 2.

    ``RLHF_JAX_DEBUG=1`` shows the traceback instead.
    """
    import tyro

    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows "?"
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    debug = bool(os.environ.get("RLHF_JAX_DEBUG"))
    config = tyro.cli(config_class, description=sys.modules["__main__"].__doc__)
    line = ""
    try:
        pod.join(config)
        with contextlib.nullcontext() if debug else _own_errors_only():
            code = run(config)
        pod.leave()
    except _BAD_INPUT as error:
        line, code = " ".join(str(error).split()), 2
        _show(error, pod.signed(f"error: {line}"), debug)
        atexit.register(_silence)  # what the threads of a full disk's writers still have to say
    except KeyboardInterrupt as error:
        line, code = "stopped", 130
        _show(error, pod.signed(line), debug)
    except BaseException as error:  # SystemExit too, or the others wait for this process
        if pod.alone():
            raise
        traceback.print_exc()
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the waiting only
            pod.await_verdict(error)
        line, code = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", 1
    if code:
        pod.abandon(code, line)
    sys.exit(code)


_BAD_INPUT = (ValueError, OSError, ImportError, checkpoint.CheckpointError)


def _show(error: BaseException, line: str, debug: bool) -> None:
    if debug and pod.alone():
        raise error
    if debug:
        traceback.print_exc()
    print(line, file=sys.stderr)


@contextlib.contextmanager
def _own_errors_only() -> Iterator[None]:
    """Keep the tracebacks of Orbax's threads off the terminal: what went wrong is raised too."""
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    _silence()
    try:
        yield
    finally:
        sys.excepthook, threading.excepthook, sys.unraisablehook = hooks


def _silence() -> None:
    from absl import logging as absl_logging

    ours = sys.excepthook

    def only_the_main_thread(*error: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            ours(*error)

    sys.excepthook = only_the_main_thread
    threading.excepthook = sys.unraisablehook = lambda _: None
    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)

"""What every experiment shares: flags, set-up, passes, display, saving. No algorithm.

A script reads as its algorithm because everything here has nothing to do with it.
"""

from common.config import Config, Filled, main
from common.display import print_end, print_plan, show_samples, tracker
from common.passes import (
    completions,
    evaluate,
    make_sampler,
    make_scorer,
    peak_bytes,
    policy_of,
    reward_metrics,
    rollout_metrics,
    score,
    start_evaluation,
    timed,
)
from common.saving import Interrupts, export, restore, save, say_resume
from common.setup import Run, start

__all__ = [
    "Config",
    "Filled",
    "Interrupts",
    "Run",
    "completions",
    "evaluate",
    "export",
    "main",
    "make_sampler",
    "make_scorer",
    "peak_bytes",
    "policy_of",
    "print_end",
    "print_plan",
    "restore",
    "reward_metrics",
    "rollout_metrics",
    "save",
    "say_resume",
    "score",
    "show_samples",
    "start",
    "start_evaluation",
    "timed",
    "tracker",
]

"""What every experiment shares: flags, set-up, passes, the loop's surroundings. No algorithm.

A script reads as its algorithm because everything here has nothing to do with it.
"""

from common.config import Config, Filled, check_kl_in_reward, check_numbers, main
from common.critic import Critic, make_critic
from common.hosts import whole
from common.loop import Loop, Samples
from common.passes import LogProbs, policy_of
from common.saving import export, restore, save
from common.setup import Run, start
from common.updates import (
    Collected,
    Learner,
    batch_of,
    check_updates,
    judged,
    kl_in_reward,
    make_learner,
    minibatches,
    reference_of,
)

__all__ = [
    "Collected",
    "Config",
    "Critic",
    "Filled",
    "Learner",
    "LogProbs",
    "Loop",
    "Run",
    "Samples",
    "batch_of",
    "check_kl_in_reward",
    "check_numbers",
    "check_updates",
    "export",
    "judged",
    "kl_in_reward",
    "main",
    "make_critic",
    "make_learner",
    "minibatches",
    "policy_of",
    "reference_of",
    "restore",
    "save",
    "start",
    "whole",
]

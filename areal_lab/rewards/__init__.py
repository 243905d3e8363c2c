"""Judging answers: reward functions, and the service that runs them in killable processes."""

from areal_lab.rewards.exact import exact_first_line, gsm8k, last_number
from areal_lab.rewards.service import RewardError, RewardFunction, RewardOutcome, RewardService

__all__ = [
    # reward functions
    "exact_first_line",
    "gsm8k",
    "last_number",
    # running them
    "RewardError",
    "RewardFunction",
    "RewardOutcome",
    "RewardService",
]

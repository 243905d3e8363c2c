"""Rewards: reward functions, and the service that runs them in processes that can be killed.

May import data, config and host; imported by `pipeline` and by users.
"""

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

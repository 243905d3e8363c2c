"""How many tokens PPO's clip drops, by their age: around the start of the step, around the sampler.

    u = pi_theta / pi_prox     decoupled PPO clips this one (AReaL, arXiv:2505.24298, eq. 5)
    u = pi_theta / pi_behav    standard PPO clips this one: the whole way from the sampler

The clip removes the gradient of a token that has moved far enough the way its advantage pushes it:
u > 1 + eps with A > 0, or u < 1 - eps with A < 0. Counts are over tokens with training fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from areal_lab.extras import require
from areal_lab.runlog.tokens.columns import Column, Tokens

if TYPE_CHECKING:
    import pandas as pd


def clipped_by_lag(tokens: Tokens, *, clip_epsilon: float = 0.2) -> pd.DataFrame:
    """Shares of tokens that the clip drops, by lag (the index, in versions).

    Columns: `tokens`; `decoupled_ppo` and `standard_ppo`, the shares from 0 to 1 that each of them
    drops of these tokens; `weight_change`, the mean of |log(pi_prox / pi_behav)|, in nats.

    Args:
        tokens: of a run with training fields.
        clip_epsilon: half the width of the clip range, as `actor.eps_clip`.

    Raises:
        ValueError: if the run has no training fields, or `clip_epsilon` is not above 0.
        MissingExtra: without pandas.
    """
    require("clipped_by_lag", "notebooks", "pandas")
    import pandas as pd

    if not clip_epsilon > 0:
        raise ValueError(f"clip_epsilon is {clip_epsilon}, but must be > 0")
    if "logprobs" not in tokens:
        raise ValueError("the run has no training fields; record them with token_fields=true")
    trained = np.isfinite(tokens["logprobs"])
    logprobs, proximal, behavior, advantages, lag = (
        tokens[name][trained]
        for name in ("logprobs", "proximal_logprobs", "behavior_logprobs", "advantages", "lag")
    )
    frame = pd.DataFrame(
        {
            "lag": lag,
            "tokens": 1,
            "decoupled_ppo": _dropped(np.exp(logprobs - proximal), advantages, clip_epsilon),
            "standard_ppo": _dropped(np.exp(logprobs - behavior), advantages, clip_epsilon),
            "weight_change": np.abs(proximal - behavior),
        }
    )
    how = dict.fromkeys(frame.columns.drop("lag"), "mean") | {"tokens": "sum"}
    return frame.groupby("lag").agg(how)


def _dropped(ratio: Column, advantages: Column, clip_epsilon: float) -> Column:
    above = (ratio > 1 + clip_epsilon) & (advantages > 0)
    below = (ratio < 1 - clip_epsilon) & (advantages < 0)
    dropped: Column = above | below
    return dropped

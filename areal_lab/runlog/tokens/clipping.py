"""Which tokens are outside of the clip range: around the proximal policy, and around the sampler.

    pi_theta / pi_prox     what decoupled PPO clips (AReaL, arXiv:2505.24298, eq. 5)
    pi_theta / pi_behav    what standard PPO would clip: the whole way from the sampler

Counts are over tokens with training fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from areal_lab.extras import require
from areal_lab.runlog.tokens.columns import Tokens

if TYPE_CHECKING:
    import pandas as pd


def outside_clip_range(tokens: Tokens, *, clip_epsilon: float = 0.2) -> pd.DataFrame:
    """Tokens outside of [1 - clip_epsilon, 1 + clip_epsilon], by lag (the index, in versions).

    Columns: `tokens`; `around_proximal` and `around_behavior`, shares from 0 to 1 of them outside
    of the range by each ratio; `weight_change`, the mean of |log(pi_prox / pi_behav)|, in nats.

    Args:
        tokens: of a run with training fields.
        clip_epsilon: half the width of the range, as `actor.eps_clip`.

    Raises:
        ValueError: if the run has no training fields, or `clip_epsilon` is not above 0.
        MissingExtra: without pandas.
    """
    require("outside_clip_range", "notebooks", "pandas")
    import pandas as pd

    if not clip_epsilon > 0:
        raise ValueError(f"clip_epsilon is {clip_epsilon}, but must be > 0")
    if "logprobs" not in tokens:
        raise ValueError("the run has no training fields; record them with token_fields=true")
    trained = np.isfinite(tokens["logprobs"])
    logprobs, proximal, behavior, lag = (
        tokens[name][trained]
        for name in ("logprobs", "proximal_logprobs", "behavior_logprobs", "lag")
    )
    frame = pd.DataFrame(
        {
            "lag": lag,
            "tokens": 1,
            "around_proximal": np.abs(np.exp(logprobs - proximal) - 1) > clip_epsilon,
            "around_behavior": np.abs(np.exp(logprobs - behavior) - 1) > clip_epsilon,
            "weight_change": np.abs(proximal - behavior),
        }
    )
    how = dict.fromkeys(frame.columns.drop("lag"), "mean") | {"tokens": "sum"}
    return frame.groupby("lag").agg(how)

"""Results of an evaluation: pass@k, rewards and lengths, from the samples of each problem.

A sample is correct if its reward is at least 1. Samples without a reward, because the reward
function failed or timed out, are counted and left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from areal_lab.pipeline.rollout.outcomes import CORRECT, ROUNDING, counted, outcome_of
from areal_lab.pipeline.rollout.scored import ScoredGroup
from areal_lab.runlog.intervals import mean_interval


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One sample."""

    status: str
    """Of the reward: ok, timeout, error or refused."""
    reward: float
    """NaN unless the status is ok."""
    tokens: int
    truncated: bool
    """Whether it was cut off: at its maximum length, number of turns or context."""
    detail: str = ""
    """Traceback of the reward function."""
    end: str = "stop"
    """Why it ended (`data.trajectory.SampleEnd`)."""
    turns: int = 1
    outcome: str = "wrong"
    """See `rollout.outcomes`."""


def samples_of(group: ScoredGroup) -> list[SampleResult]:
    """The samples of one problem, in order."""
    return [
        SampleResult(
            status=sample.outcome.status,
            reward=sample.outcome.reward,
            tokens=sample.tokens,
            truncated=sample.truncated,
            end=sample.end,
            turns=len(sample.turns) or 1,
            detail=sample.outcome.detail,
            outcome=outcome_of(sample),
        )
        for sample in group.samples
    ]


def sample_lines(index: int, group: ScoredGroup) -> list[dict[str, Any]]:
    """The lines of samples.jsonl for one problem; a missing reward is null."""
    return [
        {
            "problem": index,
            "key": group.problem.key,
            "sample": number,
            "reward": None if math.isnan(sample.reward) else sample.reward,
            "status": sample.status,
            "outcome": sample.outcome,
            "tokens": sample.tokens,
            "truncated": sample.truncated,
            "end": sample.end,
            "turns": sample.turns,
            "response": responses[0] if len(responses) == 1 else list(responses),
            **({"detail": sample.detail} if sample.detail else {}),
        }
        for number, (sample, responses) in enumerate(
            zip(samples_of(group), group.completions, strict=True)
        )
    ]


def results(problems: Sequence[Sequence[SampleResult]], ks: Sequence[int]) -> dict[str, Any]:
    """The measured fields of results.json.

    Args:
        problems: the samples of each problem.
        ks: the k of each pass@k; a problem with fewer scored samples is left out of it.
    """
    scored = [[one.reward for one in samples if one.status == "ok"] for samples in problems]
    every = [one for samples in problems for one in samples]
    means = [fmean(rewards) for rewards in scored if rewards]
    return {
        "problems": len(problems),
        "samples": len(every),
        "reward": asdict(mean_interval(means)) if means else None,
        "pass_at": {str(k): pass_at(scored, k) for k in ks},
        "mean_tokens": fmean(one.tokens for one in every) if every else None,
        "truncated_share": fmean(one.truncated for one in every) if every else None,
        "ends": dict(Counter(one.end for one in every)),
        "mean_turns": fmean(one.turns for one in every) if every else None,
        "rewards": dict(Counter(one.status for one in every)),
        "outcomes": counted(one.outcome for one in every),
        "first_failure": next(
            (one.detail or one.status for one in every if one.status != "ok"), ""
        ),
    }


def pass_at(scored: Sequence[Sequence[float]], k: int) -> dict[str, Any] | None:
    """pass@k as mean over problems with its interval; None if no problem has k scored samples.

    Args:
        scored: rewards of each problem's scored samples.
    """
    import torch

    from areal_lab.functional.pass_at_k import pass_at_k

    enough = [rewards for rewards in scored if len(rewards) >= k]
    if not enough:
        return None
    samples = torch.tensor([len(rewards) for rewards in enough])
    correct = torch.tensor(
        [sum(reward >= CORRECT - ROUNDING for reward in rewards) for rewards in enough]
    )
    return asdict(mean_interval(pass_at_k(samples, correct, k=k).tolist()))

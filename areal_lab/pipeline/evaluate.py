"""Measure rewards on held-out problems, and compute pass@k, rewards and lengths of an evaluation.

A sample is correct if its reward is at least 1. Samples without a reward, because the reward
function failed or timed out, are counted and left out.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from areal_lab.agents.workflow import Episode
from areal_lab.control.events import Version
from areal_lab.data.problems import Problem
from areal_lab.pipeline.rollout.groups import Rollout
from areal_lab.pipeline.rollout.scored import CORRECT, ROUNDING, ScoredGroup, counted, outcome_of
from areal_lab.runlog.held_out import HeldOutReward
from areal_lab.runlog.intervals import mean_interval
from areal_lab.shell.display import Display

_PROGRESS_MESSAGES = 4
"""Number of progress messages of one evaluation."""


async def measure(
    rollout: Rollout,
    problems: Sequence[Problem],
    *,
    samples: int,
    ks: Sequence[int] = (),
    done: Callable[[], None] = lambda: None,
) -> HeldOutReward:
    """Sample responses to each problem with the engines' weights, and score them.

    Every call uses the same seeds, so measurements of a run differ only in the weights.

    Args:
        rollout: generates and scores.
        problems: held-out problems.
        samples: responses per problem.
        ks: values of k for pass@k.
        done: called when the responses to a problem are scored.
    """
    groups = await rollout.held_out(problems, samples=samples, done=lambda *_: done())
    rewards = [_rewards(group.samples) for group in groups]
    found = {k: await asyncio.to_thread(pass_at, rewards, k) for k in ks}  # loads torch
    return HeldOutReward(
        problem_means=tuple(sum(values) / len(values) for values in rewards if values),
        unscored=len(problems) * samples - sum(len(values) for values in rewards),
        tokens=_tokens(groups),
        pass_at={str(k): one["mean"] for k, one in found.items() if one is not None},
    )


def announced(display: Display, what: str, *, total: int, samples: int) -> Callable[[], None]:
    """Show the progress of a measurement; returns a function to call after each problem.

    Args:
        display: shows the progress.
        what: name of the measurement, such as "held-out problems before training".
        total: number of problems.
        samples: responses per problem.
    """
    done, every = 0, max(1, total // _PROGRESS_MESSAGES)
    display.phase(f"{what}: 0 of {total}, {samples} samples each")

    def count_problem() -> None:
        nonlocal done
        done += 1
        if done % every == 0 and done < total:
            display.phase(f"{what}: {done} of {total}")

    return count_problem


def _rewards(samples: Iterable[Episode]) -> list[float]:
    """Return the rewards of the samples that have one."""
    outcomes = [sample.outcome for sample in samples]
    return [outcome.reward for outcome in outcomes if outcome.status == "ok"]


def _tokens(groups: Sequence[ScoredGroup]) -> dict[Version, int]:
    counts: Counter[Version] = Counter()
    for group in groups:
        for sample in group.samples:
            for part in sample.segments:
                counts[part.version] += len(part.tokens)
    return dict(sorted(counts.items()))


def sample_lines(index: int, group: ScoredGroup) -> list[dict[str, Any]]:
    """Return the lines of samples.jsonl for one problem; a missing reward is null."""
    return [
        {
            "problem": index,
            "key": group.problem.key,
            "sample": number,
            "reward": None if math.isnan(sample.outcome.reward) else sample.outcome.reward,
            "status": sample.outcome.status,
            "outcome": outcome_of(sample),
            "tokens": sample.tokens,
            "truncated": sample.truncated,
            "end": sample.end,
            "turns": len(sample.turns) or 1,
            "response": responses[0] if len(responses) == 1 else list(responses),
            **({"detail": sample.outcome.detail} if sample.outcome.detail else {}),
        }
        for number, (sample, responses) in enumerate(
            zip(group.samples, group.completions, strict=True)
        )
    ]


def results(problems: Sequence[Sequence[Episode]], ks: Sequence[int]) -> dict[str, Any]:
    """Return the measured fields of results.json.

    Args:
        problems: samples of each problem.
        ks: values of k for pass@k; problems with fewer scored samples are left out.
    """
    scored = [_rewards(samples) for samples in problems]
    every = [one for samples in problems for one in samples]
    outcomes = [one.outcome for one in every]
    means = [fmean(rewards) for rewards in scored if rewards]
    return {
        "problems": len(problems),
        "samples": len(every),
        "reward": asdict(mean_interval(means)) if means else None,
        "pass_at": {str(k): pass_at(scored, k) for k in ks},
        "mean_tokens": fmean(one.tokens for one in every) if every else None,
        "truncated_share": fmean(one.truncated for one in every) if every else None,
        "ends": dict(Counter(one.end for one in every)),
        "mean_turns": fmean(len(one.turns) or 1 for one in every) if every else None,
        "rewards": dict(Counter(one.status for one in outcomes)),
        "outcomes": counted(map(outcome_of, every)),
        "first_failure": next(
            (one.detail or one.status for one in outcomes if one.status != "ok"), ""
        ),
    }


def pass_at(scored: Sequence[Sequence[float]], k: int) -> dict[str, Any] | None:
    """Return the mean pass@k over problems with its interval.

    Args:
        scored: rewards of the scored samples of each problem.
        k: number of samples; problems with fewer scored samples are left out.

    Returns:
        None if no problem has k scored samples.
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

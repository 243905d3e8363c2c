"""Compare samples: those of one group, and those of two runs for the same prompts.

    first   prompt A (group 0)   prompt B (1)   prompt A (2)
                |                    |              '------- no partner
    second  prompt A (group 3)   prompt B (0)

The k-th group of a prompt in one run is paired with its k-th group in the other one, sample by
sample. Needs pandas.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from areal_lab.extras import require
from areal_lab.runlog.read_run import RecordedRun

if TYPE_CHECKING:
    import pandas as pd

_WORD = re.compile(r"\s*(?:<\|.*?\|>|[^\s<]+|<)")
"""A word, or a mark of a chat template."""
_COMPARED = ("step", "group", "reward", "tokens", "lag_mean", "completion")


def paired_samples(first: RecordedRun, second: RecordedRun) -> pd.DataFrame:
    """One row per pair of samples, in the order of the first run.

    Columns are `prompt`, `about` (its `distinct_parts`), `occurrence` (of the prompt, from 0) and
    `sample`; for both runs, ending in `_first` and `_second`, `row` (of the sample in
    `RecordedRun.samples` and `tokens`), `step`, `group`, `reward`, `tokens`, `lag_mean` and
    `completion`; `same_tokens`, the number of tokens with which both responses begin; and
    `reward_change`, the second reward minus the first.

    Raises:
        ValueError: if a run has no trajectories, which hold the prompts.
        MissingExtra: without pandas.
    """
    require("paired_samples", "notebooks", "pandas")
    sides = [_with_occurrence(run) for run in (first, second)]
    keys = ["prompt", "occurrence", "sample"]
    pairs = sides[0].merge(sides[1], on=keys, suffixes=("_first", "_second"))
    pairs.insert(1, "about", distinct_parts(list(pairs["prompt"])))
    pairs["same_tokens"] = [
        _same_tokens(first, second, rows)
        for rows in zip(pairs["row_first"], pairs["row_second"], strict=True)
    ]
    pairs["reward_change"] = pairs["reward_second"] - pairs["reward_first"]
    return pairs


def groups_by_contrast(run: RecordedRun) -> pd.DataFrame:
    """The trained groups (index `group`), those whose samples differ most first.

    Samples with equal rewards teach nothing, and equal responses show nothing: the order is by
    `reward_std`, then by `distinct`. Columns: `step`, `about` (if known: `distinct_parts` of the
    prompts), `samples`,
    `reward_mean`, `reward_std` (over the samples), `distinct` (different responses), `tokens` (all
    of the group), `versions` (most in one sample), `lag_mean` (over samples); with training fields
    also `weight_change`: the mean of |log(pi_prox / pi_behav)| over tokens, in nats.

    Raises:
        MissingExtra: without pandas.
    """
    samples = run.samples.assign(rows=lambda frame: range(len(frame)))
    if "completion" not in samples:
        samples["completion"] = samples["rows"]
    grouped = samples.groupby("group")
    found = grouped.agg(
        step=("step", "first"),
        samples=("sample", "size"),
        reward_mean=("reward", "mean"),
        reward_std=("reward", lambda rewards: rewards.std(ddof=0)),
        distinct=("completion", "nunique"),
        tokens=("tokens", "sum"),
        versions=("versions", "max"),
        lag_mean=("lag_mean", "mean"),
    )
    if "prompt" in samples:
        found.insert(1, "about", distinct_parts(list(grouped["prompt"].first())))
    if "proximal_logprobs" in run.tokens:
        found["weight_change"] = _weight_change(run, samples)
    return found.sort_values(["reward_std", "distinct"], ascending=False, kind="stable")


def distinct_parts(texts: Sequence[str]) -> list[str]:
    """Texts without the beginning and the end that all of them share, cut between words.

    What is left of prompts when instructions, solved examples and chat templates are the same. A
    text is returned as it is if nothing of it would be left, or if all are the same.
    """
    if len(set(texts)) < 2:
        return list(texts)
    words = [_WORD.findall(text) for text in texts]
    shortest = min(map(len, words))
    start = _shared(words, range(shortest))
    end = _shared(words, range(-1, start - shortest - 1, -1))
    return [
        "".join(own[start : len(own) - end]).strip() or text
        for own, text in zip(words, texts, strict=True)
    ]


def _shared(words: Sequence[Sequence[str]], places: Iterable[int]) -> int:
    """At how many of the places, in their order, all have the same word."""
    same = takewhile(lambda at: len({own[at] for own in words}) == 1, places)
    return sum(1 for _ in same)


def _weight_change(run: RecordedRun, samples: Any) -> Any:
    import pandas as pd

    tokens = run.tokens
    change = (tokens["proximal_logprobs"] - tokens["behavior_logprobs"]).astype("float64")
    groups = samples["group"].to_numpy()[tokens["sample"]]
    return pd.Series(abs(change)).groupby(groups).mean()


def _with_occurrence(run: RecordedRun) -> Any:
    samples = run.samples
    if "prompt" not in samples:
        raise ValueError(
            f"{run.source} has no trajectories, so its prompts are not known; runs of "
            "`areal-lab train` have them"
        )
    groups = samples[["prompt", "group"]].drop_duplicates().sort_values("group")
    groups["occurrence"] = groups.groupby("prompt").cumcount()
    numbered = samples.reset_index(names="row").merge(groups, on=["prompt", "group"])
    return numbered[["prompt", "occurrence", "sample", "row", *_COMPARED]]


def _same_tokens(first: RecordedRun, second: RecordedRun, rows: tuple[int, int]) -> int:
    left, right = (
        run.tokens["ids"][run.tokens.of(row)]
        for run, row in zip((first, second), rows, strict=True)
    )
    length = min(len(left), len(right))
    differing = (left[:length] != right[:length]).nonzero()[0]
    return int(differing[0]) if len(differing) else length

"""Compare runs by their settings and results, and samples: of a group, of two runs.

    compare(run, other)           settings that differ, and results side by side
    paired_samples(run, other)    samples for the same prompts

    first   prompt A (group 0)   prompt B (1)   prompt A (2)
                |                    |              '------- no partner
    second  prompt A (group 3)   prompt B (0)

The k-th group of a prompt in one run is paired with its k-th group in the other one, sample by
sample. Frames need pandas.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from areal_lab.extras import require
from areal_lab.runlog.read_run import RecordedRun, read_run
from areal_lab.runlog.records import TRAINER
from areal_lab.runlog.summary import counted, run_status

if TYPE_CHECKING:
    import pandas as pd

_WORD = re.compile(r"\s*(?:<\|.*?\|>|[^\s<]+|<)")
"""A word, or a mark of a chat template."""
LAST_STEPS: Final = 10
"""Steps whose rewards are averaged: one step has few samples."""
_COMPARED = ("step", "group", "reward", "tokens", "lag_mean", "completion")


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Two or more runs side by side; as text, a table."""

    names: tuple[str, ...]
    settings: Mapping[str, tuple[Any, ...]]
    """Values of the settings that differ, one per run; None where a run has no such setting."""
    results: Mapping[str, tuple[Any, ...]]
    """One value per run; None where it is unknown."""

    def frame(self) -> pd.DataFrame:
        """A column per run; a row per result and per setting that differs, by (`part`, `name`)."""
        require("RunComparison.frame", "notebooks", "pandas")
        import pandas as pd

        rows = {
            (part, name): values
            for part, found in (("results", self.results), ("settings", self.settings))
            for name, values in found.items()
        }
        index = pd.MultiIndex.from_tuples(rows, names=["part", "name"])
        return pd.DataFrame([*rows.values()], index=index, columns=list(self.names))

    def __str__(self) -> str:
        """The results, and below them the settings that differ."""
        rows = [("", *self.names)]
        rows += [(name, *map(_shown, values)) for name, values in self.results.items()]
        rows += [(f"{name} =", *map(_shown, values)) for name, values in self.settings.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))).rstrip()
            for row in rows
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        """As text: this is for reading."""
        return str(self)


def compare(*runs: RecordedRun | Path | str) -> RunComparison:
    """Compare runs: their results, and the settings in which they differ.

    The rewards are means of up to `LAST_STEPS` steps: the last ones, and if the runs differ in
    length, also those before the last step and the last second that all of them have. Lag, drift
    and entropy are means over all steps.

    Raises:
        ValueError: fewer than two runs, or one that cannot be read.
    """
    if len(runs) < 2:
        raise ValueError(f"got {len(runs)} to compare; give two runs or more")
    read = [one if isinstance(one, RecordedRun) else read_run(one) for one in runs]
    settings = [run.settings for run in read]
    return RunComparison(
        _names(read),
        {
            name: values
            for name in dict.fromkeys(name for one in settings for name in one)
            if len({*map(repr, values := tuple(one.get(name) for one in settings))}) > 1
        },
        _results(read),
    )


def _names(runs: Sequence[RecordedRun]) -> tuple[str, ...]:
    """Names of the folders, with as much of their paths as makes them differ."""
    folders = [run.folder for run in runs]
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        above = os.path.commonpath([folder.parent for folder in folders])
        names = [str(folder.relative_to(above)) for folder in folders]
    return tuple(
        name if names.index(name) == at else f"{name} ({names[:at].count(name) + 1})"
        for at, name in enumerate(names)
    )


def _results(runs: Sequence[RecordedRun]) -> dict[str, tuple[Any, ...]]:
    lines = [[one for one in run.metrics if "reward_mean" in one] for run in runs]
    rows: dict[str, tuple[Any, ...]] = {"status": tuple(run_status(run.log) for run in runs)}
    rows["steps"] = tuple(len(run.metrics) for run in runs)
    rows[f"reward_mean, last {LAST_STEPS} steps"] = tuple(map(_reward, lines))
    for name, unit in (("step", ""), ("time_s", " s")):
        ends = [max((one[name] for one in found if name in one), default=0) for found in lines]
        common = min(ends)
        if common < max(ends) and common > 0:
            rows[f"reward_mean, by {name.removesuffix('_s')} {common:.4g}{unit}"] = tuple(
                _reward([one for one in found if one.get(name, 0) <= common]) for found in lines
            )
    for name in ("reward_before", "reward_after"):
        rows[f"held-out {name}"] = tuple((run.summary.get(name) or {}).get("mean") for run in runs)
    found = [counted(run.log) for run in runs]
    for name in ("training_s", "trained_tokens", "tokens_per_s", "generated_tokens_per_s"):
        rows[name] = tuple(one[name] or None for one in found)
    for name in ("lag_token_mean", "drift", "weight_deviation", "entropy"):
        rows[name] = tuple(_mean(run.metrics, name) for run in runs)
    for name in ("dropped", "filtered"):
        rows[f"{name} groups"] = tuple(one[name] for one in found)
    rows["trainer idle_share"] = tuple(
        one["processes"].get(TRAINER, {}).get("idle_share") for one in found
    )
    return {name: values for name, values in rows.items() if any(one is not None for one in values)}


def _reward(lines: Sequence[Mapping[str, Any]]) -> float | None:
    return _mean(lines[-LAST_STEPS:], "reward_mean")


def _mean(lines: Iterable[Mapping[str, Any]], name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return fmean(values) if values else None


def _shown(value: Any) -> str:
    match value:
        case None:
            return "-"
        case float() if abs(value) >= 1000:
            return f"{value:,.0f}"
        case float():
            return f"{value:.4g}"
        case int() if not isinstance(value, bool):
            return f"{value:,}"
    return " ".join(str(value).split())


def paired_samples(first: RecordedRun, second: RecordedRun) -> pd.DataFrame:
    """One row per pair of samples, in the order of the first run.

    Columns are `prompt`, `about` (its `distinct_parts`), `occurrence` (of the prompt, from 0) and
    `sample`; for both runs, ending in `_first` and `_second`, `row` (of the sample in
    `RecordedRun.samples` and `tokens`), `step`, `group`, `reward`, `tokens`, `lag_mean` and
    `completion`; `same_tokens`, the number of tokens with which both responses begin; and
    `reward_change`, the second reward minus the first.

    Raises:
        ValueError: the runs share no prompt, or one has no trajectories.
    """
    require("paired_samples", "notebooks", "pandas")
    sides = [_with_occurrence(run) for run in (first, second)]
    keys = ["prompt", "occurrence", "sample"]
    pairs = sides[0].merge(sides[1], on=keys, suffixes=("_first", "_second"))
    if pairs.empty:
        raise ValueError(
            f"{first.folder} and {second.folder} have no prompt in common, so no samples can be "
            "paired; give runs on the same problems (dataset, seed)"
        )
    pairs.insert(1, "about", distinct_parts(list(pairs["prompt"])))
    pairs["same_tokens"] = [
        _same_tokens(first, second, rows)
        for rows in zip(pairs["row_first"], pairs["row_second"], strict=True)
    ]
    pairs["reward_change"] = pairs["reward_second"] - pairs["reward_first"]
    return pairs


def groups_by_contrast(run: RecordedRun) -> pd.DataFrame:
    """Trained groups (index `group`), those whose samples differ most first.

    Samples with equal rewards teach nothing, and equal responses show nothing: the order is by
    `reward_std`, then by `distinct`. Columns: `step`, `about` (if known: `distinct_parts` of the
    prompts), `samples`, `reward_mean`, `reward_std` (over the samples), `distinct` (different
    responses), `tokens` (all of the group), `versions` (most in one sample), `lag_mean` (over
    samples); with training fields also `weight_change`: the mean of |log(pi_prox / pi_behav)| over
    tokens, in nats.
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
    """Texts without their common beginning and end, cut between words.

    Removes the parts of prompts that are equal: instructions, solved examples and chat templates. A
    text is returned unchanged if nothing of it would be left, or if all are equal.
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
    """Number of leading places at which all texts have the same word."""
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

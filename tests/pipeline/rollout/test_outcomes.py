"""What became of each sample: a missing reward is counted apart from a wrong answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_lab.agents.workflow import Episode
from areal_lab.data.trajectory import SampleEnd, Turn
from areal_lab.pipeline.rollout.scored import (
    OUTCOMES,
    Outcome,
    counted,
    environment_metrics,
    outcome_metrics,
    outcome_of,
)
from areal_lab.rewards.service import RewardOutcome
from areal_lab.rewards.wire import Status
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.records import GroupRecord, decode, encode
from tests.pipeline.tiny_run import do_run, metrics, tiny_config


def sample(
    reward: float = 0.0, end: SampleEnd = "stop", status: Status = "ok", **parts: float
) -> Episode:
    reward = reward if status == "ok" else math.nan
    return Episode(rows=(), outcome=RewardOutcome(status, reward, parts), end=end)


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (sample(1.0), "right"),
        (sample(1.5, "length"), "right"),
        (sample(0.999999), "wrong"),
        (sample(-1.0), "wrong"),
        (sample(0.0, "length"), "no_answer"),
        (sample(0.0, "turns"), "no_answer"),
        (sample(0.0, "context"), "no_answer"),
        (sample(0.0, no_answer=1.0), "no_answer"),
        (sample(0.0, "length", timed_out=1.0), "timed_out"),
        (sample(0.0, crashed=1.0, no_answer=0.0), "crashed"),
        (sample(status="timeout"), "timed_out"),
        (sample(status="error"), "crashed"),
        (sample(status="refused"), "refused"),
    ],
)
def test_outcomes(found: Episode, outcome: Outcome) -> None:
    assert outcome_of(found) == outcome
    assert counted([outcome]) == {**dict.fromkeys(OUTCOMES, 0), outcome: 1}


def test_measurements_of_an_environment_are_averaged_over_the_samples_that_have_them() -> None:
    samples = [
        replace(sample(), metrics={"steps": 1.0, "words per line": 2.0}),
        replace(sample(), metrics={"steps": 4.0}),
        sample(),
    ]
    found = environment_metrics(samples)
    assert found == {"environment/steps": 2.5, "environment/words_per_line": 2.0}
    assert environment_metrics([sample()]) == {}


def test_a_discounted_turn_may_be_right() -> None:
    second = replace(sample(0.9), turns=(Turn(tokens=1, reward=0.0), Turn(tokens=1, reward=1.0)))
    assert outcome_of(second) == "right"
    assert outcome_of(replace(second, turns=second.turns[::-1])) == "wrong"


def test_shares_are_of_all_samples() -> None:
    batch = [sample(1.0), sample(), sample(end="length"), sample(end="length")]
    assert outcome_metrics(batch) == {"right_share": 0.25, "no_answer_share": 0.5}
    assert outcome_metrics([]) == {"right_share": 0.0, "no_answer_share": 0.0}


def test_the_log_has_them_and_older_logs_are_read() -> None:
    record = GroupRecord(
        group=1, engine=0, t_s=0.0, generated_s=1.0, end_s=2.0, rewards=(1.0,),
        segments=(((0, 3),),), finish_reasons=("stop",), outcomes=("right",),
    )  # fmt: skip
    assert decode(encode(record)) == record
    old = replace(record, outcomes=())
    assert "outcomes" not in encode(old)
    assert decode(encode(old)) == old


def by_length(completion: str, example: Mapping[str, Any]) -> Any:
    """Some samples are refused, some raise, some are right."""
    del example
    if len(completion) % 7 == 0:
        return None
    if len(completion) % 11 == 0:
        raise KeyError(completion)
    return float(len(completion) % 2)


def test_a_run_counts_every_sample_once(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "total_train_steps=2", "reward.max_error_rate=1")
    result = do_run(config, reward_fn=by_length)
    log = read_log_file(result.folder / "events.jsonl")
    found = result.summary["outcomes"]
    assert sum(found.values()) == 4 * len(list(log.groups))
    assert set(found) <= set(OUTCOMES)
    rewards = [reward for group in log.groups for reward in group.rewards]
    missing = found.get("refused", 0) + found.get("crashed", 0)
    assert missing == sum(map(math.isnan, rewards))
    assert found.get("right", 0) == rewards.count(1.0)
    for line in metrics(result.folder):
        assert 0 <= line["right_share"] + line["no_answer_share"] <= 1

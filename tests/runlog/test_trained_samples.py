"""Trained samples with the ages of their tokens, against the lags of whole batches."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from areal_lab.control.events import Train
from areal_lab.runlog.lags import trained_batches
from areal_lab.runlog.read_run import read_events
from areal_lab.runlog.records import (
    ActionRecord,
    GroupRecord,
    Log,
    RunHeader,
    Segments,
    log_of,
)
from areal_lab.runlog.trained_samples import oldest_first, story, trained_samples
from simulator.assembly.simulate import simulated_log
from simulator.config.load import load_simulation

RECORDED = Path(__file__).parents[2] / "reproductions" / "recorded" / "asynchronous"


@cache
def logs() -> tuple[Log, ...]:
    simulated = load_simulation("small", ["workload.steps=30", "schedule.eta=2"])
    return (simulated_log(simulated), read_events(RECORDED))


def group(number: int, *samples: Segments) -> GroupRecord:
    count = len(samples)
    return GroupRecord(
        group=number,
        engine=0,
        t_s=1.0 * number,
        generated_s=10.0,
        end_s=11.0,
        rewards=(0.0,) * count,
        segments=samples,
        finish_reasons=("stop",) * count,
    )


def small_log() -> Log:
    """Group 1 is trained on in the first step, 0 and 2 in the second."""
    header = RunHeader(mode="simulate", started_at=0.0, limits={}, processes=("trainer",))
    return log_of(
        [
            header,
            group(1, ((0, 2),)),
            ActionRecord(12.0, Train(0, (1,))),
            group(0, ((0, 3), (1, 1)), ((0, 1),)),
            group(2, ((1, 4),)),
            ActionRecord(14.5, Train(1, (0, 2))),
        ]
    )


def test_tokens_have_the_lag_of_their_segment() -> None:
    samples = trained_samples(small_log())
    assert [one.name for one in samples] == [
        *("response 1a", "response 0a", "response 0b", "response 2a"),
    ]
    assert [one.lags.tolist() for one in samples] == [[0, 0], [1, 1, 1, 0], [1], [0] * 4]
    assert [one.oldest for one in samples] == [0, 1, 1, 0]
    assert [one.overtaken_by for one in samples] == [0, 1, 1, 0]
    assert samples[0].lags.dtype == np.uint8


def test_the_oldest_come_first_then_those_with_more_old_tokens() -> None:
    ordered = oldest_first(trained_samples(small_log()))
    assert [one.name for one in ordered][:2] == ["response 0a", "response 0b"]


def test_the_story_of_a_sample_has_its_numbers() -> None:
    _, first, *_ = trained_samples(small_log())
    assert story(first) == (
        "Response 0a has 4 tokens. It was started at 0.0 s on engine 0, under version 0. New "
        "weights arrived once while it was generated. Its group ended at 10.0 s, and was trained "
        "on 4.5 s later, when the trainer had version 1: its first token was 1 version old. By "
        "then, 1 prompt that started after it had been trained on."
    )


def test_a_sample_without_tokens_is_kept() -> None:
    header = small_log().header
    log = log_of([header, group(0, ()), ActionRecord(12.0, Train(3, (0, 9)))])
    (one,) = trained_samples(log)  # group 9 has no record: its end was not written
    assert (one.tokens, one.oldest, one.lags.tolist()) == (0, 0, [])
    assert story(one).startswith("Response 0a has 0 tokens.")


def test_lags_above_a_byte_are_cut() -> None:
    header = small_log().header
    log = log_of([header, group(0, ((0, 2),)), ActionRecord(12.0, Train(900, (0,)))])
    (one,) = trained_samples(log)
    assert one.lags.tolist() == [255, 255]
    assert one.oldest == 900


@pytest.mark.parametrize("number", [0, 1])
def test_the_lags_of_all_samples_are_those_of_the_batches(number: int) -> None:
    log = logs()[number]
    batches = list(trained_batches(log))
    last = batches[-1].version
    samples = [one for one in trained_samples(log) if one.trained_version < last]
    tokens = Counter(lag for one in samples for lag in one.lags.tolist())
    assert tokens == sum((batch.token_lags for batch in batches), Counter())
    heads = Counter(one.oldest for one in samples if one.tokens)
    assert heads == sum((batch.head_lags for batch in batches), Counter())


def test_in_start_order_nothing_is_overtaken() -> None:
    config = load_simulation("small", ["schedule.batch_order=strict_start_order"])
    assert {one.overtaken_by for one in trained_samples(simulated_log(config))} == {0}


def test_records_without_a_header_are_refused() -> None:
    with pytest.raises(ValueError, match="the first record of a log must be its run header"):
        log_of([])

"""What the pipeline saves comes back as it was, or is refused in one line."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.agents.workflow import Episode, Row
from areal_lab.config.schema import TrainConfig
from areal_lab.data.problems import PromptSource
from areal_lab.data.trajectory import Observation, Segment, Turn
from areal_lab.engines.protocol import Generated
from areal_lab.pipeline.resume.saved_run import (
    GROUPS_FILE,
    RUN_FILE,
    OpenTokens,
    open_tokens_to_bytes,
    read_open_tokens,
    read_saved_run,
)
from areal_lab.pipeline.rollout.scored import ScoredGroup
from areal_lab.rewards.service import RewardOutcome
from areal_lab.runlog.records import TurnTimes
from tests.pipeline.resume.saved import FRONTIER, PROBLEMS, saved_run

SOURCE = PromptSource(PROBLEMS.train, seed=1)


def test_a_saved_run_reads_as_it_was(tmp_path: Path) -> None:
    config = TrainConfig().with_settings(
        {"rollout.max_head_offpolicyness": math.inf, "actor.loss": {"name": "gspo"}}
    )
    saved = replace(
        saved_run(config),
        frontier=replace(FRONTIER, eta=math.inf),
        finished_groups=(28,),
        running_tokens=7,
    )
    (tmp_path / RUN_FILE).write_bytes(saved.to_json())
    found = read_saved_run(tmp_path)
    assert found == saved
    assert TrainConfig(**found.config) == config


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"schema": 9}', "schema 9, but 2"),
        ('{"schema": 2}', "frontier"),
    ],
)
def test_another_file_is_refused_in_one_line(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / RUN_FILE).write_text(content)
    with pytest.raises(ValueError, match=reason) as raised:
        read_saved_run(tmp_path)
    assert "\n" not in str(raised.value)


FLOAT32 = st.floats(-50, 0, width=32)


@given(st.lists(st.lists(FLOAT32, min_size=1, max_size=5), min_size=1, max_size=4))
def test_finished_groups_keep_every_digit(logprobs: list[list[float]]) -> None:
    generated = tuple(
        Generated(
            request_id=f"train-7-{index}",
            segments=(Segment(tuple(range(len(values))), tuple(values), index),),
            finish_reason="stop",
            retractions=index,
            cached_tokens=0,
        )
        for index, values in enumerate(logprobs)
    )
    samples = tuple(
        Episode(
            rows=(
                Row(prompt_tokens=(1, 2), parts=one.segments, turn_returns=(0.5,)),
                Row(prompt_tokens=(3,), parts=(Observation((4, 5)), *one.segments)),
            ),
            outcome=RewardOutcome("ok", 0.1 * index, {"format": 1.0}),
            end="turns",
            turns=(Turn(tokens=2, tool="calculator", outcome="ok"), Turn(tokens=1, reward=1.0)),
            metrics={"steps": 0.1 * index},
        )
        for index, one in enumerate(generated)
    )
    group = ScoredGroup(
        problem=SOURCE[7],
        samples=samples,
        completions=tuple(("ab\n\u00e9", "c") for _ in logprobs),
        prompt_tokens=(1, 2),
        started_s=1.5,
        generated_s=2.5,
        scored_s=3.25,
        turns=(TurnTimes(sample=0, engine=1, start_s=1.5, end_s=2.0, tokens=3),),
    )
    tokens = OpenTokens({7: group}, {8: {one.request_id: one for one in generated}})
    content = open_tokens_to_bytes(tokens)
    assert _read(content) == tokens
    saved = json.loads(gzip.decompress(content))["finished"][0]
    assert list(saved) == [
        *("group", "samples", "completions", "prompt_tokens", "started_s", "generated_s"),
        *("scored_s", "turns", "images"),
    ]
    assert saved["turns"] == [{"sample": 0, "engine": 1, "start_s": 1.5, "end_s": 2.0, "tokens": 3}]
    assert tokens.running_tokens == sum(map(len, logprobs))


def _read(content: bytes) -> OpenTokens:
    class Folder(type(Path())):  # type: ignore[misc]
        def is_file(self) -> bool:
            return True

        def read_bytes(self) -> bytes:
            return content

    return read_open_tokens(Folder("checkpoint"), SOURCE)


def test_damaged_groups_are_refused_in_one_line(tmp_path: Path) -> None:
    assert not read_open_tokens(tmp_path, SOURCE)
    for content in (b"", gzip.compress(b"[")[:-4], gzip.compress(json.dumps([{}]).encode())):
        (tmp_path / GROUPS_FILE).write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read") as raised:
            read_open_tokens(tmp_path, SOURCE)
        assert "\n" not in str(raised.value)

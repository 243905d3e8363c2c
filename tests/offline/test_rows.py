"""Rows are read, checked, generated and split; no prompt is on both sides."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from areal_lab.config.offline import DemonstrationsConfig, OfflineDataConfig, ScoredPairsConfig
from areal_lab.offline.rows import load_rows, row_of
from tests.offline.small import write_rows

USER = {"role": "user", "content": "1+1"}
SAYS_2 = {"role": "assistant", "content": "2"}
SAYS_3 = {"role": "assistant", "content": "3"}


def demonstrations(**changes: Any) -> DemonstrationsConfig:
    return DemonstrationsConfig(**changes)


def pairs(**changes: Any) -> ScoredPairsConfig:
    return ScoredPairsConfig(**changes)


def test_a_demonstration_is_a_prompt_with_a_response_or_a_conversation() -> None:
    row = row_of({"prompt": "1+1", "response": "2"}, "here", demonstrations())
    assert (row.prompt, row.responses) == ("1+1", ("2",))
    row = row_of({"q": "1+1", "a": 2}, "", demonstrations(prompt_field="q", response_field="a"))
    assert (row.prompt, row.responses) == ("1+1", ("2",))
    row = row_of({"messages": [USER, SAYS_2]}, "", demonstrations())
    assert row.responses == ((("user", "1+1"), ("assistant", "2")),)


def test_a_pair_has_a_prompt_or_whole_conversations_and_perhaps_a_margin() -> None:
    given = {"prompt": "1+1", "chosen": "2", "rejected": "3", "better": 1.5}
    row = row_of(given, "", pairs(margin_field="better"))
    assert (row.prompt, row.responses, row.margin) == ("1+1", ("2", "3"), 1.5)
    row = row_of({"chosen": [USER, SAYS_2], "rejected": [USER, SAYS_3]}, "", pairs())
    assert row.prompt == ""
    other = row_of({"chosen": [USER, SAYS_3], "rejected": [USER, SAYS_2]}, "", pairs())
    assert row.key == other.key  # the same question


@pytest.mark.parametrize(
    ("dataset", "row", "message"),
    [
        (demonstrations(), {"prompt": "1"}, "has no field 'response'; it has 'prompt', but needs"),
        (demonstrations(), {"prompt": " ", "response": "2"}, "has an empty 'prompt'"),
        (demonstrations(), {"prompt": "1", "response": None}, "has NoneType in 'response'"),
        (demonstrations(), {"messages": [USER]}, "has no message of the assistant"),
        (demonstrations(), {"messages": []}, "in 'messages', but needs a list of messages"),
        (demonstrations(), {"messages": [USER, {"role": "x"}]}, "needs a role and a content"),
        (pairs(), {"prompt": "1", "chosen": "2"}, "has no field 'rejected'"),
        (pairs(), {"chosen": [USER], "rejected": [USER]}, "the last one of the assistant"),
        (
            pairs(margin_field="m"),
            {"prompt": "1", "chosen": "2", "rejected": "3", "m": "x"},
            "has 'x' in 'm', but needs a finite number",
        ),
    ],
)
def test_a_bad_row_is_one_line(
    dataset: OfflineDataConfig, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        row_of(row, "rows.jsonl, line 3", dataset)
    assert str(caught.value).startswith("rows.jsonl, line 3 has ")
    assert "\n" not in str(caught.value)


def test_rows_with_one_prompt_stay_on_one_side(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl",
        *({"prompt": str(n // 3), "response": str(n)} for n in range(30)),
    )
    rows = load_rows(demonstrations(path=str(path), eval_size=4), seed=1)
    held_out = {row.key for row in rows.held_out}
    assert len(held_out) == 4
    assert not held_out & {row.key for row in rows.train}
    assert len(rows.train) + len(rows.held_out) == 30
    assert rows == load_rows(demonstrations(path=str(path), eval_size=4), seed=1)
    other = load_rows(demonstrations(path=str(path), eval_size=4), seed=2)
    assert other.digest() != rows.digest()


def test_prompts_of_the_held_out_file_are_not_trained_on_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "response": "x"} for n in range(9)]
    both = {
        "path": str(write_rows(tmp_path / "a.jsonl", *rows)),
        "eval_path": str(write_rows(tmp_path / "b.jsonl", *rows[:2], {**rows[0], "prompt": "q"})),
    }
    found = load_rows(demonstrations(**both), seed=1)
    assert (len(found.train), len(found.held_out), found.in_both) == (7, 3, 2)


def test_generated_pairs_differ_in_one_digit() -> None:
    rows = load_rows(pairs(type="arithmetic", digits=[2, 1]), seed=1)
    for row in rows.train:
        chosen, rejected = map(str, row.responses)
        left, _, right = str(row.prompt).removesuffix(" =").split(" ")
        assert int(chosen) == int(left) + int(right)
        assert len(chosen) == len(rejected)
        assert sum(a != b for a, b in zip(chosen, rejected, strict=True)) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "path is empty, but type=jsonl needs a file"),
        ({"path": "nowhere.jsonl"}, "nowhere.jsonl does not exist"),
        ({"type": "sorting", "prompt_template": "Q"}, "must have {prompt} once"),
        (
            {"type": "arithmetic", "chat": True, "end_text": "\n"},
            "so the model's chat template",
        ),
        ({"type": "arithmetic", "eval_size": 10**6}, "none is left to train on"),
    ],
)
def test_a_bad_setting_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_rows(demonstrations(**settings), seed=1)
    assert "\n" not in str(caught.value)

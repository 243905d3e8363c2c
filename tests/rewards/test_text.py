"""Rewards of form and words."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.config.load import load_config
from areal_lab.resolve.functions import check_functions
from areal_lab.rewards.combined import Combined
from areal_lab.rewards.service import RewardService
from areal_lab.rewards.text import (
    JsonSchema,
    choice,
    contains,
    exact_match,
    form,
    pattern,
    word_f1,
)

RIGHT, WRONG = {"reward": 1.0, "no_answer": 0.0}, {"reward": 0.0, "no_answer": 0.0}
NONE = {"reward": 0.0, "no_answer": 1.0}


@pytest.mark.parametrize(
    ("completion", "scored"),
    [
        ("B", RIGHT),
        ("(B)", RIGHT),
        ("**B**.", RIGHT),
        ("A or B? B", RIGHT),
        ("B, not A", WRONG),
        ("Because BBC", NONE),
        ("b", NONE),
        ("B2", NONE),
        ("", NONE),
    ],
)
def test_the_last_choice_counts(completion: str, scored: dict[str, float]) -> None:
    assert choice(completion, {"answer": " B "}) == scored


@pytest.mark.parametrize("gold", ["E", "AB", ""])
def test_a_gold_answer_that_is_no_choice_is_an_error(gold: str) -> None:
    with pytest.raises(ValueError, match="must be one of the choices ABCD"):
        choice("A", {"answer": gold})


@given(st.sampled_from("]^-\\"), st.text("]^-\\ "))
def test_choices_may_be_any_characters(gold: str, text: str) -> None:
    scored = choice(text, {"answer": gold}, choices="]^-\\")
    alone = [one for one in text if one != " "]
    assert scored["no_answer"] == (not alone)
    assert scored["reward"] == (bool(alone) and alone[-1] == gold)


def test_a_pattern_captures_the_answer() -> None:
    gold = {"answer": "918"}
    assert pattern("Tool: 34\nanswer:  918 \nQuestion", gold) == RIGHT
    assert pattern("Answer: 918\nAnswer: 917", gold) == WRONG
    assert pattern("The answer: 918", gold) == NONE
    assert pattern("<a>918</a>", gold, pattern="<a>(.*?)</a>") == RIGHT
    with pytest.raises(ValueError, match="has 2 groups, but needs 1"):
        pattern("", gold, pattern="(a)(b)")
    with pytest.raises(ValueError, match="not a regular expression: "):
        pattern("", gold, pattern="(a")


def test_a_form_is_of_the_whole_completion() -> None:
    assert form(" 12\n", {}, pattern=r"\d+") == 1.0
    assert form("12 or 13", {}, pattern=r"\d+") == 0.0


def test_words_are_compared_without_case_punctuation_and_articles() -> None:
    gold = {"answer": "The Beatles"}
    assert exact_match("beatles!", gold) == 1.0
    assert exact_match("beatles band", gold) == 0.0
    assert contains("I like a Beatles song", gold) == 1.0
    assert contains("beatlesque", gold) == 0.0
    assert word_f1("beatles band", gold) == pytest.approx(2 / 3)
    assert word_f1("stones", gold) == 0.0
    assert word_f1("", gold) == 0.0


WORDS = st.from_regex(r"[b-z]{1,3}( [A-Za-z.]{1,4}){0,4}", fullmatch=True)


@given(WORDS, WORDS)
def test_f1_is_symmetric_and_one_for_equal_words(left: str, right: str) -> None:
    f1 = word_f1(left, {"answer": right})
    assert f1 == word_f1(right, {"answer": left})
    assert 0 <= f1 <= 1
    if exact_match(left, {"answer": right}) and f1:
        assert f1 == 1.0


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("completion", "scored"),
    [
        ('{"a": 1}', RIGHT),
        ('Here:\n```json\n{"a": 1}\n```\nDone', RIGHT),
        ('{"a": "1"}', WRONG),
        ("[]", WRONG),
        ("a: 1", NONE),
        ("[" * 100_000, NONE),
    ],
)
def test_json_is_checked_by_a_schema(completion: str, scored: dict[str, float]) -> None:
    assert JsonSchema(SCHEMA)(completion, {}) == scored
    assert JsonSchema()(completion, {"schema": SCHEMA}) == scored
    assert JsonSchema()(completion, {"schema": json.dumps(SCHEMA)}) == scored


def test_a_schema_reads_no_file_and_no_address(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"type": "object"}')
    for other in ((tmp_path / "other.json").as_uri(), "http://127.0.0.1:9/schema"):
        with pytest.raises(ValueError, match="which is not in it"):
            JsonSchema({"$ref": other})("{}", {})
    own = {"$ref": "#/$defs/one", "$defs": {"one": SCHEMA}}
    assert JsonSchema(own)('{"a": 1}', {}) == RIGHT


def test_a_value_that_is_nested_too_deeply_is_a_wrong_answer() -> None:
    lists = {"$ref": "#/$defs/list", "$defs": {"list": {"items": {"$ref": "#/$defs/list"}}}}
    assert JsonSchema(lists)("[" * 400 + "]" * 400, {}) == WRONG


@pytest.mark.parametrize("function", [contains, exact_match, word_f1])
@pytest.mark.parametrize("gold", ["", " ", "A", "..."])
def test_a_gold_answer_without_words_is_an_error(function: Any, gold: str) -> None:
    with pytest.raises(ValueError, match="but must have a word"):
        function("", {"answer": gold})


def test_a_schema_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="schema is no JSON schema: 'thing' is not"):
        JsonSchema({"type": "thing"})
    with pytest.raises(ValueError, match="has no field 'schema'"):
        JsonSchema()("{}", {})


PARTS = {
    "answer": "areal_lab.rewards.exact:gsm8k",
    "form": {"fn": "areal_lab.rewards.text:form", "pattern": ".*####.*"},
}


def test_parts_are_weighed() -> None:
    async def score() -> list[float]:
        fn = "areal_lab.rewards.combined:Combined"
        async with RewardService(fn, kwargs={"parts": PARTS}, weights={"form": 0.2}) as service:
            found = await service.score(["7 #### 7", "7", "#### 8"], {"answer": "7"})
            return [one.reward for one in found]

    assert asyncio.run(score()) == [1.2, 1.0, 0.2]
    assert Combined({"json": {"fn": "areal_lab.rewards.text:JsonSchema", "schema": True}})(
        "7", {}
    ) == {"json": 1.0, "no_answer": 0.0}
    told = Combined({"choice": "areal_lab.rewards.text:choice", **PARTS})
    assert told("none", {"answer": "A"}) == {
        **{"choice": 0.0, "answer": 0.0, "form": 0.0},
        "no_answer": 1.0,
    }
    both: dict[str, Any] = {
        "choice": "areal_lab.rewards.text:choice",
        "json": {"fn": "areal_lab.rewards.text:JsonSchema", "schema": True},
    }
    for parts in (both, dict(reversed(both.items()))):  # 7 is JSON, but none of the choices
        assert Combined(parts)("7", {"answer": "A"}) == {"choice": 0, "json": 1, "no_answer": 1}
    nothing = {"nothing": "tests.rewards.misbehaving:score"}
    assert Combined({**PARTS, **nothing})("nothing", {"answer": "7"}) is None


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"parts": {}}, "parts is empty"),
        ({}, "parts"),
        ({"parts": {"reward": "areal_lab.rewards.exact:gsm8k"}}, "named reward"),
        ({"parts": {"refused": "areal_lab.rewards.exact:gsm8k"}}, "named refused"),
        ({"parts": {"a": "http://127.0.0.1:9/score"}}, "is a service"),
        ({"parts": {"a": "areal_lab.rewards.exact:gsm9k"}}, "has no 'gsm9k'"),
        ({"parts": {"a": {"fn": "areal_lab.rewards.text:form"}}}, r"the part a \(.*'pattern'"),
        ({"parts": {"a": "tests.rewards.misbehaving:score_async"}}, "is async"),
    ],
)
def test_parts_that_cannot_be_used_are_refused_before_a_run(
    kwargs: dict[str, Any], reason: str
) -> None:
    fn = "areal_lab.rewards.combined:Combined"
    settings = {f"reward.kwargs.{name}": value for name, value in kwargs.items()}
    (problem,) = check_functions(load_config("tiny", {"reward.fn": fn, **settings}))
    assert problem.setting == "reward.kwargs"
    with pytest.raises(ValueError, match=reason):
        raise ValueError(str(problem))

"""Workflows, turn by turn: what is trained on, what the model sees, how a sample ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from areal_lab.agents.catalogue import make_workflow
from areal_lab.agents.multi_turn import MultiTurn, too_small_or_big
from areal_lab.agents.tool_use import ToolUse
from areal_lab.agents.workflow import Episode, Workflow
from areal_lab.data.trajectory import Observation, SampleEnd, Segment, Turn
from areal_lab.engines.protocol import SamplingParams
from areal_lab.rewards.service import RewardOutcome
from tests.agents.scripted import CODEC, Scripted
from tests.data.byte_tokenizer import BEGIN, END

PRODUCT = {"prompt": "Question: 34 * 27\n", "answer": "918"}
CALL, RESULT, ANSWER = "Tool: 34 * 27\n", "Result: 918\n", "Answer: 918\n"


def play(workflow: Workflow, engine: Scripted, data: Any = PRODUCT) -> Episode:
    """Run one sample, and check what holds for all: what it trains on is what it sampled."""
    episode = asyncio.run(workflow.run(engine, data))
    (row,) = episode.rows
    text = CODEC.decode(row.prompt_tokens)
    for place, prompt in enumerate(engine.prompts):
        assert whole(episode).startswith(prompt), "a turn continues exactly what is trained on"
        assert place or prompt == text
    assert sum(turn.tokens for turn in episode.turns) == episode.tokens
    assert len(episode.turns) == len(engine.prompts)
    return episode


def whole(episode: Episode) -> str:
    (row,) = episode.rows
    tokens = [*row.prompt_tokens, *(token for part in row.parts for token in part.tokens)]
    return CODEC.decode(tokens)


def trained(episode: Episode) -> str:
    return CODEC.decode([token for part in episode.segments for token in part.tokens])


def test_a_tools_result_is_seen_and_not_trained_on() -> None:
    engine = Scripted([CALL, ANSWER], {ANSWER: 1.0})
    episode = play(ToolUse(), engine)
    assert whole(episode) == PRODUCT["prompt"] + CALL + RESULT + ANSWER
    assert trained(episode) == CALL + ANSWER
    assert engine.scored == [ANSWER]
    assert (episode.outcome.reward, episode.end) == (1.0, "stop")
    assert episode.turns == (
        Turn(tokens=len(CALL), tool="calculator", outcome="ok"),
        Turn(tokens=len(ANSWER)),
    )
    (row,) = episode.rows
    assert [type(part) for part in row.parts] == [Segment, Segment, Observation, Segment, Segment]
    assert {part.version for part in episode.segments} == {0, 1, 2}


def echo(text: str) -> str:
    return f"{text}<end>, <<end>end> and \ufdd0<be\ufdd0gin>."


def test_control_tokens_are_those_around_a_result_and_not_in_it() -> None:
    tool = f"{__name__}:echo"
    engine = Scripted([CALL, ANSWER])
    episode = play(ToolUse(tool=tool, around="<end>{results}<begin>", timeout_s=20.0), engine)
    (row,) = episode.rows
    (seen,) = [part.tokens for part in row.parts if isinstance(part, Observation)]
    assert CODEC.decode_all(seen) == ("<end>Result: 34 * 27<end>, <<end>end> and <begin>.\n<begin>")
    assert [(at, token) for at, token in enumerate(seen) if token in (BEGIN, END)] == [
        (0, END),
        (len(seen) - 1, BEGIN),
    ]
    tokens = engine.encode("<begin>" + engine.plain("<end>"), begins=True)
    assert tokens == (BEGIN, *CODEC.encode("<en"), *CODEC.encode("d>"))


def test_an_answer_needs_no_tool() -> None:
    episode = play(ToolUse(), Scripted([ANSWER], {ANSWER: 1.0}))
    assert (trained(episode), episode.outcome.reward) == (ANSWER, 1.0)


def test_the_model_reads_what_went_wrong() -> None:
    engine = Scripted(["Tool: 34 *\n", ANSWER])
    episode = play(ToolUse(), engine)
    assert engine.prompts[1].endswith(
        "Tool: 34 *\nResult: error: '34 *' is not an arithmetic expression\n"
    )
    assert episode.turns[0].outcome == "error"


def limited(*script: str, turn_tokens: int = 100, context_tokens: int = 1000) -> Scripted:
    return Scripted(
        script,
        sampling=SamplingParams(max_new_tokens=turn_tokens),
        context_tokens=context_tokens,
    )


CALLED = len(PRODUCT["prompt"]) + len(CALL) + len(RESULT)
NO = MultiTurn(feedback="No.\n")


@pytest.mark.parametrize(
    ("workflow", "engine", "end", "turns"),
    [
        (ToolUse(max_turns=2), limited(CALL, CALL), "turns", 2),
        (ToolUse(), limited(CALL, turn_tokens=5), "length", 1),
        # The result of the tool leaves no room, or that of one token.
        (ToolUse(), limited(CALL, context_tokens=CALLED), "context", 1),
        (ToolUse(), limited(CALL, ANSWER, context_tokens=CALLED + 1), "context", 2),
        (NO, limited("a\n", "b\n"), "stop", 2),
        (NO, limited("a\n", context_tokens=len(PRODUCT["prompt"]) + 6), "context", 1),
        (NO, limited("a\n", "b\n", turn_tokens=1), "length", 2),
    ],
)
def test_how_a_sample_ends(
    workflow: Workflow, engine: Scripted, end: SampleEnd, turns: int
) -> None:
    episode = play(workflow, engine)
    assert (episode.end, len(episode.turns)) == (end, turns)
    (row,) = episode.rows
    assert isinstance(row.parts[-1], Segment), "nothing is put behind the last turn"
    tokens = len(row.prompt_tokens) + sum(len(part.tokens) for part in row.parts)
    assert tokens <= engine.context_tokens


def test_a_reward_function_sees_the_whole_sample() -> None:
    seen: list[Any] = []

    class Sees(Scripted):
        async def score(self, completion: str, data: Mapping[str, Any]) -> RewardOutcome:
            seen.extend(data["trajectory"])
            return await super().score(completion, data)

    play(ToolUse(), Sees([CALL, ANSWER]))
    call = {"name": "calculator", "arguments": {"expression": "34 * 27"}}
    assert seen == [
        {"role": "assistant", "content": CALL, "tool_calls": [call]},
        {"role": "tool", "content": "918"},
        {"role": "assistant", "content": ANSWER},
    ]


def test_a_later_turn_is_worth_less() -> None:
    engine = Scripted(["1\n", "2\n", "918\n"], {"918\n": 1.0})
    workflow = MultiTurn(max_turns=4, turn_discount=0.5, feedback="{question}? Again.\n")
    data = {**PRODUCT, "question": "34 * 27"}
    episode = play(workflow, engine, data)
    assert whole(episode) == (PRODUCT["prompt"] + "1\n34 * 27? Again.\n2\n34 * 27? Again.\n918\n")
    assert trained(episode) == "1\n2\n918\n"
    assert episode.outcome.reward == 0.25
    assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 1.0]
    assert (episode.end, engine.scored) == ("stop", ["1\n", "2\n", "918\n"])


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (" 917\n", "Too small.\n34 * 27 ="),
        ("919 or so", "\nToo big.\n34 * 27 ="),
        ("-1\n", "Too small.\n34 * 27 ="),
        ("?\n", "No number.\n34 * 27 ="),
        (" 918 apples\n", "Write only the number.\n34 * 27 ="),
        ("1,000.5\n", "Too big.\n34 * 27 ="),
    ],
)
def test_feedback_may_be_a_function(said: str, told: str) -> None:
    data = {"prompt": "2 * 3 = 6\n34 * 27 =", "answer": "918"}
    workflow = MultiTurn(feedback="areal_lab.agents.multi_turn:too_small_or_big")
    engine = Scripted([said, " 918\n"], {" 918\n": 1.0})
    episode = play(workflow, engine, data)
    assert engine.prompts[1] == data["prompt"] + said + told
    assert episode.outcome.reward == 1.0
    with pytest.raises(ValueError, match="has no 'too_small'"):
        MultiTurn(feedback="areal_lab.agents.multi_turn:too_small")


@pytest.mark.parametrize(
    ("said", "answer", "told"),
    [
        ("3", "3.5", "Too small."),
        ("3.50", "3.5", "Write only the number."),
        ("1200 m", "1,200", "Write only the number."),
        ("1,201", " 1,200", "Too big."),
        ("1,2,3", "2", "Too small."),
        ("\u22125", "-5", "Write only the number."),
        ("1/2", "0.5", "Write only the number."),
        ("5-10", "5", "Write only the number."),
        ("9^9^9", "5", "No number."),
    ],
)
def test_numbers_are_compared_as_decimals(said: str, answer: str, told: str) -> None:
    assert too_small_or_big(said, {"prompt": "p", "answer": answer}) == f"\n{told}\np"


def test_a_side_needs_a_number() -> None:
    with pytest.raises(ValueError, match="the answer is 'x', but too_small_or_big needs a number"):
        too_small_or_big("3", {"prompt": "p", "answer": "x"})


def test_feedback_keeps_braces_that_name_no_field() -> None:
    engine = Scripted(["1\n", "2\n"])
    feedback = r"Not {n}, {hint}. Use \boxed{} and {0}, {unknown}." + "\n"
    play(MultiTurn(feedback=feedback), engine, {**PRODUCT, "n": 1, "hint": "{n}"})
    assert engine.prompts[1].endswith("1\nNot 1, {n}. Use \\boxed{} and {0}, {unknown}.\n")


@pytest.mark.parametrize("name", ["answer", "full_answer"])
def test_feedback_cannot_tell_the_answer(name: str) -> None:
    with pytest.raises(ValueError, match=f"feedback contains {{{name}}}, but must not tell"):
        MultiTurn(feedback=f"It is {{{name}}}.\n")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"name": "tool_us"}, "did you mean 'tool_use'"),
        ({"name": "tool_use", "turns": 2}, "no keyword 'turns'; it takes max_turns"),
        ({"name": "tool_use", "tool": "calculators"}, "did you mean 'calculator'"),
        ({"name": "tool_use", "tool": {"name": "calculator", "digits": 3}}, "calculator"),
        ({"name": "tool_use", "tool": {"name": "search", "corpus": "no.jsonl"}}, "no.jsonl cannot"),
        ({"name": "tool_use", "call": " "}, "call is ' '"),
        ({"name": "tool_use", "max_turns": 0}, "max_turns is 0"),
        ({"name": "multi_turn", "turn_discount": 0}, "turn_discount is 0"),
        ({"name": "tests.agents.scripted:Scripted", "script": []}, "no method `async def run"),
    ],
)
def test_a_workflow_that_cannot_be_made_is_refused(setting: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_workflow(setting)


def test_workflows_are_made_by_name_and_by_path() -> None:
    assert make_workflow({}) is None
    assert isinstance(make_workflow({"name": "tool_use"}), ToolUse)
    path = f"{MultiTurn.__module__}:{MultiTurn.__name__}"
    assert isinstance(make_workflow({"name": path, "max_turns": 3}), MultiTurn)

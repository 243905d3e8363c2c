"""Notations of calls: what ends a turn, what is run, and what the model reads."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.agents.catalogue import make_workflow
from areal_lab.agents.tool_use import MOST_CALLS, Call, Malformed, ToolUse, json_calls, python_fence
from areal_lab.agents.tools.box import ToolBroken
from areal_lab.agents.workflow import Episode
from areal_lab.data.stop_strings import StopScanner
from areal_lab.data.trajectory import Observation, Segment, Turn
from areal_lab.engines.protocol import Generated, SamplingParams
from areal_lab.rewards.sandbox.run import Sandbox, SandboxError
from tests.agents.scripted import CODEC, Scripted
from tests.agents.test_workflows import play, trained, whole

ASK = {"prompt": "What is 34 * 27?\n", "answer": "918"}
PROGRAM = "Let me see.\n```python\nprint(34 * 27)\n```\n"
OUTPUT = "```output\n918\n```\n"
ANSWER = "It is 918."
OWN = "tests.agents.own_tools:"


class Stopped(Scripted):
    """Says one text to its end, in as many turns as its stop strings make of it."""

    said = ""

    async def turn(self, prompt_tokens: Any, sampling: SamplingParams | None = None) -> Generated:
        assert sampling is not None
        rest = self.script[0][len(self.said) :]
        tokens = self.encode(rest)
        cut = StopScanner(CODEC, sampling.stop).completing(tokens) if rest else None
        tokens = tokens if cut is None else tokens[: cut + 1]
        limit = min(sampling.max_new_tokens, self.context_tokens - len(prompt_tokens))
        whole_turn = len(tokens) <= limit
        self.said += self.decode(tokens[:limit])
        self.prompts.append(self.decode(prompt_tokens))
        return Generated(
            request_id=f"turn-{len(self.prompts)}",
            segments=(Segment(tokens[:limit], (-0.5,) * len(tokens[:limit]), 0),),
            finish_reason="stop" if whole_turn else "length",
            retractions=0,
            cached_tokens=0,
        )


def run(workflow: ToolUse, engine: Scripted, data: Any = ASK) -> Episode:
    return asyncio.run(workflow.run(engine, data))


def test_a_program_is_run_and_its_output_is_not_trained_on() -> None:
    engine = Scripted([PROGRAM, ANSWER], {ANSWER: 1.0})
    episode = play(ToolUse(notation="python", timeout_s=20), engine, ASK)
    assert whole(episode) == ASK["prompt"] + PROGRAM + OUTPUT + ANSWER
    assert trained(episode) == PROGRAM + ANSWER
    assert episode.outcome.reward == 1.0
    assert episode.turns == (
        Turn(tokens=len(PROGRAM), tool="python", outcome="ok"),
        Turn(tokens=len(ANSWER)),
    )


@pytest.mark.parametrize(
    ("said", "between"),
    [
        (PROGRAM, "```output\n"),
        (PROGRAM + "\n", "```output\n"),  # a token may have more than the stop string
        (PROGRAM.removesuffix("\n"), "\n```output\n"),  # the model ended its turn
        (PROGRAM + "```output", "\n"),
    ],
)
def test_an_output_fence_is_opened_once(said: str, between: str) -> None:
    engine = Scripted([said, ANSWER])
    play(ToolUse(notation="python", timeout_s=20), engine, ASK)
    assert engine.prompts[1] == f"{ASK['prompt']}{said}{between}918\n```\n"


def test_fences_of_other_languages_are_text() -> None:
    text = "```text\na\n```\nand\n```\nb\n```\nthen\n```python\nprint(1)\n```\nnever said"
    engine = Stopped([text])
    episode = run(ToolUse(notation="python", max_turns=1), engine)
    assert engine.said == text.removesuffix("never said")
    assert len(engine.prompts) > 1, "the stop strings interrupt the turn"
    assert [turn.tool for turn in episode.turns] == ["python"]
    assert trained(episode) == engine.said
    engine = Stopped(["```cpp\nint main() {}\n```\nThat is all."])
    episode = run(ToolUse(notation="python"), engine)
    assert (episode.end, [turn.tool for turn in episode.turns]) == ("stop", [""])
    assert engine.scored == engine.script


def test_a_turn_in_pieces_has_one_limit() -> None:
    text = "```text\na\n```\n" * 20
    engine = Stopped([text], sampling=SamplingParams(max_new_tokens=33))
    episode = run(ToolUse(notation="python"), engine)
    assert (episode.end, episode.tokens) == ("length", 33)
    engine = Stopped([text], context_tokens=len(ASK["prompt"]) + 20)
    episode = run(ToolUse(notation="python"), engine)
    assert (episode.end, episode.tokens) == ("context", 20)


def test_stop_strings_of_the_run_are_kept() -> None:
    engine = Stopped(
        ["The answer is 918. Next"],
        sampling=SamplingParams(max_new_tokens=100, stop=("918.",)),
    )
    assert trained(run(ToolUse(notation="python"), engine)) == "The answer is 918."


def test_a_fence_that_is_not_closed_is_a_malformed_call() -> None:
    engine = Scripted(["```python\nprint(1)", ANSWER])
    episode = play(ToolUse(notation="python"), engine, ASK)
    assert engine.prompts[1].endswith(
        "\n```output\nerror: the fence ```python is not closed by a line ```\n```\n"
    )
    assert episode.turns[0].calls == (("?", "malformed"),)


@given(st.text(), st.text())
def test_the_first_python_fence_is_what_is_run(before: str, after: str) -> None:
    notation = python_fence()
    found = notation.find(f"{before.replace('`', '')}```python\na\n```{after}")
    assert found == [Call("python", {"code": "a\n"})]
    assert notation.find(before.replace("`", "")) == []


JSON: dict[str, Any] = {
    "notation": "json",
    "tools": ["calculator", f"{OWN}weather", f"{OWN}hangs", f"{OWN}leaves"],
    "timeout_s": 5.0,
}


def called(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_calls_run_at_once_and_are_answered_in_order() -> None:
    calls = "\n".join(
        [
            called("weather", '{"city": "Kiel"}'),
            called("nothing, like that", "{}"),
            "<tool_call>{'name': 'weather'}</tool_call>",
            called("calculator", '{"expression": "6 * 7"}'),
            called("leaves", "{}"),
        ]
    )
    engine = Scripted([calls, ANSWER], sampling=SamplingParams(max_new_tokens=1000))
    engine.context_tokens = 5000
    episode = play(ToolUse(**JSON), engine, ASK)
    told = engine.prompts[1].removeprefix(ASK["prompt"] + calls)
    assert told.startswith("\n<tool_response>\nKiel: rain\n</tool_response>\n<tool_response>\n")
    results = told.split("<tool_response>\n")[1:]
    assert [one.split(":")[0].split("\n")[0] for one in results] == [
        *("Kiel", "error", "error", "42", "error"),
    ]
    assert "there is no tool 'nothing, like that', only calculator, weather" in results[1]
    assert episode.turns[0].calls == (
        ("weather", "ok"),
        ("nothing like that", "unknown"),
        ("?", "malformed"),
        ("calculator", "ok"),
        ("leaves", "error"),
    )
    assert trained(episode) == calls + ANSWER


def test_a_tool_that_hangs_costs_its_time_and_nothing_else() -> None:
    calls = called("hangs", "{}") + called("weather", '{"city": "Kiel"}')
    engine = Scripted([calls, ANSWER], sampling=SamplingParams(max_new_tokens=1000))
    episode = play(ToolUse(**{**JSON, "timeout_s": 0.2}), engine, ASK)
    assert episode.turns[0].calls == (("hangs", "timeout"), ("weather", "ok"))
    assert "error: no result within 0.2 s" in engine.prompts[1]


def test_a_result_of_a_megabyte_is_cut_and_says_so() -> None:
    call = called("weather", '{"city": "' + "x" * 40 + '", "days": 25000}')
    engine = Scripted([call, ANSWER], context_tokens=20_000)
    engine.sampling = SamplingParams(max_new_tokens=200)
    play(ToolUse(**JSON), engine, ASK)
    told = engine.prompts[1].removeprefix(ASK["prompt"] + call)
    assert told.endswith("... (cut)\n</tool_response>\n")
    assert len(told) < 4100


def test_more_calls_than_a_turn_may_have_are_refused() -> None:
    calls = called("weather", '{"city": "K"}') * (MOST_CALLS + 2)
    engine = Scripted([calls, ANSWER], context_tokens=9000)
    engine.sampling = SamplingParams(max_new_tokens=4000)
    episode = play(ToolUse(**JSON), engine, ASK)
    outcomes = [outcome for _, outcome in episode.turns[0].calls]
    assert outcomes == ["ok"] * MOST_CALLS + ["error"] * 2


def test_marks_of_a_template_are_put_around_results() -> None:
    call = called("calculator", '{"expression": "6 * 7"}')
    engine = Scripted([call, ANSWER])
    workflow = ToolUse(notation="json", around="<|im_start|>user\n{results}<|im_end|>\n")
    play(workflow, engine, ASK)
    assert engine.prompts[1].endswith(
        call + "<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<|im_end|>\n"
    )


def test_tools_are_described_where_the_prompt_wants_it() -> None:
    engine = Scripted([ANSWER], context_tokens=5000)
    run(ToolUse(**JSON), engine, {"prompt": "{tools}\nGo: {x}", "answer": ""})
    assert '"name": "weather", "description": "The weather of a city."' in engine.prompts[0]
    assert engine.prompts[0].endswith("</tool_call>\nGo: {x}")


@given(st.text())
def test_any_text_has_calls_or_none(text: str) -> None:
    for notation in (json_calls(), python_fence()):
        for call in notation.find(text):
            assert isinstance(call, Call | Malformed)


def test_the_last_turn_calls_nothing() -> None:
    call = called("weather", '{"city": "K"}')
    engine = Scripted([call * 2], sampling=SamplingParams(max_new_tokens=1000))
    episode = play(ToolUse(**JSON, max_turns=1), engine, ASK)
    assert episode.turns[0].calls == (("weather", "not called"),) * 2
    (row,) = episode.rows
    assert not any(isinstance(part, Observation) for part in row.parts)


def test_a_broken_sandbox_is_no_result_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise SandboxError("no memory for a process")

    workflow = ToolUse(notation="python")
    monkeypatch.setattr(Sandbox, "run_async", refused)
    with pytest.raises(ExceptionGroup) as raised:
        run(workflow, Scripted([PROGRAM, ANSWER]))
    assert raised.group_contains(ToolBroken, match="no memory")


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"notation": "xml"}, "must be one of lines, python, json"),
        ({"notation": "jsn"}, "did you mean 'json'"),
        ({"tools": ["calculator"]}, "notation lines calls one tool"),
        ({"notation": "json", "tool": "calculator", "tools": ["search"]}, "both given"),
        ({"notation": "json", "tools": "search"}, "must be a list"),
        ({"notation": "python", "tool": "calculator"}, "notation python runs programs"),
        ({"notation": "python", "tool": {"name": "python", "memory_mb": 0}}, "memory_mb is 0"),
        ({"tool": f"{OWN}distance"}, "takes 2 arguments, but a line has one"),
        ({"around": "\n"}, "must contain {results}"),
        ({"notation": "json", "tools": ["calculator", "calculator"]}, "names must differ"),
    ],
)
def test_what_does_not_go_together_is_refused(keywords: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_workflow({"name": "tool_use", **keywords})


def test_programs_are_contained_as_the_rewards_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_lab.rewards.sandbox.levels.refusal", lambda level: f"no {level}")
    setting = {"name": "tool_use", "notation": "python"}
    with pytest.raises(RuntimeError, match="sandbox is auto, but programs cannot be contained"):
        make_workflow(setting)
    assert make_workflow(setting, sandbox="unsafe") is not None
    assert make_workflow({"name": "tool_use"}) is not None, "a calculator needs no sandbox"
    with pytest.raises(RuntimeError, match="sandbox is namespaces"):
        make_workflow({**setting, "sandbox": "namespaces"}, sandbox="unsafe")


def test_an_engine_is_asked_with_the_stops_of_the_notation() -> None:
    asked: list[SamplingParams | None] = []

    class Asked(Scripted):
        async def turn(
            self, prompt_tokens: Any, sampling: SamplingParams | None = None
        ) -> Generated:
            asked.append(sampling)
            return await super().turn(prompt_tokens, sampling)

    base = SamplingParams(max_new_tokens=50, stop=("Q:", "```\n"), stop_token_ids=(10,))
    run(ToolUse(notation="python"), Asked([ANSWER], sampling=base))
    run(ToolUse(), Asked([ANSWER], sampling=base))
    assert asked == [replace(base, stop=("Q:", "```\n", "```output")), None]

"""Programs of users at the gateway of a run: what becomes of a sample, whatever they do."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from areal_lab.agents.agent import Agent
from areal_lab.agents.workflow import Episode
from areal_lab.data.trajectory import Segment
from tests.agents import smollm2, templates
from tests.agents.random_model import CALL, RandomModel
from tests.pipeline.programs import ask

ADD = {"type": "function", "function": {"name": "add", "description": "Add two numbers."}}
FORM = templates.chat_format("SMOLLM2")
DATA = {"prompt": "2 + 3?", "answer": "5"}
Data = Mapping[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("model")
    smollm2.codec()._tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(smollm2.template().source)
    return folder


def play(
    model: Path, fn: str, *script: str, context_tokens: int = 8000, **keywords: Any
) -> tuple[Episode, RandomModel]:
    """One sample of a program, which is one of this module if it has no module's name."""

    async def scenario() -> tuple[Episode, RandomModel]:
        name = fn if ":" in fn else f"{__name__}:{fn}"
        agent = Agent(fn=name, **keywords)
        await agent.open(model)
        try:
            engine = RandomModel(FORM, Random(1), script, context_tokens, longest_s=0.0)
            episode = await agent.run(engine, DATA)
        finally:
            await agent.close()
        assert episode.tokens <= sum(turn.tokens for turn in episode.turns)
        return episode, engine

    return asyncio.run(scenario())


def said(reply: Mapping[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = reply["choices"][0]["message"]
    return message


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def refused(data: Data, *messages: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The error of a call that is not served."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(data["base_url"], data["api_key"], messages, **more)
    error: dict[str, Any] = json.load(caught.value)["error"]
    return {**error, "status": caught.value.code}


# --- a sample -------------------------------------------------------------------------------------


def adds(data: Data) -> float:
    """Two turns with a tool; the client writes arguments and text in its own way."""
    url, key = data["base_url"], data["api_key"]
    first = said(ask(url, key, [user(data["prompt"])], tools=[ADD]))
    (call,) = first["tool_calls"]
    call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
    result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    history = [user(data["prompt"]), first, result]
    last = said(ask(url, key, history, tools=[ADD], temperature=0.1, max_tokens=9))
    return float(data["answer"] in last["content"])


def test_a_program_is_a_sample_of_the_tokens_that_were_sampled(model: Path) -> None:
    episode, engine = play(model, "adds", CALL, "It is 5.")
    assert (episode.outcome.reward, episode.end) == (1.0, "stop")
    first, second = engine.asked.values()
    (row,) = episode.rows
    sampled = [token for part in row.parts if isinstance(part, Segment) for token in part.tokens]
    encode, (end, *_) = engine.form.codec.encode, engine.form.end_tokens
    assert sampled == [*encode(CALL), end, *encode("It is 5."), end]
    assert row.prompt_tokens == first
    assert second[: len(first)] == first
    assert [(turn.tool, turn.outcome, turn.fork) for turn in episode.turns] == [
        ("add", "ok", ""),
        ("", "", ""),
    ]
    assert [one.temperature for one in engine.asked_with] == [1.0, 1.0], "that of the run"
    assert [one.max_new_tokens for one in engine.asked_with] == [120, 9]


async def two_agents(data: Data) -> dict[str, float]:
    """Two sub-agents at once, of which one ends well."""

    def one(system: str) -> list[str]:
        history: list[Any] = [{"role": "system", "content": system}, user(data["prompt"])]
        ids = []
        for _ in range(2):
            reply = ask(data["base_url"], data["api_key"], history)
            ids.append(reply["id"])
            history += [said(reply), user("And?")]
        return ids

    first, _ = await asyncio.gather(asyncio.to_thread(one, "A"), asyncio.to_thread(one, "B"))
    return {first[-1]: 1.0}


def test_a_reward_stays_with_the_sub_agent_that_got_it(model: Path) -> None:
    episode, engine = play(model, "two_agents", *["Yes."] * 4, turn_discount=0.5)
    (row,) = episode.rows
    assert row.turn_returns == (0.5, 1.0), "and the other one's turns are not trained on"
    assert len(engine.asked) == len(episode.turns) == 4
    assert sorted(turn.reward or 0.0 for turn in episode.turns) == [0.0, 0.0, 0.0, 1.0]


# --- the end of a sample --------------------------------------------------------------------------


def reads_a_long_page(data: Data) -> float:
    """Puts a megabyte into the conversation, and takes the refusal for the end."""
    first = said(ask(data["base_url"], data["api_key"], [user("Read.")], tools=[ADD]))
    call_id = first["tool_calls"][0]["id"]
    page = {"role": "tool", "tool_call_id": call_id, "content": "7 " * 2**19}
    error = refused(data, user("Read."), first, page, tools=[ADD])
    assert (error["status"], error["code"]) == (400, "context_length_exceeded")
    return 0.5


def asks_once(data: Data) -> float:
    """One turn."""
    ask(data["base_url"], data["api_key"], [user(data["prompt"])])
    return 1.0


def test_a_result_that_is_too_long_ends_a_sample_as_a_full_context(model: Path) -> None:
    episode, _ = play(model, "reads_a_long_page", CALL)
    assert (episode.end, episode.outcome.reward, episode.truncated) == ("context", 0.5, True)
    (row,) = episode.rows
    assert isinstance(row.parts[-1], Segment)


@pytest.mark.parametrize(("room", "end"), [(5, "context"), (50, "stop")])
def test_a_turn_has_the_room_that_is_left(model: Path, room: int, end: str) -> None:
    _, engine = play(model, "asks_once", "One two three four five six.")
    (prompt,) = engine.asked.values()
    episode, _ = play(
        model, "asks_once", "One two three four five six.", context_tokens=len(prompt) + room
    )
    assert episode.end == end
    assert episode.tokens <= room


def raises(data: Data) -> float:
    asks_once(data)
    raise KeyError("no such page")


def returns_nothing(data: Data) -> None:
    asks_once(data)


def rewards_another(data: Data) -> dict[str, float]:
    asks_once(data)
    return {"chatcmpl-9": 1.0}


def hangs_in_a_thread(data: Data) -> float:
    asks_once(data)
    threading.Event().wait()
    return 1.0


def waits_too_long(data: Data) -> float:
    asks_once(data)
    raise TimeoutError("no page")


AT_ONCE = 40
MEETING = threading.Barrier(AT_ONCE, timeout=20)


def meets_others(data: Data) -> float:
    """Waits until all samples are here."""
    MEETING.wait()
    return asks_once(data)


async def meets_others_on_the_loop(data: Data) -> float:
    return await asyncio.to_thread(meets_others, data)


async def hangs(data: Data) -> float:
    await asyncio.to_thread(asks_once, data)
    await asyncio.Event().wait()
    return 1.0


@pytest.mark.parametrize(
    ("fn", "status", "reason", "keywords"),
    [
        ("hangs_in_a_thread", "timeout", "more than 0.5 s", {"timeout_s": 0.5}),
        ("waits_too_long", "error", "TimeoutError: no page", {}),
        ("raises", "error", "no such page", {}),
        ("returns_nothing", "refused", "returned None", {}),
        ("rewards_another", "error", "interaction_id is chatcmpl-9", {}),
        ("hangs", "timeout", "more than 0.5 s", {"timeout_s": 0.5}),
        ("tests.pipeline.programs:asks_nothing", "error", "the model for nothing", {}),
        ("tests.pipeline.programs:dies", "error", "exited with 3", {"mode": "subprocess"}),
    ],
)
def test_an_agent_without_a_reward_is_no_sample_with_a_reward_of_zero(
    model: Path, fn: str, status: str, reason: str, keywords: dict[str, Any]
) -> None:
    episode, engine = play(model, fn, "Yes.", **keywords)
    assert math.isnan(episode.outcome.reward)
    assert episode.outcome.status == status
    assert reason in episode.outcome.detail
    assert len(episode.turns) == len(engine.asked), "what was sampled is counted"


def test_agents_in_threads_do_not_wait_for_each_other(model: Path) -> None:
    """Nor does the run for them, which loads weights in threads while they wait for engines."""

    async def scenario(fn: str) -> list[Episode]:
        agent = Agent(fn=f"{__name__}:{fn}")
        await agent.open(model)
        engines = [RandomModel(FORM, Random(1), ["Yes."], longest_s=0.0) for _ in range(AT_ONCE)]
        episodes = await asyncio.gather(*[agent.run(engine, DATA) for engine in engines])
        await agent.close()
        return episodes

    for fn in ("meets_others", "meets_others_on_the_loop"):
        assert {one.outcome.reward for one in asyncio.run(scenario(fn))} == {1.0}


KEYS: list[Data] = []


def keeps_its_key(data: Data) -> float:
    KEYS.append(data)
    asks_once(data)
    return 1.0


def test_a_key_is_of_no_use_after_its_sample(model: Path) -> None:
    async def scenario() -> None:
        agent = Agent(fn=f"{__name__}:keeps_its_key")
        await agent.open(model)
        engine = RandomModel(FORM, Random(1), ["Yes."], longest_s=0.0)
        await agent.run(engine, DATA)
        error = await asyncio.to_thread(refused, KEYS.pop(), user("Once more?"))
        assert error["status"] == 410
        assert len(engine.asked) == 1
        await agent.close()

    asyncio.run(scenario())


def calls_at_once(data: Data) -> float:
    """The same question four times, which are four samples."""
    url, key = data["base_url"], data["api_key"]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: ask(url, key, [user("Hi")]), range(4)))
    return float(len({reply["id"] for reply in replies}))


def test_calls_at_once_are_branches_of_one_sample(model: Path) -> None:
    episode, engine = play(model, "calls_at_once", *["Yes."] * 4)
    assert episode.outcome.reward == 4.0
    assert len(episode.rows) == len(engine.asked) == 4
    assert episode.tokens == sum(turn.tokens for turn in episode.turns)


# --- models ---------------------------------------------------------------------------------------

UNREADABLE = templates.QWEN.replace('<tool_call>\\n{"name": "', "<function=").replace(
    '"arguments": ', ""
)


def test_a_template_whose_calls_cannot_be_read_is_refused_unless_agents_call_no_tools(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.jinja").write_text(UNREADABLE)
    options = {"fn": f"{__name__}:asks_once", "template": str(tmp_path / "mine.jinja")}
    with pytest.raises(ValueError, match=r"no grammar reads; set tool_call_parser to") as caught:
        Agent(**options).check_model(model)
    assert "\n" not in str(caught.value)
    Agent(**options, tool_call_parser="none").check_model(model)
    Agent(**options, tool_call_parser="hermes").check_model(model)
    Agent(fn=options["fn"]).check_model(model)


def test_what_else_is_refused_of_a_model(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tool-call grammar is 'qwen'"):
        Agent(fn=f"{__name__}:asks_once", tool_call_parser="qwen").check_model(model)
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="has no chat template"):
        Agent(fn=f"{__name__}:asks_once").check_model(tmp_path)

"""Agents over HTTP, and the tokens behind them: whatever clients do, what was sampled is trained.

Gateway, session tree, reader and rows together, in virtual time; only the model is random.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.agents import conversation
from areal_lab.agents.conversation import TreeConversation
from areal_lab.agents.gateway.calls import Scores
from areal_lab.agents.gateway.server import create_app
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.gateway.sessions import Session
from areal_lab.agents.messages import Message, Tool
from areal_lab.agents.replies import ReplyReader
from areal_lab.agents.session_tree import SessionTree
from areal_lab.agents.turns import tokens_through
from areal_lab.data.trajectory import Segment
from areal_lab.engines.protocol import SamplingParams
from tests.agents.check_rows import check_rows
from tests.agents.conversation import NOW
from tests.agents.gateway.scripted import ADMIN, MODEL, Agent, chat_of, sse, virtually
from tests.agents.random_model import BAD_CALLS, CALL, RandomModel
from tests.agents.templates import chat_format
from tests.simulator.run.virtual_loop import run_virtually

ADD = {"type": "function", "function": {"name": "add", "description": "Add two numbers."}}
SUB = {"type": "function", "function": {"name": "sub"}}
HI = {"role": "user", "content": "2 + 3?"}
Json = dict[str, Any]
CALLS = {
    "LLAMA": '{"name": "add", "parameters": {"a":2}}',
    "MISTRAL": '[TOOL_CALLS] [{"name": "add", "arguments": { "a":2}}]',
}
"""Of models that do not call tools as `CALL` does."""


@dataclass
class Lab:
    """One session, and everything behind it."""

    service: Service
    session: Session
    conversation: TreeConversation
    model: RandomModel
    agent: Agent

    async def chat(self, *messages: Json, **fields: Any) -> Json:
        """The message of a reply; its tools are `ADD`, unless said otherwise."""
        body = {"messages": list(messages), "tools": [ADD], **fields}
        reply = await self.agent.post("/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        message: Json = reply.json()["choices"][0]["message"]
        return message

    async def end(self) -> None:
        """End the session, and check what holds for every one."""
        self.service.end_session(self.session)
        await self.service.settled(self.session)
        tree, asked = self.conversation.tree, self.model.asked
        names = [turn.generated.request_id for turn in tree.turns]
        assert sorted(names) == sorted(asked), "every sample is recorded once"
        for turn, name in zip(tree.turns, names, strict=True):
            before = tokens_through(tree.turns, turn.parent)
            assert asked[name] == before + turn.added == tree.prompt_of(turn.number)
        check_rows(tree, [asked[name] for name in names])
        sampled = Counter(token for turn in tree.turns for token in turn.tokens)
        rows = self.conversation.episode_rows((), of_turns=False)
        segments = [part for row in rows for part in row.parts if isinstance(part, Segment)]
        assert Counter(token for part in segments for token in part.tokens) == sampled
        exported = self.service.export(self.session, style="individual")["rows"]
        for row, turn in zip(exported, tree.turns, strict=True):
            assert tuple(row["prompt_tokens"]) == asked[names[turn.number]]
            assert [(tuple(p["tokens"]), tuple(p["logprobs"])) for p in row["parts"]] == [
                (part.tokens, part.logprobs) for part in turn.generated.segments
            ]


@asynccontextmanager
async def lab(name: str, rng: Random, *script: str, **options: Any) -> AsyncIterator[Lab]:
    """A gateway with one session on a model with this template."""
    form = chat_format(name)
    model = RandomModel(form, rng, script, call=CALLS.get(name, CALL), **options)
    service = Service(
        lambda _: conversation,
        admin_key=ADMIN,
        model=MODEL,
        clock=asyncio.get_running_loop().time,
    )
    conversation = TreeConversation(
        SessionTree(form, now=NOW, session="s"),
        ReplyReader(form, context_tokens=model.context_tokens),
        model,
        end_tokens=form.end_tokens,
    )
    session, key = service.start_session("task")
    transport = httpx2.ASGITransport(app=create_app(service))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
        agent = Agent(http, session.session_id, key)
        yield Lab(service, session, conversation, model, agent)
        await service.close()


# --- any clients ----------------------------------------------------------------------------------

ECHOES = ("verbatim", "strip", "serialize", "other arguments", "no reasoning")


def kept(message: Json, rng: Random) -> list[Json]:
    """What a client keeps of a reply, and what it sends after it."""
    calls = message.get("tool_calls", [])
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "5"} for one in calls]
    rng.shuffle(results)  # parallel calls are answered in any order
    sent = {name: value for name, value in message.items() if value is not None}
    match rng.choice([*ECHOES, *ECHOES, "rewrite", "drop"]):
        case "strip":
            sent["content"] = (message["content"] or "").strip()
        case "serialize":
            for one in sent.get("tool_calls", []):
                function = one["function"]
                function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=1)
        case "other arguments":
            for one in sent.get("tool_calls", []):
                one["function"]["arguments"] = "lost"
        case "no reasoning":
            sent.pop("reasoning_content", None)
        case "rewrite":
            return [{"role": "assistant", "content": f"I said: {message['content']}"}, HI]
        case "drop":
            return [HI]
    return [sent, *(results or [{"role": "user", "content": rng.choice(["And?", "Why?"])}])]


async def ask(agent: Agent, body: Json, rng: Random) -> Json | None:
    """A completion, by a client that may hang up, repeat itself or give up."""
    path = "/v1/chat/completions"
    sending = asyncio.create_task(agent.post(path, body))
    how = rng.choice(["wait", "wait", "wait", "hang up", "give up", "retry"])
    if how != "wait":
        await asyncio.sleep(rng.uniform(0.1, 3))
    if how in ("hang up", "give up"):
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    if how == "give up":
        return None
    reply = None
    if how != "wait":
        retries = str(int(how == "retry"))
        reply = await agent.post(path, body, x_stainless_retry_count=retries)
    if how != "hang up":
        first = await sending
        assert reply is None or reply.content == first.content
        reply = first
    assert reply is not None
    assert reply.status_code == 200, reply.text
    found: Json = chat_of(sse(reply.content)) if body["stream"] else reply.json()
    return found


async def converse(agent: Agent, rng: Random, name: str) -> None:
    """One agent, of several in a session; a retry is only known by its body, which has its name."""
    messages, tools, system = [HI], [ADD], rng.choice([[], [{"role": "system", "content": "A"}]])
    for _ in range(rng.randint(1, 5)):
        body = {
            "user": name,
            "messages": system + messages,
            "tools": tools,
            "n": rng.choice([1, 1, 2]),
            "stream": rng.random() < 0.3,
            "stop": rng.choice([[], [], [], ["a", "</tool"]]),
            "max_tokens": rng.choice([None, None, None, 1, 30]),
        }
        found = await ask(agent, body, rng)
        if found is not None:
            messages += kept(rng.choice(found["choices"])["message"], rng)
        match rng.choice([*["go on"] * 6, "hand off", "tools", "shorten"]):
            case "hand off":
                system = [{"role": "system", "content": rng.choice("AB")}]
            case "tools":
                tools = rng.choice([[ADD], [ADD, SUB], []])
            case "shorten" if len(messages) > 3:
                del messages[1:3]


@pytest.mark.parametrize("model", ["SMOLLM2", "QWEN_THINKING", "LLAMA"])
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_every_sampled_token_is_trained_once_whatever_clients_do(model: str, seed: int) -> None:
    rng = Random(seed)  # of hypothesis's own, what runs out of data inside a task is lost

    async def scenario() -> None:
        async with lab(model, rng) as one:
            async with asyncio.TaskGroup() as agents:
                for name in "abc"[: rng.randint(1, 3)]:
                    agents.create_task(converse(one.agent, rng, name))
            await one.end()

    run_virtually(scenario())


# --- each client, and how it is counted -----------------------------------------------------------

THOUGHT = f"<think>\nhm\n</think>\n\nI add.\n{CALL}"
Edit = Callable[[Json], Json]


def without(*names: str) -> Edit:
    return lambda message: {key: value for key, value in message.items() if key not in names}


def stripped(message: Json) -> Json:
    return {**message, "content": f" {message['content'].strip()}\n"}


def serialized(message: Json) -> Json:
    """As langchain and pydantic-ai do."""
    (call,) = message["tool_calls"]
    arguments = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
    return {
        **message,
        "tool_calls": [{**call, "function": {"name": "add", "arguments": arguments}}],
    }


def as_text(message: Json) -> Json:
    """As smolagents does."""
    (call,) = message["tool_calls"]
    return {"role": "assistant", "content": f"Calling tools:\n[{call!r}]"}


@pytest.mark.parametrize(
    ("edit", "fields", "match", "fork"),
    [
        (lambda message: message, {}, "exact", None),
        (stripped, {}, "stripped", None),
        (serialized, {}, "exact", None),
        (without("content"), {}, "stripped", None),
        (without("reasoning_content"), {}, "exact", None),
        (as_text, {}, None, "assistant_rewritten"),
        (lambda message: message, {"system": "B"}, None, "system_changed"),
        (lambda message: message, {"tools": [ADD, SUB]}, None, "tools_changed"),
        (lambda message: message, {"question": "4 + 4?"}, None, "history_changed"),
    ],
    ids=[
        *("verbatim", "strips", "serializes", "drops text", "drops reasoning", "writes text"),
        *("hands off", "other tools", "other question"),
    ],
)
@virtually
async def test_a_client_is_counted_by_what_it_does_to_an_answer(
    edit: Edit, fields: Json, match: str | None, fork: str | None
) -> None:
    async with lab("QWEN_THINKING", Random(1), THOUGHT, "<think>so</think>Five") as one:
        first = await one.chat({"role": "system", "content": "A"}, HI)
        assert (first["reasoning_content"], first["content"]) == ("hm", "I add.")
        (call,) = first["tool_calls"]
        await one.chat(
            {"role": "system", "content": fields.get("system", "A")},
            {"role": "user", "content": fields.get("question", HI["content"])},
            edit(first),
            {"role": "tool", "tool_call_id": call["id"], "content": "5"},
            tools=fields.get("tools", [ADD]),
        )
        tree, (before, after) = one.conversation.tree, one.model.asked.values()
        assert tree.matches == ({match: 1} if match else {})
        assert tree.forks == ({fork: 1} if fork else {})
        assert tree.follows == (None, 0)
        assert (after[: len(before)] == before and tree.turns[1].parent == 0) is (fork is None)
        assert len(tree.rows()) == (1 if fork is None else 2)
        notes = one.conversation.notes(Scores())
        assert [note.fork for note in notes] == ["", fork or ""]
        await one.end()


@virtually
async def test_a_window_over_the_history_is_counted_as_shortened() -> None:
    async with lab("SMOLLM2", Random(1), "One", "Two", "Three") as one:
        history: list[Json] = [HI]
        for _ in range(2):
            history += [await one.chat(*history), {"role": "user", "content": "And?"}]
        await one.chat(*history[2:])
        assert one.conversation.tree.forks == {"history_shortened": 1}
        await one.end()


DIALECTS: dict[str, Callable[[list[Json]], Json]] = {
    "/chat/completions": lambda history: {"messages": history, "tools": [ADD]},
    "/responses": lambda history: {
        "input": [item for one in history for item in one.get("items", [one])],
        "tools": [{"type": "function", "name": "add", "parameters": {}}],
        "include": [],
    },
    "/messages": lambda history: {
        "messages": history,
        "tools": [{"name": "add", "input_schema": {}}],
        "max_tokens": 50,
    },
}


def with_result(path: str, reply: Json) -> list[Json]:
    """A reply and the result of its call, as clients of each protocol send them back."""
    match path:
        case "/chat/completions":
            message = reply["choices"][0]["message"]
            call_id = message["tool_calls"][0]["id"]
            return [message, {"role": "tool", "tool_call_id": call_id, "content": "5"}]
        case "/responses":
            calls = [item for item in reply["output"] if item["type"] == "function_call"]
            result = {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "5"}
            return [{"items": reply["output"]}, result]
        case _:
            (use,) = (part for part in reply["content"] if part["type"] == "tool_use")
            result = {"type": "tool_result", "tool_use_id": use["id"], "content": "5"}
            return [
                {"role": "assistant", "content": reply["content"]},
                {"role": "user", "content": [result]},
            ]


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("name", ["SMOLLM2", "QWEN_THINKING", "MISTRAL"])
@virtually
async def test_a_prompt_starts_with_what_was_sampled_in_every_dialect(name: str, path: str) -> None:
    async with lab(name, Random(1), CALLS.get(name, CALL), "Five") as one:
        history: list[Json] = [HI]
        for _ in range(2):
            reply = await one.agent.post(path, DIALECTS[path](history))
            assert reply.status_code == 200, reply.text
            if len(history) == 1:
                history += with_result(path, reply.json())
        before, after = one.model.asked.values()
        (first, _) = one.conversation.tree.turns
        start = before + first.tokens
        assert after[: len(start)] == start
        assert not one.conversation.tree.forks
        await one.end()


# --- what models and tools do ---------------------------------------------------------------------


@pytest.mark.parametrize("cut", [4, 20, len(CALL) - 1])
@virtually
async def test_an_answer_that_was_cut_off_inside_a_call_is_continued(cut: int) -> None:
    async with lab("SMOLLM2", Random(1), CALL[:cut], "Again.") as one:
        encoded = len(one.model.form.codec.encode(CALL[:cut]))
        first = await one.chat(HI, max_tokens=encoded)
        assert (first["content"], "tool_calls" in first) == (CALL[:cut], False)
        await one.chat(HI, first, {"role": "user", "content": "Go on."})
        one_turn, other = one.conversation.tree.turns
        assert (other.parent, one_turn.generated.finish_reason) == (0, "length")
        assert other.added[0] == one.model.form.end_tokens[0], "which was not sampled"
        (row,) = one.conversation.tree.rows()
        assert row.trained[0].tokens == encoded
        await one.end()


@pytest.mark.parametrize("bad", BAD_CALLS)
@virtually
async def test_a_call_that_is_none_reaches_the_agent_as_text_and_is_noted(bad: str) -> None:
    async with lab("SMOLLM2", Random(1), bad, "Sorry.") as one:
        first = await one.chat(HI)
        assert (first["content"], "tool_calls" in first) == (bad, False)
        await one.chat(HI, first, {"role": "user", "content": "That is no call."})
        (noted, _) = one.conversation.notes(Scores())
        assert noted.outcome == ("unknown" if "mul" in bad else "malformed")
        assert len(one.conversation.tree.rows()) == 1
        await one.end()


@pytest.mark.parametrize(
    ("characters", "why"),
    [
        (2_000, "context of 400 must have room for one more"),
        (2**20, "context of 400 tokens has room for 71,936 at most"),
    ],
)
@virtually
async def test_a_result_that_is_longer_than_the_room_is_refused_and_ends_the_sample(
    characters: int, why: str
) -> None:
    async with lab("SMOLLM2", Random(1), CALL, context_tokens=400) as one:
        first = await one.chat(HI)
        call_id = first["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": call_id, "content": "7 " * (characters // 2)}
        body = {"messages": [HI, first, result], "tools": [ADD]}
        reply = await one.agent.post("/chat/completions", body)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
        assert why in error["message"]
        assert one.conversation.end == "context"
        # An agent that shortens its history has room again.
        await one.chat({**HI, "content": "3 + 3?"}, max_tokens=1)
        assert one.conversation.end == "length"
        await one.end()


def huge_bodies(text: str) -> list[tuple[str, Json]]:
    """Bodies with much text at different places."""
    question = {"role": "user", "content": text}
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": text}}
    tool = {"type": "function", "function": {"name": "add", "description": text}}
    schema = {"name": "add", "parameters": {"properties": {text: {}}}}
    parts = [{"type": "text", "text": text[:1000]}] * (len(text) // 1000)
    return [
        ("/chat/completions", {"messages": [question]}),
        ("/chat/completions", {"messages": [{"role": "user", "content": parts}]}),
        ("/chat/completions", {"messages": [HI, {"role": "assistant", "tool_calls": [call]}]}),
        ("/chat/completions", {"messages": [HI, {"role": "assistant", "reasoning": text}]}),
        ("/chat/completions", {"messages": [HI], "tools": [tool]}),
        (
            "/chat/completions",
            {"messages": [HI], "tools": [{"type": "function", "function": schema}]},
        ),
        ("/responses", {"input": text}),
        ("/responses", {"input": "2 + 3?", "instructions": text}),
        ("/messages", {"messages": [question], "max_tokens": 5}),
        ("/messages", {"messages": [HI], "system": text, "max_tokens": 5}),
        ("/messages/count_tokens", {"messages": [question]}),
    ]


@virtually
async def test_text_that_cannot_fit_is_refused_before_template_and_tokenizer_read_it() -> None:
    async with lab("SMOLLM2", Random(1), context_tokens=400) as one:
        await one.chat(HI)
        form = one.conversation.tree._form

        def read(*_: object, **__: object) -> Any:
            raise AssertionError("it was read")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(form, "text", read)
            patch.setattr(form, "encode", read)
            for path, body in huge_bodies("x" * 2**20):
                reply = await one.agent.post(path, body)
                assert reply.status_code == 400, (path, reply.text)
                assert "room for 71,936 at most" in reply.text
            for body in (
                {"messages": [HI] * 20_000},
                {"messages": [HI], "tools": [ADD] * 20_000},
                {"messages": [{"role": "user", "content": [{"type": "text"}] * 20_000}]},
                {"messages": [HI], "stop": ["a"] * 20_000},
            ):
                reply = await one.agent.post("/chat/completions", body)
                assert reply.status_code == 400, reply.text
                assert "20,000 entries, of 16,384 at most" in reply.text
            part = {"type": "text", "text": "x"}
            for path, body in (
                ("/responses", {"input": [HI] * 20_000}),
                ("/messages", {"messages": [{"role": "user", "content": [part] * 20_000}]}),
                ("/messages", {"messages": [{"role": "assistant", "content": [part] * 20_000}]}),
            ):
                reply = await one.agent.post(path, {**body, "max_tokens": 1})
                assert "20,000 entries, of 16,384 at most" in reply.text
            for path, body in huge_bodies("x" * 2**23):
                assert (await one.agent.post(path, body)).status_code == 413, path
        assert one.session.body_bytes == 0
        await one.chat({**HI, "content": "3 + 3?"}, max_tokens=1)
        await one.end()


def test_long_text_is_encoded_outside_of_the_event_loop_to_the_same_tokens() -> None:
    long = {"role": "user", "content": "2 + 3 = 5, and so on. " * 1000}

    async def scenario() -> None:
        async with lab("SMOLLM2", Random(1), *["ok"] * 9) as one:
            one.model.longest_s = 0
            form, threads = one.conversation.tree._form, set()
            encode = form.encode

            def noted(text: str) -> tuple[int, ...]:
                threads.add(threading.current_thread().name)
                return encode(text)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(form, "encode", noted)
                first = await one.chat(long)
                # Several at once: each continues what was there when it began.
                again = [one.chat(long, first, {**HI, "content": str(i)}) for i in range(4)]
                await asyncio.gather(*again, one.chat(long), one.chat(HI))
                counted = await one.agent.post("/messages/count_tokens", {"messages": [long]})
            assert {name.partition("_")[0] for name in threads} == {"draft", "MainThread"}
            prompts = [one.conversation.tree.prompt_of(n) for n in range(7)]
            asked = [Message(role="user", content=long["content"])]
            tool = Tool(name="add", description="Add two numbers.")
            assert prompts[0] == encode(form.text(asked, [tool], now=NOW))
            assert counted.json()["input_tokens"] == len(encode(form.text(asked, now=NOW)))
            await one.end()

    asyncio.run(scenario())


@virtually
async def test_what_a_session_keeps_and_sends_at_once_is_limited() -> None:
    async with lab("SMOLLM2", Random(1), context_tokens=4000) as one:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(conversation, "MOST_STORED_CHARACTERS", 25_000)
            replies = [await one.agent.chat("x" * 10_000 + str(i), max_tokens=1) for i in range(4)]
        assert [each.status_code for each in replies] == [200, 200, 400, 400]
        assert "start another session" in replies[-1].text
        one.session.body_bytes = one.service.limits.session_body_bytes - 100
        refused = await one.agent.chat("x" * 200)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        one.session.body_bytes = 0
        assert (await one.agent.chat("x")).status_code == 200
        await one.end()


@virtually
async def test_a_run_says_that_it_ignores_a_seed() -> None:
    async with lab("SMOLLM2", Random(1)) as one:
        for path, body in (
            ("/chat/completions", {"messages": [HI]}),
            ("/responses", {"input": "?"}),
        ):
            seeded = await one.agent.post(path, {**body, "seed": 5})
            assert "seed is ignored" in seeded.headers["x-areal-lab-note"]
            plain = await one.agent.post(path, body)
            assert "x-areal-lab-note" not in plain.headers
        await one.end()


@virtually
async def test_turns_have_the_tokens_that_are_left() -> None:
    long = " word" * 300
    context = len(chat_format("SMOLLM2").codec.encode(long))
    options = {"sampling": SamplingParams(max_new_tokens=200), "context_tokens": context}
    async with lab("SMOLLM2", Random(1), *[long] * 3, **options) as one:
        first = await one.chat(HI, tools=[], max_tokens=5)
        second = await one.chat(HI, first, HI, tools=[], max_tokens=10_000)
        assert [each.max_new_tokens for each in one.model.asked_with] == [5, 200]
        assert one.conversation.end == "length"
        await one.chat(HI, first, HI, second, HI, tools=[])
        last = one.conversation.tree.turns[-1]
        assert last.prompt_tokens + len(last.tokens) == context
        assert one.conversation.end == "context"
        await one.end()


@virtually
async def test_weights_change_between_two_calls_and_in_the_middle_of_one() -> None:
    async with lab("SMOLLM2", Random(3), *["one two three four five"] * 8) as one:
        history: list[Json] = [HI]
        for number in range(8):
            one.model.version += number == 4
            history += [await one.chat(*history), HI]
        turns = [turn.generated.segments for turn in one.conversation.tree.turns]
        assert any(len(segments) > 1 for segments in turns), "in the middle of a call"
        assert turns[3][-1].version < turns[4][0].version
        (row,) = one.conversation.tree.rows()
        segments = [part for part in row.parts if isinstance(part, Segment)]
        assert segments == [segment for turn in turns for segment in turn]
        await one.end()

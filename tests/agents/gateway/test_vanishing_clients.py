"""Clients that read slowly or not at all, send slowly, or go away at any time, on real sockets.

Whatever they do, everyone else is answered, nothing of them is left, and what was sampled for them
is trained.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from areal_lab.agents.gateway.service import Exchange
from areal_lab.engines.protocol import SamplingParams
from tests.agents.gateway.scripted import Agent, Lab, chat_of, sse
from tests.agents.gateway.sockets import (
    SMALL_BUFFER_BYTES,
    connect,
    raw_call,
    raw_request,
    really,
    served,
    until,
)
from tests.agents.scripted_model import Sampled, ScriptedModel
from tests.agents.templates import chat_format

FORM = chat_format("SMOLLM2")
LINE = "=" * 64
LONG = LINE * 4000
"""A quarter of a megabyte in few tokens: more than is buffered on the way to a client."""
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(autouse=True)
def _no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What clients do is no error of the server."""
    yield
    assert not [each for each in caplog.get_records("call") if each.levelname == "ERROR"]


@dataclass
class Room:
    """A gateway whose sessions say `LONG` to "long", and wait for `gate` to say it to "wait"."""

    lab: Lab
    gate: asyncio.Event
    models: list[ScriptedModel]

    async def others_are_answered(self) -> None:
        """A new session is, and so is every client of it."""
        agent = await self.lab.start("other")
        replies = await asyncio.gather(agent.chat("hi"), agent.chat("you", stream=True))
        assert replies[0].json()["choices"][0]["message"]["content"] == "Hello."
        assert chat_of(sse(replies[1].content))["choices"][0]["message"]["content"] == "Hello."

    async def exchange(self, agent: Agent) -> Exchange:
        """The first call of a session, once it is there."""
        calls = self.lab.service._exchanges
        session = self.lab.service.session_by_id(agent.session_id)
        await until(lambda: bool(calls.get(session)))
        return calls[session][0]

    async def nobody_reads(self, agent: Agent) -> None:
        """Wait until the client of a session's first call has gone."""
        exchange = await self.exchange(agent)
        await until(lambda: not exchange.clients)

    async def check(self, agent: Agent, *, undelivered: int) -> None:
        """What was sampled is exported, and nothing else is left."""
        await agent.post("/rl/end_session")
        session = self.lab.service.session_by_id(agent.session_id)
        exported = await self.lab.export(agent, style="concat")
        number = self.lab.conversations.index(session.conversation)
        self.models[number].check(session.conversation, exported["rows"])
        delivered = [each["delivered"] for each in exported["interactions"].values()]
        assert delivered.count(False) == undelivered
        assert self.lab.service.in_flight == 0
        # The server has one of these for each request that it serves.
        await until(lambda: not [each for each in asyncio.all_tasks() if "run_asgi" in repr(each)])


@asynccontextmanager
async def room(**limits: Any) -> AsyncIterator[Room]:
    models: list[ScriptedModel] = []
    gate = asyncio.Event()

    async def sample(prompt: tuple[int, ...], _sampling: SamplingParams) -> Sampled:
        asked = FORM.codec.decode(prompt).split("\n")[-3]
        if asked == "wait":
            await gate.wait()
        long = FORM.codec.encode(LINE) * (len(LONG) // len(LINE))
        tokens = long if asked in ("wait", "long") else FORM.codec.encode("Hello.")
        return Sampled((*tokens, *FORM.end_tokens), "stop")

    def opened() -> Any:
        params = SamplingParams(max_new_tokens=100_000)
        models.append(ScriptedModel(sample, sampling=params, context_tokens=200_000))
        return models[-1].conversation(FORM)

    async with served(opened, send_buffer_bytes=SMALL_BUFFER_BYTES, **limits) as lab:
        yield Room(lab, gate, models)


async def head(reader: asyncio.StreamReader) -> bytes:
    """The head of a reply, a byte at a time."""
    found = b""
    while not found.endswith(b"\r\n\r\n"):
        found += await reader.readexactly(1)
    return found


async def body(reader: asyncio.StreamReader, first: bytes) -> bytes:
    """The rest of a reply, whose head is there."""
    _, _, length = first.lower().partition(b"content-length: ")
    if length:
        return await reader.readexactly(int(length.split(b"\r\n")[0]))
    found = b""
    while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
        found += (await reader.readexactly(size + 2))[:-2]
    return found


@STREAMS
@really
async def test_a_client_that_reads_a_byte_at_a_time_gets_all_and_holds_nobody_up(
    stream: bool,
) -> None:
    async with room(session_requests=2) as here:
        agent = await here.lab.start()
        reader, writer = await raw_call(here.lab, agent, "long", stream=stream)
        first = await head(reader)
        exchange = await here.exchange(agent)
        for _ in range(5):
            await here.others_are_answered()
            assert await reader.readexactly(1)
        # So is its own session: the call counts as done.
        replies = await asyncio.gather(agent.chat("hi"), agent.chat("you"))
        assert [each.status_code for each in replies] == [200, 200]
        assert (exchange.clients, exchange.delivered) == (1, False)
        writer.close()
        await until(lambda: not exchange.clients)
        reader, writer = await raw_call(here.lab, agent, "long", stream=stream)
        first = await head(reader)
        raw = await body(reader, first)
        whole = chat_of(sse(raw)) if stream else json.loads(raw)
        assert whole["choices"][0]["message"]["content"] == LONG
        await until(lambda: exchange.delivered)
        writer.close()
        await here.check(agent, undelivered=0)


GONE: dict[str, Callable[[bytes], bytes]] = {
    "connected": lambda _: b"",
    "in its request's first line": lambda raw: raw[:9],
    "in its headers": lambda raw: raw[: raw.index(b"Authorization") + 15],
    "before its body": lambda raw: raw[: raw.index(b"\r\n\r\n") + 4],
    "in its body": lambda raw: raw[:-5],
}


@pytest.mark.parametrize("when", GONE)
@really
async def test_a_client_that_goes_before_it_has_asked_asks_nothing(when: str) -> None:
    async with room() as here:
        agent = await here.lab.start()
        stays, goes = await connect(here.lab), await connect(here.lab)
        for _, writer in (stays, goes):
            writer.write(GONE[when](raw_request(agent, "long")))
            await writer.drain()
        # One of them says no more, and one is gone.
        await here.others_are_answered()
        goes[1].transport.abort()
        await here.others_are_answered()
        assert (await agent.chat("hi")).status_code == 200
        stays[1].transport.abort()
        await here.check(agent, undelivered=0)
        assert len(here.models[0].answers) == 1


@STREAMS
@really
async def test_a_client_that_goes_while_it_waits_leaves_its_answer_for_the_next_attempt(
    stream: bool,
) -> None:
    async with room(keep_alive_s=0.01) as here:
        agent = await here.lab.start()
        reader, writer = await raw_call(here.lab, agent, "wait", stream=stream)
        exchange = await here.exchange(agent)
        if stream:
            assert b"text/event-stream" in await head(reader)
            assert b": waiting\n" in await reader.readuntil(b"waiting\n")
        writer.transport.abort()
        await until(lambda: not exchange.clients)
        await here.others_are_answered()
        here.gate.set()
        reply = await agent.chat("wait", stream=stream)
        found = chat_of(sse(reply.content)) if stream else reply.json()
        assert found["choices"][0]["message"]["content"] == LONG
        assert len(here.models[0].answers) == 1
        await here.check(agent, undelivered=0)


@STREAMS
@really
async def test_a_client_that_goes_in_the_middle_of_its_reply_can_have_it_again(
    stream: bool,
) -> None:
    async with room() as here:
        agent = await here.lab.start()
        for _ in range(3):
            reader, writer = await raw_call(here.lab, agent, "long", stream=stream)
            await head(reader)
            await reader.readexactly(2000)
            writer.transport.abort()
            await here.nobody_reads(agent)
            await here.others_are_answered()
        assert len(here.models[0].answers) == 1
        await here.check(agent, undelivered=1)


@really
async def test_many_clients_of_one_session_go_at_once_at_any_time() -> None:
    async with room(keep_alive_s=0.01) as here:
        agent = await here.lab.start()
        raw = raw_request(agent, "wait", stream=True)
        gone = [await connect(here.lab) for _ in range(40)]
        for number, (_, writer) in enumerate(gone):
            writer.write(raw[: len(raw) * number // 39])
            await writer.drain()
        staying = [asyncio.create_task(agent.chat("wait", seed=seed)) for seed in range(5)]
        await until(lambda: here.lab.service.in_flight == 6)
        for _, writer in gone[::2]:
            writer.transport.abort()
        await here.others_are_answered()
        here.gate.set()
        for reply in await asyncio.gather(*staying):
            assert reply.json()["choices"][0]["message"]["content"] == LONG
        for _, writer in gone:
            writer.transport.abort()
        assert len(here.models[0].answers) == 6
        await here.check(agent, undelivered=1)


@really
async def test_a_client_that_sends_a_byte_at_a_time_is_served() -> None:
    async with room() as here:
        agent = await here.lab.start()
        reader, writer = await connect(here.lab)
        for byte in raw_request(agent, "hi"):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        first = await head(reader)
        found = json.loads(await body(reader, first))
        assert found["choices"][0]["message"]["content"] == "Hello."
        writer.close()
        await here.check(agent, undelivered=0)


@really
async def test_the_end_of_serving_waits_for_no_client(caplog: pytest.LogCaptureFixture) -> None:
    """One reads nothing, one is in its request, one waits for an answer."""
    async with room() as here:
        agent = await here.lab.start()
        stalled = await raw_call(here.lab, agent, "long", stream=True)
        await head(stalled[0])
        asking = await connect(here.lab)
        asking[1].write(raw_request(agent, "hi")[:-5])
        waiting = await raw_call(here.lab, agent, "wait")
        await until(lambda: here.lab.service.in_flight == 1)
    assert b" 503 " in await waiting[0].readline()
    for _, writer in (stalled, asking, waiting):
        writer.close()
    caplog.clear()  # the server says that it has given up the first one

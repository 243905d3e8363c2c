"""The gateway on a real socket: clients that hang up, do not read, send too much, or are many."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.agents.gateway.server import base_url, bind, serve
from areal_lab.agents.gateway.service import Exchange, Service, sent_again
from areal_lab.agents.gateway.sessions import Limits, Session
from areal_lab.agents.gateway.stream import PIECE_TOKENS, chunks, content_pieces, event, text_pieces
from areal_lab.agents.messages import Message
from tests.agents.gateway.scripted import ADMIN, MODEL, Agent, Lab, Scripted, made, says, virtually
from tests.agents.gateway.sockets import raw_call, raw_request, really, served, until
from tests.fuzz import damaged_bytes, mutations


def session_of(lab: Lab, agent: Agent) -> Session:
    return lab.service.session_by_id(agent.session_id)


@really
async def test_a_client_that_hangs_up_while_it_waits_gets_the_same_reply_later() -> None:
    gate = asyncio.Event()
    async with served(lambda: Scripted(gate=gate)) as lab:
        agent = await lab.start()
        _, writer = await raw_call(lab, agent)
        await until(lambda: bool(lab.conversations[0].requests))
        (exchange,) = lab.service._exchanges[session_of(lab, agent)]
        writer.close()
        await until(lambda: exchange.clients == 0)
        gate.set()
        await until(lambda: exchange.done_s is not None)
        assert not exchange.delivered
        reply = await agent.chat()
        assert reply.json()["choices"][0]["message"]["content"] == "reply 0"
        assert exchange.delivered
        assert len(lab.conversations[0].requests) == 1


LARGE = "x" * 12_000_000
"""More than the kernel takes off us for a client that does not read."""


@really
async def test_slow_readers_hold_nobody_up_and_hang_up_undelivered() -> None:
    contents = [LARGE, LARGE[:2_000_000], "small"]  # events are eight times as long as their text

    def script(_request: Any, number: int) -> Any:
        return says(contents[number], texts=["x"], request_id=f"r{number}")

    async with served(lambda: Scripted(delay_s=0, script=script), session_requests=1) as lab:
        agent = await lab.start()
        connections = []
        for stream in (False, True):
            connections.append(await raw_call(lab, agent, stream=stream))
            await until(lambda: len(lab.conversations[0].requests) == len(connections))
            await until(lambda: lab.service.in_flight == 0)
        for reader, _ in connections:
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        reply = await agent.chat()
        assert reply.json()["choices"][0]["message"]["content"] == "small"
        exchanges = lab.service._exchanges[session_of(lab, agent)]
        assert [(each.clients, each.delivered) for each in exchanges] == [
            (1, False),
            (1, False),
            (0, True),
        ]
        for _, writer in connections:
            writer.transport.abort()
        await until(lambda: not any(each.clients for each in exchanges))
        assert [each.delivered for each in exchanges] == [False, False, True]


@really
async def test_a_body_that_is_too_large_is_refused_readably() -> None:
    async with served(lambda: Scripted(delay_s=0), body_bytes=100_000) as lab:
        agent = await lab.start()
        # The client still writes when it is refused.
        reader, writer = await raw_call(lab, agent, "x" * 20_000_000)
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        assert b"request_too_large" in await reader.readuntil(b"}}")
        writer.close()
        assert (await agent.chat("x" * 50_000)).status_code == 200


@mutations
def test_no_bytes_stop_a_gateway(count: int) -> None:
    rng = random.Random(0)

    async def scenario() -> None:
        async with served(lambda: Scripted(delay_s=0), session_requests=10**6) as lab:
            agent = await lab.start()
            valid = [
                raw_request(agent, "hello", temperature=0.5, stop=["a"], seed=3, n=2),
                raw_request(agent, "hello", stream=True) + raw_request(agent, "again"),
            ]
            for _ in range(count):
                content = damaged_bytes(rng, rng.choice(valid))
                reader, writer = await asyncio.open_connection("127.0.0.1", lab.http.base_url.port)
                writer.write(content)
                writer.write_eof()
                with suppress(ConnectionError):
                    reply = await reader.read()
                    assert not reply or reply.startswith(b"HTTP/1.1 "), content
                    assert not reply.startswith(b"HTTP/1.1 5"), (content, reply)
                writer.close()
            assert (await agent.chat("hello")).status_code == 200
            assert session_of(lab, agent).body_bytes == 0
            await until(lambda: lab.service.in_flight == 0)

    asyncio.run(scenario())


@really
async def test_an_export_for_a_client_that_has_hung_up_is_not_made() -> None:
    async with served(lambda: Scripted(delay_s=0)) as lab:
        agent = await lab.start()
        await agent.chat()
        waiters = session_of(lab, agent).changed._waiters  # type: ignore[attr-defined]
        exporting = asyncio.create_task(lab.export(agent))
        await until(lambda: bool(waiters))
        exporting.cancel()
        await until(lambda: not waiters)
        await agent.post("/rl/set_reward", {"reward": 1})
        await agent.post("/rl/end_session")
        assert (await lab.export(agent))["reward"] == 1.0
        assert len(lab.conversations[0].scores) == 1


@really
async def test_many_agents_at_once_are_all_answered() -> None:
    async with served(lambda: Scripted(delay_s=0.5)) as lab:
        agents = [await lab.start() for _ in range(100)]
        replies = await asyncio.gather(
            *[each.chat(stream=i % 2 == 1) for i, each in enumerate(agents)]
        )
        assert [each.status_code for each in replies] == [200] * 100
        assert lab.service.statistics()["requests_in_flight"] == 0


@really
async def test_the_end_of_serving_answers_calls_and_frees_the_port() -> None:
    service = Service(lambda _: Scripted(delay_s=60), admin_key=ADMIN, model=MODEL)
    listener = bind()
    url, port = base_url(listener), listener.getsockname()[1]
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    serving = asyncio.create_task(serve(service, listener))
    async with httpx2.AsyncClient(base_url=url, trust_env=False) as http:
        session, key = service.start_session("task")
        calling = asyncio.create_task(Agent(http, session.session_id, key).chat())
        await until(lambda: service.in_flight == 1)
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
        serving.cancel()
        reply = await calling
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "closing"
    await asyncio.wait([serving])
    assert serving.cancelled()
    bind(port).close()


def test_a_port_that_is_in_use_is_named() -> None:
    with bind() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is not available for the gateway"):
            bind(port)
    with pytest.raises(ValueError, match="port 70000 is not available"):
        bind(70_000)


def test_replies_wait_for_no_acknowledgments() -> None:
    """asyncio sets TCP_NODELAY on connections of a socket that says so, and on no others."""
    with bind() as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP


@virtually
async def test_sessions_are_swept_while_it_serves() -> None:
    """The sweep alone, in virtual time; the rest of `serve` needs real sockets."""
    from areal_lab.agents.gateway.server import _sweep

    loop = asyncio.get_running_loop()
    service = Service(
        lambda _: Scripted(),
        admin_key=ADMIN,
        model=MODEL,
        limits=Limits(session_timeout_s=60),
        clock=loop.time,
    )
    session, _ = service.start_session("task")
    sweeping = asyncio.create_task(_sweep(service))
    await asyncio.sleep(66)
    assert session.ended_by == "timeout"
    sweeping.cancel()


def exchange(digest: bytes = b"a", **fields: Any) -> Exchange:
    session = Session(
        session_id="s", task_id="t", conversation=Scripted(), key_digest=b"", used_s=0.0
    )
    return Exchange(session=session, digest=digest, **fields)


def test_an_equal_body_alone_is_another_sample() -> None:
    assert sent_again([exchange()], b"a", retries=0) is None
    assert sent_again([exchange(clients=0, delivered=True, done_s=1)], b"a", retries=0) is None


def test_a_client_that_says_so_sends_it_again() -> None:
    first, second = exchange(), exchange(clients=0, delivered=True, done_s=1)
    assert sent_again([first, second], b"a", retries=1) is second
    assert sent_again([first, second], b"b", retries=1) is None


def test_an_answer_that_nobody_has_goes_to_the_next_equal_body() -> None:
    lost = exchange(clients=0)
    assert sent_again([lost], b"a", retries=0) is lost
    assert sent_again([lost], b"b", retries=0) is None
    assert sent_again([exchange(clients=0, done_s=1)], b"a", retries=0) is not None


def test_two_lost_answers_go_to_two_clients() -> None:
    known = [exchange(clients=0), exchange(clients=0)]
    for expected in known:
        found = sent_again(known, b"a", retries=1)
        assert found is expected
        found.clients += 1


EXCHANGES = st.builds(
    exchange,
    digest=st.sampled_from([b"a", b"b"]),
    clients=st.integers(0, 2),
    delivered=st.booleans(),
    done_s=st.none() | st.just(1.0),
)


@given(st.lists(EXCHANGES, max_size=5), st.integers(0, 2))
def test_only_an_equal_body_finds_something(known: list[Exchange], retries: int) -> None:
    found = sent_again(known, b"a", retries=retries)
    lost = [each for each in known if each.digest == b"a" and not each.clients | each.delivered]
    if found is not None:
        assert found.digest == b"a"
    if lost:
        assert found is lost[0]
    elif retries:
        assert (found is None) == all(each.digest != b"a" for each in known)
    else:
        assert found is None


TEXTS = st.lists(st.sampled_from(["", "", "a", "of ", "\U0001f600", "\n\n", "\xe9", "word "]))


@given(TEXTS)
def test_pieces_follow_the_tokens_if_these_are_the_content(texts: list[str]) -> None:
    reply = says("".join(texts), texts=texts)
    pieces = content_pieces(reply)
    assert "".join(text for text, _ in pieces) == reply.message.content
    assert tuple(token for _, tokens in pieces for token in tokens) == reply.shown
    for text, tokens in pieces:
        assert text == "".join(each for each, _ in tokens)
        assert text or len(pieces) == 1
    for _, tokens in pieces[:-1]:
        assert len(tokens) >= PIECE_TOKENS


@given(st.text(min_size=1), TEXTS)
def test_other_content_is_cut_by_length_and_keeps_its_tokens(
    content: str, texts: list[str]
) -> None:
    reply = made(Message(role="assistant", content=content), texts=[*texts, "<tool_call>"])
    pieces = content_pieces(reply)
    assert "".join(text for text, _ in pieces) == content
    assert tuple(token for _, tokens in pieces for token in tokens) == reply.shown


def test_a_piece_waits_for_the_end_of_a_character() -> None:
    """Three tokens of an emoji: the text comes with the last of them."""
    texts = [*["x"] * (PIECE_TOKENS - 1), "", "", "\U0001f600", "y"]
    pieces = content_pieces(says("".join(texts), texts=texts))
    assert [text for text, _ in pieces] == ["x" * (PIECE_TOKENS - 1), "\U0001f600y"]
    inside = ["", *["x"] * PIECE_TOKENS]
    assert len(content_pieces(says("".join(inside), texts=inside))) == 2
    leading = [*[""] * PIECE_TOKENS, "\U0001f600"]
    assert len(content_pieces(says("".join(leading), texts=leading))) == 1


def test_nothing_has_no_pieces() -> None:
    assert content_pieces(says("")) == []
    assert list(text_pieces("")) == []


@given(st.text())
def test_events_are_ascii_and_one_line(text: str) -> None:
    line = event({"text": text}, "kind")
    assert line.isascii()
    assert line.count(b"\n") == 3
    assert len(line.decode().splitlines()) == 3


@given(st.lists(st.binary(min_size=1, max_size=9)), st.integers(1, 20))
def test_chunks_are_all_events_in_order(events: list[bytes], most_bytes: int) -> None:
    joined = list(chunks(iter(events), most_bytes=most_bytes))
    assert b"".join(joined) == b"".join(events)
    assert all(len(each) < most_bytes + 9 for each in joined)

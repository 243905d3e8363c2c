"""A sample arrives piece by piece: the same tokens, log-probs and versions, however it is cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.control.events import Version
from areal_lab.data.stop_strings import StopScanner
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import FinishReason, Segment
from areal_lab.engines.client.dialect import Chunk, Span
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.client.resubmit import remaining_requests
from areal_lab.engines.client.stream import SampleStream
from areal_lab.engines.client.vllm import VLLM
from areal_lab.engines.protocol import EngineError, EngineUnreachable, Generated, PauseMode
from tests.data.byte_tokenizer import byte_tokenizer, save_byte_tokenizer
from tests.engines.tiny import request

URL = "http://engine:1"


def chunk(first: int, end: int, *, total: bool = True, version: Version | None = None) -> Chunk:
    """Tokens `first` .. `end - 1`, each its own index."""
    return Chunk(
        tokens=tuple(range(first, end)),
        logprobs=tuple(-float(token) for token in range(first, end)),
        total=end if total else None,
        version=version,
    )


def segments(stream: SampleStream) -> list[tuple[int, int, Version]]:
    return [
        (part.tokens[0], part.tokens[-1] + 1, part.version) for part in stream.generated().segments
    ]


@given(st.lists(st.integers(1, 5), min_size=1), st.sampled_from(["sum", "new", "told"]))
def test_every_way_of_cutting_gives_the_same(steps: list[int], kind: str) -> None:
    stream, end = SampleStream("a"), 0
    for step in steps:
        first = 0 if kind == "sum" else end
        end += step
        stream.add(chunk(first, end, total=kind != "new", version=3), held=9)
    (segment,) = stream.generated().segments
    assert segment.tokens == tuple(range(end))
    assert segment.logprobs == tuple(-float(token) for token in range(end))
    assert segment.version == 3


def test_from_a_message_of_another_version_on_nothing_is_sure() -> None:
    """Some of its tokens may have been generated before the change."""
    stream = SampleStream("a")
    stream.add(chunk(0, 1, version=3), held=9)
    stream.add(chunk(1, 5, version=3), held=9)
    assert segments(stream) == [(0, 5, 3)]
    stream.add(chunk(5, 9, version=4), held=9)
    stream.add(chunk(9, 12, version=4), held=9)
    assert segments(stream) == [(0, 5, 3)]
    assert len(stream) == 12


def test_without_a_version_it_is_the_one_the_engine_last_reported() -> None:
    stream = SampleStream("a")
    stream.add(chunk(0, 4), held=3)
    stream.add(chunk(4, 4), held=4)
    assert segments(stream) == [(0, 4, 3)]
    stream.add(chunk(4, 6), held=4)
    assert segments(stream) == [(0, 4, 3)]


@pytest.mark.parametrize("told", [4, None])
def test_a_first_message_after_a_change_may_be_from_before_it(told: Version | None) -> None:
    stream = SampleStream("a", sent_to=3)
    stream.add(chunk(0, 4, version=told), held=4)
    assert (segments(stream), len(stream)) == ([], 4)
    same = SampleStream("a", sent_to=4)
    same.add(chunk(0, 4, version=told), held=4)
    assert segments(same) == [(0, 4, 4)]


def test_the_spans_of_the_last_message_replace_what_was_stamped() -> None:
    stream = SampleStream("a")
    stream.add(chunk(0, 4, version=3), held=9)
    stream.add(chunk(4, 6, version=4), held=9)
    assert segments(stream) == [(0, 4, 3)]
    last = Chunk(
        tokens=(6,),
        logprobs=(-6.0,),
        total=7,
        spans=(Span(3, 0, 4), Span(4, 4, 7)),
        finish_reason="stop",
        retractions=1,
    )
    stream.add(last, held=9)
    assert segments(stream) == [(0, 4, 3), (4, 7, 4)]
    assert (stream.generated().finish_reason, stream.generated().retractions) == ("stop", 1)


def test_an_unfinished_sample_ends_with_abort() -> None:
    stream = SampleStream("a")
    assert stream.generated() == Generated(
        request_id="a", segments=(), finish_reason="abort", retractions=0, cached_tokens=0
    )
    stream.add(chunk(0, 2), held=3)
    assert stream.generated().finish_reason == "abort"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (chunk(3, 5), "continues at token 3, but 2 were received"),
        (Chunk(tokens=(7, 8, 9), logprobs=(-1.0,) * 3, total=3), "changed tokens"),
        (Chunk(tokens=(2, 3), logprobs=(-1.0,)), "2 tokens, but log-probs of 1"),
        (Chunk(tokens=(2,), logprobs=(-1.0,), spans=(Span(3, 0, 2),)), "its version spans"),
    ],
)
def test_contradictions_are_errors(message: Chunk, error: str) -> None:
    stream = SampleStream("a")
    stream.add(chunk(0, 2), held=3)
    with pytest.raises(EngineError, match=f"request a .*{error}"):
        stream.add(message, held=3)


# --- stop strings ---

LETTERS = TextCodec(byte_tokenizer())
"""Token n is a character of its own: 0 is "!", 1 is a double quote, and so on."""


def stopping(*stops: str, before: tuple[int, ...] = ()) -> SampleStream:
    return SampleStream("a", stops=StopScanner(LETTERS, stops, before))


@given(st.lists(st.integers(1, 5), min_size=1), st.integers(0, 9), st.booleans())
def test_a_stop_string_ends_a_sample_however_it_is_cut(
    steps: list[int], first: int, total: bool
) -> None:
    stop = LETTERS.decode_all((first, first + 1))
    stream, end = stopping(stop), 0
    for step in steps:
        end += step
        stream.add(chunk(end - step, end, total=total, version=3), held=9)
    stopped = end >= first + 2
    kept = first + 2 if stopped else end
    assert (len(stream), stream.stopped) == (kept, stopped)
    assert segments(stream) == [(0, kept, 3)]
    assert stream.generated().finish_reason == ("stop" if stopped else "abort")


def test_the_reason_is_the_stop_string_whatever_the_server_says() -> None:
    stream = stopping("%&")  # tokens 4 and 5
    spans = (Span(3, 0, 5), Span(4, 5, 7))
    stream.add(Chunk(tokens=tuple(range(7)), logprobs=(-1.0,) * 7, spans=spans,
                     finish_reason="length"), held=9)  # fmt: skip
    assert segments(stream) == [(0, 5, 3), (5, 6, 4)]
    assert stream.generated().finish_reason == "stop"


def test_a_stop_string_may_begin_before_the_sample_was_sent_again() -> None:
    stream = stopping("%&", before=(4,))
    stream.add(chunk(5, 6, total=False, version=3), held=9)
    assert (stream.stopped, len(stream)) == (True, 1)


def test_a_stop_string_of_uncertain_version_is_not_kept() -> None:
    stream = stopping("%&")
    stream.add(chunk(0, 4, version=3), held=9)
    stream.add(chunk(4, 7, version=4), held=9)
    assert (segments(stream), len(stream)) == ([(0, 4, 3)], 6)
    assert stream.generated().finish_reason == "abort"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(3, 4)), min_size=1, max_size=8),
    st.sampled_from([None, "stop", "length", "abort"]),
)
def test_a_sample_that_has_ended_is_complete_whenever_its_engine_is_lost(
    messages: list[tuple[int, Version]], reason: FinishReason | None
) -> None:
    """Its slot has gone to another one, so it may not run again."""
    asked = request("a", [1], 99, stop=("%&",))
    stream, end, ended = stopping("%&"), 0, False
    for number, (count, version) in enumerate(messages, 1):
        last = number == len(messages)
        message = chunk(end, end + count, version=version)
        end += count
        stream.add(replace(message, finish_reason=reason if last else None), held=9)
        ended |= stream.ended
        if ended:
            assert remaining_requests([asked], {"a": stream.generated()}) == []
            assert stream.generated().segments
    if end >= 6 and len({version for _, version in messages}) == 1:
        assert ended


# --- the client: tokens received before the server is lost ---


def event(index: int, tokens: list[int], total: int, finish: str | None = None) -> bytes:
    message = {
        "index": index,
        "output_ids": tokens,
        "meta_info": {
            "completion_tokens": total,
            "finish_reason": None if finish is None else {"type": finish},
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
            "weight_version": "4",
        },
    }
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def failing(
    pieces: list[bytes], ending: Exception | None = None, *, timeout_s: float | None = None
) -> EngineUnreachable:
    """What `generate` of two samples raises when the stream goes like this; it stays open without
    an ending."""

    class Stream(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece
            if ending is not None:
                raise ending
            if timeout_s is not None:
                await asyncio.Event().wait()

    def handler(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=Stream())

    async def scenario() -> EngineUnreachable:
        client = EngineClient(
            URL, request_timeout_s=timeout_s, transport=httpx2.MockTransport(handler)
        )
        with pytest.raises(EngineUnreachable) as raised:
            await client.generate([request("a", [5], 9), request("b", [6], 9)])
        await client.close()
        return raised.value

    return asyncio.run(scenario())


def test_received_tokens_are_part_of_the_error() -> None:
    stream = event(0, [7, 8], 2) + event(1, [3], 1, "stop") + event(0, [9], 3)
    for pieces in ([stream], [stream[:30], stream[30:]], [bytes([one]) for one in stream]):
        error = failing(pieces, httpx2.ReadError("reset"))
        assert f"engine {URL} is unreachable" in str(error)
        assert error.partial["a"].segments == (Segment((7, 8, 9), (-1.0,) * 3, 4),)
        assert error.partial["a"].finish_reason == "abort"
        assert error.partial["b"].finish_reason == "stop"


def test_a_reply_that_ends_early_is_a_lost_engine() -> None:
    error = failing([event(0, [7], 1), b"data: [DONE]\n\n"])
    assert "ended early" in str(error)
    assert list(error.partial) == ["a"]


def test_a_malformed_message_is_an_engine_that_is_gone() -> None:
    error = failing([event(0, [7], 1), b'data: {"text": "half of a mess\n\n'])
    assert f"engine {URL} sent malformed JSON in reply to POST /generate" in str(error)
    assert "half of a mess" in str(error)
    assert list(error.partial) == ["a"]


def test_the_client_reports_the_end_of_a_sample_only_if_its_tokens_are_kept(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    reported: list[str] = []
    sent: list[str] = []

    class Stream(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield event(0, [4, 5], 2)  # "%&" stops all three
            yield event(1, [3], 1) + event(2, [3], 1, "length")
            yield event(1, [4, 5], 3).replace(b'"weight_version": "4"', b'"weight_version": "5"')
            raise httpx2.ReadError("reset")

    def handler(http: httpx2.Request) -> httpx2.Response:
        sent.append(http.url.path)
        if http.url.path != "/generate":
            return httpx2.Response(200, json={"skip_tokenizer_init": True})
        if sent.count("/generate") > 1:  # the rest of b, after the broken reply
            raise httpx2.ConnectError("gone")
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=headers, stream=Stream())

    async def scenario() -> EngineUnreachable:
        client = EngineClient(URL, transport=httpx2.MockTransport(handler))
        client.note_tokenizer(tmp_path)
        client.report_samples(reported.append)
        with pytest.raises(EngineUnreachable) as raised:
            await client.generate([request(name, [1], 9, stop=("%&",)) for name in "abc"])
        await client.close()
        return raised.value

    partial = asyncio.run(scenario()).partial
    assert {name: one.finish_reason for name, one in partial.items()} == {
        "a": "stop",
        "b": "abort",
        "c": "length",
    }
    assert set(reported) == {"a", "c"}


def test_tokens_of_an_unclear_version_are_discarded_and_counted() -> None:
    later = event(0, [9, 9], 4).replace(b'"weight_version": "4"', b'"weight_version": "5"')
    error = failing([event(0, [7, 8], 2), later], httpx2.ReadError("reset"))
    assert error.partial["a"].segments == (Segment((7, 8), (-1.0,) * 2, 4),)
    assert error.discarded_tokens == 2


@pytest.mark.parametrize("checks", [True, False])
def test_a_server_that_does_not_find_stop_strings_is_told_to_end_the_sample(
    tmp_path: Path, checks: bool
) -> None:
    """What it has sent after the string is left out; the other sample of the call continues."""
    save_byte_tokenizer(tmp_path)
    sent: list[tuple[str, Any]] = []

    async def scenario() -> list[Generated]:
        aborted = asyncio.Event()

        class Stream(httpx2.AsyncByteStream):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                yield event(0, [3, 4], 2)
                if checks:
                    yield event(0, [5], 3, "stop")
                else:
                    yield event(0, [5, 6], 4)
                    await aborted.wait()
                    yield event(0, [7], 5, "abort")
                yield event(1, [4, 4], 2, "length")

        def handler(http: httpx2.Request) -> httpx2.Response:
            sent.append((http.url.path, json.loads(http.content or b"{}")))
            match http.url.path:
                case "/generate":
                    headers = {"content-type": "text/event-stream"}
                    return httpx2.Response(200, headers=headers, stream=Stream())
                case "/abort_request":
                    aborted.set()
            return httpx2.Response(200, json={"skip_tokenizer_init": not checks})

        client = EngineClient(URL, transport=httpx2.MockTransport(handler))
        client.note_tokenizer(tmp_path)
        asked = [request(name, [1], 9, stop=("%&",)) for name in "ab"]
        async with asyncio.timeout(20):
            results = await client.generate(asked)
        await client.close()
        return results

    first, second = asyncio.run(scenario())
    assert [segment.tokens for segment in first.segments] == [(3, 4, 5)]
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert [path for path, _ in sent] == [
        "/server_info",
        "/generate",
        *([] if checks else ["/abort_request"]),
    ]
    body = sent[1][1]
    assert [one.get("stop") for one in body["sampling_params"]] == [["%&"] * checks or None] * 2
    if not checks:
        assert sent[2][1]["rid"] == body["rid"][0]


def test_many_requests_at_once_load_one_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workflow begins the turns of many samples at the same time, each with its own call."""
    save_byte_tokenizer(tmp_path)
    sent, loaded = list[str](), list[Path]()
    load = TextCodec.load

    def counted(folder: Path) -> TextCodec:
        loaded.append(folder)
        return load(folder)

    monkeypatch.setattr(TextCodec, "load", counted)

    async def scenario() -> list[list[Generated]]:
        class Stream(httpx2.AsyncByteStream):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                yield event(0, [3, 4], 2, "length")

        def handler(http: httpx2.Request) -> httpx2.Response:
            sent.append(http.url.path)
            if http.url.path == "/generate":
                headers = {"content-type": "text/event-stream"}
                return httpx2.Response(200, headers=headers, stream=Stream())
            return httpx2.Response(200, json={"skip_tokenizer_init": False})

        client = EngineClient(URL, transport=httpx2.MockTransport(handler))
        client.note_tokenizer(tmp_path)
        asked = [[request(name, [1], 2, stop=("%&",))] for name in "abcd"]
        results = await asyncio.gather(*map(client.generate, asked))
        await client.close()
        return results

    assert [len(one) for one in asyncio.run(scenario())] == [1] * 4
    assert (sent.count("/server_info"), sent.count("/generate"), len(loaded)) == (1, 4, 1)


def test_stop_strings_need_a_tokenizer() -> None:
    async def scenario() -> None:
        client = EngineClient(URL, transport=httpx2.MockTransport(lambda _: httpx2.Response(200)))
        with pytest.raises(EngineError, match=f"{URL} has stop strings, but its client knows no"):
            await client.generate([request("a", [1], stop=("ab",))])
        await client.close()

    asyncio.run(scenario())


def test_silence_is_an_engine_that_is_gone() -> None:
    error = failing([event(1, [7], 1)], timeout_s=0.05)
    assert "silent for 0.05 s" in str(error)
    assert list(error.partial) == ["b"]


def test_time_in_which_this_client_has_paused_the_engine_is_no_silence() -> None:
    """The pause lasts ten times as long as an engine may be silent."""

    async def scenario() -> list[Generated]:
        resumed = asyncio.Event()

        class Stream(httpx2.AsyncByteStream):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                yield event(0, [7], 1)
                await resumed.wait()
                yield event(0, [8], 2, "length")

        def handler(http: httpx2.Request) -> httpx2.Response:
            match http.url.path:
                case "/generate":
                    kind = {"content-type": "text/event-stream"}
                    return httpx2.Response(200, headers=kind, stream=Stream())
                case "/continue_generation":
                    resumed.set()
            return httpx2.Response(200, json={})

        client = EngineClient(URL, request_timeout_s=0.05, transport=httpx2.MockTransport(handler))
        await client.pause(PauseMode.RETRACT)
        answers = asyncio.ensure_future(client.generate([request("a", [5], 2)]))
        assert not (await asyncio.wait({answers}, timeout=0.5))[0]
        await client.resume()
        return await answers

    (result,) = asyncio.run(scenario())
    assert [segment.tokens for segment in result.segments] == [(7, 8)]


@pytest.mark.parametrize("gone", [False, True])
def test_an_abort_that_breaks_the_reply_costs_no_other_sample(gone: bool) -> None:
    """The aborted one keeps its tokens, the other is sent again, unless the server is gone."""
    sent: list[list[list[int]]] = []

    async def scenario() -> list[Generated]:
        arrived, aborted = asyncio.Event(), asyncio.Event()

        class Stream(httpx2.AsyncByteStream):
            async def __aiter__(self) -> AsyncIterator[bytes]:
                yield event(0, [7], 1) + event(1, [3], 1)
                arrived.set()
                await aborted.wait()
                raise httpx2.RemoteProtocolError("incomplete chunked read")

        def handler(http: httpx2.Request) -> httpx2.Response:
            if http.url.path == "/abort_request":
                aborted.set()
                return httpx2.Response(200)
            sent.append(json.loads(http.content)["input_ids"])
            if len(sent) > 1 and gone:
                raise httpx2.ConnectError("refused", request=http)
            kind = {"content-type": "text/event-stream"}
            rest = event(0, [8], 1, "length") + b"data: [DONE]\n\n"
            return httpx2.Response(
                200, headers=kind, stream=Stream() if len(sent) == 1 else httpx2.ByteStream(rest)
            )

        client = EngineClient(URL, transport=httpx2.MockTransport(handler))
        both = [request("a", [5], 9), request("b", [6], 2)]
        answers = asyncio.ensure_future(client.generate(both))
        await arrived.wait()
        while not client.received_tokens("b"):
            await asyncio.sleep(0)
        so_far = client.received(["a", "b", "c"])
        assert {name: one.segments[0].tokens for name, one in so_far.items()} == {
            "a": (7,),
            "b": (3,),
        }
        await client.abort(["a"])
        try:
            return await answers
        finally:
            await client.close()

    if gone:
        with pytest.raises(EngineUnreachable) as raised:
            asyncio.run(scenario())
        assert raised.value.partial.keys() == {"a", "b"}
    else:
        a, b = asyncio.run(scenario())
        assert ([s.tokens for s in a.segments], a.finish_reason) == ([(7,)], "abort")
        assert ([s.tokens for s in b.segments], b.finish_reason) == ([(3, 8)], "length")
    assert sent == [[[5], [6]], [[6, 3]]]


def test_samples_sent_one_by_one_fail_together() -> None:
    """vLLM takes one sample per request: the first that is lost ends the others, and what arrived
    of all is kept."""

    async def scenario() -> EngineUnreachable:
        both = asyncio.Barrier(2)

        class Stream(httpx2.AsyncByteStream):
            def __init__(self, name: str) -> None:
                self._name = name

            async def __aiter__(self) -> AsyncIterator[bytes]:
                content = [{"token_id": 7, "logprob": -1.0}]
                choice = {"token_ids": [7], "logprobs": {"content": content}}
                yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
                await both.wait()
                if self._name == "a":
                    raise httpx2.ReadError("reset")
                await asyncio.Event().wait()

        def handler(http: httpx2.Request) -> httpx2.Response:
            if http.url.path == "/weight_info":
                return httpx2.Response(200, json={"weight_version": "4"})
            name = json.loads(http.content)["request_id"].partition("#")[0]
            kind = {"content-type": "text/event-stream"}
            return httpx2.Response(200, headers=kind, stream=Stream(name))

        client = EngineClient(URL, api=VLLM, transport=httpx2.MockTransport(handler))
        with pytest.raises(EngineUnreachable) as raised:
            await client.generate([request("a", [5], 9), request("b", [6], 9)])
        await client.close()
        return raised.value

    error = asyncio.run(scenario())
    assert {name: one.segments[0].version for name, one in error.partial.items()} == {
        "a": 4,
        "b": 4,
    }

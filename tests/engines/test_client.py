"""The client believes what the server says, checks that it is consistent, and names the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from areal_lab.data.trajectory import Segment
from areal_lab.engines.client import (
    EngineClient,
    EngineError,
    EngineUnreachable,
    VersionMismatch,
    generate_body,
    parse_reply,
)
from areal_lab.engines.protocol import Generated, PauseMode, WeightsFolder
from areal_lab.engines.resubmit import continuation, merge
from tests.engines.tiny import request

T = TypeVar("T")
URL = "http://engine:1"


def reply(tokens: list[int], **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": "length", "length": len(tokens)},
            "output_token_logprobs": [[-token / 8, token, None] for token in tokens],
            "weight_version": "4",
            **meta,
        },
    }


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def answering(
    handler: Callable[[httpx.Request], httpx.Response],
    act: Callable[[EngineClient], Coroutine[Any, Any, T]],
) -> T:
    async def scenario() -> T:
        client = EngineClient(URL, transport=httpx.MockTransport(handler))
        try:
            return await act(client)
        finally:
            await client.close()

    return asyncio.run(scenario())


def test_segments_are_cut_where_the_engine_says() -> None:
    spans = [span("3", 0, 2), span("4", 2, 2), span("5", 2, 3)]
    result = parse_reply("a", reply([7, 8, 9], weight_versions=spans, num_retractions=1), URL)
    assert result == Generated(
        request_id="a",
        segments=(Segment((7, 8), (-0.875, -1.0), 3), Segment((9,), (-1.125,), 5)),
        finish_reason="length",
        retractions=1,
        cached_tokens=0,
    )


def test_without_spans_the_one_version_holds_for_all() -> None:
    result = parse_reply("a", reply([7, 8]), URL)
    assert [segment.version for segment in result.segments] == [4]
    assert parse_reply("a", reply([]), URL).segments == ()


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"weight_versions": [span("3", 0, 2)]}, "3 tokens, but its version spans"),
        ({"weight_versions": [span("3", 0, 2), span("4", 1, 3)]}, "its version spans"),
        ({"weight_versions": [span("3", 1, 3)]}, "its version spans"),
        ({"weight_versions": [span("3", 0, 4)]}, "its version spans"),
        ({"output_token_logprobs": [[-1.0, 7, None]]}, "but log-probs of 1"),
        ({"output_token_logprobs": None}, "but log-probs of 0"),
        ({"finish_reason": {"type": "bored"}}, "finish reason"),
        ({"weight_version": "default"}, "weight version 'default'"),
    ],
)
def test_contradictions_are_errors(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message) as raised:
        parse_reply("a", reply([7, 8, 9], **meta), URL)
    assert URL in str(raised.value)


def test_a_batch_is_one_request() -> None:
    sent: list[dict[str, Any]] = []

    def handler(http: httpx.Request) -> httpx.Response:
        sent.append(json.loads(http.content))
        return httpx.Response(200, json=[reply([1]), reply([2])])

    requests = [request("a", [5, 6], seed=8), request("b", [5], stop_token_ids=(3,))]
    results = answering(handler, lambda client: client.generate(requests))
    assert [result.request_id for result in results] == ["a", "b"]
    (body,) = sent
    assert body["input_ids"] == [[5, 6], [5]]
    assert body["return_logprob"] is True
    assert body["sampling_params"][0]["sampling_seed"] == 8
    assert body["sampling_params"][1]["stop_token_ids"] == [3]
    first, second = body["rid"]
    assert first.startswith("a")
    assert second.startswith("b")


def test_no_request_id_on_the_wire_begins_with_another() -> None:
    """SGLang aborts by prefix."""
    names = [f"g1-{sample}" for sample in range(20)]
    wire = generate_body([request(name, [5]) for name in names])["rid"]
    assert not any(a != b and b.startswith(a) for a in wire for b in wire)


def weights(version: int = 7) -> WeightsFolder:
    return WeightsFolder(
        path=Path("/somewhere"), version=version, checksum="xxh3_128:aa", size_bytes=1
    )


def update_handler(
    *, success: bool = True, version: str = "7", checksum: str | None = "xxh3_128:aa"
) -> Callable[[httpx.Request], httpx.Response]:
    def handler(http: httpx.Request) -> httpx.Response:
        match http.url.path:
            case "/update_weights_from_disk":
                status = 200 if success else 400
                return httpx.Response(status, json={"success": success, "message": "a reason"})
            case "/model_info":
                return httpx.Response(200, json={"weight_version": version})
            case _:
                return httpx.Response(200, json={"success": True, "checksum": checksum})

    return handler


@pytest.mark.parametrize("checksum", ["xxh3_128:aa", None, "sha256:of another kind"])
def test_weights_are_echoed(checksum: str | None) -> None:
    handler = update_handler(checksum=checksum)
    assert answering(handler, lambda c: c.load_weights(weights(), PauseMode.RETRACT)) == 7


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ({"version": "6"}, VersionMismatch, "sent version 7 but holds 6"),
        ({"version": "default"}, VersionMismatch, "'default'"),
        ({"checksum": "xxh3_128:bb"}, VersionMismatch, "xxh3_128:aa but holds xxh3_128:bb"),
        ({"success": False}, EngineError, "a reason"),
    ],
)
def test_another_echo_is_an_error(
    answers: dict[str, Any], error: type[Exception], message: str
) -> None:
    handler = update_handler(**answers)
    with pytest.raises(error, match=message):
        answering(handler, lambda c: c.load_weights(weights(), PauseMode.RETRACT))


@pytest.mark.parametrize(
    ("mode", "flush"), [("retract", True), ("abort", True), ("in_place", False)]
)
def test_the_cache_is_flushed_unless_requests_live_in_it(mode: str, flush: bool) -> None:
    sent: list[Any] = []

    def handler(http: httpx.Request) -> httpx.Response:
        if http.url.path == "/update_weights_from_disk":
            sent.append(json.loads(http.content)["flush_cache"])
        return update_handler()(http)

    answering(handler, lambda c: c.load_weights(weights(), PauseMode(mode)))
    assert sent == [flush]


def test_an_engine_that_is_gone_is_named() -> None:
    def handler(http: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Connection refused", request=http)

    with pytest.raises(EngineUnreachable, match=f"{URL} is unreachable .*Connection refused"):
        answering(handler, lambda client: client.generate([request("a", [5])]))
    assert answering(handler, lambda client: client.ready()) is False


def test_a_refusal_says_why() -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": "the context is 8"}})

    with pytest.raises(EngineError, match=r"refused POST /generate \(400\): the context is 8"):
        answering(handler, lambda client: client.generate([request("a", [5])]))


# --- what an abort pause cut off ---


def generated(tokens: list[int], version: int, reason: str = "abort", **values: Any) -> Generated:
    segments = (Segment(tuple(tokens), (-0.5,) * len(tokens), version),) if tokens else ()
    return Generated(
        **{
            "request_id": "a",
            "segments": segments,
            "finish_reason": reason,
            "retractions": 0,
            "cached_tokens": 3,
            **values,
        }
    )


def test_a_continuation_asks_for_what_is_missing() -> None:
    one = request("a", [5, 6], 8, seed=4)
    more = continuation(one, generated([7, 8, 9], 1))
    assert more.prompt_tokens == (5, 6, 7, 8, 9)
    assert more.sampling.max_new_tokens == 5
    assert more.sampling.seed == 4
    assert continuation(one, generated([], 1)) == one


def test_merging_keeps_versions_apart_and_joins_equal_ones() -> None:
    merged = merge(generated([7, 8], 1), generated([9], 2, "stop", cached_tokens=5))
    assert [(s.tokens, s.version) for s in merged.segments] == [((7, 8), 1), ((9,), 2)]
    assert (merged.finish_reason, merged.retractions, merged.cached_tokens) == ("stop", 1, 3)
    same = merge(generated([7, 8], 1), generated([9], 1, "length"))
    assert [(s.tokens, s.version) for s in same.segments] == [((7, 8, 9), 1)]
    fresh = merge(generated([], 1), generated([9], 2, "length"))
    assert [(s.tokens, s.version) for s in fresh.segments] == [((9,), 2)]
    assert fresh.retractions == 0  # it had no cache to lose


@pytest.mark.parametrize("order", ["before", "during"])
def test_what_an_abort_pause_cut_off_is_sent_again(order: str) -> None:
    """Also if it was sent while the pause was on its way, and overtook it."""
    sent: list[list[int]] = []

    async def scenario() -> Generated:
        pause_came, sample_came, both = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def handler(http: httpx.Request) -> httpx.Response:
            if http.url.path == "/pause_generation":
                pause_came.set()
                await sample_came.wait()
                await both.wait()
                return httpx.Response(200, json={})
            body = json.loads(http.content)
            sent.append(body["input_ids"][0])
            if len(sent) == 1:
                sample_came.set()
                await pause_came.wait()
                return httpx.Response(200, json=[reply([7, 8], finish_reason={"type": "abort"})])
            both.set()
            return httpx.Response(200, json=[reply([9])])

        client = EngineClient(URL, transport=httpx.MockTransport(handler))
        steps = [client.generate([request("a", [5], 3)]), client.pause(PauseMode.ABORT)]
        tasks = [
            asyncio.ensure_future(step) for step in (steps if order == "before" else steps[::-1])
        ]
        await asyncio.gather(*tasks)
        await client.close()
        return next(task.result()[0] for task in tasks if task.result() is not None)

    result = asyncio.run(scenario())
    assert sent == [[5], [5, 7, 8]]
    assert [segment.tokens for segment in result.segments] == [(7, 8, 9)]

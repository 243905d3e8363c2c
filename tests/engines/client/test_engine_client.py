"""The client believes what the server says, checks that it is consistent, and names the engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_lab.data.trajectory import Segment
from areal_lab.engines.client.dialect import Dialect
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.client.resubmit import continuation, merge
from areal_lab.engines.client.sglang import SGLANG
from areal_lab.engines.client.vllm import VLLM
from areal_lab.engines.protocol import (
    EngineError,
    EngineUnreachable,
    Generated,
    PauseMode,
    RequestRefused,
    VersionMismatch,
    WeightsFolder,
)
from areal_lab.engines.weights.folder import write_weights
from areal_lab.engines.weights.verify_folder import (
    MANIFEST,
    check_folder,
    folder_shapes,
    read_manifest_here,
)
from tests.engines.tiny import END_TOKEN, request, tiny_model

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
    handler: Callable[[httpx2.Request], httpx2.Response],
    act: Callable[[EngineClient], Coroutine[Any, Any, T]],
    api: Dialect = SGLANG,
) -> T:
    async def scenario() -> T:
        client = EngineClient(URL, api=api, transport=httpx2.MockTransport(handler))
        try:
            return await act(client)
        finally:
            await client.close()

    return asyncio.run(scenario())


def answered(one: dict[str, Any]) -> Generated:
    """The client's result for this reply."""

    def handler(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json=[one])

    (result,) = answering(handler, lambda client: client.generate([request("a", [5])]))
    return result


def test_segments_are_cut_where_the_engine_says() -> None:
    spans = [span("3", 0, 2), span("4", 2, 2), span("5", 2, 3)]
    assert answered(reply([7, 8, 9], weight_versions=spans, num_retractions=1)) == Generated(
        request_id="a",
        segments=(Segment((7, 8), (-0.875, -1.0), 3), Segment((9,), (-1.125,), 5)),
        finish_reason="length",
        retractions=1,
        cached_tokens=0,
    )


def test_without_spans_the_one_version_holds_for_all() -> None:
    assert [segment.version for segment in answered(reply([7, 8])).segments] == [4]
    assert answered(reply([])).segments == ()


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"weight_versions": [span("3", 0, 2)]}, "3 tokens, but its version spans"),
        ({"weight_versions": [span("3", 0, 2), span("4", 1, 3)]}, "its version spans"),
        ({"weight_versions": [span("3", 1, 3)]}, "its version spans"),
        ({"weight_versions": [span("3", 0, 4)]}, "its version spans"),
        ({"output_token_logprobs": [[-1.0, 7, None]]}, "3 tokens came with log-probs of 1"),
        ({"output_token_logprobs": None}, "with log-probs of 0"),
        ({"finish_reason": {"type": "bored"}}, "finish reason"),
        ({"weight_version": "default"}, "weight version 'default'"),
        (
            {"finish_reason": {"type": "abort", "message": "no room", "status_code": 503}},
            "it gave up: no room",
        ),
        (
            {
                "finish_reason": {"type": "abort", "message": "too long", "status_code": 400},
                "output_token_logprobs": [],
            },
            "it gave up: too long",
        ),
    ],
)
def test_contradictions_are_errors(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message) as raised:
        answered(reply([7, 8, 9], **meta))
    assert URL in str(raised.value)


GAVE_UP = {"type": "abort", "message": "no grammar", "status_code": 400}


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        (httpx2.Response(200, json=[reply([7], finish_reason=GAVE_UP)]), True),
        (
            httpx2.Response(200, json=[reply([7], finish_reason={**GAVE_UP, "status_code": 503})]),
            False,
        ),
        (
            httpx2.Response(
                200,
                text='data: {"error": {"message": "no grammar"}}\n\ndata: [DONE]\n\n',
                headers={"content-type": "text/event-stream"},
            ),
            True,
        ),
        (httpx2.Response(400, json={"error": {"message": "no grammar"}}), True),
        (httpx2.Response(404, json={"message": "no grammar"}), False),
        (httpx2.Response(503, json={"message": "no grammar"}), False),
    ],
)
def test_a_refused_request_is_told_from_a_server_that_fails(
    answer: httpx2.Response, *, refused: bool
) -> None:
    with pytest.raises(EngineError, match="no grammar") as raised:
        answering(lambda _: answer, lambda client: client.generate([request("a", [5])]))
    assert isinstance(raised.value, RequestRefused) == refused
    assert not isinstance(raised.value, EngineUnreachable)
    assert URL in str(raised.value)


def test_a_batch_is_one_request() -> None:
    sent: list[dict[str, Any]] = []

    def handler(http: httpx2.Request) -> httpx2.Response:
        sent.append(json.loads(http.content))
        return httpx2.Response(200, json=[reply([1]), reply([2])])

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


@pytest.fixture
def weights(tmp_path: Path) -> WeightsFolder:
    return write_weights(tiny_model(), tmp_path, 7, dtype=torch.float32)


Server = Callable[[httpx2.Request], httpx2.Response]


def sglang_server(
    checksum: str | None,
    *,
    success: bool = True,
    version: str = "7",
    calls: list[Any] | None = None,
) -> Server:
    """Answers what an update asks for; `calls` gets path and body of each request."""

    def handler(http: httpx2.Request) -> httpx2.Response:
        if calls is not None:
            calls.append((http.url.path, json.loads(http.content or b"null")))
        match http.url.path:
            case "/update_weights_from_disk":
                status = 200 if success else 400
                return httpx2.Response(status, json={"success": success, "message": "a reason"})
            case "/model_info":
                return httpx2.Response(200, json={"weight_version": version})
            case _:
                return httpx2.Response(200, json={"success": True, "checksum": checksum})

    return handler


@pytest.mark.parametrize("checksum", ["ours", None, "sha256:of another kind"])
def test_weights_are_echoed(weights: WeightsFolder, checksum: str | None) -> None:
    handler = sglang_server(weights.checksum if checksum == "ours" else checksum)
    assert answering(handler, lambda c: c.load_weights(weights, PauseMode.RETRACT)) == 7


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        ({"version": "6"}, VersionMismatch, "sent version 7 but holds 6"),
        ({"version": "default"}, VersionMismatch, "'default'"),
        (
            {"checksum": "xxh3_128:bb"},
            VersionMismatch,
            "checksum xxh3_128:.* but holds xxh3_128:bb",
        ),
        ({"success": False}, EngineError, "a reason"),
    ],
)
def test_another_echo_is_an_error(
    weights: WeightsFolder, answers: dict[str, Any], error: type[Exception], message: str
) -> None:
    handler = sglang_server(**{"checksum": weights.checksum, **answers})
    with pytest.raises(error, match=message):
        answering(handler, lambda c: c.load_weights(weights, PauseMode.RETRACT))


def test_a_digest_of_another_kind_has_to_follow_the_weights(tmp_path: Path) -> None:
    """Digests are equal for equal weights and differ otherwise; a wrong one is a mismatch."""
    first, second = (
        write_weights(tiny_model(seed=seed), tmp_path, 7 + seed, dtype=torch.float32)
        for seed in (0, 1)
    )

    def loads(*steps: tuple[WeightsFolder, str]) -> None:
        now = {}

        def handler(http: httpx2.Request) -> httpx2.Response:
            return sglang_server(now["digest"], version=now["version"])(http)

        async def act(client: EngineClient) -> None:
            for weights, digest in steps:
                now.update(version=str(weights.version), digest=digest)
                await client.load_weights(weights, PauseMode.RETRACT)

        answering(handler, act)

    loads((first, "x"), (second, "y"), (first, "x"))
    with pytest.raises(VersionMismatch, match="still holds the weights of an earlier set"):
        loads((first, "x"), (second, "x"))
    with pytest.raises(VersionMismatch, match="differ from those it had for the same set before"):
        loads((first, "x"), (second, "y"), (first, "z"))


def test_a_refusal_after_the_weights_changed_differs_from_one_before(tmp_path: Path) -> None:
    """SGLang refuses a flush after it has loaded the weights, and reports the old version."""
    weights = [
        write_weights(tiny_model(seed=seed), tmp_path, 7 + seed, dtype=torch.float32)
        for seed in (0, 1)
    ]

    def refused(digest_afterwards: str) -> None:
        async def act(client: EngineClient) -> None:
            await client.load_weights(weights[0], PauseMode.RETRACT)
            now.update(checksum=digest_afterwards, success=False)
            await client.load_weights(weights[1], PauseMode.RETRACT)

        now: dict[str, Any] = {"checksum": "old"}

        def handler(http: httpx2.Request) -> httpx2.Response:
            return sglang_server(**now)(http)  # as it is when it is asked

        answering(handler, act)

    with pytest.raises(EngineError, match=r"a reason$") as kept:
        refused("old")
    assert not isinstance(kept.value, VersionMismatch)
    with pytest.raises(VersionMismatch, match="have changed under the old version"):
        refused("new")


def test_a_digest_of_some_weights_proves_less(tmp_path: Path) -> None:
    """vLLM's on a CPU leaves linear layers out: two sets may have the same one, and whether a
    refused set was taken in part remains unknown."""
    first, second = (
        write_weights(tiny_model(seed=seed), tmp_path, 7 + seed, dtype=torch.float32)
        for seed in (0, 1)
    )
    nothing = hashlib.sha256().hexdigest()

    def handler(http: httpx2.Request) -> httpx2.Response:
        body = json.loads(http.content or b"null")
        match http.url.path:
            case "/update_weight_version":
                now["version"] = body["new_version"]
            case "/weight_info":
                return httpx2.Response(200, json={"weight_version": now["version"]})
            case "/weight_checker":
                sums = {"norm": "same", "linear": nothing}
                return httpx2.Response(200, json={"checksums": sums})
            case "/collective_rpc" if now["refuse"]:
                return httpx2.Response(500, json={"error": {"message": "no room"}})
        return httpx2.Response(200, json={})

    now: dict[str, Any] = {"version": "6", "refuse": False}

    async def act(client: EngineClient) -> None:
        for weights in (first, second):
            assert await client.load_weights(weights, PauseMode.RETRACT) == weights.version
        now["refuse"] = True
        with pytest.raises(VersionMismatch, match="no room; it cannot report whether some weights"):
            await client.load_weights(first, PauseMode.RETRACT)

    answering(handler, act, VLLM)


@pytest.mark.parametrize(
    ("mode", "flush"), [("retract", True), ("abort", True), ("in_place", False)]
)
def test_the_cache_is_flushed_unless_requests_live_in_it(
    weights: WeightsFolder, mode: str, flush: bool
) -> None:
    calls: list[Any] = []
    handler = sglang_server(weights.checksum, calls=calls)
    answering(handler, lambda c: c.load_weights(weights, PauseMode(mode)))
    assert [body["flush_cache"] for path, body in calls if "update" in path] == [flush]


def test_an_engine_that_is_not_paused_is_paused_for_an_update(weights: WeightsFolder) -> None:
    calls: list[Any] = []

    async def act(client: EngineClient) -> None:
        await client.load_weights(weights, PauseMode.RETRACT)
        await client.pause(PauseMode.RETRACT)
        await client.load_weights(weights, PauseMode.RETRACT)

    answering(sglang_server(weights.checksum, calls=calls), act)
    update = ["/update_weights_from_disk", "/model_info", "/weights_checker"]
    first, *paths = (path for path, _ in calls)
    assert first == "/weights_checker"  # what it holds so far
    assert paths == [
        *("/pause_generation", *update, "/continue_generation"),
        *("/pause_generation", *update),
    ]


def test_one_mode_holds_for_a_pause_and_its_update(weights: WeightsFolder) -> None:
    async def act(client: EngineClient) -> None:
        await client.pause(PauseMode.IN_PLACE)
        await client.load_weights(weights, PauseMode.RETRACT)

    with pytest.raises(EngineError, match="paused with mode in_place, so version 7 cannot be"):
        answering(sglang_server(weights.checksum), act)


def test_later_requests_share_no_prefix_with_a_cache_left_in_place(weights: WeightsFolder) -> None:
    calls: list[Any] = []

    def handler(http: httpx2.Request) -> httpx2.Response:
        answer = sglang_server(weights.checksum, calls=calls)(http)
        return httpx2.Response(200, json=[reply([1])]) if "generate" in http.url.path else answer

    async def act(client: EngineClient) -> None:
        for mode in (PauseMode.RETRACT, PauseMode.IN_PLACE, PauseMode.IN_PLACE):
            await client.load_weights(weights, mode)
            await client.generate([request("a", [5])])

    answering(handler, act)
    names = [body.get("extra_key") for path, body in calls if path == "/generate"]
    assert names == [None, "after-1-in-place", "after-2-in-place"]


def test_requests_held_by_a_pause_in_place_share_nothing_older_either(
    weights: WeightsFolder,
) -> None:
    """They are sent before the update and run after it."""
    calls: list[Any] = []

    def handler(http: httpx2.Request) -> httpx2.Response:
        answer = sglang_server(weights.checksum, calls=calls)(http)
        return httpx2.Response(200, json=[reply([1])]) if "generate" in http.url.path else answer

    async def act(client: EngineClient) -> None:
        await client.generate([request("a", [5])])
        await client.pause(PauseMode.IN_PLACE)
        await client.generate([request("held", [5])])
        await client.load_weights(weights, PauseMode.IN_PLACE)
        await client.resume()
        await client.generate([request("b", [5])])

    answering(handler, act)
    names = [body.get("extra_key") for path, body in calls if path == "/generate"]
    assert names == [None, "after-1-in-place", "after-1-in-place"]


@pytest.mark.parametrize("failing", ["update", "echo", "refusal"])
def test_an_engine_whose_weights_are_unknown_stays_paused(
    weights: WeightsFolder, failing: str
) -> None:
    """Its tokens would have no known version; after a refusal that changed nothing it resumes."""
    calls: list[Any] = []
    told = {"echo": {"version": "6"}, "refusal": {"success": False}}.get(failing, {})

    def handler(http: httpx2.Request) -> httpx2.Response:
        answer = sglang_server(weights.checksum, calls=calls, **told)(http)
        if failing == "update" and http.url.path == "/update_weights_from_disk":
            raise httpx2.ReadTimeout("too slow", request=http)
        return answer

    errors = {"update": EngineUnreachable, "echo": VersionMismatch, "refusal": EngineError}
    with pytest.raises(errors[failing]) as raised:
        answering(handler, lambda c: c.load_weights(weights, PauseMode.RETRACT))
    assert type(raised.value) is errors[failing]
    resumed = "/continue_generation" in [path for path, _ in calls]
    assert resumed is (failing == "refusal")


def test_the_first_refusal_of_a_client_is_looked_behind_too(weights: WeightsFolder) -> None:
    """It knows of no load before, so it asks for the digest before and after."""
    digests = iter(["before", "after"])

    def handler(http: httpx2.Request) -> httpx2.Response:
        checksum = next(digests) if http.url.path == "/weights_checker" else ""
        return sglang_server(checksum, success=False)(http)

    with pytest.raises(VersionMismatch, match="have changed under the old version"):
        answering(handler, lambda c: c.load_weights(weights, PauseMode.RETRACT))


@pytest.mark.parametrize("damage", ["flipped", "cut", "header", "empty", "gone"])
def test_a_damaged_folder_never_reaches_an_engine(weights: WeightsFolder, damage: str) -> None:
    check_folder(weights)
    file = weights.path / "model.safetensors"
    content = bytearray(file.read_bytes())
    match damage:
        case "flipped":
            content[-5] ^= 1
            file.write_bytes(content)
        case "cut":
            file.write_bytes(content[:-100])
        case "header":
            content[3] = 255
            file.write_bytes(content)
        case "empty":
            file.write_bytes(b"")
        case "gone":
            file.unlink()
    calls: list[Any] = []
    with pytest.raises(EngineError, match="v00000007") as raised:
        answering(
            sglang_server(weights.checksum, calls=calls),
            lambda c: c.load_weights(weights, PauseMode.RETRACT),
        )
    assert "\n" not in str(raised.value)
    assert URL in str(raised.value)
    assert calls == []


@pytest.mark.parametrize("manifest", ["whole", "of other weights", "damaged", "gone"])
def test_only_a_manifest_of_these_weights_leaves_the_check_to_the_engine(
    weights: WeightsFolder, manifest: str
) -> None:
    file, path = weights.path / "model.safetensors", weights.path / MANIFEST
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    match manifest:
        case "of other weights":
            path.write_text(path.read_text().replace(weights.checksum, "xxh3_128:0"))
        case "damaged":
            path.write_text(path.read_text()[:-5])
        case "gone":
            path.unlink()
    if manifest == "whole":
        shapes = folder_shapes(weights.path)
        assert asyncio.run(read_manifest_here(weights)) == (weights, shapes)
    else:
        with pytest.raises(EngineError, match="is damaged"):
            asyncio.run(read_manifest_here(weights))


def test_weights_of_other_shapes_never_reach_an_engine(tmp_path: Path) -> None:
    """It had those of a folder before, or of the one that it was started with."""
    weights = write_weights(tiny_model(), tmp_path, 7, dtype=torch.float32)
    other = write_weights(tiny_model(tied=True), tmp_path / "other", 7, dtype=torch.float32)
    file = other.path / "model.safetensors"
    tensors = {name: tensor[None].contiguous() for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    other = replace(other, checksum="of another kind")
    handler = sglang_server(None)

    async def loaded_before(client: EngineClient) -> None:
        await client.load_weights(weights, PauseMode.RETRACT)
        await client.load_weights(other, PauseMode.RETRACT)

    async def started_with(client: EngineClient) -> None:
        client.note_model(weights.path)
        await client.load_weights(other, PauseMode.RETRACT)

    for act in (loaded_before, started_with):
        with pytest.raises(EngineError, match=r"is of another model: .* has shape") as raised:
            answering(handler, act)
        assert type(raised.value) is EngineError
        assert URL in str(raised.value)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_computes_what_the_writer_computed(
    tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    check_folder(write_weights(tiny_model(tied=tied), tmp_path, 1, dtype=dtype))


def test_an_engine_that_is_gone_is_named() -> None:
    def handler(http: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("Connection refused", request=http)

    for act in (lambda c: c.generate([request("a", [5])]), EngineClient.version):
        with pytest.raises(EngineUnreachable) as raised:
            answering(handler, act)
        message = str(raised.value)
        assert message.startswith(f"engine {URL} is unreachable")
        assert "Connection refused" in message
        assert message.count(URL) == 1
    assert answering(handler, lambda client: client.ready()) is False


def test_a_call_after_the_connection_was_closed_finds_the_engine_gone() -> None:
    async def act(client: EngineClient) -> None:
        await client.close()
        assert not await client.ready()
        with pytest.raises(EngineUnreachable, match="GET /model_info: the connection was closed"):
            await client.version()
        with pytest.raises(EngineUnreachable, match="POST /generate: the connection was closed"):
            await client.generate([request("a", [5])])

    answering(lambda _: httpx2.Response(200, json={}), act)


@pytest.mark.parametrize(("status", "lost"), [(500, True), (400, False)])
def test_a_server_that_says_that_it_is_broken_is_lost_and_one_that_refuses_is_not(
    status: int, lost: bool
) -> None:
    def handler(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, json={"error": {"message": "why"}})

    with pytest.raises(EngineError, match="why") as raised:
        answering(handler, lambda client: client.generate([request("a", [5])]))
    assert isinstance(raised.value, EngineUnreachable) is lost


@pytest.mark.parametrize("content", [b'{"text": "a', b"<html>" + 500 * b"x", b"\xff\xfe", b""])
def test_malformed_json_is_an_engine_that_is_lost(content: bytes) -> None:
    def handler(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "application/json"}, content=content)

    for act, asked in (
        (EngineClient.version, "GET /model_info"),
        (lambda c: c.generate([request("a", [5])]), "POST /generate"),
    ):
        with pytest.raises(EngineUnreachable) as raised:
            answering(handler, act)
        message = str(raised.value)
        assert message.startswith(f"engine {URL} sent malformed JSON in reply to {asked} (")
        assert content[:50].decode(errors="replace") in message
        assert "\n" not in message
        assert len(message) < 400


def test_a_refusal_says_why() -> None:
    def handler(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(400, json={"error": {"message": "the context is 8"}})

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
def test_samples_that_an_abort_pause_ended_are_sent_again(order: str) -> None:
    """Under another id: SGLang aborts requests with the id of a reply that ended less than two
    seconds ago. Requests sent during the pause are held until its end, too."""
    sent: list[list[int]] = []
    names: set[str] = set()
    paths: list[str] = []

    async def scenario() -> Generated:
        came, ended = asyncio.Event(), asyncio.Event()

        async def handler(http: httpx2.Request) -> httpx2.Response:
            paths.append(http.url.path)
            if http.url.path == "/abort_request":
                ended.set()
            if http.url.path != "/generate":
                return httpx2.Response(200, json={})
            body = json.loads(http.content)
            sent.append(body["input_ids"][0])
            names.update(body["rid"])
            if order == "before" and len(sent) == 1:
                came.set()
                await ended.wait()
                return httpx2.Response(200, json=[reply([7, 8], finish_reason={"type": "abort"})])
            return httpx2.Response(200, json=[reply([9])])

        client = EngineClient(URL, transport=httpx2.MockTransport(handler))
        if order == "before":
            drawing = asyncio.create_task(client.generate([request("a", [5], 3)]))
            await came.wait()
        pausing = asyncio.create_task(client.pause(PauseMode.ABORT))
        await asyncio.sleep(0)
        if order == "during":
            drawing = asyncio.create_task(client.generate([request("a", [5], 3)]))
        await pausing
        assert len(sent) == (order == "before")
        # What a checkpoint would keep during the pause.
        so_far = {name: one.segments for name, one in client.received(["a", "b"]).items()}
        assert so_far == ({"a": (Segment((7, 8), (-0.875, -1.0), 4),)} if sent else {})
        await client.resume()
        (result,) = await drawing
        assert client.received(["a"]) == {}
        await client.close()
        return result

    result = asyncio.run(scenario())
    assert sent == ([[5], [5, 7, 8]] if order == "before" else [[5]])
    assert len(names) == len(sent)
    tokens = (7, 8, 9) if order == "before" else (9,)
    assert [segment.tokens for segment in result.segments] == [tokens]
    assert paths.index("/pause_generation") > max(
        (i for i, path in enumerate(paths) if path == "/abort_request"), default=-1
    )


@pytest.mark.parametrize(
    ("last", "max_new_tokens", "finish_reason"),
    [(3, 9, "stop"), (END_TOKEN, 9, "stop"), (8, 2, "length")],
)
def test_an_aborted_sample_that_had_ended_is_not_sent_again(
    weights: WeightsFolder, last: int, max_new_tokens: int, finish_reason: str
) -> None:
    """SGLang samples one more token for a request that it aborts, and does not check it."""
    sent: list[str] = []

    async def scenario() -> Generated:
        told = asyncio.Event()

        async def handler(http: httpx2.Request) -> httpx2.Response:
            sent.append(http.url.path)
            if http.url.path == "/abort_request":
                told.set()
            if http.url.path != "/generate":
                return httpx2.Response(200, json={})
            await told.wait()
            return httpx2.Response(200, json=[reply([7, last], finish_reason={"type": "abort"})])

        client = EngineClient(URL, transport=httpx2.MockTransport(handler))
        client.note_model(weights.path)
        one = request("a", [5], max_new_tokens, stop_token_ids=(3,))
        generating = asyncio.ensure_future(client.generate([one]))
        while not sent:
            await asyncio.sleep(0)
        await client.pause(PauseMode.ABORT)
        (result,) = await generating
        await client.close()
        return result

    result = asyncio.run(scenario())
    assert sent == ["/generate", "/abort_request", "/pause_generation"]
    assert result.finish_reason == finish_reason
    assert [segment.tokens for segment in result.segments] == [(7, last)]

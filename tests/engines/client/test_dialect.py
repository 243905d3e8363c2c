"""Requests to SGLang and vLLM, and parsing of their replies, without a server or network."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from areal_lab.engines.client.dialect import Call, Dialect, Digest, GenerateOptions, Span
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.client.sglang import SGLANG
from areal_lab.engines.client.vllm import VLLM, VLLM_ON_CPU
from areal_lab.engines.keys import KEY_VARIABLE
from areal_lab.engines.launch.detect import dialect_at
from areal_lab.engines.protocol import (
    EngineError,
    EngineUnreachable,
    PauseMode,
    VersionMismatch,
    WeightsFolder,
)
from areal_lab.engines.weights.folder import write_weights
from areal_lab.engines.weights.records import EngineTarget
from tests.engines.tiny import request, tiny_model

WHOLE = GenerateOptions(stream=False, stream_interval=8, cache_name="")
STREAM = GenerateOptions(stream=True, stream_interval=8, cache_name="after-1-in-place")
WEIGHTS = WeightsFolder(path=Path("/w/v7"), version=7, checksum="xxh3_128:aa", size_bytes=1)


def body_of(call: Call) -> dict[str, Any]:
    assert call.body is not None
    return dict(call.body)


# --- requests ---


def test_sglang_gets_all_samples_in_one_body() -> None:
    requests = [request("a", [5, 6], 3, seed=8), request("b", [5], stop_token_ids=(3,))]
    body = body_of(SGLANG.generate(requests, WHOLE))
    assert body["input_ids"] == [[5, 6], [5]]
    assert body["return_logprob"] is True
    assert body["sampling_params"][0] == {
        "max_new_tokens": 3,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "stop_token_ids": [],
        "ignore_eos": True,
        "sampling_seed": 8,
    }
    assert body["sampling_params"][1]["stop_token_ids"] == [3]
    assert not {"stream", "extra_key"} & body.keys()

    streamed = body_of(SGLANG.generate(requests, STREAM))
    assert (streamed["stream"], streamed["extra_key"]) == (True, "after-1-in-place")
    assert [one["stream_interval"] for one in streamed["sampling_params"]] == [8, 8]


def test_no_request_id_on_sglangs_wire_begins_with_another() -> None:
    """SGLang aborts by prefix."""
    names = [f"g1-{sample}" for sample in range(20)]
    wire = body_of(SGLANG.generate([request(name, [5]) for name in names], WHOLE))["rid"]
    assert not any(a != b and b.startswith(a) for a in wire for b in wire)
    assert body_of(SGLANG.abort("g1-1"))["rid"] == wire[1]


def test_vllm_gets_one_sample_per_body() -> None:
    call = VLLM.generate([request("a", [5, 6], 3, seed=8, stop_token_ids=(3,))], STREAM)
    assert call.path == "/inference/v1/generate"
    assert body_of(call) == {
        "request_id": "a",
        "token_ids": [5, 6],
        "sampling_params": {
            "max_tokens": 3,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "stop_token_ids": [3],
            "ignore_eos": False,
            "seed": 8,
            "logprobs": 0,
            "detokenize": False,
            "stream_interval": 8,
        },
        "stream": True,
        "cache_salt": "after-1-in-place",
    }


def test_stop_strings_go_to_servers_that_find_them() -> None:
    """vLLM finds them only in text that it keeps, with all special tokens in it."""
    one, sending = request("a", [5], stop=("ab", "c")), replace(STREAM, send_stops=True)
    for dialect in (SGLANG, VLLM):
        params = body_of(dialect.generate([one], STREAM))["sampling_params"]
        assert "stop" not in (params[0] if isinstance(params, list) else params)
    (params,) = body_of(SGLANG.generate([one], sending))["sampling_params"]
    assert (params["stop"], params["ignore_eos"]) == (["ab", "c"], False)
    params = body_of(VLLM.generate([one], sending))["sampling_params"]
    assert params["stop"] == ["ab", "c"]
    kept = ("detokenize", "include_stop_str_in_output", "skip_special_tokens")
    assert [params[name] for name in kept] == [True, True, False]
    assert SGLANG.checks_stops({"skip_tokenizer_init": False})
    assert not SGLANG.checks_stops({"skip_tokenizer_init": True})


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({"grammar_backend": "xgrammar", "skip_tokenizer_init": False}, True),
        ({"grammar_backend": "xgrammar", "skip_tokenizer_init": True}, False),
        ({"grammar_backend": "none", "skip_tokenizer_init": False}, False),
        ({"grammar_backend": None, "skip_tokenizer_init": False}, False),
        ({"engine": "embedded"}, False),
    ],
)
def test_sglang_matches_schemas_with_a_tokenizer_and_a_grammar(
    told: dict[str, Any], *, found: bool
) -> None:
    assert SGLANG.has_grammars(told) is found
    assert not VLLM.has_grammars(told)


def test_every_request_has_the_key_and_no_error_tells_it(tmp_path: Path) -> None:
    seen: list[str | None] = []

    def answer(http: httpx2.Request) -> httpx2.Response:
        seen.append(http.headers.get("authorization"))
        return httpx2.Response(401, json={"error": "Unauthorized"})

    async def scenario() -> list[str]:
        transport = httpx2.MockTransport(answer)
        client = EngineClient("http://a", key="s3cret", transport=transport)
        said = []
        with pytest.raises(EngineUnreachable, match=r"refused GET /model_info \(401\)"):
            await client.version()  # whatever has another key is another server
        for call in (
            client.version(),
            client.generate([request("a", [5])]),
            client.load_weights(write_weights(tiny_model(), tmp_path, 1, dtype=torch.float32),
                                PauseMode.ABORT),
            dialect_at("http://a", key="s3cret", transport=transport),
        ):  # fmt: skip
            with pytest.raises(EngineError) as raised:
                await call
            said.append(str(raised.value))
        assert not await client.ready()
        await client.close()
        return [*said, repr(client), repr(EngineTarget("http://a", key="s3cret"))]

    said = asyncio.run(scenario())
    assert set(seen) == {"Bearer s3cret"}
    assert "401" in said[0]
    assert f"it has another key than the one sent; set {KEY_VARIABLE}" in said[3]
    assert not [text for text in said if "s3cret" in text]


def test_a_server_with_a_key_asks_for_it() -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(401))
    with pytest.raises(EngineError, match=f"it requires a key; set {KEY_VARIABLE} to it"):
        asyncio.run(dialect_at("http://a", transport=transport))


def test_vllm_knows_a_request_by_another_id() -> None:
    assert body_of(VLLM.abort("a")) == {"request_ids": ["generate-tokens-a"]}


# --- pauses and updates ---


@pytest.mark.parametrize(
    ("mode", "sglang", "vllm"),
    [("retract", "retract", "keep"), ("abort", "abort", "abort"), ("in_place", "in_place", "keep")],
)
def test_pauses(mode: str, sglang: str, vllm: str) -> None:
    assert SGLANG.pause(PauseMode(mode)) == Call("POST", "/pause_generation", {"mode": sglang})
    assert VLLM.pause(PauseMode(mode)).path == f"/pause?mode={vllm}"


def test_sglang_must_flush_unless_requests_use_the_cache() -> None:
    for mode in PauseMode:
        (call,) = SGLANG.load(WEIGHTS, mode)
        assert body_of(call) == {
            "model_path": "/w/v7",
            "weight_version": "7",
            "flush_cache": mode is not PauseMode.IN_PLACE,
        }


def test_vllm_drops_its_cache_before_it_gets_the_version() -> None:
    reset = "/reset_prefix_cache?reset_running_requests=true"
    for mode in (PauseMode.RETRACT, PauseMode.ABORT):
        paths = [call.path for call in VLLM.load(WEIGHTS, mode)]
        assert paths == ["/collective_rpc", reset, "/update_weight_version"]
    paths = [call.path for call in VLLM.load(WEIGHTS, PauseMode.IN_PLACE)]
    assert paths == ["/collective_rpc", "/update_weight_version"]
    reload, *_, version = VLLM.load(WEIGHTS, PauseMode.RETRACT)
    assert body_of(reload) == {"method": "reload_weights", "kwargs": {"weights_path": "/w/v7"}}
    on_cpu, *_ = VLLM_ON_CPU.load(WEIGHTS, PauseMode.RETRACT)
    assert body_of(on_cpu)["method"] == "reload_all_weights"
    assert body_of(version) == {"new_version": "7"}


def test_refusals_inside_replies_with_status_200() -> None:
    assert SGLANG.refusal({"success": True, "message": "fine"}) is None
    assert SGLANG.refusal({"success": False, "message": "why"}) == "why"
    assert VLLM.refusal({"results": [None]}) is None
    assert VLLM.refusal({"success": False}) is not None


# --- replies ---


def sglang_message(tokens: list[int], **meta: Any) -> dict[str, Any]:
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": None,
            "output_token_logprobs": [[-token / 8, token, None] for token in tokens],
            "weight_version": "4",
            **meta,
        },
    }


def test_a_message_of_sglang() -> None:
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}]
    chunk = SGLANG.read(
        {
            "index": 2,
            **sglang_message(
                [7, 8, 9],
                completion_tokens=5,
                weight_versions=spans,
                num_retractions=1,
                cached_tokens=2,
                finish_reason={"type": "stop", "matched": 9},
            ),
        }
    )
    assert (chunk.index, chunk.tokens, chunk.total) == (2, (7, 8, 9), 5)
    assert chunk.logprobs == (-0.875, -1.0, -1.125)
    assert chunk.spans == (Span(3, 0, 2), Span(4, 2, 3))
    assert (chunk.finish_reason, chunk.retractions, chunk.cached_tokens) == ("stop", 1, 2)


def test_repeated_tokens_of_an_aborted_sample_in_sglang_are_read() -> None:
    """Aborted while it waits again: the last token, with the log-probs of all of them."""
    message = sglang_message([7, 8, 9], completion_tokens=3, finish_reason={"type": "abort"})
    message["output_ids"] = [9]
    chunk = SGLANG.read(message)
    assert (chunk.tokens, chunk.logprobs, chunk.total) == ((9,), (-1.125,), 3)
    message["output_ids"] = []
    assert SGLANG.read(message).logprobs == ()


OF_NOTHING = hashlib.sha256().hexdigest()


@pytest.mark.parametrize(
    ("sums", "extended", "expected"),
    [
        ({"x": "1"}, False, VLLM),
        ({"x": "1", "packed": OF_NOTHING}, True, VLLM_ON_CPU),
        ({"x": "1", "packed": OF_NOTHING}, False, None),
    ],
)
def test_vllm_on_a_cpu_has_to_have_our_extension(
    sums: dict[str, str], extended: bool, expected: Dialect | None
) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        match request.url.path:
            case "/weight_info":
                return httpx2.Response(200, json={"weight_version": "0"})
            case "/weight_checker":
                return httpx2.Response(200, json={"checksums": sums})
            case "/collective_rpc":
                assert json.loads(request.content) == {"method": "can_reload_all_weights"}
                return httpx2.Response(200 if extended else 500)
        return httpx2.Response(404)

    asked = dialect_at("http://a", transport=httpx2.MockTransport(answer))
    if expected is None:
        with pytest.raises(EngineError, match="start it with `areal-lab engine serve vllm`"):
            asyncio.run(asked)
    else:
        assert asyncio.run(asked) is expected


def test_malformed_json_about_the_sums_is_named() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/weight_info":
            return httpx2.Response(200, json={"weight_version": "0"})
        return httpx2.Response(200 if request.url.path == "/weight_checker" else 404, text="{half")

    said = "http://a sent malformed JSON in reply to /weight_checker .*'{half'"
    with pytest.raises(EngineError, match=said):
        asyncio.run(dialect_at("http://a", transport=httpx2.MockTransport(answer)))


def vllm_message(tokens: list[int], **choice: Any) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -token / 8, "rank": 1} for token in tokens]
    return {
        "request_id": "generate-tokens-a",
        "choices": [{"index": 0, "token_ids": tokens, "logprobs": {"content": content}, **choice}],
    }


def test_a_message_of_vllm() -> None:
    going = VLLM.read(vllm_message([7, 8], finish_reason=None, weight_versions=None))
    assert (going.tokens, going.logprobs) == ((7, 8), (-0.875, -1.0))
    assert (going.total, going.spans, going.version, going.finish_reason) == (None,) * 4
    spans = [{"version": "3", "start": 0, "end": 3}]
    ended = VLLM.read(vllm_message([9], finish_reason="length", weight_versions=spans))
    assert (ended.spans, ended.finish_reason) == ((Span(3, 0, 3),), "length")


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"error": {"message": "too long"}}, "too long"),
        ({"choices": []}, "the reply is"),
        (vllm_message([7], finish_reason="error"), "finish reason is 'error'"),
        (vllm_message([10**5]), "without a log-prob"),
        ({"choices": [{"token_ids": [7], "logprobs": None}]}, "log-probs of 0"),
    ],
)
def test_bad_messages_of_vllm(message: dict[str, Any], error: str) -> None:
    with pytest.raises(EngineError, match=error):
        VLLM.read(message)


def test_vllm_reports_in_a_reply_that_its_compute_process_ended() -> None:
    message = {"message": "EngineCore encountered an issue.", "type": "InternalServerError"}
    with pytest.raises(EngineUnreachable, match="it is broken: EngineCore encountered an issue"):
        VLLM.read({"error": message | {"code": 500}})
    with pytest.raises(EngineError, match="the reply is") as raised:
        VLLM.read({"error": message | {"code": 400}})
    assert not isinstance(raised.value, EngineUnreachable)


def test_errors_inside_a_stream_of_sglang() -> None:
    with pytest.raises(EngineError, match="too long"):
        SGLANG.read({"error": {"message": "too long"}})


def test_versions_and_digests() -> None:
    for dialect in (SGLANG, VLLM):
        assert dialect.held_version({"weight_version": "12"}) == 12
        with pytest.raises(VersionMismatch, match="'default'"):
            dialect.held_version({"weight_version": "default"})
        assert dialect.engine_version({"version": "1.2"}) == "1.2"
        assert dialect.engine_name({"version": "1.2"}) == dialect.name
    assert SGLANG.engine_name({"engine": "embedded"}) == "embedded"
    assert SGLANG.read_digest({"checksum": "xxh3_128:aa"}) == Digest("xxh3_128:aa")
    ranks = [{"per_gpu_checksum": "b", "checksums": {}}, {"per_gpu_checksum": "a"}]
    assert SGLANG.read_digest({"success": True, "ranks": ranks}) == Digest("a b")
    assert SGLANG.read_digest({"success": False}) is None
    assert VLLM.read_digest({"checksums": {"y": "2", "x": "1"}}) == Digest("x=1 y=2")
    of_some = VLLM.read_digest({"checksums": {"repacked": OF_NOTHING, "x": "1"}})
    assert of_some == Digest(f"repacked={OF_NOTHING} x=1", whole=False)
    assert VLLM.read_digest({}) is None

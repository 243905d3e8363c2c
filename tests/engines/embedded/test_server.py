"""The engine as a process: HTTP in, HTTP out, through pauses, updates, refusals and deaths."""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx2
import pytest
import torch
from fastapi.routing import APIRoute
from transformers import PreTrainedModel

from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.client.engine_client import (
    EngineClient,
    EngineError,
    EngineUnreachable,
    VersionMismatch,
)
from areal_lab.engines.client.resubmit import merged_samples, remaining_requests
from areal_lab.engines.embedded import app as embedded_app
from areal_lab.engines.embedded.app import create_app
from areal_lab.engines.embedded.batcher import Refused
from areal_lab.engines.embedded.received import receiving_device
from areal_lab.engines.embedded.scheduler import Scheduler
from areal_lab.engines.embedded.server import listen
from areal_lab.engines.keys import authorization
from areal_lab.engines.launch.backends import ServerOptions
from areal_lab.engines.launch.start import EngineProcess, bind, launch_engine
from areal_lab.engines.protocol import Generated, GenerateRequest, PauseMode, WeightsFolder
from areal_lab.engines.weights.folder import write_weights
from areal_lab.host.processes import ChildDied
from tests.data.byte_tokenizer import byte_tokenizer, save_byte_tokenizer
from tests.data.test_stop_strings import decoding_everything
from tests.engines.tiny import END_TOKEN, plain_logprobs, request, tiny_model
from tests.fuzz import damaged_bytes, damaged_json, mutations, one_line

BOUND_MS = 20_000
LONG = 200
"""Tokens of a response that is still running when something happens to it."""


@dataclass(frozen=True)
class Lab:
    """One server for the whole module, and the weights for it."""

    loop: asyncio.AbstractEventLoop
    engine: EngineProcess
    root: Path
    whole: list[tuple[GenerateRequest, list[int]]] = field(default_factory=list)
    """Responses of version 0 that only their length ended."""

    @property
    def client(self) -> EngineClient:
        return self.engine.client

    def http(self) -> httpx2.AsyncClient:
        """Plain requests with the key."""
        return httpx2.AsyncClient(
            base_url=self.engine.base_url, headers=authorization(self.client.key), timeout=60
        )

    def run(self, scenario: Awaitable[None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):
                await scenario

        self.loop.run_until_complete(bounded())

    def weights(self, version: int) -> tuple[WeightsFolder, PreTrainedModel]:
        """Version v has the random weights of seed v."""
        model = tiny_model(seed=version)
        return write_weights(model, self.root, version, dtype=torch.float32), model


async def launch(
    weights: WeightsFolder,
    log_path: Path,
    *,
    port: int = 0,
    tokenizer: Path | None = None,
    cache_limit_bytes: int | None = None,
) -> EngineProcess:
    return await launch_engine(
        "embedded",
        ServerOptions(
            model=weights.path,
            version=str(weights.version),
            port=port,
            max_running_requests=4,
            tokenizer=tokenizer,
            cache_limit_bytes=cache_limit_bytes,
        ),
        log_path=log_path,
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("engine")
    weights = write_weights(tiny_model(seed=0), folder, 0, dtype=torch.float32)
    save_byte_tokenizer(folder / "tokenizer")
    with asyncio.Runner() as runner:
        engine = runner.run(launch(weights, folder / "engine.log", tokenizer=folder / "tokenizer"))
        yield Lab(runner.get_loop(), engine, folder)
        runner.run(engine.stop())


@pytest.fixture(autouse=True)
def base_weights(request: pytest.FixtureRequest) -> None:
    """Every test of the shared server starts with version 0."""
    if "lab" in request.fixturenames:
        lab: Lab = request.getfixturevalue("lab")
        lab.run(load(lab, 0))


async def load(lab: Lab, version: int, mode: PauseMode = PauseMode.RETRACT) -> None:
    weights, _ = lab.weights(version)
    assert await lab.client.load_weights(weights, mode) == version


async def running(lab: Lab, count: int, tokens: int = 2) -> None:
    """Until `count` requests decode and have some tokens."""
    start = (await lab.client.statistics())["generated_tokens"]
    while True:
        now = await lab.client.statistics()
        if now["running_requests"] == count and now["generated_tokens"] - start >= tokens * count:
            return


@asynccontextmanager
async def started(
    lab: Lab, requests: list[GenerateRequest]
) -> AsyncIterator[asyncio.Task[list[Generated]]]:
    """Requests on their way, seen running."""
    task = asyncio.create_task(lab.client.generate(requests))
    await running(lab, len(requests))
    yield task
    await task


def segment_error(
    model: PreTrainedModel, prompt: list[int], result: Generated, index: int
) -> float:
    """Largest difference of a segment's log-probs from a plain forward of this model."""
    tokens = [token for segment in result.segments for token in segment.tokens]
    first = sum(len(segment.tokens) for segment in result.segments[:index])
    segment = result.segments[index]
    plain = plain_logprobs(model, prompt, tokens)[first : first + len(segment.tokens)]
    return float((plain - torch.tensor(segment.logprobs)).abs().max())


# --- generating ---


def test_a_batch_comes_back_in_order_with_true_logprobs(lab: Lab) -> None:
    async def scenario() -> None:
        prompts = [[5, 6, 7], [5, 6, 8, 9], [11], [5, 6, 7], [12, 13]]
        requests = [request(f"r{i}", p, 3 + i, seed=i) for i, p in enumerate(prompts)]
        results = await lab.client.generate(requests)
        for index, (one, result) in enumerate(zip(requests, results, strict=True)):
            assert result.request_id == one.request_id
            assert [s.version for s in result.segments] == [0]
            assert len(result.segments[0].tokens) == 3 + index
            assert segment_error(tiny_model(seed=0), prompts[index], result, 0) < 1e-5

    lab.run(scenario())


def test_nccl_writes_to_the_engines_gpu_and_others_to_main_memory() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert receiving_device("nccl", gpu) == gpu
    assert receiving_device("gloo", gpu) == receiving_device("gloo", cpu) == cpu
    with pytest.raises(Refused, match="this engine computes on the cpu; take gloo"):
        receiving_device("nccl", cpu)


def test_the_reply_has_sglangs_fields(lab: Lab) -> None:
    async def scenario() -> None:
        async with lab.http() as http:
            body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}}
            answer = (await http.post("/generate", json=body)).json()
            info = (await http.get("/model_info")).json()
            health = await http.get("/health")
        meta = answer["meta_info"]
        assert len(answer["output_ids"]) == meta["completion_tokens"]
        assert meta["prompt_tokens"] == 3
        assert meta["weight_version"] == "0"
        assert meta["weight_versions"] == [
            {"version": "0", "start": 0, "end": meta["completion_tokens"]}
        ]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
        assert meta["num_retractions"] == 0
        assert meta["e2e_latency"] > 0
        assert info["weight_version"] == "0"
        assert info["dtype"] == "float32"
        assert info["device"] == "cpu"
        assert health.status_code == httpx2.codes.OK

    lab.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/generate", {}, "input_ids is missing"),
        ("/generate", {"input_ids": []}, "empty prompt"),
        ("/generate", {"input_ids": [[5], []]}, "empty prompt"),
        ("/generate", {"input_ids": [5, 970]}, "token 970"),
        ("/generate", {"input_ids": ["a"]}, "input_ids.0 is 'a', but must be a valid integer"),
        ("/generate", {"input_ids": [[5], [6]], "rid": ["a", "a"]}, "'a' is already in use"),
        ("/generate", {"input_ids": [[5], [6]], "rid": ["a"]}, "rid has 1 entries for 2 prompts"),
        ("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 999}}, "context"),
        ("/generate", {"input_ids": [5], "sampling_params": {"top_p": 0}}, "top_p is 0"),
        ("/generate", {"input_ids": [5], "sampling_params": {"min_p": 0.1}}, "min_p is not known"),
        ("/generate", {"input_ids": [5], "sampling_params": {"top_k": True}}, "top_k is True"),
        ("/generate", {"input_ids": [5], "sampling_params": {"top_k": "5"}}, "top_k is '5'"),
        (
            "/generate",
            {"input_ids": [5], "sampling_params": 3},
            "sampling_params is 3, but must be",
        ),
        ("/generate", {"input_ids": [5], "stream": "false"}, "stream is 'false', but must be a"),
        ("/generate", {"input_ids": [[5], [6]], "stream": 1}, "stream is 1, but must be a valid"),
        ("/pause_generation", {"mode": "later"}, "mode is 'later', but must be 'retract', 'abort'"),
        ("/abort_request", {}, "needs rid (a request id) or abort_all"),
        ("/update_weights_from_disk", {}, "model_path is missing"),
        ("/weights_checker", {"action": "guess"}, "action is 'guess', but must be 'checksum'"),
        ("/init_weights_update_group", {"group_name": "g"}, "master_address is missing"),
        (
            "/init_weights_update_group",
            {
                "group_name": "g",
                "master_address": "127.0.0.1",
                "master_port": 1,
                "rank_offset": 1,
                "world_size": 2,
            },
            "the group's backend is nccl, but this engine computes on the cpu; take gloo",
        ),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}, "at least 1 item"),
    ],
)
def test_bad_requests_get_one_line(
    lab: Lab, path: str, body: dict[str, object], message: str
) -> None:
    async def scenario() -> None:
        async with lab.http() as http:
            answer = await http.post(path, json=body)
        assert answer.status_code == httpx2.codes.BAD_REQUEST
        text = answer.json()["error"]["message"]
        assert message in text
        assert "\n" not in text

    lab.run(scenario())


def test_given_tokens_are_scored_while_others_are_generated(lab: Lab) -> None:
    async def scenario() -> None:
        tokens = list(range(5, 45))
        async with started(lab, [request("a", [5, 6], LONG)]):
            found = await lab.client.token_logprobs(tokens, start=7, top=2)
        assert found.version == 0
        assert [len(top) for top in found.top] == [2] * 33
        wanted = plain_logprobs(tiny_model(seed=0), tokens[:7], tokens[7:]).tolist()
        assert list(found.logprobs) == pytest.approx(wanted, abs=1e-4)
        with pytest.raises(EngineError, match="tokens must be in"):
            await lab.client.token_logprobs([5, 1000])
        await load(lab, 1)
        assert (await lab.client.token_logprobs(tokens)).version == 1

    lab.run(scenario())


async def sampled(http: httpx2.AsyncClient) -> list[int]:
    """The tokens of a valid request, which are always the same."""
    sampling = {"max_new_tokens": 5, "temperature": 0.7, "top_p": 0.9, "sampling_seed": 3}
    answer = await http.post("/generate", json={"input_ids": [5, 6], "sampling_params": sampling})
    assert answer.status_code == httpx2.codes.OK, answer.text
    tokens: list[int] = answer.json()["output_ids"]
    return tokens


HOSTILE = (
    *('{"temperature": 1e-40}', '{"temperature": 1e-6}', '{"temperature": NaN}'),
    *('{"temperature": Infinity}', '{"temperature": 1e39}', '{"temperature": -1e-50}'),
    *('{"temperature": 1e400}', f'{{"temperature": {"9" * 400}}}', '{"temperature": -0.0001}'),
    *('{"top_p": 1e-46}', '{"top_p": 1e-310}', '{"top_p": NaN}', '{"top_p": 1.0000001}'),
    *(f'{{"top_k": {10**30}}}', '{"top_k": 0}', f'{{"max_new_tokens": {2**64}}}'),
    *(f'{{"sampling_seed": {10**30}}}', f'{{"stop_token_ids": [{2**70}]}}'),
    *('{"stop_token_ids": [-1]}', '{"logit_bias": {"5": NaN}}', '{"logit_bias": {"x": -1e9}}'),
    *('{"logit_bias": {"5": -1e9}}', '{"stop": "\\ud800"}', '{"stop": ["a", "\\udfff"]}'),
    *(f'{{"stop": "{"x" * 2000}"}}', f'{{"stop": {json.dumps(["a"] * 300)}}}', '{"\\ud800": 1}'),
    *(f'{{"stream_interval": {10**20}}}', "[" * 5000 + "]" * 5000),
    json.dumps({f"k{i}": i for i in range(5000)}),
)
"""Sampling parameters that nothing can be sampled with."""


def test_sampling_parameters_that_cannot_be_served_are_refused_and_the_engine_lives(
    lab: Lab,
) -> None:
    async def scenario() -> None:
        async with lab.http() as http:
            expected = await sampled(http)
            json_type = {"content-type": "application/json"}
            for text in HOSTILE:
                for prompts in ("[5]", "[[5], [6]]"):
                    for stream in ("false", "true"):
                        body = f'{{"input_ids": {prompts}, "stream": {stream}, "sampling_params": '
                        answer = await http.post(
                            "/generate",
                            content=f"{body}{text}}}",
                            headers=json_type,
                        )
                        assert answer.status_code == httpx2.codes.BAD_REQUEST, (text, answer.text)
                        assert len(answer.text) < 1000
            for rid in ('"\\ud800"', '""', json.dumps("x" * 5000)):
                answer = await http.post(
                    "/generate", content=f'{{"input_ids": [5], "rid": {rid}}}', headers=json_type
                )
                assert answer.status_code == httpx2.codes.BAD_REQUEST, rid
                assert "rid is " in answer.json()["error"]["message"]
            assert await sampled(http) == expected

    lab.run(scenario())


GENERATE = {
    "input_ids": [5, 6, 7],
    "rid": "r",
    "sampling_params": {
        "max_new_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "stop": ["ab", "c"],
        "stop_token_ids": [3],
        "ignore_eos": False,
        "sampling_seed": 5,
        "logit_bias": {},
        "stream_interval": 1,
    },
    "image_data": None,
    "stream": False,
}
OTHERS = {
    "/generate": {"input_ids": [[5], [6, 7]], "sampling_params": {"max_new_tokens": 1}},
    "/abort_request": {"rid": "x", "abort_all": False},
    "/update_weights_from_disk": {"model_path": "/nowhere", "weight_version": "1"},
    "/weights_checker": {"action": "checksum"},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["AAAA"], "weight_version": "1"},
    "/update_weights_from_distributed": {
        "group_name": "g",
        "names": ["a"],
        "dtypes": ["float32"],
        "shapes": [[1]],
    },
    "/continue_generation": {},
    "/spans?since=0": None,
}


@mutations
def test_no_body_stops_an_engine_or_changes_what_others_sample(lab: Lab, count: int) -> None:
    rng = random.Random(0)

    async def one(http: httpx2.AsyncClient) -> bool:
        """Return whether the request validly aborted every other: damage can set `abort_all`."""
        path, body = rng.choice([("/generate", GENERATE)] * len(OTHERS) + list(OTHERS.items()))
        if body is None:
            digits = rng.choice(("-1", "1e5", "9" * 5000, "%ff", str(10**30)))
            answer = await http.get(path.replace("0", digits))
        else:
            body = damaged_json(rng, body) if rng.randrange(8) else body
            content = json.dumps(body).encode()
            content = damaged_bytes(rng, content) if rng.randrange(2) else content
            headers = {"content-type": "application/json"}
            answer = await http.post(path, content=content, headers=headers)
        assert answer.status_code in (200, 400, 409, 422), (path, body, answer.text)
        if answer.is_error:
            told = answer.json()
            message = told["message"] if "success" in told else told["error"]["message"]
            assert one_line(ValueError(message)), answer.text
            return False
        return path == "/abort_request" and bool(json.loads(content).get("abort_all"))

    async def scenario() -> None:
        async with lab.http() as http:
            expected = await sampled(http)
            for start in range(0, count, 50):
                # Side by side, so that they share steps.
                for _ in range(start, start + 50, 10):
                    damaged = asyncio.gather(*[one(http) for _ in range(10)])
                    aborted, tokens = await asyncio.gather(damaged, sampled(http))
                    whole = len(tokens) if any(aborted) else len(expected)
                    assert tokens == expected[:whole]
            assert await sampled(http) == expected

    async def bounded() -> None:
        async with asyncio.timeout(600):
            await scenario()

    lab.loop.run_until_complete(bounded())


@pytest.mark.parametrize("path", ["/generate", "/pause_generation"])
def test_a_body_that_is_not_json_is_named_so(lab: Lab, path: str) -> None:
    async def scenario() -> None:
        async with lab.http() as http:
            json_type = {"content-type": "application/json"}
            answer = await http.post(path, content=b"{'", headers=json_type)
            untyped = await http.post(path, content=b'{"input_ids": [5], "mode": "abort"}')
        assert answer.status_code == httpx2.codes.BAD_REQUEST
        assert answer.json()["error"]["message"].startswith("the body is not JSON: Expecting ")
        assert untyped.status_code == httpx2.codes.UNSUPPORTED_MEDIA_TYPE
        assert "content-type is '', but must be application/json" in untyped.text

    lab.run(scenario())


def test_an_endless_body_is_refused_except_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_app, "MOST_BODY_BYTES", 1000)
    scheduler = Scheduler(lambda: pytest.fail("nothing is computed"), threads=1)
    app = create_app(scheduler, model_path="")

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    async def scenario() -> None:
        transport = httpx2.ASGITransport(app)
        json_type = {"content-type": "application/json"}
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://engine", headers=json_type
        ) as http:
            for path in ("/generate", "/pause_generation", "/init_weights_update_group"):
                answer = await http.post(path, content=endless())
                assert answer.status_code == 413
                assert "the body has more than 1000 bytes" in answer.text
            answer = await http.post("/update_weights_from_tensor", content=endless())
            assert answer.status_code == httpx2.codes.BAD_REQUEST

    asyncio.run(scenario())


# --- pauses, weights, aborts ---


def test_retract_update_continue(lab: Lab) -> None:
    """Later tokens are those of the new weights; the stretches carry the engine's versions."""

    async def scenario() -> None:
        weights, new = lab.weights(1)
        prompts = [[5, 6, 7], [8, 9]]
        requests = [request(f"r{i}", p, LONG, seed=i) for i, p in enumerate(prompts)]
        async with started(lab, requests) as answers:
            await lab.client.pause(PauseMode.RETRACT)
            held = asyncio.create_task(lab.client.generate([request("held", [3, 4], 5)]))
            await lab.client.load_weights(weights, PauseMode.RETRACT)
            assert (await lab.client.statistics())["running_requests"] == 0
            assert not held.done()
            await lab.client.resume()
        for prompt, result in zip(prompts, answers.result(), strict=True):
            assert [segment.version for segment in result.segments] == [0, 1]
            assert sum(len(segment.tokens) for segment in result.segments) == LONG
            assert result.retractions == 1
            assert segment_error(tiny_model(seed=0), prompt, result, 0) < 1e-4
            assert segment_error(new, prompt, result, 1) < 1e-4
        assert [segment.version for segment in (await held)[0].segments] == [1]

    lab.run(scenario())


def test_abort_pause_is_resubmitted_by_the_client(lab: Lab) -> None:
    async def scenario() -> None:
        weights, new = lab.weights(1)
        prompt = [5, 6, 7]
        async with started(lab, [request("r", prompt, LONG, seed=3)]) as answers:
            await lab.client.pause(PauseMode.ABORT)
            await lab.client.load_weights(weights, PauseMode.ABORT)
            await lab.client.resume()
        (result,) = answers.result()
        assert [segment.version for segment in result.segments] == [0, 1]
        assert sum(len(segment.tokens) for segment in result.segments) == LONG
        assert result.finish_reason == "length"
        assert segment_error(new, prompt, result, 1) < 1e-4

    lab.run(scenario())


def test_an_abort_pause_without_new_weights_changes_no_token(lab: Lab) -> None:
    async def scenario() -> None:
        one = request("r", [5, 6, 7], LONG, seed=3)
        (undisturbed,) = await lab.client.generate([replace(one, request_id="u")])
        async with started(lab, [one]) as answers:
            await lab.client.pause(PauseMode.ABORT)
            await lab.client.resume()
        (result,) = answers.result()
        assert result.retractions == 1
        (segment,), (expected,) = result.segments, undisturbed.segments
        assert segment.tokens == expected.tokens

    lab.run(scenario())


def test_in_place_continues_with_the_old_cache(lab: Lab) -> None:
    async def scenario() -> None:
        weights, new = lab.weights(1)
        prompt = list(range(2, 40))
        async with started(lab, [request("r", prompt, LONG, seed=3)]) as answers:
            await lab.client.pause(PauseMode.IN_PLACE)
            with pytest.raises(EngineError, match="paused with mode in_place"):
                await lab.client.load_weights(weights, PauseMode.RETRACT)
            assert await lab.client.version() == 0
            await lab.client.load_weights(weights, PauseMode.IN_PLACE)
            await lab.client.resume()
        (result,) = answers.result()
        assert [segment.version for segment in result.segments] == [0, 1]
        assert result.retractions == 0
        assert segment_error(new, prompt, result, 1) > 0.01

    lab.run(scenario())


def test_abort_ends_one_request_and_keeps_what_it_has(lab: Lab) -> None:
    async def scenario() -> None:
        requests = [request("r1", [5, 6, 7], LONG), request("r10", [8, 9], LONG)]
        async with started(lab, requests) as answers:
            await lab.client.abort(["r1", "unknown"])
        aborted, whole = answers.result()
        assert aborted.finish_reason == "abort"
        assert 0 < len(aborted.segments[0].tokens) < LONG
        assert whole.finish_reason == "length"

    lab.run(scenario())


def test_a_client_that_hangs_up_frees_its_rows(lab: Lab) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(lab.client.generate([request("r", [5, 6, 7], LONG)]))
        await running(lab, 1)
        before = (await lab.client.statistics())["generated_tokens"]
        task.cancel()
        while (now := await lab.client.statistics())["running_requests"]:
            pass
        assert now["generated_tokens"] - before < LONG

    lab.run(scenario())


async def update_bare(lab: Lab, weights: WeightsFolder) -> httpx2.Response:
    """An update as another client could ask for it; ours pauses the engine first."""
    async with lab.http() as http:
        body = {"model_path": str(weights.path), "weight_version": str(weights.version)}
        return await http.post("/update_weights_from_disk", json=body)


def test_an_update_without_a_pause_waits_for_running_requests(lab: Lab) -> None:
    async def scenario() -> None:
        weights, _ = lab.weights(1)
        async with started(lab, [request("r", [5, 6, 7], LONG)]) as answers:
            update = asyncio.create_task(update_bare(lab, weights))
            await answers
            assert (await update).json()["success"]
        (result,) = answers.result()
        assert [segment.version for segment in result.segments] == [0]

    lab.run(scenario())


def test_a_damaged_folder_leaves_the_old_weights_serving(lab: Lab) -> None:
    async def scenario() -> None:
        weights, _ = lab.weights(1)
        file = weights.path / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-3] ^= 64
        file.write_bytes(content)
        with pytest.raises(EngineError, match="is damaged") as raised:
            await lab.client.load_weights(weights, PauseMode.RETRACT)
        assert not isinstance(raised.value, VersionMismatch)
        with pytest.raises(EngineError, match=r"has no \*\.safetensors"):
            await lab.client.load_weights(
                replace(weights, path=lab.root / "nowhere"), PauseMode.RETRACT
            )
        assert await lab.client.version() == 0
        (result,) = await lab.client.generate([request("r", [5, 6], 5)])
        assert segment_error(tiny_model(seed=0), [5, 6], result, 0) < 1e-5

    lab.run(scenario())


def test_activity_of_the_engine_is_reported_in_order(lab: Lab) -> None:
    async def scenario() -> None:
        await lab.client.generate([request("r", [5, 6, 7], 20)])
        spans, following = await lab.client.spans()
        assert {"prefill", "decode", "load_weights"} <= {span["name"] for span in spans}
        assert [span["id"] for span in spans] == list(range(following + 1))
        edges = [edge for span in spans for edge in (span["start_s"], span["end_s"])]
        assert edges == sorted(edges)
        assert (await lab.client.spans(following))[0][0]["id"] == following

    lab.run(scenario())


# --- stop strings ---

CODEC = TextCodec(byte_tokenizer())


async def stopping_after(lab: Lab, start: int) -> tuple[GenerateRequest, list[int]]:
    """A request with a stop string that appears after `start` tokens, and its tokens: those of the
    response without it, up to where decoding every prefix finds it."""
    if not lab.whole:
        asked = [request(f"whole{seed}", [5, 6, 7], LONG, seed=seed) for seed in range(16)]
        for one, sample in zip(asked, await lab.client.generate(asked), strict=True):
            lab.whole.append((one, [t for segment in sample.segments for t in segment.tokens]))
    for one, tokens in lab.whole:
        stop = CODEC.decode_all(tokens[start : start + 4])
        end = decoding_everything(CODEC, [stop], tokens)
        if start < end and END_TOKEN not in tokens[:end] and "\ufffd" not in stop:
            sampling = replace(one.sampling, stop=(stop,), ignore_eos=False)
            return replace(one, request_id="r", sampling=sampling), tokens[:end]
    raise AssertionError("every response has an end token early")


@pytest.mark.parametrize("mode", PauseMode)
def test_a_stop_string_ends_a_response_that_was_interrupted(lab: Lab, mode: PauseMode) -> None:
    """At the same token as without the interruption, here without new weights."""

    async def scenario() -> None:
        one, tokens = await stopping_after(lab, 60)
        async with started(lab, [one]) as answers:
            await lab.client.pause(mode)
            await lab.client.resume()
        (result,) = answers.result()
        found = [token for segment in result.segments for token in segment.tokens]
        assert (found, result.finish_reason) == (tokens, "stop")

    lab.run(scenario())


@pytest.mark.parametrize("split", range(1, 4))
def test_a_stop_string_may_span_two_requests(lab: Lab, split: int) -> None:
    """As after a lost engine: the second request has the first letters in its prompt."""

    async def scenario() -> None:
        one, tokens = await stopping_after(lab, 20)
        shorter = replace(one.sampling, max_new_tokens=len(tokens) - split)
        (begun,) = await lab.client.generate([replace(one, sampling=shorter)])
        partial = {"r": replace(begun, finish_reason="abort")}
        (rest,) = remaining_requests([one], partial)
        generated = {sample.request_id: sample for sample in await lab.client.generate([rest])}
        result = merged_samples([one], partial, generated)["r"]
        found = [token for segment in result.segments for token in segment.tokens]
        assert (found, result.finish_reason) == (tokens, "stop")
        assert remaining_requests([one], {"r": result}) == []

    lab.run(scenario())


def test_the_server_itself_ends_at_a_stop_string(lab: Lab) -> None:
    async def scenario() -> None:
        one, tokens = await stopping_after(lab, 20)
        (stop,) = one.sampling.stop
        params = {"max_new_tokens": LONG, "sampling_seed": one.sampling.seed}
        async with lab.http() as http:
            for value in (stop, [stop, "never here"]):
                body = {"input_ids": [5, 6, 7], "sampling_params": {**params, "stop": value}}
                answer = (await http.post("/generate", json=body)).json()
                assert answer["output_ids"] == tokens
                assert answer["meta_info"]["finish_reason"]["type"] == "stop"

    lab.run(scenario())


# --- the key ---


def endpoints() -> list[tuple[str, str]]:
    """Every path of the server, with a method."""
    app = create_app(Scheduler(lambda: pytest.fail("not started"), threads=1), model_path="")
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    return [(method, route.path) for route in routes for method in route.methods]


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic {}", "{}"])
def test_no_endpoint_replies_without_the_key(lab: Lab, header: str | None) -> None:
    asked = [*endpoints(), ("OPTIONS", "/generate"), ("GET", "/no-such-path")]
    assert ("POST", "/update_weights_from_distributed") in asked
    assert len(asked) > 20
    headers = {} if header is None else {"authorization": header.format(lab.client.key)}

    async def scenario() -> None:
        async with httpx2.AsyncClient(base_url=lab.engine.base_url, headers=headers) as http:
            for method, path in asked:
                answer = await http.request(method, path, json={})
                assert (answer.status_code, path) == (httpx2.codes.UNAUTHORIZED, path)
                assert "Authorization: Bearer KEY" in answer.json()["error"]["message"]
                assert lab.client.key not in answer.text

    lab.run(scenario())


def test_a_stranger_changes_nothing(lab: Lab) -> None:
    """It can neither pause nor load weights, and a running response continues."""

    async def scenario() -> None:
        weights, _ = lab.weights(1)
        stranger = EngineClient(lab.engine.base_url, key="guessed")
        async with started(lab, [request("r", [5, 6, 7], LONG)]) as answers:
            for attempt in (
                stranger.generate([request("s", [5], 2)]),
                stranger.pause(PauseMode.ABORT),
                stranger.load_weights(weights, PauseMode.ABORT),
            ):
                with pytest.raises(
                    EngineError, match=r"refused .* \(401\): the request has no key"
                ):
                    await attempt
        (result,) = answers.result()
        assert [segment.version for segment in result.segments] == [0]
        await stranger.close()

    lab.run(scenario())


def test_the_key_is_in_the_environment_of_the_server_and_nowhere_else(lab: Lab) -> None:
    process = Path(f"/proc/{lab.engine.child.pid}")
    key = lab.client.key.encode()
    assert key not in process.joinpath("cmdline").read_bytes()
    assert process.joinpath("environ").stat().st_mode & 0o077 == 0
    assert key not in lab.engine.child.log_path.read_bytes()
    assert lab.client.key not in repr(lab.engine)


# --- processes ---


def test_a_port_in_use_is_named_before_anything_starts(lab: Lab, tmp_path: Path) -> None:
    port = httpx2.URL(lab.engine.base_url).port
    assert port is not None
    weights, _ = lab.weights(1)

    async def scenario() -> None:
        with pytest.raises(ValueError, match=f"port {port} is not available"):
            await launch(weights, tmp_path / "log", port=port)

    lab.run(scenario())
    assert not (tmp_path / "log").exists()
    with pytest.raises(ValueError, match="port 99999999"):
        bind(99999999)


def test_replies_wait_for_no_acknowledgments() -> None:
    """asyncio sets TCP_NODELAY on connections of a socket that says so, and on no others."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    folder = write_weights(tiny_model(), tmp_path, 0, dtype=torch.float32)
    (folder.path / "model.safetensors").unlink()
    with pytest.raises(ChildDied, match=r"has no weights \(\*\.safetensors\)"):
        asyncio.run(launch(folder, tmp_path / "engine.log"))


PARENT = """
import asyncio, json, signal, sys
from pathlib import Path
from areal_lab.engines.launch.backends import ServerOptions
from areal_lab.engines.launch.start import launch_engine

async def main():
    folder = Path(sys.argv[1])
    engine = await launch_engine(
        "embedded", ServerOptions(model=folder, max_running_requests=1),
        log_path=folder / "engine.log")
    print(engine.child.pid, flush=True)
    signal.pause()

asyncio.run(main())
"""


def test_an_engine_dies_with_its_parent(tmp_path: Path) -> None:
    folder = write_weights(tiny_model(), tmp_path, 0, dtype=torch.float32).path
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(BOUND_MS)
        os.close(pidfd)


def test_an_error_while_computing_ends_the_process_with_its_traceback(tmp_path: Path) -> None:
    """NaN weights give a distribution from which nothing can be sampled. The client's
    connection ends at once, and the port is free again."""
    model = tiny_model()
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    weights = write_weights(model, tmp_path, 0, dtype=torch.float32)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def scenario() -> None:
        engine = await launch(weights, tmp_path / "engine.log", port=port)
        assert engine.base_url.endswith(f":{port}")
        with pytest.raises(EngineUnreachable, match=engine.base_url):
            await engine.client.generate([request("r", [5, 6], 5)])
        died = str(await engine.child.died())
        assert "Traceback" in died
        assert "not finite" in died
        await engine.stop()
        bind(port).close()

    asyncio.run(scenario())

"""The embedded engine on a GPU: true log-probs through HTTP and an interruption, one wait a step,
memory that is given back."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_lab.engines.embedded.batcher import Batcher
from areal_lab.engines.embedded.loading import load_model
from areal_lab.engines.launch.backends import ServerOptions
from areal_lab.engines.launch.start import EngineProcess, launch_engine
from areal_lab.engines.protocol import Generated, GenerateRequest, MemoryTag, PauseMode
from areal_lab.engines.weights.folder import deduplicated_state, write_weights
from tests.engines.tiny import (
    largest_error,
    plain_logprobs,
    ragged_requests,
    request,
    run,
    tiny_model,
)
from tools.gpu_day.record import host_waits

LONG = 200
"""Tokens of a response that is still running when new weights come."""
GPU_SHAPE = {
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1024,
    "max_position_embeddings": 2048,
}
"""130 MB of weights, 131 kB of keys and values a token."""
PROMPT_TOKENS = {"cpu": 32, "cuda": 1024}


@pytest.fixture
def batcher(device: torch.device, tmp_path: Path) -> Callable[..., Batcher]:
    """Make a batcher of a model on the device; on a GPU one whose memory is seen."""

    def make(seed: int = 0, **options: Any) -> Batcher:
        shape = GPU_SHAPE if device.type == "cuda" else {}
        saved = write_weights(tiny_model(seed=seed, **shape), tmp_path, seed, dtype=torch.float32)
        return Batcher(
            load_model(saved.path, torch.float32, device.type), version=str(seed), **options
        )

    return make


def prompts(device: torch.device, count: int, seed: int) -> list[GenerateRequest]:
    """Requests without a common prefix."""
    draw = torch.Generator().manual_seed(seed)
    size = (count, PROMPT_TOKENS[device.type])
    tokens = torch.randint(2, 97, size, generator=draw).tolist()
    return [request(f"{seed}-{n}", prompt, 4, seed=n) for n, prompt in enumerate(tokens)]


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def test_the_host_waits_once_a_decode_step(device: torch.device, tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    saved = write_weights(model, tmp_path, 0, dtype=torch.float32)
    batcher = Batcher(load_model(saved.path, torch.float32, device.type), version="0")
    for one in ragged_requests(6):
        batcher.add(
            dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, max_new_tokens=30))
        )
    batcher.step()
    with host_waits() as waits:
        for _ in range(10):
            batcher.step()
    if device.type == "cuda":
        assert len(waits) == 10, waits
    samples = run(batcher)
    assert len(samples) == 6
    for sample in samples.values():
        assert largest_error(model, sample) < 1e-3


def test_an_interruption_over_http_keeps_tokens_and_true_logprobs(
    device: torch.device, tmp_path: Path
) -> None:
    """Each response has a segment of each version, whose log-probs a plain forward confirms."""
    models = [tiny_model(seed=version) for version in (0, 1)]
    old, new = (
        write_weights(model, tmp_path, version, dtype=torch.float32)
        for version, model in enumerate(models)
    )
    given = [request(f"r{n}", [5 + n, 6, 7], LONG, seed=n) for n in range(4)]

    async def interrupted(engine: EngineProcess) -> list[Generated]:
        task = asyncio.create_task(engine.client.generate(given))
        while (now := await engine.client.statistics())["running_requests"] < len(given) or now[
            "generated_tokens"
        ] < 2 * len(given):
            assert not task.done()
        assert await engine.client.load_weights(new, PauseMode.RETRACT) == 1
        return await task

    async def scenario() -> list[Generated]:
        options = ServerOptions(
            model=old.path, version="0", max_running_requests=4, device=device.type
        )
        engine = await launch_engine("embedded", options, log_path=tmp_path / "engine.log")
        try:
            async with asyncio.timeout(300):
                return await interrupted(engine)
        finally:
            await engine.stop()

    for one, result in zip(given, asyncio.run(scenario()), strict=True):
        assert [segment.version for segment in result.segments] == [0, 1]
        tokens = [token for segment in result.segments for token in segment.tokens]
        assert len(tokens) == LONG
        start = 0
        for segment, model in zip(result.segments, models, strict=True):
            end = start + len(segment.tokens)
            plain = plain_logprobs(model, one.prompt_tokens, tokens)[start:end]
            assert float((plain - torch.tensor(segment.logprobs)).abs().max()) < 1e-3
            start = end


def test_released_memory_is_given_back_and_new_weights_are_used(
    device: torch.device, batcher: Callable[..., Batcher]
) -> None:
    engine, expected = batcher(0), batcher(1)
    requests = prompts(device, 4, 0)
    for one in requests:
        engine.add(one)
    run(engine)
    held = allocated(device)
    engine.pause(PauseMode.ABORT)
    engine.release_memory(tuple(MemoryTag))
    if device.type == "cuda":
        freed = held - allocated(device)
        assert freed >= 100 << 20, "130 MB of weights"
    engine.resume_memory(tuple(MemoryTag))
    engine.replace_weights(deduplicated_state(expected.model), "1", flush=True)
    engine.resume()
    for one in requests:
        engine.add(one)
        expected.add(one)
    theirs = run(expected)
    for name, sample in run(engine).items():
        assert sample.tokens == theirs[name].tokens
        assert sample.logprobs == pytest.approx(theirs[name].logprobs, abs=1e-5)
        assert {span.version for span in sample.spans} == {"1"}


def test_without_memory_left_kept_prefixes_make_room(
    device: torch.device, batcher: Callable[..., Batcher]
) -> None:
    """On a GPU the prefixes of ended requests fill what is left; a step that runs out of memory
    drops them, and generates what it would have with room."""
    engine, room = batcher(kept_prefix_bytes=2 << 30), batcher()
    for one in prompts(device, 4, 0):
        engine.add(one)
    run(engine)
    kept = engine.kept_prefix_bytes
    assert kept > 0
    ballast, ooms = None, 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        # Twice as many rows need as much again as was kept.
        ballast = torch.empty(free - 3 * kept // 4, dtype=torch.uint8, device=device)
        ooms = torch.cuda.memory_stats()["num_ooms"]
    more = prompts(device, 8, 1)
    for one in more:
        engine.add(one)
    found = run(engine)
    if ballast is not None:
        assert torch.cuda.memory_stats()["num_ooms"] > ooms, "the memory was to run out"
    del ballast
    for one in more:
        room.add(one)
    for name, sample in run(room).items():
        assert found[name].error is None
        assert found[name].tokens == sample.tokens

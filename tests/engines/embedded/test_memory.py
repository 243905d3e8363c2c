"""An engine that gives its memory away: what it refuses meanwhile, and what it is given back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
import torch

from areal_lab.engines.client.engine_client import EngineClient, EngineError, VersionMismatch
from areal_lab.engines.embedded.attention import IMPLEMENTATION
from areal_lab.engines.embedded.batcher import Batcher, Refused, WrongMoment
from areal_lab.engines.embedded.loading import RELEASED
from areal_lab.engines.embedded.pages import PAGE_TOKENS, pages_of
from areal_lab.engines.protocol import MemoryTag, PauseMode
from areal_lab.engines.weights.folder import CorruptWeights, deduplicated_state, write_weights
from tests.engines.embedded.test_server import launch
from tests.engines.tiny import plain_logprobs, ragged_requests, request, tiny_model

WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
"""About 34 MB of weights, which is more than a process's memory varies by."""


@pytest.fixture
def batcher() -> Batcher:
    return Batcher(tiny_model(seed=0, tied=True), version="0")


def generate(batcher: Batcher) -> list[int]:
    sample = batcher.add(request("again", [5, 6, 7]))
    while sample.finish_reason is None:
        batcher.step()
    return sample.tokens


def test_released_weights_have_no_memory_and_the_same_place_again(batcher: Batcher) -> None:
    expected = generate(batcher)
    state = {name: value.clone() for name, value in deduplicated_state(batcher.model).items()}
    batcher.release_memory(MemoryTag)
    assert batcher.cache_bytes == 0
    assert sum(parameter.numel() for parameter in batcher.model.parameters()) == 0
    batcher.resume_memory([MemoryTag.WEIGHTS])
    assert {name: value.shape for name, value in deduplicated_state(batcher.model).items()} == {
        name: value.shape for name, value in state.items()
    }
    batcher.replace_weights(state, "1", flush=True)
    batcher.resume_memory([MemoryTag.KV_CACHE])
    assert (batcher.version, batcher.released) == ("1", set())
    assert generate(batcher) == expected


def test_nothing_is_generated_or_loaded_at_the_wrong_moment(batcher: Batcher) -> None:
    batcher.add(request("waits", [1, 2]))
    with pytest.raises(WrongMoment, match="while there are 1 requests; pause with mode abort"):
        batcher.release_memory([MemoryTag.WEIGHTS])
    batcher.abort()
    state = {name: value.clone() for name, value in deduplicated_state(batcher.model).items()}
    batcher.release_memory([MemoryTag.WEIGHTS])
    with pytest.raises(WrongMoment, match="resume it first"):
        batcher.replace_weights(state, "1", flush=True)
    batcher.resume_memory([MemoryTag.WEIGHTS])
    with pytest.raises(WrongMoment, match="load weights first"):
        batcher.check(request("early", [1, 2]))
    with pytest.raises(CorruptWeights):
        batcher.replace_weights({}, "1", flush=True)
    with pytest.raises(Refused, match="need a version"):
        batcher.replace_weights(state, batcher.version, flush=True)
    assert batcher.version == RELEASED
    batcher.replace_weights(state, "1", flush=True)
    batcher.check(request("now", [1, 2]))


async def release(client: EngineClient) -> None:
    await client.pause(PauseMode.ABORT)
    for tag in (MemoryTag.KV_CACHE, MemoryTag.WEIGHTS):
        await client.release_memory(tag)


def test_a_server_gives_its_memory_back_and_generates_with_new_weights(tmp_path: Path) -> None:
    models = [tiny_model(seed=version, **WIDE) for version in (0, 1)]
    first, newer = (
        write_weights(model, tmp_path, version, dtype=torch.float32)
        for version, model in enumerate(models)
    )

    async def scenario() -> None:
        engine = await launch(first, tmp_path / "engine.log")
        client = engine.client
        try:
            await client.generate([request("before", [3, 4, 5])])
            process = psutil.Process(engine.child.pid)
            before = process.memory_info().rss
            with pytest.raises(EngineError, match="needs a pause with mode abort"):
                await client.release_memory(MemoryTag.WEIGHTS)
            await release(client)
            freed = before - process.memory_info().rss
            assert freed >= first.size_bytes
            assert (await client.info())["weight_version"] == RELEASED
            with pytest.raises(VersionMismatch, match="'released' is reported"):
                await client.version()
            assert (await client.statistics())["released"] == ["kv_cache", "weights"]
            assert await client.ready()
            other = EngineClient(client.base_url, key=client.key)
            with pytest.raises(EngineError, match=r"\(409\): .*while the memory .* is released"):
                await other.generate([request("early", [3, 4, 5])])
            await other.close()
            with pytest.raises(EngineError, match="memory of the weights is released"):
                await client.load_weights(newer, PauseMode.ABORT)
            await client.resume_memory(MemoryTag.WEIGHTS)
            assert await client.load_weights(newer, PauseMode.ABORT) == 1
            await client.resume_memory(MemoryTag.KV_CACHE)
            await client.resume()
            (sample,) = await client.generate([request("after", [3, 4, 5])])
            (segment,) = sample.segments
            assert segment.version == 1
            plain = plain_logprobs(models[1], [3, 4, 5], segment.tokens)
            assert float((plain - torch.tensor(segment.logprobs)).abs().max()) < 1e-4
        finally:
            await engine.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("kept", [0, 1 << 30])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_limit_of_the_cache_holds_and_changes_no_token(rows: int, kept: int) -> None:
    requests = ragged_requests(14)

    def generated(**options: int) -> tuple[dict[str, list[int]], int, int]:
        model = tiny_model(seed=0, tied=True)
        model.set_attn_implementation(IMPLEMENTATION)
        batcher = Batcher(model, version="0", kept_prefix_bytes=kept, **options)
        samples = [batcher.add(one) for one in requests]
        most_bytes = most_rows = 0
        while any(sample.finish_reason is None for sample in samples):
            batcher.step()
            most_bytes = max(most_bytes, batcher.cache_bytes)
            most_rows = max(most_rows, len(batcher.running))
        tokens = {sample.request.request_id: sample.tokens for sample in samples}
        return tokens, most_bytes, most_rows

    longest = max(len(one.prompt_tokens) + one.sampling.max_new_tokens for one in requests)
    token_bytes = Batcher(tiny_model(seed=0, tied=True), version="0")._cache.token_bytes
    pages = 1 + rows * pages_of(longest, PAGE_TOKENS)  # one for the rows that pad a batch
    limit = pages * PAGE_TOKENS * token_bytes
    free, free_bytes, free_rows = generated()
    limited, most_bytes, most_rows = generated(cache_limit_bytes=limit)
    assert limited == free
    assert most_bytes <= limit < free_bytes
    assert 1 <= most_rows < free_rows


def test_a_request_beyond_the_limit_of_the_cache_is_refused_with_numbers() -> None:
    token_bytes = Batcher(tiny_model(), version="0")._cache.token_bytes
    limit = 2 * PAGE_TOKENS * token_bytes
    batcher = Batcher(tiny_model(), version="0", cache_limit_bytes=limit)
    # The last token is sampled and never computed.
    batcher.check(request("fits", [5, 6, 7, 8], PAGE_TOKENS - 3))
    message = (
        r"needs 4 \+ 62 tokens \(prompt and max_new_tokens\), but the cache holds 64; raise "
        r"rollout\.cache_gib \(--cache-limit-bytes of a server\)"
    )
    with pytest.raises(Refused, match=message):
        batcher.check(request("long", [5, 6, 7, 8], PAGE_TOKENS - 2))

"""The server with pages, from the setting to the tokens: interruptions again, and its counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from areal_lab.engines.client.engine_client import EngineError
from areal_lab.engines.embedded.batcher import Batcher
from areal_lab.engines.embedded.cache import KVCache
from areal_lab.engines.embedded.pages import PAGE_TOKENS, PagedCache
from areal_lab.engines.weights.folder import write_weights
from tests.data.byte_tokenizer import save_byte_tokenizer
from tests.engines.embedded import test_server
from tests.engines.embedded.test_server import Lab, launch, segment_error
from tests.engines.tiny import SHAPE, request, tiny_model

TOKEN_BYTES = 2 * SHAPE["num_hidden_layers"] * 4 * SHAPE["hidden_size"] // 3
"""Keys and values in float32; 6 query heads have 2 KV heads."""
PAGES = 6
"""One of four running requests of 200 tokens has to wait."""

base_weights = test_server.base_weights
for _name in (
    "test_a_batch_comes_back_in_order_with_true_logprobs",
    "test_retract_update_continue",
    "test_abort_pause_is_resubmitted_by_the_client",
    "test_an_abort_pause_without_new_weights_changes_no_token",
    "test_in_place_continues_with_the_old_cache",
    "test_abort_ends_one_request_and_keeps_what_it_has",
    "test_a_client_that_hangs_up_frees_its_rows",
    "test_an_update_without_a_pause_waits_for_running_requests",
):
    globals()[_name] = getattr(test_server, _name)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A server with pages for all of its requests but few more."""
    folder = tmp_path_factory.mktemp("engine")
    weights = write_weights(tiny_model(seed=0), folder, 0, dtype=torch.float32)
    save_byte_tokenizer(folder / "tokenizer")
    limit_bytes = (1 + 4 * 256 // PAGE_TOKENS) * PAGE_TOKENS * TOKEN_BYTES
    with asyncio.Runner() as runner:
        engine = runner.run(
            launch(
                weights,
                folder / "engine.log",
                tokenizer=folder / "tokenizer",
                cache_limit_bytes=limit_bytes,
            )
        )
        yield Lab(runner.get_loop(), engine, folder)
        runner.run(engine.stop())


def test_a_cpu_without_a_limit_has_contiguous_rows() -> None:
    batcher = Batcher(tiny_model(), version="0")
    assert batcher.cache_limit_bytes is None
    assert isinstance(batcher._cache, KVCache)
    limited = Batcher(tiny_model(), version="0", cache_limit_bytes=1 << 20)
    assert isinstance(limited._cache, PagedCache)


def test_the_server_stays_within_the_limit_and_counts_what_had_to_wait(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("small")
    weights = write_weights(tiny_model(seed=0), folder, 0, dtype=torch.float32)
    limit_bytes = (1 + PAGES) * PAGE_TOKENS * TOKEN_BYTES

    async def scenario() -> None:
        engine = await launch(weights, folder / "engine.log", cache_limit_bytes=limit_bytes)
        try:
            requests = [request(f"r{i}", range(2, 50), 150, seed=i) for i in range(5)]
            results = await engine.client.generate(requests)
            for one, result in zip(requests, results, strict=True):
                (segment,) = result.segments
                assert len(segment.tokens) == 150
                assert segment_error(tiny_model(seed=0), one.prompt_tokens, result, 0) < 1e-4
            counts = await engine.client.statistics()
            assert counts["cache_limit_bytes"] == PAGES * PAGE_TOKENS * TOKEN_BYTES
            assert counts["cache_bytes"] <= counts["cache_limit_bytes"]
            assert counts["cache_waits"] > 0
            assert counts["cache_retractions"] == sum(one.retractions for one in results) > 0
            assert counts["cache_refusals"] == 0
        finally:
            await engine.stop()

    asyncio.run(scenario())


def test_a_request_beyond_the_limit_is_refused_and_counted(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("smaller")
    weights = write_weights(tiny_model(seed=0), folder, 0, dtype=torch.float32)
    limit_bytes = 2 * PAGE_TOKENS * TOKEN_BYTES

    async def scenario() -> None:
        engine = await launch(weights, folder / "engine.log", cache_limit_bytes=limit_bytes)
        try:
            await engine.client.generate([request("fits", range(2, 50), PAGE_TOKENS - 47)])
            with pytest.raises(EngineError, match="the cache holds 64; raise"):
                await engine.client.generate([request("more", range(2, 50), PAGE_TOKENS - 46)])
            assert (await engine.client.statistics())["cache_refusals"] == 1
        finally:
            await engine.stop()

    asyncio.run(scenario())

"""What real servers do to an unwary client, and that ours does not fall for it.

Where a trap can be laid open without harm, the test does so first, with bare HTTP: when an engine
mends it, the test says so. Only then comes what our client does.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from areal_lab.engines.client import EngineClient, EngineError, VersionMismatch
from areal_lab.engines.protocol import Generated, PauseMode
from tests.real_engines.lab import LONG, Lab, request, tokens_of, versions_of

PROMPT = list(range(2, 66))
ANSWERS_S = 10.0
"""A server that answers at all does so within this; SGLang's /health hangs for 20 s."""


async def bare(lab: Lab, path: str, body: dict[str, Any]) -> httpx.Response:
    """A request as anybody could send it."""
    async with httpx.AsyncClient(base_url=lab.engine.base_url, timeout=ANSWERS_S) as http:
        return await http.post(path, json=body)


def test_no_flush_is_asked_for_while_requests_live_in_the_cache(lab: Lab) -> None:
    """SGLang refuses it after it has loaded the weights, and goes on reporting the old version."""

    async def scenario() -> list[Generated]:
        client = lab.client
        before = await client.digest()
        async with lab.running([request("r", PROMPT, LONG)]) as answers:
            await client.pause(PauseMode.IN_PLACE)
            with pytest.raises(EngineError, match="paused with mode in_place"):
                await lab.load(1, PauseMode.RETRACT)
            assert await client.digest() == before
            await client.resume()
        return answers.result()

    (result,) = lab.run(scenario())
    assert versions_of(result) == [0]
    assert lab.errors(0, PROMPT, result).max() < 10 * lab.facts.error


def test_weights_that_changed_behind_a_refusal_are_noticed(sglang: Lab) -> None:
    """Somebody asks for the flush all the same: SGLang answers 400 and names the old version, with
    new weights. Its digest tells."""

    async def scenario() -> None:
        lab, client = sglang, sglang.client
        before = await client.digest()
        async with lab.running([request("r", PROMPT, LONG)]):
            await client.pause(PauseMode.IN_PLACE)
            body = {"model_path": str(lab.weights(1).path), "weight_version": "1"}
            answer = await bare(lab, "/update_weights_from_disk", body)
            assert answer.status_code == httpx.codes.BAD_REQUEST
            assert "cache was not flushed" in answer.json()["message"]
            assert await client.version() == 0
            assert await client.digest() != before
            # The client is told of a refusal, and finds out.
            unfit = lab.unfit_weights(2)
            with pytest.raises(VersionMismatch, match="changed under the old version"):
                await client.load_weights(unfit, PauseMode.IN_PLACE)
            await lab.load(1, PauseMode.IN_PLACE)
            await client.resume()

    sglang.run(scenario())


@pytest.mark.parametrize("mode", list(PauseMode))
def test_later_requests_find_no_stale_prefix(lab: Lab, mode: PauseMode) -> None:
    """SGLang keeps the prefixes of old weights in retract mode, too, unless it is told to flush;
    in place it cannot be, so later requests have prefixes of their own."""

    async def scenario() -> list[Generated]:
        client = lab.client
        await client.generate([request("before", PROMPT, 5)])
        async with lab.running([request("r", PROMPT, 200)]):
            await client.pause(mode)
            await lab.load(1, mode)
            await client.resume()
            during = await client.generate([request("during", PROMPT, 20)])
        return during + await client.generate([request("after", PROMPT, 20)])

    for result in lab.run(scenario()):
        assert versions_of(result) == [1]
        assert lab.errors(1, PROMPT, result).max() < 10 * lab.facts.error


def test_an_update_without_a_pause_does_not_wait_for_answers_to_end(lab: Lab) -> None:
    async def scenario() -> list[Generated]:
        async with lab.running([request("r", PROMPT, 900)]) as answers:
            await lab.load(1)
            assert not answers.done()
        return answers.result()

    (result,) = lab.run(scenario())
    assert versions_of(result) == [0, 1]
    change = len(result.segments[0].tokens)
    assert lab.errors(1, PROMPT, result)[change:].max() < 10 * lab.facts.error


@pytest.mark.parametrize("mode", list(PauseMode))
def test_a_paused_engine_is_seen_to_live(lab: Lab, mode: PauseMode) -> None:
    """While it is paused, SGLang's /health waits for a token in vain, and /ready says no."""

    async def scenario() -> None:
        async with lab.running([request("r", PROMPT, LONG)]):
            await lab.client.pause(mode)
            async with asyncio.timeout(ANSWERS_S):
                assert await lab.client.ready()
                assert await lab.client.version() == 0
                assert await lab.client.digest()
            await lab.client.resume()
        assert await lab.client.ready()

    lab.run(scenario())


def test_requests_that_are_held_outlast_their_time_limit(lab: Lab) -> None:
    """They may be silent for half a second, and are held for three times as long."""

    async def scenario() -> list[Generated]:
        client = EngineClient(lab.engine.base_url, api=lab.client.api, request_timeout_s=0.5)
        await client.pause(PauseMode.RETRACT)
        held = asyncio.create_task(client.generate([request("held", [5, 6], 5)]))
        assert not (await asyncio.wait({held}, timeout=1.5))[0]
        await client.resume()
        result = await held
        await client.close()
        return result

    (result,) = lab.run(scenario())
    assert len(tokens_of(result)) == 5


def test_an_abort_meets_one_request_and_not_those_whose_names_begin_alike(lab: Lab) -> None:
    """SGLang aborts by prefix; vLLM ignores an id that is not its own."""

    async def scenario() -> list[Generated]:
        names = ["g1", "g1-1", "g1-10", "g1-100"]
        async with lab.running([request(name, [5, 6, 7], LONG) for name in names]) as answers:
            await lab.client.abort(["g1-1"])
        return answers.result()

    results = lab.run(scenario())
    assert [result.finish_reason for result in results] == ["length", "abort", "length", "length"]


def test_a_name_can_be_used_again_at_once(lab: Lab) -> None:
    """SGLang aborts, two seconds after a streamed answer has ended, what has its id by then."""

    async def scenario() -> list[Generated]:
        begin_s = asyncio.get_running_loop().time()
        results = []
        while asyncio.get_running_loop().time() - begin_s < 4:
            results += await lab.client.generate([request("same", [5, 6], LONG)])
        return results

    assert {result.finish_reason for result in lab.run(scenario())} == {"length"}


def test_a_sample_aborted_while_it_waits_again_keeps_its_tokens(lab: Lab) -> None:
    """After a retraction it has no place; SGLang then tells its last token once more."""

    async def scenario() -> list[Generated]:
        async with lab.running([request("r", PROMPT, LONG)]) as answers:
            await lab.client.pause(PauseMode.RETRACT)
            await lab.client.abort(["r"])
            await lab.client.resume()
        return answers.result()

    (result,) = lab.run(scenario())
    assert result.finish_reason == "abort"
    assert 0 < len(tokens_of(result)) < LONG
    assert lab.errors(0, PROMPT, result).max() < 10 * lab.facts.error


def test_weights_of_another_shape_are_an_error_and_what_is_held_is_known(lab: Lab) -> None:
    """A folder that is whole and does not fit: either the old weights live on, or the client says
    that they do not."""

    async def scenario() -> tuple[EngineError, str | None, str | None]:
        before = await lab.client.digest()
        with pytest.raises(EngineError) as raised:
            await lab.client.load_weights(lab.unfit_weights(1), PauseMode.RETRACT)
        after = await lab.client.digest()
        if lab.client.api.name == "sglang" or isinstance(raised.value, VersionMismatch):
            await lab.client.resume() if isinstance(raised.value, VersionMismatch) else None
        return raised.value, before, after

    error, before, after = lab.run(scenario())
    assert "\n" not in str(error)
    assert isinstance(error, VersionMismatch) is (before != after)

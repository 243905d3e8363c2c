"""What real servers do to an unwary client, and that ours does not fall for it.

Where a trap can be laid open without harm, the test does so first, with bare HTTP: when an engine
mends it, the test says so. Only then comes what our client does.

SGLang
    a refused flush has loaded the weights       test_weights_that_changed_behind_a_refusal_...
      and reports the old version                test_no_flush_is_asked_for_while_requests_live_...
    retract without a flush: stale prefixes      test_later_requests_find_no_stale_prefix
    in place: stale prefixes for later requests  test_later_requests_find_no_stale_prefix,
                                                 test_requests_held_in_place_find_none_either
    an update without a pause waits for all      test_an_update_without_a_pause_does_not_wait_...
    paused: /health hangs, /ready says no        test_a_paused_engine_is_seen_to_live
    paused: requests are held, time runs on      test_requests_that_are_held_outlast_their_...
    paused in place for 5 minutes: ends itself   an argument of the server (`backends`)
    tensors need a session, which may be open    test_a_session_that_a_dead_trainer_left_open_...
    tensors by handle: the server dies           test_tensors_by_value_leave_the_server_alive
    weights that do not fit are loaded in part   test_weights_of_another_shape_are_refused
    an empty prompt in a batch: the server dies  test_contract: test_what_cannot_be_served_...
    an abort meets every id that begins so       test_an_abort_meets_one_request_and_not_...
    an ended id is aborted two seconds later     test_a_name_can_be_used_again_at_once
    aborted while it waits: last token repeated  test_a_sample_aborted_while_it_waits_again_...
    an aborted sample may have ended             tests/engines/client/test_engine_client.py
    an abort may break the answer to others      tests/engines/client/test_stream.py
    /get_weights_by_name refuses                 never asked; a digest tells (test_contract)
    a dead scheduler takes all processes along   test_faults: computing_killed
    /ready speaks for a hung scheduler           test_faults: stalled
    a schema without a grammar: status 400 in    test_a_refused_schema_is_an_error_of_its_...
      a reply of status 200
vLLM
    aborts ignore an id that is not vLLM's own   test_an_abort_meets_one_request_and_not_...
    keep and reload does not recompute           test_contract: test_exact_modes_recompute_...
    its digest leaves linear layers out          test_contract: test_a_digest_is_of_all_weights_...
    tokens in, tokens out need an argument       an argument of the server (`backends`)
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx2
import pytest
import torch

from areal_lab.engines.client.engine_client import EngineClient, EngineError, VersionMismatch
from areal_lab.engines.client.sglang import SGLANG
from areal_lab.engines.keys import authorization
from areal_lab.engines.protocol import Generated, PauseMode, RequestRefused
from areal_lab.engines.weights.folder import deduplicated_state
from areal_lab.engines.weights.push import Pusher
from areal_lab.engines.weights.records import EngineTarget
from areal_lab.engines.weights.tensor import TensorSender, encode
from tests.real_engines.conftest import only
from tests.real_engines.lab import LONG, LONGEST, Lab, request, tokens_of, versions_of

PROMPT = list(range(2, 66))
ANSWERS_S = 10.0
"""A server that replies does so within this time; SGLang's /health hangs for 20 s."""


async def bare(lab: Lab, path: str, body: dict[str, Any]) -> httpx2.Response:
    """A request as another client could send it."""
    headers = authorization(lab.client.key)
    async with httpx2.AsyncClient(
        base_url=lab.engine.base_url, headers=headers, timeout=ANSWERS_S
    ) as http:
        return await http.post(path, json=body)


def test_no_flush_is_asked_for_while_requests_live_in_the_cache(lab: Lab) -> None:
    """SGLang refuses after it has loaded the weights, and still reports the old version."""

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


@only("sglang")
def test_weights_that_changed_behind_a_refusal_are_noticed(lab: Lab) -> None:
    """If a client requests the flush anyway, SGLang replies 400 and reports the old version, with
    new weights. Its digest tells."""
    flushing = replace(SGLANG, load=lambda weights, _: SGLANG.load(weights, PauseMode.RETRACT))

    async def scenario() -> None:
        client = EngineClient(lab.engine.base_url, api=flushing, key=lab.client.key)
        before = await client.digest()
        async with lab.running([request("r", PROMPT, LONG)]):
            await client.pause(PauseMode.IN_PLACE)
            body = {"model_path": str(lab.weights(1).path), "weight_version": "1"}
            answer = await bare(lab, "/update_weights_from_disk", body)
            assert answer.status_code == httpx2.codes.BAD_REQUEST
            assert "cache was not flushed" in answer.json()["message"]
            assert await client.version() == 0
            assert await client.digest() != before
            # Through our client: it gets a refusal, and detects the change.
            with pytest.raises(VersionMismatch, match="changed under the old version"):
                await client.load_weights(lab.weights(2), PauseMode.IN_PLACE)
            await client.resume()
        await client.close()

    lab.run(scenario())


@pytest.mark.parametrize("mode", list(PauseMode))
def test_later_requests_find_no_stale_prefix(lab: Lab, mode: PauseMode) -> None:
    """SGLang keeps the prefixes of old weights in retract mode too, unless it must flush;
    in place it cannot flush, so later requests use separate prefixes."""

    async def scenario() -> list[Generated]:
        client = lab.client
        await client.generate([request("before", PROMPT, 5)])
        async with lab.running([request("r", PROMPT, 900)]):
            await client.pause(mode)
            await lab.load(1, mode)
            await client.resume()
            during = await client.generate([request("during", PROMPT, 20)])
        return during + await client.generate([request("after", PROMPT, 20)])

    for result in lab.run(scenario()):
        assert versions_of(result) == [1]
        assert lab.errors(1, PROMPT, result).max() < 10 * lab.facts.error


def test_requests_held_in_place_find_none_either(lab: Lab) -> None:
    """They are sent before the update and run after it."""

    async def scenario() -> list[Generated]:
        client = lab.client
        async with lab.running([request("r", PROMPT, 900)]):
            await client.pause(PauseMode.IN_PLACE)
            held = asyncio.create_task(client.generate([request("held", PROMPT, 20)]))
            await lab.load(1, PauseMode.IN_PLACE)
            await client.resume()
        return await held

    (result,) = lab.run(scenario())
    assert versions_of(result) == [1]
    assert lab.errors(1, PROMPT, result).max() < 10 * lab.facts.error


def test_an_update_without_a_pause_does_not_wait_for_responses_to_end(lab: Lab) -> None:
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
        client = EngineClient(
            lab.engine.base_url, api=lab.client.api, request_timeout_s=0.5, key=lab.client.key
        )
        await client.pause(PauseMode.RETRACT)
        held = asyncio.create_task(client.generate([request("held", [5, 6], 5)]))
        assert not (await asyncio.wait({held}, timeout=1.5))[0]
        await client.resume()
        result = await held
        await client.close()
        return result

    (result,) = lab.run(scenario())
    assert len(tokens_of(result)) == 5


def test_an_abort_ends_one_request_and_not_those_with_the_same_prefix(lab: Lab) -> None:
    """SGLang aborts by prefix; vLLM ignores an id that is not its own."""

    async def scenario() -> list[Generated]:
        names = ["g1", "g1-1", "g1-10", "g1-100"]
        async with lab.running([request(name, [5, 6, 7], LONGEST) for name in names]) as answers:
            await lab.client.abort(["g1-1"])
        return answers.result()

    results = lab.run(scenario())
    assert [result.finish_reason for result in results] == ["length", "abort", "length", "length"]


def test_a_name_can_be_used_again_at_once(lab: Lab) -> None:
    """Two seconds after the end of a streamed reply, SGLang aborts any request with its id."""

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
        async with lab.running([request("r", PROMPT, LONGEST)]) as answers:
            await lab.client.pause(PauseMode.RETRACT)
            await lab.client.abort(["r"])
            await lab.client.resume()
        return answers.result()

    (result,) = lab.run(scenario())
    assert result.finish_reason == "abort"
    assert 0 < len(tokens_of(result)) < LONGEST
    assert lab.errors(0, PROMPT, result).max() < 10 * lab.facts.error


def test_weights_of_another_shape_are_refused(lab: Lab) -> None:
    """A whole folder whose tensors do not fit: SGLang loads them as far as they go, says that it
    succeeded and reports the new version."""

    async def scenario() -> list[Generated]:
        before = await lab.client.digest()
        with pytest.raises(EngineError, match="is of another model") as raised:
            await lab.client.load_weights(lab.unfit_weights(1), PauseMode.RETRACT)
        assert type(raised.value) is EngineError
        assert "\n" not in str(raised.value)
        assert await lab.client.digest() == before
        return await lab.client.generate([request("r", [5, 6], 20)])

    (result,) = lab.run(scenario())
    assert lab.errors(0, [5, 6], result).max() < lab.facts.error


@only("embedded", "sglang")
def test_a_session_that_a_dead_trainer_left_open_is_no_obstacle(lab: Lab) -> None:
    """Tensors are refused without a session, and a second one while one is open."""

    async def scenario() -> None:
        await lab.client.pause(PauseMode.RETRACT)
        assert (await bare(lab, "/begin_weight_update", {})).is_success
        assert (await bare(lab, "/begin_weight_update", {})).is_error
        await push(lab, 1)
        await lab.client.confirm_push(1, PauseMode.RETRACT)
        await lab.client.resume()
        await assert_draws(lab, 1)
        encoded = encode(list(deduplicated_state(lab.models[2]).items())[:1]).decode()
        sessionless = {"serialized_named_tensors": [encoded], "flush_cache": False}
        assert (await bare(lab, "/update_weights_from_tensor", sessionless)).is_error
        await assert_draws(lab, 1)

    lab.run(scenario())


@only("embedded", "sglang")
def test_tensors_by_value_leave_the_server_alive(lab: Lab) -> None:
    """SGLang dies of tensors whose memory it is to open by a handle, as torch sends them by
    default; here they come from this process, which is not a parent of the server."""

    async def scenario() -> None:
        async with lab.running([request("r", PROMPT, LONG)]) as answers:
            await lab.client.pause(PauseMode.RETRACT)
            await push(lab, 1)
            await lab.client.confirm_push(1, PauseMode.RETRACT)
            await lab.client.resume()
        assert versions_of(answers.result()[0]) == [0, 1]
        await assert_draws(lab, 1)
        assert await lab.client.ready()

    lab.run(scenario())


async def push(lab: Lab, version: int) -> None:
    """Send a version from this process's memory, as the trainer does."""
    pusher = Pusher(TensorSender(), timeout_s=ANSWERS_S)
    pusher.hold(deduplicated_state(lab.models[version]), version, dtype=torch.float32)
    target = EngineTarget(lab.engine.base_url, key=lab.client.key)
    outcome = await asyncio.to_thread(pusher.push, version, [target], flush_cache=True)
    pusher.close()
    assert outcome.failures == ()


async def assert_draws(lab: Lab, version: int) -> None:
    """The server samples with this version, whatever it reports."""
    (result,) = await lab.client.generate([request("drawn", PROMPT, 20)])
    assert versions_of(result) == [version]
    assert lab.errors(version, PROMPT, result).max() < 10 * lab.facts.error


@only("embedded", "sglang")
def test_a_refused_schema_is_an_error_of_its_request_and_the_server_goes_on(lab: Lab) -> None:
    """The servers of these tests have no tokenizer."""

    async def scenario() -> None:
        assert not await lab.client.enforces_schemas()
        asked = request("r", PROMPT, 4)
        sampling = replace(asked.sampling, json_schema='{"type": "object"}', ignore_eos=False)
        with pytest.raises(RequestRefused, match=lab.client.base_url):
            await lab.client.generate([replace(asked, sampling=sampling)])
        (sample,) = await lab.client.generate([request("s", PROMPT, 4)])
        assert len(sample.tokens) == 4

    lab.run(scenario())

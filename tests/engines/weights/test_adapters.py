"""Adapters by name: the client's requests, waits and checks, against a minimal server.

That real servers behave so is shown in `tests/real_engines/test_adapters.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from areal_lab.engines.client.dialect import Dialect
from areal_lab.engines.client.engine_client import (
    EngineClient,
    EngineError,
    EngineUnreachable,
    VersionMismatch,
)
from areal_lab.engines.client.sglang import SGLANG
from areal_lab.engines.client.vllm import VLLM
from areal_lab.engines.protocol import LoraShape, PauseMode, WeightsFolder
from tests.engines.tiny import request

SHAPE = LoraShape(rank=4, target_modules=("q_proj",))
BASE = "the model"


def adapter(version: int) -> WeightsFolder:
    """Not read by anybody: its checksum is of no kind that the client knows."""
    return WeightsFolder(
        path=Path(f"/w/v{version}"), version=version, checksum="none", size_bytes=1, adapter=SHAPE
    )


@dataclass
class Fake:
    """The part of a server that adapters need. It reports the version that was sent last, whatever
    drew."""

    api: Dialect
    version: str = "0"
    adapters: list[str] = field(default_factory=list)
    drawn_by: list[str] = field(default_factory=list)
    """The adapter that each sample named, or the model."""
    refuse: str = ""
    """A path that is answered with an error."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    holds: bool = False
    """Whether the next sample runs until it is ended."""
    aborts: int = 0
    deaf: int = 0
    """Aborts that it forgets."""
    no_list: bool = False
    """Whether it lists no models."""

    async def __call__(self, http: httpx2.Request) -> httpx2.Response:
        path = http.url.path.removeprefix("/v1") if "lora" in http.url.path else http.url.path
        body = json.loads(http.content or b"{}")
        if self.refuse and path == self.refuse:
            return httpx2.Response(400, json={"error_message": "it is too large"})
        match path:
            case "/load_lora_adapter":
                assert body["lora_path"].startswith("/w/v")
                self.adapters.append(body["lora_name"])
            case "/unload_lora_adapter":
                self.adapters.remove(body["lora_name"])
            case "/v1/models" if self.no_list:
                return httpx2.Response(200, text="a page")
            case "/v1/models":
                listed = [(BASE, None), *((name, BASE) for name in self.adapters)]
                return httpx2.Response(
                    200, json={"data": [{"id": name, "parent": up} for name, up in listed]}
                )
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/model_info" | "/weight_info":
                return httpx2.Response(200, json={"weight_version": self.version})
            case "/abort_request" | "/abort_requests":
                self.aborts += 1
                if self.aborts >= self.deaf:
                    self.ended.set()
            case "/generate" | "/inference/v1/generate":
                return await self._draw(body)
        return httpx2.Response(200, json={"success": True})

    async def _draw(self, body: dict[str, Any]) -> httpx2.Response:
        name = body.get("lora_path") or body.get("model") or BASE
        if name not in (BASE, *self.adapters):
            return httpx2.Response(400, json={"error": {"message": f"{name} is not loaded"}})
        self.drawn_by.append(name)
        self.begun.set()
        reason = "length"
        if self.holds:
            self.holds = False
            await self.ended.wait()
            reason = "abort"
        answer = self._sglang if self.api is SGLANG else self._vllm
        return httpx2.Response(200, json=answer([7, 8], reason))

    def _sglang(self, tokens: list[int], reason: str) -> Any:
        spans = [{"version": self.version, "start": 0, "end": len(tokens)}]
        meta = {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
            "weight_version": self.version,
            "weight_versions": spans,
        }
        return [{"output_ids": tokens, "meta_info": meta}]

    def _vllm(self, tokens: list[int], reason: str) -> Any:
        content = [{"token_id": token, "logprob": -1.0} for token in tokens]
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": content},
            "finish_reason": reason,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
        }
        return {"choices": [choice]}


def play(act: Callable[[EngineClient, Fake], Awaitable[None]], api: Dialect) -> None:
    """One scenario with a client that uses adapters."""

    async def scenario() -> None:
        fake = Fake(api)
        client = EngineClient("http://engine:1", api=api, transport=httpx2.MockTransport(fake))
        client.use_adapters(0)
        try:
            async with asyncio.timeout(30):
                await act(client, fake)
        finally:
            await client.close()

    asyncio.run(scenario())


@pytest.fixture(params=[SGLANG, VLLM], ids=["sglang", "vllm"])
def api(request: pytest.FixtureRequest) -> Dialect:
    dialect: Dialect = request.param
    return dialect


def test_requests_name_the_adapter_and_the_one_before_stays(api: Dialect) -> None:
    async def act(client: EngineClient, fake: Fake) -> None:
        fake.adapters += ["areal_lab-of-a-run-before-v9", "somebody else's"]
        await client.generate([request("zero", [5], 2)])
        for version in (1, 2, 3):
            assert await client.load_weights(adapter(version), PauseMode.ABORT) == version
            (sample,) = await client.generate([request(f"{version}", [5], 2)])
            assert [segment.version for segment in sample.segments] == [version]
        assert [name.rpartition("-")[2] for name in fake.drawn_by] == [BASE, "v1", "v2", "v3"]
        assert [name.rpartition("-")[2] for name in fake.adapters] == [
            "somebody else's",
            "v2",
            "v3",
        ]

    play(act, api)


def test_tokens_are_of_the_adapter_that_was_named_whatever_the_server_says(api: Dialect) -> None:
    """What was sent before an update and answered after it."""

    async def act(client: EngineClient, fake: Fake) -> None:
        await client.load_weights(adapter(1), PauseMode.ABORT)
        fake.holds, fake.deaf = True, 3
        fake.begun.clear()
        drawing = asyncio.create_task(client.generate([request("a", [5], 4)]))
        await fake.begun.wait()
        await client.pause(PauseMode.ABORT)
        # It is held until adapter 2 exists; otherwise it would have been sent again by now.
        await client.load_weights(adapter(2), PauseMode.ABORT)
        assert (len(fake.drawn_by), fake.aborts) == (1, 3)
        await client.resume()
        (sample,) = await drawing
        assert [(s.version, len(s.tokens)) for s in sample.segments] == [(1, 2), (2, 2)]

    play(act, api)


def test_a_request_aborted_while_held_is_never_sent(api: Dialect) -> None:
    async def act(client: EngineClient, fake: Fake) -> None:
        await client.pause(PauseMode.ABORT)
        drawing = asyncio.create_task(client.generate([request(name, [5], 2) for name in "ab"]))
        alone = asyncio.create_task(client.generate([request("c", [5], 2)]))
        await asyncio.sleep(0)
        await client.abort(["a", "c", "never sent"])
        await client.load_weights(adapter(1), PauseMode.ABORT)
        await client.resume()
        a, b = await drawing
        (c,) = await alone
        assert [(one.segments, one.finish_reason) for one in (a, c)] == [((), "abort")] * 2
        assert b.finish_reason == "length"
        assert len(fake.drawn_by) == 1

    play(act, api)


@pytest.mark.parametrize("path", ["/load_lora_adapter", "/unload_lora_adapter"])
def test_a_refusal_keeps_the_previous_adapter_and_waiting_requests_continue(
    api: Dialect, path: str
) -> None:
    async def act(client: EngineClient, fake: Fake) -> None:
        for version in (1, 2):
            await client.load_weights(adapter(version), PauseMode.ABORT)
        fake.refuse = path
        with pytest.raises(EngineError, match=r"adapter of version 3: .*it is too large") as caught:
            await client.load_weights(adapter(3), PauseMode.ABORT)
        assert not isinstance(caught.value, VersionMismatch)
        (sample,) = await client.generate([request("a", [5], 2)])
        assert [segment.version for segment in sample.segments] == [2]

    play(act, api)


def test_a_server_that_does_not_list_the_adapter_holds_something_else(api: Dialect) -> None:
    async def act(client: EngineClient, fake: Fake) -> None:
        class Forgetful(list[str]):
            def append(self, name: str) -> None:
                pass

        fake.adapters = Forgetful()
        with pytest.raises(VersionMismatch, match=r"holds version 1 and the adapters \(none\)"):
            await client.load_weights(adapter(1), PauseMode.ABORT)

    play(act, api)


def test_a_server_that_was_started_again_is_lost_and_its_tokens_are_kept(api: Dialect) -> None:
    async def act(client: EngineClient, fake: Fake) -> None:
        await client.load_weights(adapter(1), PauseMode.ABORT)
        fake.holds = True
        drawing = asyncio.create_task(client.generate([request("a", [5], 4)]))
        await fake.begun.wait()
        await client.pause(PauseMode.ABORT)
        fake.adapters.clear()
        await client.resume()
        with pytest.raises(EngineUnreachable, match="it has lost the adapter") as caught:
            await drawing
        (segment,) = caught.value.partial["a"].segments
        assert (segment.version, segment.tokens) == (1, (7, 8))

    play(act, api)


def test_requests_that_do_not_end_are_waited_for_until_the_timeout(api: Dialect) -> None:
    async def act(client: EngineClient, fake: Fake) -> None:
        fake.holds, fake.deaf = True, 10**6
        client._connection.timeout_s = 0.2
        drawing = asyncio.create_task(client.generate([request("a", [5], 2)]))
        await fake.begun.wait()
        with pytest.raises(EngineUnreachable, match=r"has not ended 1 requests within 0\.2 s"):
            await client.pause(PauseMode.ABORT)
        drawing.cancel()
        await client.generate([request("b", [5], 2)])  # is not held back

    play(act, api)


@pytest.mark.parametrize("how", ["refused", "cancelled"])
def test_after_a_pause_that_came_to_nothing_requests_are_sent(api: Dialect, how: str) -> None:
    async def act(client: EngineClient, fake: Fake) -> None:
        fake.holds, fake.deaf = True, 10**6
        drawing = asyncio.create_task(client.generate([request("a", [5], 2)]))
        await fake.begun.wait()
        if how == "refused":
            fake.refuse = "/abort_request" if api is SGLANG else "/abort_requests"
            with pytest.raises(EngineError, match="it is too large"):
                await client.pause(PauseMode.ABORT)
        else:
            pausing = asyncio.create_task(client.pause(PauseMode.ABORT))
            while not fake.aborts:
                await asyncio.sleep(0)
            pausing.cancel()
            await asyncio.wait({pausing})
        drawing.cancel()
        await client.generate([request("b", [5], 2)])

    play(act, api)


def test_a_version_that_the_server_makes_up_changes_no_label(api: Dialect) -> None:
    async def act(client: EngineClient, fake: Fake) -> None:
        await client.load_weights(adapter(1), PauseMode.ABORT)
        fake.version = "7"
        assert await client.version() == 7
        (sample,) = await client.generate([request("a", [5], 2)])
        assert [segment.version for segment in sample.segments] == [1]

    play(act, api)


def test_a_malformed_list_of_models_is_an_error_of_the_engine(api: Dialect) -> None:
    async def act(client: EngineClient, fake: Fake) -> None:
        fake.no_list = True
        with pytest.raises(EngineError, match="its list of models is"):
            await client.load_weights(adapter(1), PauseMode.ABORT)

    play(act, api)


def test_held_requests_end_when_the_connection_closes(api: Dialect) -> None:
    async def act(client: EngineClient, fake: Fake) -> None:
        await client.pause(PauseMode.ABORT)
        waiting = asyncio.create_task(client.generate([request("a", [5], 2)]))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(EngineUnreachable, match="the connection was closed"):
            await waiting
        assert not fake.drawn_by

    play(act, api)


@pytest.mark.parametrize(
    ("mode", "by_adapter"),
    [(PauseMode.RETRACT, True), (PauseMode.IN_PLACE, True), (PauseMode.ABORT, False)],
)
def test_adapters_need_a_server_for_them_and_abort(
    api: Dialect, mode: PauseMode, by_adapter: bool
) -> None:
    async def act(client: EngineClient, fake: Fake) -> None:
        if not by_adapter:
            client._held.adapter = None
        with pytest.raises(
            EngineError, match="needs a server started with adapters, and pause mode abort"
        ):
            await client.load_weights(adapter(1), mode)
        assert not fake.adapters

    play(act, api)


def test_base_weights_sample_without_an_adapter(api: Dialect, tmp_path: Path) -> None:
    """Who attaches to a server gives it the model that the adapters are to."""
    whole = WeightsFolder(path=tmp_path, version=0, checksum="", size_bytes=0)

    async def act(client: EngineClient, fake: Fake) -> None:
        await client.load_weights(adapter(1), PauseMode.ABORT)
        fake.version = "0"
        await client.load_weights(whole, PauseMode.ABORT)
        await client.generate([request("a", [5], 2)])
        assert fake.drawn_by == [BASE]

    play(act, api)

"""The client of an inference server that speaks SGLang's HTTP protocol: embedded engine or SGLang.

    EngineClient.generate --POST /generate--> server --> Generated, cut by `weight_versions`

One HTTP request per `generate` call, however many samples it has. What the server says about
versions is believed, and compared with what was sent whenever weights are loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import httpx

from areal_lab.control.events import Version
from areal_lab.data.trajectory import FinishReason, Segment
from areal_lab.engines.protocol import (
    Generated,
    GenerateRequest,
    PauseMode,
    SamplingParams,
    WeightsFolder,
)
from areal_lab.engines.resubmit import continuation, merge

_OUR_CHECKSUM = "xxh3_128:"
_CONNECT_S = 10.0
_KEEP_ALIVE_S = 3.0
"""Shorter than the 5 s after which common servers close an idle connection, which a request sent
just then would run into."""
_RID_END = ";"
"""SGLang aborts every request whose id *begins* with the one given: with an end mark, none but one
does."""


class EngineError(RuntimeError):
    """An engine refused or failed; the message names the engine and what was asked."""


class EngineUnreachable(EngineError):
    """The engine's server is gone, or did not answer in time."""


class VersionMismatch(EngineError):
    """An engine holds other weights than those it was sent."""


class EngineClient:
    """An `Engine` over HTTP."""

    def __init__(
        self,
        base_url: str,
        *,
        request_timeout_s: float | None = None,
        control_timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Nothing is sent yet.

        Args:
            base_url: as in `http://127.0.0.1:30000`.
            request_timeout_s: longest wait for an answer of `generate`, pauses included; `None`
                waits as long as the server lives.
            control_timeout_s: longest wait for any other answer; loading weights is one.
            transport: instead of the network, for tests.
        """
        self.base_url = base_url.rstrip("/")
        self._request_timeout_s = request_timeout_s
        self._control_timeout_s = control_timeout_s
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_ALIVE_S),
            trust_env=False,  # engines are addressed directly, never through a proxy
            transport=transport,
        )
        self._abort_pauses = 0
        """Begun and ended ones; odd while one is on its way."""
        self._aborted: set[str] = set()
        self._in_flight: set[str] = set()

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Draw one sample per request, in one HTTP request.

        What an `abort` pause of this client ended is sent again, with the tokens it has.

        Raises:
            EngineUnreachable: if the connection is lost or the answer takes too long.
            EngineError: if the server refuses, or its answer contradicts itself.
        """
        ids = {request.request_id for request in requests}
        self._in_flight |= ids
        try:
            return await self._generate(list(requests))
        finally:
            self._in_flight -= ids
            self._aborted -= ids

    async def pause(self, mode: PauseMode) -> None:
        """Stop decoding; requests sent meanwhile are held by the server."""
        if mode is not PauseMode.ABORT:
            await self._post("/pause_generation", {"mode": mode.value})
            return
        # Counted at both ends: a request sent meanwhile may reach the server before the pause.
        self._abort_pauses += 1
        try:
            await self._post("/pause_generation", {"mode": mode.value})
        finally:
            self._abort_pauses += 1

    async def resume(self) -> None:
        """Go on, with the held requests too."""
        await self._post("/continue_generation", {})

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests now; their `generate` returns what they have."""
        self._aborted |= self._in_flight & set(request_ids)
        await asyncio.gather(
            *(self._post("/abort_request", {"rid": _rid(name)}) for name in request_ids)
        )

    async def load_weights(self, weights: WeightsFolder, mode: PauseMode) -> Version:
        """Load a folder and compare what the engine then reports with it.

        The cache is flushed unless running requests live on in it (`in_place`).

        Raises:
            VersionMismatch: if the version or checksum echoed is not the one sent.
            EngineError: if the engine could not load the weights; it keeps the old ones.
        """
        reply = await self._post(
            "/update_weights_from_disk",
            {
                "model_path": str(weights.path),
                "weight_version": str(weights.version),
                "flush_cache": mode is not PauseMode.IN_PLACE,
            },
        )
        if not reply.get("success"):
            raise EngineError(
                f"engine {self.base_url} did not load version {weights.version}: "
                f"{reply.get('message')}"
            )
        version = await self.version()
        if version != weights.version:
            raise VersionMismatch(
                f"engine {self.base_url} was sent version {weights.version} but holds {version}"
            )
        found = (await self._post("/weights_checker", {"action": "checksum"})).get("checksum")
        if isinstance(found, str) and found.startswith(_OUR_CHECKSUM) and found != weights.checksum:
            raise VersionMismatch(
                f"engine {self.base_url} was sent version {weights.version} with checksum "
                f"{weights.checksum} but holds {found}"
            )
        return version

    async def version(self) -> Version:
        """Version the engine reports now."""
        return _version((await self._get("/model_info")).get("weight_version"), self.base_url)

    async def ready(self) -> bool:
        """Whether the server answers and its model is loaded; never raises for a silent server."""
        try:
            answer = await self._http.get("/ready", timeout=_CONNECT_S)
        except httpx.TransportError:
            return False
        return answer.status_code == httpx.codes.OK

    async def info(self) -> dict[str, Any]:
        """The server's /model_info."""
        return await self._get("/model_info")

    async def statistics(self) -> dict[str, Any]:
        """The server's /server_info; the embedded engine counts requests and tokens there."""
        return await self._get("/server_info")

    async def spans(self, since: int = 0) -> tuple[list[dict[str, Any]], int]:
        """What the embedded engine did from span `since` on, and the next `since`.

        The first span of an answer replaces the last one of the answer before: it may have grown.
        """
        answer = await self._get(f"/spans?since={since}")
        return answer["spans"], answer["next"]

    async def close(self) -> None:
        """Release the connections; the server is stopped by whoever started it."""
        await self._http.aclose()

    # --- below the surface ---

    async def _generate(self, requests: list[GenerateRequest]) -> list[Generated]:
        pauses = self._abort_pauses
        body = generate_body(requests)
        replies = await self._send("POST", "/generate", body, self._request_timeout_s)
        if not isinstance(replies, list) or len(replies) != len(requests):
            raise EngineError(
                f"engine {self.base_url} answered {len(requests)} requests with {replies!r:.200}"
            )
        results = [
            parse_reply(request.request_id, reply, self.base_url)
            for request, reply in zip(requests, replies, strict=True)
        ]
        pausing = pauses % 2 == 1
        if self._abort_pauses == pauses and not pausing:
            return results
        again = [
            index
            for index, result in enumerate(results)
            if result.finish_reason == "abort" and result.request_id not in self._aborted
        ]
        if again:
            rest = await self._generate([continuation(requests[i], results[i]) for i in again])
            for index, more in zip(again, rest, strict=True):
                results[index] = merge(results[index], more)
        return results

    async def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        answer = await self._send("POST", path, body, self._control_timeout_s)
        return answer if isinstance(answer, dict) else {}

    async def _get(self, path: str) -> dict[str, Any]:
        answer = await self._send("GET", path, None, self._control_timeout_s)
        return answer if isinstance(answer, dict) else {}

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> Any:
        try:
            answer = await self._http.request(
                method, path, json=body, timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S)
            )
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise EngineUnreachable(
                f"engine {self.base_url} is unreachable ({method} {path}: {what})"
            ) from error
        if answer.is_error:
            raise EngineError(
                f"engine {self.base_url} refused {method} {path} "
                f"({answer.status_code}): {_error_message(answer)}"
            )
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.json() if is_json else None


def generate_body(requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """The /generate body of a batch."""
    return {
        "rid": [_rid(request.request_id) for request in requests],
        "input_ids": [list(request.prompt_tokens) for request in requests],
        "sampling_params": [_sampling(request.sampling) for request in requests],
        "return_logprob": True,
    }


def parse_reply(request_id: str, reply: Mapping[str, Any], base_url: str) -> Generated:
    """One entry of a /generate answer, checked.

    Raises:
        EngineError: if tokens, log-probs and version spans do not fit each other.
    """
    meta = reply["meta_info"]
    tokens = [int(token) for token in reply["output_ids"]]
    entries = meta.get("output_token_logprobs") or []
    if [int(entry[1]) for entry in entries] != tokens:
        raise EngineError(
            f"engine {base_url}: request {request_id} has {len(tokens)} tokens, "
            f"but log-probs of {len(entries)} others"
        )
    logprobs = [float(entry[0]) for entry in entries]
    spans = meta.get("weight_versions")
    if not spans:  # servers before SGLang 0.5.19
        spans = [{"version": meta.get("weight_version"), "start": 0, "end": len(tokens)}]
    spans = [span for span in spans if span["end"] > span["start"]]
    edges = [0, *(edge for span in spans for edge in (span["start"], span["end"])), len(tokens)]
    if any(end != start for end, start in list(pairwise(edges))[::2]):
        raise EngineError(
            f"engine {base_url}: request {request_id} has {len(tokens)} tokens, "
            f"but its version spans are {spans}"
        )
    return Generated(
        request_id=request_id,
        segments=tuple(
            Segment(
                tokens=tuple(tokens[span["start"] : span["end"]]),
                logprobs=tuple(logprobs[span["start"] : span["end"]]),
                version=_version(span["version"], base_url),
            )
            for span in spans
        ),
        finish_reason=_finish_reason(meta.get("finish_reason"), base_url),
        retractions=int(meta.get("num_retractions") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
    )


def _sampling(params: SamplingParams) -> dict[str, Any]:
    return {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "sampling_seed": params.seed,
    }


def _rid(request_id: str) -> str:
    return request_id + _RID_END


def _version(value: object, base_url: str) -> Version:
    try:
        return int(str(value))
    except ValueError:
        raise VersionMismatch(
            f"engine {base_url} reports weight version {value!r}, which is not a version of ours"
        ) from None


def _finish_reason(value: object, base_url: str) -> FinishReason:
    kind = value.get("type") if isinstance(value, Mapping) else None
    match kind:
        case "stop":
            return "stop"
        case "length":
            return "length"
        case "abort":
            return "abort"
    raise EngineError(f"engine {base_url} gave the finish reason {value!r}")


def _error_message(answer: httpx.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return " ".join(answer.text.split())[:500]
    candidates: Iterable[object] = (
        (body.get("error"), body.get("message"), body.get("detail"))
        if isinstance(body, dict)
        else (body,)
    )
    for found in candidates:
        message = found.get("message") if isinstance(found, dict) else found
        if message:
            return str(message)
    return str(body)[:500]

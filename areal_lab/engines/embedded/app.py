"""The HTTP interface of the embedded engine: the subset of SGLang's protocol that we use.

Handlers only parse, queue and wait; the scheduler's thread computes. Where SGLang and this server
differ, this one is stricter:

- `flush_cache=true` while requests use the cache (after an `in_place` pause) is refused before
  anything changes; SGLang loads the weights and then reports failure.
- After `retract` no stale prefix is shared, with or without `flush_cache`.
- An unknown sampling parameter is refused.
- /release_memory_occupation is refused (409) while there are requests, which end SGLang; so is
  /generate while memory is released.
- The messages of a stream are increments (as SGLang's with --incremental-streaming-output), and
  each names the versions that generated the tokens so far.

A request for log-probs of its prompt (`logprob_start_len`) has one prompt and no new tokens.

In addition to SGLang's: GET /spans returns activity spans; /weights_checker returns our checksum.

Streamed replies: messages with the tokens of each sample since its last message.

scheduler's thread: step, step, step --progress--> event loop: one message for each sample
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_lab.config.sections import shown
from areal_lab.engines.embedded import wire
from areal_lab.engines.embedded.batcher import Batcher, Refused, Sample, WrongMoment
from areal_lab.engines.embedded.received import add_transfer_routes
from areal_lab.engines.embedded.scheduler import Scheduler, Stream
from areal_lab.engines.embedded.scoring import Scores
from areal_lab.engines.launch.backends import EMBEDDED
from areal_lab.engines.protocol import GenerateRequest, MemoryTag, PauseMode, described
from areal_lab.engines.weights.folder import CorruptWeights, checksum, stored_state
from areal_lab.host.asgi import JsonReply

MOST_BODY_BYTES = 256 * 2**20
"""Maximum body of a request; groups of long prompts with repeated images are smaller."""
_WEIGHTS = "/update_weights_from_tensor"
"""Path whose bodies may have any size."""


class _Bodies:
    """Refuse requests with bodies that are too large, before reading them, or are not declared as
    JSON.

    FastAPI treats other types as no body: `/pause_generation` would pause in its default mode.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        most = math.inf if scope.get("path") == _WEIGHTS else MOST_BODY_BYTES
        kind = Headers(scope=scope).get("content-type", "") if "headers" in scope else ""
        received = 0

        async def checked() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise HTTPException(413, f"the body has more than {most} bytes")
            if received and not kind.startswith("application/json"):
                raise HTTPException(
                    415, f"content-type is {shown(kind)}, but must be application/json"
                )
            return message

        await self._app(scope, checked, send)


def create_app(scheduler: Scheduler, *, model_path: str) -> FastAPI:
    """The HTTP interface of a scheduler."""
    app = FastAPI(title="areal_lab embedded engine", openapi_url=None)
    app.add_middleware(_Bodies)
    model_paths = [model_path]

    _add_error_replies(app)

    @app.post("/generate")
    async def generate(request: Request, body: dict[str, Any]) -> Response:
        received_s = time.monotonic()
        if wire.asks_for_scores(body):
            asked = wire.Score.model_validate(body)
            found, at = await asyncio.wrap_future(scheduler.call(partial(_scored, asked=asked)))
            return JsonReply(wire.scores(asked, found, at))
        requests, batch, interval = await _parsed(scheduler, body)
        if interval is not None:
            return await streamed(scheduler, requests, request, interval)
        samples = await _generate_until_disconnect(scheduler, requests, request)
        latency_s = time.monotonic() - received_s
        version = scheduler.version
        replies = [wire.reply(sample, version, latency_s) for sample in samples]
        return JsonReply(replies if batch else replies[0])

    @app.post("/pause_generation")
    async def pause_generation(
        mode: Annotated[PauseMode, Body(embed=True)] = PauseMode.ABORT,
    ) -> Response:
        await asyncio.wrap_future(scheduler.pause(mode))
        return JsonReply({"status": "ok", "message": f"generation is paused ({mode})"})

    @app.post("/continue_generation")
    async def continue_generation() -> Response:
        await asyncio.wrap_future(scheduler.call(lambda batcher: batcher.resume()))
        return JsonReply({"status": "ok", "message": "generation continues"})

    @app.post("/abort_request")
    async def abort_request(
        rid: Annotated[str | None, Body()] = None, abort_all: Annotated[bool, Body()] = False
    ) -> Response:
        if rid is None and not abort_all:
            raise Refused("abort_request needs rid (a request id) or abort_all")
        await asyncio.wrap_future(scheduler.abort(None if abort_all else [str(rid)]))
        return Response()

    @app.post("/update_weights_from_disk")
    async def update_weights_from_disk(
        model_path: Annotated[str, Body()],
        weight_version: Annotated[str | None, Body()] = None,
        flush_cache: Annotated[bool, Body()] = True,
    ) -> Response:
        try:
            message = await asyncio.wrap_future(
                scheduler.load_weights(Path(model_path), weight_version, flush=flush_cache)
            )
        except (Refused, CorruptWeights) as error:
            return JsonReply({"success": False, "message": str(error)}, status_code=400)
        model_paths.append(model_path)
        return JsonReply({"success": True, "message": message, "num_paused_requests": 0})

    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        await asyncio.wrap_future(scheduler.call(lambda batcher: batcher.flush()))
        return Response("Cache flushed.\n")

    @app.post("/release_memory_occupation")
    async def release_memory_occupation(
        tags: Annotated[list[MemoryTag] | None, Body(embed=True)] = None,
    ) -> Response:
        chosen = tags or list(MemoryTag)
        await asyncio.wrap_future(scheduler.call(lambda batcher: batcher.release_memory(chosen)))
        return Response()

    @app.post("/resume_memory_occupation")
    async def resume_memory_occupation(
        tags: Annotated[list[MemoryTag] | None, Body(embed=True)] = None,
    ) -> Response:
        chosen = tags or list(MemoryTag)
        await asyncio.wrap_future(scheduler.call(lambda batcher: batcher.resume_memory(chosen)))
        return Response()

    @app.post("/weights_checker")
    async def weights_checker(
        action: Annotated[Literal["checksum"], Body(embed=True)],  # noqa: ARG001 - the only one
    ) -> Response:
        def compute(batcher: Batcher) -> str:
            if MemoryTag.WEIGHTS in batcher.released:
                raise WrongMoment("the memory of the weights is released")
            return checksum(stored_state(batcher.model))

        value = await asyncio.wrap_future(scheduler.call(compute))
        return JsonReply({"success": True, "message": "", "checksum": value})

    @app.get("/model_info")
    async def model_info() -> Response:
        def describe(batcher: Batcher) -> dict[str, Any]:
            return {
                "model_path": model_paths[-1],
                "is_generation": True,
                "weight_version": batcher.version,
                "dtype": str(batcher.model.dtype).removeprefix("torch."),
                "device": batcher.model.device.type,
                "vocab_size": batcher.vocabulary,
                "context_length": batcher.context_length,
            }

        return JsonReply(await asyncio.wrap_future(scheduler.call(describe)))

    _add_reports(app, scheduler)
    add_transfer_routes(app, scheduler)

    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if scheduler.ready.is_set() else 503)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    return app


def _add_reports(app: FastAPI, scheduler: Scheduler) -> None:
    """Reply to questions about the engine."""

    @app.get("/server_info")
    async def server_info() -> Response:
        return JsonReply(await asyncio.wrap_future(scheduler.call(_statistics)))

    @app.get("/json_schemas")
    async def json_schemas() -> Response:
        enforced = await asyncio.wrap_future(scheduler.call(Batcher.enforces_schemas))
        return JsonReply({"enforced": enforced})

    @app.get("/spans")
    async def spans(since: int = 0) -> Response:
        found = scheduler.activity.since(since)
        return JsonReply(
            {
                "spans": [
                    {
                        "id": s.id,
                        "name": s.name,
                        "start_s": s.start_s,
                        "end_s": s.end_s,
                        "counts": s.counts,
                    }
                    for s in found
                ],
                "next": found[-1].id if found else since,
            }
        )


def _add_error_replies(app: FastAPI) -> None:
    """Reply to errors in one line of JSON."""

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Exception) -> Response:
        status = 409 if isinstance(error, WrongMoment) else 400
        return JsonReply({"error": {"message": str(error)}}, status_code=status)

    @app.exception_handler(HTTPException)
    async def not_served(_: Request, error: Any) -> Response:
        message = str(error.detail)
        return JsonReply({"error": {"message": message}}, status_code=error.status_code)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        message = f"the request failed: {described(error)}"
        return JsonReply({"error": {"message": message}}, status_code=500)

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValidationError)
    async def invalid(request: Request, error: Any) -> Response:
        return await refused(request, Refused(wire.problem(error.errors())))


async def _generate_until_disconnect(
    scheduler: Scheduler, requests: list[GenerateRequest], connection: Request
) -> list[Sample]:
    """Wait for the samples; if the client disconnects first, abort them."""
    done = asyncio.ensure_future(asyncio.wrap_future(scheduler.generate(requests)))
    gone = asyncio.ensure_future(disconnected(connection))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            scheduler.abort([request.request_id for request in requests])
        return await done
    finally:
        gone.cancel()


async def _parsed(
    scheduler: Scheduler, body: dict[str, Any]
) -> tuple[list[GenerateRequest], bool, int | None]:
    """`wire.parse_generate`; images are decoded and resized in a thread."""
    try:
        return await _read(scheduler, body)
    except (Refused, ValidationError):
        raise
    except Exception as error:
        raise Refused(f"the body cannot be read: {described(error)}") from error


async def _read(
    scheduler: Scheduler, body: dict[str, Any]
) -> tuple[list[GenerateRequest], bool, int | None]:
    if not body.get("image_data"):
        return wire.parse_generate(body)
    vision, pixels = await asyncio.wrap_future(
        scheduler.call(lambda batcher: (batcher.vision, batcher.pixels))
    )

    def parse() -> tuple[list[GenerateRequest], bool, int | None]:
        parsed = wire.parse_generate(body, vision)
        if pixels is not None:
            for placed in {one.image.digest: one for r in parsed[0] for one in r.images}.values():
                pixels.of(placed.image, placed.rows, placed.columns)
        return parsed

    return await asyncio.to_thread(parse)


def _scored(batcher: Batcher, asked: wire.Score) -> tuple[Scores, str]:
    """Score a prompt from the token after its first entry; returns it with the version."""
    if asked.logprob_start_len >= len(asked.input_ids):
        raise Refused(
            f"logprob_start_len is {asked.logprob_start_len}, but must be below "
            f"{len(asked.input_ids)}, the tokens of input_ids"
        )
    start = asked.logprob_start_len + 1
    return batcher.score(asked.input_ids, start=start, top=asked.top_logprobs_num), batcher.version


def _statistics(batcher: Batcher) -> dict[str, Any]:
    return {
        "engine": EMBEDDED.name,  # SGLang, which has the same dialect, does not report this
        "version": version("areal_lab"),
        "weight_version": batcher.version,
        "running_requests": len(batcher.running),
        "waiting_requests": len(batcher.waiting),
        "paused": batcher.paused,
        "generated_tokens": batcher.generated_tokens,
        "prefilled_tokens": batcher.prompt_tokens,
        "cache_bytes": batcher.cache_bytes,
        "kept_prefix_bytes": batcher.kept_prefix_bytes,
        "cache_limit_bytes": batcher.cache_limit_bytes,
        "cache_refusals": batcher.cache_refusals,
        "cache_waits": batcher.cache_waits,
        "cache_retractions": batcher.cache_retractions,
        "skip_tokenizer_init": batcher.codec is None,  # as SGLang reports it
        "released": sorted(batcher.released),
        "max_running_requests": batcher.max_running_requests,
    }


async def streamed(
    scheduler: Scheduler, requests: list[GenerateRequest], connection: Request, interval: int
) -> Response:
    """The reply to these requests as server-sent events, in SGLang's format."""
    loop = asyncio.get_running_loop()
    progress = asyncio.Event()

    def notify() -> None:
        loop.call_soon_threadsafe(progress.set)

    samples = await asyncio.wrap_future(scheduler.generate(requests, Stream(interval, notify)))
    return StreamingResponse(
        _events(scheduler, samples, connection, progress), media_type="text/event-stream"
    )


async def _events(
    scheduler: Scheduler, samples: list[Sample], connection: Request, progress: asyncio.Event
) -> AsyncIterator[bytes]:
    """Messages until all samples have ended; if the client disconnects first, abort them."""
    received_s = time.monotonic()
    sent = [0] * len(samples)
    running = set(range(len(samples)))
    gone = asyncio.ensure_future(disconnected(connection))
    try:
        while running:
            moving = asyncio.ensure_future(progress.wait())
            await asyncio.wait({moving, gone}, return_when=asyncio.FIRST_COMPLETED)
            moving.cancel()
            if gone.done():
                return
            progress.clear()
            for index in sorted(running):
                latency_s = time.monotonic() - received_s
                message = wire.reply(
                    samples[index], scheduler.version, latency_s, start=sent[index], index=index
                )
                meta = message["meta_info"]
                if meta["finish_reason"] is not None:
                    running.discard(index)
                elif meta["completion_tokens"] == sent[index]:
                    continue
                sent[index] = meta["completion_tokens"]
                yield b"data: " + json.dumps(message, separators=(",", ":")).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"
    finally:
        gone.cancel()
        if running:
            scheduler.abort([samples[index].request.request_id for index in running])


async def disconnected(connection: Request) -> None:
    """Wait until the client has disconnected."""
    while (await connection.receive())["type"] != "http.disconnect":
        pass

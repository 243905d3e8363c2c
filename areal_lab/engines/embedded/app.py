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

In addition to SGLang's: GET /spans returns activity spans; /weights_checker returns our checksum.
"""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from areal_lab.engines.embedded import wire
from areal_lab.engines.embedded.batcher import Batcher, Refused, Sample, WrongMoment
from areal_lab.engines.embedded.received import add_transfer_routes
from areal_lab.engines.embedded.scheduler import Scheduler
from areal_lab.engines.embedded.streaming import disconnected, streamed
from areal_lab.engines.launch.backends import EMBEDDED
from areal_lab.engines.protocol import GenerateRequest, MemoryTag, PauseMode
from areal_lab.engines.weights.folder import CorruptWeights, checksum, stored_state


def create_app(scheduler: Scheduler, *, model_path: str) -> FastAPI:
    """The HTTP interface of a scheduler."""
    app = FastAPI(title="areal_lab embedded engine", openapi_url=None)
    model_paths = [model_path]

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Exception) -> Response:
        status = 409 if isinstance(error, WrongMoment) else 400
        return JSONResponse({"error": {"message": str(error)}}, status_code=status)

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValidationError)
    async def invalid(request: Request, error: Any) -> Response:
        return await refused(request, Refused(wire.problem(error.errors())))

    @app.post("/generate")
    async def generate(request: Request, body: dict[str, Any]) -> Response:
        received_s = time.monotonic()
        requests, batch, interval = await _parsed(scheduler, body)
        if interval is not None:
            return await streamed(scheduler, requests, request, interval)
        samples = await _generate_until_disconnect(scheduler, requests, request)
        latency_s = time.monotonic() - received_s
        version = scheduler.version
        replies = [wire.reply(sample, version, latency_s) for sample in samples]
        return JSONResponse(replies if batch else replies[0])

    @app.post("/pause_generation")
    async def pause_generation(
        mode: Annotated[PauseMode, Body(embed=True)] = PauseMode.ABORT,
    ) -> Response:
        await asyncio.wrap_future(scheduler.pause(mode))
        return JSONResponse({"status": "ok", "message": f"generation is paused ({mode})"})

    @app.post("/continue_generation")
    async def continue_generation() -> Response:
        await asyncio.wrap_future(scheduler.call(lambda batcher: batcher.resume()))
        return JSONResponse({"status": "ok", "message": "generation continues"})

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
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        model_paths.append(model_path)
        return JSONResponse({"success": True, "message": message, "num_paused_requests": 0})

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
        return JSONResponse({"success": True, "message": "", "checksum": value})

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

        return JSONResponse(await asyncio.wrap_future(scheduler.call(describe)))

    @app.get("/server_info")
    async def server_info() -> Response:
        return JSONResponse(await asyncio.wrap_future(scheduler.call(_statistics)))

    @app.get("/spans")
    async def spans(since: int = 0) -> Response:
        found = scheduler.activity.since(since)
        return JSONResponse(
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

    add_transfer_routes(app, scheduler)

    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if scheduler.ready.is_set() else 503)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    return app


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
        "skip_tokenizer_init": batcher.codec is None,  # as SGLang reports it
        "released": sorted(batcher.released),
        "max_running_requests": batcher.max_running_requests,
    }

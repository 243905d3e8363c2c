"""Streamed replies: messages with the tokens of each sample since its last message.

scheduler's thread: step, step, step --progress--> event loop: one message for each sample
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from areal_lab.engines.embedded import wire
from areal_lab.engines.embedded.batcher import Sample
from areal_lab.engines.embedded.scheduler import Scheduler, Stream
from areal_lab.engines.protocol import GenerateRequest


async def streamed(
    scheduler: Scheduler, requests: list[GenerateRequest], connection: Request, interval: int
) -> Response:
    """The reply to these requests as server-sent events, in SGLang's format.

    Raises:
        Refused: if one of the requests cannot be served; nothing is sent then.
    """
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

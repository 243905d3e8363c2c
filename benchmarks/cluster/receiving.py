"""Measure what the process of a run takes to receive responses from engines, in CPU a token."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.protocol import GenerateRequest, SamplingParams
from areal_lab.host.processes import start_child, watch_parent
from benchmarks.harness import spread

INTERVALS: Final = (8, 32, 128)
"""Values of `rollout.stream_interval`."""
TOKENS: Final = 2_048
"""Of each response."""
SAMPLES: Final = 8
"""Of a group, which is one request."""
GROUPS: Final = 16
"""At once."""
PROMPT_TOKENS: Final = 200


def messages(tokens: int, interval: int) -> list[bytes]:
    """The messages of one group, as SGLang 0.5.23 sends them with incremental output."""
    found = []
    for start in range(0, tokens, interval):
        ids = list(range(10_000 + start, 10_000 + min(start + interval, tokens)))
        end = start + len(ids)
        for index in range(SAMPLES):
            meta = {
                "id": f"{index:032x}",
                "finish_reason": {"type": "length", "length": tokens} if end == tokens else None,
                "prompt_tokens": PROMPT_TOKENS,
                "weight_version": "0",
                "num_retractions": 0,
                "output_token_logprobs": [[-0.12345678901234567, one, None] for one in ids],
                "output_token_logprobs_length": end,
                "completion_tokens": end,
                "cached_tokens": 0,
            }
            message = {"text": "", "output_ids": ids, "meta_info": meta, "index": index}
            found.append(f"data: {json.dumps(message)}\n\n".encode())
    return [*found, b"data: [DONE]\n\n"]


def measure(*, quick: bool, repeats: int) -> dict[str, Any]:
    """Figures and rows of this part."""
    tokens = TOKENS // 8 if quick else TOKENS
    times: dict[int, list[tuple[float, float]]] = {interval: [] for interval in INTERVALS}
    with _sending(tokens) as url:
        for again in range(repeats + 1):  # the first one warms up
            for interval in INTERVALS:
                one = asyncio.run(_receive(url, interval, tokens))
                times[interval] += [one] if again else []
    rows = [
        {
            "what": "responses",
            "stream_interval": interval,
            "cpu_us_per_token": statistics.median(cpu_us for cpu_us, _ in found),
            "tokens_per_cpu_s": 1e6 / statistics.median(cpu_us for cpu_us, _ in found),
            "tokens_per_s": statistics.median(per_s for _, per_s in found),
        }
        for interval, found in times.items()
    ]
    spreads = {f"responses {n}": spread([cpu for cpu, _ in found]) for n, found in times.items()}
    return {"rows": rows, "spread": spreads, "inputs": {}}


async def _receive(url: str, interval: int, tokens: int) -> tuple[float, float]:
    """CPU microseconds a token, and tokens a second."""
    client = EngineClient(url, stream_interval=interval)
    sampling = SamplingParams(max_new_tokens=tokens, temperature=1.0)

    async def group(number: int) -> int:
        requests = [
            GenerateRequest(
                request_id=f"train-{number}-{sample}",
                prompt_tokens=tuple(range(PROMPT_TOKENS)),
                sampling=sampling,
            )
            for sample in range(SAMPLES)
        ]
        found = await client.generate(requests)
        return sum(len(segment.tokens) for one in found for segment in one.segments)

    cpu_s, begun_s = time.process_time(), time.perf_counter()
    received = sum(await asyncio.gather(*(group(number) for number in range(GROUPS))))
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - begun_s
    await client.close()
    assert received == GROUPS * SAMPLES * tokens, "a response is incomplete"
    return 1e6 * cpu_s / received, received / wall_s


@contextmanager
def _sending(tokens: int) -> Iterator[str]:
    """A server that has all its responses, and its address."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as listener,
        asyncio.Runner() as runner,
    ):
        child = runner.run(
            start_child(
                "server",
                "benchmarks.cluster.receiving",
                [str(listener.fileno()), str(tokens)],
                log_path=Path(folder) / "server.log",
                pass_fds=[listener.fileno()],
            )
        )
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            runner.run(child.stop())


def _serve(listener: socket.socket, tokens: int) -> None:
    known = {interval: messages(tokens, interval) for interval in INTERVALS}

    async def generate(request: Request) -> Response:
        interval = (await request.json())["sampling_params"][0]["stream_interval"]

        async def sent() -> AsyncIterator[bytes]:
            for one in known[interval]:
                yield one

        return StreamingResponse(sent(), media_type="text/event-stream")

    async def info(_request: Request) -> Response:
        return JSONResponse({"version": "0.5.23", "weight_version": "0"})

    routes = [Route("/generate", generate, methods=["POST"]), Route("/{path:path}", info)]
    config = uvicorn.Config(Starlette(routes=routes), log_level="error")
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    watch_parent()
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))

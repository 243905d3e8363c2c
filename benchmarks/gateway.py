"""CPU and latency that the agents' gateway adds to engines: 500 sessions that sample all the time.

The gateway runs in a process of its own, in front of a scripted conversation that answers 512
tokens after 0.5 to 1.5 seconds. Each session sends a call of about 6 kB (nine messages, three
tools), reads the reply, and sends the next one, on its own connection. With answers of equal length
sessions that were once delayed together would send together ever after. Rows:

- `plain`: replies as one object; `cpu_ms_per_request` is the gateway's.
- `streamed`: replies as 64 content events and 3 others, all written once the answer is there;
  `cpu_us_per_event` is what they take beyond a plain reply.

`added_p99_ms` is the time from the first byte of a call to the last of its reply, less that of the
answer: by the clients' clock, so it has their own delays in it, too. Nothing else may run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from areal_lab.agents.gateway.calls import Scores
from areal_lab.agents.gateway.server import base_url, bind, serve
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.gateway.sessions import Limits
from areal_lab.agents.gateway.stream import PIECE_TOKENS
from areal_lab.agents.messages import ChatReply, ChatRequest, Message
from areal_lab.data.trajectory import Segment
from areal_lab.engines.protocol import Generated
from areal_lab.host.asgi import collected_in_pauses
from areal_lab.host.processes import start_child, watch_parent
from benchmarks.harness import Arguments, parse, report, spread

SESSIONS = 500
ROUNDS = 10
"""Calls of each session in one measurement; the first one of them warms up."""
SHORTEST_S, LONGEST_S = 0.5, 1.5
"""Of an answer."""
_GOLDEN = (5**0.5 - 1) / 2
"""Its multiples are spread evenly over the fractions of 1."""
ANSWER_TOKENS = 512
STREAM_EVENTS = 3
"""Beside those with content: the role, why it ended, the end."""
MESSAGE_CHARACTERS = 600
ADMIN = "admin"
QUESTION = "question "
_LONGEST_REPLY_BYTES = 1 << 20
_END_OF_STREAM = b"data: [DONE]\n\n\r\n0\r\n\r\n"
"""Of a chunked body."""


def answer_s(number: int) -> float:
    """Seconds that the answer to a question takes."""
    return SHORTEST_S + (LONGEST_S - SHORTEST_S) * (number * _GOLDEN % 1)


class Scripted:
    """A conversation that answers the same after a while."""

    def __init__(self) -> None:
        """Make the answer once."""
        texts = [f" tok{i % 10}" for i in range(ANSWER_TOKENS)]
        logprobs = (-0.5,) * ANSWER_TOKENS
        segment = Segment(tokens=tuple(range(ANSWER_TOKENS)), logprobs=logprobs, version=1)
        self._reply = ChatReply(
            message=Message(role="assistant", content="".join(texts)),
            finish="stop",
            generated=Generated(
                request_id="r",
                segments=(segment,),
                finish_reason="stop",
                retractions=0,
                cached_tokens=0,
            ),
            prompt_tokens=1500,
            shown=tuple(zip(texts, logprobs, strict=True)),
        )

    async def reply(self, request: ChatRequest) -> list[ChatReply]:
        """The answer."""
        await asyncio.sleep(answer_s(int(request.messages[-1].content.removeprefix(QUESTION))))
        return [self._reply] * request.replies

    async def prompt_tokens(self, request: ChatRequest) -> int:
        """A word is a token."""
        return sum(len(message.content.split()) for message in request.messages)

    def rows(self, scores: Scores) -> list[dict[str, Any]]:
        """Nothing is trained on."""
        del scores
        return []


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement."""

    requests: int
    cpu_s: float
    """Of the gateway's process."""
    added_ms: tuple[float, ...]
    """Of each request, in order of size."""

    @property
    def cpu_ms_per_request(self) -> float:
        """Of the gateway."""
        return 1000 * self.cpu_s / self.requests

    def added(self, share: float) -> float:
        """The latency that this share of requests does not exceed, in milliseconds."""
        return self.added_ms[min(len(self.added_ms) - 1, math.floor(share * len(self.added_ms)))]


def call(key: str, number: int, *, stream: bool) -> bytes:
    """The bytes of one request; each number has another body, as each turn of an agent has."""
    roles = ("system", *("user", "assistant") * 4)[:8]
    filling = "the words of a message that an agent sends once more with every call, "
    text = (filling * (1 + MESSAGE_CHARACTERS // len(filling)))[:MESSAGE_CHARACTERS]
    tool = {"name": "add", "description": "Add two numbers.", "parameters": {"type": "object"}}
    body = json.dumps(
        {
            "model": "gpt-x",
            "messages": [{"role": role, "content": text} for role in roles]
            + [{"role": "user", "content": f"{QUESTION}{number}"}],
            "tools": [{"type": "function", "function": tool}] * 3,
            "stream": stream,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"X-Stainless-Retry-Count: 0\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def agent(address: tuple[str, int], key: str, numbers: range, *, stream: bool) -> list[float]:
    """One session; returns the added latencies of its calls but the first, in milliseconds."""
    requests = [call(key, number, stream=stream) for number in numbers]
    reader, writer = await asyncio.open_connection(*address, limit=_LONGEST_REPLY_BYTES)
    await asyncio.sleep(answer_s(numbers.start) - SHORTEST_S)
    added_ms = []
    for number, request in zip(numbers, requests, strict=True):
        begun_s = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the gateway replied {head.splitlines()[0].decode()}")
        if stream:
            await reader.readuntil(_END_OF_STREAM)
        else:
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
        added_ms.append(1000 * (time.perf_counter() - begun_s - answer_s(number)))
    writer.close()
    return added_ms[1:]


async def measure(
    address: tuple[str, int],
    keys: Sequence[str],
    process: psutil.Process,
    *,
    rounds: int,
    stream: bool,
) -> Round:
    """All sessions at once."""
    before_s = _cpu_s(process)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                agent(
                    address,
                    key,
                    range(index * (rounds + 1), (index + 1) * (rounds + 1)),
                    stream=stream,
                )
            )
            for index, key in enumerate(keys)
        ]
    return Round(
        requests=len(keys) * (rounds + 1),
        cpu_s=_cpu_s(process) - before_s,
        added_ms=tuple(sorted(each for task in tasks for each in task.result())),
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def start_session(address: tuple[str, int]) -> str:
    """Start a session over HTTP and return its key."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(
        "POST /rl/start_session HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n"
        f"Authorization: Bearer {ADMIN}\r\nContent-Length: 0\r\n\r\n".encode()
    )
    reply = await reader.read()
    writer.close()
    key = json.loads(reply.partition(b"\r\n\r\n")[2])["api_key"]
    assert isinstance(key, str)
    return key


async def run(arguments: Arguments, *, sessions: int, rounds: int) -> dict[str, Any]:
    """Start the gateway and measure both kinds of replies, in turns."""
    listener = bind()
    host, port = listener.getsockname()[:2]
    found: dict[bool, list[Round]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        child = await start_child(
            "gateway",
            "benchmarks.gateway",
            ["--serve-fd", str(listener.fileno())],
            log_path=Path(folder) / "gateway.log",
            pass_fds=[listener.fileno()],
        )
        listener.close()
        try:
            process = psutil.Process(child.pid)
            keys = [await start_session((host, port)) for _ in range(sessions)]
            for _ in range(arguments.repeats):
                for stream, rows in found.items():
                    rows.append(
                        await measure((host, port), keys, process, rounds=rounds, stream=stream)
                    )
        finally:
            await child.stop()
    return figures(found[False], found[True], sessions=sessions)


def figures(plain: Sequence[Round], streamed: Sequence[Round], *, sessions: int) -> dict[str, Any]:
    """The report of these measurements."""
    events = ANSWER_TOKENS // PIECE_TOKENS + STREAM_EVENTS
    per_event = [
        1000 * (many.cpu_ms_per_request - one.cpu_ms_per_request) / events
        for one, many in zip(plain, streamed, strict=True)
    ]
    rows = []
    spreads = {"cpu_us_per_event": spread(per_event)}
    for name, rounds in (("plain", plain), ("streamed", streamed)):
        cpu_ms = spread([each.cpu_ms_per_request for each in rounds])
        p99_ms = spread([each.added(0.99) for each in rounds])
        spreads |= {f"cpu_ms_{name}": cpu_ms, f"added_p99_ms_{name}": p99_ms}
        rows.append(
            {
                "case": name,
                "sessions": sessions,
                "requests": rounds[0].requests,
                "cpu_ms_per_request": cpu_ms["median"],
                "added_p50_ms": spread([each.added(0.5) for each in rounds])["median"],
                "added_p99_ms": p99_ms["median"],
                "added_max_ms": max(each.added_ms[-1] for each in rounds),
            }
        )
    return {
        "cpu_ms_per_request": rows[0]["cpu_ms_per_request"],
        "cpu_us_per_event": spreads["cpu_us_per_event"]["median"],
        "added_p99_ms": max(spreads[f"added_p99_ms_{row['case']}"]["median"] for row in rows),
        "events": events,
        "rows": rows,
        "spread": spreads,
    }


def serve_child(descriptor: int) -> None:
    """The gateway's process."""
    watch_parent()
    limits = Limits(open_sessions=10_000, requests=10_000)
    service = Service(lambda _: Scripted(), admin_key=ADMIN, model="scripted", limits=limits)
    listener = socket.socket(fileno=descriptor)
    print(f"gateway on {base_url(listener)}", flush=True)
    asyncio.run(_serve(service, listener))


async def _serve(service: Service, listener: socket.socket) -> None:
    async with collected_in_pauses(lambda: not service.in_flight):  # as `areal-lab gateway` does
        await serve(service, listener)


def main() -> None:
    """Measure and report."""
    if sys.argv[1:2] == ["--serve-fd"]:
        serve_child(int(sys.argv[2]))
        return

    def add_own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--sessions", type=int, help=f"sessions at once (default {SESSIONS})")

    arguments = parse(__doc__, repeats=5, quick_repeats=1, add_own=add_own)
    sessions = arguments.own.sessions or (50 if arguments.quick else SESSIONS)
    rounds = 2 if arguments.quick else ROUNDS
    report(asyncio.run(run(arguments, sessions=sessions, rounds=rounds)), arguments)


if __name__ == "__main__":
    main()

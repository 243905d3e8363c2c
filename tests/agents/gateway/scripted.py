"""A conversation with known replies, a gateway around it, and readers of its streams."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec

import httpx2

from areal_lab.agents.gateway.calls import Answer, Scores
from areal_lab.agents.gateway.server import create_app
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.gateway.sessions import Limits
from areal_lab.agents.messages import ChatFinish, ChatReply, ChatRequest, Message, ToolCall
from areal_lab.data.trajectory import Segment
from areal_lab.engines.protocol import Generated
from tests.simulator.run.virtual_loop import run_virtually

ADMIN = "the-admins-key"
MODEL = "tiny"
P = ParamSpec("P")


def virtually(scenario: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """A test that runs in virtual time."""

    @functools.wraps(scenario)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def main() -> None:
            await scenario(*args, **kwargs)

        run_virtually(main())

    return run


# --- replies -------------------------------------------------------------------------------------


def made(
    message: Message,
    *,
    request_id: str = "r0",
    texts: Sequence[str] | None = None,
    finish: ChatFinish | None = None,
    stop: str | None = None,
    version: int = 3,
    prompt_tokens: int = 7,
) -> ChatReply:
    """A reply whose tokens have these texts; three characters each if none are given."""
    content = message.content
    if texts is None:
        texts = [content[i : i + 3] for i in range(0, len(content), 3)]
    logprobs = tuple(-0.25 * (1 + i % 4) for i in range(len(texts)))
    segments = (
        (Segment(tokens=tuple(range(len(texts))), logprobs=logprobs, version=version),)
        if texts
        else ()
    )
    return ChatReply(
        message=message,
        finish=finish or ("tool_calls" if message.tool_calls else "stop"),
        generated=Generated(
            request_id=request_id,
            segments=segments,
            finish_reason="length" if finish == "length" else "stop",
            retractions=0,
            cached_tokens=2,
        ),
        prompt_tokens=prompt_tokens,
        shown=tuple(zip(texts, logprobs, strict=True)),
        stop=stop,
    )


def says(content: str, **options: Any) -> ChatReply:
    """A reply of text."""
    return made(Message(role="assistant", content=content), **options)


def calls(name: str, arguments: str, content: str = "", **options: Any) -> ChatReply:
    """A reply with one call of a tool."""
    call = ToolCall(call_id="call_1", name=name, arguments=arguments)
    return made(Message(role="assistant", content=content, tool_calls=(call,)), **options)


def answered(*replies: ChatReply, interaction_id: str = "chatcmpl-1") -> Answer:
    """An answer of these replies."""
    return Answer(interaction_id=interaction_id, created_s=1_700_000_000, replies=replies)


@dataclass
class Scripted:
    """Replies "reply 0", "reply 1", ... or what `script` says, after a while."""

    delay_s: float = 1.0
    script: Callable[[ChatRequest, int], ChatReply] | None = None
    failure: Exception | None = None
    gate: asyncio.Event | None = None
    """Instead of the delay: replies wait for it."""
    requests: list[ChatRequest] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    canceled: int = 0

    async def reply(self, request: ChatRequest) -> list[ChatReply]:
        first = sum(each.replies for each in self.requests)
        self.requests.append(request)
        try:
            if self.gate is not None:
                await self.gate.wait()
            else:
                await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.canceled += 1
            raise
        if self.failure is not None:
            raise self.failure
        return [self._one(request, number) for number in range(first, first + request.replies)]

    def _one(self, request: ChatRequest, number: int) -> ChatReply:
        if self.script is not None:
            return self.script(request, number)
        return says(f"reply {number}", request_id=f"r{number}")

    async def prompt_tokens(self, request: ChatRequest) -> int:
        return sum(len(each.content.split()) for each in request.messages)

    def rows(self, scores: Scores) -> list[dict[str, Any]]:
        self.scores.append(scores)
        return [{"request": i} for i in range(len(self.requests))]


# --- a gateway in this process -------------------------------------------------------------------


@dataclass
class Agent:
    """A client with the key of a session."""

    http: httpx2.AsyncClient
    session_id: str
    key: str

    async def post(
        self, path: str, body: Any = None, *, key: str | None = None, **headers: str
    ) -> httpx2.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {"authorization": f"Bearer {self.key if key is None else key}", **named}
        return await self.http.post(path, json=body or {}, headers=sent)

    async def chat(
        self, text: str = "hello", *, retries: int = 0, **fields: Any
    ) -> httpx2.Response:
        """One chat completion."""
        body = {"model": "gpt-x", "messages": [{"role": "user", "content": text}], **fields}
        return await self.post("/v1/chat/completions", body, x_stainless_retry_count=str(retries))


@dataclass
class Lab:
    """A gateway and who talks to it."""

    service: Service
    http: httpx2.AsyncClient
    conversations: list[Any]

    async def start(self, task_id: str = "task", api_key: str | None = None) -> Agent:
        reply = await self.admin("/rl/start_session", {"task_id": task_id, "api_key": api_key})
        assert reply.status_code == 200, reply.text
        found = reply.json()
        return Agent(self.http, found["session_id"], found["api_key"])

    async def admin(self, path: str, body: Any = None) -> httpx2.Response:
        headers = {"authorization": f"Bearer {ADMIN}"}
        return await self.http.post(path, json=body or {}, headers=headers)

    async def export(self, agent: Agent, **fields: Any) -> dict[str, Any]:
        body = {"session_id": agent.session_id, **fields}
        reply = await self.admin("/export_trajectories", body)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found


@asynccontextmanager
async def gateway(
    conversation: Callable[[], Any] = Scripted,
    evaluation: Callable[[], Any] | None = None,
    **limits: Any,
) -> AsyncIterator[Lab]:
    """A gateway over an in-process transport, on the running loop's clock."""
    conversations: list[Any] = []

    def opened(_task_id: str) -> Any:
        conversations.append(conversation())
        return conversations[-1]

    service = Service(
        opened,
        admin_key=ADMIN,
        model=MODEL,
        open_evaluation=evaluation,
        limits=Limits(**limits),
        clock=asyncio.get_running_loop().time,
    )
    transport = httpx2.ASGITransport(app=create_app(service))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield Lab(service, http, conversations)
        await service.close()


# --- reading streams -----------------------------------------------------------------------------


def sse(raw: bytes) -> list[tuple[str, Any]]:
    """Names and data of a stream's events, as the format says; comments are left out."""
    assert raw.isascii()
    assert raw.endswith(b"\n\n")
    found = []
    for block in raw.decode().split("\n\n")[:-1]:
        name, data = "", []
        for line in block.split("\n"):
            key, _, value = line.partition(": ")
            if key == "event":
                name = value
            elif key == "data":
                data.append(value)
            else:
                assert line.startswith(":"), line
        if data:
            text = "\n".join(data)
            found.append((name, text if text == "[DONE]" else json.loads(text)))
    return found


def joined(events: Iterable[bytes]) -> list[tuple[str, Any]]:
    """The events of a stream made in this process."""
    return sse(b"".join(events))


def chat_of(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """The completion that a client puts together from a stream of chunks."""
    assert events[-1] == ("", "[DONE]")
    chunks = [data for _, data in events[:-1]]
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"],
                {"index": part["index"], "message": {}, "finish_reason": None, "logprobs": None},
            )
            assert choice["finish_reason"] is None, "a delta after the end"
            _add_delta(choice["message"], part["delta"])
            choice["finish_reason"] = part["finish_reason"]
            if part["logprobs"]:
                choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
                choice["logprobs"]["content"] += part["logprobs"]["content"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    return {
        "id": chunks[0]["id"],
        "model": chunks[0]["model"],
        "choices": [choices[index] for index in sorted(choices)],
        "usage": usage,
    }


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            for part in value:
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    calls.append({key: part[key] for key in ("id", "type", "function")})
                else:
                    assert set(part) == {"index", "function"}
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        elif isinstance(value, str) and name != "role":
            message[name] = message.get(name, "") + value
        else:
            message[name] = value


def response_of(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """The response that a client puts together from a stream, and which must be the last one."""
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(name == data["type"] for name, data in events)
    kinds = [name for name, _ in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    snapshot: dict[str, Any] = events[0][1]["response"]
    assert snapshot["status"] == "in_progress"
    output: list[dict[str, Any]] = snapshot["output"]
    for kind, data in events[2:-1]:
        item = output[data["output_index"]] if kind != "response.output_item.added" else None
        match kind.removeprefix("response."):
            case "output_item.added":
                assert data["output_index"] == len(output)
                output.append(data["item"])
            case "content_part.added":
                assert item is not None
                item["content"].append(data["part"])
            case "output_text.delta" | "reasoning_text.delta":
                assert item is not None
                part = item["content"][data["content_index"]]
                part["text"] += data["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert item is not None
                assert item["content"][data["content_index"]]["text"] == data["text"]
            case "content_part.done":
                assert item is not None
                assert item["content"][data["content_index"]]["text"] == data["part"]["text"]
            case "function_call_arguments.delta":
                assert item is not None
                item["arguments"] += data["delta"]
            case "function_call_arguments.done":
                assert item is not None
                assert item["arguments"] == data["arguments"]
            case "output_item.done":
                assert item is not None
                assert item["id"] == data["item"]["id"]
                output[data["output_index"]] = data["item"]
            case _:
                raise AssertionError(kind)
    complete: dict[str, Any] = events[-1][1]["response"]
    assert complete["output"] == output
    return complete


def message_of(events: list[tuple[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from a stream of blocks."""
    assert all(name == data["type"] for name, data in events)
    named = [(name, data) for name, data in events if name != "ping"]
    assert named[0][0] == "message_start"
    assert [name for name, _ in named[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = named[0][1]["message"]
    partial: dict[int, str] = {}
    open_block: int | None = None
    for name, data in named[1:-2]:
        index = data["index"]
        if name == "content_block_start":
            assert open_block is None
            assert index == len(message["content"])
            open_block = index
            message["content"].append(data["content_block"])
            continue
        assert open_block == index
        block = message["content"][index]
        if name == "content_block_stop":
            open_block = None
            if index in partial:
                block["input"] = json.loads(partial[index])
            continue
        match data["delta"]:
            case {"type": "text_delta", "text": text}:
                block["text"] += text
            case {"type": "thinking_delta", "thinking": text}:
                block["thinking"] += text
            case {"type": "signature_delta"}:
                pass
            case {"type": "input_json_delta", "partial_json": text}:
                partial[index] = partial.get(index, "") + text
            case delta:
                raise AssertionError(delta)
    assert open_block is None
    delta = named[-2][1]
    return {**message, **delta["delta"], "usage": delta["usage"]}


def texts_of(events: list[tuple[str, Any]]) -> Iterator[str]:
    """All strings in the events' data."""

    def inside(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            for each in value.values():
                yield from inside(each)
        elif isinstance(value, list):
            for each in value:
                yield from inside(each)

    for _, data in events:
        yield from inside(data)

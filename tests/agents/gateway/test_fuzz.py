"""Any requests in any order: no error of the server, and no token that is lost or trained twice.

Not schemathesis: it makes bodies from an OpenAPI schema, and these bodies are read by hand. A
schema written for it would have to repeat all that the readers know, and its requests would still
be strangers to each other. What a gateway can lose, it loses over several requests: a history that
was changed, a reply that is continued by its id, the same body twice, a client that has gone. So
each example is a session whose clients keep what they were told, in virtual time.

`make test-agents` sends 10,000 requests; AREAL_LAB_FUZZ_REQUESTS says how many.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx2
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.agents.conversation import TreeConversation
from areal_lab.agents.evaluation import Evaluation
from areal_lab.agents.messages import Message
from areal_lab.data.trajectory import Segment
from areal_lab.engines.protocol import Generated, SamplingParams, ScoredTokens
from tests.agents.conversation import result, system, user
from tests.agents.gateway.fuzzing import (
    JSON,
    ODD_TEXT,
    OPTIONS,
    PATHS,
    TOOLS,
    Draw,
    babbling,
    body_of,
    mutated,
    raw,
    replied,
)
from tests.agents.gateway.scripted import ADMIN, Agent, Lab, gateway, sse
from tests.agents.scripted_model import ScriptedModel
from tests.agents.templates import chat_format
from tests.agents.test_random_sessions import ECHOES, echo
from tests.simulator.run.virtual_loop import run_virtually

REQUESTS: Final = int(os.environ.get("AREAL_LAB_FUZZ_REQUESTS", "200"))
PER_SESSION: Final = 20
GRAMMARS: Final = {"LLAMA": "llama3", "MISTRAL": "mistral"}
TEMPLATES: Final = ("SMOLLM2", "QWEN_THINKING", "LLAMA", "MISTRAL", "ALTERNATING")
ACTIONS: Final = st.sampled_from(
    [
        *["call"] * 24,
        *("count", "reward", "models", "path", "again", "again"),
        *("shorten", "instruct", "change", "copy"),
    ]
)


@dataclass
class Client:
    """A conversation as one client has it."""

    dialect: str
    messages: list[Message] = field(repr=False)
    tools: list[dict[str, Any]] = field(repr=False)
    last_id: str = "resp_0"


@dataclass(frozen=True)
class Sent:
    """A request, before it is sent."""

    path: str
    content: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    client: Client | None = None
    """Whose call it is."""
    hangs_up_s: float | None = None
    """When the client does, if it does not wait."""


@dataclass
class Clients:
    """Clients of one session, which share its key."""

    draw: Draw
    lab: Lab
    agent: Agent
    clients: list[Client] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    """Of replies."""
    calls: list[Sent] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        starts = ([user("Hi")], [system("Be."), user("Hi")])
        self.clients = [
            Client(
                dialect,
                list(self.draw(st.sampled_from(starts))),
                self.draw(st.sampled_from([TOOLS[:1], TOOLS, []])),
            )
            for dialect in self.draw(
                st.lists(st.sampled_from(sorted(PATHS)), min_size=1, max_size=2)
            )
        ]

    async def step(self, most: int) -> int:
        """Send some requests at once; returns how many."""
        # So that an example can be made small, though each session has as many requests.
        if self.draw(st.sampled_from(range(100))) == 0:
            requests = [Sent("health", b"", "GET") for _ in range(most)]
        else:
            together = min(most, self.draw(st.sampled_from([1, 1, 1, 2, 3])))
            requests = [self.request() for _ in range(together)]
        replies = await asyncio.gather(*[self.send(each) for each in requests])
        for request, reply in zip(requests, replies, strict=True):
            if reply is not None:
                self.read(request, reply)
        return len(requests)

    def request(self) -> Sent:
        client = self.draw(st.sampled_from(self.clients))
        action = self.draw(ACTIONS)
        match action:
            case "shorten" if len(client.messages) > 3:
                del client.messages[1:3]
            case "instruct":
                client.messages.insert(0, system(self.draw(st.sampled_from("AB"))))
            case "change":
                client.tools = TOOLS[1:]
            case "copy":
                dialect = self.draw(st.sampled_from(sorted(PATHS)))
                self.clients.append(replace(client, dialect=dialect, messages=[*client.messages]))
            case "again" if self.calls:
                return self.draw(st.sampled_from(self.calls))
            case "models":
                return Sent("models", b"", "GET", self.headers())
            case "path":
                path = self.draw(st.sampled_from(["", "messages/x", "chat", "openapi.json"]))
                return Sent(path, b"{}", self.draw(st.sampled_from(["GET", "PUT", "POST"])))
            case "reward":
                wanted: Any = {"reward": 0.5}
                if self.ids:
                    wanted["interaction_id"] = self.draw(st.sampled_from(self.ids))
                return Sent("rl/set_reward", self.bytes(wanted), headers=self.headers())
            case "count":
                body = body_of("messages", client.messages, client.tools)
                return Sent("messages/count_tokens", self.bytes(body), headers=self.headers())
        self.calls.append(self.call(client))
        return self.calls[-1]

    def call(self, client: Client) -> Sent:
        names = OPTIONS[client.dialect]
        body = body_of(client.dialect, client.messages, client.tools)
        follows = self.draw(st.sampled_from([False, False, False, True]))
        if follows and client.dialect != "chat":
            body |= body_of(client.dialect, client.messages[-1:], client.tools)
            if client.dialect == "responses":
                body["previous_response_id"] = client.last_id
            else:
                body["thread"] = {"type": "continue", "previous_message_id": client.last_id}
        for name in self.draw(st.lists(st.sampled_from(sorted(names)), max_size=4)):
            body[name] = self.draw(names[name])
        before, after = self.draw(
            st.sampled_from([("v1/", ""), ("", ""), ("v1/v1/", "/"), ("v1/", "?beta=true")])
        )
        return Sent(
            f"{before}{PATHS[client.dialect]}{after}",
            self.bytes(body),
            headers=self.headers(),
            client=client,
            hangs_up_s=self.draw(st.sampled_from([*[None] * 6, 0.0, 0.001, 5.0, 17.0])),
        )

    def bytes(self, body: Any) -> bytes:
        if self.draw(st.sampled_from([False, False, False, True])):
            body = mutated(self.draw, body)
        return raw(self.draw, body)

    def headers(self) -> dict[str, str]:
        key = self.agent.key
        good = {"authorization": f"Bearer {key}"}
        return self.draw(
            st.sampled_from(
                [
                    *[good] * 24,
                    {"x-api-key": key, "anthropic-version": "2026-10-21"},
                    {**good, "x-stainless-retry-count": "1"},
                    {**good, "x-stainless-retry-count": "\xb2", "content-type": "text/plain"},
                    {"authorization": "Bearer wrong"},
                    {"authorization": f"Bearer {ADMIN}"},
                    {},
                ]
            )
        )

    async def send(self, sent: Sent) -> httpx2.Response | None:
        """The reply; None if the client has hung up."""
        try:
            async with asyncio.timeout(sent.hangs_up_s):
                return await self.lab.http.request(
                    sent.method,
                    f"/{sent.path}",
                    content=sent.content,
                    headers={name: text.encode("latin-1") for name, text in sent.headers.items()},
                )
        except TimeoutError:
            return None

    def read(self, sent: Sent, reply: httpx2.Response) -> None:
        """A reply is one of its dialect; the client continues from it."""
        self.statuses[reply.status_code] += 1
        assert reply.status_code < 500, reply.text
        streamed = reply.headers.get("content-type", "").startswith("text/event-stream")
        if reply.status_code != 200:
            error = reply.json()
            assert error["error"]["type"], error
            assert "\n" not in error["error"]["message"], error
            return
        if sent.client is None:
            reply.json()
            return
        client = sent.client
        found = replied(client.dialect, reply.content, streamed=streamed)
        if found is None:
            _, error = sse(reply.content)[-1]
            assert error["error"]["type"] == "invalid_request_error", error
            return
        client.last_id, answer = found
        self.ids.append(client.last_id)
        client.messages += echo(answer, self.draw(ECHOES))
        results = [result("5", call.call_id) for call in answer.tool_calls]
        client.messages += results or [user(self.draw(st.sampled_from(["And?", "Why?"])))]


@settings(max_examples=max(1, REQUESTS // PER_SESSION))
@given(
    st.data(), st.sampled_from(TEMPLATES), st.integers(0, 2**32), st.sampled_from([400, 9999, 9999])
)
def test_requests_fail_only_by_their_own_fault_and_every_token_is_trained_once(
    data: st.DataObject, template: str, seed: int, context_tokens: int
) -> None:
    run_virtually(_session(data, template, seed, context_tokens))


async def _session(data: st.DataObject, template: str, seed: int, context_tokens: int) -> None:
    form = chat_format(template)
    model = ScriptedModel(babbling(form, seed), context_tokens=context_tokens)
    conversation = model.conversation(form, grammar=GRAMMARS.get(template, "hermes"))
    async with gateway(lambda: conversation) as lab:
        agent = await lab.start()
        clients = Clients(data.draw, lab, agent)
        left = PER_SESSION
        while left:
            left -= await clients.step(left)
        await agent.post("/rl/end_session")
        for style in ("individual", "concat"):
            exported = await lab.export(agent, style=style)
            model.check(conversation, exported["rows"])
        generated = sum(each["generated_tokens"] for each in exported["interactions"].values())
        assert generated == sum(len(turn.tokens) for turn in conversation.tree.turns)
        statistics = lab.service.statistics()
        assert statistics["requests_in_flight"] == 0
        assert "failed" not in statistics["counts"]


# --- completions of plain text -------------------------------------------------------------------

PROMPTS: Final = st.one_of(
    ODD_TEXT,
    st.lists(ODD_TEXT, max_size=3),
    st.lists(st.integers(0, 300), max_size=5),
    st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=5), max_size=3),
    JSON,
)
COMPLETION: Final = st.fixed_dictionaries(
    {"prompt": PROMPTS},
    optional={
        "max_tokens": st.integers(-1, 5),
        "temperature": st.sampled_from([0, 0.7, 1, None]),
        "n": st.integers(0, 3),
        "logprobs": st.integers(-1, 21),
        "echo": st.booleans(),
        "stream": st.booleans(),
        "stop": st.one_of(ODD_TEXT, st.lists(ODD_TEXT, max_size=3)),
        "seed": st.integers(),
        "best_of": st.integers(0, 3),
        "suffix": ODD_TEXT,
    },
)


@dataclass
class Babbler:
    """Engines that say random tokens, all of one version."""

    chance: random.Random
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=5))
    context_tokens: int = 200

    async def turn(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams, *, seed: int = 0
    ) -> Generated:
        del prompt_tokens, seed
        tokens = tuple(self.chance.randrange(300) for _ in range(sampling.max_new_tokens))
        return Generated(
            request_id="r",
            segments=(Segment(tokens, (-1.0,) * len(tokens), 0),),
            finish_reason=self.chance.choice(["stop", "length"]),
            retractions=0,
            cached_tokens=0,
        )

    async def token_logprobs(
        self, tokens: Sequence[int], *, start: int = 0, top: int = 0
    ) -> ScoredTokens:
        places = range(start, len(tokens))
        best = tuple((token, -0.5) for token in range(top))
        return ScoredTokens(
            version=0,
            logprobs=tuple(-1.0 if place else None for place in places),
            top=tuple(best if place else () for place in places),
        )


@settings(max_examples=max(20, REQUESTS // 10))
@given(st.data(), st.integers(0, 2**32))
def test_completions_fail_only_by_their_own_fault(data: st.DataObject, seed: int) -> None:
    run_virtually(_completions(data, seed))


async def _completions(data: st.DataObject, seed: int) -> None:
    form, engines = chat_format("SMOLLM2"), Babbler(random.Random(seed))

    def opened() -> TreeConversation:
        return ScriptedModel(babbling(form, seed)).conversation(form, sampler=engines)

    async with gateway(evaluation=lambda: Evaluation(opened, form.codec)) as lab:
        reply = await lab.admin("/rl/start_session", {"evaluation": True})
        key = {"authorization": f"Bearer {reply.json()['api_key']}"}
        for _ in range(3):
            body = data.draw(COMPLETION)
            if data.draw(st.sampled_from([False, False, True])):
                body = mutated(data.draw, body)
            content = raw(data.draw, body)
            reply = await lab.http.post("/v1/completions", content=content, headers=key)
            assert reply.status_code < 500, reply.text
            if reply.status_code != 200:
                assert "\n" not in reply.json()["error"]["message"]
                continue
            streamed = reply.headers["content-type"].startswith("text/event-stream")
            whole = [data for _, data in sse(reply.content)[:-1]] if streamed else [reply.json()]
            for choice in [choice for each in whole for choice in each["choices"]]:
                found = choice["logprobs"]
                if found is not None:
                    count = len(found["tokens"])
                    assert len(found["token_logprobs"]) == len(found["text_offset"]) == count
                    assert found["text_offset"] == sorted(found["text_offset"])
                    assert found["top_logprobs"] is None or len(found["top_logprobs"]) == count
        assert not any(lab.service._exchanges.values())
        assert "failed" not in lab.service.statistics()["counts"]

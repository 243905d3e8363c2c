"""The gateway over HTTP, in virtual time: keys, limits, retries, sessions, errors."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import httpx2
import pytest

from areal_lab.agents.gateway.calls import PromptTooLong
from areal_lab.agents.gateway.chat import CHAT
from areal_lab.agents.gateway.errors import ApiError
from tests.agents.gateway.scripted import (
    ADMIN,
    Agent,
    Scripted,
    calls,
    chat_of,
    gateway,
    message_of,
    response_of,
    says,
    sse,
    virtually,
)

BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/responses": {"input": "hello"},
    "/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9},
}
PATHS = pytest.mark.parametrize("path", BODIES)


def error_of(reply: httpx2.Response) -> dict[str, Any]:
    """The error inside a reply, which must have the form of its path's dialect."""
    body = reply.json()
    anthropic = reply.request.url.path.removeprefix("/v1").startswith("/messages")
    if anthropic:
        assert body["type"] == "error"
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    assert "\n" not in error["message"]
    return error


def text_of(reply: httpx2.Response) -> str:
    body = reply.json()
    if "choices" in body:
        found = body["choices"][0]["message"]["content"]
    elif "output" in body:
        found = body["output"][0]["content"][0]["text"]
    else:
        found = body["content"][0]["text"]
    assert isinstance(found, str)
    return found


# --- paths, keys, bodies ---


@PATHS
@virtually
async def test_paths_with_and_without_version_and_any_query(path: str) -> None:
    async with gateway() as lab:
        agent = await lab.start()
        for number, form in enumerate(
            (path, f"/v1{path}", f"/v1/v1{path}", f"/v1{path}?beta=true", f"{path}/")
        ):
            reply = await agent.post(form, {**BODIES[path], "model": "no model of ours"})
            assert reply.status_code == 200, reply.text
            assert text_of(reply) == f"reply {number}"
            assert reply.json()["model"] == "no model of ours"


@PATHS
@virtually
async def test_a_key_comes_in_either_header(path: str) -> None:
    async with gateway() as lab:
        agent = await lab.start()
        for headers in (
            {"authorization": f"Bearer {agent.key}"},
            {"authorization": f"bearer  {agent.key} "},
            {"x-api-key": agent.key},
            {"authorization": "Bearer placeholder", "x-api-key": agent.key},
            {"authorization": f"Bearer {agent.key}", "x-api-key": "placeholder"},
            {"authorization": "Basic abc", "x-api-key": agent.key},
        ):
            reply = await lab.http.post(path, json=BODIES[path], headers=headers)
            assert reply.status_code == 200


@PATHS
@virtually
async def test_a_missing_or_wrong_key_is_an_error_of_the_dialect(path: str) -> None:
    async with gateway() as lab:
        agent = await lab.start()
        nothing = await lab.http.post(path, json=BODIES[path])
        wrong = await agent.post(path, BODIES[path], key="wrong")
        admin = await agent.post(path, BODIES[path], key=ADMIN)
        assert [each.status_code for each in (nothing, wrong, admin)] == [401, 401, 403]
        assert error_of(nothing)["type"] == error_of(wrong)["type"] == "authentication_error"
        assert error_of(admin)["type"] == "permission_error"
        assert not lab.conversations[0].requests


@virtually
async def test_only_the_admin_starts_and_exports() -> None:
    async with gateway() as lab:
        agent = await lab.start()
        for path in ("/grant_capacity", "/rl/start_session", "/export_trajectories"):
            assert (await agent.post(path)).status_code == 403
            assert (await lab.http.post(path)).status_code == 401
        assert (await lab.http.get("/statistics")).status_code == 401


@PATHS
@virtually
async def test_a_wrong_body_is_never_more_than_400(path: str) -> None:
    async with gateway() as lab:
        agent = await lab.start()
        headers = {"authorization": f"Bearer {agent.key}"}
        for raw in (b"", b"{'", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"messages": {}}'):
            reply = await lab.http.post(path, content=raw, headers=headers)
            assert reply.status_code == 400
            assert error_of(reply)["type"] == "invalid_request_error"
            assert reply.headers["x-should-retry"] == "false"


@virtually
async def test_a_body_may_not_be_too_large() -> None:
    async with gateway(body_bytes=1000) as lab:
        agent = await lab.start()
        assert (await agent.chat("x" * 800)).status_code == 200
        reply = await agent.chat("x" * 1000)
        assert reply.status_code == 413
        assert "more than 1000 bytes" in error_of(reply)["message"]


@virtually
async def test_a_result_of_a_tool_may_be_a_megabyte() -> None:
    async with gateway() as lab:
        agent = await lab.start()
        assert (await agent.chat("x" * 1_000_000)).status_code == 200
        assert len(lab.conversations[0].requests[0].messages[0].content) == 1_000_000


@virtually
async def test_unknown_paths_are_errors_of_the_dialect() -> None:
    async with gateway() as lab:
        agent = await lab.start()
        assert error_of(await agent.post("/v1/embeddings"))["type"] == "not_found_error"
        assert error_of(await agent.post("/v1/messages/batches"))["type"] == "not_found_error"
        wrong_method = await lab.http.get("/v1/chat/completions")
        assert wrong_method.status_code == 405
        assert "GET /chat/completions" in error_of(wrong_method)["message"]


@virtually
async def test_models_are_listed_as_the_client_expects_and_any_is_found() -> None:
    async with gateway() as lab:
        agent = await lab.start()
        openai = {"authorization": f"Bearer {agent.key}"}
        anthropic = {"x-api-key": agent.key, "anthropic-version": "2023-06-01"}
        listed = (await lab.http.get("/v1/models", headers=openai)).json()
        assert listed == {
            "object": "list",
            "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": "areal_lab"}],
        }
        listed = (await lab.http.get("/v1/models?limit=5", headers=anthropic)).json()
        assert [each["id"] for each in listed["data"]] == ["tiny"]
        assert listed["has_more"] is False
        one = (await lab.http.get("/v1/models/meta/llama", headers=openai)).json()
        assert one["id"] == "meta/llama"
        admin = {"authorization": f"Bearer {ADMIN}"}
        assert (await lab.http.get("/models", headers=admin)).status_code == 200
        assert (await lab.http.get("/models")).status_code == 401
        assert (await lab.http.get("/health")).json() == {"status": "ok"}
        assert (await lab.http.head("/health")).status_code == 200


@virtually
async def test_prompts_are_counted_without_sampling() -> None:
    async with gateway() as lab:
        agent = await lab.start()
        body = {"messages": [{"role": "user", "content": "one two"}], "system": "three"}
        reply = await agent.post("/v1/messages/count_tokens?beta=true", body)
        assert reply.json() == {"input_tokens": 3}
        assert not lab.conversations[0].requests
        thread = {"type": "continue", "previous_message_id": "msg_9"}
        missing = await agent.post("/messages/count_tokens", {**body, "thread": thread})
        assert missing.status_code == 404


@virtually
async def test_what_is_not_served_is_noted_in_a_header() -> None:
    async with gateway() as lab:
        agent = await lab.start()
        reply = await agent.chat(tool_choice="required", top_k=5)
        expected = ["top_k is ignored", "tool_choice required is not enforced"]
        assert reply.headers["x-areal-lab-note"].split("; ") == expected
        assert reply.headers["x-areal-lab-interaction-id"] == reply.json()["id"]
        assert "x-areal-lab-note" not in (await agent.chat()).headers
        statistics = (await agent.http.get("/statistics", headers={"x-api-key": ADMIN})).json()
        assert statistics["counts"]["top_k is ignored"] == 1
        assert statistics["counts"]["calls"] == 2


@virtually
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/chat/completions", lambda name: {"user": name}),
        ("/chat/completions", lambda name: {"safety_identifier": name}),
        ("/responses", lambda name: {"input": "hello", "user": name}),
        ("/messages", lambda name: {"max_tokens": 9, "metadata": {"user_id": name}}),
    ],
)
async def test_a_key_that_several_users_share_is_noted_and_counted(
    path: str, fields: Callable[[str], dict[str, Any]]
) -> None:
    async with gateway() as lab:
        agent = await lab.start()

        async def noted(*names: str) -> list[bool]:
            said = []
            for name in names:
                messages = [{"role": "user", "content": f"hello {len(said)}"}]
                reply = await agent.post(path, {"messages": messages, **fields(name)})
                assert reply.status_code == 200, reply.text
                said.append("several users" in reply.headers.get("x-areal-lab-note", ""))
            return said

        assert await noted("ann", "ann", "", "bob", "ann", "eve") == [
            *[False] * 3,
            True,
            False,
            True,
        ]
        assert lab.service.statistics()["counts"]["several users share this key"] == 2
        assert (await (await lab.start()).chat(user="bob")).headers.get("x-areal-lab-note") is None


# --- replies and streams ---


@PATHS
@virtually
async def test_a_stream_has_the_whole_reply(path: str) -> None:
    async with gateway() as lab:
        agent = await lab.start()
        whole = (await agent.post(path, BODIES[path])).json()
        reply = await agent.post(path, {**BODIES[path], "stream": True})
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in reply.headers
        events = sse(reply.content)
        read = {"/chat/completions": chat_of, "/responses": response_of, "/messages": message_of}
        streamed = read[path](events)
        assert reply.headers["x-areal-lab-interaction-id"] == streamed["id"] != whole["id"]
        assert set(whole) >= set(streamed)
        assert [len(each.messages) for each in lab.conversations[0].requests] == [1, 1]


@virtually
async def test_a_call_of_a_tool_and_its_result() -> None:
    def script(_request: Any, number: int) -> Any:
        return says("5") if number else calls("add", '{"a": 2, "b": 3}')

    async with gateway(lambda: Scripted(script=script)) as lab:
        agent = await lab.start()
        first = (await agent.chat("2+3?")).json()["choices"][0]["message"]
        messages = [
            {"role": "user", "content": "2+3?"},
            first,
            {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "5"},
        ]
        second = await agent.post("/chat/completions", {"messages": messages})
        assert text_of(second) == "5"
        sent = lab.conversations[0].requests[1].messages
        assert [each.role for each in sent] == ["user", "assistant", "tool"]
        assert sent[1].tool_calls[0].call_id == sent[2].call_id == "call_1"


@virtually
async def test_several_replies_to_one_call() -> None:
    async with gateway() as lab:
        agent = await lab.start()
        reply = await agent.chat(n=3)
        found = [each["message"]["content"] for each in reply.json()["choices"]]
        assert found == ["reply 0", "reply 1", "reply 2"]
        assert len(lab.conversations[0].requests) == 1


@virtually
async def test_a_large_reply_lets_others_have_their_turn() -> None:
    def script(_request: Any, _number: int) -> Any:
        return says("x" * 100_000, texts=["x"])

    async with gateway(lambda: Scripted(delay_s=0, script=script)) as lab:
        agent = await lab.start()
        for stream in (True, False):
            calling = asyncio.create_task(agent.chat(stream=stream))
            turns = 0
            while not calling.done():
                turns += 1
                await asyncio.sleep(0)
            assert turns > len((await calling).content) / 65_536


@virtually
async def test_a_response_continues_an_earlier_one() -> None:
    async with gateway() as lab:
        agent = await lab.start()
        first = (await agent.post("/responses", {"input": "one", "instructions": "Be."})).json()
        body = {"input": "two", "previous_response_id": first["id"]}
        assert (await agent.post("/responses", body)).status_code == 200
        sent = lab.conversations[0].requests[1].messages
        assert [each.content for each in sent] == ["one", "reply 0", "two"]
        missing = await agent.post("/responses", {**body, "previous_response_id": "resp_9"})
        assert missing.status_code == 400
        assert error_of(missing)["code"] == "previous_response_not_found"
        unstored = (await agent.post("/responses", {"input": "x", "store": False})).json()
        gone = await agent.post("/responses", {**body, "previous_response_id": unstored["id"]})
        assert error_of(gone)["code"] == "previous_response_not_found"
        # Other sessions do not see it.
        other = await lab.start()
        assert (await other.post("/responses", body)).status_code == 400


@virtually
async def test_a_thread_is_continued_with_what_is_new() -> None:
    async with gateway() as lab:
        agent = await lab.start()
        tools = [{"name": "add", "input_schema": {}}]
        first = (
            await agent.post(
                "/messages?beta=true",
                {
                    **BODIES["/messages"],
                    "system": "Be.",
                    "tools": tools,
                    "thread": {"type": "create"},
                },
            )
        ).json()
        thread = {"type": "continue", "previous_message_id": first["id"]}
        body = {"messages": [{"role": "user", "content": "two"}], "thread": thread}
        assert (await agent.post("/messages", body)).status_code == 200
        sent = lab.conversations[0].requests[1]
        assert [each.content for each in sent.messages] == ["Be.", "hello", "reply 0", "two"]
        assert [each.name for each in sent.tools] == ["add"]
        # From one reply, two threads may continue: branches.
        other = {**body, "messages": [{"role": "user", "content": "three"}]}
        assert (await agent.post("/messages", other)).status_code == 200
        assert lab.conversations[0].requests[2].messages[-1].content == "three"
        gone = {**body, "thread": {**thread, "previous_message_id": "msg_9"}}
        reply = await agent.post("/messages", gone)
        assert reply.status_code == 404
        assert error_of(reply)["details"] == {"error_code": "thread_not_found"}


# --- failures ---


@PATHS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "message"),
    [
        (PromptTooLong("9000 tokens, of 8192 at most"), 400, "prompt is too long: 9000 tokens"),
        (ValueError("the template needs a user's message"), 400, "the template needs"),
        (RuntimeError("the engine is on fire"), 500, "RuntimeError: the engine is on fire"),
        (ApiError(410, "the rollout is over"), 410, "the rollout is over"),
    ],
)
@virtually
async def test_a_failed_call_is_an_error_and_no_interaction(
    path: str, stream: bool, failure: Exception, status: int, message: str
) -> None:
    async with gateway(lambda: Scripted(failure=failure)) as lab:
        agent = await lab.start()
        reply = await agent.post(path, {**BODIES[path], "stream": stream})
        assert reply.status_code == status
        assert message in error_of(reply)["message"]
        assert reply.headers["x-should-retry"] == "false"
        assert lab.service.in_flight == 0
        assert lab.service.statistics()["counts"].get("failed", 0) == (status == 500)
        lab.conversations[0].failure = None
        assert (await agent.post(path, BODIES[path])).status_code == 200
        await agent.post("/rl/end_session")
        assert len((await lab.export(agent))["interactions"]) == 1


@PATHS
@virtually
async def test_a_lost_engine_is_waited_for(path: str) -> None:
    """A client that got an error instead would ask again: a second sample of the same turn."""
    async with gateway(lambda: Scripted(delay_s=100), keep_alive_s=15) as lab:
        agent = await lab.start()
        assert (await agent.post(path, BODIES[path])).status_code == 200
        reply = await agent.post(path, {**BODIES[path], "stream": True})
        signs = reply.content.count(b"event: ping") + reply.content.count(b": waiting")
        assert signs == 6
        read = {"/chat/completions": chat_of, "/responses": response_of, "/messages": message_of}
        assert "reply 1" in str(read[path](sse(reply.content)))


@PATHS
@virtually
async def test_an_error_after_signs_of_life_is_an_event(path: str) -> None:
    failure = RuntimeError("the engine is on fire")
    async with gateway(lambda: Scripted(delay_s=20, failure=failure)) as lab:
        agent = await lab.start()
        reply = await agent.post(path, {**BODIES[path], "stream": True})
        assert reply.status_code == 200
        _, data = sse(reply.content)[-1]
        assert "on fire" in data["error"]["message"]


@virtually
async def test_a_wrong_number_of_replies_is_the_conversations_fault() -> None:
    class Short(Scripted):
        async def reply(self, request: Any) -> list[Any]:
            return (await super().reply(request))[:1]

    async with gateway(Short) as lab:
        reply = await (await lab.start()).chat(n=2)
        assert reply.status_code == 500
        assert "1 replies to n = 2" in error_of(reply)["message"]


@virtually
async def test_closing_answers_what_waits_and_refuses_what_comes() -> None:
    async with gateway() as lab:
        agent = await lab.start()
        waiting = asyncio.create_task(agent.chat())
        await asyncio.sleep(0.5)
        await lab.service.close()
        assert (await waiting).status_code == 503
        assert lab.conversations[0].canceled == 1
        assert (await agent.chat()).status_code == 410
        assert (await lab.admin("/rl/start_session")).status_code == 503
        found = await lab.export(agent)
        assert (found["ended_by"], found["outcome"]) == ("gateway", "no_interactions")


# --- limits ---


@virtually
async def test_too_many_calls_are_told_when_to_come_again() -> None:
    async with gateway(requests=3, session_requests=2, retry_after_s=2.5) as lab:
        first, second = await lab.start(), await lab.start()
        running = [asyncio.create_task(first.chat(f"{i}")) for i in range(2)]
        await asyncio.sleep(0.1)
        refused = await first.chat("one too many")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2.5")
        assert error_of(refused)["type"] == "rate_limit_error"
        running.append(asyncio.create_task(second.chat("3")))
        await asyncio.sleep(0.1)
        reply = await second.post("/messages", BODIES["/messages"])
        assert (reply.status_code, error_of(reply)["type"]) == (429, "rate_limit_error")
        assert [each.status_code for each in await asyncio.gather(*running)] == [200] * 3
        assert (await first.chat("now")).status_code == 200
        assert lab.service.statistics()["counts"]["refused_requests"] == 2


@virtually
async def test_sessions_are_limited_by_number_and_by_grants() -> None:
    async with gateway(open_sessions=2, capacity=3) as lab:
        agents = [await lab.start(), await lab.start()]
        full = await lab.admin("/rl/start_session", {"task_id": "x"})
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        for agent in agents:
            await agent.post("/rl/end_session")
        await lab.start()
        empty = await lab.admin("/rl/start_session", {"task_id": "x"})
        assert empty.status_code == 429
        assert "grant_capacity" in error_of(empty)["message"]
        assert (await lab.admin("/grant_capacity")).json() == {"capacity": 1}
        await lab.start()
        # Refused starts opened no conversation.
        assert len(lab.conversations) == 4


# --- calls that are sent again ---


@PATHS
@virtually
async def test_a_retry_while_it_samples_gets_the_same_reply(path: str) -> None:
    async with gateway() as lab:
        agent = await lab.start()
        first = asyncio.create_task(agent.post(path, BODIES[path]))
        await asyncio.sleep(0.5)
        again = await agent.post(path, BODIES[path], x_stainless_retry_count="1")
        assert again.json() == (await first).json()
        assert len(lab.conversations[0].requests) == 1
        assert lab.service.statistics()["counts"]["sent_again"] == 1


@virtually
async def test_a_retry_after_the_reply_gets_it_for_a_while() -> None:
    async with gateway(retry_window_s=30) as lab:
        agent = await lab.start()
        first = (await agent.chat()).json()
        await asyncio.sleep(29)
        assert (await agent.chat(retries=1)).json() == first
        await asyncio.sleep(2)
        assert (await agent.chat(retries=2)).json()["id"] != first["id"]


@virtually
async def test_equal_calls_that_are_no_retries_are_samples_of_their_own() -> None:
    async with gateway() as lab:
        agent = await lab.start()
        replies = await asyncio.gather(*[agent.chat() for _ in range(3)])
        assert {text_of(each) for each in replies} == {"reply 0", "reply 1", "reply 2"}
        assert text_of(await agent.chat()) == "reply 3"


@virtually
async def test_different_calls_at_once_are_sampled_at_once() -> None:
    loop = asyncio.get_running_loop()
    async with gateway() as lab:
        agent = await lab.start()
        replies = await asyncio.gather(agent.chat("a"), agent.chat("b"), agent.chat("c", n=2))
        assert loop.time() == pytest.approx(1)
        assert len({each.json()["id"] for each in replies}) == 3
        assert [each.messages[0].content for each in lab.conversations[0].requests] == [*"abc"]


@virtually
async def test_the_order_of_fields_does_not_make_another_call() -> None:
    async with gateway() as lab:
        agent = await lab.start()
        body = {"n": 1, **BODIES["/chat/completions"]}
        first = (await agent.post("/chat/completions", body)).json()
        turned = {name: body[name] for name in reversed(body)}
        again = await agent.post("/v1/chat/completions", turned, x_stainless_retry_count="1")
        assert again.json() == first


@virtually
async def test_a_retry_belongs_to_its_session() -> None:
    async with gateway() as lab:
        first, second = await lab.start(), await lab.start()
        one = (await first.chat()).json()
        other = (await second.chat(retries=1)).json()
        assert one["id"] != other["id"]


@virtually
async def test_a_client_that_hangs_up_loses_no_token() -> None:
    """What it asked for is sampled, recorded, and given to it when it asks again."""
    async with gateway() as lab:
        agent = await lab.start()
        first = asyncio.create_task(agent.chat("a"))
        other = asyncio.create_task(agent.chat("b"))
        await asyncio.sleep(0.5)
        first.cancel()
        other.cancel()
        await asyncio.sleep(10)
        assert lab.conversations[0].canceled == 0
        again = await agent.chat("a")
        assert text_of(again) == "reply 0"
        assert text_of(await agent.chat("a")) == "reply 2"
        await agent.post("/rl/end_session")
        found = await lab.export(agent)
        delivered = [each["delivered"] for each in found["interactions"].values()]
        assert delivered == [True, False, True]
        assert lab.conversations[0].scores[0].undelivered == {"r1"}
        assert lab.service.statistics()["counts"]["undelivered"] == 1


@virtually
async def test_a_client_that_hangs_up_during_a_stream_has_not_got_it() -> None:
    async with gateway(lambda: Scripted(delay_s=40)) as lab:
        agent = await lab.start()
        first = asyncio.create_task(agent.chat(stream=True))
        await asyncio.sleep(20)
        first.cancel()
        await asyncio.sleep(30)
        again = chat_of(sse((await agent.chat(stream=True)).content))
        assert again["choices"][0]["message"]["content"] == "reply 0"


@virtually
async def test_a_retry_of_a_failed_call_is_a_new_one() -> None:
    async with gateway(lambda: Scripted(failure=RuntimeError("no"))) as lab:
        agent = await lab.start()
        assert (await agent.chat()).status_code == 500
        lab.conversations[0].failure = None
        assert (await agent.chat(retries=1)).status_code == 200
        assert len(lab.conversations[0].requests) == 2


@virtually
async def test_a_retry_is_no_call_more() -> None:
    async with gateway(session_requests=1) as lab:
        agent = await lab.start()
        first = asyncio.create_task(agent.chat())
        await asyncio.sleep(0.5)
        assert (await agent.chat("other")).status_code == 429
        assert (await agent.chat(retries=1)).json() == (await first).json()


# --- sessions ---


@virtually
async def test_a_session_from_start_to_export() -> None:
    async with gateway() as lab:
        agent = await lab.start("math/7")
        assert agent.session_id == "math/7-0"
        early = await agent.post("/rl/set_reward", {"reward": 1})
        assert (early.status_code, error_of(early)["code"]) == (400, "no_interactions")
        one = (await agent.chat("a")).json()["id"]
        two = (await agent.post("/responses", {"input": "b"})).json()["id"]
        for body in ({"interaction_id": one, "reward": 0.5}, {"reward": 1}):
            reply = await agent.post("/v1/rl/set_reward", body)
            assert reply.json() == {"message": "success"}
        for body, code in (
            ({"interaction_id": "chatcmpl-9", "reward": 1}, "unknown_interaction"),
            ({"reward": None}, None),
            ({"reward": "1"}, None),
            ({"reward": True}, None),
            ({"reward": 1, "index": 1, "interaction_id": one}, None),
        ):
            reply = await agent.post("/rl/set_reward", body)
            assert (reply.status_code, error_of(reply)["code"]) == (400, code)
        for _ in range(2):
            reply = await agent.post("/rl/end_session")
            assert reply.json() == {"message": "success", "interaction_count": 2}
        found = await lab.export(agent, style="concat", discount=0.9)
        assert found == {
            "session_id": "math/7-0",
            "task_id": "math/7",
            "outcome": "rewarded",
            "ended_by": "client",
            "reward": 1.0,
            "interactions": {
                one: {
                    "replies": ["r0"],
                    "rewards": [0.5],
                    "generated_tokens": 3,
                    "delivered": True,
                },
                two: {
                    "replies": ["r1"],
                    "rewards": [None],
                    "generated_tokens": 3,
                    "delivered": True,
                },
            },
            "rows": [{"request": 0}, {"request": 1}],
        }
        (scores,) = lab.conversations[0].scores
        assert (scores.style, scores.discount, scores.final) == ("concat", 0.9, 1.0)
        assert scores.rewards == {"r0": 0.5}


@PATHS
@virtually
async def test_a_session_that_is_over_ends_the_agent_without_retries(path: str) -> None:
    async with gateway() as lab:
        agent = await lab.start()
        await agent.post("/rl/end_session")
        reply = await agent.post(path, BODIES[path])
        assert (reply.status_code, reply.headers["x-should-retry"]) == (410, "false")
        assert "has ended" in error_of(reply)["message"]
        await lab.export(agent)
        await asyncio.sleep(100)
        lab.service.sweep()
        reply = await agent.post(path, BODIES[path])
        assert (reply.status_code, "was exported" in error_of(reply)["message"]) == (410, True)
        assert (await agent.post("/rl/end_session")).status_code == 410


@virtually
async def test_a_key_of_the_agents_own() -> None:
    async with gateway() as lab:
        agent = await lab.start("one", "own-key")
        assert agent.key == "own-key"
        busy = await lab.admin("/rl/start_session", {"task_id": "two", "api_key": "own-key"})
        assert (busy.status_code, busy.headers["x-should-retry"]) == (409, "false")
        await agent.chat()
        await agent.post("/rl/end_session")
        again = await lab.start("two", "own-key")
        assert (await again.chat()).status_code == 200
        assert len((await lab.export(agent))["interactions"]) == 1
        admin = await lab.admin("/rl/start_session", {"task_id": "x", "api_key": ADMIN})
        assert admin.status_code == 400
        long = await lab.admin("/rl/start_session", {"task_id": "x" * 300})
        assert long.status_code == 400


@virtually
async def test_an_export_waits_for_the_end_and_for_what_still_samples() -> None:
    loop = asyncio.get_running_loop()
    async with gateway(lambda: Scripted(delay_s=50)) as lab:
        agent = await lab.start()
        exporting = asyncio.create_task(lab.export(agent))
        await asyncio.sleep(10)
        answering = asyncio.create_task(agent.chat())
        await asyncio.sleep(10)
        await agent.post("/rl/end_session")
        assert not exporting.done()
        found = await exporting
        assert loop.time() == pytest.approx(60)
        assert len(found["interactions"]) == 1
        assert (await answering).status_code == 200


@pytest.mark.parametrize("wait_s", [0, 30])
@virtually
async def test_a_late_reward_is_waited_for(wait_s: float) -> None:
    loop = asyncio.get_running_loop()
    async with gateway(reward_timeout_s=wait_s) as lab:
        agent = await lab.start()
        await agent.chat()
        await agent.post("/rl/end_session")
        exporting = asyncio.create_task(lab.export(agent))
        await asyncio.sleep(20)
        late = await agent.post("/rl/set_reward", {"reward": 1})
        found = await exporting
        if wait_s:
            assert (late.status_code, found["outcome"], found["reward"]) == (200, "rewarded", 1.0)
            assert loop.time() == pytest.approx(21)
        else:
            assert (late.status_code, found["outcome"], found["reward"]) == (410, "no_reward", None)


@virtually
async def test_a_reward_that_never_comes_is_waited_for_no_longer() -> None:
    loop = asyncio.get_running_loop()
    async with gateway(reward_timeout_s=30) as lab:
        agent = await lab.start()
        await agent.chat()
        await agent.post("/rl/end_session")
        assert (await lab.export(agent))["outcome"] == "no_reward"
        assert loop.time() == pytest.approx(31)
        late = await agent.post("/rl/set_reward", {"reward": 1})
        assert late.status_code == 410


@virtually
async def test_an_agent_that_dies_is_no_reward_of_zero() -> None:
    loop = asyncio.get_running_loop()
    async with gateway(session_timeout_s=3600) as lab:
        agent = await lab.start()
        exporting = asyncio.create_task(lab.export(agent))
        await agent.chat()
        found = await exporting
        assert loop.time() == pytest.approx(3601)
        assert (found["outcome"], found["reward"]) == ("no_reward", None)
        assert found["ended_by"] == "timeout"
        reply = await agent.chat()
        assert reply.status_code == 410


@virtually
async def test_an_export_can_be_repeated_for_a_while() -> None:
    async with gateway(retry_window_s=30) as lab:
        agent = await lab.start()
        await agent.chat()
        await agent.post("/rl/end_session")
        assert await lab.export(agent) == await lab.export(agent)
        await asyncio.sleep(31)
        gone = await lab.admin("/export_trajectories", {"session_id": agent.session_id})
        assert (gone.status_code, error_of(gone)["code"]) == (404, "unknown_session")


@virtually
async def test_wrong_exports_are_named() -> None:
    async with gateway() as lab:
        agent = await lab.start()
        for body, status in (
            ({}, 400),
            ({"session_id": "x"}, 404),
            ({"session_id": agent.session_id, "style": "tree"}, 400),
            ({"session_id": agent.session_id, "discount": 2}, 400),
        ):
            assert (await lab.admin("/export_trajectories", body)).status_code == status


@virtually
async def test_unused_sessions_are_swept_and_make_room() -> None:
    async with gateway(open_sessions=1, session_timeout_s=100) as lab:
        agent = await lab.start()
        await asyncio.sleep(99)
        assert (await lab.admin("/rl/start_session")).status_code == 429
        await asyncio.sleep(1)
        other = await lab.start()
        assert lab.service.statistics()["open_sessions"] == 1
        assert (await agent.chat()).status_code == 410
        assert (await other.chat()).status_code == 200
        await asyncio.sleep(1000)
        lab.service.sweep()
        assert lab.service.statistics()["open_sessions"] == 0
        assert lab.service.statistics()["counts"]["never_exported"] == 1


@pytest.mark.parametrize("failure", [PromptTooLong("9 tokens"), ValueError("no image")], ids=type)
@virtually
async def test_a_session_whose_calls_failed_leaves_no_cycles(failure: Exception) -> None:
    """Otherwise all of its prompts would stay until a search for cycles."""
    async with gateway(lambda: Scripted(failure=failure)) as lab:
        agent = await lab.start()
        # Neither HTTP, whose connections are not what this is about, nor the list of the test.
        conversation = weakref.ref(lab.conversations.pop())
        session = lab.service.open_session([agent.key])
        call = CHAT.parse(BODIES["/chat/completions"])
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                exchange = lab.service.ask(session, CHAT, call, b"")
                await asyncio.wait((exchange.task,))
                assert isinstance(exchange.task.exception(), ApiError)
            # The error that the test itself holds shows frames, which hold the conversation.
            failure.__traceback__ = None
            lab.service.end_session(session)
            lab.service.export(session)
            del exchange, session
            await asyncio.sleep(100)
            lab.service.sweep()
            assert conversation() is None
        finally:
            gc.enable()


@virtually
async def test_a_session_may_end_while_a_body_is_on_its_way() -> None:
    async with gateway() as lab:
        agent = await lab.start()

        async def slowly() -> Any:
            yield b'{"messages": [{"role": "user", '
            await asyncio.sleep(5)
            yield b'"content": "x"}]}'

        headers = {"authorization": f"Bearer {agent.key}"}
        sending = asyncio.create_task(
            lab.http.post("/chat/completions", content=slowly(), headers=headers)
        )
        await asyncio.sleep(1)
        await agent.post("/rl/end_session")
        assert (await sending).status_code == 410
        assert not lab.conversations[0].requests


@virtually
async def test_a_program_may_start_sessions_with_conversations_of_its_own() -> None:
    """As a run does, which knows what each session is for."""
    async with gateway() as lab:
        own = Scripted()
        session, key = lab.service.start_session("task", conversation=own)
        agent = Agent(lab.http, session.session_id, key)
        assert text_of(await agent.chat()) == "reply 0"
        assert len(own.requests) == 1
        assert lab.conversations == []
        lab.service.end_session(session)
        await lab.service.settled(session)
        assert lab.service.export(session)["rows"] == [{"request": 0}]

"""The shipped agent: OpenAI's client, over a real socket, with scripted replies."""

from __future__ import annotations

import asyncio
import json

from areal_lab.agents.examples.multiply import MOST_REPLIES, multiply, run_agent_return_reward
from areal_lab.agents.gateway.server import base_url, bind, serve
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.messages import ChatReply, ChatRequest
from tests.agents.gateway.scripted import ADMIN, MODEL, Scripted, calls, says


def play(*replies: ChatReply) -> tuple[float, list[ChatRequest]]:
    """The reward of one sample, and what the agent asked for."""

    async def main() -> tuple[float, list[ChatRequest]]:
        model = Scripted(delay_s=0, script=lambda _, number: replies[number])
        service = Service(lambda _: model, admin_key=ADMIN, model=MODEL)
        listener = bind()
        serving = asyncio.create_task(serve(service, listener))
        _, key = service.start_session("sample")
        given = {"base_url": f"{base_url(listener)}/v1", "api_key": key}
        async with asyncio.timeout(60):
            reward = await run_agent_return_reward(
                {**given, "question": "60 * 64", "answer": "3840"}
            )
        serving.cancel()
        await asyncio.wait([serving])
        return reward, model.requests

    return asyncio.run(main())


def call(a: object, b: object) -> ChatReply:
    return calls("multiply", json.dumps({"a": a, "b": b}))


def test_a_result_is_read_and_answered() -> None:
    reward, (first, second) = play(call(60, 64), says("Answer: 3840"))
    assert reward == 1.0
    assert [tool.name for tool in first.tools] == ["multiply"]
    assert first.messages[-1].content == "Question: 60 * 64"
    assert [one.role for one in second.messages[len(first.messages) :]] == ["assistant", "tool"]
    assert second.messages[-1].content == "3840"


def test_an_answer_needs_no_tool_and_has_to_be_right() -> None:
    for said, reward in (("Answer: 3840", 1.0), ("Answer: 3841", 0.0), ("3840", 0.0), ("", 0.0)):
        assert play(says(said))[0] == reward


def test_calls_end() -> None:
    reward, asked = play(*[call(60, 64)] * MOST_REPLIES)
    assert (reward, len(asked)) == (0.0, MOST_REPLIES)


def test_the_tool_says_what_is_wrong() -> None:
    assert multiply('{"a": 60, "b": "64"}') == "3840"
    for arguments in (
        "60 * 64",
        "[60, 64]",
        '{"a": 60}',
        '{"a": null, "b": 2}',
        '{"a": "x", "b": 1}',
    ):
        assert multiply(arguments) == "error: a and b must be integers"

"""A user's agent and how it ends: whatever it does, its sample has an outcome."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from areal_lab.agents.agent import Agent
from areal_lab.agents.gateway import server
from areal_lab.agents.workflow import Episode
from areal_lab.engines.protocol import Generated, SamplingParams
from areal_lab.rewards.service import RewardError
from tests.agents.scripted import Scripted
from tests.data.byte_tokenizer import save_byte_tokenizer
from tests.pipeline.programs import ask

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% if m.role == 'assistant' %}<end>{% endif %}\n{% endfor %}"
)
HERE = "tests.agents.test_agent"
QUESTION = [{"role": "user", "content": "34 * 27"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def play(model: Path, fn: str, engine: Any, **settings: Any) -> Episode:
    """One sample of an agent of this file."""

    async def main() -> Episode:
        agent = Agent(fn=f"{HERE}:{fn}", **settings)
        await agent.open(model)
        try:
            return await agent.run(engine, {"prompt": "34 * 27"})
        finally:
            await agent.close()

    return asyncio.run(main())


# --- agents --------------------------------------------------------------------------------------

hanging = threading.Event()
"""Never set."""


def hangs(data: Mapping[str, Any]) -> float:
    ask(data["base_url"], data["api_key"], QUESTION)
    hanging.wait()
    return 1.0


async def hangs_softly(data: Mapping[str, Any]) -> float:
    await asyncio.to_thread(ask, data["base_url"], data["api_key"], QUESTION)
    await asyncio.Event().wait()
    return 1.0


def exits(data: Mapping[str, Any]) -> float:
    ask(data["base_url"], data["api_key"], QUESTION)
    raise SystemExit(0)


async def exits_softly(data: Mapping[str, Any]) -> float:
    await asyncio.to_thread(exits, data)
    return 1.0


async def cancels_itself(data: Mapping[str, Any]) -> float:
    await asyncio.to_thread(ask, data["base_url"], data["api_key"], QUESTION)
    raise asyncio.CancelledError


def times_out_itself(data: Mapping[str, Any]) -> float:
    ask(data["base_url"], data["api_key"], QUESTION)
    raise TimeoutError("the browser did not answer")


def tells_its_key(data: Mapping[str, Any]) -> float:
    raise ValueError(f"no page for {dict(data)}")


async def leaves(data: Mapping[str, Any]) -> float:
    """Fails while its question is being answered."""
    asking = asyncio.create_task(
        asyncio.to_thread(ask, data["base_url"], data["api_key"], QUESTION)
    )
    await Slow.asked.wait()
    asking.cancel()
    raise KeyError("nothing of interest")


def asks(data: Mapping[str, Any]) -> float:
    ask(data["base_url"], data["api_key"], QUESTION)
    return 1.0


@dataclass
class Slow(Scripted):
    """Ends its turns when it is given up, with what there is by then."""

    over: asyncio.Event = field(default_factory=asyncio.Event)
    asked = asyncio.Event()

    def give_up(self) -> None:
        super().give_up()
        self.over.set()

    async def turn(
        self, prompt_tokens: Sequence[int], sampling: SamplingParams | None = None
    ) -> Generated:
        whole = await super().turn(prompt_tokens, sampling)
        Slow.asked.set()
        await self.over.wait()
        return Generated(
            request_id=whole.request_id,
            segments=whole.segments[:1],
            finish_reason="abort",
            retractions=0,
            cached_tokens=0,
        )


# --- tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "status", "detail"),
    [
        ("hangs", "timeout", "the agent took more than 0.5 s"),
        ("hangs_softly", "timeout", "the agent took more than 0.5 s"),
        ("exits", "error", "SystemExit: 0"),
        ("exits_softly", "error", "SystemExit: 0"),
        ("cancels_itself", "error", "the agent canceled itself"),
        ("times_out_itself", "error", "the browser did not answer"),
    ],
)
def test_however_an_agent_ends_its_sample_has_an_outcome_and_its_tokens(
    model: Path, fn: str, status: str, detail: str
) -> None:
    engine = Scripted(["Answer: 918<end>"])
    episode = play(model, fn, engine, timeout_s=0.5 if status == "timeout" else 60.0)
    assert (episode.outcome.status, episode.tokens) == (status, len("Answer: 918") + 1)
    assert detail in episode.outcome.detail
    assert engine.given_up


def test_an_answer_that_nobody_waits_for_ends_and_keeps_its_tokens(model: Path) -> None:
    Slow.asked.clear()
    episode = play(model, "leaves", Slow(["0123456789"]))
    assert "nothing of interest" in episode.outcome.detail
    assert (episode.tokens, episode.end) == (5, "abort")


def test_an_agent_that_ends_well_gives_nothing_up(model: Path) -> None:
    engine = Scripted(["Answer: 918<end>"])
    assert play(model, "asks", engine).outcome.reward == 1.0
    assert not engine.given_up


def test_hung_agents_do_not_keep_others_from_running(model: Path) -> None:
    """More than the event loop's executor has threads."""

    async def main() -> list[Episode]:
        agent, well = Agent(fn=f"{HERE}:hangs", timeout_s=1.0), Agent(fn=f"{HERE}:asks")
        await agent.open(model)
        await well.open(model)
        try:
            return await asyncio.gather(
                *(agent.run(Scripted(["1"]), {"prompt": "1"}) for _ in range(40)),
                well.run(Scripted(["1"]), {"prompt": "1"}),
            )
        finally:
            await agent.close()
            await well.close()

    *hung, fine = asyncio.run(main())
    assert {one.outcome.status for one in hung} == {"timeout"}
    assert fine.outcome.status == "ok"


def test_the_detail_of_a_failure_does_not_tell_the_key(model: Path) -> None:
    detail = play(model, "tells_its_key", Scripted([])).outcome.detail
    assert "'api_key': '(key of its session)'" in detail


def test_a_session_waits_for_a_free_process_as_long_as_it_takes(model: Path) -> None:
    async def main() -> float:
        agent = Agent(fn=f"{HERE}:asks", timeout_s=1.0)
        await agent.open(model)
        await agent.close()
        return agent._service.limits.session_timeout_s

    assert asyncio.run(main()) == float("inf")


def test_a_gateway_that_has_ended_ends_the_run(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_: object) -> None:
        raise OSError("too many open files")

    async def main() -> None:
        agent = Agent(fn=f"{HERE}:asks")
        await agent.open(model)
        try:
            await asyncio.wait([agent._gateway])
            await agent.run(Scripted(["1"]), {"prompt": "1"})
        finally:
            await agent.close()

    monkeypatch.setattr(server, "_sweep", fails)
    with pytest.raises(RewardError, match=r"gateway of the run has ended: .*too many open files"):
        asyncio.run(main())


def wrapped(function: Any) -> Any:
    def call(data: Mapping[str, Any]) -> Any:
        return function(data)

    return call


@wrapped
async def rewards_the_second_choice(data: Mapping[str, Any]) -> dict[str, float]:
    reply = await asyncio.to_thread(ask, data["base_url"], data["api_key"], QUESTION, n=2)
    return {f"{reply['id']}/1": 1.0}


def test_a_wrapped_async_agent_is_awaited_and_one_of_two_choices_rewarded(model: Path) -> None:
    episode = play(model, "rewards_the_second_choice", Scripted(["1", "2"]))
    assert (episode.outcome.status, episode.outcome.detail) == ("ok", "")
    assert [row.turn_returns for row in episode.rows] == [(1.0,)]

"""Samples that sessions from outside make, over HTTP in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.agents.gateway.server import create_app
from areal_lab.agents.hosting.conversations import Conversations, Serving, run_limits
from areal_lab.agents.hosting.outside import OutsideSamples, WaitingSamples
from areal_lab.agents.workflow import Episode
from tests.agents.gateway.scripted import ADMIN, Agent, virtually
from tests.agents.scripted import CODEC, Scripted
from tests.data.byte_tokenizer import save_byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}:{{ m.content }}<end>{% else %}{{ m.content }}{% endif %}|"
    "{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)
PROBLEM = {"prompt": "2 + 3 =", "answer": "5", "level": 1, "image": b"not for JSON"}


@dataclass
class Run:
    """The samples of a run, and a client of its gateway."""

    samples: OutsideSamples
    http: httpx2.AsyncClient
    tasks: list[asyncio.Task[Episode]] = field(default_factory=list)

    async def group(self, number: int, *, samples: int = 2) -> list[asyncio.Task[Episode]]:
        """The samples of a group, which wait from now on."""
        new = []
        for index in range(samples):
            engine = Scripted([f"{number}{index}{turn}" for turn in range(9)], group=number)
            new.append(asyncio.create_task(self.samples.run(engine, PROBLEM)))
        self.tasks += new
        await asyncio.sleep(0.01)
        return new

    async def post(self, path: str, key: str, body: Any = None) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key}"}
        return await self.http.post(path, json=body or {}, headers=headers)

    async def start(self, task_id: str = "", **more: Any) -> Agent:
        reply = await self.post("/rl/start_session", ADMIN, {"task_id": task_id, **more})
        assert reply.status_code == 200, reply.text
        found = reply.json()
        self.told = found
        return Agent(self.http, found["session_id"], found["api_key"])

    async def played(self, task_id: str = "", *, reward: float | None = 1.0) -> str:
        """A session of one call, from its start to its end; returns its group."""
        agent = await self.start(task_id)
        group: str = self.told["group"]
        assert (await agent.chat("hello")).status_code == 200
        if reward is not None:
            assert (await agent.post("/rl/set_reward", {"reward": reward})).status_code == 200
        assert (await agent.post("/rl/end_session")).status_code == 200
        await asyncio.sleep(0.01)
        return group


@asynccontextmanager
async def run(folder: Path, *, discount: float = 1.0, **limits: Any) -> AsyncIterator[Run]:
    save_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    serving = Serving(turn_discount=discount, limits=run_limits(**limits))
    samples = OutsideSamples(
        Conversations(folder, serving),
        serving,
        admin_key=ADMIN,
        model="tiny",
        clock=asyncio.get_running_loop().time,
    )
    transport = httpx2.ASGITransport(app=create_app(samples.service))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
        lab = Run(samples, http)
        yield lab
        for task in lab.tasks:
            task.cancel()
        await asyncio.gather(*lab.tasks, return_exceptions=True)
        samples.close()
        assert len(samples.waiting) == 0


def text_of(episode: Episode) -> str:
    return CODEC.decode([token for part in episode.segments for token in part.tokens])


@virtually
async def test_a_session_is_the_sample_it_was_started_for(tmp_path: Path) -> None:
    async with run(tmp_path) as lab:
        first, second = await lab.group(3)
        agent = await lab.start()
        assert lab.told == {
            "session_id": "session-0",
            "api_key": agent.key,
            "group": "train-3",
            "data": {"prompt": "2 + 3 =", "answer": "5", "level": 1},
        }
        said = (await agent.chat("1 + 1")).json()["choices"][0]["message"]["content"]
        await agent.post("/rl/set_reward", {"reward": 0.25})
        assert not first.done(), "it may still speak"
        await agent.post("/rl/end_session")
        episode = await first
        assert (episode.outcome.status, episode.outcome.reward) == ("ok", 0.25)
        assert text_of(episode) == said == "300"
        assert not second.done()
        assert (await agent.chat("more")).status_code == 410


@virtually
async def test_without_a_waiting_sample_a_session_is_refused_for_a_while(tmp_path: Path) -> None:
    async with run(tmp_path) as lab:
        reply = await lab.post("/rl/start_session", ADMIN)
        assert reply.status_code == 429
        assert reply.headers["retry-after"] == "1"
        assert reply.json()["error"]["code"] == "no_capacity"
        await lab.group(0, samples=1)
        await lab.start()
        assert (await lab.post("/rl/start_session", ADMIN)).status_code == 429
        assert (await lab.post("/grant_capacity", ADMIN)).json() == {"capacity": None}
        assert (await lab.post("/rl/start_session", ADMIN)).status_code == 429


@virtually
async def test_a_start_that_is_refused_takes_no_sample(tmp_path: Path) -> None:
    async with run(tmp_path) as lab:
        await lab.group(0)
        await lab.start(api_key="fixed")
        for key, status in (("fixed", 409), ("two words", 400), (ADMIN, 400)):
            reply = await lab.post("/rl/start_session", ADMIN, {"api_key": key})
            assert reply.status_code == status
        assert len(lab.samples.waiting) == 1
        assert (await lab.post("/rl/start_session", "wrong")).status_code == 403


@virtually
async def test_one_key_serves_one_session_after_the_other(tmp_path: Path) -> None:
    async with run(tmp_path) as lab:
        tasks = await lab.group(0)
        for reward in (0.0, 1.0):
            agent = await lab.start(api_key="fixed")
            await agent.chat(f"reward {reward}")
            await agent.post("/rl/set_reward", {"reward": reward})
            await agent.post("/rl/end_session")
        episodes = await asyncio.gather(*tasks)
        assert [episode.outcome.reward for episode in episodes] == [0.0, 1.0]


@virtually
async def test_sessions_on_one_task_are_one_group(tmp_path: Path) -> None:
    async with run(tmp_path) as lab:
        await lab.group(0)
        await lab.group(1)
        groups = [await lab.played(task) for task in ("a", "b", "a", "b")]
        assert groups == ["train-0", "train-1", "train-0", "train-1"]


@virtually
async def test_a_session_without_a_reward_gives_its_place_to_the_next(tmp_path: Path) -> None:
    async with run(tmp_path) as lab:
        (task,) = await lab.group(0, samples=1)
        await lab.played(reward=None)
        await (await lab.start()).post("/rl/end_session")
        await asyncio.sleep(0.01)
        assert not task.done()
        await lab.played(reward=0.0)
        episode = await task
        assert (episode.outcome.reward, text_of(episode)) == (0.0, "001")
        assert lab.samples.ends == {"no_reward": 1, "no_interactions": 1, "rewarded": 1}


@virtually
async def test_a_task_that_fails_once_gives_its_group_up(tmp_path: Path) -> None:
    async with run(tmp_path) as lab:
        tasks = await lab.group(0, samples=3)
        await lab.group(1)
        going_on = await lab.start("a")
        await lab.played("a", reward=None)
        await going_on.chat("the run does not interrupt it")
        await going_on.post("/rl/set_reward", {"reward": 1})
        await going_on.post("/rl/end_session")
        episodes = await asyncio.gather(*tasks)
        assert [one.outcome.status for one in episodes] == ["ok", "abandoned", "abandoned"]
        assert "ended without a reward" in episodes[2].outcome.detail
        assert await lab.played("a") == "train-1"


@virtually
async def test_a_task_with_too_few_sessions_gives_its_group_up_in_time(tmp_path: Path) -> None:
    async with run(tmp_path, session_timeout_s=100.0) as lab:
        tasks = await lab.group(0, samples=3)
        await lab.played("a")
        await asyncio.sleep(90)
        await lab.played("a")
        await asyncio.sleep(90)
        assert not tasks[2].done(), "from the last one that was started"
        await asyncio.sleep(20)
        outcome = tasks[2].result().outcome
        assert outcome.status == "abandoned"
        assert "started no further session in 100 s, but its group wants 1 more" in outcome.detail


@virtually
async def test_time_of_an_earlier_group_does_not_run_out_in_a_later_one(tmp_path: Path) -> None:
    async with run(tmp_path, session_timeout_s=100.0) as lab:
        tasks = await lab.group(0, samples=2)
        await lab.played("a")
        await asyncio.sleep(50)
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.01)
        again = await lab.group(0, samples=2)  # as held-out problems are measured again
        await asyncio.sleep(70)
        assert not any(task.done() for task in again)


@virtually
async def test_a_session_that_is_not_used_is_no_reward_of_0(tmp_path: Path) -> None:
    async with run(tmp_path, session_timeout_s=100.0) as lab:
        (task,) = await lab.group(0, samples=1)
        agent = await lab.start()
        await agent.chat("and then nothing")
        await asyncio.sleep(101)
        assert lab.samples.ends == {"timeout": 1}
        assert not task.done()
        assert (await agent.chat("again")).status_code == 410
        await lab.played()
        assert (await task).outcome.reward == 1.0


@pytest.mark.parametrize(("after_s", "counts"), [(9.0, True), (11.0, False)])
@virtually
async def test_a_late_reward_counts_for_a_while(
    tmp_path: Path, after_s: float, counts: bool
) -> None:
    async with run(tmp_path, reward_timeout_s=10.0) as lab:
        (task,) = await lab.group(0, samples=1)
        agent = await lab.start()
        await agent.chat("well?")
        await agent.post("/rl/end_session")
        await asyncio.sleep(after_s)
        reply = await agent.post("/rl/set_reward", {"reward": 0.5})
        assert reply.status_code == (200 if counts else 410)
        await asyncio.sleep(0.01)
        assert task.done() == counts
        assert lab.samples.ends == ({"rewarded": 1} if counts else {"no_reward": 1})


@virtually
async def test_a_dropped_sample_ends_its_session_and_waits_no_more(tmp_path: Path) -> None:
    async with run(tmp_path) as lab:
        one, other = await lab.group(0)
        agent = await lab.start()
        one.cancel()
        await asyncio.sleep(0.01)
        assert (await agent.chat("still there?")).status_code == 410
        other.cancel()
        # In this moment its task has not run yet.
        assert (await lab.post("/rl/start_session", ADMIN)).status_code == 429


@virtually
async def test_a_session_that_starts_as_its_sample_is_dropped_is_ended(tmp_path: Path) -> None:
    async with run(tmp_path) as lab:
        (task,) = await lab.group(0, samples=1)
        session, _ = lab.samples.service.start_session("")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert session.ended_by == "gateway"


@virtually
async def test_rewards_of_replies_are_returns_of_turns(tmp_path: Path) -> None:
    async with run(tmp_path, discount=0.5) as lab:
        (task,) = await lab.group(0, samples=1)
        agent = await lab.start()
        first = (await agent.chat("one")).json()
        messages = [{"role": "user", "content": "one"}, first["choices"][0]["message"]]
        messages.append({"role": "user", "content": "two"})
        second = (await agent.post("/chat/completions", {"messages": messages})).json()
        for reply, reward in ((first, 0.25), (second, 1.0)):
            body = {"reward": reward, "interaction_id": reply["id"]}
            assert (await agent.post("/rl/set_reward", body)).status_code == 200
        await agent.post("/rl/end_session")
        episode = await task
        (row,) = episode.rows
        assert row.turn_returns == (0.25 + 0.5 * 1.0, 1.0)
        assert episode.outcome.rewards == {first["id"]: 0.25, second["id"]: 1.0}
        assert episode.outcome.reward == 1.25


def waiting(*samples: tuple[str, int]) -> tuple[WaitingSamples[tuple[str, int]], ExitStack]:
    found: WaitingSamples[tuple[str, int]] = WaitingSamples()
    stack = ExitStack()
    for sample in samples:
        stack.enter_context(found.member(sample[0]))
        found.add(sample[0], sample)
    return found, stack


def test_sessions_that_a_task_lacks_are_those_of_all_its_groups() -> None:
    found, _ = waiting(*((group, number) for group in "ab" for number in range(3)))
    assert found.unfilled() == {}
    taken = [found.take("x") for _ in range(4)]  # the whole first group, and one of the second
    found.add("a", taken[0])  # as if its session had ended without a reward
    assert found.unfilled() == {"x": 1 + 2}


def test_sessions_without_a_task_get_the_oldest_samples() -> None:
    found, _ = waiting(("a", 0), ("a", 1), ("b", 0))
    assert [found.take("") for _ in range(3)] == [("a", 0), ("a", 1), ("b", 0)]
    assert found.next("") is None
    with pytest.raises(LookupError, match="no sample waits for a session on ''"):
        found.take("")


def test_a_group_is_of_one_task() -> None:
    found, _ = waiting(*((group, index) for group in "abc" for index in range(2)))
    order = ["x", "y", "x", "", "y", ""]
    assert [found.take(task)[0] for task in order] == ["a", "b", "a", "c", "b", "c"]


def test_a_task_with_a_full_group_begins_another() -> None:
    found, _ = waiting(("a", 0), ("b", 0), ("b", 1))
    assert [found.take("x"), found.take("x")] == [("a", 0), ("b", 0)]
    assert found.unfilled() == {"x": 1}
    assert found.next("y") is None, "the sample that waits is in a group of x"
    assert found.next("") is None


def test_a_sample_that_waits_again_comes_before_younger_groups() -> None:
    found, _ = waiting(("a", 0), ("b", 0))
    assert found.take("") == ("a", 0)
    found.add("a", ("a", 0))
    assert found.next("") == ("a", 0)


def test_a_group_is_forgotten_when_its_last_sample_ends() -> None:
    found, stack = waiting(("a", 0), ("a", 1))
    found.take("x")
    assert "a" in found
    stack.close()
    assert "a" not in found
    assert len(found) == 0
    assert found.of_group("a") == ()
    again = found.member("a")
    with again:
        found.add("a", ("a", 0))
        assert found.next("y") == ("a", 0), "it is of no task any more"


@given(st.lists(st.sampled_from(["", "x", "y", "z"]), max_size=30), st.integers(1, 4))
def test_no_group_has_sessions_of_two_tasks_and_no_sample_two_sessions(
    tasks: list[str], samples: int
) -> None:
    found, _ = waiting(*((str(group), index) for group in range(6) for index in range(samples)))
    taken: dict[tuple[str, int], str] = {}
    for task in tasks:
        expected = found.next(task)
        if expected is None:
            continue
        assert found.take(task) == expected
        assert expected not in taken
        taken[expected] = task
    for group in range(6):
        assert len({task for (name, _), task in taken.items() if name == str(group)}) <= 1
    assert len(found) == 6 * samples - len(taken)
    # Nobody waits in vain: a session is refused only if each group with a waiting sample is taken.
    if any(found.next(task) is None for task in tasks):
        groups = {name for name, _ in taken}
        free = [str(group) for group in range(6) if found.of_group(str(group))]
        assert set(free) <= groups

"""Turns on engines that come and go: routed one by one, continued with the tokens so far."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from areal_lab.agents.multi_turn import MultiTurn
from areal_lab.agents.workflow import Episode, Row, WorkflowEngine
from areal_lab.control.events import EngineId
from areal_lab.control.routing import LeastLoaded, RoundRobin, Router, Sticky
from areal_lab.data.problems import Problem
from areal_lab.data.trajectory import Segment
from areal_lab.engines.client.engine_client import EngineUnreachable
from areal_lab.engines.protocol import Generated, GenerateRequest, SamplingParams
from areal_lab.pipeline.rollout.groups import Rollout
from areal_lab.pipeline.rollout.scored import ScoredGroup
from areal_lab.pipeline.rollout.turns import TurnRouter
from areal_lab.rewards.service import FailureRate, RewardError, RewardOutcome
from tests.agents.scripted import CODEC
from tests.data.byte_tokenizer import BEGIN, END

TURN_TOKENS = 6
PROBLEM = Problem(prompt="2 + 3 =", answer="5", key="2 + 3")


class Loses:
    """Rewards nothing, so that every turn is followed by another one."""

    async def score(self, completions: Sequence[str], example: Any) -> list[RewardOutcome]:
        del example
        return [RewardOutcome("ok", 0.0) for _ in completions]


@dataclass
class Fleet:
    """Engines that give every token of a request the number that its seed and place say."""

    count: int
    dies_at: Mapping[int, tuple[EngineId, int]] = field(default_factory=dict)
    """By the number of a request: its engine is lost after this number of its tokens."""
    served: list[tuple[EngineId, GenerateRequest]] = field(default_factory=list)
    dead: set[EngineId] = field(default_factory=set)
    running: dict[str, Generated] = field(default_factory=dict)

    def engine(self, number: EngineId) -> One:
        if number in self.dead:
            raise EngineUnreachable(f"engine {number} is lost")
        return One(self, number)

    async def round_robin(self, turn: int) -> EngineId:
        return turn % self.count

    async def for_rollouts(self) -> list[EngineId]:
        return [number for number in range(self.count) if number not in self.dead]


@dataclass
class One:
    """One engine of them."""

    fleet: Fleet
    number: EngineId

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        (request,) = requests
        place = len(self.fleet.served)
        self.fleet.served.append((self.number, request))
        await asyncio.sleep(0)
        whole = answer(request)
        loss = self.fleet.dies_at.get(place)
        if loss is not None and loss[0] == self.number:
            self.fleet.dead.add(self.number)
            cut = replace(whole, segments=cut_off(whole.segments, loss[1]), finish_reason="abort")
            partial = {request.request_id: cut} if cut.segments else {}
            raise EngineUnreachable(f"engine {self.number} is lost", partial)
        return [whole]

    def received(self, request_ids: Iterable[str]) -> dict[str, Generated]:
        return {n: self.fleet.running[n] for n in request_ids if n in self.fleet.running}


def answer(request: GenerateRequest) -> Generated:
    """Depends on the seed and the place in the sequence alone, as on a real engine."""
    first = len(request.prompt_tokens)
    tokens = tuple(
        65 + (request.sampling.seed + place) % 26
        for place in range(first, first + request.sampling.max_new_tokens)
    )
    return Generated(
        request_id=request.request_id,
        segments=(Segment(tokens, (-1.0,) * len(tokens), 0),),
        finish_reason="length",
        retractions=0,
        cached_tokens=0,
    )


def cut_off(segments: tuple[Segment, ...], tokens: int) -> tuple[Segment, ...]:
    (one,) = segments
    return (Segment(one.tokens[:tokens], one.logprobs[:tokens], 0),) if tokens else ()


def rollout(
    fleet: Fleet, workflow: Any, make_router: Callable[[], Router] = LeastLoaded
) -> Rollout:
    return Rollout(
        engines=fleet,
        codec=CODEC,
        rewards=Loses(),  # type: ignore[arg-type]
        sampling=SamplingParams(max_new_tokens=TURN_TOKENS),
        run_seed=1,
        running_samples=8,
        workflow=workflow,
        router=TurnRouter(make_router()),
    )


def play(one: Rollout, *, samples: int = 3, partial: Mapping[str, Generated] | None = None) -> Any:
    return asyncio.run(
        one.group(
            PROBLEM, engine=0, stream="train", group=7, samples=samples, partial=partial or {}
        )
    )


def tokens_of(group: ScoredGroup) -> list[list[int]]:
    return [
        [token for row in sample.rows for part in row.parts for token in part.tokens]
        for sample in group.samples
    ]


THREE = MultiTurn(max_turns=3, feedback=" no ")


def test_a_lost_engine_costs_no_token_and_changes_none() -> None:
    expected = play(rollout(Fleet(1), THREE))
    for place in range(9):
        for tokens in (0, 1, TURN_TOKENS - 1):
            fleet = Fleet(2, {place: (0, tokens)})
            one = rollout(fleet, THREE)
            found = play(one)
            assert tokens_of(found) == tokens_of(expected)
            if fleet.dead:
                assert one.recomputed.resubmitted_samples == 1
                assert one.recomputed.kept_tokens == tokens
    assert [sample.end for sample in expected.samples] == ["length"] * 3


def test_turns_of_a_sample_stay_on_its_engine_if_routing_is_sticky() -> None:
    def engines(make_router: Callable[[], Router]) -> Counter[int]:
        fleet = Fleet(3)
        play(rollout(fleet, THREE, make_router), samples=4)
        homes: dict[str, set[int]] = {}
        for number, request in fleet.served:
            homes.setdefault(request.request_id.split("-")[2], set()).add(number)
        return Counter(len(home) for home in homes.values())

    assert engines(Sticky) == Counter({1: 4})
    assert set(engines(RoundRobin)) != {1}


def test_samples_of_a_group_and_their_turns_have_seeds_of_their_own() -> None:
    fleet = Fleet(1)
    play(rollout(fleet, THREE))
    assert len({request.sampling.seed for _, request in fleet.served}) == 9


def test_turns_that_a_checkpoint_kept_are_not_generated_again() -> None:
    fleet = Fleet(1)
    expected = play(rollout(fleet, THREE))
    every = {request.request_id: answer(request) for _, request in fleet.served}
    for kept in range(len(every) + 1):
        partial = dict(list(every.items())[:kept])
        again = Fleet(1)
        one = rollout(again, THREE)
        assert tokens_of(play(one, partial=partial)) == tokens_of(expected)
        assert len(again.served) == len(every) - kept
        assert one.recomputed.discarded_tokens == 0


def test_a_turn_that_was_cut_by_the_checkpoint_continues() -> None:
    fleet = Fleet(1)
    expected = play(rollout(fleet, THREE), samples=1)
    (_, first), *_ = fleet.served
    whole = answer(first)
    cut = replace(whole, segments=cut_off(whole.segments, 2), finish_reason="abort")
    again = Fleet(1)
    one = rollout(again, THREE)
    found = play(one, samples=1, partial={first.request_id: cut})
    assert tokens_of(found) == tokens_of(expected)
    assert one.recomputed.kept_tokens == 2
    assert again.served[0][1].sampling.max_new_tokens == TURN_TOKENS - 2


def test_what_a_changed_workflow_does_not_ask_again_is_counted() -> None:
    fleet = Fleet(1)
    play(rollout(fleet, THREE), samples=1)
    every = {request.request_id: answer(request) for _, request in fleet.served}
    one = rollout(Fleet(1), MultiTurn(max_turns=3, feedback=" wrong "))
    play(one, samples=1, partial=every)
    assert one.recomputed.discarded_tokens == 2 * TURN_TOKENS  # of the second and third turn


def test_plain_text_has_no_control_token() -> None:
    engine = rollout(Fleet(1), THREE).sample_engine(stream="train", group=0, sample=0)
    for begins in (False, True):
        tokens = engine.encode("<begin>" + engine.plain("a<end>b") + "<end>", begins=begins)
        assert tokens == (BEGIN, *CODEC.encode("a<en"), *CODEC.encode("d>b"), END)


def test_a_checkpoint_sees_ended_and_running_turns() -> None:
    fleet = Fleet(1)
    seen: list[Mapping[str, Generated]] = []
    names: list[list[str]] = []

    class Looks:
        async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
            episode = await THREE.run(engine, data)
            seen.append(one.samples_so_far("train", 7))
            names.append(one.running_requests("train", 7))
            return episode

    one = rollout(fleet, Looks())
    play(one, samples=1)
    assert {name: sum(len(s.tokens) for s in g.segments) for name, g in seen[0].items()} == {
        request.request_id: TURN_TOKENS for _, request in fleet.served
    }
    assert names == [[]]
    assert not one.open
    assert one.samples_so_far("train", 7) == {}


def test_a_workflow_that_raises_loses_its_group_and_ends_a_run_if_it_happens_often() -> None:
    class Raises:
        async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
            if engine.sample == 1:  # type: ignore[attr-defined]
                raise KeyError("no such page")
            return await THREE.run(engine, data)

    one = rollout(Fleet(1), Raises())
    group = play(one)
    assert group.failure == "reward error"
    assert "no such page" in group.samples[1].outcome.detail
    for _ in range(9):
        play(one)
    with pytest.raises(
        RewardError, match=r"(?s)the workflow failed or timed out in 11 of.*KeyError.*no such"
    ):
        play(one)


class Rewards:
    """Rows of a sample with a reward, or with returns of turns, as the test says."""

    def __init__(self, *of_turns: tuple[bool, ...], status: str = "ok") -> None:
        self.of_turns, self.status = of_turns, status

    async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        sample = engine.sample  # type: ignore[attr-defined]
        prompt = engine.encode(data["prompt"])
        first = await engine.turn(prompt)
        return Episode(
            rows=tuple(
                Row(
                    prompt_tokens=prompt,
                    parts=first.segments,
                    turn_returns=(1.0,) if of_turns else (),
                )
                for of_turns in self.of_turns[sample]
            ),
            outcome=RewardOutcome(self.status, 1.0),  # type: ignore[arg-type]
            end="length",
        )


def test_samples_with_a_reward_and_samples_with_returns_of_turns_are_told_apart_by_name() -> None:
    """Their advantages cannot be compared, which the trainer would notice after a whole batch."""
    either = r"returns of its turns, but sample 0 of group 7 has one reward.*always return a number"
    with pytest.raises(RewardError, match=f"sample 2 of group 7 has {either}") as raised:
        play(rollout(Fleet(1), Rewards((False,), (False,), (True,))))
    assert "\n" not in str(raised.value)
    with pytest.raises(RewardError, match=r"1 of group 7 has turn_returns in 1 of its 2 rows"):
        play(rollout(Fleet(1), Rewards((True,), (True, False), (True,))))
    one = rollout(Fleet(1), Rewards((True,), (True, True), (True,)))
    play(one)
    one = replace(one, workflow=Rewards((False,), (False,), (False,)))
    with pytest.raises(RewardError, match="has one reward, but sample 0 of group 7 has returns"):
        play(one)


def test_samples_that_are_not_trained_on_may_have_other_returns() -> None:
    one = rollout(Fleet(1), Rewards((False,), (False,), ()))
    play(one)
    play(replace(one, workflow=Rewards((True,), (True,), (True,), status="error")))
    held_out = replace(one, workflow=Rewards((True,), (True,), (True,)))
    asyncio.run(held_out.group(PROBLEM, engine=0, stream="held-out", group=8, samples=3))


@pytest.mark.parametrize("room", [1, TURN_TOKENS - 1, TURN_TOKENS, TURN_TOKENS + 1])
def test_a_turn_has_the_tokens_that_the_context_leaves(room: int) -> None:
    prompt = len(CODEC.encode(PROBLEM.prompt))
    fleet = Fleet(1)
    one = replace(rollout(fleet, MultiTurn(max_turns=1)), context_tokens=prompt + room)
    group = play(one, samples=1)
    assert fleet.served[0][1].sampling.max_new_tokens == min(room, TURN_TOKENS)
    assert group.samples[0].end == ("length" if room > TURN_TOKENS else "context")
    full = replace(one, context_tokens=prompt, failures=FailureRate(largest=1.0))
    failed = play(full, samples=1)
    assert "must have room for one more" in failed.samples[0].outcome.detail


def test_turns_are_recorded_with_their_engine() -> None:
    group = play(rollout(Fleet(2), THREE))
    assert Counter(turn.sample for turn in group.turns) == Counter({0: 3, 1: 3, 2: 3})
    assert {turn.tokens for turn in group.turns} == {TURN_TOKENS}
    assert {turn.engine for turn in group.turns} == {0, 1}
    assert group.started_s <= group.generated_s <= group.scored_s


@pytest.mark.parametrize("received", [0, 2])
def test_turns_that_are_given_up_end_with_the_tokens_so_far(received: int) -> None:
    turns: list[Generated] = []

    class GivesUp:
        async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
            del data
            running = asyncio.create_task(engine.turn((65, 66)))
            await fleet.asked.wait()
            engine.give_up()
            turns.append(await running)
            turns.append(await engine.turn((65, 67)))
            row = Row(prompt_tokens=(65, 66), parts=turns[0].segments)
            return Episode(rows=(row,), outcome=RewardOutcome("error", 0.0), end="abort")

    fleet = Hangs(1, received_tokens=received)
    one = rollout(fleet, GivesUp())
    group = play(one, samples=1)
    assert [sum(len(part.tokens) for part in turn.segments) for turn in turns] == [received, 0]
    assert {turn.finish_reason for turn in turns} == {"abort"}
    assert group.tokens == sum(turn.tokens for turn in group.turns) == received
    assert fleet.canceled == 1, "the engine does not continue"
    assert one.counts == {"ok": 0, "timeout": 0, "error": 1}


def test_a_sample_that_is_canceled_is_not_one_that_was_given_up() -> None:
    class Waits:
        async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
            del data
            await engine.turn((65, 66))
            raise AssertionError("it was canceled")

    async def main() -> None:
        work = rollout(fleet, Waits()).group(PROBLEM, engine=0, stream="train", group=7, samples=1)
        running = asyncio.create_task(work)
        await fleet.asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    fleet = Hangs(1)
    asyncio.run(main())
    assert fleet.canceled == 1


def test_tokens_of_a_workflow_that_raised_are_counted() -> None:
    class RaisesLate:
        async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
            await THREE.run(engine, data)
            raise KeyError("no such page")

    one = rollout(Fleet(1), RaisesLate())
    assert play(one, samples=2).tokens == 0
    assert one.recomputed.discarded_tokens == 2 * 3 * TURN_TOKENS
    assert one.counts == {"ok": 0, "timeout": 0, "error": 2}
    assert rollout(Fleet(1), None).counts is None


@dataclass
class Hangs(Fleet):
    """Engines that have sent some tokens of each request, and send no more."""

    received_tokens: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    canceled: int = 0

    def engine(self, number: EngineId) -> Any:
        return HangingEngine(self, number)


@dataclass
class HangingEngine(One):
    """One of them."""

    fleet: Hangs

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        (request,) = requests
        whole = answer(request)
        segments = cut_off(whole.segments, self.fleet.received_tokens)
        if segments:
            partial = replace(whole, segments=segments, finish_reason="abort")
            self.fleet.running[request.request_id] = partial
        self.fleet.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.fleet.running.clear()  # as a client forgets it
            self.fleet.canceled += 1
            raise
        return []

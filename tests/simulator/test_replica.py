"""The replica equals its slow twin, keeps its books, and does what SGLang would."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.decode_cost import decode_cost
from simulator.hardware import find_gpu
from simulator.model_shape import find_model
from simulator.prefill_cost import causal_pairs, prefill_cost
from simulator.replica import GroupDone, Replica
from tests.reference.replica_oracle import Command, Oracle


@dataclass(frozen=True)
class Costs:
    """Decode and prefill, added up step by step."""

    fixed_s: float = 1.0
    sequence_s: float = 0.0
    context_token_s: float = 0.0
    engine_s: float = 0.0
    overlap: bool = True
    read_token_s: float = 0.0
    read_pair_s: float = 0.0

    def base_s(self, sequences: int) -> float:
        return self.fixed_s + self.sequence_s * sequences

    def step_s(self, sequences: int, context_tokens: float) -> float:
        gpu_s = self.base_s(sequences) + self.context_token_s * context_tokens
        return max(gpu_s, self.engine_s) if self.overlap else gpu_s + self.engine_s

    def steps_s(self, sequences: int, context_tokens: float, steps: int) -> float:
        contexts = [context_tokens + step * sequences for step in range(steps)]
        return sum(self.step_s(sequences, context) for context in contexts)

    def steps_within(self, sequences: int, context_tokens: float, seconds: float) -> int:
        steps = 0
        while self.steps_s(sequences, context_tokens, steps + 1) <= seconds:
            steps += 1
        return steps

    def seconds(self, new_tokens: int, pairs: float) -> float:
        return self.read_token_s * new_tokens + self.read_pair_s * pairs


def replica(costs: Costs | None = None, **changes: Any) -> Replica:
    """A step takes a second, reading nothing, and the cache is large."""
    costs = costs or Costs()
    sizes = {"max_running": 8, "cache_tokens": 10_000, "reserve_new_tokens": 1}
    return Replica(decode=costs, prefill=costs, **{**sizes, **changes})


def drain(engine: Replica) -> dict[int, GroupDone]:
    """All groups, by advancing from change to change."""
    done = []
    while (next_s := engine.next_s()) < math.inf:
        done += engine.advance(next_s)
    return {one.group: one for one in done}


# --- equal to the slow twin ----------------------------------------------------------------------

COSTS = st.builds(
    Costs,
    fixed_s=st.sampled_from([0.371, 1.0]),
    sequence_s=st.sampled_from([0.0, 0.0131]),
    context_token_s=st.sampled_from([0.0, 0.00177]),
    engine_s=st.sampled_from([0.0, 0.093, 0.51]),
    overlap=st.booleans(),
    read_token_s=st.sampled_from([0.0, 0.0171]),
    read_pair_s=st.sampled_from([0.0, 0.00013]),
)
SIZES = st.fixed_dictionaries(
    {
        "max_running": st.integers(1, 9),
        "cache_tokens": st.one_of(st.just(10_000), st.integers(60, 200)),
        "prefix_sharing": st.booleans(),
        "reserve_running_tokens": st.sampled_from([1, 4]),
        "reserve_new_tokens": st.sampled_from([1, 15]),
    }
)


@st.composite
def commands(draw: st.DrawFn) -> list[Command]:
    """What an owner may want, in order of time; the engine is left running."""
    time_s, version, paused, groups = 0.0, 0, False, 0
    wanted: list[Command] = []
    for _ in range(draw(st.integers(1, 14))):
        name = draw(st.sampled_from(["submit", "submit", "submit", "pause", "drop", "fail"]))
        if name == "pause" and paused:
            name = "resume"
        # Many things are submitted at a time; of others there is one.
        least_s = 0.0 if name == "submit" and wanted and wanted[-1].name == "submit" else 0.001
        time_s += draw(st.one_of(st.just(least_s), st.floats(least_s, 1.7), st.floats(1.0, 40.0)))
        arguments: tuple[Any, ...] = ()
        if name == "submit":
            lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
            arguments = (groups, draw(st.integers(0, 20)), lengths, version)
            groups += 1
        elif name == "resume":
            version += draw(st.integers(0, 2))
            arguments = (version, draw(st.booleans()))
        elif name == "drop":
            arguments = (draw(st.integers(0, groups)),)
        paused = {"pause": True, "resume": False, "fail": False}.get(name, paused)
        wanted.append(Command(time_s, name, arguments))
    if paused:
        wanted.append(Command(time_s + 1.0, "resume", (version, True)))
    return wanted


def obey(engine: Replica, command: Command) -> list[Any]:
    """Pass a command on; returns the answer, if it has one."""
    at_s, arguments = command.time_s, command.arguments
    match command.name:
        case "submit":
            engine.submit(at_s, *arguments)
        case "pause":
            engine.pause(at_s)
        case "resume":
            engine.resume(at_s, arguments[0], recompute=arguments[1])
        case "drop":
            return [engine.drop(at_s, *arguments)]
        case "fail":
            return [engine.fail(at_s)]
    return []


@given(COSTS, SIZES, commands(), st.sampled_from(["commands", "changes", "everything"]))
@settings(max_examples=300, deadline=None)
def test_the_replica_equals_its_slow_twin(
    costs: Costs, sizes: dict[str, Any], wanted: list[Command], looks: str
) -> None:
    engine = Replica(decode=costs, prefill=costs, **sizes)
    done: list[GroupDone] = []
    answers: list[Any] = []
    for command in wanted:
        while looks != "commands" and engine.next_s() < command.time_s:
            done += engine.advance(engine.next_s())
            engine.check()
        if looks == "everything":
            # Looking changes nothing, and asking once more before work comes does not either.
            assert engine.generated_tokens >= 0
            engine.advance((engine._now_s + command.time_s) / 2)
            engine.check()
        if command.name == "submit" and looks != "commands":
            while engine.next_s() <= command.time_s:
                done += engine.advance(engine.next_s())
        if command.name != "submit":
            done += engine.advance(command.time_s)
        answers += obey(engine, command)
        engine.check()
    while (next_s := engine.next_s()) < math.inf:
        done += engine.advance(next_s)
        engine.check()
    end_s = engine._now_s + 1.0
    engine.advance(end_s)

    oracle = Oracle(costs, **sizes)
    oracle.run(wanted, end_s)
    assert answers == oracle.answers
    assert {one.group: one.segments for one in done} == {
        group: answer for group, (_, answer) in oracle.ended.items()
    }
    assert [one.time_s for one in done] == sorted(one.time_s for one in done)
    for one in done:
        assert one.time_s == pytest.approx(oracle.ended[one.group][0], rel=1e-6)
    assert engine.activity_s == pytest.approx(
        {name: oracle.activity_s[name] for name in engine.activity_s}, rel=1e-6, abs=1e-6
    )
    assert engine.generated_tokens == oracle.generated_tokens
    assert engine.recomputed_tokens == oracle.recomputed_tokens
    assert engine.preemptions == oracle.preemptions
    assert (engine.running, engine.waiting, engine.cache_used_tokens) == (0, 0, 0)

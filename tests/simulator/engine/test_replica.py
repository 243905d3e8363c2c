"""The replica equals its slow twin, counts correctly, and schedules as SGLang does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.costs.decode import decode_cost
from simulator.costs.prefill import causal_pairs, prefill_cost
from simulator.engine.replica import GroupDone, Replica
from simulator.engine.sequences import Segments, Tally, decoded_alone, tally, versions_of
from tests.reference.replica_oracle import Command, Oracle


@dataclass(frozen=True)
class Costs:
    """Decode and prefill, added up step by step."""

    fixed_s: float = 1.0
    sequence_s: float = 0.0
    context_token_s: float = 0.0
    engine_s: float = 0.0
    engine_sequence_s: float = 0.0
    launch_s: float = 0.0
    overlap: bool = True
    read_token_s: float = 0.0
    read_pair_s: float = 0.0

    @property
    def floor_s(self) -> float:
        return self.engine_s + self.launch_s

    def base_s(self, sequences: int) -> float:
        return self.fixed_s + self.sequence_s * sequences

    def step_s(self, sequences: int, context_tokens: float) -> float:
        gpu_s = self.base_s(sequences) + self.context_token_s * context_tokens
        cpu_s = self.engine_s + self.engine_sequence_s * sequences
        if self.overlap:
            return max(gpu_s, cpu_s + self.launch_s)
        return max(gpu_s, self.launch_s) + cpu_s

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
    """A step takes a second, prefill takes no time, and the cache is large."""
    costs = costs or Costs()
    sizes = {"max_running": 8, "cache_tokens": 10_000, "reserve_new_tokens": 1}
    return Replica(decode=costs, prefill=costs, **{**sizes, **changes})


class Told(NamedTuple):
    group: int
    time_s: float
    segments: tuple[Segments, ...]


def drain(engine: Replica) -> dict[int, Told]:
    """All groups, by advancing from change to change."""
    done: list[GroupDone] = []
    while (next_s := engine.next_s()) < math.inf:
        done += engine.advance(next_s)
    check_tally(done)
    return {one.group: Told(one.group, one.time_s, one.segments) for one in done}


def check_tally(done: Sequence[GroupDone]) -> None:
    """Every representation of responses by version equals their segments."""
    responses = [response for one in done for response in one.segments]
    if not responses:
        return
    expected = Tally(
        heads=Counter(one[0][0] for one in responses),
        tails=Counter(one[-1][0] for one in responses),
        tokens=sum((Counter(dict(one)) for one in responses), Counter()),
        several=sum(len(one) > 1 for one in responses),
    )
    assert tally([part for one in done for part in one.decoded]) == expected
    assert tally(decoded_alone(responses)) == expected
    for one in done:
        heads, tails = zip(*[(each[0][0], each[-1][0]) for each in one.segments], strict=True)
        assert versions_of(one.decoded) == (Counter(heads), min(heads), max(tails))


# --- equal to the slow twin ----------------------------------------------------------------------

COSTS = st.builds(
    Costs,
    fixed_s=st.sampled_from([0.371, 1.0]),
    sequence_s=st.sampled_from([0.0, 0.0131]),
    context_token_s=st.sampled_from([0.0, 0.00177]),
    engine_s=st.sampled_from([0.0, 0.093, 0.51]),
    engine_sequence_s=st.sampled_from([0.0, 0.0, 0.029, 0.31]),
    launch_s=st.sampled_from([0.0, 0.0, 0.43]),
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
    """Commands of an owner, in order of time; the engine is not paused at the end."""
    time_s, version, paused, groups = 0.0, 0, False, 0
    wanted: list[Command] = []
    for _ in range(draw(st.integers(1, 14))):
        name = draw(st.sampled_from(["submit", "submit", "submit", "pause", "drop", "fail"]))
        if name == "pause" and paused:
            name = "resume"
        # Several groups may be submitted at the same time; there is one of any other command.
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
    """Perform a command; returns its result, if it has one."""
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


LOOKS = st.sampled_from(["commands", "changes", "everything"])


@given(COSTS, SIZES, commands(), LOOKS, st.sampled_from([5, 1 << 19]))
@settings(max_examples=300, deadline=None)
def test_the_replica_equals_its_slow_twin(
    costs: Costs, sizes: dict[str, Any], wanted: list[Command], looks: str, most_steps: int
) -> None:
    with patch("simulator.engine.decode_batch._MOST_STEPS", most_steps):
        compare_with_oracle(costs, sizes, wanted, looks)


@given(COSTS, SIZES, commands())
@settings(max_examples=150, deadline=None)
def test_a_replica_that_reports_samples_equals_the_slow_twin_and_reports_each_once(
    costs: Costs, sizes: dict[str, Any], wanted: list[Command]
) -> None:
    compare_with_oracle(costs, sizes, wanted, "samples")


def test_samples_that_end_with_the_drop_of_their_group_are_not_reported() -> None:
    costs = Costs()
    engine = Replica(decode=costs, prefill=costs, max_running=4, cache_tokens=10_000)
    engine.report_samples()
    engine.submit(0.0, 0, 5, [1, 9], 0)
    engine.submit(0.0, 1, 5, [1, 9], 0)
    engine.advance(0.5)
    engine.drop(0.5, 0)  # the running step ends first, at 1 s
    engine.advance(engine.next_s())
    assert engine.ended_samples(1.0) == [(1, 1)]


class Reporting(Replica):
    """Checks each report of ended samples against the group's end."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.report_samples()
        self.samples: Counter[int] = Counter()
        self.dropped: set[int] = set()

    def drop(self, now_s: float, group: int) -> int:
        if group in self._groups:
            self.dropped.add(group)
        return super().drop(now_s, group)

    def advance(self, now_s: float) -> list[GroupDone]:
        done = super().advance(now_s)
        for group, samples in self.ended_samples(now_s):
            assert samples > 0
            assert group not in self.dropped
            self.samples[group] += samples
        assert self.ended_samples(now_s) == []
        for one in done:
            assert self.samples.pop(one.group) == len(one.lengths)
        return done

    def check(self) -> None:
        super().check()
        for group in self._groups.values():
            whole = sum(len(members) for *_, members in group.ended)
            waiting = sum(n for _, number, n in self._ended_samples if number == group.number)
            assert self.samples[group.number] + waiting == whole < len(group.lengths)


def compare_with_oracle(
    costs: Costs, sizes: dict[str, Any], wanted: list[Command], looks: str
) -> None:
    kind = Reporting if looks == "samples" else Replica
    engine = kind(decode=costs, prefill=costs, **sizes)
    done: list[GroupDone] = []
    results: list[Any] = []
    for command in wanted:
        while looks != "commands" and engine.next_s() < command.time_s:
            done += engine.advance(engine.next_s())
            engine.check()
        if looks == "everything":
            # Reading state changes nothing.
            assert engine.generated_tokens >= 0
            assert engine.advance((engine._now_s + command.time_s) / 2) == []
            engine.check()
        if command.name != "submit":
            done += engine.advance(command.time_s)
        results += obey(engine, command)
        engine.check()
    while (next_s := engine.next_s()) < math.inf:
        done += engine.advance(next_s)
        engine.check()
    end_s = engine._now_s + 1.0
    engine.advance(end_s)

    oracle = Oracle(costs, **sizes)
    oracle.run(wanted, end_s)
    assert results == oracle.results
    assert {one.group: one.segments for one in done} == {
        group: responses for group, (_, responses) in oracle.ended.items()
    }
    check_tally(done)
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


@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), max_size=6), st.booleans())
def test_groups_submitted_at_the_same_time_are_prefilled_together(
    burst: list[list[int]], sharing: bool
) -> None:
    costs = Costs(0.37, 0.01, 0.002, read_token_s=0.1, read_pair_s=0.01)

    def run(asks: bool) -> tuple[Any, ...]:
        engine = replica(costs, prefix_sharing=sharing)
        engine.submit(0.0, 99, 5, [20], 0)
        for group, lengths in enumerate(burst):
            if asks:
                assert engine.next_s() > 0.0
                assert engine.advance(0.0) == []
            engine.submit(0.0, group, 7, lengths, 0)
        return drain(engine), engine.activity_s

    assert run(asks=True) == run(asks=False)


def test_published_costs_equal_the_slow_twin() -> None:
    model, gpu = find_model("Qwen2.5-1.5B"), find_gpu("A100-40")
    for overlap in (True, False):
        # The CPU time makes steps wait at first, and no longer when contexts are long.
        decode = decode_cost(model, gpu, 1, overhead_s=4.4e-3, overlap=overlap)
        prefill = prefill_cost(model, gpu, 1)

        class Both:
            step_s = staticmethod(decode.step_s)
            seconds = staticmethod(prefill.seconds)

        sizes: dict[str, Any] = {
            "max_running": 12,
            "cache_tokens": 5000,
            "prefix_sharing": True,
            "reserve_running_tokens": 20,
            "reserve_new_tokens": 100,
        }
        lengths = [
            [37 * (group * 4 + place) % 1499 + 1 for place in range(4)] for group in range(9)
        ]
        wanted = [
            Command(0.7 * (group // 3), "submit", (group, 300, lengths[group], 0))
            for group in range(9)
        ]
        wanted += [Command(2.5, "pause"), Command(3.0, "resume", (1, True))]
        engine = Replica(decode=decode, prefill=prefill, **sizes)
        for command in wanted:
            obey(engine, command)
        done = drain(engine)
        oracle = Oracle(Both(), **sizes)
        oracle.run(wanted, engine._now_s)
        assert engine.preemptions == oracle.preemptions > 0
        assert engine.recomputed_tokens == oracle.recomputed_tokens > 0
        for group, (time_s, responses) in oracle.ended.items():
            assert done[group].time_s == pytest.approx(time_s, rel=1e-6)
            assert done[group].segments == responses
        assert engine.activity_s == pytest.approx(
            {name: oracle.activity_s[name] for name in engine.activity_s}, rel=1e-6
        )


# --- runs computed by hand -----------------------------------------------------------------------


def test_a_small_run_equals_a_calculation_by_hand() -> None:
    # Prefill of 10 + 10 tokens: 2 s. Steps of 1 s + 0.1 s per sequence: 3 with both groups (4
    # sequences), 2 with three, 5 with one.
    engine = replica(Costs(1.0, 0.1, read_token_s=0.1))
    engine.submit(0.0, 7, 10, [3, 5], 0)
    engine.submit(0.0, 8, 10, [5, 10], 0)
    done = drain(engine)
    assert done[7].time_s == pytest.approx(2 + 3 * 1.4 + 2 * 1.3)
    assert done[8].time_s == pytest.approx(2 + 3 * 1.4 + 2 * 1.3 + 5 * 1.1)
    assert done[7].segments == (((0, 3),), ((0, 5),))
    assert engine.activity_s == pytest.approx(
        {"idle": 0.0, "prefill": 2.0, "decode": 12.3, "recompute": 0.0, "paused": 0.0}
    )
    assert engine.generated_tokens == 23
    assert engine.decode_steps == 10


def test_contexts_grow_and_make_steps_longer() -> None:
    # A token of context takes 0.1 s; two sequences of a prompt of 10 tokens each.
    engine = replica(Costs(1.0, context_token_s=0.1))
    engine.submit(0.0, 0, 10, [3, 3], 0)
    assert drain(engine)[0].time_s == pytest.approx(3.0 + 3.2 + 3.4)


def test_a_shared_prompt_is_prefilled_and_cached_once() -> None:
    for sharing, read_s, cached in ((True, 10.0, 14), (False, 40.0, 44)):
        engine = replica(Costs(read_token_s=1.0), prefix_sharing=sharing)
        engine.submit(0.0, 0, 10, [9] * 4, 0)
        engine.advance(read_s + 1.0)
        assert engine.activity_s["prefill"] == pytest.approx(read_s)
        assert engine.cache_used_tokens == cached


def test_one_long_prompt_takes_longer_than_two_of_half_its_length() -> None:
    """Attention only covers earlier tokens of the same prompt."""
    engine = replica(Costs(read_token_s=1.0, read_pair_s=0.5))
    end_s = 0.0
    for number, prompts in enumerate([(10,), (4, 6), (6, 4), (10,)]):
        for place, prompt in enumerate(prompts):
            engine.submit(end_s, 2 * number + place, prompt, [7], 0)
        end_s += 10.0 + 0.5 * sum(causal_pairs(prompt) for prompt in prompts) + 7.0
        assert engine.next_s() == pytest.approx(end_s)
        assert len(engine.advance(engine.next_s())) == len(prompts)


def test_a_shared_prompt_stays_cached_while_a_response_to_it_runs() -> None:
    # Two slots: the third response starts when the first has ended, and the prompt is cached.
    engine = replica(Costs(read_token_s=1.0), max_running=2)
    engine.submit(0.0, 0, 10, [2, 4, 1], 0)
    assert drain(engine)[0].time_s == pytest.approx(10 + 4)
    # Another group prefills its own prompt, while the second response waits for it.
    engine = replica(Costs(read_token_s=1.0), max_running=2)
    engine.submit(0.0, 0, 10, [2, 4], 0)
    engine.submit(0.0, 1, 10, [5], 0)
    done = drain(engine)
    assert done[0].time_s == pytest.approx(10 + 2 + 10 + 2)


def test_prefill_goes_before_decode() -> None:
    engine = replica(Costs(read_token_s=0.5))
    engine.submit(0.0, 0, 4, [10], 0)
    # Steps from 2 s on. Work arrives at 3.5 s: the step ends at 4 s, then 3 s of prefill.
    engine.submit(3.5, 1, 6, [1], 0)
    done = drain(engine)
    assert done[1].time_s == pytest.approx(8.0)
    assert done[0].time_s == pytest.approx(15.0)


def test_first_come_first_served() -> None:
    engine = replica(max_running=1)
    for group in (5, 3, 4):
        engine.submit(0.0, group, 0, [2], 0)
    assert [done.group for done in drain(engine).values()] == [5, 3, 4]
    assert (engine.running, engine.waiting) == (0, 0)


# --- interruptions -------------------------------------------------------------------------------


def test_tokens_have_the_version_that_generated_them() -> None:
    engine = replica(Costs(read_token_s=0.5))
    engine.submit(0.0, 0, 0, [2, 4, 5, 9], 3)
    engine.pause(3.5)  # The fourth step ends at 4 s, and the second response with it.
    assert engine.next_s() == math.inf
    engine.resume(10.0, 4)  # Contexts of 4 and 4 tokens: 4 s.
    assert engine.next_s() == pytest.approx(19.0)  # The last response's end is the group's.
    engine.pause(16.2)
    engine.resume(20.0, 6, recompute=False)
    (done,) = drain(engine).values()
    assert done.segments == (
        ((3, 2),),
        ((3, 4),),
        ((3, 4), (4, 1)),
        ((3, 4), (4, 3), (6, 2)),
    )
    assert done.time_s == pytest.approx(22.0)
    assert engine.recomputed_tokens == 8
    assert engine.activity_s == pytest.approx(
        {"idle": 0.0, "prefill": 0.0, "decode": 9.0, "recompute": 4.0, "paused": 9.0}
    )


def test_the_same_version_again_is_one_segment() -> None:
    engine = replica()
    engine.submit(0.0, 0, 0, [6], 2)
    engine.pause(3.0)
    engine.resume(5.0, 2)
    assert drain(engine)[0].segments == (((2, 6),),)


def test_a_shared_prompt_is_prefilled_again_once() -> None:
    for sharing, tokens, pairs in (
        (True, 10 + 3 * 2, causal_pairs(10) + 3 * causal_pairs(2, 10)),
        (False, 3 * 12, 3 * causal_pairs(12)),
    ):
        engine = replica(Costs(read_token_s=1.0, read_pair_s=0.1), prefix_sharing=sharing)
        engine.submit(0.0, 0, 10, [9, 9, 9], 0)
        before_s = engine.next_s() - 9.0
        engine.pause(before_s + 2.0)
        engine.resume(before_s + 2.0, 1)
        assert engine.recomputed_tokens == tokens
        assert engine.next_s() == pytest.approx(before_s + 2.0 + tokens + 0.1 * pairs + 7.0)


def test_a_pause_stops_a_prefill_at_once() -> None:
    for recompute, end_s in ((False, 20.0 + 7.0 + 2.0), (True, 20.0 + 10.0 + 2.0)):
        engine = replica(Costs(read_token_s=1.0))
        engine.submit(0.0, 0, 10, [2], 0)
        engine.pause(3.0)
        engine.resume(20.0, 1, recompute=recompute)
        assert tuple(drain(engine)[0]) == (0, pytest.approx(end_s), (((1, 2),),))


def test_pauses_within_one_step_wait_for_its_end() -> None:
    engine = replica(Costs(read_token_s=1.0))
    engine.submit(0.0, 0, 0, [10], 0)
    engine.pause(2.2)  # The third step ends at 3 s, ...
    engine.resume(2.4, 1)
    engine.pause(2.6)  # ... when 3 s of reading have not begun.
    engine.resume(10.0, 1, recompute=False)
    assert tuple(drain(engine)[0]) == (0, pytest.approx(10 + 3 + 7), (((0, 3), (1, 7)),))
    assert engine.activity_s["paused"] == pytest.approx(7.0)


def test_a_response_that_fits_after_a_prefill_joins_at_its_end() -> None:
    # 15 tokens are reserved for each that joins, 1 for each that runs: three join at once. After
    # their prefill, at 3 s, there is room for the fourth, whose single token comes at 5 s.
    sizes: dict[str, Any] = {"cache_tokens": 60, "reserve_running_tokens": 1}
    sizes["reserve_new_tokens"] = 15
    engine = replica(Costs(read_token_s=1.0), max_running=4, prefix_sharing=False, **sizes)
    for group, tokens in enumerate((9, 9, 9, 1)):
        engine.submit(0.0, group, 1, [tokens], 0)
    told = []
    while (now_s := engine.next_s()) < math.inf:
        told += [(now_s, one.group, one.time_s) for one in engine.advance(now_s)]
    assert told[0] == (5.0, 3, 5.0)
    assert all(now_s == time_s for now_s, _, time_s in told)


def test_work_that_arrives_during_a_pause_waits_at_the_end_of_the_queue() -> None:
    engine = replica(Costs(read_token_s=1.0), max_running=2)
    engine.submit(0.0, 0, 3, [4, 4], 0)
    engine.pause(4.0)
    engine.submit(5.0, 1, 2, [1], 0)
    assert engine.waiting == 1
    engine.resume(10.0, 1)
    # 3 + 2 * 1 tokens are prefilled again; three steps; then the new group's.
    done = drain(engine)
    assert done[0].time_s == pytest.approx(10 + 5 + 3)
    assert done[1].time_s == pytest.approx(10 + 5 + 3 + 2 + 1)


def test_an_idle_engine_takes_the_version_of_a_submitted_group() -> None:
    engine = replica()
    engine.submit(0.0, 0, 0, [2], 1)
    drain(engine)
    engine.submit(5.0, 1, 0, [2], 4)
    engine.submit(5.0, 2, 0, [2], 3)  # Sent before the weights came.
    done = drain(engine)
    assert done[1].segments == done[2].segments == (((4, 2),),)
    engine.submit(8.0, 3, 0, [2], 4)
    with pytest.raises(ValueError, match="version is 5, but the engine is generating with 4"):
        engine.submit(9.0, 4, 0, [2], 5)


def test_versions_that_no_response_needs_are_freed() -> None:
    engine = replica()
    for version in range(50):
        start_s = version * 10.0
        engine.submit(start_s, version, 0, [5, 12], version)
        engine.pause(start_s + 3.0)
        engine.resume(start_s + 4.0, version + 1)
        engine.advance(start_s + 10.0)
    # Of 51 epochs at most the latest three are reachable; nothing points backwards.
    epochs = {id(cohort.epoch): cohort.epoch for cohort in engine._batch.cohorts}
    first = min([*epochs.values(), engine._epoch], key=lambda epoch: epoch.first_step)
    count = 1
    while (following := first.following) is not None:
        first, count = following, count + 1
    assert count <= 3
    assert not engine._done
    assert len(engine._groups) <= 2


# --- a full cache --------------------------------------------------------------------------------


def test_a_full_cache_preempts_the_sequences_with_the_fewest_tokens() -> None:
    costs = Costs(read_token_s=1.0)
    engine = replica(costs, cache_tokens=50, prefix_sharing=False, reserve_running_tokens=1)
    engine.submit(0.0, 0, 5, [40], 0)
    engine.submit(10.0, 1, 8, [30], 0)
    # Group 0 alone until 10 s: 5 s of prefill, 5 steps. Then 8 s of prefill. 18 tokens are cached,
    # 2 more with each step: after 16 steps, at 34 s, there is no room for a seventeenth.
    assert engine.next_s() == pytest.approx(34.0)
    engine.advance(34.0)
    assert (engine.preemptions, engine.running, engine.waiting) == (1, 1, 1)
    assert engine.generated_tokens == 21 + 16
    done = drain(engine)
    # 19 steps to go, then 8 + 16 tokens are prefilled again, then 14 steps.
    assert done[0].time_s == pytest.approx(34 + 19)
    assert done[1].time_s == pytest.approx(34 + 19 + 24 + 14)
    assert done[1].segments == (((0, 30),),)
    assert engine.recomputed_tokens == 24
    assert engine.activity_s["recompute"] == pytest.approx(24.0)


def test_among_equals_the_longest_prompt_is_preempted_then_the_latest() -> None:
    engine = replica(cache_tokens=100, prefix_sharing=False, reserve_running_tokens=1)
    engine.submit(0.0, 0, 20, [50], 0)
    engine.submit(0.0, 1, 30, [50], 0)
    engine.submit(0.0, 2, 20, [50], 0)
    done = drain(engine)
    # 70 tokens and 3 a step: full after 10 steps. Group 1 frees 40: enough for 20 steps of two.
    # 60 tokens and 2 a step: full after 20 more. Group 2 frees 50. Group 0 ends 20 steps later.
    assert done[0].time_s == pytest.approx(10 + 20 + 20)
    # Both wait: group 1 came first, with 40 tokens; group 2 with 50. They continue together, with
    # room for 5 steps; then group 1, which has fewer tokens, is preempted again.
    assert done[2].time_s == pytest.approx(50 + 20)
    assert done[1].time_s == pytest.approx(70 + 35)
    assert engine.preemptions == 3


def test_cache_is_reserved_for_running_sequences() -> None:
    # 11 tokens are cached and 30 reserved; 10 are to be prefilled and 40 reserved.
    for cache, running in ((90, 1), (91, 2)):
        engine = replica(cache_tokens=cache, reserve_running_tokens=30, reserve_new_tokens=40)
        engine.submit(0.0, 0, 10, [50], 0)
        engine.submit(1.0, 1, 10, [50], 0)
        engine.advance(1.0)
        assert (engine.running, engine.waiting) == (running, 2 - running)


# --- drop and fail -------------------------------------------------------------------------------


def test_a_dropped_group_makes_room_after_the_step() -> None:
    engine = replica(max_running=2)
    engine.submit(0.0, 0, 0, [5, 20], 0)
    engine.submit(0.0, 1, 0, [3], 0)
    assert engine.drop(2.5, 0) == 6  # The third step ends at 3 s.
    done = drain(engine)
    assert list(done) == [1]
    assert done[1].time_s == pytest.approx(6.0)
    assert engine.drop(7.0, 1) == engine.drop(7.0, 5) == 0
    assert engine.generated_tokens == 9


def test_a_failure_loses_everything_but_groups_that_had_ended() -> None:
    engine = replica(max_running=2)
    engine.submit(0.0, 0, 0, [2], 0)
    engine.submit(0.0, 1, 0, [9, 9], 0)
    assert engine.fail(4.5) == [1]
    assert [done.group for done in engine.advance(4.5)] == [0]
    assert (engine.running, engine.waiting, engine.cache_used_tokens) == (0, 0, 0)
    assert engine.next_s() == math.inf
    engine.submit(20.0, 1, 0, [9], 3)
    assert drain(engine)[1] == (1, pytest.approx(29.0), (((3, 9),),))
    assert engine.activity_s["idle"] == pytest.approx(15.0)


# --- counters and spans --------------------------------------------------------------------------


def test_spans_cover_the_engines_work_without_gaps() -> None:
    spans: list[tuple[str, float, float]] = []
    engine = replica(
        Costs(read_token_s=0.5), record_spans=lambda *span: spans.append(span), cache_tokens=60
    )
    engine.submit(2.0, 0, 10, [20, 20], 0)
    engine.submit(5.0, 1, 10, [20, 20], 0)
    engine.pause(20.3)
    engine.resume(25.0, 1)
    drain(engine)
    engine.submit(200.0, 2, 0, [1], 1)
    drain(engine)
    assert {name for name, _, _ in spans} == {"idle", "prefill", "decode", "paused", "recompute"}
    assert all(before[2] == after[1] for before, after in pairwise(spans))
    assert all(start_s < end_s for _, start_s, end_s in spans)
    assert (spans[0][1], spans[-1][2]) == (0.0, 201.0)
    for name, seconds in engine.activity_s.items():
        told = sum(end_s - start_s for one, start_s, end_s in spans if one == name)
        assert told == pytest.approx(seconds)


def test_groups_that_end_together_are_returned_together() -> None:
    engine = replica(max_running=4)
    engine.submit(0.0, 0, 0, [5, 5], 0)
    engine.submit(0.0, 1, 0, [5], 0)
    engine.submit(0.0, 2, 0, [5, 6], 0)
    assert [done.group for done in engine.advance(5.0)] == [0, 1]
    assert [done.group for done in engine.advance(engine.next_s())] == [2]


def test_no_slot_stays_free_while_a_response_waits() -> None:
    engine = replica(max_running=16)
    lengths = [[(7 * group + 3 * place) % 40 + 1 for place in range(4)] for group in range(400)]
    for group in range(400):
        engine.submit(0.0, group, 0, lengths[group], 0)
    end_s = max(done.time_s for done in drain(engine).values())
    tokens = sum(map(sum, lengths))
    assert engine.generated_tokens == tokens
    # Graham: no slot stays free while a response waits.
    assert tokens / 16 <= end_s <= tokens / 16 + 40
    assert engine.decode_steps == end_s == engine.activity_s["decode"]


def test_more_slots_or_more_cache_are_never_slower_for_equal_steps() -> None:
    def end_s(**sizes: int) -> float:
        engine = replica(reserve_running_tokens=1, **sizes)
        for group in range(30):
            engine.submit(0.0, group, 3, [group * 5 % 17 + 1] * 3, 0)
        return max(done.time_s for done in drain(engine).values())

    places = [end_s(max_running=places) for places in (1, 2, 4, 8, 16)]
    assert places == sorted(places, reverse=True)
    caches = [end_s(cache_tokens=tokens, max_running=16) for tokens in (40, 80, 160, 1000)]
    assert caches == sorted(caches, reverse=True)


# --- bad input -----------------------------------------------------------------------------------


def test_sizes_below_1_are_refused() -> None:
    for name in ("max_running", "cache_tokens", "reserve_running_tokens", "reserve_new_tokens"):
        with pytest.raises(ValueError, match=f"{name} is 0, but must be >= 1"):
            replica(**{name: 0})


def test_impossible_work_is_refused_with_a_remedy() -> None:
    engine = replica(cache_tokens=100)
    engine.submit(1.0, 0, 10, [5], 0)
    with pytest.raises(ValueError, match="group 0 is already on this engine"):
        engine.submit(1.0, 0, 10, [5], 0)
    for prompt, lengths in ((-1, [5]), (5, []), (5, [3, 0])):
        with pytest.raises(ValueError, match="need prompt_tokens >= 0 and at least one length"):
            engine.submit(1.0, 1, prompt, lengths, 0)
    with pytest.raises(ValueError, match="101 tokens, but the cache holds 100; use GPUs with more"):
        engine.submit(1.0, 1, 11, [90], 0)
    with pytest.raises(ValueError, match="not paused; call pause before resume"):
        engine.resume(1.0, 1)
    for past_s in (0.5, math.nan):
        with pytest.raises(ValueError, match=r"but must be >= 1\.0 s"):
            engine.advance(past_s)
    engine.advance(1.0 - 1e-15)  # what two clocks may differ by
    assert drain(engine)[0].time_s == 6.0

"""The simulator against arithmetic that can be done by hand, and against queueing theory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from areal_lab.capacity import mean_staleness_bounded
from areal_lab.control.order import bounded_lag
from areal_lab.control.schedule import (
    Schedule,
    asynchronous,
    one_step_overlap,
    partial_rollout,
    synchronous,
)
from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.costs.decode import decode_cost
from simulator.costs.measured_engine import MeasuredDecode
from simulator.costs.prefill import prefill_cost
from simulator.costs.training_timing import Sizes
from simulator.costs.weight_sync import WeightSync
from simulator.engine.replica import Replica
from simulator.run.flights import RewardQueue
from simulator.run.one_seed import run_system
from simulator.run.responses import Draws
from simulator.run.system import System
from simulator.workload.lengths import LogNormalLengths
from simulator.workload.randomness import TURNS, TurnCounts, stream
from tests.simulator.engine.toy_engine import toy_engines
from tests.simulator.run.toy_system import (
    Drawn,
    Latencies,
    PerToken,
    Seconds,
    constant,
    lognormal,
    run_with_log,
    toy_system,
)

EXACT = 1e-9
GENERATE_S = 100.0
UPDATE = WeightSync(export_s=3.0, delay_s=2.5, load_s=4.0)
UPDATE_S = 9.5


@pytest.mark.parametrize("schedule", [synchronous(), asynchronous(0)], ids=lambda s: s.name)
def test_a_synchronous_step_is_generation_then_training_then_update(schedule: Schedule) -> None:
    result = run_system(toy_system(schedule, train_s=50.0, weights=UPDATE), 1)
    assert result.columns["step_s"][0] == pytest.approx(GENERATE_S + 50 + 3, rel=EXACT)
    assert result.columns["step_s"][1:] == pytest.approx(GENERATE_S + 50 + UPDATE_S, rel=EXACT)


@pytest.mark.parametrize("train_s", [20.0, 99.0, 101.0, 400.0])
def test_one_step_overlap_is_the_longer_side_then_the_update(train_s: float) -> None:
    system = toy_system(
        one_step_overlap(),
        train_s=train_s,
        weights=WeightSync(load_s=7.0),
        push_holds_trainer=True,
        warmup_steps=3,
    )
    assert run_system(system, 1).step_s == pytest.approx(max(GENERATE_S, train_s) + 7.0, rel=EXACT)


@pytest.mark.parametrize("train_s", [20.0, 100.0, 130.0])
def test_an_update_that_the_trainer_only_starts_is_hidden_behind_training(train_s: float) -> None:
    system = toy_system(one_step_overlap(), train_s=train_s, weights=UPDATE, warmup_steps=3)
    on_engines = GENERATE_S + UPDATE.delay_s + UPDATE.load_s
    expected_s = max(on_engines, train_s + UPDATE.export_s)
    assert run_system(system, 1).step_s == pytest.approx(expected_s, rel=EXACT)


@pytest.mark.parametrize("train_s", [10.0, 24.0, 25.0, 26.0, 80.0])
def test_an_asynchronous_run_has_the_rate_of_its_slower_side(train_s: float) -> None:
    # 8 slots, one group of 2 samples in two of them: 4 groups in 100 s, a batch of one in 25 s.
    system = toy_system(
        asynchronous(math.inf),
        batch=1,
        in_flight=4,
        slots=4,
        engines=2,
        train_s=train_s,
        steps=84,
        warmup_steps=4,
        weights=WeightSync(),
    )
    generate_s = GENERATE_S / 4
    assert run_system(system, 1).step_s == pytest.approx(max(generate_s, train_s), rel=EXACT)


def test_an_asynchronous_run_loses_the_loading_time_when_generation_is_slower() -> None:
    system = toy_system(
        asynchronous(math.inf), batch=4, train_s=20.0, steps=60, warmup_steps=10, weights=UPDATE
    )
    # One interruption per step: every group is stopped for `load_s` once; it starts when the one
    # before it ends, which is while weights are on their way for the others.
    assert run_system(system, 1).step_s == pytest.approx(GENERATE_S + UPDATE.load_s, rel=EXACT)


def test_partial_rollout_with_no_more_groups_than_a_batch_is_synchronous() -> None:
    partial = run_system(toy_system(partial_rollout(0), weights=UPDATE), 1)
    whole = run_system(toy_system(synchronous(), weights=UPDATE), 1)
    assert partial.columns["end_s"] == pytest.approx(whole.columns["end_s"], rel=EXACT)


@pytest.mark.parametrize("samples", [1, 4, 32])
def test_a_batch_without_waiting_takes_as_long_as_its_longest_response(samples: int) -> None:
    """Exponential lengths: E[max of n] is the n-th harmonic number of means."""
    mean = 2000.0
    system = toy_system(
        synchronous(),
        batch=1,
        samples=samples,
        steps=800,
        train_s=0.0,
        lengths=Drawn(lambda g, shape: np.ceil(g.exponential(mean, shape))),
    )
    harmonic = sum(1 / n for n in range(1, samples + 1))
    steps_s = run_system(system, 1).columns["step_s"]
    error = 4 * steps_s.std() / math.sqrt(len(steps_s))
    assert steps_s.mean() == pytest.approx(mean * harmonic, abs=error)


def test_the_longest_of_uniform_lengths_follows_order_statistics() -> None:
    system = toy_system(
        synchronous(),
        batch=1,
        samples=9,
        steps=2000,
        train_s=0.0,
        lengths=Drawn(lambda g, shape: g.integers(1, 10_001, shape)),
    )
    assert run_system(system, 1).step_s == pytest.approx(10_000 * 9 / 10, rel=0.01)


def mean_longest(answers: int, mu: float, sigma: float, cap: float) -> float:
    r"""Order statistics of a capped log-normal: $E = \int_0^c (1 - F(x)^n) dx$."""
    ln_tokens = np.linspace(mu - 12 * sigma, min(math.log(cap), mu + 12 * sigma), 4001)
    below = [math.erfc((mu - one) / (sigma * math.sqrt(2))) / 2 for one in ln_tokens]
    tokens = np.exp(ln_tokens)
    return float(tokens[0] + np.trapezoid(1 - np.array(below) ** answers, tokens))


NO_CAP = 10**9


@pytest.mark.parametrize(
    ("answers", "batches", "cap", "published"),
    [
        *[(128, 20_000, NO_CAP, 60_600), (512, 10_000, NO_CAP, 89_200)],
        *[(2048, 6_000, NO_CAP, 126_400), (128, 2_000, 28_000, 28_000), (16, 5_000, 28_000, 0)],
    ],
)
def test_the_longest_of_lognormal_lengths_follows_order_statistics(
    answers: int, batches: int, cap: int, published: int
) -> None:
    """Means of 7.7k (capped) and 8.1k tokens, while a batch waits for 23k to 126k."""
    mu, sigma = 8.6, 0.9
    lengths = LogNormalLengths(
        wanted_mean_tokens=mean_longest(1, mu, sigma, cap), sigma=sigma, max_tokens=cap
    )
    assert lengths.mu == pytest.approx(mu, rel=1e-3)
    longest = mean_longest(answers, mu, sigma, cap)
    generator = np.random.default_rng(6)
    drawn = [lengths.draw(generator, 500, answers).max(axis=1) for _ in range(batches // 500)]
    assert np.mean(drawn) == pytest.approx(longest, rel=0.01)
    assert not published or longest == pytest.approx(published, rel=0.01)


def test_a_batch_of_lognormal_lengths_waits_for_the_longest() -> None:
    lengths = LogNormalLengths(wanted_mean_tokens=8144, sigma=0.9, max_tokens=NO_CAP)
    system = toy_system(synchronous(), batch=2, samples=64, steps=5, train_s=0.0, lengths=lengths)
    draws = Draws(system, 1)
    longest = [
        max(*draws.of(2 * step).lengths, *draws.of(2 * step + 1).lengths) for step in range(5)
    ]
    assert run_system(system, 1).columns["step_s"] == pytest.approx(longest, rel=EXACT)


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_fewer_slots_than_responses_stay_within_grahams_bound(slots: int) -> None:
    """List scheduling ends between total / slots and total / slots + longest."""
    system = toy_system(
        synchronous(),
        batch=40,
        samples=1,
        engines=1,
        steps=30,
        train_s=0.0,
        make_engine=toy_engines(1.0, slots),
        lengths=lognormal(100),
    )
    _, log = run_with_log(system)
    groups = {record.group: record for record in log.groups}
    for batch in range(30):
        of_batch = [groups[batch * 40 + n] for n in range(40)]
        tokens = [sum(t for _, t in g.segments[0]) for g in of_batch]
        took_s = max(g.end_s for g in of_batch) - min(g.t_s for g in of_batch)
        assert sum(tokens) / slots <= took_s + 1e-9 <= sum(tokens) / slots + max(tokens)


def test_littles_law_holds_for_groups_in_generation_and_in_the_buffer() -> None:
    """The mean number inside is arrival rate times mean stay, over a complete run."""
    system = toy_system(
        asynchronous(6),
        batch=8,
        in_flight=12,
        steps=120,
        complete=True,
        lengths=lognormal(100),
        train_s=100.0,
        weights=UPDATE,
    )
    result, log = run_with_log(system)
    made = {record.group: record for record in log.groups}
    trained_at_s = {}
    for record in log.actions:
        for group in getattr(record.action, "groups", ()):
            trained_at_s[group] = record.t_s
    assert len(made) == len(trained_at_s) == 960
    changes = [(made[g].t_s, 1, 0) for g in made] + [(made[g].end_s, -1, 1) for g in made]
    changes += [(trained_at_s[g], 0, -1) for g in made]
    area_running = area_waiting = 0.0
    running = waiting = 0
    before_s = 0.0
    for time_s, more_running, more_waiting in sorted(changes):
        area_running += running * (time_s - before_s)
        area_waiting += waiting * (time_s - before_s)
        running, waiting, before_s = running + more_running, waiting + more_waiting, time_s
    assert running == waiting == 0
    assert area_running == pytest.approx(sum(r.end_s - r.t_s for r in made.values()), rel=EXACT)
    stays_s = sum(trained_at_s[g] - made[g].end_s for g in made)
    assert area_waiting == pytest.approx(stays_s, rel=EXACT)
    assert area_running / result.makespan_s <= 12


def test_littles_law_holds_for_the_reported_use_of_slots() -> None:
    """Busy slots are tokens per second times seconds per token."""
    system = toy_system(
        asynchronous(2),
        batch=5,
        in_flight=4,
        engines=3,
        slots=1,
        samples=1,
        steps=60,
        complete=True,
        token_s=0.25,
        train_s=40.0,
        lengths=lognormal(100),
    )
    result = run_system(system, 1)
    tokens_per_s = result.columns["tokens"].sum() / result.makespan_s
    busy = 3 * result.pools["rollout"].busy["decode"]
    assert busy == pytest.approx(tokens_per_s * 0.25, rel=EXACT)


# --- queues --------------------------------------------------------------------------------------


@dataclass
class DrawnTraining:
    """Steps of exponential times of mean 1, for any batch."""

    generator: np.random.Generator

    def step(self, lengths: Sizes, *, minibatches: int) -> Seconds:
        assert len(lengths) == minibatches == 1
        return Seconds(seconds=self.generator.exponential(1.0))


@pytest.mark.parametrize(("eta", "generated_per_trained"), [(0, 2.0), (1, 0.7), (4, 1.0)])
def test_eta_is_the_buffer_of_the_queue_m_m_1_k(eta: int, generated_per_trained: float) -> None:
    r"""One answer at a time, a batch of one: generation goes on while eq. 3 admits one more.

    With j answers that wait or are trained on, it does for j <= eta, so that K = eta + 1, and

    $$ rate = 1 - \pi_0 = 1 - (1 - r) / (1 - r^{K + 1}), \quad K / (K + 1) \text{ for } r = 1. $$
    """
    mean_tokens = 2000 / generated_per_trained
    system = toy_system(
        asynchronous(eta),
        batch=1,
        samples=1,
        in_flight=1,
        engines=1,
        slots=1,
        steps=12_000,
        token_s=1 / 2000,
        lengths=Drawn(lambda g, shape: np.round(g.exponential(mean_tokens, shape))),
        training=DrawnTraining(np.random.default_rng(7)),
        weights=WeightSync(),
    )
    r, places = generated_per_trained, eta + 1
    empty = 1 / (places + 1) if r == 1 else (1 - r) / (1 - r ** (places + 1))
    steps_s = run_system(system, 1).columns["step_s"]
    assert 1 / steps_s.mean() == pytest.approx(1 - empty, rel=0.02)


# --- rewards as a queue --------------------------------------------------------------------------


def waits_for_scoring(gaps_s: np.ndarray, times_s: np.ndarray, workers: int) -> np.ndarray:
    queue = RewardQueue(workers)
    waits_s, now_s = [], 0.0
    for gap_s, work_s in zip(gaps_s.tolist(), times_s.tolist(), strict=True):
        now_s += gap_s
        waits_s.append(queue.scored_s(now_s, [work_s]) - now_s - work_s)
    return np.array(waits_s)


def one_server_s(load: float, workers: int, second_moment: float) -> float:
    """Pollaczek and Khinchine: lambda E[S^2] / (2 (1 - rho)), at the speed of all workers."""
    return load * second_moment / workers**2 / (2 * (1 - load / workers))


def erlang_s(load: float, workers: int) -> float:
    """Erlang's C formula, for exponential times of mean 1."""
    terms = [load**k / math.factorial(k) for k in range(workers)]
    last = load**workers / math.factorial(workers) / (1 - load / workers)
    return last / (sum(terms) + last) / (workers - load)


def less_noisy_mean_s(
    waits_s: np.ndarray, gaps_s: np.ndarray, times_s: np.ndarray, workers: int, known_s: float
) -> float:
    """Mean wait, by a control variate: the same customers at one server of all workers' speed.

    How far its mean wait is off the `known_s` is chance, most of which the workers share.
    """
    left_s = np.cumsum(np.append(0.0, times_s[:-1] / workers - gaps_s[1:]))
    twin_s = left_s - np.minimum.accumulate(left_s)  # Lindley
    mine, twins = (waits.reshape(100, -1).mean(axis=1) for waits in (waits_s, twin_s))
    slope = np.cov(mine, twins)[0, 1] / twins.var(ddof=1)
    return float(waits_s.mean() - slope * (twin_s.mean() - known_s))


def test_one_reward_worker_with_a_constant_time_is_the_queue_m_d_1() -> None:
    generator, rho, n = np.random.default_rng(1), 0.6, 400_000
    waits_s = waits_for_scoring(generator.exponential(1 / rho, n), np.ones(n), 1)
    assert waits_s.mean() == pytest.approx(rho / (2 * (1 - rho)), rel=0.02)


def test_one_reward_worker_with_any_time_is_the_queue_m_g_1() -> None:
    generator, rho, n = np.random.default_rng(2), 0.5, 400_000
    gaps_s, times_s = generator.exponential(1 / rho, n), generator.uniform(0, 2, n)
    waits_s = waits_for_scoring(gaps_s, times_s, 1)
    assert waits_s.mean() == pytest.approx(one_server_s(rho, 1, 4 / 3), rel=0.02)


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_several_reward_workers_with_exponential_times_are_the_queue_m_m_c(workers: int) -> None:
    generator, load, n = np.random.default_rng(3), 0.7 * workers, 400_000
    gaps_s, times_s = generator.exponential(1 / load, n), generator.exponential(1.0, n)
    waits_s = waits_for_scoring(gaps_s, times_s, workers)
    known_s = one_server_s(load, workers, 2.0)
    mean_s = less_noisy_mean_s(waits_s, gaps_s, times_s, workers, known_s)
    assert mean_s == pytest.approx(erlang_s(load, workers), rel=0.02)


def waits_of_an_engine(gaps_s: np.ndarray, tokens: np.ndarray, places: int) -> np.ndarray:
    """Time from arrival to the first step, of responses that an engine generates.

    A step takes 1/1000 s whoever takes part, so that an answer of n tokens takes n of them.
    """
    model, gpu = find_model("Qwen2.5-0.5B"), find_gpu("H100")
    engine = Replica(
        decode=decode_cost(model, gpu, measured=MeasuredDecode(step_s=0.001)),
        prefill=prefill_cost(model, gpu),  # of nothing
        max_running=places,
        cache_tokens=10**9,
        reserve_running_tokens=1,
        reserve_new_tokens=1,
    )
    arrives_s = gaps_s.cumsum()
    ended_s = np.empty(len(tokens))

    def until(now_s: float) -> None:
        while (next_s := engine.next_s()) <= now_s and next_s < math.inf:
            for one in engine.advance(next_s):
                ended_s[one.group] = one.time_s

    for number, (now_s, length) in enumerate(zip(arrives_s.tolist(), tokens.tolist(), strict=True)):
        until(now_s)
        engine.submit(now_s, number, 0, [length], 0)
    until(math.inf)
    return np.asarray(ended_s - arrives_s - tokens / 1000)


def test_an_engine_with_one_slot_is_the_queue_m_d_1() -> None:
    generator, rho, n = np.random.default_rng(4), 0.5, 20_000
    gaps_s, tokens = generator.exponential(1 / rho, n), np.full(n, 1000)
    waits_s = waits_of_an_engine(gaps_s, tokens, 1)
    known_s = one_server_s(rho, 1, 1.0)
    mean_s = less_noisy_mean_s(waits_s, gaps_s, tokens / 1000, 1, known_s)
    assert mean_s == pytest.approx(known_s, rel=0.02)


def test_an_engine_with_several_slots_is_the_queue_m_m_c() -> None:
    """A new response also waits for the end of a step, half a step on average."""
    generator, n, places, load = np.random.default_rng(5), 60_000, 3, 2.1
    gaps_s = generator.exponential(1 / load, n)
    tokens = np.ceil(generator.exponential(1000, n)).astype(int)
    waits_s = waits_of_an_engine(gaps_s, tokens, places)
    known_s = one_server_s(load, places, 2.0)
    mean_s = less_noisy_mean_s(waits_s, gaps_s, tokens / 1000, places, known_s)
    assert mean_s == pytest.approx(erlang_s(load, places), rel=0.02)


def test_scoring_a_group_delays_it_and_lengthens_a_synchronous_step() -> None:
    def step_s(workers: int) -> float:
        system = toy_system(
            synchronous(),
            batch=2,
            samples=3,
            reward=Latencies(lambda _, size: np.full(size, 5.0)),
            reward_workers=workers,
        )
        return run_system(system, 1).step_s

    assert step_s(0) == pytest.approx(GENERATE_S + 50 + 5, rel=EXACT)
    assert step_s(6) == pytest.approx(GENERATE_S + 50 + 5, rel=EXACT)
    assert step_s(4) == pytest.approx(GENERATE_S + 50 + 10, rel=EXACT)
    assert step_s(1) == pytest.approx(GENERATE_S + 50 + 30, rel=EXACT)


@pytest.mark.parametrize("turns", [1, 2, 7])
def test_turns_add_the_time_of_their_tools(turns: int) -> None:
    system = toy_system(
        synchronous(), turns=turns, tool=Latencies(lambda _, size: np.full(size, 3.0))
    )
    result = run_system(system, 1)
    assert result.step_s == pytest.approx(GENERATE_S + 50 + 3 * (turns - 1), rel=EXACT)
    assert result.columns["tokens"] == pytest.approx(4 * 2 * 100)


def test_tools_write_tokens_that_are_trained_over_but_not_counted() -> None:
    training = PerToken(0.01)
    system = toy_system(
        synchronous(), turns=4, tool_tokens=20, training=training, lengths=constant(100)
    )
    result = run_system(system, 1)
    assert training.steps[0] == (10 + 100 + 3 * 20,) * 8
    assert result.step_s == pytest.approx(GENERATE_S + 0.01 * 8 * 170, rel=EXACT)
    assert result.columns["tokens"] == pytest.approx(8 * 100)
    few = toy_system(synchronous(), turns=4, tool_tokens=20, training=training, lengths=constant(2))
    run_system(few, 1)
    assert training.steps[-1] == (10 + 2 + 20,) * 8


def test_turns_that_differ_add_the_tools_of_the_longest_sample() -> None:
    counts = TurnCounts(2.5, 6)
    system = toy_system(
        synchronous(),
        turns=6,
        turn_counts=counts,
        tool=Latencies(lambda _, size: np.full(size, 3.0)),
        steps=200,
    )
    longest = [
        counts.draw(stream(1, TURNS, number), 8).max() for number in range(system.workload.steps)
    ]
    steps_s = GENERATE_S + 50 + 3 * (np.array(longest) - 1)
    assert run_system(system, 1).step_s == pytest.approx(steps_s.mean(), rel=EXACT)


def test_while_a_sample_waits_for_its_tool_another_uses_its_slot() -> None:
    """Two samples of two turns in one slot: 50 s a turn, which hides tools of 30 s."""
    system = toy_system(
        synchronous(),
        batch=1,
        samples=2,
        engines=1,
        slots=1,
        turns=2,
        tool=Latencies(lambda _, size: np.full(size, 30.0)),
        lengths=constant(100),
    )
    assert run_system(system, 1).step_s == pytest.approx(200 + 50, rel=EXACT)


# --- staleness -----------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("eta", [0, 1, 2, 4])
@pytest.mark.parametrize("ratio", [0.4, 0.9, 1.3, 3.0])
def test_the_mean_lag_and_its_parts_are_those_of_the_closed_form(
    ratio: float, eta: int, samples: int
) -> None:
    """Groups take their longest response, however many there are: rates follow from their number.
    A slot is taken until its group is complete, so that the longest response counts once."""
    batch, lengths = 16, lognormal(100)
    longest_s = lengths.of(np.random.default_rng(0), (20_000, samples)).max(1).mean()
    for batches in (0.5, 2.0):
        in_flight = int(batches * batch)
        system = toy_system(
            asynchronous(eta),
            batch=batch,
            in_flight=in_flight,
            samples=samples,
            steps=70,
            warmup_steps=20,
            lengths=lengths,
            train_s=ratio * batch * longest_s / in_flight,
        )
        result = run_system(system, 1)
        means = result.lag_parts.means
        lag = means["before_queue"] + means["in_queue"]
        assert lag == pytest.approx(result.mean("head_lag"))
        form = mean_staleness_bounded(
            in_flight=in_flight, batch_size=batch, eta=eta, rate_ratio=ratio
        )
        assert lag == pytest.approx(form.lag, abs=0.3)
        # Synchronous generation and training take turns: the trainer waits at any ratio.
        measured = result.closed_form
        assert measured is not None
        assert measured.lag == pytest.approx(lag, abs=0.3)
        # Where eq. 3 binds, groups start when weights arrive: the parts differ, and not the sum.
        bound = ratio >= 1 or form.lag == eta
        assert measured.before_queue == pytest.approx(
            means["before_queue"], abs=1 if bound else 0.3
        )
        assert result.columns["in_flight"].max() <= in_flight


def test_a_trainer_that_waits_for_weights_is_busy() -> None:
    """Engines are three times as fast as it is: eq. 3 binds, though it waits for each load."""
    batch, weights = 16, WeightSync(load_s=40.0)
    system = toy_system(
        asynchronous(2),
        batch=batch,
        in_flight=batch,
        steps=70,
        train_s=300,
        warmup_steps=20,
        weights=weights,
    )
    result = run_system(replace(system, push_holds_trainer=True), 1)
    assert result.mean("wait_s") == pytest.approx(40, rel=0.2)
    assert result.closed_form is not None
    assert result.closed_form.lag == 2
    assert result.mean("head_lag") == pytest.approx(2, abs=0.3)


def test_a_queue_that_is_not_full_yet_is_out_of_range() -> None:
    """The lag grows by 1 - 1 / rho in each step until eq. 3 binds: here for 88 of 80 steps."""
    batch, train_s = 16, 1.1 * 100 * 2
    system = toy_system(
        asynchronous(8), batch=batch, in_flight=8, steps=80, train_s=train_s, warmup_steps=20
    )
    result = run_system(system, 1)
    form = mean_staleness_bounded(in_flight=8, batch_size=batch, eta=8, rate_ratio=1.1)
    assert form.lag == 8
    assert result.mean("head_lag") < 7
    growth = np.diff(result.columns["head_lag"][20:60]).mean()
    assert growth == pytest.approx(1 - 1 / 1.1, rel=0.15)
    assert np.all(np.diff(result.columns["head_lag"]) >= 0)


@pytest.mark.parametrize(
    "system",
    [
        lambda: toy_system(partial_rollout()),
        lambda: toy_system(one_step_overlap()),
        lambda: toy_system(asynchronous(0.5)),
        lambda: toy_system(asynchronous(2), order=bounded_lag(1, "drop")),
        lambda: toy_system(asynchronous(2), parts=2, minibatches=2),
        lambda: toy_system(asynchronous(math.inf), train_s=1e5),
    ],
)
def test_other_systems_have_no_closed_form(system: Callable[[], System]) -> None:
    assert run_system(system(), 1).closed_form is None

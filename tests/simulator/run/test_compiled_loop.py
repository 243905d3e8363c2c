"""Compiled and plain code simulate the same, to the last bit, and plain code does what is left."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from areal_lab.config.problem import ConfigError
from areal_lab.control.schedule import synchronous
from simulator import fast
from simulator.assembly.simulate import build
from simulator.config.load import load_simulation
from simulator.costs import decode, micro_batching, training_timing
from simulator.engine import decode_batch, kernel, replica, sequences
from simulator.run import event_loop
from simulator.run.compiled_loop import serves
from simulator.run.one_seed import run_system
from simulator.run.result import SimulationResult
from simulator.run.system import System
from tests.simulator.run.test_recorded_results import CASES, SHORT
from tests.simulator.run.toy_system import toy_system


@pytest.fixture(autouse=True)
def undecided() -> Iterator[None]:
    """These tests decide themselves; others are plain, whatever ran before them (conftest)."""
    fast.reset()
    yield
    fast.use(wanted=False)


def contents(result: SimulationResult) -> dict[str, Any]:
    """Everything that a result has; equal texts are equal numbers."""
    columns = {name: column.tolist() for name, column in result.columns.items()}
    fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return {name: repr(value) for name, value in (fields | {"columns": columns}).items()}


def both(system: System, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    fast.use(wanted=False)
    plain = contents(run_system(system, seed))
    fast.use(wanted=True)
    return plain, contents(run_system(system, seed))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_presets_give_the_same_results(case: tuple[str, ...]) -> None:
    name, *overrides = case
    config = load_simulation(name, [*SHORT, *overrides])
    system = build(config)
    plain, compiled = both(system, config.seed)
    assert compiled == plain


LENGTHS = (
    "kind=constant",
    "sigma=0.3",
    "sigma=1.2",
    "group_correlation=0.9",
    "drift_per_step=0.05",
)
OTHERS = (
    (),
    ("rollout.decode_step_s=null",),
    ("rollout.decode_step_s=null", "rollout.cuda_graphs=false"),
    (
        *("rollout.decode_step_s=null", "rollout.engine_overlap=false"),
        "rollout.engine_sequence_s=1e-4",
    ),
    ("rollout.decode_step_s=null", "rollout.engine_overhead_s=0.02"),
    ("rollout.decode_sequence_s=0.001", "rollout.decode_context_token_s=1e-6"),
    ("rollout.prefill_pass_s=0.05", "rollout.prefill_token_s=1e-5"),
    ("rollout.prefix_sharing=false",),
    ("faults.straggler_share=0.5",),
    ("cluster.placement=colocated",),
    ("cluster.hybrid_gpus=1",),
    ("weights.backend=disk",),
    ("schedule.require_batches=2",),
    ("workload.whole_run=true",),
    ("trainer.step_s=null",),
)
# An engine of these GPUs holds few responses, and preempts some.
SMALL_CACHE = (
    *("cluster.gpu=RTX 4090", "model=Qwen2.5-7B", "rollout.memory_utilization=0.66"),
    *("rollout.decode_step_s=null", "rollout.max_running=64", "workload.answers.sigma=0.2"),
    *("workload.answers.mean_tokens=3000", "workload.answers.max_tokens=6000"),
    *("workload.prompts_per_batch=24", "schedule.max_concurrent_prompts=60"),
)


@st.composite
def configured(draw: st.DrawFn) -> list[str]:
    """Settings of small runs that differ from each other in what engines and schedules do."""
    eta = draw(st.sampled_from(["0", "0.5", "1", "4", "inf"]))
    chosen = [
        "workload.steps=7",
        "workload.warmup_steps=1",
        f"workload.prompts_per_batch={draw(st.sampled_from([2, 4, 12]))}",
        f"workload.samples_per_prompt={draw(st.sampled_from([1, 2, 5]))}",
        f"workload.prompt_tokens={draw(st.sampled_from([1, 20, 300]))}",
        f"workload.answers.{draw(st.sampled_from(LENGTHS))}",
        f"schedule.eta={eta}",
        "schedule.name="
        + draw(
            st.sampled_from(
                [
                    *("asynchronous", "asynchronous", "synchronous"),
                    *("one_step_overlap", "partial_rollout", "bounded_drift"),
                ]
            )
        ),
        f"schedule.interruptible={draw(st.booleans())}",
        "schedule.batch_order="
        + draw(st.sampled_from(["oldest_finished_first", "strict_start_order"])),
        f"schedule.max_concurrent_prompts={draw(st.sampled_from([0, 3, 9, 40]))}",
        f"rollout.max_running={draw(st.sampled_from([1, 3, 16, 64]))}",
        f"cluster.rollout_gpus={draw(st.sampled_from([1, 2, 3]))}",
        *draw(st.sampled_from(OTHERS)),
    ]
    if draw(st.booleans()):
        chosen += SMALL_CACHE
    return chosen


@settings(max_examples=150, deadline=None)
@given(configured(), st.integers(0, 3))
def test_small_runs_give_the_same_results(overrides: list[str], seed: int) -> None:
    try:
        system = build(load_simulation("small", overrides))
    except (ConfigError, ValueError):
        assume(False)
    assert serves(system)
    plain, compiled = both(system, seed)
    assert compiled == plain


def test_events_of_the_same_moment_have_the_same_order() -> None:
    """With steps of 10 ms, engines and trainer often end something at one time."""
    config = load_simulation(
        "small",
        [
            *("workload.prompt_tokens=1", "workload.answers.sigma=1.2", "cluster.rollout_gpus=1"),
            *("schedule.batch_order=strict_start_order", "rollout.max_running=16"),
            "workload.steps=7",
        ],
    )
    plain, compiled = both(build(config), 2)
    assert compiled == plain


def test_hybrid_engines_leave_with_groups_that_just_ended() -> None:
    config = load_simulation(
        "small",
        [
            *(*SMALL_CACHE, "cluster.rollout_gpus=3", "cluster.hybrid_gpus=1"),
            *("workload.prompt_tokens=1", "workload.answers.group_correlation=0.9"),
            *("schedule.name=bounded_drift", "workload.steps=7", "workload.warmup_steps=1"),
        ],
    )
    plain, compiled = both(build(config), 0)
    assert compiled == plain


def test_a_full_cache_preempts_the_same_responses() -> None:
    config = load_simulation("small", [*SMALL_CACHE, "schedule.eta=4"])
    plain, compiled = both(build(config), 1)
    assert "preemptions=0" not in plain["counts"]
    assert compiled == plain


@pytest.mark.parametrize(
    "schedule",
    [
        ("schedule.eta=30", "workload.answers.max_tokens=6000", "workload.answers.sigma=1.5"),
        ("schedule.name=synchronous",),
        ("schedule.name=one_step_overlap",),
        ("schedule.name=partial_rollout",),
        ("schedule.interruptible=false",),
    ],
    ids=" ".join,
)
def test_long_runs_have_room_for_their_versions(schedule: tuple[str, ...]) -> None:
    """Engines pause for new weights, or take them when they have no work."""
    config = load_simulation(
        "small",
        ["workload.steps=200", "trainer.step_s=0.2", "weights.update_s=0.05", *schedule],
    )
    plain, compiled = both(build(config), 1)
    assert compiled == plain


def test_a_group_may_have_tokens_of_many_versions() -> None:
    config = load_simulation(
        "small",
        [
            *("workload.steps=60", "schedule.eta=30", "trainer.step_s=0.2"),
            *("workload.answers.max_tokens=6000", "workload.answers.sigma=1.5"),
            "weights.update_s=0.05",
        ],
    )
    system = build(config)
    plain, compiled = both(system, 1)
    assert compiled == plain
    assert max(run_system(system, 1).lags("token")) > 12


def test_runs_that_compiled_code_does_not_know_are_plain() -> None:
    assert serves(build(load_simulation("small")))
    for override in (
        "workload.reward.mean_s=1",
        "workload.turns=2",
        "faults.node_mtbf_h=100",
        "schedule.slots=samples",
        "rollout.routing=round_robin",
        "workload.equal_rewards_share=0.5",
    ):
        config = load_simulation("small", [override])
        system = build(config)
        assert not serves(system), override
        plain, compiled = both(system, 1)
        assert compiled == plain
    late = ["schedule.batch_order=bounded_lag", "schedule.max_lag=1", "schedule.on_late=drop"]
    assert not serves(build(load_simulation("small", late)))
    assert not serves(toy_system(synchronous()))


def test_a_response_that_no_cache_holds_is_refused_as_in_plain_code() -> None:
    system = build(load_simulation("small", ["rollout.decode_step_s=null"]))
    longer = dataclasses.replace(system, lengths=_Long())
    for wanted in (False, True):
        fast.use(wanted=wanted)
        with pytest.raises(ValueError, match=r"but the cache .*holds"):
            run_system(longer, 1)


class _Long:
    def draw(
        self, _generator: np.random.Generator, groups: int, samples: int, *, step: float = 0.0
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.full((groups, samples), 10_000_000 + int(step))


# --- packing -------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 700), min_size=24, max_size=160),
    st.sampled_from([700, 1024, 2000]),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_micro_batches_are_cut_alike(
    lengths: list[int], budget: int, ranks: int, minibatches: int, least: int
) -> None:
    cut = []
    for wanted in (False, True):
        fast.use(wanted=wanted)
        lanes = micro_batching.cut_within_budget(
            lengths, ranks=ranks, minibatches=minibatches, max_tokens=budget, least=least
        )
        cut.append([one.tolist() for one in lanes])
    assert cut[0] == cut[1]


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 12), st.integers(2, 8))
def test_pipelines_take_the_same_time(seed: int, lanes: int, batches: int, stages: int) -> None:
    generator = np.random.default_rng(seed)
    present = np.arange(batches) < generator.integers(1, batches + 1, (lanes, 1))
    forward, backward, hop = generator.random((3, lanes, batches))
    seconds = []
    for wanted in (False, True):
        fast.use(wanted=wanted)
        seconds.append(
            training_timing.one_forward_one_backward_s(
                forward, backward, present, stages=stages, hop_s=hop
            ).tolist()
        )
    assert seconds[0] == seconds[1]


# --- when it is used -----------------------------------------------------------------------------


def test_a_process_turns_to_compiled_code_when_it_simulates_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fast, "compiled_before", lambda: True)
    assert not fast.simulates(fast.ENOUGH - 1)
    assert fast.simulates(1)
    assert fast.in_use()


def test_without_an_earlier_compilation_it_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "compiled_before", lambda: False)
    assert not fast.simulates(fast.ENOUGH_TO_COMPILE - 1)
    assert fast.simulates(1)


def test_without_numba_everything_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "available", lambda: False)
    assert not fast.simulates(10 * fast.ENOUGH_TO_COMPILE)
    system = build(load_simulation("small"))
    assert run_system(system, 1).counts.trained


def test_a_numba_that_cannot_be_loaded_is_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise ImportError(f"{name} needs NumPy 2.4 or less")

    monkeypatch.setattr(fast, "import_module", fails)
    assert not fast.simulates(10 * fast.ENOUGH_TO_COMPILE)
    assert not fast.simulates(1)


def test_numbers_that_stand_twice_are_equal() -> None:
    assert kernel._CLOCK_ROUNDING == event_loop._CLOCK_ROUNDING
    assert kernel._ROUNDING == decode_batch._ROUNDING
    assert kernel._STEP_ROUNDING == decode._ROUNDING
    assert kernel.FREE == sequences.NO_START
    numbers = (kernel.IDLE, kernel.DECODE, kernel.PREFILL, kernel.RECOMPUTE, kernel.PAUSED)
    names = (replica.IDLE, replica.DECODE, replica.PREFILL, replica.RECOMPUTE, replica.PAUSED)
    assert [replica.ACTIVITIES[number] for number in numbers] == [*names]


def test_small_runs_do_not_load_numba() -> None:
    script = (
        "import sys; from simulator import build, load_simulation, run_system; "
        "run_system(build(load_simulation('small')), 1); print('numba' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"


def test_the_compiled_functions_are_kept_for_the_next_process() -> None:
    command = [sys.executable, "-m", "simulator.assembly.compiled"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "are ready" in told.stdout
    assert fast.compiled_before()
    root = Path(fast.__file__).parent
    assert [*root.glob("engine/__pycache__/kernel.perform-*.nbi")]

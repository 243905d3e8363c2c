"""The benchmark of interruptible rollout: what is measured and what is predicted agree where both
are known, on an engine whose every step takes as long as the next."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from areal_lab.data.trajectory import Segment
from areal_lab.engines.client.sglang import SGLANG
from areal_lab.engines.protocol import Generated, GenerateRequest, PauseMode, SamplingParams
from areal_lab.engines.weights.records import Transfer
from benchmarks.harness import parse, report
from benchmarks.rollout.__main__ import figures_of
from benchmarks.rollout.bench import Results
from benchmarks.rollout.latency import Ear, first_token_s
from benchmarks.rollout.load import Load, Measured, Policy, generate_all, long_tailed
from benchmarks.rollout.prediction import Costs, Stopwatch, calibrate, costs_from, predict
from simulator.calibrate.fit import PartFit
from simulator.catalogue.gpu import CPU_CORE
from simulator.catalogue.models import find_model
from simulator.costs.decode import decode_cost
from simulator.costs.measured_engine import MeasuredDecode, MeasuredPrefill
from tests.simulator.run.virtual_loop import run_virtually

STEP_S, LOAD_S = 0.01, 0.3
MODEL = "SmolLM2-135M-Instruct"


@dataclass
class SteadyEngine:
    """Gives every running request a token each `STEP_S`, unless it is paused."""

    version: int = 0
    running: dict[str, int] = field(default_factory=dict)
    going: asyncio.Event = field(default_factory=asyncio.Event)
    modes: list[PauseMode] = field(default_factory=list)
    loaded_with: list[int] = field(default_factory=list)
    """Requests that ran when weights were loaded."""
    watch: Stopwatch | None = None

    def __post_init__(self) -> None:
        self.going.set()

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        return list(await asyncio.gather(*(self._one(request) for request in requests)))

    async def _one(self, request: GenerateRequest) -> Generated:
        name, versions = request.request_id, []
        self.running[name] = 0
        for _ in range(request.sampling.max_new_tokens):
            await asyncio.sleep(STEP_S)
            await self.going.wait()
            versions.append(self.version)
            self.running[name] += 1
            if self.watch is not None:
                self.watch.message()
        del self.running[name]
        parts = [
            Segment((0,) * versions.count(one), (0.0,) * versions.count(one), one)
            for one in sorted(set(versions))
        ]
        return Generated(
            request_id=name,
            segments=tuple(parts),
            finish_reason="length",
            retractions=0,
            cached_tokens=0,
        )

    def received_tokens(self, request_id: str) -> int:
        return self.running.get(request_id, 0)

    async def pause(self, mode: PauseMode) -> None:
        self.modes.append(mode)
        self.going.clear()

    async def resume(self) -> None:
        self.going.set()

    async def bring(self, ready_s: float) -> None:
        assert ready_s <= asyncio.get_running_loop().time() + 1e-6
        self.loaded_with.append(len(self.running))
        await asyncio.sleep(LOAD_S)
        self.version += 1


def load_of(*lengths: int, slots: int, every_s: float = math.inf) -> Load:
    requests = [
        GenerateRequest(
            request_id=str(index),
            prompt_tokens=(2, 3, 4),
            sampling=SamplingParams(max_new_tokens=length, ignore_eos=True),
        )
        for index, length in enumerate(lengths)
    ]
    return Load(requests=tuple(requests), slots=slots, every_s=every_s)


def steady_costs() -> Costs:
    steps = decode_cost(find_model(MODEL), CPU_CORE, 1, measured=MeasuredDecode(step_s=STEP_S))
    return Costs(steps, MeasuredPrefill(pass_s=0.0))


def measured(load: Load, policy: Policy) -> tuple[Measured, SteadyEngine]:
    async def run() -> tuple[Measured, SteadyEngine]:
        engine = SteadyEngine()
        return await generate_all(engine, load, policy, engine.bring), engine

    return run_virtually(run())


@pytest.mark.parametrize("policy", Policy)
def test_an_engine_that_fails_ends_the_run(policy: Policy) -> None:
    class Failing(SteadyEngine):
        async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
            if requests[0].request_id == "2":
                raise RuntimeError("no more")
            return await super().generate(requests)

    engine = Failing()
    load = load_of(10, 10, 10, 10, 10, slots=2, every_s=0.2)
    with pytest.raises(RuntimeError, match="no more"):
        run_virtually(generate_all(engine, load, policy, engine.bring))


@pytest.mark.parametrize(("responses", "error"), [(3, "ended before"), (0, "no more")])
def test_requests_that_end_before_new_weights_are_an_error(responses: int, error: str) -> None:
    class Short(SteadyEngine):
        async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
            if not responses:
                raise RuntimeError("no more")
            return await super().generate(requests)

    engine = Short()
    timing = first_token_s(
        engine,  # type: ignore[arg-type]
        Ear(),
        load_of(3, 3, slots=2).requests,
        version=1,
        bring=lambda: engine.bring(0.0),
        mode=PauseMode.RETRACT,
    )
    with pytest.raises(RuntimeError, match=error):
        run_virtually(timing)


def test_throughput_is_counted_until_the_last_request_is_started() -> None:
    """Two slots; the fourth request starts when the second and third have had 30 + 10 tokens."""
    load = load_of(100, 30, 10, 50, slots=2)
    one, engine = measured(load, Policy.INTERRUPT)
    assert one.seconds == pytest.approx(0.4)
    assert one.tokens == pytest.approx(80, abs=1)
    assert (one.updates, one.recomputed_tokens) == (0, 0)
    assert engine.running == {}
    assert predict(load, Policy.INTERRUPT, steady_costs(), LOAD_S) == pytest.approx(200, rel=0.02)


def test_waiting_starts_nothing_until_the_longest_request_ends() -> None:
    load = load_of(200, 50, 50, 50, 50, slots=2, every_s=0.6)
    one, engine = measured(load, Policy.WAIT)
    assert engine.modes == []
    # At 0.6 s the first has 60 of its 200 tokens, and the third began at 0.5 s.
    assert engine.loaded_with[0] == 0
    assert one.update_s[0] == pytest.approx(2.0 + LOAD_S - 0.6, abs=0.02)
    assert one.load_s[0] == pytest.approx(LOAD_S, abs=0.02)
    assert one.recomputed_tokens == 0


def test_interrupting_pauses_only_for_the_load_and_counts_recomputed_tokens() -> None:
    load = load_of(200, 50, 50, 50, 50, slots=2, every_s=0.605)
    one, engine = measured(load, Policy.INTERRUPT)
    assert set(engine.modes) == {PauseMode.RETRACT}
    assert engine.loaded_with[0] == 2
    assert one.update_s == pytest.approx([LOAD_S] * len(one.update_s), abs=0.02)
    # The first has 60 tokens, the third has 10, each behind a prompt of 3.
    assert one.recomputed_tokens >= 60 + 10 + 6


@pytest.mark.parametrize("policy", list(Policy))
def test_with_known_steps_the_prediction_equals_the_measurement(policy: Policy) -> None:
    requests = long_tailed(
        400, median_tokens=60, sigma=1.0, most_tokens=600, prompt_tokens=8, vocabulary=99
    )
    load = Load(requests=requests, slots=8, every_s=5.0)
    one, engine = measured(load, policy)
    assert one.updates >= 4
    assert len(engine.loaded_with) >= one.updates
    stood_still_s = sum(one.load_s) / len(one.load_s)
    predicted = predict(load, policy, steady_costs(), stood_still_s)
    assert predicted == pytest.approx(one.tokens_per_s, rel=0.03)


def test_interrupting_gains_what_waiting_leaves_idle() -> None:
    requests = long_tailed(
        400, median_tokens=60, sigma=1.0, most_tokens=600, prompt_tokens=8, vocabulary=99
    )
    load = Load(requests=requests, slots=8, every_s=5.0)
    rates = {p: predict(load, p, steady_costs(), LOAD_S) for p in Policy}
    assert rates[Policy.INTERRUPT] > 1.2 * rates[Policy.WAIT]


async def calibrated() -> tuple[PartFit, PartFit]:
    engine = SteadyEngine()
    watch = engine.watch = Stopwatch(engine, asyncio.get_running_loop().time)
    return await calibrate(engine, watch, slots=8, rounds=1, tokens=32, vocabulary=99)


def test_the_calibration_finds_the_step_of_an_idle_engine() -> None:
    decode, prefill = run_virtually(calibrated())
    assert decode.held_out_error < 0.01
    assert prefill.held_out_error < 0.1
    costs = costs_from(decode, prefill, MODEL)
    assert costs.decode.steps_s(4, 100, 10) == pytest.approx(10 * STEP_S, rel=0.02)
    assert costs.prefill.seconds(64, 2080) < 0.1 * STEP_S


def test_a_fit_that_attributes_all_time_to_the_sequences_is_accepted() -> None:
    decode, prefill = run_virtually(calibrated())
    settings = {"rollout.decode_step_s": 0.0, "rollout.decode_sequence_s": STEP_S}
    costs = costs_from(replace(decode, settings={**decode.settings, **settings}), prefill, MODEL)
    assert costs.decode.steps_s(4, 100, 10) == pytest.approx(40 * STEP_S, rel=0.02)


def test_the_report_has_medians_of_pairs_and_their_spread(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run_of(tokens: int, recomputed: int) -> Measured:
        return Measured(
            tokens=tokens,
            seconds=10.0,
            updates=1,
            update_s=(0.5,),
            load_s=(0.25,),
            recomputed_tokens=recomputed,
        )

    decode, prefill = run_virtually(calibrated())
    results = Results(
        latencies={
            Transfer.FOLDER: {"retract": [0.1, 0.3, 0.2], "wait": []},
            Transfer.DISTRIBUTED: {"in_place": [0.4]},
        },
        decode=decode,
        prefill=prefill,
        load=load_of(10, 30, slots=1, every_s=2.5),
        runs={
            Policy.INTERRUPT: [run_of(1200, 7), run_of(1500, 9), run_of(1100, 8)],
            Policy.WAIT: [run_of(1000, 0)] * 3,
        },
        predicted_per_s={Policy.INTERRUPT: 123.0, Policy.WAIT: 100.0},
    )
    report(figures_of(results), parse("", argv=["--json", "--repeats", "3"]))
    told = json.loads(capsys.readouterr().out)
    assert told["gain"] == pytest.approx(0.2)
    assert told["spread"]["gain"] == pytest.approx({"median": 0.2, "min": 0.1, "max": 0.5})
    assert told["predicted_gain"] == pytest.approx(0.23)
    assert told["first_token_s"] == {"folder": {"retract": 0.2}, "distributed": {"in_place": 0.4}}
    assert told["recomputed_tokens"] == 8
    assert (told["mean_tokens"], told["longest_tokens"]) == (20, 30)
    assert {"machine", "command", "date", "repeats"} <= told.keys()


def test_only_the_first_token_of_an_expected_version_is_timed() -> None:
    async def run() -> Ear:
        ear = Ear()
        api = ear.dialect(SGLANG)
        clock = asyncio.get_running_loop().time

        def message(version: int, *tokens: int) -> dict[str, object]:
            logprobs = [[-1.0, token, None] for token in tokens]
            meta = {"weight_version": str(version), "output_token_logprobs": logprobs}
            return {"output_ids": list(tokens), "meta_info": {**meta, "completion_tokens": 3}}

        assert api.read(message(1, 5)).tokens == (5,)
        ear.expect(1, clock())
        await asyncio.sleep(2.0)
        api.read(message(0, 5))
        api.read(message(1))
        assert ear.first_s == []
        await asyncio.sleep(1.0)
        api.read(message(1, 5))
        await ear.arrived()
        api.read(message(1, 6))
        return ear

    assert run_virtually(run()).first_s == [3.0]

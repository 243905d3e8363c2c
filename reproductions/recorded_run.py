"""Predict a real run: the simulator is calibrated on a synchronous run of `areal-lab train` with
the embedded engine, and predicts the asynchronous one. The column `paper` is our measurement.  It
reads the pair of logs in reproductions/recorded, which gives the same numbers on any machine;
`python -m reproductions.record_pair` records a new pair. --quick skips the intervals.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from areal_lab.runlog.intervals import student_t
from areal_lab.runlog.read_run import RecordedRun, read_run
from benchmarks.harness import Arguments
from reproductions.record_pair import ETA, KINDS, RECORDED
from reproductions.report.harness import main
from reproductions.report.records import Parameter, Reproduction, Row
from simulator.calibrate.fit import EnginePoint, is_held_out, span_points
from simulator.calibrate.fit_run import FIRST, Calibration, calibrate_from
from simulator.calibrate.replay import ENGINES, Replay, replay
from simulator.calibrate.report import configuration, draw_replay
from simulator.config.schema import SimulationConfig
from simulator.costs.measured_engine import measured_decode, measured_prefill
from simulator.stats.statistics import Estimate
from simulator.workload.recorded_run import TrainingPoint, training_points

STEP_BAR, IDLE_BAR = 0.15, 0.10
IDLE = ("trainer idle", f"{ENGINES} idle")
WHY = (
    "Fitted to the synchronous run only, without its first step, and with a quarter of the others "
    "held out: decode steps (three coefficients and a knee), prefills, training steps, export and "
    "load of weights, scoring. The response lengths are recorded, and both runs had the same. "
    "From the asynchronous run the simulator uses only the schedule.",
    "The interval is that of the fit, by excluding each training step in turn (jackknife). It "
    "does not include the variation between runs.",
    "Engine and trainer have one thread each in both runs, and share the memory bandwidth only "
    "when they work at the same time: in the asynchronous run. The table of other assumptions "
    "shows by which factor times were longer there than fitted. The prediction does not include "
    "this factor, which makes it too short. Prefills, which have few tokens per pass in the fit "
    "and many after an interruption, make it too long.",
    "A pass of the embedded engine prefills prompts and samples a token; the simulator counts it "
    "as a prefill and a decode step.",
)


def reproduce(arguments: Arguments, folder: Path = RECORDED) -> Reproduction:
    """Calibrate on the synchronous run of a pair and predict both; `--quick` without intervals."""
    known, unknown = (read_run(folder / kind) for kind in KINDS)
    found = calibrate_from(folder / "synchronous")
    costs = configuration(found)
    own, predicted = (
        replay(costs, known, name="synchronous"),
        replay(costs, unknown, name="asynchronous"),
    )
    left_out = [] if arguments.quick else _fitted_steps(known)
    others = [_without(folder, step, unknown) for step in left_out]
    return Reproduction(
        name="recorded_run",
        claim=(
            f"Calibrated on a synchronous run, the simulator predicts the asynchronous one (eta "
            f"{ETA}): its step time within {STEP_BAR:.0%}, its idle shares within "
            f"{100 * IDLE_BAR:.0f} points. `paper` is our measurement; not in the paper."
        ),
        rows=[*_rows(own, (), fitted=True), *_rows(predicted, others, fitted=False)],
        parameters=_parameters(found),
        why=(*WHY, _circumstances(folder)),
        findings=(_finding(predicted),),
        sensitivity=_contention(costs, unknown),
        figure=lambda: draw_replay(predicted),
        title="asynchronous run: measured, and predicted from the synchronous one",
    )


def _rows(found: Replay, others: Sequence[Replay], *, fitted: bool) -> list[Row]:
    by_name = {row.name: row for row in found.rows}
    rows = []
    for name in ("step time", "effective throughput", *IDLE):
        points = name in IDLE
        each = [next(r.predicted for r in one.rows if r.name == name) for one in others]
        bar = {"step time": STEP_BAR, **dict.fromkeys(IDLE, IDLE_BAR)}.get(name)
        rows.append(
            Row(
                name=f"{found.name}: {name}",
                paper=by_name[name].measured,
                ours=_jackknife(by_name[name].predicted, each),
                unit=by_name[name].unit,
                bar=None if fitted else bar,
                fitted=fitted,
                points=points,
            )
        )
    return rows


def _jackknife(value: float, without_one: Sequence[float]) -> Estimate:
    """Interval of a number from its values with one observation left out (Tukey 1958).

    Without such values, the interval is the number itself.
    """
    count = len(without_one)
    if count < 2:
        return Estimate(value, value, value)
    mean = sum(without_one) / count
    variance = (count - 1) / count * sum((one - mean) ** 2 for one in without_one)
    half = student_t(count - 1) * variance**0.5
    return Estimate(value, value - half, value + half)


def _without(folder: Path, step: int, unknown: RecordedRun) -> Replay:
    """The prediction of a fit without one more training step."""
    found = calibrate_from(folder / "synchronous", without={*FIRST, step})
    return replay(configuration(found), unknown)


def _fitted_steps(run: RecordedRun) -> list[int]:
    steps = [batch.version for batch in run.batches]
    return [step for step in steps if step not in FIRST and not is_held_out(step)]


def _contention(costs: SimulationConfig, run: RecordedRun) -> list[dict[str, str]]:
    """Factors by which times were longer with the other process running than alone."""
    decode, prefill, trainer = measured_decode(costs), measured_prefill(costs), costs.trainer
    assert decode is not None
    assert prefill is not None
    assert trainer.step_s is not None
    points = [p for p in span_points(run) if 1 < p.place <= len(run.batches)]
    decoding = [point for point in points if not point.prompt_tokens]
    reading = [point for point in points if point.prompt_tokens]

    def steps_s(point: EnginePoint) -> float:
        context_s = point.context_tokens * decode.context_token_s
        return point.steps * decode.base_s(point.batch) + context_s

    prompt = costs.workload.prompt_tokens
    training = [point for point in training_points(run) if point.step > 1]
    slower = {
        "decode steps": _seconds(decoding) / sum(map(steps_s, decoding)),
        "passes with a prefill": _seconds(reading)
        / sum(
            steps_s(p)
            + p.steps * prefill.pass_s
            + p.prompt_tokens * prefill.token_s
            + p.prompt_pairs * prefill.pair_s
            for p in reading
        ),
        "training steps": _seconds(training)
        / sum(trainer.step_s + trainer.token_s * (p.tokens + p.samples * prompt) for p in training),
    }
    return [
        {"in the asynchronous run": name, "measured over fitted": f"{ratio:.2f}"}
        for name, ratio in slower.items()
    ]


def _seconds(points: Sequence[EnginePoint] | Sequence[TrainingPoint]) -> float:
    return sum(point.seconds for point in points)


def _parameters(found: Calibration) -> list[Parameter]:
    units = {"knee": "", "error": "share"}
    return [
        Parameter(
            name=name,
            value=float(f"{value:.4g}"),
            unit=units.get(name.rpartition("_")[2], "s"),
            source=f"{part.name}, {part.held_out_error:.1%} error on held-out steps; {part.note}",
            fitted=True,
        )
        for part in found.parts
        for name, value in part.settings.items()
    ]


def _finding(predicted: Replay) -> str:
    rows = {row.name: row for row in predicted.rows}
    step = rows["step time"]
    idle = "; ".join(
        f"{name} {rows[name].measured:.0%} measured, {rows[name].predicted:.0%} predicted"
        for name in IDLE
    )
    return (
        f"A step of the asynchronous run took {step.measured:.2f} s; {step.predicted:.2f} s were "
        f"predicted ({step.gap:+.1%}). {idle[0].upper()}{idle[1:]}."
    )


def _circumstances(folder: Path) -> str:
    known = {kind: json.loads((folder / kind / "recording.json").read_text()) for kind in KINDS}
    last = known["asynchronous"]
    others = ", ".join(
        f"{kind} {'not noted' if one['others'] is None else format(one['others'], '.0%')}"
        for kind, one in known.items()
    )
    return (
        f"Recorded {last['date']} on {last['cores']} cores, {last['cpu']}, with "
        f"`{last['command']}` at commit {last['commit']}. Share of the cores' time taken "
        f"by other processes: {others}."
    )


if __name__ == "__main__":
    main(reproduce, __doc__)

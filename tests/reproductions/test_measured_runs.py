"""Measured runs of other systems: rows as printed, fits that find planted numbers, fair scores."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_lab.plots.style import save_picture
from areal_lab.runlog.intervals import student_t
from reproductions.measured_runs.__main__ import data, findings, rows, unscored
from reproductions.measured_runs.ablation import REST, TERMS, ablation, without, without_rest
from reproductions.measured_runs.chart import draw
from reproductions.measured_runs.families import Bars, Family, Fit, Measured, MeasuredRuns, load
from reproductions.measured_runs.predict import Context, Sizes, configured, predict
from reproductions.measured_runs.residuals import records, saved_records, to_text
from reproductions.measured_runs.score import Number, lags_with_error, score, summary
from reproductions.measured_runs.tables import (
    families,
    lags,
    numbers,
    parts,
    printed_lags,
    reasons,
)
from reproductions.report.harness import expected
from simulator.assembly.build import problems
from simulator.assembly.simulate import replicate
from simulator.calibrate.advise import advise
from simulator.config.load import load_simulation
from simulator.report.measured_errors import FILE, measured_errors
from simulator.report.step_parts import PARTS_OF_A_STEP, seconds_of
from simulator.stats.statistics import Prediction

SIZES = Sizes(seeds=2, overrides={})
BARS = Bars(gain_median=0.12, gain_largest=0.35, step_median=0.2, coverage=(0.8, 0.97))
SPEED = Fit(setting="trainer.mfu", part="update", low=0.02, high=1.0)
STEP = Fit(setting="trainer.mfu", part="step", low=0.02, high=1.0)
LENGTH = Fit(setting="workload.answers.mean_tokens", part="generation", low=50, high=500)
PLANTED = {"trainer.mfu": 0.21, "workload.answers.mean_tokens": 170}
COMMON: dict[str, Any] = {
    "model": "Qwen2.5-0.5B",
    "cluster.gpu": "H100",
    "cluster.gpus": 4,
    "workload.prompts_per_batch": 16,
    "workload.samples_per_prompt": 8,
    "workload.minibatches": 2,
    "workload.answers.mean_tokens": 170,
    "workload.answers.max_tokens": 600,
    "workload.steps": 3,
    "workload.warmup_steps": 1,
}
SYNCHRONOUS = {"cluster.placement": "colocated", "schedule.name": "synchronous"}
ASYNCHRONOUS = {"cluster.rollout_gpus": 2, "weights.backend": "nccl", "schedule.eta": 1}


def family(name: str, *, group: str = "", fits: Sequence[Fit] = (LENGTH, SPEED)) -> Family:
    """Two rows, measured on a simulated cluster with the planted numbers."""
    settings = (SYNCHRONOUS, ASYNCHRONOUS)
    runs = [configured(_row(each, {}), _context(COMMON | PLANTED), ()) for each in settings]
    measured = []
    for config in runs:
        each = [seconds_of(result) for result in replicate(config, processes=1).results]
        mean = {part: math.fsum(one[part] for one in each) / len(each) for part in each[0]}
        measured.append(
            {"step_s": mean["step"], "generation_s": mean["generation"], "update_s": mean["update"]}
        )
    made = [_row(each, seconds) for each, seconds in zip(settings, measured, strict=True)]
    return Family(
        id=name,
        system="planted",
        group=group or name,
        source="simulated",
        assumed=(),
        settings=COMMON,
        fits=fits,
        rows=made,
    )


def _row(settings: dict[str, Any], measured: dict[str, float]) -> Measured:
    mode = "synchronous" if settings is SYNCHRONOUS else "asynchronous"
    return Measured(id=mode, mode=mode, measured=measured, settings=settings, confounders=())


def _context(settings: dict[str, Any]) -> Context:
    bare = Family(
        id="bare",
        system="",
        group="",
        source="",
        assumed=(),
        settings=settings,
        fits=(),
        rows=[_row(SYNCHRONOUS, {})],
    )
    return Context(family=bare, sizes=SIZES)


def runs_of(*wanted: Family) -> MeasuredRuns:
    return MeasuredRuns(families=wanted, bars=BARS, axis_factor=4)


def slowed(one: Family, factor: float) -> Family:
    """The same, but the asynchronous row is measured to take `factor` times as long."""
    first, last = one.rows
    step_s = factor * last.measured["step_s"]
    return replace(one, rows=[first, replace(last, measured={**last.measured, "step_s": step_s})])


def test_rows_are_as_printed() -> None:
    runs = load()
    step_s = {
        row.id: row.measured["step_s"]
        for one in runs.families
        for row in one.rows
        if "step_s" in row.measured
    }
    nemo = (92.8, 64.8, 97.7, 74.6, 376, 200, 221, 301)
    verl = (
        356.30,
        231.34,
        171.30,
        146.11,
        150.63,
        203.47,
        158.72,
        124.64,
        484.62,
        489.95,
        749,
        520,
    )
    large = (286, 345, 278, 134, 111, 64.1, 108, 98.7, 61.7)
    hybrid = (546.96, 353.3, 338.4, 400.7, 246.8)
    miles = (321.7, 246.6, 261.6, 210.5, 239.4, 247.7)  # of updates an hour, and of train + wait
    marin = (66.11, 47.29)
    printed = nemo + verl + large + hybrid + miles + marin
    assert tuple(step_s.values()) == printed
    assert sum(len(one.rows) for one in runs.families) == len(printed) + 20
    gains = {
        row.id: runs.gain(one, row)
        for one in runs.families
        for row in one.rows
        if row.mode == "asynchronous"
    }
    assert gains["N8b"] == pytest.approx(0.734, abs=1e-3)  # the true negative
    assert gains["V7b"] == pytest.approx(0.989, abs=1e-3)
    assert gains["A3-64 AReaL"] == pytest.approx(0.85, abs=5e-3)


def test_figure_4_has_the_same_numbers() -> None:
    axis = expected("figure_4")["axis_tokens_per_s"]
    runs = load()
    assert runs.axis_factor == expected("figure_4")["axis_factor"]
    for one in runs.families:
        model = one.settings["model"].removeprefix("R1-Distill-Qwen-")
        for row in one.rows if model in axis else ():
            gpus, system = row.id.partition("-")[2].split()
            assert row.measured["axis_tokens_per_s"] == axis[model][system][gpus]
            assert row.settings["cluster.gpus"] == int(gpus)


def test_prompt_lengths_follow_from_the_printed_throughput() -> None:
    for one in load().families:
        for row in one.rows:
            if (rate := row.measured.get("tokens_per_gpu_s")) is not None:
                tokens = rate * row.settings["cluster.gpus"] * row.measured["step_s"]
                tokens /= one.settings["workload.prompts_per_batch"] * 32
                prompt = tokens - row.settings["workload.answers.mean_tokens"]
                # Means of five steps each, of which steps are rounded to 0.25 %: 8 of N4b's tokens;
                # N9c's rate and step differ by 2 %.
                near = 120 if row.id == "N9c" else 11
                assert prompt == pytest.approx(one.settings["workload.prompt_tokens"], abs=near)


@pytest.mark.parametrize("one", load().families, ids=lambda one: one.id)
def test_every_row_can_be_simulated(one: Family) -> None:
    context = Context(family=one, sizes=SIZES)
    assert one.source
    assert one.fits or one.id == "R1"  # of which nothing is colocated
    for row in one.rows:
        assert problems(configured(row, context, ())) == []
        assert one.baseline_of(row).mode == "synchronous"


def test_at_most_two_numbers_are_fitted_to_a_synchronous_row() -> None:
    one = load().families[0]
    with pytest.raises(ValueError, match="fits 3 numbers, but at most 2"):
        replace(one, fits=[SPEED] * 3)
    with pytest.raises(ValueError, match="N1b, is not synchronous"):
        replace(one, rows=one.rows[::-1])


def test_planted_numbers_are_found_and_predict_the_other_row() -> None:
    one = family("planted")
    synchronous, asynchronous = predict(one, runs_of(one), SIZES)
    found = {each.fit.setting: each.value for each in synchronous.fitted}
    assert found == pytest.approx(PLANTED, rel=0.02)
    assert all(each.reached for each in synchronous.fitted)
    assert synchronous.is_fitted
    assert not asynchronous.is_fitted
    measured_s = asynchronous.row.measured["step_s"]
    assert asynchronous.run.step_s.mean == pytest.approx(measured_s, rel=0.02)


def test_a_number_out_of_range_stays_at_its_end() -> None:
    one = family("planted", fits=[replace(SPEED, high=0.1)])
    first = predict(one, runs_of(one), SIZES)[0]
    assert first.fitted[0].value == pytest.approx(0.1)
    assert not first.fitted[0].reached
    assert not first.is_fitted  # so it counts in the scores
    assert "end of its range" in families([first])[0]["fitted"]


def test_a_number_of_one_mode_leaves_the_other_rows_alone() -> None:
    one = family("planted", fits=[replace(SPEED, mode="synchronous")])
    fitted = predict(one, runs_of(one), SIZES)[0].fitted
    context = Context(family=one, sizes=SIZES)
    configs = [configured(row, context, fitted) for row in one.rows]
    assert configs[0].trainer.mfu == pytest.approx(fitted[0].value)
    assert configs[1].trainer.mfu is None


def test_parts_sum_to_the_step() -> None:
    one = family("planted", fits=[])
    for predicted in predict(one, runs_of(one), SIZES):
        for result in predicted.run.results:
            seconds = seconds_of(result)
            assert sum(seconds[name] for name in PARTS_OF_A_STEP) == pytest.approx(seconds["step"])
            empty = "wait" if predicted.row.mode == "synchronous" else "generation"
            assert seconds[empty] == 0


def test_intervals_come_from_other_groups_only() -> None:
    """A measured row must not widen its own interval, only those of the others."""
    families_ = [family(name, fits=[SPEED]) for name in "abc"]
    intervals = []
    for factor in (1.3, 3.0):
        runs = runs_of(slowed(families_[0], factor), *(slowed(one, 1.2) for one in families_[1:]))
        scored = score([row for one in runs.families for row in predict(one, runs, SIZES)], runs)
        intervals.append({one.of.family.id: one.gain for one in scored if one.gain is not None})
    few, many = intervals
    assert few["a"].predicted == many["a"].predicted
    width = {
        name: [each[name].predicted.high / each[name].predicted.low for each in intervals]
        for name in "ab"
    }
    assert width["b"][1] > 2 * width["b"][0]
    assert few["a"].measured == pytest.approx(many["a"].measured * 3 / 1.3)


def test_fitted_rows_are_no_residuals() -> None:
    """Their error is small because it was fitted: it would make the intervals too narrow."""
    runs = runs_of(*(slowed(family(name, fits=[SPEED]), 1.2) for name in "abc"))
    scored = score([row for one in runs.families for row in predict(one, runs, SIZES)], runs)
    half = student_t(2, 0.9) * math.log(1.2)  # two other groups, each a factor of 1.2 off
    for one in scored:
        found = math.log(one.step_s.predicted.high / one.step_s.predicted.value)
        assert found == pytest.approx(half, rel=0.1)


def test_fitted_rows_are_not_scored() -> None:
    runs = runs_of(*(slowed(family(name), 1.25) for name in "ab"))
    scored = score([row for one in runs.families for row in predict(one, runs, SIZES)], runs)
    found = summary(scored)
    assert found.step_median == pytest.approx(0.2, abs=0.02)  # 1 - 1 / 1.25, of two rows
    assert found.step_largest == pytest.approx(0.2, abs=0.02)
    assert found.gain_median == pytest.approx(math.log(1.25), abs=0.02)
    assert found.step_coverage == found.gain_coverage == 1
    shown = {row.name: row for row in rows(found, BARS)}
    assert shown["step: median error"].within
    assert shown["gain: median of |ln(predicted / measured)|"].within is False
    assert len(findings(scored, found)) == 4
    assert [row["how"] for row in numbers(scored)] == ["fitted", "predicted"] * 2


def test_a_sign_counts_only_where_the_measured_gain_is_clear() -> None:
    def sign(measured: float, predicted: float) -> bool | None:
        value = Prediction(value=predicted, low=predicted, high=predicted)
        return Number(measured=measured, predicted=value).sign_is_right

    assert sign(1.05, 0.5) is None
    assert sign(0.91, 1.5) is None
    assert sign(1.4, 1.1) is True
    assert sign(0.7, 0.9) is True
    assert sign(1.4, 0.9) is False
    assert sign(0.7, 1.1) is False


def test_tables_and_picture_show_every_row(tmp_path: Path) -> None:
    runs = runs_of(family("a"), family("b"))
    predicted = [row for one in runs.families for row in predict(one, runs, SIZES)]
    scored = score(predicted, runs)
    assert [len(table(predicted)) for table in (parts, reasons)] == [4, 4]
    assert "(printed" in parts(predicted)[0]["update"]
    picture = save_picture(draw(scored), tmp_path / "rows.png")
    assert picture.stat().st_size > 1000


def test_a_printed_lag_and_wait_stand_beside_the_simulated_ones() -> None:
    planted = family("a")
    row = planted.rows[1]
    measured = dict(row.measured) | {"wait_s": 1e6, "mean_lag": 7.0}
    other = replace(planted, rows=[planted.rows[0], replace(row, measured=measured)])
    runs = runs_of(other)
    predicted = predict(other, runs, SIZES)
    (told,) = lags(predicted, runs)
    own = [result.staleness() for result in predicted[1].run.results]
    mean = sum(one["head_mean"] for one in own) / len(own)
    assert (told["row"], told["error"]) == (row.id, f"{mean - 7:+.2f}")
    wait, lag = unscored(predicted, runs)
    assert "1 rows of 1 group: 100% off in the median, 1 too short" in wait
    assert f"{7 - mean:.2f} versions off in the median, 1 too low" in lag
    assert "0 of 0 are within" in lag  # no other group tells an error
    assert unscored(predicted[:1], runs) == lags(predicted[:1], runs) == []


def test_prefetched_batches_and_other_means_count_in_a_printed_lag() -> None:
    """Asynchronous with eta 1: between the mean of tokens and a version more than first tokens."""
    planted = family("a")
    first, row = planted.rows
    measured = {**row.measured, "mean_lag": 2.0, "prefetched_batches": 1.0}
    runs = runs_of(replace(planted, rows=[first, replace(row, measured=measured)]), family("b"))
    predicted = [each for one in runs.families for each in predict(one, runs, SIZES)]
    (found,) = printed_lags(predicted, runs, predicted)
    assert found.predicted == found.simulated["head_mean"] + 1
    known = lags_with_error(predicted[1], predicted, runs)
    assert known is not None
    assert found.span is not None
    low, high = found.span
    assert high == known["mean"].range.high + 1
    tokens = found.simulated["head_mean"] - found.simulated["token_mean"]
    assert low == pytest.approx(known["mean"].range.low - tokens + 1)
    assert found.covered is (low <= 2 <= high)


def test_a_term_is_switched_off_where_there_is_one() -> None:
    """For every term, some family changes, and can still be simulated."""
    for term in TERMS:
        changed = [without(one, term) for one in load().families if without(one, term) is not one]
        assert changed, term.name
        for one in changed:
            context = Context(family=one, sizes=SIZES)
            assert all(problems(configured(row, context, ())) == [] for row in one.rows), term.name


def test_ablation_scores_every_term_and_predicts_again_only_what_changes() -> None:
    runs = runs_of(*(slowed(family(name, fits=[SPEED]), 1.2) for name in "ab"))
    predicted = [row for one in runs.families for row in predict(one, runs, SIZES)]
    records = ablation(predicted, without_rest(predicted, runs, SIZES), runs, SIZES)
    assert records[0]["terms"] == "everything"
    assert len(records) == len(TERMS) + 5
    colocation = next(one for one in records if "seconds of colocation" in one["terms"])
    assert all(one["largest"] == records[0]["largest"] for one in records if one is not colocation)


def test_the_packaged_errors_are_those_of_the_saved_rows() -> None:
    """If not, run `python -m reproductions.measured_runs --save`."""
    assert FILE.read_text(encoding="utf-8") == to_text(saved_records())
    assert [one.row for one in measured_errors().rows] == [one["row"] for one in saved_records()]


def test_errors_are_exported_without_the_fitted_rest() -> None:
    """A synchronous step is longer than simulated; a user cannot know by how much."""
    rest = Fit(setting=REST, part="step", low=0.01, high=100, mode="synchronous")
    one = family("a", fits=[rest])
    first, last = one.rows
    longer_s = first.measured["step_s"] * 1.5
    one = replace(one, rows=[replace(first, measured={**first.measured, "step_s": longer_s}), last])
    runs = runs_of(one, family("b", fits=[STEP]))
    predicted = [row for each in runs.families for row in predict(each, runs, SIZES)]
    scored = score(predicted, runs)
    assert scored[0].step_s.log_error == pytest.approx(0, abs=0.01)  # it is fitted
    exported = records(data(scored, without_rest(predicted, runs, SIZES), runs), runs)
    assert [(each["family"], each["row"]) for each in exported] == [
        ("a", "synchronous"),
        ("a", "asynchronous"),
        ("b", "asynchronous"),
    ]
    synchronous, asynchronous, other = exported
    assert synchronous["step"] == pytest.approx(-math.log(1.5), abs=0.1)
    gain = synchronous["step"] - asynchronous["step"]
    assert asynchronous["gain"] == pytest.approx(gain, abs=0.01)
    assert (asynchronous["fitted"], other["fitted"]) == ([], ["trainer.mfu"])
    plain = {"mixture": False, "colocated": False, "parts": ()}
    assert asynchronous["kind"] == plain
    assert (asynchronous["gpu"], synchronous["kind"]["colocated"]) == ("H100", True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["N1", "V7"])
def test_advice_on_a_released_row_is_what_simulate_gives_by_hand(name):
    (family,) = (one for one in load().families if one.id == name)
    row = family.synchronous
    settings = {**family.settings, **row.settings}
    mean = settings.get("workload.answers.mean_tokens", 4000)
    names = {
        "step_s": "step_time_s",
        "generation_s": "generation_s",
        "logprobs_s": "old_logprob_s",
        "update_s": "training_s",
    }
    step = {names[one]: value for one, value in row.measured.items() if one in names}
    log = {
        "framework": "nemo-rl" if family.system.startswith("NeMo") else "verl",
        "steps": [{"step": 2, "response_length_mean": mean, **step}],
    }
    skipped = ("workload.steps", "workload.warmup_steps", "schedule.name")
    given = [f"{one}={value}" for one, value in settings.items() if one not in skipped]
    found = advise(log, [*given, "seeds=2"])
    # V7 prints no lengths. With 4,000 tokens its step is simulated 2.6 % too long, and what is then
    # missing in the step cannot be negative.
    assert found.fit.simulated()["step"] == pytest.approx(row.measured["step_s"], rel=0.05)
    for option in found.options:
        by_hand = replicate(load_simulation(None, shlex.split(found.command(option))[2:]))
        gains = found.fit.run.ratios(by_hand, lambda result: result.step_s)
        assert option.gain["mean"] == pytest.approx(sum(gains) / len(gains), rel=1e-12)

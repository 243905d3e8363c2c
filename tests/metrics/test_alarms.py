"""Planted series raise each alarm when they should; healthy records raise none."""

from __future__ import annotations

import gzip
import json
import math
import random
from pathlib import Path

import pytest

from areal_lab.config.sections import AlarmsConfig
from areal_lab.metrics.alarm import Facts
from areal_lab.metrics.glossary import GLOSSARY, WrittenBy
from areal_lab.runlog.alarms import RULES, alarms_of, changes_of
from tests.cosim.small import run as run_cosim
from tests.metrics.collapses import PUBLISHED, RECORDED, STABLE, Collapse
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import do_run, metrics, tiny_config
from tools.pages import metrics as page

ROOT = Path(__file__).parents[2]
HEALTHY = {
    "reward_mean": 0.5,
    "ratio_mean": 1.0,
    "behavior_weight_mean": 1.0,
    "drift": 0.05,
    "weight_deviation": 0.02,
    "entropy": 1.0,
    "truncated_share": 0.1,
    "lag_token_mean": 2.0,
    "sampler_gap_mean": 1e-6,
    "zero_advantage_samples": 10.0,
    "trained_samples": 100.0,
}
PLANTED = {
    "ratio": {"ratio_mean": 1.2},
    "drift": {"drift": 0.5},
    "weight_deviation": {"weight_deviation": 0.06},
    "entropy": {"entropy": 0.09},
    "truncated": {"truncated_share": 0.6},
    "stale_weights": {"lag_token_mean": 5.5},
    "sampler_gap": {"sampler_gap_mean": 0.06},
    "equal_rewards": {"zero_advantage_samples": 95.0},
    "reward_drop": {"reward_mean": 0.1},
}
WHEN = {"reward_drop": 33}
"""Step that raises it, if it is not the fifth one; steps 26 to 33 have a mean of 20 below 0.44."""


def line(step: int, **changed: float) -> dict[str, float]:
    return {**HEALTHY, **changed, "step": step}


def series(name: str, begin: int = 26, end: int = 60, total: int = 100) -> list[dict[str, float]]:
    return [line(n, **(PLANTED[name] if begin <= n < end else {})) for n in range(1, total + 1)]


@pytest.mark.parametrize("name", RULES)
def test_a_planted_series_raises_its_alarm_once_and_ends_it(name: str) -> None:
    changes = changes_of(series(name), Facts(eta=4), AlarmsConfig())
    assert [(one.kind, one.alarm.name) for one in changes] == [("begun", name), ("ended", name)]
    begun, ended = changes[0].alarm, changes[1].alarm
    if name != "reward_drop":  # whose mean is over 20 steps
        assert (begun.since_step, begun.raised_step) == (26, 30)
        assert (ended.since_step, ended.ended_step) == (26, 64)
    assert begun.cause
    assert begun.remedy
    assert name.replace("_", " ") in str(changes[0])


@pytest.mark.parametrize("name", [one for one in RULES if one != "reward_drop"])
def test_steps_that_are_not_in_a_row_raise_nothing(name: str) -> None:
    lines = [line(n, **(PLANTED[name] if n > 10 and n % 5 else {})) for n in range(1, 60)]
    assert changes_of(lines, Facts(eta=4), AlarmsConfig()) == []


def test_the_mean_reward_of_20_steps_decides() -> None:
    lines = series("reward_drop")
    (begun, _) = changes_of(lines, Facts(eta=4), AlarmsConfig())
    # Four steps of 0.1 among 16 of 0.5 have a mean of 0.42, the first one below 0.44.
    assert (begun.alarm.since_step, begun.alarm.raised_step) == (29, 33)


def test_an_alarm_can_be_switched_off_and_its_bound_changed() -> None:
    lines = series("drift")
    assert changes_of(lines, Facts(eta=4), AlarmsConfig(off=["drift"])) == []
    assert changes_of(lines, Facts(eta=4), AlarmsConfig(drift=0.6)) == []
    soon = changes_of(lines, Facts(eta=4), AlarmsConfig(steps=1))
    assert soon[0].alarm.raised_step == 26


@pytest.mark.parametrize("name", ["entropy", "truncated", "equal_rewards"])
def test_a_solved_task_raises_none_of_these(name: str) -> None:
    solved = [{**one, "reward_mean": 0.95} for one in series(name)]
    assert changes_of(solved, Facts(eta=4), AlarmsConfig()) == []


def test_missing_metrics_and_nan() -> None:
    assert changes_of([{"step": n} for n in range(1, 50)], Facts(eta=4), AlarmsConfig()) == []
    lines = [line(n, ratio_mean=math.nan) for n in range(1, 10)]
    assert [one.alarm.name for one in changes_of(lines, Facts(eta=4), AlarmsConfig())] == ["ratio"]


def raised(values: list[float], first: int = 1) -> list[int]:
    """Updates after which the alarm of |w - 1| was raised."""
    lines = [line(first + n, weight_deviation=value) for n, value in enumerate(values)]
    changes = changes_of(lines, Facts(eta=16), AlarmsConfig())
    return [one.alarm.raised_step for one in changes if one.kind == "begun"]


@pytest.mark.parametrize("name", RECORDED)
def test_the_alarm_comes_before_a_recorded_collapse(name: str) -> None:
    first, run, values = RECORDED[name]
    means = [sum(values[n - 5 : n]) / 5 for n in range(5, len(values) + 1)]
    assert first + 4 + next(n for n, mean in enumerate(means) if mean >= 0.05) == run.reaches
    steps = raised(values, first)
    assert len(steps) == 1
    # Before the level alone would have counted for five steps, and at least 20 before the end.
    assert steps[0] < run.reaches
    assert run.collapses - steps[0] >= 20


def made(run: Collapse, seed: int) -> list[float]:
    """A series like a published collapse; made from its numbers, not recorded.

    Calm at 0.017, then growing at one rate from 0.022, 35 updates before it reaches 0.05, to the
    mean of its last 20 updates; each value with a noise of 3 %, as the recorded ones have.
    """
    rng = random.Random(seed)
    rate = math.log(0.05 / 0.022) / 35
    values = []
    for step in range(1, run.collapses + 1):
        grown = 0.05 * math.exp(rate * (step - run.reaches))
        level = min(max(0.017, grown) if step > run.reaches - 35 else 0.017, run.window)
        values.append(level * math.exp(rng.gauss(0, 0.03)))
    return values


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_alarm_comes_before_series_like_the_published_collapses(name: str) -> None:
    run = PUBLISHED[name]
    for seed in range(20):
        steps = raised(made(run, seed))
        assert len(steps) == 1
        assert run.collapses - steps[0] >= run.collapses - run.reaches > 20
        assert steps[0] > run.reaches - 35


@pytest.mark.parametrize("name", STABLE)
def test_series_like_the_published_stable_runs_raise_none(name: str) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        level = STABLE[name]
        # With a slow rise to its level, as the recorded runs have from 0.012, and noise of 10 %.
        values = [
            (level + (0.012 - level) * math.exp(-step / 60)) * math.exp(rng.gauss(0, 0.1))
            for step in range(300)
        ]
        assert raised(values) == []


def test_the_trend_counts_before_the_level_does() -> None:
    rising = [0.03 + 0.0003 * step for step in range(60)]
    assert max(rising) < 0.05
    # The line is at 0.05 in 20 steps from 0.044 on, at step 48; five of these raise it.
    assert raised(rising) == [52]
    assert raised(rising[::-1]) == []
    assert raised([0.04] * 100) == []


def test_the_start_of_a_run_in_which_lags_grow_raises_none() -> None:
    assert raised([min(0.028, 0.0015 * step) for step in range(1, 100)]) == []
    assert raised([min(0.048, 0.0015 * step) for step in range(1, 100)]) != []


def test_an_infinite_eta_allows_16_versions() -> None:
    def names(lag: float) -> list[str]:
        lines = [line(n, lag_token_mean=lag) for n in range(1, 10)]
        return [one.alarm.name for one in changes_of(lines, Facts(eta=math.inf), AlarmsConfig())]

    assert names(16.0) == []
    assert names(17.0) == ["stale_weights"]


@pytest.mark.parametrize("name", ["haiku-eta0", "haiku-eta4"])
def test_recorded_runs_raise_none(name: str) -> None:
    with gzip.open(ROOT / "notebooks" / "data" / name / "metrics.jsonl.gz", "rt") as file:
        lines = [json.loads(one) for one in file]
    assert alarms_of(changes_of(lines, Facts(eta=float(name[-1])), AlarmsConfig())) == []


OPTIONAL = (
    *("actor.overlong_share=0.2", "actor.mask_truncated=true", "actor.kl_loss_coef=0.01"),
    *("actor.kl_ctl=0.01", "actor.advantage=gae"),
    *("actor.age_half_life=4", "actor.lr_ess_share=0.5", "actor.max_gradient_cosine=0.9"),
    "actor.loss={name: r2vpo, variance: 0.1, rate: 0.1}",
)
"""Some metrics are those of settings that are off by default."""


def check(lines: list[dict[str, float]], command: WrittenBy) -> None:
    known = {one.name: one for one in GLOSSARY if one.written_by in (command, "train and cosim")}
    written = {name for line in lines for name in line}
    assert written == {name for name, one in known.items() if not one.on_gpu}
    for line in lines:
        missing = known.keys() - line.keys()
        assert all(not known[name].always for name in missing)


@pytest.mark.parametrize("eta", [2])
def test_a_co_simulated_run_writes_what_the_glossary_says(tmp_path: Path, eta: int) -> None:
    teacher = "teacher.path=Adder-75K"
    recorded = run_cosim(tmp_path, f"eta={eta}", "eval_every_steps=2", teacher, *OPTIONAL)
    check([dict(one) for one in recorded.metrics], "cosim")
    assert recorded.summary["alarms"] == []


def test_a_tiny_run_writes_what_the_glossary_says(tmp_path: Path) -> None:
    off = "alarms.off=[equal_rewards]"
    teacher = f"teacher.path={tmp_path / 'model'}"
    config = tiny_config(tmp_path, "total_train_steps=2", off, teacher, *OPTIONAL)
    result = do_run(config, reward_fn=even_digits)
    turns = "rollout.workflow={name: multi_turn, feedback: ' = 9 = ', correct: 9}"
    agents = do_run(tiny_config(tmp_path, "total_train_steps=1", off, turns), reward_fn=even_digits)
    check([*metrics(result.folder), *metrics(agents.folder)], "train")
    assert result.summary["alarms"] == []
    assert len((result.folder / "held_out.jsonl").read_text().splitlines()) == 2


def test_names_are_unique_and_the_page_is_current() -> None:
    names = [one.name for one in GLOSSARY]
    assert len(set(names)) == len(names)
    assert page.PAGE.read_text(encoding="utf-8") == page.page()

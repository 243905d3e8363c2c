"""What the 2.77x is made of: the switches, the packaged runs, and runs that are made again."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from areal_lab.config.record import settings, value_of
from benchmarks.harness import Arguments
from reproductions import figure_5c, figure_6a, speedup, table_1
from reproductions.__main__ import PAGE
from reproductions.again import PROGRAMS
from reproductions.report.harness import SEEDS, expected, main
from reproductions.report.records import Row
from reproductions.report.results import RESULTS, load
from reproductions.report.show import to_markdown
from reproductions.speedup import (
    KINDS,
    LENGTHS,
    OFF,
    ON_OFF,
    SWITCHES,
    Kind,
    Speedup,
    config_of,
    run_speedup,
    runs,
    saved,
    told,
)
from simulator.assembly.simulate import simulate
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.stats.statistics import Estimate

SAVED = Arguments(
    json=False,
    quick=False,
    repeats=SEEDS,
    command="python -m reproductions.figure_6a --save",
    started=datetime(2026, 1, 1, tzinfo=UTC),
    load_average=(0.0, 0.0, 0.0),
)
ALL_BUT_INTERRUPTION = [name for name in SWITCHES if name != "interruption"]


@pytest.fixture(scope="module")
def found() -> Speedup:
    return saved()


# --- switches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_with_all_on_it_is_the_preset(kind: Kind) -> None:
    preset = load_simulation(f"table_1_1.5b_{kind}")
    sizes = {"steps": preset.workload.steps, "warmup_steps": preset.workload.warmup_steps}
    assert config_of(kind, **sizes) == preset


@pytest.mark.parametrize("kind", KINDS)
def test_a_switch_that_is_off_changes_its_settings_and_no_other(kind: Kind) -> None:
    whole = config_of(kind, steps=3, warmup_steps=1)
    for name in SWITCHES:
        without = config_of(kind, set(SWITCHES) - {name}, steps=3, warmup_steps=1)
        changed = {
            setting.name
            for setting in settings(SimulationConfig)
            if value_of(whole, setting.name) != value_of(without, setting.name)
        }
        assert changed == set(OFF[kind].get(name, {}))


def test_every_switch_concerns_a_run_and_is_described() -> None:
    assert set(SWITCHES) == set(OFF["synchronous"]) | set(OFF["asynchronous"]) == set(ON_OFF)
    with pytest.raises(ValueError, match=r"unknown switches \['tale'\]"):
        config_of("synchronous", ["tale"], steps=3, warmup_steps=1)


def test_all_runs_are_made_once_a_seed() -> None:
    calls: list[int] = []
    sizes: dict[Kind, tuple[int, int]] = {"synchronous": (1, 0), "asynchronous": (1, 0)}
    made = run_speedup(seeds=1, lengths=sizes, on_run=lambda: calls.append(1))
    assert len(calls) == runs(1) == 16
    assert Speedup.from_json(json.loads(json.dumps(made.to_json()))) == made


# --- the packaged runs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "on"),
    [("synchronous", SWITCHES), ("synchronous", ()), ("asynchronous", ("engine CPU",))],
)
def test_the_packaged_runs_are_those_of_todays_code(
    found: Speedup, kind: Kind, on: tuple[str, ...]
) -> None:
    steps, warmup_steps = LENGTHS[kind]
    today = simulate(config_of(kind, on, steps=steps, warmup_steps=warmup_steps), seed=1)
    assert today.step_s == pytest.approx(found.seconds(kind, on)[0], rel=1e-6)


def test_the_ratio_is_a_little_less_than_the_papers(found: Speedup) -> None:
    ratio = found.ratio()
    assert 2.55 < ratio.low < ratio.mean < ratio.high < 2.77


def test_the_largest_factor_is_the_baselines(found: Speedup) -> None:
    factors = {one.name: one.factor for one in found.waterfall().factors}
    others = [one.high for name, one in factors.items() if name != "split"]
    assert factors["split"].low > max(others)
    assert found.ratio(()).high < 1


def test_interruption_needs_the_tail_and_slow_decode_steps(found: Speedup) -> None:
    for on in ((), ("tail",), ("engine CPU",), ("tail", "split"), ("engine CPU", "split")):
        gain = found.ratio([*on, "interruption"]).mean / found.ratio(on).mean
        assert gain == pytest.approx(1, abs=0.01)
    assert found.ratio().low > 1.5 * found.ratio(ALL_BUT_INTERRUPTION).high
    assert "by 1.00 to 1.5" in speedup.findings(found)[2]


def test_the_section_of_the_page_has_the_packaged_numbers(found: Speedup) -> None:
    assert to_markdown(told(found)).strip() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("module", [table_1, figure_5c, speedup])
def test_packaged_results_have_todays_explanations_and_say_how_they_were_made(
    module: object,
) -> None:
    name = module.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    result = load(name)
    assert result.why == tuple(module.WHY)  # type: ignore[attr-defined]
    assert result.command.startswith(f"python -m reproductions.{name} ")
    assert "--quick" not in result.command
    assert result.version
    assert f"`{result.command}`" in result.origin


def test_packaged_published_numbers_are_the_expected_ones() -> None:
    printed = expected("table_1")["rows"]
    for model, line in printed.items():
        ratio = load("table_1").row(f"{model} Sync.AReaL / AReaL").paper
        assert ratio == pytest.approx(line["synchronous_h"] / line["asynchronous_h"])
    for eta, value in expected("figure_5c")["tokens_per_s"].items():
        assert load("figure_5c").row(f"eta {eta}").paper == value


def test_no_other_results_are_packaged() -> None:
    assert {path.stem for path in RESULTS.glob("*")} == {
        *("table_1", "figure_5c", "speedup", "gradients_by_lag", "measured_runs"),
        *("table_2", "table_8", "corrections", "where_staleness_hurts", "bounded_drift"),
    }


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"make it: python -m reproductions.figure_4 --save"):
        load("figure_4")
    with pytest.raises(KeyError, match="no row 'eta 3'; there are eta 1 / eta 0"):
        load("figure_5c").row("eta 3")


def test_a_result_is_saved_with_how_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reproductions.report.results.RESULTS", tmp_path)
    with pytest.raises(SystemExit, match="--save keeps no results of --quick"):
        main(figure_6a.reproduce, "doc", ["--save", "--quick"])
    main(figure_6a.reproduce, "doc", ["--save"])
    result = load("figure_6a")
    assert result.command.endswith("--save")
    assert len(result.rows) == len(figure_6a.reproduce(SAVED).rows)


def test_a_row_is_read_back_as_it_was_written() -> None:
    for ours in (Estimate(2.0, 1.5, 2.5), Estimate(2.0, -float("inf"), float("inf"))):
        for points in (True, False):
            row = Row(name="a", paper=1.9, ours=ours, unit="s", bar=0.1, points=points)
            assert Row.from_json(json.loads(json.dumps(row.to_json()))) == row


# --- once more -----------------------------------------------------------------------------------


def test_a_brief_run_agrees_with_the_packaged_one() -> None:
    calls: list[int] = []
    program = PROGRAMS["Table 1, 1.5B: 24 steps"]
    rows = program.rows(seeds=1, on_run=lambda: calls.append(1))
    assert len(calls) == program.count(1)
    packaged = load("table_1")
    for row in rows:
        assert row.paper == packaged.row(row.name).paper
        assert row.ours.mean == pytest.approx(packaged.row(row.name).ours.mean, rel=0.03)


@pytest.mark.parametrize("title", PROGRAMS)
def test_every_program_makes_rows_that_are_packaged(title: str) -> None:
    short = ("workload.steps=2", "workload.warmup_steps=1", "workload.prompts_per_batch=64")
    rows = replace(PROGRAMS[title], overrides=short).rows(seeds=2)
    packaged = load("figure_5c" if "5c" in title else "table_1")
    assert [packaged.row(row.name).paper for row in rows] == [row.paper for row in rows]
    assert all(row.ours.low < row.ours.high for row in rows)

"""Reproductions: the contract of their JSON, the paper's numbers, and that parameters are used."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from areal_lab.config.record import value_of
from benchmarks.harness import Arguments
from reproductions import table_2
from reproductions.__main__ import ALL, page, program_of
from reproductions.batched_generation import TOKENS
from reproductions.calibration import (
    CALIBRATED,
    ENGINE_OVERHEAD,
    GROUP_CORRELATION,
    LAYOUT_14B,
    MEMORY,
    MODELS,
    parameters,
    solve,
)
from reproductions.figure_4 import paper_tokens_per_s
from reproductions.figure_6a import reproduce as reproduce_figure_6a
from reproductions.report.harness import configured, expected, length, main
from reproductions.report.records import Reproduction, Row, to_json
from reproductions.report.show import draw, to_markdown, to_text
from reproductions.within_prompt import SIGMA
from simulator.config.load import load_simulation, presets
from simulator.costs.trainers import FIGURE_6A
from simulator.stats.statistics import Estimate
from tests.warm import run_forked

QUICK = Arguments(
    json=False,
    quick=True,
    repeats=2,
    command="python -m reproductions.table_1 --quick",
    started=datetime(2026, 1, 1, tzinfo=UTC),
    load_average=(0.0, 0.0, 0.0),
)


def row(**changes: object) -> Row:
    settings = {"name": "a", "paper": 2.0, "ours": Estimate(2.1, 2.0, 2.2), "unit": "s"}
    return Row(**{**settings, **changes})  # type: ignore[arg-type]


def test_hours_of_table_1_give_the_derived_seconds_and_ratios() -> None:
    derived = {  # s per step synchronous, asynchronous, ratio
        "1.5B": (590.4, 213.1, 2.770),
        "7B": (830.9, 365.8, 2.272),
        "14B": (2196, 985.5, 2.228),
        "32B": (3066, 1866, 1.643),
    }
    verl_h = {"1.5B": 33.6, "7B": 52.1, "14B": 44.4, "32B": 46.4}
    printed = expected("table_1")["rows"]
    assert set(printed) == set(derived) == set(MODELS)
    for model, (synchronous_s, asynchronous_s, ratio) in derived.items():
        line = printed[model]
        step_s = {kind: 3600 * line[f"{kind}_h"] / line["steps"] for kind in ("synchronous",)}
        assert step_s["synchronous"] == pytest.approx(synchronous_s, rel=5e-4)
        assert 3600 * line["asynchronous_h"] / line["steps"] == pytest.approx(asynchronous_s, 5e-4)
        assert line["synchronous_h"] / line["asynchronous_h"] == pytest.approx(ratio, rel=5e-4)
        assert line["verl_h"] == verl_h[model]
    gpus = {model: line["gpus"] for model, line in printed.items()}
    assert gpus == {"1.5B": 128, "7B": 192, "14B": 256, "32B": 384}


def test_figure_5c_is_as_printed_and_agrees_with_table_1() -> None:
    tokens_per_s = expected("figure_5c")["tokens_per_s"]
    multiples = [round(value / tokens_per_s["0"], 2) for value in tokens_per_s.values()]
    assert multiples == [1, 2.09, 2.77, 2.77, 2.89, 2.97, 3.08]
    line = expected("table_1")["rows"]["1.5B"]
    for eta, kind in (("0", "synchronous"), ("4", "asynchronous")):
        step_s = 3600 * line[f"{kind}_h"] / line["steps"]
        assert tokens_per_s[eta] * step_s / (512 * 16) == pytest.approx(9277, rel=1e-3)


def test_figure_6_and_the_generation_curve_are_as_printed() -> None:
    bars = expected("figure_6a")["tflops"]
    for printed, known in zip(bars.values(), FIGURE_6A.values(), strict=True):
        assert (printed["dynamic"], printed["standard"]) == known[3:]
    generated = expected("figure_6b")
    assert generated["tokens_per_s"] == {
        "1.5B": {"interruptible": 231_000, "not_interruptible": 207_000},
        "7B": {"interruptible": 130_000, "not_interruptible": 111_000},
    }
    for model, rates in generated["tokens_per_s"].items():
        gain = rates["interruptible"] / rates["not_interruptible"] - 1
        assert gain == pytest.approx(generated["gain"][model], abs=0.005)
    curve = expected("batched_generation")["tokens_per_s"]
    assert curve == {"8": 129e3, "16": 228e3, "32": 399e3, "64": 623e3, "128": 646e3}


def test_table_7_is_as_printed() -> None:
    tokens_per_s = expected("table_7")["tokens_per_s"]
    multiples = [round(value / tokens_per_s["0"], 2) for value in tokens_per_s.values()]
    assert multiples == [1, 1.76, 1.76, 1.81, 1.9, 1.92]


def test_figure_4_has_the_paper_s_gpus() -> None:
    printed = expected("figure_4")
    gpus = {"1.5B": [32, 64, 128, 256], "7B": [64, 128, 256, 512], "32B": [256, 512]}
    assert printed["gpus"] == gpus
    for model, counts in gpus.items():
        for context in printed["contexts"]:
            config = load_simulation(f"figure_4_{model.lower()}_{context}")
            assert (config.workload.prompts_per_batch, config.schedule.eta) == (512, 4)
            assert config.cluster.gpus == min(counts)


def test_figure_4_s_picture_has_a_quarter_of_the_trained_tokens() -> None:
    printed = expected("figure_4")
    at_16k = printed["axis_tokens_per_s"]["1.5B"]["AReaL"]["128"] * printed["axis_factor"]
    at_27k = expected("figure_5c")["tokens_per_s"]["4"]
    # The same run with shorter responses is somewhat faster; without the factor, far slower.
    assert 1 < at_16k / at_27k < 1.2
    ratios = {"1.5B": (1.0, 1.2, 1.69, 1.89), "7B": (0.85, 1.08, 1.32, 1.48), "32B": (1.5, 1.88)}
    for model, wanted in ratios.items():
        own, other = (
            [paper_tokens_per_s(system, model, "16k", gpus) for gpus in printed["gpus"][model]]
            for system in ("AReaL", "verl")
        )
        assert [round(a / b, 2) for a, b in zip(own, other, strict=True)] == list(wanted)
    assert paper_tokens_per_s("AReaL", "1.5B", "32k", 32) is None


def test_every_expected_value_says_where_it_is_printed() -> None:
    folder = Path(__file__).parents[2] / "reproductions" / "expected"
    names = sorted(path.stem for path in folder.glob("*.json"))
    assert names == [
        *("batched_generation", "figure_4", "figure_5c", "figure_6a", "figure_6b"),
        *("measured_runs", "table_1", "table_2", "table_7", "table_8"),
    ]
    for name in names:
        record = expected(name)
        assert "AReaL" in record["source"]
        assert name.partition("_")[2] in record["table_or_figure"] or name == "batched_generation"
        assert record["section"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["synchronous", "asynchronous", "one_step_overlap", "colocated"])
def test_presets_of_table_1_hold_what_is_listed(model: str, kind: str) -> None:
    preset = f"table_1_{model.lower()}_{kind}"
    chosen = parameters(model)
    config = configured(preset, chosen, "workload.steps=9", arguments=QUICK)
    assert config.seeds == QUICK.repeats
    for parameter in chosen:
        assert value_of(config, parameter.name) == parameter.value
    assert config == configured(preset, (), "workload.steps=9", arguments=QUICK)


@pytest.mark.parametrize(
    "name", [name for name in presets() if name.startswith(("figure_", "table_"))]
)
def test_every_preset_of_the_paper_has_the_calibrated_values(name: str) -> None:
    config = load_simulation(name)
    for parameter in CALIBRATED:
        assert value_of(config, parameter.name) == parameter.value
    assert config.workload.answers.sigma == SIGMA
    large = config.model != "R1-Distill-Qwen-1.5B"
    assert config.rollout.memory_utilization == (MEMORY.value if large else 0.85)


def test_one_parameter_of_a_training_run_was_fitted() -> None:
    for model in MODELS:
        fitted = {parameter.name for parameter in parameters(model) if parameter.fitted}
        assert fitted == {ENGINE_OVERHEAD.name}
    assert GROUP_CORRELATION.measured
    assert not MEMORY.fitted
    assert not LAYOUT_14B.fitted
    assert TOKENS.fitted


def test_gaps_are_relative_or_in_points() -> None:
    assert row().gap == pytest.approx(0.05)
    assert row(bar=0.04).within is False
    assert row(bar=0.06).within is True
    assert row().within is None
    gain = row(paper=0.12, ours=Estimate(0.15, 0.14, 0.16), points=True, bar=0.05)
    assert gain.gap == pytest.approx(0.03)
    assert gain.gap_interval == pytest.approx((0.02, 0.04))
    assert gain.cells()["gap"] == "+3.0% pts"


def test_without_a_published_number_there_is_no_gap() -> None:
    alone = row(paper=None, bar=0.1)
    assert alone.gap is None
    assert alone.gap_interval is None
    assert alone.within is None
    assert alone.cells()["paper"] == alone.cells()["gap"] == ""
    assert alone.to_json()["gap"] is None


def test_one_seed_has_no_interval() -> None:
    one = row(ours=Estimate(0.15, -math.inf, math.inf))
    assert one.to_json()["interval"] is None
    assert one.cells()["95 % interval"] == "-"
    assert row().to_json()["interval"] == [row().ours.low, row().ours.high]


def test_a_rising_function_is_solved() -> None:
    assert solve(lambda value: value**2, 2.0, 0.0, 4.0) == pytest.approx(math.sqrt(2), abs=0.02)


def test_quick_simulates_fewer_steps() -> None:
    assert length(QUICK, steps=30, warmup=8, quick=(9, 4)) == [
        "workload.steps=9",
        "workload.warmup_steps=4",
    ]


def test_figure_6a_keeps_the_paper_average_gain_and_says_what_it_misses() -> None:
    result = reproduce_figure_6a(QUICK)
    rows = {row.name: row for row in result.rows}
    assert rows["mean of the three: gain"].gap == pytest.approx(0, abs=0.1)
    assert all(rows[f"{model}: gain"].ours.mean > 0 for model in ("1B", "7B", "32B"))
    assert not any(row.fitted for row in result.rows if row.points)


def test_a_reproduction_is_table_json_picture_and_markdown(tmp_path: Path) -> None:
    result = Reproduction(
        name="name",
        claim="Claim.",
        rows=[row(fitted=True, bar=0.1), row(name="b", points=True, bar=0.01)],
        parameters=[ENGINE_OVERHEAD],
        why=["Because."],
        findings=["Found."],
        sensitivity=[{"tokens": 1, "gap": "+1.0%"}],
    )
    record = to_json(result)
    assert {"name", "paper", "ours", "gap", "interval", "fitted"} <= set(record["rows"][0])
    assert {"name", "value", "unit", "source", "fitted"} <= set(record["parameters"][0])
    for text in (to_text(result, QUICK), to_markdown(result), page([result], QUICK)):
        for said in (
            "Claim.",
            "Because.",
            "Found.",
            "MISSED",
            "+5.0%",
            "fitted",
            ENGINE_OVERHEAD.override,
        ):
            assert said in text
    assert "Of 2 rows with an aim 1 meet it; of the 1 predicted" in page([result], QUICK)
    assert "| [name](#name) | Claim. | 1 | 1 |" in page([result], QUICK)
    assert "(images/name.png)" in to_markdown(result)
    draw(result, tmp_path / "gaps.png")
    assert (tmp_path / "gaps.png").stat().st_size > 1000


def test_the_command_line_prints_one_object_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "figure.png"
    main(reproduce_figure_6a, "doc", ["--json", "--quick", "--plot", str(picture)])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"machine", "command", "date", "repeats", "rows", "parameters"} <= set(record)
    assert record["quick"] is True
    assert picture.exists()
    with pytest.raises(SystemExit, match="2"):
        main(reproduce_figure_6a, "doc", ["--plot"])
    assert "--plot: expected one argument" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "reproduce",
    [one for one in ALL if one is not table_2.recorded],  # `test_learning` runs that one
    ids=lambda one: program_of(one).rpartition(".")[2],
)
def test_the_quick_form_of_each_runs(
    reproduce: Callable[[Arguments], Reproduction], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", program_of(reproduce), "--quick", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = run_forked(command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["name"] == program_of(reproduce).rpartition(".")[2]
    assert record["rows"] or record["tables"]
    for line in record["rows"]:
        if line["interval"] is not None:  # a form without seeds
            assert line["interval"][0] <= line["ours"] <= line["interval"][1]

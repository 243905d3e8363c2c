"""The README agrees with the code: cheap sections are computed again, others but for numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from benchmarks.harness import Arguments
from reproductions import figure_6a, recorded_run
from reproductions.__main__ import ALL, PAGE, PICTURES, program_of
from reproductions.calibration import CALIBRATED, MODELS, parameters
from reproductions.report.harness import SEEDS, expected
from reproductions.report.records import Reproduction
from reproductions.report.show import to_markdown
from reproductions.table_1 import OTHERS

README = PAGE.read_text(encoding="utf-8")
FULL = Arguments(
    json=False,
    quick=False,
    repeats=SEEDS,
    command="python -m reproductions",
    started=datetime(2026, 1, 1, tzinfo=UTC),
    load_average=(0.0, 0.0, 0.0),
)
NAMES = [program_of(reproduce).rpartition(".")[2] for reproduce in ALL]


def section(name: str) -> str:
    _, found, rest = README.partition(f"\n## {name}\n")
    assert found, f"no section {name}; run python -m reproductions"
    return found + rest.partition("\n## ")[0]


def test_every_reproduction_has_its_section_in_order_and_its_picture() -> None:
    assert re.findall(r"^## (\w+)$", README, re.MULTILINE) == NAMES
    for name in NAMES:
        assert f"(images/{name}.png)" in section(name)
        assert (PICTURES / f"{name}.png").stat().st_size > 10_000
    assert {path.stem for path in PICTURES.glob("*.png")} == set(NAMES)
    modules = {path.stem for path in PAGE.parent.rglob("*.py")}
    modules |= {path.parent.name for path in PAGE.parent.rglob("__main__.py")}
    assert set(NAMES) <= modules


@pytest.mark.parametrize("reproduce", [figure_6a.reproduce, recorded_run.reproduce])
def test_what_is_cheap_says_the_same_today(
    reproduce: Callable[[Arguments], Reproduction],
) -> None:
    result = reproduce(FULL)
    assert to_markdown(result).strip() in README


@pytest.mark.parametrize("reproduce", ALL)
def test_the_reasons_are_those_of_the_code(reproduce: Callable[..., Reproduction]) -> None:
    module = __import__(reproduce.__module__, fromlist=["WHY"])
    name = program_of(reproduce).rpartition(".")[2]
    for reason in module.WHY:
        assert f"- {reason}\n" in section(name)


@pytest.mark.parametrize("name", ["table_1", "figure_5c", "table_7", "figure_6b"])
def test_parameters_are_those_of_the_code(name: str) -> None:
    wanted = CALIBRATED
    if name == "table_1":
        wanted = (*wanted, *(one for model in MODELS for one in parameters(model)))
    for parameter in wanted:
        assert f"`{parameter.override}` | {parameter.unit} |" in section(name)


def test_published_numbers_are_those_of_the_expected_values() -> None:
    for model, line in expected("table_1")["rows"].items():
        for kind, row in (("synchronous", "Sync.AReaL"), ("asynchronous", "AReaL")):
            step_s = 3600 * line[f"{kind}_h"] / line["steps"]
            shown = f"{step_s:,.0f}" if step_s >= 1000 else f"{step_s:.4g}"
            assert f"| {model} {row} | s per step | {shown} |" in section("table_1")
    for name, unit in (("figure_5c", "trained tokens/s"), ("table_7", "trained tokens/s")):
        for eta, value in expected(name)["tokens_per_s"].items():
            assert f"| eta {eta} | {unit} | {value:,.0f} |" in section(name)
    for model, bars in expected("figure_6b")["tokens_per_s"].items():
        for kind, value in bars.items():
            line = f"| {model} {kind.replace('_', ' ')} | generated tokens/s | {value:,.0f} |"
            assert line in section("figure_6b")
    for gpus, value in expected("batched_generation")["tokens_per_s"].items():
        line = f"| {gpus} GPUs | generated tokens/s | {value:,.0f} |"
        assert line in section("batched_generation")


def test_gaps_and_verdicts_follow_from_the_numbers_beside_them() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in README.splitlines()
        if re.search(r"\| (met|MISSED) \| (fitted|predicted) \|$", line)
    ]
    assert len(rows) > 30
    for _, _, paper, ours, _, gap, aim, verdict, _ in rows:
        points = gap.endswith("pts")
        gap_number, aim_number = (float(text.split("%")[0]) for text in (gap, aim))
        numbers = [float(text.replace(",", "").rstrip("%")) for text in (paper, ours)]
        by_hand = numbers[1] - numbers[0] if points else 100 * (numbers[1] / numbers[0] - 1)
        assert by_hand == pytest.approx(gap_number, abs=0.2)
        if abs(abs(gap_number) - aim_number) > 0.1:
            assert verdict == ("met" if abs(gap_number) < aim_number else "MISSED")
    met = sum(row[7] == "met" for row in rows)
    assert f"Of {len(rows)} rows with an aim {met} meet it" in README.replace("\n", " ")


def test_other_assumptions_are_those_of_the_code() -> None:
    for model, others in OTHERS.items():
        for name, _ in others:
            assert f"| {model} | {name} |" in section("table_1")


def test_the_page_was_not_made_with_quick() -> None:
    assert f"\n{SEEDS} seeds; 20" in README

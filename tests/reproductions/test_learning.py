"""What is said of co-simulated runs is what they show: claims, hours, tables, pictures."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.cli.sweep import COMMANDS
from areal_lab.functional.losses.policy import decoupled_ppo
from areal_lab.plots.style import save_picture
from areal_lab.sweep.grid import expand
from areal_lab.sweep.study import load_study
from reproductions import corrections, figure_5, table_2, table_8
from reproductions.learning import losses
from reproductions.learning.compare import chosen, covers_zero, is_below_zero, minus, written
from reproductions.learning.runs import STUDIES, Run
from reproductions.learning.setting import settings_of, table
from simulator.stats.statistics import Estimate
from tests.reproductions.planted import BEFORE, grid, run


def as_printed(eta: str, objective: str) -> float:
    """The paper's claims as they stand: naive loses from eta 4 on, decoupled at inf only."""
    if objective == "naive":
        return {"0": 0.8, "4": 0.7, "8": 0.68, "inf": 0.65}[eta]
    return {"0": 0.8, "4": 0.8, "8": 0.8, "inf": 0.75}[eta]


def no_effect(eta: str, objective: str) -> float:  # noqa: ARG001 - nothing depends on them
    return 0.8


def inverted(eta: str, objective: str) -> float:
    return as_printed(eta, "naive" if objective == "decoupled" else "decoupled")


def data(reward: object = as_printed) -> dict[str, object]:
    return {"tasks": {"addition": grid(reward)}}  # type: ignore[arg-type]


def test_differences_are_those_of_pairs() -> None:
    runs = [Run.from_json(record) for record in grid(as_printed)]
    naive = chosen(runs, staleness="8", objective="naive")
    oracle = chosen(runs, staleness="0", objective="naive")
    assert sorted(naive) == [1, 2, 3]
    pairs = [naive[seed].reward - oracle[seed].reward for seed in (1, 2, 3)]
    found = minus(naive, oracle)
    assert found.mean == pytest.approx(fmean(pairs))
    # t of two degrees of freedom: 4.303
    assert found.half_width == pytest.approx(4.3027 * stdev(pairs) / math.sqrt(3), rel=1e-4)
    assert minus({2: naive[2]}, oracle).mean == pytest.approx(pairs[1])
    with pytest.raises(ValueError, match="no values"):
        minus({9: naive[1]}, oracle)


def test_a_run_survives_json() -> None:
    own = run(3, 0.75, staleness="8", objective="naive")
    assert Run.from_json(own.to_json()).to_json() == own.to_json()


@pytest.mark.parametrize(
    ("reward", "answers"),
    [(as_printed, ("yes", "yes", "yes")), (no_effect, ("no", "yes", "no"))],
)
def test_the_claims_are_answered_by_the_runs(reward: object, answers: tuple[str, str, str]) -> None:
    found = table_2.build(data(reward)).findings
    for sentence, answer in zip(found, answers, strict=False):
        assert f": {answer}" in sentence.partition(". Of")[0], sentence


def test_the_claims_fail_if_the_objectives_are_exchanged() -> None:
    naive, decoupled, unbounded, *_ = table_2.build(data(inverted)).findings
    assert "in 1 of 3 cells" in naive
    assert "oracle: no" in decoupled
    assert "yes" in unbounded


def test_the_sentences_have_their_numbers() -> None:
    first, second, third, fourth, fifth = table_2.build(data()).findings
    assert "Of 3 cells with eta 4 or more, 3 have" in first
    losses_by_eta = {row["eta"]: row["naive, minus eta 0"] for row in _table(as_printed)}
    assert f"{losses_by_eta['inf']} at eta inf (addition, 1e-4)" in first
    losses = {row["eta"]: row["decoupled, minus eta 0"] for row in _table(as_printed)}
    assert any(f"Largest losses: {losses[eta]} at eta {eta}" in second for eta in ("4", "8"))
    assert "In 2 of 2 cells it is better than naive PPO" in second
    assert {row["eta"]: row["decoupled, minus eta 0"] for row in _table(as_printed)}["inf"] in third
    assert "3.00 to 3.00 times" in fourth
    assert "times 1.0 to 1.0 at eta 8 and 1.0 to 1.0 at eta inf" in fifth


def test_longer_runs_are_compared_with_their_own_oracle() -> None:
    rewards = {"0": 0.9, "8": 0.88, "inf": 0.7}
    runs = [
        run(seed, rewards[eta] + 0.01 * seed, staleness=eta, objective="decoupled", rate=rate)
        for rate in ("1e-4", "3e-4")
        for eta in rewards
        for seed in (1, 2)
    ]
    found = table_2.build({**data(), "longer": [one.to_json() for one in runs]})
    (sentence,) = (one for one in found.findings if "in runs of" in one)
    assert sentence == (
        "(c) in runs of 100 steps on addition, minus the oracle: 1e-4: -0.020 at eta 8, -0.200 at "
        "eta inf; 3e-4: -0.020 at eta 8, -0.200 at eta inf."
    )
    (rows,) = (table for title, table in found.tables.items() if title.startswith("Longer"))
    assert [row["minus eta 0"] for row in rows] == ["", "-0.020", "-0.200"] * 2


def _table(reward: object) -> list[dict[str, str]]:
    (setting,) = settings_of(data(reward))
    return table(setting)


def test_hours_to_a_reward_are_read_off_the_curve() -> None:
    slow, fast = run(1, 0.9, hours=30.0), run(1, 0.7, hours=10.0)
    # Smoothing over three measurements leaves a line as it is, but for its ends.
    assert slow.hours_to(0.7) == pytest.approx(13.5)
    assert fast.hours_to(0.6) == pytest.approx(4.5)
    assert fast.hours_to(0.72) == math.inf
    assert fast.hours_to(BEFORE) == 0.0


@given(st.lists(st.floats(0, 1), min_size=3, max_size=9), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_reward_takes_no_less_time(rewards: list[float], one: float, two: float) -> None:
    own = run(1, 0.7)
    curve = [(step, float(step), reward) for step, reward in enumerate(rewards)]
    drawn = Run(**{**own.to_json(), "curve": curve})
    assert drawn.hours_to(min(one, two)) <= drawn.hours_to(max(one, two))


def test_asynchrony_gains_the_ratio_of_the_hours() -> None:
    (setting,) = settings_of(data(no_effect))
    # The same curve over a third of the hours.
    assert setting.hours_gained("decoupled", "8").mean == pytest.approx(3.0, rel=0.05)
    assert setting.steps_gained("8").mean == pytest.approx(3.0)


def test_the_table_has_a_line_for_each_eta_that_was_run() -> None:
    (setting,) = settings_of(data())
    rows = table(setting)
    assert [row["eta"] for row in rows] == ["0", "4", "8", "inf"]
    assert rows[0]["naive, minus eta 0"] == ""
    assert rows[2]["naive, minus eta 0"] == written(setting.loss("naive", "8"), sign="+")
    assert setting.loss("naive", "8").mean == pytest.approx(-0.12, abs=0.006)
    assert rows[1]["h per 100 steps"] == "10.0"


def test_intervals_are_written_as_they_are() -> None:
    assert written(Estimate(0.5, 0.4, 0.6)) == "0.500 ± 0.100"
    assert written(Estimate(-0.5, -math.inf, math.inf), sign="+") == "-0.500"
    assert is_below_zero(Estimate(-0.2, -0.3, -0.1))
    assert covers_zero(Estimate(-0.2, -0.3, 0.1))
    assert not covers_zero(Estimate(0.2, 0.1, 0.3))


def test_rloo_is_compared_as_ppo_is(tmp_path: Path) -> None:
    found = table_8.build({"tasks": {table_8.TASK: grid(as_printed, staleness=("0", "4", "8"))}})
    naive, decoupled = found.findings
    assert "below it at eta 4, 8." in naive
    assert "nowhere below it" in decoupled
    assert found.figure is not None
    assert save_picture(found.figure(), tmp_path / "table_8.png").stat().st_size > 10_000


def test_pictures_of_table_2_and_figure_5_are_drawn(tmp_path: Path) -> None:
    for reproduction in (table_2, figure_5):
        found = reproduction.build(data())
        assert found.figure is not None
        picture = save_picture(found.figure(), tmp_path / f"{found.name}.png")
        assert picture.stat().st_size > 10_000


# --- corrections ---------------------------------------------------------------------------------


def corrected() -> dict[str, object]:
    rewards, noise = {"naive": 0.65, "good": 0.72, "as good": 0.7195, "bad": 0.4}, Random(1)
    runs = [
        run(seed, reward + 0.01 * seed + noise.uniform(-0.004, 0.004), staleness="8")
        for name, reward in rewards.items()
        for seed in (1, 2, 3, 4)
    ]
    names = [name for name in rewards for _ in range(4)]
    records = [one.to_json() for one in runs]
    for record, name in zip(records, names, strict=True):
        record["choice"] = {"staleness": "8", "correction": name}
    return {"corrections": records, "batch_orders": []}


def test_corrections_are_ranked_only_where_intervals_allow(tmp_path: Path) -> None:
    found = corrections.build(corrected())
    (sentence,) = found.findings
    best, _, rest = sentence.partition("; worse than naive PPO")
    assert "not told apart from it" in best
    assert best.count("good") == 2, "one is the best, the other cannot be told from it"
    assert rest.count("bad") == 2, "worse than naive, and below its start"
    (rows,) = found.tables.values()
    assert {row["correction"] for row in rows} == {"naive", "good", "as good", "bad"}
    assert rows[-1]["correction"] == "bad"
    assert found.figure is not None
    assert save_picture(found.figure(), tmp_path / "corrections.png").stat().st_size > 10_000


@pytest.mark.parametrize("study", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_cell_of_a_study_can_run(study: Path) -> None:
    command = COMMANDS["cosim"]()
    first = load_study(study).axes[-1].values[0]
    cells = expand(load_study(study, [f"grid.seed=[{first}]"]), command)
    assert len({cell.label for cell in cells}) == len(cells) > 1


def tokens() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    logs = -torch.rand(3, 12, generator=generator)
    return *logs, torch.randn(12, generator=generator), torch.ones(12, dtype=torch.bool)


def test_the_proximal_anchor_alone_is_the_decoupled_loss_with_weights_of_one() -> None:
    theta, proximal, behavior, advantages, mask = tokens()
    alone = losses.proximal_anchor_only(theta, proximal, behavior, advantages, mask, token_count=12)
    same = decoupled_ppo(theta, proximal, proximal, advantages, mask, token_count=12)
    assert alone.loss == same.loss
    weighted = decoupled_ppo(theta, proximal, behavior, advantages, mask, token_count=12)
    assert alone.loss != weighted.loss


@pytest.mark.slow
def test_a_quick_table_2_runs_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    table_2.main(table_2.reproduce, table_2.__doc__, ["--quick"], seeds=table_2.SEEDS)
    printed = capsys.readouterr().out
    assert "(a) Naive PPO" in printed
    assert "addition, learning rate 3e-4, 4 steps" in printed
    # Complete runs are not repeated.
    before = sorted(tmp_path.rglob("events.jsonl"))
    table_2.main(table_2.reproduce, table_2.__doc__, ["--quick"], seeds=table_2.SEEDS)
    assert sorted(tmp_path.rglob("events.jsonl")) == before
    assert len(before) == 8

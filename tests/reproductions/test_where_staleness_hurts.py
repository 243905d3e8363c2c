"""Where staleness hurts: planted losses are found again, counted rightly, told and drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from areal_lab.config.sections import AlarmsConfig
from areal_lab.plots.style import save_picture
from areal_lab.sweep.study import load_study
from benchmarks.harness import Arguments
from reproductions.learning import where_staleness_hurts as module
from reproductions.learning.runs import STUDIES, Run
from reproductions.learning.staleness.cells import (
    PREDICTORS,
    Cell,
    apart_from,
    cells_of,
    objective_noise,
)
from reproductions.learning.staleness.evidence import DRIFT, LIMITS, Evidence, evidence_of
from reproductions.learning.staleness.findings import alarm, claim, findings
from reproductions.learning.staleness.levers import levers
from reproductions.learning.staleness.picture import draw_map
from reproductions.learning.staleness.rule import (
    ROUND,
    Verdicts,
    best_threshold,
    correlation_with_loss,
    rank_correlation,
    verdicts,
)
from reproductions.learning.staleness.tables import headlines, tables
from reproductions.report import results
from reproductions.report.harness import main
from reproductions.report.records import Reproduction, to_json
from reproductions.report.show import to_markdown, to_text

RATES, MINIBATCHES, ETAS = ("3e-5", "1e-4", "3e-4"), ("1", "4", "16"), ("0", "2", "8", "inf")
PLANTED = {"naive": 0.045, "decoupled": 0.11}
QUICK = Arguments(
    json=False,
    quick=False,
    repeats=2,
    command="python -m reproductions.learning.where_staleness_hurts",
    started=datetime(2026, 1, 1, tzinfo=UTC),
    load_average=(0.0, 0.0, 0.0),
)


def run(
    setting: tuple[str, str, str, str] = ("1e-4", "4", "0", "naive"),
    seed: int = 1,
    *,
    reward: float = 0.7,
    drift: float = 0.0,
    lag: float = 0.0,
) -> Run:
    names = ("rate", "minibatches", "staleness", "objective")
    return Run(
        choice=dict(zip(names, setting, strict=True)),
        seed=seed,
        before=0.5,
        reward=reward,
        drift=drift,
        lag=lag,
        clip_fraction=drift / 3,
        steps=100,
        hours=5.0,
        cpu_s=30.0,
        curve=[(0, 0.0, 0.5), (100, 5.0, reward)],
        training=[reward],
    )


def planted(
    *,
    rates: Sequence[str] = RATES,
    minibatches: Sequence[str] = MINIBATCHES,
    etas: Sequence[str] = ETAS,
    seeds: Sequence[int] = (1, 2),
) -> Iterator[Run]:
    """Runs that lose 0.03 and their drift, if that is above the planted one; else nothing."""
    for rate, minis, eta, objective, seed in product(rates, minibatches, etas, PLANTED, seeds):
        lag = 20.0 if eta == "inf" else float(eta)
        drift = 50 * float(rate) * math.sqrt(int(minis) * lag)
        loss = 0.03 + drift if drift > PLANTED[objective] else 0.0
        reward = 0.7 + 0.01 * seed - loss
        yield run((rate, minis, eta, objective), seed, reward=reward, drift=drift, lag=lag)


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    tests = {"more seeds": list(planted(rates=("5e-5", "2e-4"), seeds=(3, 4)))}
    return evidence_of(list(planted()), own_task={}, other_tasks=tests)


def cell(loss: float, drift: float, **changes: object) -> Cell:
    fields = {
        "setting": ("1e-4", "4", "8", "naive"),
        "losses": (loss,),
        "gain": 0.2,
        "drift": drift,
        "synchronous_drift": 0.0,
        "clip_fraction": 0.0,
        "lag": 8.0,
    }
    return Cell(**{**fields, **changes})  # type: ignore[arg-type]


# --- losses --------------------------------------------------------------------------------------


def test_losses_are_paired_by_seed() -> None:
    stale = ("1e-4", "4", "8", "naive")
    runs = [run(seed=1, reward=0.7, drift=0.02), run(seed=2, reward=0.8, drift=0.06)]
    runs += [run(stale, 1, reward=0.6, drift=0.1), run(stale, 2, reward=0.65, drift=0.3)]
    found = cells_of(runs)
    (own,) = found.stale
    assert own.losses == pytest.approx([0.1, 0.15])
    assert own.loss == pytest.approx(0.125)
    assert own.error == pytest.approx(0.025)  # half the distance of two
    assert own.drift == pytest.approx(0.2)
    assert PREDICTORS["drift beyond that at eta 0"](own) == pytest.approx(0.2 - 0.04)
    assert own.gain == pytest.approx(0.25)
    assert own.share == pytest.approx(0.5)
    assert [cell.losses for cell in found.synchronous] == [[0.0, 0.0]]


@pytest.mark.parametrize("other", ["rate", "minibatches", "objective", "seed"])
def test_a_run_without_a_synchronous_partner_is_left_out_and_counted(other: str) -> None:
    stale = {"rate": "1e-4", "minibatches": "4", "staleness": "8", "objective": "naive"}
    changed = {"rate": "3e-4", "minibatches": "16", "objective": "decoupled"}
    lonely = stale if other == "seed" else {**stale, other: changed[other]}
    setting = (*lonely.values(),)
    assert len(setting) == 4
    found = cells_of([run(), run((*stale.values(),)), run(setting, 2 if other == "seed" else 1)])  # type: ignore[arg-type]
    assert len(found.stale) == 1
    assert len(found.stale[0].losses) == 1
    assert found.left_out == 1
    told = evidence_of([run(), run(setting, 2)], own_task={}, other_tasks={})
    assert told.left_out == 1
    assert findings(told) == ["No stale run has a synchronous partner yet."]


def test_the_share_of_a_gain_within_the_noise_is_not_taken() -> None:
    assert cell(0.01, 0.1, gain=0.02).share is None
    assert cell(0.01, 0.1, gain=0.1).share == pytest.approx(0.1)


def test_a_test_on_the_same_task_has_neither_settings_nor_seeds_of_the_map() -> None:
    runs = list(planted(rates=("1e-4", "2e-4"), etas=("0", "4", "8"), seeds=(2, 3)))
    found = apart_from(runs, list(planted()))
    assert {cell.setting[:1] + cell.setting[2:3] for cell in found.stale} == {
        ("1e-4", "4"),
        ("2e-4", "4"),
        ("2e-4", "8"),
    }
    assert all(len(cell.losses) == 1 for cell in found.stale)
    assert found.left_out == 0


def test_the_objectives_differ_at_eta_0_by_noise_alone() -> None:
    runs = [run(reward=0.70), run(("1e-4", "4", "0", "decoupled"), reward=0.73)]
    runs += [run(seed=2, reward=0.74), run(("1e-4", "4", "0", "decoupled"), 2, reward=0.70)]
    assert objective_noise(runs) == pytest.approx(math.sqrt((0.03**2 + 0.04**2) / 2))
    assert math.isnan(objective_noise(runs[:1]))


# --- the rule ------------------------------------------------------------------------------------


def test_the_planted_threshold_is_found(evidence: Evidence) -> None:
    for limit in LIMITS:
        for objective, planted_at in PLANTED.items():
            found = evidence.scored(evidence.made_from.stale, objective, limit)
            assert (found.misses, found.false_alarms) == (0, 0)
            threshold = evidence.thresholds[objective, limit]
            drifts = [one.drift for one in evidence.made_from.stale if one.objective == objective]
            above = min(drift for drift in drifts if drift > planted_at)
            below = max(drift for drift in drifts if drift <= planted_at)
            assert below <= threshold < above
            # Of those that separate as well, the one that warns first.
            assert threshold == min(one for one in ROUND if below <= one < above)


def test_hits_misses_and_false_alarms_are_counted() -> None:
    kinds = {(0.1, 0.2): 4, (0.1, 0.01): 3, (0.0, 0.2): 2, (0.0, 0.01): 1}
    cells = [cell(*kind) for kind, times in kinds.items() for _ in range(times)]
    found = verdicts(cells, 0.1, 0.02, DRIFT)
    assert found == Verdicts(hits=4, misses=3, false_alarms=2, silent=1)
    assert (found.cells, found.losing) == (10, 7)
    assert found.balanced_accuracy == pytest.approx((4 / 7 + 1 / 3) / 2)
    assert found + found == Verdicts(hits=8, misses=6, false_alarms=4, silent=2)
    # A value at the threshold or the limit is not above it.
    assert verdicts([cell(0.02, 0.1)], 0.1, 0.02, DRIFT) == Verdicts(silent=1)
    assert math.isnan(Verdicts(hits=2, misses=1).balanced_accuracy)


def test_the_best_threshold_is_that_of_a_search_through_all() -> None:
    generator = np.random.default_rng(1)
    for _ in range(20):
        drifts = generator.uniform(0.0, 0.3, 15)
        cells = [cell(0.3 * drift + generator.normal(0, 0.02), drift) for drift in drifts]

        def accuracy(threshold: float, cells: Sequence[Cell] = cells) -> float:
            losing = [one.drift > threshold for one in cells if one.loss > 0.03]
            others = [one.drift <= threshold for one in cells if one.loss <= 0.03]
            return float(np.mean(losing) + np.mean(others)) / 2

        best = best_threshold(cells, 0.03, DRIFT)
        assert best is not None
        everywhere = max(accuracy(threshold) for threshold in np.linspace(0.0, 0.3, 601))
        # A threshold beyond all values is none: it says the same of all cells.
        assert accuracy(best) >= everywhere - 1e-9
        assert best_threshold(cells, 0.03, DRIFT, ROUND) == max(ROUND, key=accuracy)


@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_there_is_no_rule_where_all_cells_are_alike(loss: float) -> None:
    assert best_threshold([cell(loss, drift) for drift in (0.1, 0.2)], 0.02, DRIFT, ROUND) is None


@pytest.mark.parametrize("seed", range(5))
def test_rank_correlation_is_that_of_pandas_with_ties(seed: int) -> None:
    generator = np.random.default_rng(seed)
    frame = pd.DataFrame(generator.integers(0, 6, (12, 2)), columns=["one", "other"])
    expected = frame.corr(method="spearman").loc["one", "other"]
    assert rank_correlation(frame["one"], frame["other"]) == pytest.approx(expected)
    assert rank_correlation(np.exp(frame["one"]), frame["other"]) == pytest.approx(expected)


def test_rank_correlation_knows_order_only_and_infinity_too() -> None:
    assert rank_correlation([2.0, 8.0, math.inf], [0.1, 0.11, 5.0]) == pytest.approx(1)
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert math.isnan(rank_correlation([1.0, 1.0], [1.0, 2.0]))
    assert math.isnan(correlation_with_loss([], DRIFT).mean)
    rows = rank_correlation([[1.0, 2.0, 3.0], [2.0, 1.0, 3.0]], [[1.0, 2.0, 3.0]] * 2)
    assert rows == pytest.approx([1.0, 0.5])


def test_what_the_loss_was_made_from_predicts_it_best(evidence: Evidence) -> None:
    cells = [one for one in evidence.made_from.stale if one.objective == "naive"]
    found = {name: correlation_with_loss(cells, one) for name, one in PREDICTORS.items()}
    assert found["drift"].mean > max(found["eta"].mean, found["lag"].mean)
    assert found["drift"].low <= found["drift"].mean <= found["drift"].high
    assert found["eta"].mean == pytest.approx(found["lag"].mean)  # the same order


# --- what is said --------------------------------------------------------------------------------


def test_the_sentences_have_their_numbers(evidence: Evidence) -> None:
    text = "\n".join(findings(evidence))
    for objective, planted_at in PLANTED.items():
        cells = [one for one in evidence.made_from.stale if one.objective == objective]
        losing = sum(one.drift > planted_at for one in cells)
        assert f"{objective}: {losing} of {len(cells)} stale cells of the map lose more" in text
        threshold = evidence.thresholds[objective, LIMITS[0]]
        assert f"drift above {threshold:g} with the {objective} objective" in text
        assert f"{threshold:g} ({objective})" in claim(evidence)
    tested = evidence.tests["more seeds"].stale
    wrong = sum(map(len, evidence.wrong(tested, LIMITS[0])))
    assert f"The rule for 0.02 is right about {len(tested) - wrong} of 36 cells that" in text
    assert "None of 18 synchronous cells is above the threshold." in text
    growing = (
        "(eta inf, mean lag 20) drifts more than eta 8 in 9 of 9 settings, and loses less in 0"
    )
    assert growing in text
    assert "left out" not in text


def test_staleness_is_not_blamed_for_drift_at_eta_0() -> None:
    fast = ("3e-4", "16", "0", "naive")
    runs = [one for one in planted() if (*one.choice.values(),) != fast]
    assert len(runs) == len(list(planted())) - 2
    runs += [run(fast, seed, reward=0.4, drift=0.3) for seed in (1, 2)]
    text = "\n".join(findings(evidence_of(runs, own_task={}, other_tasks={})))
    assert "0.000 with 4 minibatches, 0.300 with 16 minibatches." in text
    assert (
        "1 of 18 synchronous cells are above the threshold: naive, rate 3e-4, 16 minibatches, "
        "eta 0 (drift 0.300, gained -0.100)."
    ) in text
    assert "1 synchronous cell ends below its start: naive, rate 3e-4, 16 minibatches" in text


def test_the_worst_verdicts_are_told_with_their_set() -> None:
    def other(drift: float, loss: float) -> list[Run]:
        setting = ("2e-4", "4", "8", "naive")
        return [
            one
            for seed in (3, 4)
            for one in (
                run((*setting[:2], "0", "naive"), seed),
                run(setting, seed, reward=0.7 - loss - 0.002 * seed, drift=drift),
            )
        ]

    found = evidence_of(
        list(planted()),
        own_task={"one": other(0.2, 0.0)},
        other_tasks={"two": other(0.01, 0.15), "three": other(0.01, 0.1), "four": other(0.2, 0.2)},
    )
    text = "\n".join(findings(found))
    assert "for 0.02 is right about 1 of 4 cells that it was not made from (naive: 1 hit, 2" in text
    assert "2 misses, 1 false alarm, 0 rightly silent; decoupled: 0 hits, 0 misses" in text
    setting = "is naive, rate 2e-4, 4 minibatches, eta 8"
    assert f"The worst miss {setting} (two): drift 0.010, loss 0.157 ± 0.001." in text
    assert f"The worst false alarm {setting} (one): drift 0.200, loss 0.007 ± 0.001" in text
    assert "Of the 3 wrong verdicts for 0.02, 0 are within two standard errors" in text


def test_growing_lag_that_drifts_more_and_loses_less_is_told() -> None:
    setting = ("1e-4", "4")
    runs = [run()]
    runs += [run((*setting, "8", "naive"), reward=0.6, drift=0.1, lag=8)]
    runs += [run((*setting, "inf", "naive"), reward=0.65, drift=0.2, lag=30)]
    text = "\n".join(findings(evidence_of(runs, own_task={}, other_tasks={})))
    assert "mean lag 30) drifts more than eta 8 in 1 of 1 settings, and loses less in 1" in text
    assert "it loses 0.050 less on average" in text


def test_what_the_alarm_of_a_run_tells_is_counted(evidence: Evidence) -> None:
    # Half of the gain, 0.1, is lost at planted drifts above 0.07 (all of which are losing ones
    # for naive), so that cells above the alarm's bound all do, and some below it.
    cells = [*evidence.made_from.stale, *evidence.tested]
    above = [one for one in cells if one.drift > AlarmsConfig().drift]
    below = sum(one.loss > one.gain / 2 for one in cells) - len(above)
    (told,) = alarm(evidence)
    assert below > 0
    assert f"{len(above)} of {len(above)} stale cells above it" in told
    assert told.endswith(f"and {below} of {len(cells) - len(above)} below it.")


def test_what_lowers_drift_is_told(evidence: Evidence) -> None:
    naive, decoupled, objectives = levers(evidence)
    # As planted: drift is proportional to the rate, and to the roots of minibatches and lag.
    for text in (naive, decoupled):
        assert "learning rate 3e-4 to 1e-4 divides it by 3.0, 1e-4 to 3e-5 divides it" in text
        assert "minibatches 16 to 4 divides it by 2.0, 4 to 1 divides it by 2.0" in text
        assert "eta inf to 8 divides it by 1.6, 8 to 2 divides it by 2.0" in text
    cells = evidence.made_from.stale
    less = sum(PLANTED["naive"] < one.drift <= PLANTED["decoupled"] for one in cells) // 2
    assert f"less than the naive one in {less} of 27 cells" in objectives
    assert "Its drift is 1.00 times" in objectives


def test_tables_and_headlines_have_the_cells(evidence: Evidence) -> None:
    of_map, of_predictors, of_rule = tables(evidence).values()
    assert len(of_map) == 18
    assert all({f"eta {eta}" for eta in ETAS[1:]} <= set(line) for line in of_map)
    assert len(of_predictors) == 2 * len(PREDICTORS)
    assert sum(line["number"] for line in of_rule if line["cells"] == "the map") == 2 * 54
    assert {line["cells"] for line in of_rule} == {"the map", "more seeds"}
    rows = {row.name: row.ours.mean for row in headlines(evidence)}
    assert rows["naive: drift above which more than 0.02 is lost"] == 0.05
    assert not any(math.isnan(value) for value in rows.values())


# --- the reproduction ----------------------------------------------------------------------------


@pytest.fixture
def data() -> dict[str, list[dict[str, object]]]:
    runs = {"map": planted(), "test": planted(rates=("5e-5", "2e-4"), seeds=(3, 4))}
    return {name: [module._kept(one) for one in own] for name, own in runs.items()}


def table_2_seeds() -> set[object]:
    study = load_study(STUDIES / "table_2_addition.yaml")
    return {seed for axis in study.axes if axis.name == "seed" for seed in axis.values}


def saved_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (module, results):
        monkeypatch.setattr(place, "RESULTS", folder)


def test_it_is_built_again_from_what_was_saved(
    data: dict[str, list[dict[str, object]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_in(tmp_path, monkeypatch)
    result = module.build(data)
    assert result.name == module.__name__.rpartition(".")[2]
    results.save(result, QUICK)
    again = module.recorded(QUICK)
    assert to_json(again) == to_json(result)
    assert to_markdown(replace(again, origin="")) == to_markdown(result)
    assert QUICK.command in again.origin
    assert "144 runs of the map and 96 of its test took 2.0 CPU hours." in again.findings
    assert "curve" not in result.data["map"][0]


def test_runs_of_table_2_test_the_rule_where_they_are_saved(
    data: dict[str, list[dict[str, object]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_in(tmp_path, monkeypatch)

    def records(*etas: str) -> list[dict[str, object]]:
        own = planted(rates=("1e-4",), minibatches=("4",), etas=etas, seeds=(1, 2, 3))
        found = [one.to_json() for one in own]
        for record in found:
            del record["choice"]["minibatches"]  # Table 2 has no such axis
        return found

    etas = ("0", "2", "4", "8")
    tasks = {"addition": records(*etas), "sorting": records(*etas)}
    table_2 = Reproduction(
        name="table_2", claim="", rows=(), parameters=(), why=(), data={"tasks": tasks}
    )
    results.save(table_2, QUICK)
    numbers = {
        line["cells"]: line["number"]
        for line in module.build(data).tables[
            "The rule on the cells that it was made from, and on others"
        ]
        if line["rule"].startswith("naive") and line["rule"].endswith("0.02")
    }
    assert numbers == {
        "the map": 27,
        "Table 2, addition": 1,  # eta 4, seed 3
        "Table 2, sorting": 3,
        "sorting, other settings": 18,
        "all but the map": 22,
    }


@pytest.mark.parametrize("part", ["all", "map", "no partner", "nothing"])
def test_the_picture_is_drawn_of_whatever_there_is(part: str, tmp_path: Path) -> None:
    runs = {"all": planted(), "map": planted(), "no partner": planted(etas=ETAS[1:])}
    tests = {"more": list(planted(rates=("2e-4",), seeds=(3,)))} if part == "all" else {}
    found = evidence_of(list(runs.get(part, ())), own_task={}, other_tasks=tests)
    picture = draw_map(found)
    assert save_picture(picture, tmp_path / "map.png").stat().st_size > 10_000
    if part == "all":
        labels = [text.get_text() for text in picture.axes[0].get_legend().get_texts()]
        assert set(labels) == {"the map", "more", "the map at eta 0"}
        assert {axes.get_title(loc="left").partition(":")[0] for axes in picture.axes[:2]} == set(
            PLANTED
        )
        assert len(picture.axes[2].texts) == 27


def test_the_studies_of_map_and_test_share_neither_task_nor_settings_nor_seeds() -> None:
    made_from, test = (load_study(STUDIES / f"{name}.yaml") for name in (module.MAP, module.TEST))
    assert not made_from.problems + test.problems
    axes = [{axis.name: set(axis.values) for axis in study.axes} for study in (made_from, test)]
    for name in ("rate", "minibatches", "seed"):
        assert not axes[0][name] & axes[1][name]
    assert axes[0]["staleness"] & axes[1]["staleness"] == {"0"}
    assert made_from.config.config != test.config.config
    for own, first in zip(axes, module._FIRST_SEEDS.values(), strict=True):
        assert own["seed"] == set(range(first, first + module.SEEDS))
    assert not axes[0]["seed"] & table_2_seeds()
    for study in (made_from, test):
        for axis in study.axes:
            for name in axis.values if axis.name in ("rate", "minibatches") else ():
                assert [float(name)] == [float(one) for one in axis.settings(name).values()]


@pytest.mark.slow
def test_the_quick_form_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    saved_in(tmp_path, monkeypatch)
    main(module.reproduce, module.__doc__, ["--quick", "--json"], seeds=module.SEEDS)
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["quick"]
    assert [one["choice"]["staleness"] for one in record["data"]["map"]] == ["0", "2"]
    assert [path.name for path in tmp_path.iterdir()] == ["sweeps"]


def test_text_says_all_of_it(evidence: Evidence) -> None:
    result = Reproduction(
        name="where_staleness_hurts",
        claim=claim(evidence),
        rows=headlines(evidence),
        parameters=(),
        why=module.WHY,
        findings=findings(evidence),
        tables=tables(evidence),
    )
    text = to_text(result, QUICK)
    for title in result.tables:
        assert title in text

"""Tables and intervals of a sweep, from cells whose numbers fit in the head."""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path
from statistics import stdev

import pandas as pd
import pytest

from areal_lab import read_sweep
from areal_lab.cli.sweep import simulate_command
from areal_lab.runlog.intervals import student_t
from areal_lab.sweep.command import figures_of
from areal_lab.sweep.grid import expand
from areal_lab.sweep.picture import draw_sweep
from areal_lab.sweep.read import RecordedSweep, write_cells
from areal_lab.sweep.store import (
    StoredCell,
    fits,
    only_sweep,
    placed_cells,
    stored_cells,
    write_study,
)
from areal_lab.sweep.study import load_study
from tests.fuzz import damaged_bytes, damaged_json, mutations, one_line, refused

STUDY = """
command: simulate
config: small
settings: {seeds: 1}
grid:
  eta: [0, 4, inf]
  seed: [1, 2, 3]
  generation: {interrupted: {}, uninterrupted: {schedule.interruptible: false}}
figure: {metric: step_s, x: eta}
"""
SECONDS = {0: 10.0, 4: 6.0, float("inf"): 5.0}


def recorded(folder: Path, *, without: str = "") -> RecordedSweep:
    (folder / "mine.yaml").write_text(STUDY)
    study = load_study(folder / "mine.yaml", [f"folder={folder / 'out'}"])
    command = simulate_command()
    cells = expand(study, command)
    placed = placed_cells(study, command, cells)
    write_study(study, command, cells, placed)
    for cell, stored in zip(cells, placed, strict=True):
        if cell.label == without:
            continue
        eta, seed = float(cell.choice["eta"] or 0), float(cell.choice["seed"] or 0)
        slow = 1.0 if cell.choice["generation"] == "uninterrupted" else 0.0
        step_s = SECONDS[eta] + seed + slow * seed
        StoredCell(
            folder=stored.folder,
            command="simulate",
            settings=stored.settings,
            status="complete",
            figures={"step_s": step_s, "eta": eta},
        ).write()
    return read_sweep(folder / "out")


def test_the_table_has_a_row_per_cell_in_the_order_of_the_grid(tmp_path: Path) -> None:
    sweep = recorded(tmp_path, without="eta=4, seed=2, generation=interrupted")
    frame = sweep.cells
    assert list(frame)[:5] == ["eta", "seed", "generation", "schedule.interruptible", "status"]
    grid = list(product(SECONDS, (1, 2, 3), ("interrupted", "uninterrupted")))
    assert [tuple(row) for row in frame[["eta", "seed", "generation"]].to_numpy()] == grid
    assert list(frame["status"]).count("waiting") == 1
    assert frame["step_s"].isna().sum() == 1
    assert set(sweep.settings["cluster.gpus"].dropna()) == {4}
    read = pd.read_csv(write_cells(sweep, tmp_path / "cells.csv"))
    pd.testing.assert_frame_equal(read, frame, check_dtype=False)


def test_an_interval_is_students_over_the_seeds(tmp_path: Path) -> None:
    found = recorded(tmp_path).intervals()
    first = found[0]
    assert first.choice == {"eta": 0, "generation": "interrupted"}
    assert first.value.mean == 12
    assert first.value.ci95 == pytest.approx(student_t(2) * stdev([11, 12, 13]) / 3**0.5)
    assert first.runs == (11, 12, 13)


def test_differences_are_paired_by_seed_with_the_baseline_of_the_same_line(tmp_path: Path) -> None:
    sweep = recorded(tmp_path)
    own = {tuple(one.choice.values()): one for one in sweep.intervals(baseline={"eta": 0})}
    assert own[0, "interrupted"].difference is None
    paired = own[4, "uninterrupted"].difference
    assert paired is not None
    assert (paired.mean, paired.ci95, paired.n) == (-4, 0, 3)  # the same for every seed
    oracle = {"eta": 0, "generation": "interrupted"}
    frame = sweep.interval_frame(baseline=oracle).set_index(["eta", "generation"])
    assert frame.loc[(4, "uninterrupted"), "difference"] == -4 + 2  # 1, 2, 3 s slower
    assert frame.loc[(4, "uninterrupted"), "difference_ci95"] == pytest.approx(
        student_t(2) * stdev([1, 2, 3]) / 3**0.5
    )


def test_a_seed_that_the_baseline_has_not_completed_is_left_out(tmp_path: Path) -> None:
    sweep = recorded(tmp_path, without="eta=0, seed=2, generation=interrupted")
    paired = sweep.intervals(baseline={"eta": 0})[1:]
    assert [one.difference.n for one in paired if one.difference][:2] == [2, 3]


def test_an_unknown_metric_or_axis_is_named(tmp_path: Path) -> None:
    sweep = recorded(tmp_path)
    with pytest.raises(ValueError, match="no cell has 'steps_s'; did you mean 'step_s'"):
        sweep.intervals("steps_s")
    with pytest.raises(ValueError, match="'etta' is not an axis; did you mean 'eta'"):
        sweep.intervals(baseline={"etta": 0})
    with pytest.raises(ValueError, match="'seed' is not an axis of the grid"):
        draw_sweep(sweep, x="seed")
    with pytest.raises(ValueError, match="is not the folder of a sweep"):
        read_sweep(tmp_path)


def test_the_picture_has_a_line_per_combination_and_says_its_numbers(tmp_path: Path) -> None:
    sweep = recorded(tmp_path)
    picture = draw_sweep(sweep, baseline={"eta": 0})
    first, second = picture.axes
    assert [tick.get_text() for tick in first.get_xticklabels()] == ["0", "4", "inf"]
    assert first.get_legend_handles_labels()[1] == [
        "generation=interrupted",
        "generation=uninterrupted",
    ]
    assert second.get_ylabel() == "minus eta=0\npaired by seed"
    assert "step_s by eta; mean and 95 % interval of 3 seeds" in picture.alt
    assert "eta=0, generation=interrupted: 12 ± 2.5" in picture.alt
    assert len(draw_sweep(sweep).axes) == 1


def test_a_newer_setting_with_its_default_fits_a_stored_cell(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(STUDY)
    command = simulate_command()
    cell = expand(load_study(tmp_path / "mine.yaml"), command)[0]
    older = {name: value for name, value in cell.settings.items() if name != "workload.turns"}
    stored = StoredCell(folder=tmp_path, command="simulate", settings=older, status="complete")
    assert fits(stored, cell, command)
    for name, value in (("workload.turns", 2), ("workload.steps", 7)):
        record = cell.record.with_settings({name: value})
        changed = {**cell.settings, name: value}
        assert not fits(stored, type(cell)(choice={}, record=record, settings=changed), command)
    removed = StoredCell(
        folder=tmp_path, command="simulate", settings={**older, "gone": 1}, status="complete"
    )
    assert not fits(removed, cell, command)


def test_figures_are_the_numbers_of_a_summary() -> None:
    summary = {
        "status": "complete",
        "reward_after": {"mean": 0.5, "n": 8, "ci95": None},
        "reward_before": None,
        "step_s": {"mean": 3.0, "low": 2.5, "high": 3.5},
        "lag": {"token": {"mean": 1.0, "max": 2, "histogram": {"0": 0.5}}},
        "eta": "inf",
        "eta_changes": [[1.0, 2.0]],
        "config": {"seed": 1},
    }
    assert dict(figures_of(summary)) == {
        "reward_after": 0.5,
        "reward_after.n": 8,
        "step_s": 3.0,
        "step_s.ci95": 0.5,
        "lag.token.mean": 1.0,
        "lag.token.max": 2,
        "eta": float("inf"),
    }


@mutations
def test_a_damaged_sweep_is_read_or_refused_in_one_line(tmp_path: Path, count: int) -> None:
    folder = recorded(tmp_path).folder
    cells = sorted(folder.glob("cells/*/cell.json"))
    for file in cells[2:]:  # each takes as long to read as study.json
        file.unlink()
    files = [folder / "study.json", cells[0]]
    content = {file: file.read_bytes() for file in files}
    rng = random.Random(count)

    def read() -> None:
        sweep = read_sweep(folder)
        write_cells(sweep, folder / "cells.csv")
        sweep.intervals(baseline={"eta": 0})

    for _ in range(count):
        file = rng.choice(files)
        if rng.randrange(3):
            file.write_text(json.dumps(damaged_json(rng, json.loads(content[file]))))
        else:
            file.write_bytes(damaged_bytes(rng, content[file]))
        refused(read)
        file.write_bytes(content[file])


def test_tables_are_not_written_through_a_link(tmp_path: Path) -> None:
    sweep, mine = recorded(tmp_path), tmp_path / "mine"
    mine.write_text("my file")
    (tmp_path / "cells.csv").symlink_to(mine)
    write_cells(sweep, tmp_path / "cells.csv")
    assert mine.read_text() == "my file"
    assert not (tmp_path / "cells.csv").is_symlink()


def test_the_lock_of_a_sweep_is_no_link(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("my file")
    (tmp_path / ".sweep").symlink_to(mine)
    with pytest.raises(OSError, match="symbolic links"), only_sweep(tmp_path):
        pass
    assert mine.read_text() == "my file"


@mutations
def test_a_damaged_cell_is_found(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "cells" / "eta-4-3f2a91"
    cell = StoredCell(
        folder=folder,
        command="simulate",
        settings={"eta": float("inf"), "schedule": {"name": "async", "steps": [1, 2.5]}},
        status="complete",
        figures={"reward": 0.1 + 0.2, "lag": float("inf"), "steps": 7.0},
        wall_s=1e-7,
    )
    cell.write()
    (read,) = stored_cells(tmp_path)
    assert read.figures == cell.figures
    (tmp_path / "cells" / "eta-4-copy" / "cell.json").mkdir(parents=True)
    (tmp_path / "cells" / ".DS_Store").touch()
    file, rng = folder / "cell.json", random.Random(5)
    before, found = file.read_bytes(), 0
    for number in range(count):
        bit = rng.randrange(8 * len(before))
        flipped = bytearray(before)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped if number % 2 else damaged_bytes(rng, before))
        try:
            assert stored_cells(tmp_path) == [read]
        except ValueError as error:
            found += 1
            if not one_line(error, 20_000):
                pytest.fail(str(error))
    assert found > count / 2
    file.write_bytes(before)
    assert stored_cells(tmp_path) == [read]

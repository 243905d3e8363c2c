"""Study files and their cells: every mistake is told before anything runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from areal_lab.cli.sweep import simulate_command, train_command
from areal_lab.config.problem import ConfigError
from areal_lab.config.shipped import studies
from areal_lab.sweep.grid import Cell, expand
from areal_lab.sweep.perform import Pace, workers_for
from areal_lab.sweep.store import placed_cells, read_study, write_study
from areal_lab.sweep.study import Study, load_study

SMALL = """
command: simulate
config: small
settings: {seeds: 1, workload: {steps: 10}}
grid:
  eta: [0, inf]
  generation:
    interrupted: {}
    uninterrupted: {schedule.interruptible: false}
  seed: [1, 2]
"""


def study(folder: Path, text: str = SMALL, *overrides: str) -> Study:
    path = folder / "mine.yaml"
    path.write_text(text)
    return load_study(path, [f"folder={folder / 'out'}", *overrides])


def cells(folder: Path, text: str = SMALL, *overrides: str) -> list[Cell]:
    return expand(study(folder, text, *overrides), simulate_command())


def refused(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        cells(folder, text, *overrides)
    return str(error.value).splitlines()


def test_every_combination_is_a_cell_with_all_settings_of_its_run(tmp_path: Path) -> None:
    made = cells(tmp_path)
    assert [cell.label for cell in made][:3] == [
        "eta=0, generation=interrupted, seed=1",
        "eta=0, generation=interrupted, seed=2",
        "eta=0, generation=uninterrupted, seed=1",
    ]
    assert len(made) == 8
    last = made[-1].settings
    assert (last["schedule.eta"], last["seed"], last["workload.steps"]) == ("inf", 2, 10)
    assert last["schedule.interruptible"] is False
    assert last["cluster.gpus"] == 4  # from the preset
    assert "name" not in last  # changes no result


def test_overrides_change_the_grid_and_the_settings_of_every_cell(tmp_path: Path) -> None:
    made = cells(tmp_path, SMALL, "grid.eta=[4]", "settings.workload.steps=12", "workers=3")
    assert {cell.choice["eta"] for cell in made} == {4}
    assert {cell.settings["workload.steps"] for cell in made} == {12}
    assert study(tmp_path, SMALL, "workers=3").config.workers == 3


def test_all_mistakes_are_told_at_once_with_the_nearest_names(tmp_path: Path) -> None:
    lines = refused(
        tmp_path,
        """
command: simulate
config: small
settings: {worklod.steps: 5, eta: 3, seeds: 1}
grid:
  eta: [0, -1]
  kind:
    a: {schedule.interruptibel: false}
    b: {}
figure: {x: etta, metrc: step_s}
""",
    )
    assert [line.split("; ")[-1] for line in lines[:4]] == [
        "did you mean 'figure.metric'?",
        "those are eta, kind",
        "did you mean 'workload.steps'?",
        "did you mean 'schedule.interruptible'?",
    ]
    assert lines[4] == "schedule.eta is in grid.eta and in settings; leave one out"
    assert lines[5].startswith("schedule.eta is -1, but must be a number >= 0")
    assert lines[5].endswith("(in 2 of 4 cells, the first with eta=-1, kind=a)")
    assert len(lines) == 6


def test_what_does_not_fit_together_is_told_once_for_all_cells_that_have_it(tmp_path: Path) -> None:
    (line,) = refused(tmp_path, SMALL, "grid.gpus=[2,4]")
    assert line.startswith("cluster.rollout_gpus is 2, but must be from 1 to 1")
    assert line.endswith("(in 8 of 16 cells, the first with eta=0, generation=interrupted, "
                         "seed=1, gpus=2)")  # fmt: skip


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grid.eta=3", "grid.eta is 3, but must be a list of values"),
        ("grid.eta=[1, 1]", "grid.eta has twice 1"),
        ("grid.eta=[4, 4.5, [1]]", "grid.eta has [1], which needs a name"),
        ("grid.schedule.eta=[1, 2]", "schedule.eta is in grid.schedule.eta and in grid.eta"),
        ("settings.name=mine", "'name' in settings is set by the sweep; leave it out"),
        ("settings.seeds=3", "each run has several seeds itself, from `seed` on"),
        ("figure.baseline=eta=3", "figure.baseline has eta=3, but eta has the values 0, inf"),
        ("figure.over=sed", "figure.over is 'sed', no axis of the grid"),
        ("config=smallest", "unknown preset 'smallest'; did you mean 'small'?"),
        ("grid.again={a: {}, b: {cluster.gpus: 4}}", "eta=0, generation=interrupted, seed=1, ag"),
    ],
)
def test_a_wrong_study_is_refused(tmp_path: Path, override: str, message: str) -> None:
    assert any(line.startswith(message) for line in refused(tmp_path, SMALL, override))


def test_the_shipped_studies_can_run() -> None:
    commands = {"train": train_command, "simulate": simulate_command}
    for name in studies():
        shipped = load_study(name)
        assert len(expand(shipped, commands[shipped.config.command]())) >= 18


def test_trainings_run_one_at_a_time_unless_told(tmp_path: Path) -> None:
    command = train_command()
    text = "config: tiny\ngrid: {seed: [1, 2, 3]}"
    made = expand(study(tmp_path, text), command)
    assert workers_for(command, made, 0) == 1
    assert workers_for(command, made, 2) == 2
    fixed = expand(study(tmp_path, text, "settings.rollout.port=40123"), command)
    with pytest.raises(ConfigError, match=r"the same rollout\.port must be one at a time"):
        workers_for(command, fixed, 2)


def test_the_rest_takes_as_long_as_the_cells_so_far() -> None:
    pace = Pace(workers=2, waiting=3, seconds=[10.0, 14.0], running={"a": 100.0, "b": 104.0})
    assert pace.left_s(106.0) == pytest.approx((3 * 12 + 6 + 10) / 2)
    last = Pace(workers=2, waiting=1, seconds=[12.0], running={"a": 100.0})
    assert last.left_s(111.0) == pytest.approx(12)  # one cell is not shared out
    assert Pace(1, 3, [], {}).left_s(0.0) is None
    assert math.isclose(Pace(1, 0, [5.0], {"a": 0.0}).left_s(9.0) or 0.0, 0.0)


def test_an_axis_of_named_losses(tmp_path: Path) -> None:
    text = """
config: tiny
grid:
  objective:
    ppo: {}
    gspo: {actor.loss: {name: gspo, clip_epsilon: [3e-4, 4e-4]}}
    dapo: {actor: {loss: {name: dapo}, advantage: {name: rloo}}}
"""
    unnamed = "config: tiny\ngrid: {actor.loss.correct: [unbounded]}\n"
    with pytest.raises(ConfigError, match="must name a policy loss"):
        expand(study(tmp_path, unnamed), train_command())
    made = expand(study(tmp_path, text), train_command())
    assert [cell.settings["actor.loss"] for cell in made] == [
        {},
        {"name": "gspo", "clip_epsilon": [3e-4, 4e-4]},
        {"name": "dapo"},
    ]
    mine = study(tmp_path, text)
    placed = placed_cells(mine, train_command(), made)
    write_study(mine, train_command(), made, placed)
    grouped = [one["grouped"] for one in read_study(mine.folder)["cells"]]
    assert [one["actor.loss.name"] for one in grouped] == [None, "gspo", "dapo"]
    assert [one["actor.loss.clip_epsilon"] for one in grouped] == [None, [3e-4, 4e-4], None]
    assert [one["actor.advantage.name"] for one in grouped] == [None, None, "rloo"]

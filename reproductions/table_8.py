"""Table 8: staleness with RLOO in place of PPO's advantages.

The runs of Table 2 on addition, co-simulated, with the mean of the other samples of a group as the
baseline and no division by a deviation. Runs that sweeps/table_8 holds are not repeated; all of
them take 45 CPU minutes.
"""

from __future__ import annotations

from typing import Final

from benchmarks.harness import Arguments
from reproductions.learning.compare import is_below_zero, written
from reproductions.learning.runs import Data, perform, quick, seeds
from reproductions.learning.setting import OBJECTIVES, Setting, draw, settings_of, table
from reproductions.report.harness import expected, main
from reproductions.report.records import Reproduction, Row
from reproductions.report.results import load

SEEDS: Final = 5
STUDY: Final = "table_8"
TASK: Final = "addition, RLOO"
WHY: Final = (
    "The paper has one run per eta, and prints scores of AIME 2024, 32 responses to each of 30 "
    "problems: all six lie between 31.5 and 34.1, closer than two seeds of one setting.",
    "RLOO does not divide advantages by the standard deviation of a group, so they are smaller "
    "than in Table 2; Adam removes most of this difference.",
)


def reproduce(arguments: Arguments) -> Reproduction:
    """Run what is missing of the study."""
    if arguments.quick:
        grid = ["grid.staleness={'0': {eta: 0}, '8': {eta: 8}}"]
        grid += ["grid.rate={'3e-4': {actor.optimizer.lr: 3e-4}}"]
        runs = perform(STUDY, [*quick(STUDY), *grid, *seeds(arguments)])
    else:
        runs = perform(STUDY, seeds(arguments))
    return build({"tasks": {TASK: [run.to_json() for run in runs]}})


def recorded(_: Arguments) -> Reproduction:
    """The result that is packaged."""
    saved = load(STUDY)
    return build(saved.data, saved.origin)


def build(data: Data, origin: str = "") -> Reproduction:
    """The reproduction from its runs."""
    (setting,) = settings_of(data)
    return Reproduction(
        name=STUDY,
        claim=(
            "With RLOO, too, eta up to 16 costs no accuracy: AIME 2024 scores "
            + ", ".join(f"{score:g}" for score in expected(STUDY)["aime24"].values())
            + " for eta 0, 1, 2, 4, 8, 16 (Table 8)."
        ),
        rows=[_row(setting, one, eta) for one in OBJECTIVES for eta in setting.bounds],
        parameters=(),
        why=WHY,
        findings=[finding(setting, one) for one in OBJECTIVES],
        tables={f"{setting.name}, {setting.steps} steps": table(setting)},
        figure=lambda: draw([setting]),
        title="RLOO: held-out reward by eta, mean and 95 % interval over seeds",
        data=data,
        origin=origin,
    )


def finding(setting: Setting, objective: str) -> str:
    """What staleness costs with one objective."""
    losses = {eta: setting.loss(objective, eta) for eta in setting.bounds}
    lost = [eta for eta, loss in losses.items() if is_below_zero(loss)]
    each = ", ".join(f"{written(loss, sign='+')} (eta {eta})" for eta, loss in losses.items())
    where = f"below it at eta {', '.join(lost)}" if lost else "nowhere below it"
    return f"{objective.capitalize()}, minus the synchronous run: {each}; the interval is {where}."


def _row(setting: Setting, objective: str, eta: str) -> Row:
    return Row(
        name=f"{objective}, eta {eta} minus eta 0",
        paper=None,
        ours=setting.loss(objective, eta),
        unit="reward",
    )


if __name__ == "__main__":
    main(reproduce, __doc__, seeds=SEEDS)

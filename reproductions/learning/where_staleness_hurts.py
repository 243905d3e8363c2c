"""Where staleness hurts: learning rate x minibatches x eta, by drift. Not in the paper.

    study                  task                 what for
    staleness_map          addition, along      the map, and the rule of thumb
    staleness_map_test     sorting, live        other settings and seeds, which test the rule
    table_2 (saved)        addition, sorting    the same: more steps, other eta, seeds

The loss of a cell is the held-out reward of the synchronous run (eta 0) of the same learning rate,
minibatches, objective and seed minus its own. Drift is the mean |log pi_theta - log pi_behav| of
the trained tokens, which a run logs. All of it are 192 runs of some 35 CPU seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.harness import Arguments
from reproductions.learning.runs import Data, Run, perform, quick
from reproductions.learning.staleness.evidence import evidence_of
from reproductions.learning.staleness.findings import claim, findings
from reproductions.learning.staleness.picture import draw_map
from reproductions.learning.staleness.tables import headlines, tables
from reproductions.report.harness import main
from reproductions.report.records import Reproduction
from reproductions.report.results import RESULTS, load

NAME: Final = "where_staleness_hurts"
MAP, TEST = "staleness_map", "staleness_map_test"
SEEDS: Final = 2
_FIRST_SEEDS: Final = {MAP: 6, TEST: 11}
"""Table 2 has the seeds 1 to 5."""
_QUICK: Final = (
    "grid.seed=[1]",
    "grid.rate={'3e-4': {actor.optimizer.lr: 3e-4}}",
    "grid.minibatches={'1': {actor.ppo_n_minibatches: 1}}",
    "grid.staleness={'0': {eta: 0}, '2': {eta: 2}}",
    "grid.objective={naive: {actor.use_decoupled_loss: false}}",
)
_LEFT_OUT: Final = ("curve", "training", "hours")
"""Fields of a run that are not kept: nothing is said of them here."""
WHY = (
    "A sample that waits for eta steps is trained under weights that eta steps have changed. "
    "Drift measures this distance. It grows with the learning rate, with the number of "
    "minibatches and with the lag, so none of these alone predicts the loss.",
    "The clip of the naive objective is around the policy that sampled: the farther the policy "
    "has moved, the fewer tokens have a gradient. The clip of the decoupled objective is around "
    "the policy before the step, whatever policy sampled.",
    "In the first eta + 1 steps all samples are of version 0, so a delay of eta steps is a part of "
    "every loss, however small the drift.",
    "Drift is the mean over the last half of the steps, the reward the mean over the last "
    "quarter: the rule predicts the loss of a whole run with this drift, not the effect of the "
    "next step.",
    "The runs have two tasks with a few tokens and two models of 102,000 parameters: the "
    "thresholds may differ for a language model with responses of thousands of tokens. The advice "
    "to watch drift rather than eta should carry over.",
)


def reproduce(arguments: Arguments) -> Reproduction:
    """Run the cells that are missing; `--quick` runs two small ones."""
    return build(measure(arguments))


def recorded(_: Arguments) -> Reproduction:
    """The result that is packaged.

    Raises:
        ValueError: there is none.
    """
    saved = load(NAME)
    return build(saved.data, saved.origin)


def measure(arguments: Arguments) -> Data:
    """The runs of the map and of its test, as `build` takes them."""
    if arguments.quick:
        return {"map": list(map(_kept, perform(MAP, [*quick(NAME), *_QUICK]))), "test": []}
    found = {
        name: perform(name, [f"grid.seed={list(range(first, first + arguments.repeats))}"])
        for name, first in _FIRST_SEEDS.items()
    }
    return {"map": list(map(_kept, found[MAP])), "test": list(map(_kept, found[TEST]))}


def build(data: Data, origin: str = "") -> Reproduction:
    """The reproduction of what `measure` gave, with the runs of Table 2 where they are saved."""
    addition, sorting = _table_2()
    made_from, test = _read(data["map"]), _read(data["test"])
    evidence = evidence_of(
        made_from,
        own_task={"Table 2, addition": addition},
        other_tasks={"Table 2, sorting": sorting, "sorting, other settings": test},
    )
    cpu_h = sum(run.cpu_s for run in (*made_from, *test)) / 3600
    return Reproduction(
        name=NAME,
        claim=claim(evidence),
        rows=headlines(evidence),
        parameters=(),
        why=WHY,
        findings=[
            *findings(evidence),
            f"{len(made_from)} runs of the map and {len(test)} of its test took {cpu_h:.1f} CPU "
            "hours.",
        ],
        tables=tables(evidence),
        figure=lambda: draw_map(evidence),
        title="What staleness costs, by drift. Dashed: the rule, made from the filled points only",
        data=data,
        origin=origin,
    )


def _table_2() -> tuple[list[Run], list[Run]]:
    """The saved runs of Table 2 on addition and on sorting; none where there are none."""
    if not (RESULTS / "table_2.json").is_file():
        return [], []
    tasks = load("table_2").data["tasks"]
    return _read(tasks.get("addition", ())), _read(tasks.get("sorting", ()))


def _kept(run: Run) -> dict[str, Any]:
    return {name: value for name, value in run.to_json().items() if name not in _LEFT_OUT}


def _read(records: Sequence[Mapping[str, Any]]) -> list[Run]:
    missing = {"curve": (), "training": (), "hours": 0.0}
    return [Run.from_json({**missing, **record}) for record in records]


if __name__ == "__main__":
    main(reproduce, __doc__, seeds=SEEDS)

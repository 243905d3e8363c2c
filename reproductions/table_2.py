"""Table 2: what staleness costs, with naive PPO and with the decoupled objective.

A model of 102 thousand parameters learns under the schedule of the paper's 1.5B run, co-simulated
(docs/cosim.md); lag, hours and learning are comparable with the paper's, scores are not. Runs that
sweeps/table_2_addition, table_2_sorting, smollm2 and unbounded hold are not repeated. All of them
take eight CPU hours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from benchmarks.harness import Arguments
from reproductions.learning.compare import (
    BySeed,
    chosen,
    covers_zero,
    is_below_zero,
    mean,
    minus,
    written,
)
from reproductions.learning.runs import Data, Run, perform, quick, seeds
from reproductions.learning.setting import OBJECTIVES, ORACLE, Setting, draw, settings_of, table
from reproductions.report.harness import expected, main
from reproductions.report.records import Reproduction, Row
from reproductions.report.results import load
from simulator.stats.statistics import Estimate

SEEDS: Final = 5
STUDIES: Final = {
    "addition": "table_2_addition",
    "sorting": "table_2_sorting",
    "SmolLM2-135M": "smollm2",
}
LONGER: Final = "unbounded"
"""The study of claim (c) in runs of more steps, with the decoupled objective alone."""
FEWER: Final = {"SmolLM2-135M": 3, LONGER: 3}
"""What has fewer seeds, since each run takes minutes."""
LARGE: Final = ("4", "8", "16", "inf")
_NOTHING: Final = 0.01
"""Hours gained, as a ratio, of a run that ends at the reward that it began with."""
WHY: Final = (
    "The schedule is that of the simulator's preset `table_1_1.5b_asynchronous` with two batches "
    "in flight (`max_concurrent_rollouts=0`): the trainer is then the bottleneck, and lag is eta "
    "for nearly every token. With one batch in flight, as the preset has it (the row `one batch`, "
    "with eta 8), generation is the bottleneck on addition: lag stays below 2, and is the same "
    "for eta 4, 8 and inf. The responses of sorting have nearly equal lengths, so one batch "
    "suffices. The paper does not say which limit its runs of Table 2 had; its throughput still "
    "grows from eta 4 to inf, which needs more than one batch.",
    "A task that a model of this size learns in minutes is not mathematics: the model starts with "
    "half of the problems right, its responses have 5 to 9 tokens, and it learns the task in 150 "
    "steps. The cost of staleness depends on the distance that the policy moves during the lag, "
    "which the learning rate determines (`where_staleness_hurts`). The table therefore has two "
    "rates, not only the one that is closer to the paper.",
    "Addition follows a simulated log, so the schedule is the same for all runs of an eta. "
    "Sorting is live: its lengths come from the model, and long responses are staler. At eta 0 "
    "both objectives are equal except for rounding, which grows: the difference of their rewards "
    "shows the effect of chance on two runs with the same seed.",
    "SmolLM2-135M has 64 responses in a batch, 4 GPUs, and eight batches in flight, because "
    "otherwise such a small batch never becomes 8 versions old. Its synchronous step waits for "
    "the longest of few responses, so its hours do not represent the paper's cluster and are left "
    "out of (d).",
)


def reproduce(arguments: Arguments) -> Reproduction:
    """Run what is missing of the studies."""
    return build(measure(arguments))


def recorded(_: Arguments) -> Reproduction:
    """The result that is packaged."""
    saved = load("table_2")
    return build(saved.data, saved.origin)


def measure(arguments: Arguments) -> Data:
    """The runs of all tasks; with `--quick` short ones of addition."""
    if arguments.quick:
        grid = ["grid.staleness={'0': {eta: 0}, '8': {eta: 8}}"]
        grid += ["grid.rate={'3e-4': {actor.optimizer.lr: 3e-4}}"]
        found = perform(STUDIES["addition"], [*quick("table_2"), *grid, *seeds(arguments)])
        return {"tasks": {"addition": [run.to_json() for run in found]}}
    return {
        "tasks": {
            task: [run.to_json() for run in perform(study, seeds(arguments, FEWER.get(task)))]
            for task, study in STUDIES.items()
        },
        "longer": [run.to_json() for run in perform(LONGER, seeds(arguments, FEWER[LONGER]))],
    }


def build(data: Data, origin: str = "") -> Reproduction:
    """The reproduction from its runs."""
    found = settings_of(data)
    longer = [Run.from_json(record) for record in data.get("longer", ())]
    return Reproduction(
        name="table_2",
        claim=(
            "Naive PPO loses accuracy as eta grows; with the decoupled objective eta 4 to 8 is as "
            "good as the synchronous oracle, and eta inf falls short of it (Table 2, Figure 5)."
        ),
        rows=[row for setting in found for row in _rows(setting)],
        parameters=(),
        why=WHY,
        findings=[
            naive_degrades(found),
            decoupled_holds(found),
            unbounded(found),
            *unbounded_for_longer(longer),
            hours(found),
            drifts(found),
        ],
        tables={
            **_paper(),
            **{
                f"{setting.task}, learning rate {setting.rate}, {setting.steps} steps; held-out "
                "reward, and minus that of eta 0, seed by seed": table(setting)
                for setting in found
            },
            **_longer_table(longer),
        },
        figure=lambda: draw(found),
        title=title(found),
        data=data,
        origin=origin,
    )


# --- the claims ----------------------------------------------------------------------------------


def naive_degrades(found: Sequence[Setting]) -> str:
    """Claim (a)."""
    losses = [s.loss("naive", eta) for s in found for eta in s.bounds if eta in LARGE]
    lost = sum(map(is_below_zero, losses))
    worst = [min(s.bounds, key=partial(_mean_loss, s)) for s in found]
    examples = _listed(
        f"{_loss(s, 'naive', eta)} at eta {eta} ({s.name})"
        for s, eta in zip(found, worst, strict=True)
    )
    return (
        f"(a) Naive PPO degrades with eta: {_answer(lost, len(losses))}. Of {len(losses)} cells "
        f"with eta 4 or more, {lost} have intervals below the oracle. Largest losses: {examples}."
    )


def decoupled_holds(found: Sequence[Setting]) -> str:
    """Claim (b)."""
    cells = [(s, eta) for s in found for eta in s.bounds if eta in ("4", "8")]
    held = sum(covers_zero(s.loss("decoupled", eta)) for s, eta in cells)
    better = sum(is_below_zero(minus(s.of("naive", e), s.of("decoupled", e))) for s, e in cells)
    worse = sum(is_below_zero(minus(s.of("decoupled", e), s.of("naive", e))) for s, e in cells)
    largest = []
    for s in found:
        if own := [eta for setting, eta in cells if setting is s]:
            eta = min(own, key=lambda eta: s.loss("decoupled", eta).mean)
            largest.append(f"{_loss(s, 'decoupled', eta)} at eta {eta} ({s.name})")
    return (
        "(b) Decoupled PPO at eta 4 and 8 is within noise of the oracle: "
        f"{_answer(held, len(cells))} (an interval that covers zero need not mean that nothing is "
        f"lost). Largest losses: {', '.join(largest)}. In {better} of {len(cells)} cells it is "
        f"better than naive PPO beyond the interval of their difference, in {worse} worse."
    )


def unbounded(found: Sequence[Setting]) -> str:
    """Claim (c)."""
    cells = [s for s in found if "inf" in s.bounds]
    short = sum(is_below_zero(s.loss("decoupled", "inf")) for s in cells)
    parts = _listed(
        f"{_loss(s, 'decoupled', 'inf')} ({s.name}" + _against(s, "decoupled", "inf", "8") + ")"
        for s in cells
    )
    return (
        f"(c) Decoupled PPO with unbounded eta falls short of the oracle: "
        f"{_answer(short, len(cells))}: {parts}."
    )


def unbounded_for_longer(runs: Sequence[Run]) -> list[str]:
    """Claim (c) in runs of more steps; empty without such runs."""
    losses = {
        rate: [(eta, minus(own, by_eta[ORACLE])) for eta, own in by_eta.items() if eta != ORACLE]
        for rate, by_eta in _longer(runs).items()
    }
    if not losses:
        return []
    parts = "; ".join(
        f"{rate}: " + _listed(f"{written(loss, sign='+')} at eta {eta}" for eta, loss in by_eta)
        for rate, by_eta in losses.items()
    )
    steps = " and ".join(dict.fromkeys(f"{run.steps}" for run in runs))
    return [f"(c) in runs of {steps} steps on addition, minus the oracle: {parts}."]


def hours(found: Sequence[Setting]) -> str:
    """Claim (d), for batches like the paper's."""
    found = [s for s in found if s.task not in FEWER]
    parts = []
    for objective in reversed(OBJECTIVES):
        gains = [(s, s.hours_gained(objective, "8")) for s in found if "8" in s.bounds]
        gained = sum(gain.low > 1 for _, gain in gains)
        told = [(s, gain) for s, gain in gains if gain.mean >= _NOTHING]
        each = _listed(f"{written(gain)} ({s.name})" for s, gain in told)
        part = (
            f"with the {objective} objective {_answer(gained, len(gains))}, the synchronous run "
            f"takes {each} times the hours to the reward that eta 8 ends at"
        )
        if idle := [s.name for s, gain in gains if gain.mean < _NOTHING]:
            part += f" ({'; '.join(idle)}: eta 8 ends no higher than it began)"
        parts.append(part)
    steps = [s.steps_gained("8").mean for s in found if "8" in s.bounds]
    return (
        f"(d) Asynchrony pays at equal reward: {'; '.join(parts)}. In steps per hour it gains "
        f"{min(steps, default=1):.2f} to {max(steps, default=1):.2f} times."
    )


def drifts(found: Sequence[Setting]) -> str:
    """What the two clips hold the policy near to."""

    def times(setting: Setting, eta: str) -> float:
        naive, decoupled = (
            mean(setting.of(one, eta), lambda run: run.drift).mean for one in OBJECTIVES
        )
        return decoupled / naive

    parts = []
    for eta in ("8", "inf"):
        if known := [times(s, eta) for s in found if eta in s.bounds]:
            parts.append(f"{min(known):.1f} to {max(known):.1f} at eta {eta}")
    return (
        "Naive PPO's clip is centered at the behavior policy, so that it also holds the policy "
        "near its old samples; decoupled PPO's is not. Its drift is that of naive PPO times "
        f"{' and '.join(parts)}."
    )


def title(found: Sequence[Setting]) -> str:
    """The finding in one line."""
    eta = "8" if all("8" in setting.bounds for setting in found) else found[0].bounds[-1]
    parts = []
    for objective in OBJECTIVES:
        losses = sorted(s.loss(objective, eta).mean for s in found if eta in s.bounds)
        each = dict.fromkeys(f"{loss:+.3f}" for loss in (losses[-1], losses[0]))
        parts.append(f"{' to '.join(each)} {objective}")
    return (
        f"Reward by eta minus that of synchronous training, paired by seed: at eta {eta} "
        f"{', '.join(parts)}"
    )


def _loss(setting: Setting, objective: str, eta: str) -> str:
    return written(setting.loss(objective, eta), sign="+")


def _mean_loss(setting: Setting, eta: str) -> float:
    return setting.loss("naive", eta).mean


def _paper() -> dict[str, list[dict[str, object]]]:
    """What the paper prints."""
    printed = expected("table_2")
    names = {"aime24": "AIME 2024, %", "training_reward": "training reward"}
    title = "The paper: 1.5B on mathematics, one run for each eta; reward +5 or -5"
    etas = printed["aime24"]["naive"]
    return {
        title: [
            {"eta": eta}
            | {
                f"{name}, {objective}": printed[key][objective][eta]
                for key, name in names.items()
                for objective in OBJECTIVES
            }
            for eta in etas
        ]
    }


def _longer(runs: Sequence[Run]) -> dict[str, dict[str, BySeed]]:
    """Runs by learning rate, eta and seed."""
    choices = dict.fromkeys((run.choice["rate"], run.choice["staleness"]) for run in runs)
    found: dict[str, dict[str, BySeed]] = {}
    for rate, eta in choices:
        found.setdefault(rate, {})[eta] = chosen(runs, rate=rate, staleness=eta)
    return found


def _longer_table(runs: Sequence[Run]) -> dict[str, list[dict[str, str]]]:
    rows = [
        {
            "learning rate": rate,
            "steps": f"{next(iter(own.values())).steps}",
            "eta": eta,
            "mean lag": f"{mean(own, lambda run: run.lag).mean:.1f}",
            "drift": f"{mean(own, lambda run: run.drift).mean:.3f}",
            "reward": written(mean(own)),
            "minus eta 0": "" if eta == ORACLE else written(minus(own, by_eta[ORACLE]), sign="+"),
        }
        for rate, by_eta in _longer(runs).items()
        for eta, own in by_eta.items()
    ]
    return {"Longer runs of addition, decoupled PPO": rows} if rows else {}


def _answer(met: int, of: int) -> str:
    return "yes" if met == of else "no" if met == 0 else f"in {met} of {of} cells"


def _against(setting: Setting, objective: str, one: str, other: str) -> str:
    if other not in setting.bounds:
        return ""
    difference = minus(setting.of(objective, one), setting.of(objective, other))
    return f"; {written(difference, sign='+')} from eta {other}"


def _listed(parts: Iterator[str]) -> str:
    return ", ".join(parts)


def _rows(setting: Setting) -> Iterator[Row]:
    """The differences that the claims are about."""

    def row(name: str, ours: Estimate, unit: str, paper: float | None = None) -> Row:
        return Row(name=f"{setting.name}: {name}", paper=paper, ours=ours, unit=unit)

    naive, decoupled = (setting.of(one, ORACLE) for one in OBJECTIVES)
    yield row("eta 0, naive minus decoupled (chance)", minus(naive, decoupled), "reward")
    for eta in setting.bounds:
        if eta not in ("4", "8", "inf"):
            continue
        difference = minus(setting.of("decoupled", eta), setting.of("naive", eta))
        yield row(f"eta {eta}, decoupled minus naive", difference, "reward")
    if "8" in setting.bounds:
        gained = setting.hours_gained("decoupled", "8")
        yield row("eta 8 against eta 0, hours to equal reward, decoupled", gained, "times")


if __name__ == "__main__":
    main(reproduce, __doc__, seeds=SEEDS)

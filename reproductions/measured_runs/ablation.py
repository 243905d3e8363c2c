"""What each term of the cost model does to the errors: all rows again without it.

Numbers are fitted again without the term. Families that do not have it keep their prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from reproductions.measured_runs.families import Family, Fit, Measured, MeasuredRuns, Settings
from reproductions.measured_runs.predict import Predicted, Sizes, predict
from reproductions.measured_runs.score import Scores, score, summary

Refit: TypeAlias = Callable[[Fit], Fit | None]
"""Another fit in place of one, or none."""
REST: Final = "colocation.other_s"
CPU: Final = "rollout.engine_overhead_s"
RESTS: Final = (REST, CPU)
"""Fits of what a synchronous step takes beyond its simulated terms: a constant, or, where it is
more than a quarter of the step (`LARGE_REST`), CPU time of each decode step."""
_SPEED: Final = Fit(setting="trainer.time_factor", low=0.1, high=30.0, part="step")
LENGTH: Final = "workload.answers.mean_tokens"
OTHER_FITS: Final[Mapping[str, Mapping[str, Refit]]] = {
    "the trainer's speed fitted instead of this rest": dict.fromkeys(RESTS, lambda _: _SPEED),
    "more than a quarter fitted as a constant, too, not as CPU time": {
        CPU: lambda _: Fit(setting=REST, low=0.01, high=600.0, part="step")
    },
    "verl's lengths fitted to generation, not to the update": {
        LENGTH: lambda fit: replace(fit, part="generation")
    },
}
"""Other numbers of the synchronous row, or other parts of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A term, and the settings that switch it off."""

    name: str
    off: Settings
    """Replace those of families and rows that have one of the first names."""
    only_if: Sequence[str] = ()
    """Settings of which a family or row must have one; empty takes the names of `off`."""
    in_rows: bool = True
    """Whether rows may have it, and not only whole families."""


TERMS: Final = (
    Term(
        name="verl's streamed trainer: its calls and faster passes",
        off={"trainer.fixed_s": 1e-9},  # a given time takes the place of both
        only_if=("schedule.require_batches",),
    ),
    Term(
        name="hand-over of batches to verl's trainer",
        off={"outside.batch_s": 0.0},
        only_if=("trainer.sequence_parallel",),
        in_rows=False,
    ),
    Term(
        name="named trainers (AReaL's for NeMo-RL and verl)",
        off={"trainer.kind": "areal", "trainer.shard_group": 0},
        only_if=("trainer.kind",),
        in_rows=False,  # AReaL's does not shard: verl's of Figure 4 would not fit into memory
    ),
    Term(
        name="seconds of colocation: sleep, offload, refit, data",
        off={
            "colocation.sleep": "none",
            "colocation.offload": "none",
            "colocation.refit_s": 0.0,
            "outside.batch_s": 0.0,
        },
        only_if=("cluster.placement",),
    ),
    Term(name="long tail of base models", off={"workload.answers.tail": ""}),
    Term(name="ranks share the whole batch", off={"trainer.balance": "minibatch"}),
    Term(name="engines by version", off={"rollout.engine": "default"}),
    Term(name="decoding without CUDA graphs", off={"rollout.cuda_graphs": True}),
    Term(
        name="uneven experts",
        off={"trainer.expert_imbalance": 1.0},
        only_if=("trainer.expert_parallel",),
    ),
)


def without_rest(
    predicted: Sequence[Predicted], runs: MeasuredRuns, sizes: Sizes
) -> list[Predicted]:
    """All rows as they are predicted if the rest of a synchronous step is not fitted."""
    nothing: Mapping[str, Refit] = dict.fromkeys(RESTS, lambda _: None)
    families = [_refitted(one, nothing) for one in runs.families]
    return _predict(families, predicted, runs, sizes)


def ablation(
    predicted: Sequence[Predicted],
    unfitted: Sequence[Predicted],
    runs: MeasuredRuns,
    sizes: Sizes,
) -> list[dict[str, Any]]:
    """The scores with everything, without each term, and with other fits.

    Args:
        predicted: all rows, with everything.
        unfitted: of `without_rest`.
        runs: what they were predicted from.
        sizes: of the other predictions, which have one seed.
    """
    sizes = replace(sizes, seeds=1)
    rows = [_record("everything", summary(score(predicted, runs)))]
    for term in TERMS:
        changed = [without(one, term) for one in runs.families]
        rows.append(_record(f"without: {term.name}", _scores(changed, predicted, runs, sizes)))
    name = "without: the fitted rest of a synchronous step"
    rows.append(_record(name, summary(score(unfitted, runs))))
    for name, fits in OTHER_FITS.items():
        changed = [_refitted(one, fits) for one in runs.families]
        rows.append(_record(name, _scores(changed, predicted, runs, sizes)))
    return rows


def without(family: Family, term: Term) -> Family:
    """The family without a term; the same object if it has none."""
    names = term.only_if or tuple(term.off)
    if any(name in family.settings for name in names):
        return replace(family, settings={**family.settings, **term.off})
    if not term.in_rows:
        return family
    rows = [
        replace(row, settings={**row.settings, **term.off})
        if any(name in row.settings for name in names)
        else row
        for row in family.rows
    ]
    return family if _same(rows, family.rows) else replace(family, rows=rows)


def _same(rows: Sequence[Measured], before: Sequence[Measured]) -> bool:
    return all(one is other for one, other in zip(rows, before, strict=True))


def _refitted(family: Family, instead: Mapping[str, Refit]) -> Family:
    """With other fits, by setting, or without; the same object if it fits none of these."""
    if not any(fit.setting in instead for fit in family.fits):
        return family
    fits = [instead[fit.setting](fit) if fit.setting in instead else fit for fit in family.fits]
    return replace(family, fits=[fit for fit in fits if fit is not None])


def _scores(
    families: Sequence[Family], before: Sequence[Predicted], runs: MeasuredRuns, sizes: Sizes
) -> Scores:
    changed = replace(runs, families=families)
    return summary(score(_predict(families, before, runs, sizes), changed))


def _predict(
    families: Sequence[Family], before: Sequence[Predicted], runs: MeasuredRuns, sizes: Sizes
) -> list[Predicted]:
    """Rows of these families; those of families that are not changed are taken from before."""
    changed = replace(runs, families=families)
    found: list[Predicted] = []
    for one in families:
        known = [row for row in before if row.family is one]
        found += known or predict(one, changed, sizes)
    return found


def _record(name: str, scores: Scores) -> dict[str, Any]:
    return {
        "terms": name,
        "gain: median |ln|": f"{scores.gain_median:.2f}",
        "largest": f"{scores.gain_largest:.2f}",
        "right signs": f"{scores.signs_right} of {scores.signs}",
        "step: median error": f"{scores.step_median:.0%}",
        "largest ": f"{scores.step_largest:.0%}",
    }

"""Advice from the log of another framework: where the time goes, what asynchrony would give.

    FittedStep --schedules x splits of the same GPUs--> Option: seconds per step, gain, interval
               --one setting of the best option changed--> Change

Ratios are between simulated runs, so that an error which both share cancels; seconds are the logged
step divided by the ratio. Intervals contain the model's error on measured runs of other systems.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from areal_lab.control.ledger import mean_lag
from simulator.assembly.build import problems
from simulator.assembly.simulate import nearest_split, replicate
from simulator.calibrate.observed import FittedStep, Observed, fit_step, observe
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.report.measured_errors import (
    change_of,
    change_record,
    measured_errors,
)
from simulator.run.result import Replicated
from simulator.stats.statistics import prediction
from simulator.workload.recorded_run import Value

ETAS: Final = (1.0, 4.0, 8.0)
_SHARES: Final = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
"""Shares of the GPUs that generate, of which the best is taken."""
_AFTER_WARMUP: Final = 6
_SCREENED: Final = {"workload.steps": 8, "workload.warmup_steps": 4, "seeds": 1}
_USUALLY_SCREENED: Final = 3
"""Splits of a schedule that are tried, where the walk begins beside the best."""
_FINALISTS: Final = 2
"""Splits of a schedule that all seeds are simulated of, at most."""
_RIVAL: Final = 1.1
"""A split that one seed has this much slower than the fastest is no finalist."""
_LESS_TO_DO: Final = 0.02
"""A change that gains less is not worth its line."""


class Stage(NamedTuple):
    """Progress: simulations that are done, of about so many."""

    done: int
    total: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A schedule with its best split of the logged run's GPUs."""

    name: str
    settings: Mapping[str, Value]
    """Those that differ from the fitted run's, by dotted name."""
    step_s: Mapping[str, float | None]
    """Seconds per step: mean, low, high."""
    gain: Mapping[str, float | None]
    """Logged over predicted seconds per step."""
    lag_mean: float
    """Mean lag of a trained token, in versions."""
    error: Mapping[str, Any]
    """The model's error in the interval, in words and numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting of the best option changed."""

    name: str
    settings: Mapping[str, Value]
    gain: float
    """Seconds per trained sample of the option, over those of the changed one."""
    note: str
    """What the change costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What the log says, and what the simulator makes of it."""

    fit: FittedStep
    options: Sequence[Option]
    """Fastest first."""
    impossible: Sequence[str]
    """Schedules that these GPUs cannot run, with the reason."""
    changes: Sequence[Change]
    """Largest gain first."""

    @property
    def observed(self) -> Observed:
        """The logged run."""
        return self.fit.observed

    def command(self, option: Option | None = None) -> str:
        """The `areal-lab simulate` command that gives the numbers of an option, or of the fit."""
        settings = {**_settings(self.fit), **(option.settings if option else {})}
        return "areal-lab simulate " + shlex.join(
            f"{name}={_text(v)}" for name, v in settings.items()
        )

    def to_json(self) -> dict[str, Any]:
        """The advice as one object; seconds, and shares of a step."""
        observed = self.observed
        return {
            "framework": observed.framework,
            "steps": observed.steps,
            "step_s": observed.step_s,
            "parts_s": {**observed.parts, "not in the log": observed.other_s},
            "simulated_parts_s": self.fit.simulated(),
            "settings": dict(_settings(self.fit)),
            "assumed": list(observed.assumed),
            "fitted": list(self.fit.lines),
            "options": [
                {
                    "name": one.name,
                    "settings": dict(one.settings),
                    "step_s": dict(one.step_s),
                    "gain": dict(one.gain),
                    "lag_mean": one.lag_mean,
                    "error": dict(one.error),
                    "command": self.command(one),
                }
                for one in self.options
            ],
            "impossible": list(self.impossible),
            "changes": [
                {
                    "name": one.name,
                    "settings": dict(one.settings),
                    "gain": one.gain,
                    "note": one.note,
                }
                for one in self.changes
            ],
        }


def advise(
    log: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    seeds: int = 2,
    progress: Callable[[Stage], None] = lambda _: None,
) -> Advice:
    """Predict what other schedules would give on the GPUs of a logged run.

    Args:
        log: the object that `areal-lab import --json` prints.
        overrides: settings of `simulate`, `a.b=c` each; `gpus=16xH100` gives number and type.
        seeds: simulated runs of each option, unless `overrides` have them.
        progress: called before each simulation.

    Raises:
        ValueError: as `observe`; or none of the schedules can run.
    """
    observed = observe(log, overrides)
    seeds = int(observed.own.get("seeds", seeds))
    schedules = _schedules(observed)
    total = len(schedules) * (_USUALLY_SCREENED + _FINALISTS) + 4
    done = 0

    def note(what: str) -> None:
        nonlocal done
        progress(Stage(done, total, what))
        done += 1

    note("the logged run")
    fit = fit_step(observed, seeds=seeds)
    options: list[tuple[Option, Replicated, SimulationConfig]] = []
    impossible: list[str] = []
    near = fit.config.cluster.gpus // 2
    for name, settings in schedules.items():
        found = _best_split(name, settings, fit, seeds, note, near=near)
        if isinstance(found, str):
            impossible.append(f"{name}: {found}")
        else:
            options.append(found)
            if settings["cluster.placement"] != "colocated":
                near = found[2].cluster.generating_gpus
    if not options:
        raise ValueError("no other schedule can run on these GPUs:\n  " + "\n  ".join(impossible))
    options.sort(key=lambda one: one[1].step_s.mean)
    changes = _changes(*options[0][1:], note)
    return Advice(
        fit=fit,
        options=tuple(option for option, _, _ in options),
        impossible=tuple(impossible),
        changes=changes,
    )


def _schedules(observed: Observed) -> dict[str, dict[str, Value]]:
    """Settings of each schedule that the logged run is compared with, by name."""
    network: dict[str, Value] = {"cluster.placement": "disaggregated", "weights.backend": "nccl"}
    found: dict[str, dict[str, Value]] = {
        "one-step overlap": {"schedule.name": "one_step_overlap", **network},
        **{
            f"asynchronous, eta {eta:g}": {
                "schedule.name": "asynchronous",
                "schedule.eta": eta,
                **network,
            }
            for eta in ETAS
        },
    }
    if observed.asynchronous:
        together: dict[str, Value] = {
            "cluster.placement": "colocated",
            "schedule.name": "synchronous",
        }
        return {"synchronous, colocated": together, **found}
    return found


def _best_split(
    name: str,
    settings: Mapping[str, Value],
    fit: FittedStep,
    seeds: int,
    note: Callable[[str], None],
    *,
    near: int,
) -> tuple[Option, Replicated, SimulationConfig] | str:
    """The option with the best of its splits; why, if none is possible.

    `near` is a number of GPUs that generate, near which the best is looked for first.
    """
    splits: list[dict[str, Value]] = [{}]
    if settings["cluster.placement"] != "colocated":
        splits = [{"cluster.rollout_gpus": one} for one in _splits(fit.config)]
    possible: list[dict[str, Value]] = []
    reason = "the GPUs cannot be split between engines and trainer"
    for split in splits:
        if wrong := problems(_config(fit, {**settings, **split, **_SCREENED})):
            reason = wrong[0].message
        else:
            possible.append(split)
    if not possible:
        return reason

    def screened_s(at: int) -> float:
        note(name)
        config = _config(fit, {**settings, **possible[at], **_SCREENED})
        return replicate(config, processes=1).step_s.mean

    generating = [int(split.get("cluster.rollout_gpus", 0)) for split in possible]
    start = min(range(len(possible)), key=lambda at: abs(generating[at] - near))
    fastest = _fastest(screened_s, len(possible), start) if len(possible) > 1 else [0]
    finalists: list[tuple[Replicated, SimulationConfig, dict[str, Value]]] = []
    for at in fastest[:_FINALISTS]:
        note(name)
        chosen: dict[str, Value] = {**settings, **possible[at], **_filled(settings), "seeds": seeds}
        config = _config(fit, chosen)
        finalists.append((replicate(config, processes=1), config, chosen))
    run, config, chosen = min(finalists, key=lambda one: one[0].step_s.mean)
    return _option(name, chosen, run, config, fit), run, config


def _fastest(seconds: Callable[[int], float], count: int, start: int) -> list[int]:
    """The fastest split first, then its rivals, of those that a walk downhill has tried.

    More engines make generation faster and training slower, and the slower of the two is the step:
    over the splits it falls, then rises. So the walk ends where both neighbors are slower.

    Args:
        seconds: of a split, by its place among the `count` splits.
        start: place where the walk begins.
    """
    tried: dict[int, float] = {}
    at = start
    while True:
        for one in (at, at - 1, at + 1):
            if 0 <= one < count and one not in tried:
                tried[one] = seconds(one)
        order = sorted(tried, key=lambda one: (tried[one], one))
        if order[0] == at:
            return [one for one in order if tried[one] < _RIVAL * tried[at]]
        at = order[0]


def _splits(config: SimulationConfig) -> list[int]:
    """GPUs that generate, of each share that engines and trainer can divide; each once."""
    trainer = config.trainer
    ways = trainer.tensor_parallel * trainer.pipeline_parallel
    ways *= trainer.context_parallel * trainer.sequence_parallel
    found = (
        nearest_split(config.cluster.gpus, share, config.rollout.tensor_parallel, ways)
        for share in _SHARES
    )
    return sorted({one for one in found if one is not None})


def _filled(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Steps until the pipeline is full, and those that count."""
    eta = float(settings.get("schedule.eta", 1.0))
    warmup = math.ceil(2 + eta)
    return {"workload.warmup_steps": warmup, "workload.steps": warmup + _AFTER_WARMUP}


def _option(
    name: str,
    settings: Mapping[str, Value],
    run: Replicated,
    config: SimulationConfig,
    fit: FittedStep,
) -> Option:
    what, known = change_of(fit.config, config, measured_errors())
    gains = fit.run.ratios(run, lambda result: result.step_s)
    gain = prediction(gains, known.error)
    logged_s = fit.observed.step_s
    step = {
        "mean": logged_s / gain.value,
        "low": logged_s / gain.high,
        "high": logged_s / gain.low if gain.low else None,
    }
    lags = [mean_lag(result.token_lags) for result in run.results]
    return Option(
        name=name,
        settings=settings,
        step_s=step,
        gain={"mean": gain.value, "low": gain.low, "high": gain.high},
        lag_mean=math.fsum(lags) / len(lags),
        error=change_record(what, known),
    )


def _changes(
    run: Replicated, config: SimulationConfig, note: Callable[[str], None]
) -> tuple[Change, ...]:
    """What one change each would give beside the best option."""
    answers, rollout = config.workload.answers, config.rollout
    tried: list[tuple[str, dict[str, Value], str]] = [
        (
            "half of the cap on responses",
            {
                "workload.answers.max_tokens": answers.max_tokens // 2,
                "workload.answers.mean_tokens": min(answers.mean_tokens, 0.45 * answers.max_tokens),
            },
            "longer responses are cut off, and learning changes",
        ),
        (
            "twice the prompts of a batch",
            {"workload.prompts_per_batch": 2 * config.workload.prompts_per_batch},
            "half of the updates per sample",
        ),
    ]
    if rollout.engine not in ("vllm-0.14", "sglang-0.5"):
        tried.append(("a newer engine", {"rollout.engine": "vllm-0.14"}, "an upgrade"))
    if rollout.kv_cache_precision != "fp8":
        tried.append(
            ("a KV cache in fp8", {"rollout.kv_cache_precision": "fp8"}, "a larger sampler gap")
        )
    samples = config.workload.prompts_per_batch * config.workload.samples_per_prompt
    found = []
    for name, settings, costs in tried:
        note(name)
        changed = load_simulation(config, settings)
        if problems(changed):
            continue
        ratio = run.ratio(replicate(changed, processes=1), lambda result: result.step_s).mean
        after = changed.workload.prompts_per_batch * changed.workload.samples_per_prompt
        gain = ratio * after / samples
        if gain - 1 >= _LESS_TO_DO:
            found.append(Change(name=name, settings=settings, gain=gain, note=costs))
    return tuple(sorted(found, key=lambda one: -one.gain))


def _config(fit: FittedStep, settings: Mapping[str, Value]) -> SimulationConfig:
    return load_simulation(None, {**_settings(fit), **settings})


def _settings(fit: FittedStep) -> dict[str, Value]:
    return {**fit.observed.settings, **fit.fitted}


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"

"""Calibrate: turn a recorded run, or a CSV of decode steps, into settings of `areal-lab simulate`.

    RUN  --spans, or groups----------> decode, prefill     --+
         --events, spans--> training, weight update, rewards +--> Calibration --> YAML
         --groups--> lengths;  header, config.yaml --> sizes +
    CSV  --> decode

The first training step is excluded, because memory is allocated and kernels are chosen in it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from areal_lab.config.given import given_path, given_texts
from areal_lab.config.record import value_of
from areal_lab.control.events import Interrupt
from areal_lab.host.terminal import printable
from areal_lab.runlog.lags import TrainedBatch
from areal_lab.runlog.read_run import RecordedRun, read_run
from simulator.calibrate.engine import fit_decode, fit_engine
from simulator.calibrate.fit import (
    EnginePoint,
    PartFit,
    csv_points,
    fit_training,
    group_points,
    mean_prompt_tokens,
    span_points,
)
from simulator.calibrate.length_fit import LengthFit
from simulator.calibrate.length_source import LEAST_STEPS, lengths_of_run
from simulator.calibrate.lengths import fit_observed
from simulator.catalogue.models import find_model
from simulator.config.load import ALIASES, load_simulation
from simulator.workload.recorded_run import (
    Value,
    cluster_settings,
    recorded_settings,
    samples_per_prompt,
    scoring_seconds,
    training_points,
    update_seconds,
)

FIRST: Final = frozenset({1})
"""Training steps that fits exclude."""
_SHARED: Final = 0.98
"""Share of prompt tokens computed by the engine above which there is no note."""
_ROUGH: Final = (
    "the log has no counts of the engine's steps: the time of a step is a group's duration divided "
    "by its longest response, including prefill, queue and network; held-out error {error:.0%}"
)
_COMMON: Final = (
    "prompts share a prefix, which the engine computes once: {share:.0%} of their tokens are "
    "prefilled, and prefill_token_s is reduced accordingly; this underestimates prefills after "
    "interruptions, which share less"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Result of a calibration."""

    source: Path
    about: str
    """Description of the source, for reports of simulations that use it."""
    run: RecordedRun | None
    parts: tuple[PartFit, ...]
    lengths: LengthFit | None
    settings: Mapping[str, Value]
    """Settings of `simulator.config.schema` by dotted name, with the user's overrides."""
    notes: tuple[str, ...]
    """Notes for the reader."""


def calibrate_from(
    source: str | Path, overrides: Sequence[str] = (), *, without: Collection[int] = FIRST
) -> Calibration:
    """Fit costs and lengths.

    Args:
        source: a run folder, its events.jsonl, or a CSV file with batch, context and ms.
        overrides: settings `a.b=c` that are copied into the result.
        without: training steps that fits of times exclude. Excluding each further step in turn
            shows how much the result depends on it.

    Raises:
        ValueError: one line: missing file, column or steps, or a value that is not a number.
    """
    source, overrides = given_path(source, "source"), given_texts(overrides, "overrides")
    own = own_settings(overrides)
    if source.suffix.lower() == ".csv":
        return _from_csv(source, own)
    run = read_run(source)
    steps = run.batches
    if len(steps) < LEAST_STEPS:
        raise ValueError(
            f"{source} has {len(steps)} finished training steps, but at least {LEAST_STEPS} are "
            "needed: the first is excluded, a quarter is held out; record a longer run"
        )
    return _from_run(run, steps, own, without)


def _from_csv(source: Path, own: Mapping[str, Value]) -> Calibration:
    points = csv_points(source)
    decode = fit_decode(points, f"rows of {source.name}")
    about = printable(f"fitted to {source.name} ({len(points)} decode steps)")
    return Calibration(
        source=source,
        about=about,
        run=None,
        parts=(decode,),
        lengths=None,
        settings={**decode.settings, **_calibration(about, (decode,)), **own},
        notes=(
            "the file only has decode steps: model, cluster, workload and all other costs are the "
            "simulator's defaults unless set",
        ),
    )


def _from_run(
    run: RecordedRun,
    steps: Sequence[TrainedBatch],
    own: Mapping[str, Value],
    without: Collection[int],
) -> Calibration:
    notes = []
    used = {batch.version for batch in steps} - set(without)
    spans = [point for point in span_points(run) if point.place in used]
    if spans:
        decode, prefill = fit_engine(spans)
        if prefill is None:
            notes.append("too few prefills to fit: the cost model computes them")
    else:
        groups = [point for point in group_points(run) if point.place in used]
        decode = fit_decode(groups, "undisturbed groups")
        prefill = None
        notes.append(_ROUGH.format(error=decode.held_out_error))
    first = _until_disturbed(run)
    prompt_tokens = mean_prompt_tokens([point for point in first if point.alone])
    if prompt_tokens is None:
        notes.append("the log does not contain the length of prompts: set workload.prompt_tokens")
    training = fit_training(
        [point for point in training_points(run) if point.step in used], prompt_tokens or 0.0
    )
    parts = tuple(part for part in (decode, prefill, training) if part is not None)
    lengths = fit_observed(lengths_of_run(run))
    schedule = run.log.header.limits.get("schedule")
    about = printable(f"fitted to the run {run.folder.name} ({len(steps)} steps, {schedule})")
    settings: dict[str, Value] = {
        **_model(run, own),
        **recorded_settings(run),
        **lengths.settings(),
        **cluster_settings(run),
        **_costs(parts),
        **_updates(run),
        **_calibration(about, parts),
    }
    if not spans:
        settings["rollout.prefill_pass_s"] = 0.0  # included in the steps
    if prompt_tokens is not None:
        settings["workload.prompt_tokens"] = round(prompt_tokens)
        share = _computed_share(run, first, prompt_tokens)
        if prefill is not None and share < _SHARED:
            for name in ("rollout.prefill_token_s", "rollout.prefill_pair_s"):
                settings[name] = share * prefill.settings[name]
            notes.append(_COMMON.format(share=share))
    return Calibration(
        source=run.source,
        about=about,
        run=run,
        parts=parts,
        lengths=lengths,
        settings={**settings, **own},
        notes=tuple(notes),
    )


def _model(run: RecordedRun, own: Mapping[str, Value]) -> dict[str, Value]:
    if "model" in own:
        return {}
    name = str(run.settings.get("actor.path", ""))
    try:
        if not name:
            raise ValueError(f"{run.source} has no config.yaml that names its model")
        find_model(name)
    except ValueError as error:
        raise ValueError(f"{error}; set it: model=NAME or model=config.json") from error
    return {"model": name}


def _costs(parts: Sequence[PartFit]) -> dict[str, Value]:
    return {name: value for part in parts for name, value in part.settings.items()}


def _updates(run: RecordedRun) -> dict[str, Value]:
    exports_s = [point.export_s for point in training_points(run)][1:]
    loads_s = update_seconds(run.log)[1:]
    settings: dict[str, Value] = {
        "weights.backend": "disk",
        "weights.poll_s": 0.0,
        "weights.export_s": fmean(exports_s),
        "workload.reward.mean_s": fmean(scoring_seconds(run.log)),
    }
    if loads_s:
        settings["weights.load_s"] = fmean(loads_s)
    return settings


def _calibration(about: str, parts: Sequence[PartFit]) -> dict[str, Value]:
    errors = {f"calibration.{part.name}_error": part.held_out_error for part in parts}
    return {"calibration.source": about, **errors}


def _until_disturbed(run: RecordedRun) -> list[EnginePoint]:
    """Prefills before the first interruption, which only prefill new prompts."""
    interrupts = [record for record in run.log.actions if isinstance(record.action, Interrupt)]
    until_s = min((record.t_s for record in interrupts), default=math.inf)
    return [
        point
        for point in span_points(run)
        if point.prompt_tokens and run.began_s < point.end_s <= until_s
    ]


def _computed_share(run: RecordedRun, first: Sequence[EnginePoint], prompt_tokens: float) -> float:
    """Share of the prompts' tokens (each prompt counts once per group) that the engine computed."""
    if not first:
        return 1.0
    until_s = max(point.end_s for point in first)
    generated = sum(run.began_s < group.generated_s <= until_s for group in run.log.groups)
    last = max(first, key=lambda point: point.end_s)
    read = generated + last.batch / samples_per_prompt(run)  # running groups were prefilled as well
    return min(1.0, sum(point.prompt_tokens for point in first) / (read * prompt_tokens))


def own_settings(overrides: Sequence[str]) -> dict[str, Value]:
    """The user's overrides, by dotted name."""
    config = load_simulation(None, overrides)
    names = [one.partition("=")[0].strip() for one in overrides]
    return {name: value_of(config, name) for name in (ALIASES.get(one, one) for one in names)}

"""A recorded run as a workload: its responses, steps and updates, and settings that repeat it.

Records of the coordinator and of groups suffice, spans add detail. Seconds are since the start of
the run.

Lengths of a recorded run, prompt by prompt: group n of the simulation is group n of the run.

A simulation may start groups that the run did not start or finish: these get the lengths of other
groups, from the first on.

Settings of a simulation that repeat a recorded run: sizes, schedule, engines; no costs.

header of the log, groups, config.yaml --> {"workload.prompts_per_batch": 4, ...}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from areal_lab.config.problem import refusal
from areal_lab.control.events import (
    GroupFiltered,
    GroupId,
    Interrupt,
    PushWeights,
    Train,
    WeightsPushed,
)
from areal_lab.control.limits import SLOTS
from areal_lab.control.routing import least_loaded
from areal_lab.control.schedule import OnNewWeights
from areal_lab.runlog.lags import TrainedBatch
from areal_lab.runlog.read_run import RecordedRun, events_file, read_events
from areal_lab.runlog.records import TRAINER, ActionRecord, EventRecord, Log, Scalar, SpanRecord
from areal_lab.runlog.replay import on_late_of
from simulator.catalogue.gpu import CPU_CORE

EXPORT: Final = "export weights"
_SWITCHES: Final = ("onload", "offload")
"""Moves of the trainer's state between main memory and its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPoint:
    """One training step: its batch, and its duration without the export of weights."""

    step: int
    """Number of the step, from 1."""
    tokens: int
    """Tokens of the responses."""
    samples: int
    seconds: float
    export_s: float
    """Seconds of the export; 0 if the log has no span of it."""


def response_tokens(log: Log) -> dict[GroupId, list[int]]:
    """Tokens of each response, by group; aborted groups are left out."""
    return {
        record.group: [max(1, sum(tokens for _, tokens in sample)) for sample in record.segments]
        for record in log.groups
        if record.segments and "abort" not in record.finish_reasons
    }


def training_points(run: RecordedRun) -> list[TrainingPoint]:
    """Batch and duration of each training step.

    The duration is from the trainer's start to its end, minus the export of the weights, the wait
    for engines that had not yet loaded the previous ones, and changing turns on shared devices.
    """
    spans = [span for span in run.log.spans if span.process == TRAINER]
    return [
        _training_point(batch, [s for s in spans if batch.begun_s <= s.t_s < batch.done_s])
        for batch in run.batches
    ]


def update_seconds(log: Log) -> list[float]:
    """Seconds of each update, from its start until all engines had the weights."""
    begun_s, found = None, []
    for record in log.records:
        match record:
            case ActionRecord(t_s, PushWeights()):
                begun_s = t_s
            case EventRecord(t_s, WeightsPushed()) if begun_s is not None:
                found.append(t_s - begun_s)
                begun_s = None
            case _:
                pass
    return found


def scoring_seconds(log: Log) -> list[float]:
    """Seconds of each group from the end of its last response until all were scored."""
    return [record.end_s - record.generated_s for record in log.groups]


def updates(log: Log) -> Iterator[tuple[float, float]]:
    """Start and end of each weight update: from interruption or push until it was loaded."""
    since_s = None
    for record in log.records:
        match record:
            case ActionRecord(t_s, Interrupt(by_hand=False) | PushWeights()) if since_s is None:
                since_s = t_s
            case EventRecord(t_s, WeightsPushed()) if since_s is not None:
                yield since_s, t_s
                since_s = None
            case _:
                pass


def _training_point(batch: TrainedBatch, spans: list[SpanRecord]) -> TrainingPoint:
    exports = [span for span in spans if span.name == EXPORT]
    # On shared devices: a simulation has seconds of its own for these.
    switches = [span for span in spans if span.cause or span.name in _SWITCHES]
    work = [span for span in spans if span.name != EXPORT and span not in switches]
    work_end_s = max((span.end_s for span in work), default=None)
    export_s, switch_s = (sum(s.end_s - s.t_s for s in of) for of in (exports, switches))
    waited_s = 0.0
    if exports and work_end_s is not None:
        waited_s = max(0.0, exports[0].t_s - work_end_s)
    return TrainingPoint(
        step=batch.version,
        tokens=batch.tokens,
        samples=batch.samples,
        seconds=batch.done_s - batch.begun_s - export_s - waited_s - switch_s,
        export_s=export_s,
    )


class RecordedLengths:
    """Recorded lengths, which are the same for every seed."""

    def __init__(self, tokens: Mapping[GroupId, Sequence[int]], *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._of = {group: [min(one, max_tokens) for one in of] for group, of in tokens.items()}
        self._in_order = [self._of[group] for group in sorted(self._of)]
        if not self._in_order:
            raise ValueError("the run has no group with a response; its lengths cannot be replayed")
        self.samples = len(self._in_order[0])
        """Responses per prompt."""

    def draw(
        self,
        generator: np.random.Generator,  # noqa: ARG002 - unused: nothing is random
        groups: int,
        samples: int,
        *,
        step: float = 0.0,
    ) -> NDArray[np.int64]:
        """[groups, samples] tokens of the groups of a training step."""
        self.check_samples(samples)
        first, known = round(step) * groups, self._in_order
        rows = [
            self._of.get(group, known[group % len(known)]) for group in range(first, first + groups)
        ]
        return np.array(rows, np.int64)

    def check_samples(self, samples: int) -> None:
        """Refuse a number of responses per prompt that differs from the run's."""
        if samples != self.samples:
            raise refusal(
                "workload.samples_per_prompt",
                f"workload.samples_per_prompt is {samples}, but the recorded run has "
                f"{self.samples} responses per prompt; set it to {self.samples}",
            )

    # Part of the protocol; recorded lengths include their drift.
    def mean_tokens(self, step: float = 0.0) -> float:  # noqa: ARG002
        """Mean of all responses."""
        return float(np.mean([one for of in self._in_order for one in of]))

    def capped_share(self, step: float = 0.0) -> float:  # noqa: ARG002 - as above
        """Share of the responses that have the largest allowed length."""
        return float(np.mean([one >= self._max_tokens for of in self._in_order for one in of]))


def recorded_lengths(source: str, *, max_tokens: int) -> RecordedLengths:
    """Lengths of the run in a folder or an events.jsonl file."""
    if not source:
        raise ValueError(
            "workload.answers.trace is empty; for kind: recorded, set it to a run folder"
        )
    file = events_file(Path(source))
    return _read(file, file.stat().st_mtime_ns, max_tokens)


@lru_cache(maxsize=4)
def _read(file: Path, changed_ns: int, max_tokens: int) -> RecordedLengths:  # noqa: ARG001
    """Read a log once, although every check of a config needs it; `changed_ns` expires old ones."""
    return RecordedLengths(response_tokens(read_events(file)), max_tokens=max_tokens)


Value: TypeAlias = bool | int | float | str
EMBEDDED = "embedded"
_MOST_FILTERED = 0.99
"""Largest share that a simulation takes."""
_WARM_UP = 5
"""One of this many steps is excluded from averages as warm-up."""


def recorded_settings(run: RecordedRun) -> dict[str, Value]:
    """Settings with which a simulation has the workload and schedule of the run."""
    steps = len(run.batches)
    settings: dict[str, Value] = {
        "workload.prompts_per_batch": int(_limit(run, "batch_groups")),
        "workload.samples_per_prompt": samples_per_prompt(run),
        "workload.minibatches": int(run.settings.get("actor.ppo_n_minibatches") or 1),
        "workload.steps": steps,
        "workload.warmup_steps": max(1, steps // _WARM_UP) if steps > 1 else 0,
        "workload.whole_run": _limit(run, "train_steps") == steps,
        "schedule.name": str(_limit(run, "schedule")),
        "schedule.eta": float(_limit(run, "eta")),
        "schedule.interruptible": _limit(run, "on_new_weights") != OnNewWeights.DRAIN,
        "schedule.batch_order": str(_limit(run, "order")),
        "schedule.on_late": on_late_of(run.log.header.limits),
        "rollout.routing": str(run.log.header.limits.get("routing", least_loaded().name)),
        "schedule.max_concurrent_prompts": int(_limit(run, "max_in_flight")),
        # Older logs do not have it.
        "schedule.slots": SLOTS[int(run.log.header.limits.get("group_slots") or 1) > 1],
    }
    if settings["schedule.batch_order"] == "bounded_lag":
        # 0 would stand for eta; a lag is whole, so that any fraction of a version is 0.
        settings["schedule.max_lag"] = float(_limit(run, "max_lag")) or 0.5
    if settings["schedule.name"] == "bounded_drift":
        # A simulation has no weights w, so that other bounds than that on drift have no effect.
        settings["schedule.eta"] = float(_limit(run, "max_eta"))
        for name in ("max_drift", "min_eta"):
            settings[f"schedule.{name}"] = float(_limit(run, name))
    if filtered := _filtered_share(run):
        settings["workload.equal_rewards_share"] = min(filtered, _MOST_FILTERED)
    running = run.settings.get("rollout.max_running_requests")
    if running:
        settings["rollout.max_running"] = int(running)
    return settings


def cluster_settings(run: RecordedRun) -> dict[str, Value]:
    """One device per engine and one for the trainer; for the embedded engine, CPU cores."""
    engines = max(1, run.engines)
    settings: dict[str, Value] = {"cluster.gpus": engines + 1, "cluster.rollout_gpus": engines}
    if run.settings.get("rollout.backend", EMBEDDED) == EMBEDDED:
        return {"cluster.gpu": CPU_CORE.name, **settings}
    return settings


def samples_per_prompt(run: RecordedRun) -> int:
    """Responses per prompt, in most groups."""
    sizes = Counter(len(tokens) for tokens in response_tokens(run.log).values())
    return sizes.most_common(1)[0][0] if sizes else 1


def _filtered_share(run: RecordedRun) -> float:
    if run.log.header.limits.get("max_filtered") is None:
        return 0.0
    filtered = sum(isinstance(record.event, GroupFiltered) for record in run.log.events)
    trained = sum(
        len(record.action.groups) for record in run.log.actions if isinstance(record.action, Train)
    )
    return filtered / (filtered + trained) if filtered else 0.0


def _limit(run: RecordedRun, name: str) -> bool | int | float | str:
    value: Scalar = run.log.header.limits.get(name)
    if value is None and name == "train_steps":
        return 0  # a run without an end
    if value is None:
        raise ValueError(f"the header of {run.source} has no {name}; the run cannot be replayed")
    return value

"""What a co-simulated run writes and shows: records, a line of metrics per step, measurements.

    Train --> learn --> metrics ... TrainStepDone at t_s --> metrics.jsonl, StepReport

The model learns when a step begins; the line appears when the simulated step ends, with the time.
Times are those of the simulated cluster, so that two runs of one command write the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from areal_lab.control.events import GroupFiltered, RunStarted, Save, TrainStepDone, Version
from areal_lab.host.durable import append_lines
from areal_lab.runlog.alarm_log import AlarmLog
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.held_out import HeldOutReward, append_held_out
from areal_lab.runlog.lags import LoggedLedger
from areal_lab.runlog.records import (
    ActionRecord,
    EventRecord,
    GroupRecord,
    Record,
    RunHeader,
    encode,
)
from areal_lab.shell.step_report import StepReport
from areal_lab.shell.stop import StopSignal
from cosim.policy import HeldOut, Policy
from cosim.sampler import Row

_HOUR_S = 3600.0


class Stopped(Exception):
    """A stop was requested, and the running step has ended."""


@dataclass(slots=True, kw_only=True)
class Steps:
    """The files of a run and its progress; see the module docstring."""

    folder: RunFolder
    total_steps: int
    eval_every_steps: int
    save: Callable[[Version], None]
    """Writes a checkpoint of the newest weights."""
    on_step: Callable[[StepReport], None]
    alarms: AlarmLog
    note: Callable[[str], None]
    """Tells the user that an alarm begins or ends."""
    stop: StopSignal
    stopped: bool = False
    """True once `stop` has ended the run before its last step."""
    records: list[Record] = field(default_factory=list)
    measured: list[HeldOut] = field(default_factory=list)
    """Of the first version, and of later ones."""
    pending: dict[str, float] = field(default_factory=dict)
    """Metrics of the step that runs."""
    _eta: float = 0.0
    _began_s: float = 0.0
    _last_s: float = 0.0
    _tokens: int = 0
    """Simulated ones, of groups that ended since the last step."""
    _ledger: LoggedLedger = field(default_factory=LoggedLedger)
    """Of the simulated tokens."""
    _filtered: int = 0
    """Groups that were filtered since the last step."""

    def write(self, record: Record) -> None:
        """Write a record of the log, and what follows from it.

        Raises:
            Stopped: after the record of a step's end.
        """
        if isinstance(record, RunHeader):
            record = RunHeader(
                mode="cosim",
                started_at=0.0,
                limits=record.limits,
                processes=record.processes,
            )
            # The largest one of a schedule that sets it.
            self._eta = float(str(record.limits.get("max_eta", record.limits["eta"])))
        self.records.append(record)
        self._ledger.add(record)
        append_lines(self.folder.events, encode(record) + "\n")
        match record:
            case EventRecord(t_s, RunStarted()):
                self._began_s = self._last_s = t_s
            case EventRecord(_, GroupFiltered()):
                self._filtered += 1
            case EventRecord(t_s, TrainStepDone(version)):
                self._report(version, t_s)
            case ActionRecord(action=Save(version)):
                self.save(version)
            case GroupRecord():
                self._tokens += sum(n for sample in record.segments for _, n in sample)
            case _:
                pass

    def learn(self, policy: Policy, groups: Sequence[Sequence[Row]]) -> None:
        """Let the policy learn from scored groups, and measure it if it is time."""
        self.pending = policy.learn(groups)
        every = self.eval_every_steps
        if (every and policy.version % every == 0) or policy.version == self.total_steps:
            self.measure(policy)

    def measure(self, policy: Policy) -> None:
        """Measure the newest weights on held-out problems."""
        found = policy.measure()
        if found is not None:
            self.measured.append(found)
            if found.version == 0:  # later ones are in the metrics of their step
                append_held_out(
                    self.folder.path, HeldOutReward(found.problem_means).measured(found.version)
                )
            self.pending["held_out_reward"] = found.mean

    def _report(self, version: Version, t_s: float) -> None:
        metrics = {**self.pending, "filtered_groups": float(self._filtered)}
        metrics |= self._ledger.metrics
        self.pending, self._filtered = {}, 0
        time_s, step_s = t_s - self._began_s, t_s - self._last_s
        tokens, self._tokens, self._last_s = self._tokens, 0, t_s
        report = StepReport.of(
            version,
            metrics,
            total_steps=self.total_steps,
            time_s=time_s,
            step_s=step_s,
            tokens=tokens,
        )
        self.folder.append_metrics({**report.line, "simulated_hours": report.time_s / _HOUR_S})
        self.on_step(report)
        for text in self.alarms.add(report.step, report.time_s, metrics, self._eta):
            self.note(text)
        if self.stop.requested and version < self.total_steps:
            self.stopped = True
            raise Stopped

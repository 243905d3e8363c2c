"""Write the event log of a simulated run, in the same records as a real run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from areal_lab.control.events import EngineId, GroupId
from areal_lab.runlog.records import (
    PIPELINE,
    REWARDS,
    TRAINER,
    GroupRecord,
    MetricRecord,
    Mode,
    Record,
    RunHeader,
    Segments,
    SpanRecord,
    engine_process,
)
from areal_lab.runlog.replay import limits_to_fields
from simulator.engine.clock import RecordSpan
from simulator.engine.replica import NOT_WORK
from simulator.run.responses import Scores
from simulator.run.system import System

Write: TypeAlias = Callable[[Record], None]


class Recorder:
    """Makes the records of one run and passes them to `write`."""

    def __init__(self, system: System, write: Write, mode: Mode) -> None:
        self.write = write
        self.end_s: float | None = None
        """End of the run, once it has ended; later spans are cut off there."""
        write(
            RunHeader(
                mode=mode,
                started_at=0.0,
                limits=limits_to_fields(system.limits),
                processes=(TRAINER, *map(engine_process, range(system.engines)), REWARDS),
            )
        )

    def span(self, process: str, name: str, begin_s: float, end_s: float, cause: str = "") -> None:
        """Record what a process did or waited for."""
        if end_s > begin_s:
            self.write(
                SpanRecord(process=process, name=name, t_s=begin_s, end_s=end_s, cause=cause)
            )

    def metric(self, t_s: float, name: str, value: float) -> None:
        """Record a number of the run."""
        self.write(MetricRecord(process=PIPELINE, name=name, t_s=t_s, value=value))

    def of_engine(self, number: EngineId) -> RecordSpan:
        """A callback that records the work of one engine; why it waits follows from the events."""
        process = engine_process(number)

        def record(name: str, start_s: float, end_s: float) -> None:
            if name not in NOT_WORK:
                last_s = end_s if self.end_s is None else min(end_s, self.end_s)
                self.span(process, name, start_s, last_s)

        return record

    def group(
        self,
        group: GroupId,
        engine: EngineId,
        times_s: tuple[float, float, float],
        segments: tuple[Segments, ...],
        scores: Scores,
    ) -> None:
        """Record a group that is scored."""
        start_s, generated_s, end_s = times_s
        self.write(
            GroupRecord(
                group=group,
                engine=engine,
                t_s=start_s,
                generated_s=generated_s,
                end_s=end_s,
                rewards=scores.rewards,
                segments=segments,
                finish_reasons=scores.finish_reasons,
            )
        )

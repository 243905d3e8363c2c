"""Seconds of training steps in the log of a real run."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from areal_lab.runlog.lags import TrainedBatch
from areal_lab.runlog.records import TRAINER, SpanRecord
from simulator.workload.recorded_run import EXPORT, training_points


def test_changing_turns_on_shared_devices_is_not_training() -> None:
    def span(name: str, start_s: float, end_s: float, cause: str = "") -> SpanRecord:
        return SpanRecord(process=TRAINER, name=name, t_s=start_s, end_s=end_s, cause=cause)

    spans = [
        span("engines release memory", 10.0, 12.0, cause="engines release memory"),
        span("onload", 12.0, 15.0),
        span("forward/backward", 15.0, 21.0),
        span("optimizer", 21.0, 22.0),
        # Half a second in which the engines had not loaded the version before.
        span(EXPORT, 22.5, 23.5),
        span("offload", 23.5, 27.5),
    ]
    batch = TrainedBatch(
        version=1, begun_s=10.0, done_s=27.5, groups=(0,), token_lags=Counter({0: 40})
    )
    run: Any = SimpleNamespace(log=SimpleNamespace(spans=spans), batches=[batch])
    (point,) = training_points(run)
    assert (point.seconds, point.export_s) == (7.0, 1.0)

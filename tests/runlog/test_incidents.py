"""What went wrong is counted from the log alone."""

from __future__ import annotations

from areal_lab.control.events import EngineJoined, EngineLost, Event
from areal_lab.runlog.incidents import COUNTED, Incidents, incidents
from areal_lab.runlog.records import PIPELINE, EventRecord, Log, MetricRecord, RunHeader


def log_of(*records: Event | tuple[str, int]) -> Log:
    """Events, and counts that the pipeline noted, in order."""
    made = [
        MetricRecord(process=PIPELINE, name=one[0], t_s=float(at), value=float(one[1]))
        if isinstance(one, tuple)
        else EventRecord(float(at), one)
        for at, one in enumerate(records)
    ]
    header = RunHeader(mode="train", started_at=0.0, limits={}, processes=("trainer",))
    return Log(header, tuple(made))


def test_a_quiet_run_has_none() -> None:
    assert incidents(log_of()) == Incidents()


def test_the_newest_count_of_each_name_holds() -> None:
    noted = [(name, n) for n in (1, 5) for name in COUNTED]
    assert incidents(log_of(*noted, ("interruptions", 9))) == Incidents(**dict.fromkeys(COUNTED, 5))


def test_losses_are_counted_from_events_where_a_run_was_cut_before_it_noted_them() -> None:
    returns, for_good = EngineLost(0, returns=True), EngineLost(0)
    found = incidents(log_of(returns, EngineJoined(0), returns, for_good, EngineLost(1)))
    assert (found.engine_losses, found.engine_restarts) == (3, 1)


def test_incidents_outside_training_count_too() -> None:
    found = incidents(log_of(("engine_losses", 2), EngineLost(0), ("engine_restarts", 1)))
    assert (found.engine_losses, found.engine_restarts) == (2, 1)


def test_an_engine_that_joins_without_a_loss_is_no_return() -> None:
    assert incidents(log_of(EngineJoined(2))).engine_restarts == 0

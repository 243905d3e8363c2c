"""How fast are decisions? Coordinator events and packed sequences, per second and core.

`events_per_s` is the slowest batch order: B = 512 groups, eta = 4, up to 4,096 groups in flight on
32 engines, log-normal generation times. The events of a run are recorded once; what is timed is a
fresh coordinator that handles them all, making every action anew.

`sequences_per_s` is the slowest of the packers, on the cases that `benchmarks.packing` describes.

Seconds are CPU seconds of this one thread: what it would take on a core that does nothing else.
"""

from __future__ import annotations

import time
from heapq import heappop, heappush
from random import Random
from typing import Any

from areal_lab.control.coordinator import Coordinator, Limits
from areal_lab.control.events import (
    Action,
    Event,
    GroupFinished,
    PushWeights,
    RunStarted,
    StartGroup,
    Train,
    TrainStepDone,
    WeightsPushed,
)
from areal_lab.control.order import bounded_lag, oldest_finished_first, strict_start_order
from areal_lab.control.schedule import asynchronous
from benchmarks.harness import parse, repeat, report, spread
from benchmarks.packing import SEQUENCES, measure_packers

BATCH_GROUPS = 512
ETA = 4
ENGINES = 32
TRAIN_S, PUSH_S = 0.2, 0.01
"""Against a median of 1 s for a group: generation and training are about equally fast."""
ORDERS = {
    "oldest_finished_first": oldest_finished_first(),
    "strict_start_order": strict_start_order(),
    "bounded_lag": bounded_lag(ETA),
    "bounded_lag, dropping above 2": bounded_lag(2, drop=True),
}


def run_limits(order: str) -> Limits:
    """The constants of the measured run."""
    return Limits(
        batch_groups=BATCH_GROUPS,
        max_in_flight=8 * BATCH_GROUPS,
        schedule=asynchronous(ETA),
        order=ORDERS[order],
    )


def record(limits: Limits, events: int, *, seed: int = 0) -> list[Event]:
    """The first `events` events of a run in virtual time."""
    random = Random(seed)
    coordinator = Coordinator(limits)
    log: list[Event] = [RunStarted(tuple(range(ENGINES)))]
    coming: list[tuple[float, int, Event]] = []
    now_s, number = 0.0, 0
    while len(log) <= events:
        for action in coordinator.handle(log[-1]):
            answer = _answer(action, random)
            if answer is not None:
                heappush(coming, (now_s + answer[0], number, answer[1]))
                number += 1
        now_s, _, event = heappop(coming)
        log.append(event)
    return log[:events]


def _answer(action: Action, random: Random) -> tuple[float, Event] | None:
    match action:
        case StartGroup(group, _, version):
            return random.lognormvariate(0, 1), GroupFinished(group, version, version)
        case Train(version, _):
            return TRAIN_S, TrainStepDone(version + 1)
        case PushWeights(version):
            return PUSH_S, WeightsPushed(version)
        case _:
            return None


def measure_events(order: str, *, events: int, repeats: int) -> dict[str, Any]:
    """Events a second under one batch order, with the actions they gave."""
    limits = run_limits(order)
    log = record(limits, events)
    actions = 0

    def events_per_s() -> float:
        nonlocal actions
        coordinator = Coordinator(limits)
        begin_s = time.process_time()
        actions = sum([len(coordinator.handle(event)) for event in log])
        return len(log) / (time.process_time() - begin_s)

    rates = spread(repeat(events_per_s, repeats))
    return {"case": order, "events": len(log), "actions": actions, **_rates("events_per_s", rates)}


def packing_rates(*, repeats: int) -> list[dict[str, Any]]:
    """Sequences a second through the packers, on the cases of `benchmarks.packing`."""
    return [
        {
            "case": row["case"],
            "pieces": row["pieces"],
            "sequences_per_s": SEQUENCES / row["seconds"],
            "min": SEQUENCES / row["max"],
            "max": SEQUENCES / row["min"],
        }
        for row in measure_packers(repeats=repeats)
    ]


def _rates(name: str, rates: dict[str, float]) -> dict[str, float]:
    return {name: rates["median"], "min": rates["min"], "max": rates["max"]}


def main() -> None:
    """Measure and report."""
    arguments = parse(__doc__, repeats=7, quick_repeats=3)
    events = 50_000 if arguments.quick else 200_000
    orders = [measure_events(each, events=events, repeats=arguments.repeats) for each in ORDERS]
    packed = packing_rates(repeats=arguments.repeats)
    slowest_order = min(orders, key=lambda row: row["events_per_s"])
    slowest_packer = min(packed, key=lambda row: row["sequences_per_s"])
    report(
        {
            "events_per_s": slowest_order["events_per_s"],
            "sequences_per_s": slowest_packer["sequences_per_s"],
            "seconds_for_100k_sequences": SEQUENCES / slowest_packer["sequences_per_s"],
            "rows": orders + packed,
            "spread": {
                "events_per_s": {k: slowest_order[k] for k in ("min", "max")},
                "sequences_per_s": {k: slowest_packer[k] for k in ("min", "max")},
            },
        },
        arguments,
    )


if __name__ == "__main__":
    main()

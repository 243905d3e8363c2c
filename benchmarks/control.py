"""Speed of decisions: coordinator events and packed sequences per second and core.

`events_per_s` is the slowest batch order: B = 512 groups, eta = 4, up to 4,096 groups in flight on
32 engines, log-normal generation times. The events of a run are recorded once; the benchmark
times a new coordinator that handles all of them and computes every action again.

`sequences_per_s` is the slowest case of packing 100,000 sequences. `dynamic_batches`: Algorithm 1
under a budget of 32,768 tokens; `lower_bound` is the number of micro-batches that the tokens alone
would fill. `balanced_parts`: 64 parts; `max_over_mean` is the tokens of the largest part over those
of an average part, in the least balanced case. Lengths are log-normal (sigma 1), cut at the paper's
27,648 tokens. Mean 1,000 is the workload on which other packers were measured (about 3,050 full
bins); mean 9,277 is the paper's 1.5B model over its run, and opens 25,000 micro-batches.

Seconds are CPU seconds of this one thread: the time on an otherwise idle core.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

from areal_lab.control import events as ev
from areal_lab.control.coordinator import Coordinator, Limits
from areal_lab.control.microbatch import balanced_parts, dynamic_batches
from areal_lab.control.order import bounded_lag, oldest_finished_first, strict_start_order
from areal_lab.control.schedule import asynchronous
from benchmarks.harness import parse, repeat, report, spread

BATCH_GROUPS = 512
ETA = 4
ENGINES = 32
TRAIN_S, PUSH_S = 0.2, 0.01
"""Against a median of 1 s for a group: generation and training are about equally fast."""
ORDERS = {
    "oldest_finished_first": oldest_finished_first(),
    "strict_start_order": strict_start_order(),
    "bounded_lag": bounded_lag(ETA),
    "bounded_lag, dropping above 2": bounded_lag(2, "drop"),
}

SEQUENCES = 100_000
MEAN_TOKENS = (500, 1_000, 2_000, 9_277)
"""Mean response lengths; 9,277 is from Table 1 and Figure 5c of the paper."""
MOST_TOKENS = 27_648
BUDGET_TOKENS = 32_768
PARTS = 64

Packer = Callable[[list[int]], list[list[int]]]

PACKERS: dict[str, Packer] = {
    "dynamic_batches": lambda lengths: dynamic_batches(lengths, max_tokens=BUDGET_TOKENS),
    "balanced_parts": lambda lengths: balanced_parts(lengths, PARTS),
}


def run_limits(order: str) -> Limits:
    """Limits of the measured run."""
    return Limits(
        batch_groups=BATCH_GROUPS,
        max_in_flight=8 * BATCH_GROUPS,
        schedule=asynchronous(ETA),
        order=ORDERS[order],
    )


def record(limits: Limits, events: int, *, seed: int = 0) -> list[ev.Event]:
    """The first `events` events of a run in virtual time."""
    random = Random(seed)
    coordinator = Coordinator(limits)
    log: list[ev.Event] = [ev.RunStarted(tuple(range(ENGINES)))]
    coming: list[tuple[float, int, ev.Event]] = []
    now_s, number = 0.0, 0
    while len(log) <= events:
        for action in coordinator.handle(log[-1]):
            outcome = _outcome(action, random)
            if outcome is not None:
                heappush(coming, (now_s + outcome[0], number, outcome[1]))
                number += 1
        now_s, _, event = heappop(coming)
        log.append(event)
    return log[:events]


def _outcome(action: ev.Action, random: Random) -> tuple[float, ev.Event] | None:
    match action:
        case ev.StartGroup(group, _, version):
            return random.lognormvariate(0, 1), ev.GroupFinished(group, version, version)
        case ev.Train(version, _):
            return TRAIN_S, ev.TrainStepDone(version + 1)
        case ev.PushWeights(version):
            return PUSH_S, ev.WeightsPushed(version)
        case _:
            return None


def measure_events(order: str, *, events: int, repeats: int) -> dict[str, Any]:
    """Events per second under one batch order, with the number of actions."""
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


def draw_lengths(mean: int, *, sequences: int = SEQUENCES, seed: int = 0) -> list[int]:
    """Log-normal lengths with about this mean before the cut."""
    random = Random(seed)
    # exp of a normal variable with mean -1/2 and deviation 1 has mean 1
    factors = [random.lognormvariate(-0.5, 1) for _ in range(sequences)]
    return [min(MOST_TOKENS, int(mean * factor) + 1) for factor in factors]


def measure_packer(name: str, mean_tokens: int, *, repeats: int) -> dict[str, Any]:
    """Sequences per second of one packer on one mix of lengths, and how well it packs."""
    pack, lengths = PACKERS[name], draw_lengths(mean_tokens)
    pieces: list[list[int]] = []

    def sequences_per_s() -> float:
        nonlocal pieces
        begin_s = time.process_time()
        pieces = pack(lengths)
        return len(lengths) / (time.process_time() - begin_s)

    rates = spread(repeat(sequences_per_s, repeats))
    tokens = [sum(lengths[item] for item in piece) for piece in pieces]
    row = {
        "case": f"{name}, mean {mean_tokens} tokens",
        "pieces": len(pieces),
        **_rates("sequences_per_s", rates),
    }
    if name == "dynamic_batches":
        return {**row, "lower_bound": math.ceil(sum(tokens) / BUDGET_TOKENS)}
    return {**row, "max_over_mean": max(tokens) * len(pieces) / sum(tokens)}


def _rates(name: str, rates: dict[str, float]) -> dict[str, float]:
    return {name: rates["median"], "min": rates["min"], "max": rates["max"]}


def main() -> None:
    """Measure and report."""
    arguments = parse(__doc__, repeats=7, quick_repeats=3)
    events = 50_000 if arguments.quick else 200_000
    orders = [measure_events(each, events=events, repeats=arguments.repeats) for each in ORDERS]
    packed = [
        measure_packer(name, mean, repeats=arguments.repeats)
        for name in PACKERS
        for mean in MEAN_TOKENS
    ]
    slowest_order = min(orders, key=lambda row: row["events_per_s"])
    slowest_packer = min(packed, key=lambda row: row["sequences_per_s"])
    report(
        {
            "events_per_s": slowest_order["events_per_s"],
            "sequences_per_s": slowest_packer["sequences_per_s"],
            "seconds_for_100k_sequences": SEQUENCES / slowest_packer["sequences_per_s"],
            "max_over_mean": max(row.get("max_over_mean", 1.0) for row in packed),
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

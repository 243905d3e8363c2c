"""How long does it take to cut 100,000 sequences into micro-batches and into balanced parts?

`dynamic_batches`: Algorithm 1 under a budget of 32,768 tokens; `lower_bound` is the number of
micro-batches that the tokens alone would fill. `balanced_parts`: 64 parts, `max_over_mean` tokens.

Lengths are log-normal (sigma 1), cut at the paper's 27,648 tokens. Mean 1,000 is the workload on
which other packers were measured (about 3,050 full bins); mean 9,277 is the paper's 1.5B model over
its run, and opens 25,000 micro-batches.

Seconds are CPU seconds of this one thread. `seconds` is that of the slower packer at mean 1,000,
`slowest_seconds` that of the slowest case of all, `max_over_mean` that of the least balanced one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from random import Random
from typing import Any

from areal_lab.control.microbatch import balanced_parts, dynamic_batches
from benchmarks.harness import parse, repeat, report, spread

SEQUENCES = 100_000
MEAN_TOKENS = (500, 1_000, 2_000, 9_277)
"""9,277 from Table 1 and Figure 5c of the paper."""
MOST_TOKENS = 27_648
BUDGET_TOKENS = 32_768
PARTS = 64
REFERENCE_TOKENS = 1_000
"""Mean of the mix that `seconds` is about."""

Packer = Callable[[list[int]], list[list[int]]]

PACKERS: dict[str, Packer] = {
    "dynamic_batches": lambda lengths: dynamic_batches(lengths, max_tokens=BUDGET_TOKENS),
    "balanced_parts": lambda lengths: balanced_parts(lengths, PARTS),
}


def draw_lengths(mean: int, *, sequences: int = SEQUENCES, seed: int = 0) -> list[int]:
    """Log-normal lengths of about that mean, before they are cut."""
    random = Random(seed)
    # exp of a normal variable with mean -1/2 and deviation 1 has mean 1
    factors = [random.lognormvariate(-0.5, 1) for _ in range(sequences)]
    return [min(MOST_TOKENS, int(mean * factor) + 1) for factor in factors]


def measure_packer(name: str, lengths: list[int], *, mean: int, repeats: int) -> dict[str, Any]:
    """Seconds of one packer on one mix of lengths, and how well it packs."""
    pack = PACKERS[name]
    pieces: list[list[int]] = []

    def seconds() -> float:
        nonlocal pieces
        begin_s = time.process_time()
        pieces = pack(lengths)
        return time.process_time() - begin_s

    timed = spread(repeat(seconds, repeats))
    tokens = [sum(lengths[item] for item in piece) for piece in pieces]
    row = {
        "case": f"{name}, mean {mean} tokens",
        "mean_tokens": mean,
        "seconds": timed["median"],
        "min": timed["min"],
        "max": timed["max"],
        "pieces": len(pieces),
    }
    if name == "dynamic_batches":
        return {**row, "lower_bound": math.ceil(sum(tokens) / BUDGET_TOKENS)}
    return {**row, "max_over_mean": max(tokens) * len(pieces) / sum(tokens)}


def measure_packers(*, repeats: int) -> list[dict[str, Any]]:
    """Every packer on every mix."""
    return [
        measure_packer(name, draw_lengths(mean), mean=mean, repeats=repeats)
        for name in PACKERS
        for mean in MEAN_TOKENS
    ]


def main() -> None:
    """Measure and report."""
    arguments = parse(__doc__, repeats=9, quick_repeats=3)
    rows = measure_packers(repeats=arguments.repeats)
    reference = [row for row in rows if row["mean_tokens"] == REFERENCE_TOKENS]
    slower = max(reference, key=lambda row: row["seconds"])
    slowest = max(rows, key=lambda row: row["seconds"])
    report(
        {
            "seconds": slower["seconds"],
            "slowest_seconds": slowest["seconds"],
            "max_over_mean": max(row.get("max_over_mean", 1.0) for row in rows),
            "sequences": SEQUENCES,
            "rows": rows,
            "spread": {
                "seconds": {k: slower[k] for k in ("min", "max")},
                "slowest_seconds": {k: slowest[k] for k in ("min", "max")},
            },
        },
        arguments,
    )


if __name__ == "__main__":
    main()

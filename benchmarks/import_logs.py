"""Reading logs of other frameworks: megabytes a second of one core, and peak memory.

console_mb_per_s    console text as runs write it: server and progress lines, and a record of 2 kB
                    after each megabyte
dense_mb_per_s      records only: verl's lines
json_mb_per_s       records only: lines of JSON, as verl's file logger writes them
compressed_mb_per_s the console text in gzip, counted unpacked
wrapped_mb_per_s    the console text as a terminal of 120 columns wraps it
peak_mb             largest growth of memory while the console text is read

python -m benchmarks.import_logs --json [--quick] [--megabytes 1000]
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from areal_lab.foreign.read import read_run
from benchmarks.harness import parse, report, spread

MEGABYTE: Final = 1_000_000
_NOISE: Final = (
    "(vLLMHttpServer pid={0}) INFO 05-01 12:00:{1:02d} [loggers.py:116] Engine 000: Avg prompt "
    "throughput: {0}.5 tokens/s, Avg generation throughput: 3123.4 tokens/s, Running: 120 reqs\n"
    "(WorkerDict pid={0}) [Gloo] Rank {1} is connected to {1} peer ranks. Expected: 7\n"
    "(raylet) Warning: worker {0} uses 91.2 GB of memory\n"
    "Training Progress:  {1}%|#####     | {1}/100 [10:{1:02d}<8:15:00, 301.2s/it]\n"
)
_RECORD: Final = (
    "(TaskRunner pid=7) step:{0} - actor/entropy:0.37 - actor/pg_clipfrac:np.float64(0.0024) - "
    "critic/score/mean:0.328125 - response_length/mean:2011.25 - response_length/max:8192.0 - "
    "response_length/clip_ratio:0.0625 - prompt_length/mean:183.5 - timing_s/gen:151.07 - "
    "timing_s/old_log_prob:21.7 - timing_s/update_actor:90.0 - timing_s/step:319.77 - {1}"
    "perf/total_num_tokens:2247424 - perf/time_per_step:319.77 - perf/throughput:439.2657222\n"
)


def console(megabytes: int) -> Iterator[bytes]:
    """Console text in pieces of a megabyte."""
    for step in range(1, megabytes + 1):
        noise = "".join(_NOISE.format(1000 + one, one % 60) for one in range(60)).encode()
        yield (noise * (MEGABYTE // len(noise) + 1))[: MEGABYTE - 2000] + b"\n" + _record(step)


def _record(step: int) -> bytes:
    more = "".join(f"timing_s/agent_loop/part{one}/mean:{one}.25 - " for one in range(40))
    return _RECORD.format(step, more).encode()


def json_line(step: int) -> bytes:
    """A record with numbers of all digits, which no other has."""
    values = {f"timing_s/agent_loop/part{one}/mean": one + step / 7 for one in range(40)}
    values |= {"critic/score/mean": step / 11, "timing_s/step": 300 + step / 13}
    return json.dumps({"step": step, "data": values}).encode() + b"\n"


class _Stream(io.RawIOBase):
    """A file made while it is read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def read(self, size: int = -1) -> bytes:
        """Return the next piece, whatever the size."""
        assert size != 0
        return next(self._pieces, b"")


def rate(content: bytes, *, megabytes: float) -> float:
    """Megabytes a CPU second."""
    began = time.process_time()
    found = read_run([Path("-")], stdin=io.BytesIO(content))
    seconds = time.process_time() - began
    assert len(found.steps) > 0
    return megabytes / seconds


def peak_growth_mb(megabytes: int) -> float:
    """Growth of the largest resident memory while a log is read that is never held whole."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = read_run([Path("-")], stdin=_Stream(console(megabytes)))  # type: ignore[arg-type]  # it reads, which is all that is needed
    assert len(found.steps) == megabytes
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000


def wrapped(content: bytes, width: int = 120) -> bytes:
    """The text as a terminal shows it."""
    return b"\n".join(
        line[at : at + width]
        for line in content.split(b"\n")
        for at in range(0, max(1, len(line)), width)
    )


def main() -> None:
    """Measure and report."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--megabytes", type=int, default=0, help="size of the streamed log")

    arguments = parse(__doc__, repeats=5, quick_repeats=1, add_own=add)
    size = 16 if arguments.quick else 200
    streamed = arguments.own.megabytes or (32 if arguments.quick else 1000)
    peak = peak_growth_mb(streamed)
    text = b"".join(console(size))
    dense = b"".join(_record(step) for step in range(1, 2000 if arguments.quick else 10_000))
    lines = b"".join(json_line(step) for step in range(1, 2000 if arguments.quick else 10_000))
    packed, narrow = gzip.compress(text, 1), wrapped(text)
    cases = {
        "console_mb_per_s": (text, len(text)),
        "dense_mb_per_s": (dense, len(dense)),
        "json_mb_per_s": (lines, len(lines)),
        "compressed_mb_per_s": (packed, len(text)),
        "wrapped_mb_per_s": (narrow, len(narrow)),
    }
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(arguments.repeats):
        for name, (content, count) in cases.items():
            rates[name].append(rate(content, megabytes=count / MEGABYTE))
    report(
        {
            **{name: sorted(values)[len(values) // 2] for name, values in rates.items()},
            "peak_mb": peak,
            "streamed_mb": streamed,
            "spread": {name: spread(values) for name, values in rates.items()},
        },
        arguments,
    )


if __name__ == "__main__":
    main()

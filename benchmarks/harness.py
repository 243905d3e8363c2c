"""Shared code of the benchmarks: arguments, machine, repeats and reports.

    arguments = parse(__doc__)                    # call it first: it records the load average
    ...measure arguments.repeats times, less if arguments.quick...
    report({"events_per_s": 3e5, "rows": rows, "spread": {...}}, arguments)

Without `--json` it prints a table. With it the last line is one JSON object: the figures by name
and `machine`, `command`, `date`, `repeats`, `quick`, `spread`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from areal_lab.host.machine import processor_name

Figures = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Parsed command line of a benchmark."""

    json: bool
    quick: bool
    """Whether to run a quick form of up to 30 seconds, which is a test and not a measurement."""
    repeats: int
    command: str
    started: datetime
    load_average: tuple[float, float, float]
    """Load average over 1, 5 and 15 minutes before the start: whether the machine was idle."""
    own: argparse.Namespace = field(default_factory=argparse.Namespace)
    """All parsed arguments, including the benchmark's own."""


def parse(
    description: str | None,
    *,
    repeats: int = 5,
    quick_repeats: int = 2,
    argv: Sequence[str] | None = None,
    add_own: Callable[[argparse.ArgumentParser], None] = lambda _: None,
) -> Arguments:
    """Read the command line; `repeats` and `quick_repeats` are the defaults of `--repeats`.

    Args:
        add_own: adds arguments that only this benchmark has.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="a quick form of up to 30 seconds")
    parser.add_argument(
        "--repeats",
        type=_positive,
        metavar="N",
        help=f"measurements of each case (default {repeats}, with --quick {quick_repeats})",
    )
    add_own(parser)
    chosen = parser.parse_args(argv)
    return Arguments(
        json=chosen.json,
        quick=chosen.quick,
        repeats=chosen.repeats or (quick_repeats if chosen.quick else repeats),
        command=_command(argv),
        started=datetime.now(UTC),
        load_average=os.getloadavg(),
        own=chosen,
    )


def machine(arguments: Arguments) -> dict[str, Any]:
    """Facts about the machine; the torch version only if torch is loaded."""
    torch = sys.modules.get("torch")
    return {
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average_at_start": list(arguments.load_average),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": None if torch is None else torch.__version__,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest of repeated measurements."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def repeat(measure: Callable[[], float], repeats: int) -> list[float]:
    """`repeats` measurements after a discarded warm-up."""
    measure()
    return [measure() for _ in range(repeats)]


def report(figures: Figures, arguments: Arguments) -> None:
    """Print the figures; `rows` (a list of flat records) becomes a table without `--json`."""
    if not arguments.json:
        print(_as_table(figures, arguments))
        return
    print(json.dumps(recorded(figures, arguments), allow_nan=False), flush=True)


def recorded(figures: Figures, arguments: Arguments) -> dict[str, Any]:
    """The figures with machine, command, date and repeats, without infinities."""
    record = {
        **figures,
        "spread": figures.get("spread", {}),
        "repeats": figures.get("repeats", arguments.repeats),
        "quick": arguments.quick,
        "machine": machine(arguments),
        "command": arguments.command,
        "date": arguments.started.isoformat(timespec="seconds"),
        "wall_s": round((datetime.now(UTC) - arguments.started).total_seconds(), 1),
    }
    return dict(_plain(record))


def table(rows: Sequence[Figures]) -> str:
    """A table with column names; numbers are right-aligned."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name, "")) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    numeric = [all(_is_number(row.get(name, 0)) for row in rows) for name in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in (columns, *cells)
    ]
    return "\n".join(lines)


def _as_table(figures: Figures, arguments: Arguments) -> str:
    parts = []
    if arguments.quick:
        parts.append("--quick: shows that the benchmark runs; do not quote its figures.")
    if figures.get("rows"):
        parts.append(table(figures["rows"]))
    simple = {k: v for k, v in figures.items() if not isinstance(v, (list, tuple, dict))}
    if simple:
        width = max(map(len, simple))
        parts.append("\n".join(f"{k.ljust(width)}  {_cell(v)}" for k, v in simple.items()))
    here = machine(arguments)
    load = arguments.load_average[0]
    repeats = figures.get("repeats", arguments.repeats)
    parts.append(
        f"{here['cpu']}, {here['cores']} cores (load {load:.1f} at the start), "
        f"Python {here['python']}; median of {repeats} repeats where a figure has a spread"
    )
    return "\n\n".join(parts)


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """Replace infinity and NaN, which JSON lacks, by their names."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer >= 1")
    return number


def _command(argv: Sequence[str] | None) -> str:
    specification = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", specification.name] if specification else [sys.argv[0]]
    return shlex.join(["python", *program, *(sys.argv[1:] if argv is None else argv)])

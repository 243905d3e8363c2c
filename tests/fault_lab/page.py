"""Write the tables of `docs/reliability.md` from the measurements of the fault tests.

python -m pytest -m "sglang or not sglang" tests/real_engines/test_faults.py \\
    -o junit_family=xunit1 --junitxml=faults.xml
python -m pytest -m "slow or not slow" tests/pipeline/test_part_faults.py \\
    -o junit_family=xunit1 --junitxml=parts.xml
python -m pytest -m cluster tests/cluster/host_faults \\
    -o junit_family=xunit1 --junitxml=hosts.xml
python -m tests.fault_lab.page faults.xml parts.xml hosts.xml

A table of which the reports have nothing stays as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from areal_lab.host.machine import processor_name
from tests.fault_lab.faults import RUNS, Fault
from tests.fault_lab.hosts.faults import HOST_FAULTS, HostFault
from tests.fault_lab.lab import timings_of
from tests.fault_lab.parts import PART_FAULTS, PartFault

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: begin -->\n", "<!-- faults: end -->\n"
PARTS_BEGIN, PARTS_END = "<!-- parts: begin -->\n", "<!-- parts: end -->\n"
HOSTS_BEGIN, HOSTS_END = "<!-- hosts: begin -->\n", "<!-- hosts: end -->\n"
ENGINES = {"embedded": "embedded", "sglang": "SGLang", "vllm": "vLLM"}
FAULTS: tuple[Fault, ...] = tuple(fault for faults in RUNS.values() for fault in faults)
SEEN = "seconds seen: "
"""Prefix of the property in which a test records a fault's seconds."""

COUNTED = "counted: "
"""Prefix of the property in which a test records what a run counted of a fault."""
PARTS_HEAD = ("part", "what happens to it", "the run", "counted in `summary.json`")

OF_A_HOST = "of a host: "
"""Prefix of the property in which a test records what it measured of a host's fault."""
HOSTS_HEAD = (
    *("part", "what happens to its host", "when", "the run"),
    *("seen after", "gone after", "counted in `summary.json`"),
)

Seen = dict[tuple[str, str], float]
"""Seconds by engine and name of the fault."""


def main(reports: list[str]) -> None:
    """Read the reports of test runs, and write the tables."""
    roots = [ElementTree.parse(report).getroot() for report in reports]
    tests = [test for root in roots for test in root.iter("testcase")]
    broken = [one.get("name") for one in tests if {"failure", "error"} & {x.tag for x in one}]
    if broken or not tests:
        sys.exit(f"{', '.join(reports)}: {broken or 'no test'} failed; the page needs passed tests")
    seen = {key: seconds for test in tests for key, seconds in recorded(test).items()}
    if seen:
        replace(BEGIN, END, f"{caption(roots)}{table(seen)}")
    if counts := with_prefix(COUNTED, tests):
        replace(PARTS_BEGIN, PARTS_END, parts_table(counts))
    if measured := with_prefix(OF_A_HOST, tests):
        replace(HOSTS_BEGIN, HOSTS_END, f"{caption(roots)}{hosts_table(measured)}")


def caption(roots: Sequence[ElementTree.Element]) -> str:
    """When and where tests ran."""
    days = {(one.get("timestamp") or "")[:10] for r in roots for one in r.iter("testsuite")}
    where = f"{processor_name()}, {len(os.sched_getaffinity(0))} cores"
    return f"{' and '.join(sorted(days))}, {where}, a tiny model.\n\n"


def with_prefix(prefix: str, tests: Sequence[ElementTree.Element]) -> dict[str, str]:
    """What tests recorded under names of this prefix."""
    return {
        name.removeprefix(prefix): value
        for test in tests
        for name, value in properties_of(test).items()
        if name.startswith(prefix)
    }


def replace(begin: str, end: str, text: str) -> None:
    """Put a text between two marks of the page."""
    before, rest = PAGE.read_text().split(begin)
    _, after = rest.split(end)
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def properties_of(test: ElementTree.Element) -> dict[str, str]:
    """What a test recorded, by name."""
    return {
        one.get("name") or "": one.get("value") or ""
        for one in test.iterfind("properties/property")
    }


def recorded(test: ElementTree.Element) -> Seen:
    """The measurements that one test recorded."""
    properties = properties_of(test)
    return {
        (properties["engine"], name.removeprefix(SEEN)): float(value)
        for name, value in properties.items()
        if name.startswith(SEEN)
    }


def table(seen: Mapping[tuple[str, str], float]) -> str:
    """One row per fault, one column per engine."""
    head = ["fault", "the run", "seconds from", "bound", *ENGINES.values()]
    rows = [head, ["---"] * len(head)]
    for fault in FAULTS:
        cells = [cell(engine, fault, seen) for engine in ENGINES]
        rows.append([fault.name, fault.outcome, fault.measured, fault.bound, *cells])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def parts_table(counts: Mapping[str, str]) -> str:
    """One row per fault, with what was counted."""
    rows = [PARTS_HEAD, ("---",) * len(PARTS_HEAD)]
    rows += [
        (fault.part, fault.what, fault.outcome, counts.get(fault.name, "not run"))
        for fault in PART_FAULTS
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def hosts_table(measured: Mapping[str, str]) -> str:
    """One row per fault of a host, with what was measured."""
    rows = [HOSTS_HEAD, ("---",) * len(HOSTS_HEAD)]
    for fault in HOST_FAULTS:
        cells = measured.get(fault.name, "not run | not run | not run").split(" | ")
        rows.append((fault.part, fault.blow, fault.moment, fault.outcome, *cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def counts_text(fault: PartFault | HostFault, counts: Mapping[str, int]) -> str:
    """`filtered` 1, `rewards.error` 1."""
    if fault.shown:
        return fault.shown
    return ", ".join(f"`{name}` {count}" for name, count in sorted(counts.items())) or "nothing"


def cell(engine: str, fault: Fault, seen: Mapping[tuple[str, str], float]) -> str:
    """Measured seconds and the bound."""
    if (engine, fault.name) not in seen:
        return "not run"
    bound_s = fault.bound_s(timings_of(engine).health)
    return f"{seen[engine, fault.name]:.1f} of {bound_s:.0f}"


if __name__ == "__main__":
    main(sys.argv[1:])

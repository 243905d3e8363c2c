"""Hosts that are killed, hang, or are cut off, in whole runs (`docs/reliability.md`).

A file for each run, as each takes minutes and `make test-cluster` gives a file to one worker.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.namespaces import network_of_hosts, why_not
from tests.fault_lab.hosts.runs import BUSY_S, SEEN_S, Cause, Faults
from tests.fault_lab.page import OF_A_HOST, counts_text

Record = Callable[[str, object], None]


@pytest.fixture
def cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> Cause:
    """Cause the faults of a run; what it measured is recorded for the page."""
    if why := why_not():
        pytest.skip(why)

    def all_of(run: Faults, machines: int) -> None:
        with network_of_hosts(tmp_path, machines) as network:
            measured = run(network, tmp_path, monkeypatch)
        for fault, seen in measured.items():
            counted = {name: count for name, count in seen.counts.items() if count}
            cells = f"{seen.seen_s:.1f} s | {seen.gone_s:.1f} s | {counts_text(fault, counted)}"
            record_property(f"{OF_A_HOST}{fault.name}", cells)
            assert seen.seen_s < SEEN_S + BUSY_S, fault.name

    return all_of

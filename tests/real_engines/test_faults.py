"""Faults of each engine's server; `docs/reliability.md` has the measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.fault_lab.faults import RUNS, Run, hung_in_a_whole_run
from tests.fault_lab.lab import FaultLab, fault_lab
from tests.fault_lab.page import ENGINES, FAULTS, PAGE, SEEN
from tests.real_engines.conftest import Announce


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.sglang) for name in ENGINES]
)
def closed_lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultLab]:
    with fault_lab(tmp_path_factory.mktemp(f"faults-{request.param}"), request.param) as lab:
        yield lab


@pytest.fixture
def lab(closed_lab: FaultLab, announce: Announce) -> FaultLab:
    """Both servers run."""
    if closed_lab.victim is None and closed_lab.backend != "embedded":
        announce(f"waiting for the {closed_lab.backend} server (logs: {closed_lab.root}) ...\n")
    closed_lab.runner.run(closed_lab.open())
    return closed_lab


@pytest.fixture
def check(lab: FaultLab, record_property: Callable[[str, object], None]) -> Callable[[Run], None]:
    """Cause faults and check their time bounds; the seconds are recorded for the page."""

    def within_bounds(run: Run) -> None:
        seconds = run(lab)
        assert list(seconds) == [fault.name for fault in RUNS[run]]
        record_property("engine", lab.backend)
        for fault in RUNS[run]:
            record_property(f"{SEEN}{fault.name}", f"{seconds[fault.name]:.2f}")
            assert seconds[fault.name] <= fault.bound_s(lab.timings.health)

    return within_bounds


def test_a_whole_run_loses_nothing_with_a_server_that_hangs(check: Callable[[Run], None]) -> None:
    check(hung_in_a_whole_run)


@pytest.mark.parametrize(
    "run", [run for run in RUNS if run is not hung_in_a_whole_run], ids=lambda run: run.__name__
)
def test_nothing_is_lost_or_trained_twice_whatever_happens_to_a_server(
    check: Callable[[Run], None], run: Run
) -> None:
    check(run)


def test_the_page_has_every_fault_and_engine() -> None:
    text = PAGE.read_text().split("## Faults of real servers")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in text.splitlines() if " | " in line]
    assert [row[0] for row in rows if len(row) == 4 + len(ENGINES)] == [
        "| fault",
        "| ---",
        *(f"| {fault.name}" for fault in FAULTS),
    ]

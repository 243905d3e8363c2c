"""Each fault against the embedded engine; `tests/real_engines/test_faults.py` has the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.fault_cases import FAULTS, Fault
from benchmarks.fault_lab import FaultLab, fault_lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultLab]:
    with fault_lab(tmp_path_factory.mktemp("faults"), "embedded") as lab:
        yield lab


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.happen.__name__)
def test_nothing_is_lost_or_trained_twice_whatever_happens_to_a_server(
    lab: FaultLab, fault: Fault
) -> None:
    assert fault.happen(lab) <= fault.bound_s

"""The host of an engine."""

from __future__ import annotations

import pytest

from tests.fault_lab.hosts.of_engines import faults_of_engine_hosts
from tests.fault_lab.hosts.runs import Cause

pytestmark = pytest.mark.cluster


def test_an_engine_whose_host_is_lost_costs_no_sample(cause: Cause) -> None:
    cause(faults_of_engine_hosts, 5)

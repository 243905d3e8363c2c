"""The host of the controller hangs."""

from __future__ import annotations

import pytest

from tests.fault_lab.hosts.faults import Blow
from tests.fault_lab.hosts.of_controllers import cause_in_controllers
from tests.fault_lab.hosts.runs import Cause

pytestmark = pytest.mark.cluster


def test_hosts_end_what_they_run_for_a_controller_that_is_lost(cause: Cause) -> None:
    cause_in_controllers(cause, Blow.HUNG)

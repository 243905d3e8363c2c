"""The host of the trainer."""

from __future__ import annotations

import pytest

from tests.fault_lab.hosts.of_trainers import faults_of_trainer_hosts
from tests.fault_lab.hosts.runs import Cause

pytestmark = pytest.mark.cluster


def test_a_run_whose_trainer_is_lost_with_its_host_continues_elsewhere(cause: Cause) -> None:
    cause(faults_of_trainer_hosts, 3)

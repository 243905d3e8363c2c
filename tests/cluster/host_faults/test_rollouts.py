"""The host of a rollout worker."""

from __future__ import annotations

import pytest

from tests.fault_lab.hosts.of_rollouts import faults_of_rollout_hosts
from tests.fault_lab.hosts.runs import Cause

pytestmark = pytest.mark.cluster


def test_groups_of_a_rollout_worker_whose_host_is_lost_start_again(cause: Cause) -> None:
    cause(faults_of_rollout_hosts, 4)

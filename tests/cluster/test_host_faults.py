"""Hosts that are killed, hang, or are cut off, in whole runs (`docs/reliability.md`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.namespaces import Network, network_of_hosts, why_not
from tests.fault_lab.hosts.faults import CONTROLLER_FAULTS, GATEWAY_FAULTS, Blow
from tests.fault_lab.hosts.of_controllers import faults_of_controller_hosts
from tests.fault_lab.hosts.of_engines import faults_of_engine_hosts
from tests.fault_lab.hosts.of_rollouts import faults_of_rollout_hosts
from tests.fault_lab.hosts.of_trainers import faults_of_trainer_hosts
from tests.fault_lab.hosts.runs import BUSY_S, SEEN_S, Measured
from tests.fault_lab.page import OF_A_HOST, counts_text

pytestmark = pytest.mark.cluster
Record = Callable[[str, object], None]
Cause = Callable[[Callable[[Network, Path, pytest.MonkeyPatch], Measured], int], None]


@pytest.fixture
def cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> Cause:
    """Cause the faults of a run; what it measured is recorded for the page."""
    if why := why_not():
        pytest.skip(why)

    def all_of(run: Callable[[Network, Path, pytest.MonkeyPatch], Measured], machines: int) -> None:
        with network_of_hosts(tmp_path, machines) as network:
            measured = run(network, tmp_path, monkeypatch)
        for fault, seen in measured.items():
            counted = {name: count for name, count in seen.counts.items() if count}
            cells = f"{seen.seen_s:.1f} s | {seen.gone_s:.1f} s | {counts_text(fault, counted)}"
            record_property(f"{OF_A_HOST}{fault.name}", cells)
            assert seen.seen_s < SEEN_S + BUSY_S, fault.name

    return all_of


def test_an_engine_whose_host_is_lost_costs_no_sample(cause: Cause) -> None:
    cause(faults_of_engine_hosts, 5)


def test_a_run_whose_trainer_is_lost_with_its_host_continues_elsewhere(cause: Cause) -> None:
    cause(faults_of_trainer_hosts, 3)


@pytest.mark.parametrize("blow", Blow, ids=lambda blow: blow.name.lower())
def test_hosts_end_what_they_run_for_a_controller_that_is_lost(cause: Cause, blow: Blow) -> None:
    faults = [one for one in (*CONTROLLER_FAULTS, *GATEWAY_FAULTS) if one.blow is blow]
    cause(partial(faults_of_controller_hosts, faults=faults), 3 * len(faults))


def test_groups_of_a_rollout_worker_whose_host_is_lost_start_again(cause: Cause) -> None:
    cause(faults_of_rollout_hosts, 4)

"""Faults of rewards, sandbox, agents and gateway; `docs/reliability.md` has what a run counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault_lab.hosts.faults import HOST_FAULTS, Blow
from tests.fault_lab.page import COUNTED, HOSTS_HEAD, PAGE, PARTS_HEAD, counts_text
from tests.fault_lab.part_runs import (
    Counted,
    agent_hung_while_idle,
    engine_lost_between_tools,
    faults_of_agents,
    faults_of_rewards,
    gateway_goes_deaf,
    run_is_killed,
    worker_hung_while_idle,
)
from tests.fault_lab.parts import PART_FAULTS

PARTS = {fault.part for fault in PART_FAULTS}
Record = Callable[[str, object], None]
Cause = Callable[[Callable[[Path, pytest.MonkeyPatch], Counted]], None]


@pytest.fixture
def cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record) -> Cause:
    """Cause the faults of a run; what it counted is recorded for the page."""

    def all_of(run: Callable[[Path, pytest.MonkeyPatch], Counted]) -> None:
        for fault, counts in run(tmp_path, monkeypatch).items():
            record_property(f"{COUNTED}{fault.name}", counts_text(fault, counts))

    return all_of


def test_a_run_loses_only_what_it_counts_of_rewards(cause: Cause) -> None:
    cause(faults_of_rewards)


def test_a_run_loses_only_what_it_counts_of_agents(cause: Cause) -> None:
    cause(faults_of_agents)


@pytest.mark.slow
def test_an_engine_that_dies_in_a_turn_after_a_tool_costs_nothing(cause: Cause) -> None:
    cause(engine_lost_between_tools)


@pytest.mark.slow
@pytest.mark.parametrize("run", [worker_hung_while_idle, agent_hung_while_idle])
def test_a_process_that_hangs_while_it_is_idle_costs_one_sample(
    cause: Cause, run: Callable[[Path, pytest.MonkeyPatch], Counted]
) -> None:
    cause(run)


@pytest.mark.slow
def test_a_run_whose_agents_cannot_connect_says_so(cause: Cause) -> None:
    cause(gateway_goes_deaf)


@pytest.mark.slow
def test_nothing_stays_behind_when_the_gateway_is_killed_with_its_run(cause: Cause) -> None:
    cause(run_is_killed)


def test_the_page_has_every_fault_of_a_part() -> None:
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines()]
    parts = [tuple(row[:3]) for row in rows if len(row) == len(PARTS_HEAD) and row[0] in PARTS]
    assert parts == [(fault.part, fault.what, fault.outcome) for fault in PART_FAULTS]
    assert not [row for row in rows if len(row) == len(PARTS_HEAD) and row[3] == "not run"]


def test_the_page_has_every_fault_of_a_host() -> None:
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines()]
    hosts = [row for row in rows if len(row) == len(HOSTS_HEAD) and row[1] in set(Blow)]
    wanted = [(fault.part, fault.blow, fault.moment, fault.outcome) for fault in HOST_FAULTS]
    assert [tuple(row[:4]) for row in hosts] == wanted
    assert not [row for row in hosts if "not run" in row]

"""What the run does before there is a Ray driver; needs no Ray."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from areal_lab.cluster.ray.addresses import address_of_agent
from areal_lab.cluster.ray.scheduler import RayScheduler, driver_environment
from areal_lab.cluster.scheduler import Invitation
from areal_lab.config.sections import ClusterConfig, SchedulerConfig
from areal_lab.extras import MissingExtra
from areal_lab.host.processes import inherited_environment


def test_without_ray_the_error_has_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    scheduler = RayScheduler(SchedulerConfig(type="ray"), ClusterConfig(n_nodes=2), tmp_path)
    with pytest.raises(MissingExtra, match=r"scheduler.type=ray .* 'areal_lab\[ray\]'"):
        asyncio.run(scheduler.start(2, Invitation(run="127.0.0.1:1", token="secret")))


def test_the_token_of_the_cluster_reaches_the_driver_and_no_other_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert "RAY_AUTH_TOKEN" not in inherited_environment()
    given = driver_environment("10.0.0.1:6379")
    assert given["RAY_AUTH_TOKEN"] == "secret"
    assert "RAY_AUTH_MODE" not in given  # the cluster has one


def test_a_private_cluster_has_a_token_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    first, second = driver_environment("local"), driver_environment("local")
    assert first["RAY_AUTH_MODE"] == "token"
    assert len({"secret", first["RAY_AUTH_TOKEN"], second["RAY_AUTH_TOKEN"]}) == 3


def test_a_variable_that_the_user_has_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    assert driver_environment("auto")["RAY_USAGE_STATS_ENABLED"] == "0"
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    assert "RAY_USAGE_STATS_ENABLED" not in driver_environment("auto")


@pytest.mark.parametrize(
    ("node", "run", "address"),
    [
        ("127.0.0.1", "127.0.0.1:1", "127.0.0.1"),
        ("127.0.0.1", "localhost:1", "127.0.0.1"),
        ("127.0.0.1", "198.51.100.9:1", ""),  # a head at a loopback address
        ("198.51.100.7", "198.51.100.9:1", ""),  # an address outside of the container
    ],
)
def test_the_address_of_a_node_is_taken_where_an_agent_can_listen_and_be_reached(
    node: str, run: str, address: str
) -> None:
    assert address_of_agent(node, run) == address

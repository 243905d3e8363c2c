"""The same seed gives the same samples and losses on this machine, on Ray and on Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.cluster.ray.lab import lab
from tests.cluster.slurm.toy import toy_slurm, why_not
from tests.cluster.test_runs import EXACT, trained
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import do_run, metrics, tiny_config

pytestmark = pytest.mark.cluster

HOSTS = 3


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """On a path that all emulated nodes share, and that is short enough for sockets."""
    with TemporaryDirectory(prefix="s", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def here(folder: Path) -> Path:
    """The folder of the run on this machine alone."""
    return do_run(tiny_config(folder, *EXACT), reward_fn=even_digits).folder


def check_same(folder: Path, here: Path, *settings: str) -> None:
    """Do the run on hosts, and compare what it trained on and what it learned."""
    on_hosts = (f"cluster.n_nodes={HOSTS}", "cluster.shared_files=never", *settings)
    result = do_run(tiny_config(folder, *EXACT, *on_hosts), reward_fn=even_digits)
    assert trained(result.folder) == trained(here)
    steps: list[dict[str, Any]] = metrics(result.folder)
    for ours, theirs in zip(steps, metrics(here), strict=True):
        for name in ("reward_mean", "loss", "grad_norm"):
            assert ours[name] == theirs[name], name


def test_on_ray(folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(prefix="r", dir="/tmp") as name, lab(Path(name)) as nodes:
        for variable, value in nodes.environment.items():
            monkeypatch.setenv(variable, value)
        for address in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
            nodes.add(address, num_cpus=1)
        check_same(
            folder,
            here,
            "scheduler.type=ray",
            f"scheduler.ray_address={nodes.address}",
            "cluster.address=127.0.0.1",
        )


def test_on_slurm(folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := why_not():
        pytest.skip(why)
    with TemporaryDirectory(prefix="slurm-") as name, toy_slurm(Path(name)) as cluster:
        for variable, value in cluster.environment.items():
            monkeypatch.setenv(variable, value)
        check_same(folder, here, "scheduler.type=slurm", "cluster.address=127.0.0.1")
        assert not cluster.jobs()

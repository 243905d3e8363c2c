"""A Slurm cluster of their own for the tests that ask for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.cluster.slurm.toy import ToySlurm, toy_slurm, why_not


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToySlurm]:
    """Three idle nodes; this process's commands of Slurm are for them."""
    if why := why_not():
        pytest.skip(why)
    # In /tmp: the path of a Unix socket has at most 107 characters.
    with TemporaryDirectory(prefix="slurm-") as folder, toy_slurm(Path(folder)) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        yield cluster
        assert not cluster.jobs(), "a test has left jobs"
        assert not cluster.processes(), "a test has left processes"

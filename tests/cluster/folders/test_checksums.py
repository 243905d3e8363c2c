"""Each file of a folder that is served or mirrored is read once for its checksum."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_lab.cluster.folders import served as module
from areal_lab.cluster.folders.connections import Agent, Connections
from areal_lab.cluster.folders.mirror import folder_url, mirror
from areal_lab.cluster.folders.served import Checksums, Folders
from tests.cluster.folders.agent import running_agent

NAMES = ("config.json", "empty", "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of another host."""
    made = tmp_path_factory.mktemp("host-a")
    for name in NAMES:
        (made / name).write_bytes(b"" if name == "empty" else name.encode())
    return made


@pytest.fixture(scope="module")
def agent(folder: Path) -> Iterator[Agent]:
    with running_agent(folders={"w": str(folder)}) as running:
        yield running.agent


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Inodes of the files that were read for their checksums in this process."""
    read: list[int] = []
    original = module.checksum_of

    def counted(descriptor: int, size_bytes: int) -> str:
        read.append(os.stat(descriptor).st_ino)
        return original(descriptor, size_bytes)

    monkeypatch.setattr(module, "checksum_of", counted)
    return read


def test_each_file_of_a_mirror_is_hashed_once(
    agent: Agent, tmp_path: Path, connections: Connections, hashed: list[int]
) -> None:
    checksums = Checksums()
    for _ in range(3):  # engines of one host
        found = mirror(folder_url(agent, "w"), tmp_path / "v1", connections, checksums=checksums)
    served = Folders(checksums)
    served.register("v1", found.path)
    assert served.listing("v1") == found.listing
    assert len(hashed) == len(set(hashed)) == len(NAMES)
    (found.path / "config.json").write_text("[]")
    assert served.listing("v1") != found.listing
    assert len(hashed) == len(NAMES) + 1


def test_a_file_that_has_arrived_is_hashed_though_one_like_it_may_be_known(
    agent: Agent, tmp_path: Path, connections: Connections
) -> None:
    """The inode of a removed file may be used again, and times are coarse."""
    asked: list[bool] = []

    class Noted(Checksums):
        def of(self, descriptor: int, *, again: bool = False) -> str:
            asked.append(again)
            return Checksums.of(self, descriptor, again=again)

    mirror(folder_url(agent, "w"), tmp_path / "v1", connections, checksums=Noted())
    assert asked == [True] * len(NAMES)


def test_a_file_is_read_again_where_that_is_asked_for(folder: Path, hashed: list[int]) -> None:
    checksums = Checksums()
    with (folder / NAMES[0]).open("rb") as opened:
        found = {checksums.of(opened.fileno(), again=again) for again in (False, True, False)}
    assert len(found) == 1
    assert len(hashed) == 2


def test_a_file_that_got_other_bytes_of_the_same_number_is_hashed_again(tmp_path: Path) -> None:
    file, served = tmp_path / "weights", Folders()
    file.write_bytes(b"old")
    served.register("w", tmp_path)
    before, changed_ns = served.listing("w"), file.stat().st_mtime_ns
    file.write_bytes(b"new")
    os.utime(file, ns=(changed_ns + 1, changed_ns + 1))  # the clock of a file system is coarse
    assert file.stat().st_size == before.size_bytes
    assert served.listing("w") != before


def test_hosts_that_ask_at_the_same_time_have_each_file_hashed_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[int]
) -> None:
    served, hosts = Folders(), 4
    served.register("w", folder)
    asking: set[int] = set()
    all_ask = threading.Event()
    fstat, counted = os.fstat, module.checksum_of

    def looked(descriptor: int) -> os.stat_result:
        asking.add(threading.get_ident())
        if len(asking) == hosts:
            all_ask.set()
        return fstat(descriptor)

    def when_all_ask(descriptor: int, size_bytes: int) -> str:
        assert all_ask.wait(60)
        return counted(descriptor, size_bytes)

    monkeypatch.setattr(module, "checksum_of", when_all_ask)
    monkeypatch.setattr(os, "fstat", looked)
    with ThreadPoolExecutor(hosts) as pool:
        found = list(pool.map(served.listing, ["w"] * hosts))
    assert all(one == found[0] for one in found)
    assert len(hashed) == len(NAMES)


def test_a_checksum_that_could_not_be_read_is_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Folders()
    served.register("w", folder)

    def fails(*_: object) -> str:
        raise OSError("the disk is ill")

    with monkeypatch.context() as ill:
        ill.setattr(module, "checksum_of", fails)
        with pytest.raises(OSError, match="the disk is ill"):
            served.listing("w")
    assert len(served.listing("w").files) == len(NAMES)

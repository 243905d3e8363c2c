"""Folders on hosts: shared ones by their path, others fetched, weights kept in small number."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file

from areal_lab.cluster.files import RunFiles
from areal_lab.engines.keys import authorization
from areal_lab.engines.protocol import EngineError, EngineUnreachable, WeightsFolder
from areal_lab.engines.weights.verify_folder import folder_checksum
from tests.asynchronous import in_loop
from tests.cluster.host_lab import HostLab, host_lab

pytestmark = pytest.mark.cluster


def run_files(lab: HostLab, *, shared: bool) -> RunFiles:
    files = RunFiles(address=f"127.0.0.1:{lab.hosts.port}", token=lab.hosts.token, shared=shared)
    lab.hosts.data_plane = files.app
    return files


def weights(folder: Path, version: int) -> WeightsFolder:
    path = folder / f"v{version:08d}"
    path.mkdir(parents=True)
    save_file({"w": np.full((3, 5), version, np.float32)}, path / "model.safetensors")
    files = [path / "model.safetensors"]
    size = files[0].stat().st_size
    return WeightsFolder(
        path=path, version=version, checksum=folder_checksum(files), size_bytes=size
    )


@in_loop
async def test_hosts_that_share_a_folder_fetch_nothing(tmp_path: Path) -> None:
    async with host_lab(tmp_path / "logs", 2) as lab:
        first, second = lab.hosts.working
        shared, alone = (run_files(lab, shared=one) for one in (True, False))
        written = weights(tmp_path / "weights", 1)
        assert await shared.on(second, written.path, first) == written.path
        assert await shared.on(second, written.path) == written.path
        fetched = await alone.on(second, written.path, first)
        assert fetched != written.path
        name, content = "model.safetensors", (written.path / "model.safetensors").read_bytes()
        assert (fetched / name).read_bytes() == content
        # Another folder of the same name is another folder.
        other = weights(tmp_path / "others", 1)
        assert await alone.on(second, other.path) not in (fetched, other.path)
        shared.close()
        alone.close()


@in_loop
async def test_weights_are_checked_where_they_arrive_and_two_versions_stay(tmp_path: Path) -> None:
    async with host_lab(tmp_path / "logs", 2) as lab:
        first, second = lab.hosts.working
        files = run_files(lab, shared=False)
        places = []
        for version in range(4):
            there, shapes = await files.read_weights(
                second, weights(tmp_path / "weights", version), first
            )
            assert {name: tuple(shape) for name, shape in shapes.items()} == {"w": (3, 5)}
            places.append(there.path)
        assert [path.exists() for path in places] == [False, False, True, True]
        wrong = weights(tmp_path / "wrong", 9)
        damaged = WeightsFolder(
            path=wrong.path,
            version=9,
            checksum=f"xxh3_128:{xxhash.xxh3_128_hexdigest(b'')}",
            size_bytes=wrong.size_bytes,
        )
        with pytest.raises(EngineError, match=r"host h2: .* is damaged"):
            await files.read_weights(second, damaged, first)
        second.liveness.lost = "it was cut off"
        second.mark_lost()
        with pytest.raises(EngineUnreachable, match=r"host h2 .* is lost: it was cut off"):
            await files.read_weights(second, wrong, first)
        files.close()


@in_loop
async def test_a_host_serves_versions_until_they_are_removed(tmp_path: Path) -> None:
    async with host_lab(tmp_path / "logs", 2) as lab:
        first, second = lab.hosts.working
        files = run_files(lab, shared=False)
        root = await first.weights_root(1)  # where its trainer writes
        headers = authorization(lab.hosts.token)
        async with httpx2.AsyncClient(base_url=first.facts.url, headers=headers) as http:
            for version in range(6):
                written = weights(root, version)
                await files.read_weights(second, written, first)
                served = (await http.get("/folders")).json()["folders"]
                assert [name.partition("-")[0] for name in served] == [written.path.name]
                await first.remove(written.path)
            assert (await http.get("/folders")).json() == {"folders": []}
        files.close()


@in_loop
async def test_ranks_that_start_at_the_same_time_get_one_folder_for_weights(tmp_path: Path) -> None:
    async with host_lab(tmp_path / "logs", 1) as lab:
        (host,) = lab.hosts.working
        assert len(set(await asyncio.gather(*(host.weights_root(1) for _ in range(8))))) == 1


@in_loop
async def test_a_file_of_the_run_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """Each rank is given the loss, while another one may be reading it."""
    async with host_lab(tmp_path / "logs", 1) as lab:
        (host,) = lab.hosts.working
        path = await host.put_file("loss.pickle", b"loss")
        with path.open("rb") as read:
            assert await host.put_file("loss.pickle", b"another") == path
            assert read.read() == b"loss"
        assert path.read_bytes() == b"another"
        assert list(path.parent.iterdir()) == [path]


@in_loop
async def test_a_folder_of_a_host_is_copied_to_this_machine(tmp_path: Path) -> None:
    async with host_lab(tmp_path / "logs", 1) as lab:
        (host,) = lab.hosts.working
        files = run_files(lab, shared=False)
        path = await host.put_file("loss.pickle", b"loss")
        await files.fetch(host, path.parent, tmp_path / "copy")
        assert (tmp_path / "copy" / "loss.pickle").read_bytes() == b"loss"
        await host.remove(path.parent)
        assert not path.exists()
        files.close()

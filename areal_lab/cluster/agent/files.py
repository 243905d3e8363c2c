"""The files of a host for a run: what it sees, what it serves, what it has fetched.

    seen(path)    names, sizes and times of a folder's files: equal on two hosts that share it
    serve(path)   other hosts fetch it (`shards.server`)
    fetch(url)    a folder of another host, once, however many engines ask for it
    check(path)   the weights are whole, and their shapes

Fetched versions of weights are in shared memory if they fit; the newest two stay.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from areal_lab.cluster.records import FetchFolder, SeenFile, SeenFolder
from areal_lab.cluster.shards.connections import Connections
from areal_lab.cluster.shards.folders import Folders
from areal_lab.cluster.shards.mirror import mirror_async
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.root import choose_weights_root, remove_weights_root
from areal_lab.engines.weights.verify_folder import check_folder, folder_shapes

_KEPT: Final = 2
"""Fetched versions of weights: the newest, and one that an engine may still be reading."""


def seen_folder(path: Path) -> SeenFolder:
    """The files of a folder as this host sees them; none if there is no such folder."""
    files = []
    for file in sorted(path.glob("*")) if path.is_dir() else ():
        if file.is_file():
            about = file.stat()
            files.append(SeenFile(name=file.name, size=about.st_size, time_ns=about.st_mtime_ns))
    return SeenFolder(files=tuple(files))


@dataclass(slots=True)
class HostFiles:
    """The files of one incarnation of a host."""

    folder: Path
    folders: Folders
    connections: Connections
    _weights_root: Path | None = None
    _choosing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _fetched_weights: list[Path] = field(default_factory=list)

    async def seen(self, path: Path) -> SeenFolder:
        """See `seen_folder`."""
        return await asyncio.to_thread(seen_folder, path)

    def serve(self, name: str, path: Path) -> None:
        """Serve a folder to other hosts."""
        self.folders.register(name, path, follow_links=True)

    async def fetch(self, request: FetchFolder) -> Path:
        """Fetch a folder that another host serves; returns its path here.

        Raises:
            DataPlaneError: as `mirror`.
        """
        parent = self.folder / "fetched"
        if request.weights_bytes:
            parent = await self.weights_root(request.weights_bytes)
        done = await mirror_async(
            request.url,
            parent / request.name,
            self.connections,
            incarnation=request.incarnation,
            checksums=self.folders.checksums,
        )
        if request.weights_bytes:
            await asyncio.to_thread(self._keep, done.path)
        return done.path

    async def check(self, weights: WeightsFolder) -> dict[str, Sequence[int]]:
        """Compare weights with their checksum; returns the shape of each tensor.

        Raises:
            EngineError: they are damaged.
        """
        await asyncio.to_thread(check_folder, weights)
        return dict(await asyncio.to_thread(folder_shapes, weights.path))

    async def weights_root(self, size_bytes: int) -> Path:
        """A folder for weights of this size, in shared memory if there is room."""
        async with self._choosing:  # ranks and engines start at the same time
            if self._weights_root is None:
                self._weights_root = await asyncio.to_thread(
                    choose_weights_root, self.folder, size_bytes
                )
            return self._weights_root

    def put(self, name: str, content: bytes) -> Path:
        """Write a file of the run; one that is there is replaced as a whole."""
        path = self.folder / "files" / Path(name).name
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(f".{path.name}")
        partial.write_bytes(content)
        partial.replace(path)
        return path

    async def remove(self, path: Path) -> None:
        """Remove a folder of this host's agent.

        Raises:
            ValueError: it is not the agent's.
        """
        roots = [root for root in (self.folder, self._weights_root) if root is not None]
        if not any(path.is_relative_to(root) and path != root for root in roots):
            raise ValueError(f"{path} is not a folder of the host agent; nothing was removed")
        await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    def close(self) -> None:
        """Remove everything that was fetched or written."""
        if self._weights_root is not None:
            remove_weights_root(self._weights_root)
            self._weights_root = None
        shutil.rmtree(self.folder / "fetched", ignore_errors=True)
        shutil.rmtree(self.folder / "files", ignore_errors=True)
        self.connections.close()

    def _keep(self, newest: Path) -> None:
        if newest in self._fetched_weights:
            return
        self._fetched_weights.append(newest)
        while len(self._fetched_weights) > _KEPT:
            shutil.rmtree(self._fetched_weights.pop(0), ignore_errors=True)

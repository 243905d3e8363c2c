"""Files of a host for a run: those it sees, serves, and has fetched.

    seen(path)    names, sizes and times of a folder's files: equal on two hosts that share it
    serve(path)   other hosts fetch it (`folders.server`)
    fetch(url)    a folder of another host, once, however many engines ask for it
    check(path)   verify complete weights; returns their shapes

Fetched versions of weights are in shared memory if they fit; the newest two stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from areal_lab.cluster.folders.connections import Connections
from areal_lab.cluster.folders.mirror import mirror_async
from areal_lab.cluster.folders.served import Folders
from areal_lab.cluster.records import FetchFolder, SeenFile, SeenFolder
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.root import choose_weights_root, remove_weights_root
from areal_lab.engines.weights.verify_folder import check_folder, folder_shapes
from areal_lab.host.durable import replacing
from areal_lab.host.owned_folders import remove_tree

_KEPT: Final = 2
"""Number of fetched weight versions: the newest, and one that an engine may still be reading."""


def seen_folder(path: Path) -> SeenFolder:
    """Files of a folder as this host sees them; empty if the folder does not exist."""
    files = []
    for file in sorted(path.glob("*")) if path.is_dir() else ():
        if file.is_file():
            about = file.stat()
            files.append(SeenFile(name=file.name, size=about.st_size, time_ns=about.st_mtime_ns))
    return SeenFolder(files=tuple(files))


@dataclass(slots=True)
class HostFiles:
    """Files of one incarnation of a host."""

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
        """Fetch a folder that another host serves; returns its path here."""
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
        """Compare weights with their checksum; returns the shape of each tensor."""
        await asyncio.to_thread(check_folder, weights)
        return dict(await asyncio.to_thread(folder_shapes, weights.path))

    async def weights_root(self, size_bytes: int) -> Path:
        """Create a folder for weights of this size, in shared memory if there is room."""
        async with self._choosing:  # ranks and engines start at the same time
            if self._weights_root is None:
                self._weights_root = await asyncio.to_thread(
                    choose_weights_root, self.folder, size_bytes
                )
            return self._weights_root

    def put(self, name: str, content: bytes) -> Path:
        """Write a file of the run; an existing one is replaced as a whole."""
        path = self.folder / "files" / Path(name).name
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as file:
            file.write(content)
        return path

    async def remove(self, path: Path) -> None:
        """Remove a folder of this host's agent; ValueError for any other."""
        roots = [root for root in (self.folder, self._weights_root) if root is not None]
        if not any(path.is_relative_to(root) and path != root for root in roots):
            raise ValueError(f"{path} is not a folder of the host agent; nothing was removed")
        await asyncio.to_thread(remove_tree, path)

    def close(self) -> None:
        """Remove everything that was fetched or written."""
        if self._weights_root is not None:
            remove_weights_root(self._weights_root)
            self._weights_root = None
        remove_tree(self.folder / "fetched")
        remove_tree(self.folder / "files")
        self.connections.close()

    def _keep(self, newest: Path) -> None:
        if newest in self._fetched_weights:
            return
        self._fetched_weights.append(newest)
        while len(self._fetched_weights) > _KEPT:
            remove_tree(self._fetched_weights.pop(0))

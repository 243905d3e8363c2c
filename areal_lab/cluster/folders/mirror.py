"""Copy a folder that another host serves: listing, ranges in parallel, checksums, then its name.

    .NAME.mirror-lock    held by the one that fetches; others wait, and find the folder
    .NAME.mirror         files while they arrive
    NAME                 complete and verified: it appears by a rename

Engines of one host that ask for the same folder at the same time fetch it once, also from several
processes. A mirror can be registered and served in turn, so that hosts form a chain or a tree.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

import numpy as np

from areal_lab.cluster.folders.connections import Agent, Call, Connections
from areal_lab.cluster.folders.replies import Damaged
from areal_lab.cluster.folders.served import Checksums, Folders, ListedFile, Listing
from areal_lab.host.durable import flush_tree, replace_flushed
from areal_lab.host.owned_folders import remove_tree
from areal_lab.host.process_groups import SHARED_MEMORY

LISTING_S: Final = 900.0
"""Longest wait for a listing: a host reads a folder once for its checksums, 16 GB from a slow disk
take two minutes."""
_PIECE_BYTES: Final = 16 << 20
"""Of one request, and of one buffer."""


@dataclass(frozen=True, slots=True)
class Mirrored:
    """A folder of this host that equals one of another host."""

    path: Path
    listing: Listing
    fetched_bytes: int
    """0 if it was here already."""


def folder_url(agent: Agent, name: str) -> str:
    """The URL of a folder that a host agent serves."""
    return f"http://{agent.address}/folders/{quote(name, safe='')}"


def mirror(
    url: str,
    destination: Path,
    connections: Connections,
    *,
    incarnation: str = "",
    progress: Callable[[int, int], None] = lambda _done, _total: None,
    checksums: Checksums | None = None,
) -> Mirrored:
    """Make `destination` equal to a folder of another host. Blocks.

    Args:
        url: `http://HOST:PORT/folders/NAME`.
        destination: a folder that does not exist, or equals the other one already.
        connections: to the other hosts.
        incarnation: of the agent that serves it; empty accepts any.
        progress: called with the bytes that arrived so far and those of the whole folder, from
            several threads.
        checksums: of files of this host that may be known, and soon are; None knows none.

    Raises:
        ValueError: the URL is of another form, or the destination has other content.
        DataPlaneError: the host cannot be reached, or the folder changed or arrived damaged.
        OSError: it cannot be written.
    """
    agent, path = _parsed(url, incarnation)
    checksums = checksums or Checksums()
    destination = destination.absolute()
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _locked(destination.with_name(f".{destination.name}.mirror-lock")):
        call = Call(agent, "GET", path, f"folder {url}", silence_s=LISTING_S)
        listing = Listing.from_json(connections.call(call))
        if destination.exists():
            _check_equal(destination, listing, url, checksums)
            return Mirrored(destination, listing, 0)
        temporary = destination.with_name(f".{destination.name}.mirror")
        remove_tree(temporary)  # of a process that was killed
        temporary.mkdir()
        try:
            _fetch(_Source(agent, path, listing, connections, progress), temporary, checksums)
            if destination.is_relative_to(SHARED_MEMORY):
                temporary.rename(destination)
            else:
                flush_tree(temporary)
                replace_flushed(temporary, destination)
        except BaseException:
            remove_tree(temporary)
            raise
    return Mirrored(destination, listing, listing.size_bytes)


async def mirror_async(
    url: str,
    destination: Path,
    connections: Connections,
    *,
    incarnation: str = "",
    checksums: Checksums | None = None,
) -> Mirrored:
    """As `mirror`, in a thread."""
    return await asyncio.to_thread(
        mirror, url, destination, connections, incarnation=incarnation, checksums=checksums
    )


class _Source:
    """The other folder, and how much of it has arrived."""

    def __init__(
        self,
        agent: Agent,
        path: str,
        listing: Listing,
        connections: Connections,
        progress: Callable[[int, int], None],
    ) -> None:
        self.agent = agent
        self.path = path
        self.listing = listing
        self.connections = connections
        self._progress = progress
        self._arrived = 0
        self._lock = threading.Lock()

    def read(self, file: ListedFile, start: int, target: memoryview) -> None:
        """Read a range of a file."""
        call = Call(
            self.agent, "GET", f"{self.path}/{quote(file.name)}", f"{self.path}/{file.name}"
        )
        if self.connections.read(call, start, target) not in ("", file.checksum):
            raise Damaged(f"{call.what} at {self.agent.address} changed after it was listed")
        with self._lock:
            self._arrived += len(target)
            arrived = self._arrived
        self._progress(arrived, self.listing.size_bytes)


def _fetch(source: _Source, folder: Path, checksums: Checksums) -> None:
    """Fetch all files, and compare each with its checksum."""
    with ThreadPoolExecutor(source.connections.streams, thread_name_prefix="mirror") as pool:
        pieces = []
        for file in source.listing.files:
            path = folder / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as opened:
                if file.size_bytes:
                    os.posix_fallocate(opened.fileno(), 0, file.size_bytes)
            starts = range(0, file.size_bytes, _PIECE_BYTES)
            pieces += [pool.submit(_fetch_piece, source, file, start, path) for start in starts]
        try:
            for piece in pieces:
                piece.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        list(pool.map(lambda file: _verify(file, folder, checksums), source.listing.files))


def _fetch_piece(source: _Source, file: ListedFile, start: int, path: Path) -> None:
    buffer = np.empty(min(_PIECE_BYTES, file.size_bytes - start), np.uint8)
    source.read(file, start, buffer.data)
    with path.open("r+b", buffering=0) as opened:
        left = buffer.data
        while left:
            written = os.pwrite(opened.fileno(), left, start)
            start, left = start + written, left[written:]


def _verify(file: ListedFile, folder: Path, checksums: Checksums) -> None:
    with (folder / file.name).open("rb", buffering=0) as opened:
        found = checksums.of(opened.fileno(), again=True)  # it has just been written
    if found != file.checksum:
        raise Damaged(
            f"{file.name} arrived with checksum {found} instead of {file.checksum}; the folder was "
            "discarded: fetch it once more"
        )


def _check_equal(destination: Path, listing: Listing, url: str, checksums: Checksums) -> None:
    own = Folders(checksums)
    own.register("own", destination, follow_links=True)
    if own.listing("own") != listing:
        raise ValueError(
            f"{destination} exists and differs from {url}; remove it, or use another destination"
        )


def _parsed(url: str, incarnation: str) -> tuple[Agent, str]:
    parts = urlsplit(url)
    segments = parts.path.split("/")
    if parts.scheme != "http" or segments[:2] != ["", "folders"] or len(segments) != 3:
        raise ValueError(f"a folder of another host is http://HOST:PORT/folders/NAME, not {url}")
    return Agent(parts.netloc, incarnation), parts.path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file, which is removed at the end; waits for the process that holds it."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_open_file(path, lock):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(lock)


def _is_open_file(path: Path, descriptor: int) -> bool:
    """Whether the path still names the file: the one that held the lock has removed it, and another
    process may have made a new one."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

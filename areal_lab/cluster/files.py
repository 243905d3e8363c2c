"""Paths of folders on each host: the same path if hosts share the folder, else a fetched copy.

    on(host, path, owner) --both see the same files--> path
                          --else: owner serves it, host fetches it--> a path on the host

Bytes go from host to host, and through the run only if its machine owns the folder.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import xxhash
from starlette.types import ASGIApp

from areal_lab.cluster.agent.files import seen_folder
from areal_lab.cluster.folders.connections import Agent, Connections
from areal_lab.cluster.folders.mirror import folder_url, mirror_async
from areal_lab.cluster.folders.replies import DataPlaneError
from areal_lab.cluster.folders.server import DataPlane
from areal_lab.cluster.folders.server import Host as PlaneHost
from areal_lab.cluster.host import Host, HostLost, HostRefused
from areal_lab.cluster.records import FetchFolder
from areal_lab.engines.protocol import EngineError, EngineUnreachable, WeightsFolder


class NotShared(RuntimeError):
    """A folder differs between hosts but must be shared."""


@dataclass(slots=True, kw_only=True)
class RunFiles:
    """Folders of a run, on its machine and on hosts."""

    address: str
    """`ADDRESS:PORT` at which the run serves its own folders."""
    token: str = field(repr=False)
    shared: bool
    """True if hosts may share folders; else all are fetched."""
    _plane: DataPlane = field(init=False)
    _connections: Connections = field(init=False)
    _shares: dict[tuple[str, str, Path], bool] = field(default_factory=dict)
    """Results by the incarnations of two hosts (empty for the run) and the parent of a folder."""

    def __post_init__(self) -> None:
        here = PlaneHost("the run", self.address, secrets.token_hex(8))
        self._plane = DataPlane(here)
        self._connections = Connections(self.token)

    @property
    def app(self) -> ASGIApp:
        """Application that serves the folders of this machine."""
        return self._plane.app(self.token)

    def close(self) -> None:
        """Close connections to hosts."""
        self._connections.close()

    async def on(
        self, host: Host, path: Path, owner: Host | None = None, *, weights_bytes: int = 0
    ) -> Path:
        """Path on `host` of a folder of `owner` (None is the run's own machine).

        `weights_bytes` is the size of the weights, if the folder is a version of them.
        """
        if owner is host or await self.sees(host, path, owner, version=bool(weights_bytes)):
            return path
        name = f"{path.name}-{xxhash.xxh3_64_hexdigest(str(path).encode())}"
        if owner is None:
            self._plane.folders.register(name, path, follow_links=True)
            agent = Agent(self.address, self._plane.host.incarnation)
        else:
            await owner.serve(name, path)
            agent = _agent(owner)
        assert agent.incarnation is not None, "of this incarnation only"
        return await host.fetch(
            FetchFolder(
                url=folder_url(agent, name),
                incarnation=agent.incarnation,
                name=name,
                weights_bytes=weights_bytes,
            )
        )

    async def sees(
        self, host: Host, path: Path, owner: Host | None = None, *, version: bool = False
    ) -> bool:
        """Return whether `host` finds the files of a folder of `owner` at the same path.

        With `version` the folder is a version of weights; these are checked once for all versions.
        """
        if not self.shared:
            return False
        key = (
            host.facts.incarnation,
            owner.facts.incarnation if owner else "",
            path.parent if version else path,
        )
        if key not in self._shares:
            theirs, ours = await asyncio.gather(
                host.seen(path),
                asyncio.to_thread(seen_folder, path) if owner is None else owner.seen(path),
            )
            self._shares[key] = bool(ours.files) and theirs == ours
        return self._shares[key]

    async def fetch(self, host: Host, path: Path, destination: Path) -> None:
        """Copy a folder of a host to a new folder of this machine."""
        agent = _agent(host)
        drop = partial(self._connections.drop, agent.address)
        name = f"{path.name}-{xxhash.xxh3_64_hexdigest(str(path).encode())}"
        await host.serve(name, path)
        host.on_lost.append(drop)
        try:
            await mirror_async(
                folder_url(agent, name),
                destination,
                self._connections,
                incarnation=agent.incarnation,
            )
        except DataPlaneError:
            if host.lost.is_set():
                raise host.error from None
            raise
        finally:
            host.on_lost.remove(drop)

    async def read_weights(
        self, host: Host, weights: WeightsFolder, owner: Host | None
    ) -> tuple[WeightsFolder, Mapping[str, Sequence[int]]]:
        """Bring weights to a host and verify them there (`weights.verify_folder.ReadFolder`)."""
        try:
            size = weights.size_bytes or 1
            path = await self.on(host, weights.path, owner, weights_bytes=size)
            there = replace(weights, path=path)
            return there, await host.check(there)
        except HostLost as error:
            raise EngineUnreachable(str(error)) from error
        except HostRefused as error:
            raise EngineError(str(error)) from error


def _agent(host: Host) -> Agent:
    return Agent(f"{host.facts.address}:{host.facts.port}", host.facts.incarnation)

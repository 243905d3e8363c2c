"""Trainer processes on hosts, with TCP connections as pipes.

    settings --paths on each host--> ranks --> HostedTrainer: a `TrainerProcess`

Checkpoints that a trainer writes on its own host are copied to the run folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, cast

from areal_lab.cluster.files import NotShared, RunFiles
from areal_lab.cluster.host import Host, HostLost, HostRefused
from areal_lab.config.schema import TrainConfig
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.host.pipes import KEY_VARIABLE, PipeListener, shut
from areal_lab.host.processes import RunningProcess
from areal_lab.training.process.client import (
    WORKER,
    TrainerProcess,
    rank_arguments,
    rank_name,
)
from areal_lab.training.protocol import Copied, Saved, SaveRequest
from areal_lab.training.settings import TrainerSettings

CONNECT_S: Final = 120.0
"""Longest wait for a process to start and connect."""
_MODELS: Final = ("ref", "critic", "teacher")
"""Sections of the settings with a `path` of another model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOnHosts:
    """Start ranks on these hosts, by rank."""

    hosts: tuple[Host, ...]
    listener: PipeListener
    files: RunFiles
    weights_bytes: int
    """Size of one version of the weights."""

    async def __call__(
        self, rank: int, settings: TrainerSettings, *, pipes: int, environment: Mapping[str, str]
    ) -> tuple[RunningProcess, list[Connection]]:
        """See `StartRank`."""
        host, expected = self.hosts[rank], [self.listener.expect() for _ in range(pipes)]
        settings = await self._on(host, settings)
        process = await host.start_module(
            rank_name(rank),
            WORKER,
            [
                *rank_arguments(rank, settings),
                *(part for where, _ in expected for part in ("--pipe", where)),
            ],
            log=f"trainer-{rank}.log" if rank else "trainer.log",
            environment={
                **environment,
                KEY_VARIABLE: self.listener.key.hex(),
            },
        )
        futures = [future for _, future in expected]
        connecting = asyncio.gather(*futures)
        ending = asyncio.create_task(process.ended())
        waited: set[asyncio.Future[Any]] = {connecting, ending}
        try:
            await asyncio.wait(waited, timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                return process, connecting.result()
            if ending.done():
                raise await process.died()
            raise TimeoutError(
                f"{process.name} did not connect from host {host.name} to "
                f"{self.listener.address} within {CONNECT_S:g} s; does a firewall let it through?"
            )
        except BaseException:
            connecting.cancel()
            with suppress(asyncio.CancelledError):
                await connecting
            for future in futures:
                if future.done() and not future.cancelled():
                    shut(future.result())
            await process.stop(at_once=True)
            raise
        finally:
            ending.cancel()

    async def _on(self, host: Host, settings: TrainerSettings) -> TrainerSettings:
        """Settings with the paths of a host."""

        async def there(path: str) -> str:
            return str(await self.files.on(host, Path(path))) if path else ""

        async def sent(path: str) -> str:
            if not path or await self.files.sees(host, Path(path).parent):
                return path
            content = await asyncio.to_thread(Path(path).read_bytes)
            return str(await host.put_file(Path(path).name, content))

        return replace(
            settings,
            config=await self._models_on(host, settings.config),
            model_path=await there(settings.model_path),
            state_folder=await there(settings.state_folder),
            loss_file=await sent(settings.loss_file),
            advantage_file=await sent(settings.advantage_file),
            weights_root=str(await host.weights_root(self.weights_bytes)),
        )

    async def _models_on(self, host: Host, config: TrainConfig) -> TrainConfig:
        """Settings with the host's paths of other models, if these are folders of this machine."""
        changes: dict[str, object] = {}
        for name in _MODELS:
            section = getattr(config, name)
            path = Path(section.path)
            if section.path and await asyncio.to_thread(path.is_dir):
                where = await self.files.on(host, path.absolute())
                changes[name] = section.model_copy(update={"path": str(where)})
        return config.model_copy(update=changes)


@dataclass(slots=True)
class HostedTrainer(TrainerProcess):
    """A trainer whose first process is on another host."""

    host: Host = field(default=cast(Host, None))
    files: RunFiles = field(default=cast(RunFiles, None))
    run_folder: Path = Path()
    _saving: Path = Path()
    """Target path of the checkpoint that is being written."""

    async def check_shared(self) -> None:
        """Refuse processes on several hosts without a shared run folder, because each of them
        writes its part of a checkpoint.
        """
        hosts = {id(child.host): child.host for child in self.children if hasattr(child, "host")}
        # Before the run appends to files there, which would look like a difference.
        blind = [h.name for h in hosts.values() if not await self.files.sees(h, self.run_folder)]
        if blind and len(hosts) > 1:
            raise NotShared(
                f"the trainer has processes on {len(hosts)} hosts, but {', '.join(blind)} do not "
                f"see {self.run_folder}, into which all of them write checkpoints; set run_dir to "
                "a folder that they share, or cluster.trainer_nodes=1"
            )

    async def save(self, request: SaveRequest) -> Saved:
        """See `TrainerProcess.save`."""
        saved = await TrainerProcess.save(self, await self._there(request))
        return await self._brought(saved)

    async def start_save(self, request: SaveRequest) -> Copied:
        """See `TrainerProcess.start_save`."""
        return await TrainerProcess.start_save(self, await self._there(request))

    async def saved(self) -> Saved:
        """See `TrainerProcess.saved`."""
        return await self._brought(await TrainerProcess.saved(self))

    async def remove(self, weights: WeightsFolder) -> None:
        """See `TrainerProcess.remove`."""
        with suppress(HostLost, HostRefused):
            await self.host.remove(weights.path)

    async def _there(self, request: SaveRequest) -> SaveRequest:
        self._saving = request.path
        if await self.files.sees(self.host, self.run_folder):
            return request
        return replace(request, path=Path(self.host.facts.folder) / "saved" / request.path.name)

    async def _brought(self, saved: Saved) -> Saved:
        """Copy a checkpoint from its host, if it is not in the run folder."""
        if saved.path == self._saving:
            return saved
        await self.files.fetch(self.host, saved.path, self._saving)
        with suppress(HostLost, HostRefused):  # the checkpoint is complete here
            await self.host.remove(saved.path)
        return replace(saved, path=self._saving)

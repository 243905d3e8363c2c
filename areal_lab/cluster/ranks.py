"""The trainer's processes on hosts: a `StartRank` whose pipes are TCP connections."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from areal_lab.cluster.host import Host
from areal_lab.host.pipes import KEY_VARIABLE, PipeListener, shut
from areal_lab.host.processes import RunningProcess
from areal_lab.training.process.client import WORKER, rank_name

CONNECT_S: Final = 120.0
"""Longest wait for a process to start and connect."""


@dataclass(frozen=True, slots=True)
class RanksOnHosts:
    """Starts ranks on these hosts, by rank."""

    hosts: tuple[Host, ...]
    listener: PipeListener

    async def __call__(
        self, rank: int, arguments: Sequence[str], *, pipes: int, environment: Mapping[str, str]
    ) -> tuple[RunningProcess, list[Connection]]:
        """See `StartRank`.

        Raises:
            ChildDied: it ends before it connects, or its host is lost.
            TimeoutError: it does not connect in time.
        """
        host, expected = self.hosts[rank], [self.listener.expect() for _ in range(pipes)]
        process = await host.start_module(
            rank_name(rank),
            WORKER,
            [*arguments, *(part for where, _ in expected for part in ("--pipe", where))],
            log=f"trainer-{rank}.log" if rank else "trainer.log",
            environment={**environment, KEY_VARIABLE: self.listener.key.hex()},
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

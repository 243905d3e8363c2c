"""The process that is a driver to Ray: `python -m areal_lab.cluster.ray.driver DESCRIPTOR`.

Each host of the run has a seat (a slot) here, and each seat has a task:

    try its bundle, and after a loss any other node --the first actor that is up--> its agent
          ^                                                                          |
          '---- the run asks for another host, or the actor has died ----------------'

Names are never reused: an agent that was lost and returns is not mistaken for another one.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_lab.cluster.ray.actor import HostActor, Where
from areal_lab.cluster.ray.connect import connect
from areal_lab.cluster.ray.scheduler import Begin, Order, Report
from areal_lab.cluster.records import from_json, to_json
from areal_lab.control.placement import NodeResources, gpus_of_each, lacking
from areal_lab.host.durable import replace_text
from areal_lab.host.processes import watch_parent

_LOOK_S: Final = 1.0
_RETRY_S: Final = 2.0
_RETRY_AFTER_S: Final = 60.0
"""Time after which another node is tried: the one that Ray has chosen may hang."""
_PING_S: Final = 2.0
_STOP_S: Final = 10.0
"""Longest wait for the agents to end."""
_REASON_CHARACTERS: Final = 300


@dataclass(slots=True, eq=False)
class _Seat:
    """Slot of one host."""

    bundle: int
    """Its bundle in the placement group."""
    name: str = ""
    """Name of its host."""
    actor: Any = None
    node: str = ""
    """Ray's id of the actor's node."""
    used: int | None = None
    """Bundle that the actor uses; None outside of the group."""
    avoid: str = ""
    """Ray's id of a node that does not reply, even if Ray does not know yet."""
    trouble: str = ""
    """Why there is no agent."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the run has lost the host."""


@dataclass(slots=True, eq=False)
class Driver:
    """Keep the requested number of agents running."""

    begin: Begin
    writer: asyncio.StreamWriter
    named: int = 0
    _seats: list[_Seat] = field(default_factory=list)
    _bundle: Mapping[str, float] = field(default_factory=dict)
    _group: PlacementGroup | None = None
    _lacks: str = ""
    _told: Report = field(default_factory=Report)

    async def start(self) -> None:
        """Connect, and ask for hosts."""
        hosts, self.named = self.begin.hosts, self.begin.named
        await asyncio.to_thread(connect, self.begin.address, hosts)
        gpus = self.begin.gpus or gpus_of_each(await asyncio.to_thread(_nodes), hosts)
        self._bundle = {"CPU": 1, **({"GPU": gpus} if gpus else {}), **self.begin.resources}
        self._group = placement_group(
            [dict(self._bundle)] * hosts, strategy="STRICT_SPREAD" if self._spread else "PACK"
        )
        self._seats = [_Seat(bundle) for bundle in range(hosts)]
        self._report()

    async def keep(self) -> None:
        """Keep the hosts running until canceled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._check_resources())
            for seat in self._seats:
                tasks.create_task(self._fill(seat))

    def replace(self, name: str) -> None:
        """Start a replacement of a lost host, unless that was done before."""
        for seat in self._seats:
            if seat.name == name:
                seat.lost.set()

    async def stop(self) -> None:
        """Stop all agents, and release the nodes."""
        await asyncio.gather(*(self._stop_agent(seat) for seat in self._seats))
        if self._group is not None:
            remove_placement_group(self._group)

    # --- one seat ---

    async def _fill(self, seat: _Seat) -> None:
        """Keep a host in a seat."""
        # The placement group starts the first hosts: all of them, or none.
        places: list[int | None] = [seat.bundle]
        while True:
            await self._start_host(seat, places)
            try:
                await self._serve(seat)
            except RayError as error:
                self._note(seat, error)
                await asyncio.sleep(_RETRY_S)
            ray.kill(seat.actor)
            seat.name, seat.node, seat.actor, seat.used = "", "", None, None
            places = [seat.bundle, *self._idle_bundles(), None]

    async def _start_host(self, seat: _Seat, places: Iterable[int | None]) -> None:
        """Choose the place where an actor starts first, and start an agent there."""
        trying = {asyncio.create_task(self._try(seat, place)): place for place in places}
        try:
            done, _ = await asyncio.wait(trying, return_when=asyncio.FIRST_COMPLETED)
            first = next(iter(done))
            seat.actor, where = first.result()
            seat.node, seat.used, seat.avoid = where.node, trying.pop(first), ""
        finally:
            for task in trying:
                task.cancel()
            for other in await asyncio.gather(*trying, return_exceptions=True):
                if not isinstance(other, BaseException):  # it started, too
                    ray.kill(other[0])
        self.named += 1
        seat.name, seat.trouble = f"h{self.named}", ""
        seat.lost.clear()
        print(f"host {seat.name}: starts on {where.address}", flush=True)
        self._report()

    async def _try(self, seat: _Seat, place: int | None) -> tuple[Any, Where]:
        """Start an actor in a bundle, or on a node of Ray's choice; returns when it is ready."""
        while True:
            actor = self._actor(seat, place)
            where: Where | None = None
            try:
                async with asyncio.timeout(_RETRY_AFTER_S if place is None else None):
                    where = await actor.ready.remote()
                if where.node not in self._nodes_of_others(seat):
                    return actor, where
                where = None
            except TimeoutError:
                seat.avoid = ""
                continue
            except RayError as error:
                self._note(seat, error)
            finally:
                if where is None:
                    ray.kill(actor)
            await asyncio.sleep(_RETRY_S)

    def _actor(self, seat: _Seat, place: int | None) -> Any:
        resources = dict(self._bundle)
        options: dict[str, Any] = {
            "num_cpus": resources.pop("CPU"),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources,
        }
        if place is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, place)
        elif avoided := sorted({*self._nodes_of_others(seat), seat.avoid} - {""}):
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(avoided)})"}
        return ray.remote(HostActor).options(**options).remote()

    async def _serve(self, seat: _Seat) -> None:
        """Run an agent until the run has lost its host; raises when its actor is gone."""
        await seat.actor.start.remote(seat.name, self.begin.run, self.begin.token)
        ending = asyncio.create_task(_end_of_agent(seat.actor))
        losing = asyncio.create_task(seat.lost.wait())
        try:
            await asyncio.wait({ending, losing}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                said = ending.result()
                self._keep_log(seat, said)
                seat.trouble = f"its agent has ended: {said.strip().rpartition(chr(10))[2]}"
                self._report()
                await losing
            try:
                async with asyncio.timeout(_PING_S):
                    await seat.actor.ready.remote()
            except TimeoutError:
                seat.avoid = seat.node
        finally:
            ending.cancel()
            losing.cancel()
            await asyncio.gather(ending, losing, return_exceptions=True)

    async def _stop_agent(self, seat: _Seat) -> None:
        if seat.actor is None:
            return
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(_STOP_S):
                self._keep_log(seat, await seat.actor.stop.remote())
        ray.kill(seat.actor)

    def _nodes_of_others(self, seat: _Seat) -> set[str]:
        """Nodes that must not get a second host."""
        return {one.node for one in self._seats if one is not seat and self._spread} - {""}

    def _idle_bundles(self) -> list[int]:
        """Bundles whose seats have moved elsewhere."""
        used = {seat.used for seat in self._seats if seat.actor is not None}
        return [
            seat.bundle
            for seat in self._seats
            if seat.actor is not None and seat.bundle not in used
        ]

    @property
    def _spread(self) -> bool:
        """True if each host has a separate node."""
        return self.begin.address != "local"

    def _note(self, seat: _Seat, error: RayError) -> None:
        seat.trouble = " ".join(str(error).split())[:_REASON_CHARACTERS]
        print(f"host {seat.name or f'of bundle {seat.bundle}'}: {error}", flush=True)
        self._report()

    def _keep_log(self, seat: _Seat, said: str) -> None:
        if said:
            replace_text(Path(self.begin.logs) / f"host-{seat.name}.log", said + "\n")

    # --- what the run is told ---

    async def _check_resources(self) -> None:
        """Find the missing resources while a seat is vacant."""
        while True:
            vacant = sum(seat.actor is None for seat in self._seats)
            self._lacks = await asyncio.to_thread(self._find_lacking, vacant) if vacant else ""
            self._report()
            await asyncio.sleep(_LOOK_S)

    def _find_lacking(self, vacant: int) -> str:
        created = placement_group_table(self._group)["state"] == "CREATED"
        if created and vacant == len(self._seats):
            return ""  # actors start
        used = {seat.node for seat in self._seats}
        free = [node for number, node in _nodes_by_number().items() if number not in used]
        nodes = sorted(free, key=lambda node: node.name)
        return lacking(self._bundle, vacant, nodes)

    def _report(self) -> None:
        """Report to the run, if anything has changed."""
        started = sum(seat.actor is not None for seat in self._seats)
        parts = [f"{started} of {len(self._seats)} agents were started", self._lacks]
        parts += [
            f"{seat.name or f'host {seat.bundle + 1}'}: {seat.trouble}"
            for seat in self._seats
            if seat.trouble
        ]
        state = "; ".join(part for part in parts if part)
        report = Report(connected=True, state=state, named=self.named)
        if report != self._told:
            self._told = report
            self.writer.write(to_json(report) + b"\n")


async def _end_of_agent(actor: Any) -> str:
    """Last output of an agent; raises when its actor is gone."""
    while True:
        try:
            return str(await actor.ended.remote())
        except ActorUnavailableError:  # for a while, according to Ray
            await asyncio.sleep(_RETRY_S)


def _nodes_by_number() -> dict[str, NodeResources]:
    """Nodes that Ray considers alive, by id."""
    return {
        node["NodeID"]: NodeResources(name=node["NodeManagerAddress"], resources=node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    }


def _nodes() -> list[NodeResources]:
    return list(_nodes_by_number().values())


async def drive(descriptor: int) -> None:
    """Execute the run's orders from a socket, until it stops the driver or is gone."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    driver = Driver(from_json(Begin, await reader.readline()), writer)
    try:
        await driver.start()
    except ValueError as error:
        writer.write(to_json(Report(impossible=str(error))) + b"\n")
        await writer.drain()
        return
    keeping = asyncio.create_task(driver.keep(), name="keep hosts")
    taking = asyncio.create_task(_take_orders(reader, driver), name="take orders")
    done, _ = await asyncio.wait({keeping, taking}, return_when=asyncio.FIRST_COMPLETED)
    keeping.cancel()
    taking.cancel()
    await asyncio.gather(keeping, taking, return_exceptions=True)
    await driver.stop()
    ray.shutdown()
    for task in done:
        task.result()


async def _take_orders(reader: asyncio.StreamReader, driver: Driver) -> None:
    while line := await reader.readline():
        order = from_json(Order, line)
        if order.stop:
            return
        driver.replace(order.replace)


def main() -> None:
    """Run the driver on the descriptor of the command line."""
    watch_parent()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    asyncio.run(drive(descriptor))


if __name__ == "__main__":
    main()

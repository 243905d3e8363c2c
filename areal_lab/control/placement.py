"""Which host runs what: engines and trainer processes by the devices that hosts have.

    hosts, demand --place--> Placement | Unplaceable

Trainer processes go to the last hosts. Engines are spread over the others; with one host, they are
there, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle


class Unplaceable(ValueError):
    """The hosts cannot run what is asked for; the message names both, and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSlots:
    """A host, and what it can hold."""

    name: str
    gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is to be placed."""

    engines: int
    gpus_per_engine: int = 0
    """0 for engines on CPUs, of which a host takes any number."""
    trainer_ranks: int = 1
    gpus_per_rank: int = 0
    """1 where the trainer computes on GPUs."""
    trainer_hosts: int = 0
    """Hosts that train; 0 takes as few as possible."""
    spare_hosts: int = 0
    """Hosts without work."""
    shared: bool = False
    """Whether engines and trainer take turns on the same devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The host of each engine and of each trainer process, by their numbers."""

    engines: tuple[str, ...]
    trainer: tuple[str, ...]
    spares: tuple[str, ...] = ()
    """Hosts without work, asked for or not."""


def place(hosts: Sequence[HostSlots], demand: Demand) -> Placement:
    """Place engines and trainer processes on hosts.

    Raises:
        Unplaceable: in one sentence, with what is asked, what there is and what to change.
    """
    used = hosts[: len(hosts) - demand.spare_hosts]
    if not used:
        raise Unplaceable(
            f"cluster.spare_nodes is {demand.spare_hosts}, but {_count(len(hosts), 'host')} "
            "joined and one must work; lower it, or raise cluster.n_nodes"
        )
    training = _training_hosts(used, demand)
    trainer = _spread_ranks(used[len(used) - training :], demand)
    generating = used[: len(used) - training]
    if demand.shared or len(used) == 1 or not generating:
        generating = used
    left = {host.name: host.gpus for host in generating}
    if not demand.shared:
        for name in trainer:
            if name in left:
                left[name] -= demand.gpus_per_rank
    engines = _place_engines(generating, left, demand)
    return Placement(
        engines=engines,
        trainer=trainer,
        spares=tuple(host.name for host in hosts if host.name not in {*engines, *trainer}),
    )


def seat_of_another(
    placement: Placement, engines: Mapping[str, int], gpus: Mapping[str, int], demand: Demand
) -> str:
    """The host of an engine that joins later: of those with room, the one with the fewest engines.

    Args:
        placement: of the others.
        engines: number of engines of each host that has some, those that have joined included.
        gpus: of each host that is there.
        demand: what was placed.

    Raises:
        Unplaceable: in one sentence; no host has room.
    """

    def free(name: str) -> int:
        trains = 0 if demand.shared else placement.trainer.count(name) * demand.gpus_per_rank
        return gpus.get(name, 0) - trains - engines.get(name, 0) * demand.gpus_per_engine

    names = [name for name in gpus if name in engines or name not in placement.trainer]
    if demand.gpus_per_engine:
        names = [name for name in gpus if free(name) >= demand.gpus_per_engine]
    if not names:
        needs = _count(demand.gpus_per_engine, "GPU")
        raise Unplaceable(
            f"another engine needs {needs}, but no host has as many left, and none is spare; lower "
            "rollout.scaling.max_engines, or raise cluster.n_nodes"
        )
    return min(names, key=lambda name: engines.get(name, 0))


def _training_hosts(hosts: Sequence[HostSlots], demand: Demand) -> int:
    """How many of the last hosts train."""
    if (asked := demand.trainer_hosts) > 0:
        if asked > len(hosts):
            raise Unplaceable(
                f"cluster.trainer_nodes is {asked}, but {_count(len(hosts), 'host')} can work; "
                "lower it, or raise cluster.n_nodes"
            )
        if demand.trainer_ranks % asked:
            raise Unplaceable(
                f"cluster.trainer_nodes is {asked}, but must divide the trainer's "
                f"{demand.trainer_ranks} processes; change it, or the trainer's size in "
                "allocation_mode"
            )
        return asked
    if not demand.gpus_per_rank or not demand.trainer_ranks:
        return min(1, demand.trainer_ranks)
    held = 0
    for count, host in enumerate(reversed(hosts), 1):
        held += host.gpus // demand.gpus_per_rank
        if held >= demand.trainer_ranks:
            return count
    raise Unplaceable(
        f"the trainer needs {demand.trainer_ranks * demand.gpus_per_rank} GPUs, but "
        f"{_have(hosts)}; lower the trainer's size in allocation_mode, or raise cluster.n_nodes"
    )


def _spread_ranks(hosts: Sequence[HostSlots], demand: Demand) -> tuple[str, ...]:
    """Consecutive processes on each host: as many as it has GPUs, or equally many on each."""
    if not hosts:
        return ()
    if not demand.gpus_per_rank or demand.trainer_hosts:
        each = demand.trainer_ranks // len(hosts)
        short = [host for host in hosts if host.gpus < each * demand.gpus_per_rank]
        if short:
            raise Unplaceable(
                f"the trainer needs {each * demand.gpus_per_rank} GPUs on each of "
                f"{_count(len(hosts), 'host')}, but {_have(short)}; raise cluster.trainer_nodes"
            )
        return tuple(host.name for host in hosts for _ in range(each))
    ranks = [host.name for host in hosts for _ in range(host.gpus // demand.gpus_per_rank)]
    return tuple(ranks[: demand.trainer_ranks])


def _place_engines(
    hosts: Sequence[HostSlots], left: dict[str, int], demand: Demand
) -> tuple[str, ...]:
    if not demand.gpus_per_engine:
        turn = cycle(hosts)
        return tuple(next(turn).name for _ in range(demand.engines))
    placed: list[str] = []
    while len(placed) < demand.engines:
        most = max(hosts, key=lambda host: left[host.name])  # the first one of several
        if left[most.name] < demand.gpus_per_engine:
            break
        left[most.name] -= demand.gpus_per_engine
        placed.append(most.name)
    if len(placed) < demand.engines:
        raise Unplaceable(
            f"{_count(demand.engines, 'engine')} of {_count(demand.gpus_per_engine, 'GPU')} each "
            f"are asked for, but {_have(hosts)} for engines, which is room for {len(placed)}; "
            "lower the engines' size in allocation_mode, or raise cluster.n_nodes"
        )
    return tuple(placed)


def _have(hosts: Sequence[HostSlots]) -> str:
    """`the hosts have h1: 4, h2: 4 GPUs`."""
    parts = ", ".join(f"{host.name}: {host.gpus}" for host in hosts)
    return f"the hosts have {parts} GPUs"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"

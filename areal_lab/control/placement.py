"""Placement of processes on hosts: engines and trainer processes by the devices of the hosts.

    hosts, demand --place--> Placement | Unplaceable

Trainer processes go to the last hosts, engines to the others; a single host has both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Final


class Unplaceable(ValueError):
    """Hosts cannot run the demand; the message names both, and a remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSlots:
    """Host with its capacity."""

    name: str
    gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Processes to place."""

    engines: int
    gpus_per_engine: int = 0
    """GPUs of each engine; 0 for engines on CPUs, of which a host takes any number."""
    trainer_ranks: int = 1
    gpus_per_rank: int = 0
    """GPUs of each trainer process: 1 if the trainer computes on GPUs."""
    trainer_hosts: int = 0
    """Number of hosts that train; 0 takes as few as possible."""
    spare_hosts: int = 0
    """Number of hosts without work."""
    shared: bool = False
    """True if engines and trainer take turns on the same devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Host of each engine and of each trainer process, by their numbers."""

    engines: tuple[str, ...]
    trainer: tuple[str, ...]
    spares: tuple[str, ...] = ()
    """Hosts without work, requested or not."""


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
    """Host of an engine that joins later: of those with room, the one with the fewest engines.

    Args:
        engines: number of engines of each host that has some, including those that joined later.

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
    """Number of hosts that train, from the last."""
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


_NODES_SHOWN: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """Node with its total amount of each resource."""

    name: str
    resources: Mapping[str, float]

    def holds(self, bundle: Mapping[str, float]) -> bool:
        """Return whether the node has all of these resources."""
        return all(self.resources.get(name, 0) >= amount for name, amount in bundle.items())


def gpus_of_each(nodes: Iterable[NodeResources], count: int) -> int:
    """Return the largest number of GPUs that `count` of the nodes each have; 0 for fewer nodes."""
    most = sorted((int(node.resources.get("GPU", 0)) for node in nodes), reverse=True)
    return most[count - 1] if len(most) >= count else 0


def lacking(bundle: Mapping[str, float], count: int, nodes: Sequence[NodeResources]) -> str:
    """Explain why `count` nodes cannot each give a bundle: the request and the resources.

    If enough nodes have it, something else uses it.
    """
    asked = f"asked for {count} x ({_amounts(bundle, bundle)}), each on a node of its own"
    fit = sum(node.holds(bundle) for node in nodes)
    # A node that runs nothing, such as the head of many clusters, is not worth a mention.
    offering = [node for node in nodes if any(node.resources.get(name, 0) for name in bundle)]
    if not offering:
        return f"{asked}; no node has any of that"
    shown = ", ".join(
        f"{node.name} ({_amounts(node.resources, bundle)})" for node in offering[:_NODES_SHOWN]
    )
    more = f" and {len(offering) - _NODES_SHOWN} more" if len(offering) > _NODES_SHOWN else ""
    used = ", but something else uses part of that" if fit >= count else ""
    return f"{asked}; there are {shown}{more}{used}"


def _amounts(resources: Mapping[str, float], names: Iterable[str]) -> str:
    """`1 CPU, 4 GPU`."""
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in names)

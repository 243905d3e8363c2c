"""Machines of a deployment: how many, how large, and which of them generate and train.

    Needs --shape_for--> Shape --groups--> Group, one for each role --machine_of--> Machine

Processes are placed as a run places them on its hosts (`control.placement`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from areal_lab.control.placement import Demand, HostSlots, Unplaceable, place

GIB: Final = 1 << 30
PORT: Final = 6380
"""Default port of the controller for joining hosts."""
_MOST_GPUS: Final = 8
"""GPUs of a machine, unless the number is given: the usual size of a server."""
_SHARED_SETS: Final = 2.5
"""Sets of weights in shared memory (`engines.weights.root.ROOM_FACTOR`)."""
_CONTROLLER_GIB: Final = 2
"""Resident memory of the controller or host agent, with a margin for trajectories."""
_GPU_CPUS: Final = 8
"""CPU cores for each GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Equal machines."""

    n_nodes: int = 1
    """Number of machines, including the controller's."""
    n_gpus_per_node: int = 0
    port: int = PORT

    def __post_init__(self) -> None:
        if self.n_nodes < 1 or self.n_gpus_per_node < 0 or not 1 <= self.port <= 65535:
            raise ValueError(f"need n_nodes >= 1, n_gpus_per_node >= 0, port 1 to 65535: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Processes that a run starts, and the main memory of each in bytes."""

    backend: str = "embedded"
    servers: int = 1
    """Inference servers to start; 0 if the run attaches to running ones."""
    tensor_parallel: int = 1
    """GPUs of each server."""
    trainer_ranks: int = 1
    trainer_nodes: int = 0
    """Machines that train; 0 takes as few as possible."""
    spare_nodes: int = 0
    """Machines that replace lost ones."""
    shared: bool = False
    """True if servers and trainer take turns on the same devices."""
    gpu: bool = False
    server_bytes: int = GIB
    """Memory of one server."""
    trainer_bytes: int = GIB
    """Memory of all processes of the trainer."""
    version_bytes: int = 0
    """Size of the weights of one version."""
    guess: str = ""
    """Why the sizes are a guess; empty if they are estimated from the model."""

    @property
    def gpus(self) -> int:
        """GPUs that the run needs on any number of machines."""
        if not self.gpu:
            return 0
        servers = self.servers * self.tensor_parallel
        return max(servers, self.trainer_ranks) if self.shared else servers + self.trainer_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Machines with the same role."""

    name: str
    nodes: int
    gpus: int
    """GPUs of each machine; `servers` and `ranks` are also per machine."""
    servers: int
    ranks: int

    @property
    def resources(self) -> Mapping[str, int]:
        """Names by which Ray places engines and trainers, with the number that fits."""
        found = {"engine": self.servers, "trainer": self.ranks}
        return {name: count for name, count in found.items() if count}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Size of one machine, container or pod."""

    cpus: int
    memory_gib: int
    """Memory including shared memory, which counts as memory of a container."""
    shared_gib: int
    """Size of /dev/shm."""
    gpus: int = 0


def shape_for(
    needs: Needs, *, nodes: int | None, gpus_per_node: int | None, port: int = PORT
) -> Shape:
    """Machines of a run: the requested ones, else the fewest that hold it.

    With `gpus_per_node` None, machines have as many GPUs as are needed, at most 8.
    """
    gpus = gpus_per_node
    if gpus is None:
        gpus = max(min(_MOST_GPUS, needs.gpus), needs.tensor_parallel) if needs.gpu else 0
    if needs.gpu and needs.servers and gpus < needs.tensor_parallel:
        raise ValueError(
            f"--gpus-per-node is {gpus}, but a server of {needs.backend} needs "
            f"{needs.tensor_parallel} GPUs of one machine (the t of allocation_mode); give "
            f"--gpus-per-node {needs.tensor_parallel} or more"
        )
    if needs.gpu and gpus < 1:
        raise ValueError(f"--gpus-per-node is {gpus}, but the run computes on GPUs; give 1 or more")
    if nodes is not None:
        try:
            groups(needs, shape := Shape(n_nodes=nodes, n_gpus_per_node=gpus, port=port))
        except Unplaceable as error:
            raise ValueError(f"--nodes is {nodes}, with {gpus} GPU(s) each, but {error}") from error
        return shape
    most = needs.spare_nodes + max(1, needs.servers + max(needs.trainer_ranks, needs.trainer_nodes))
    for count in range(1 + needs.spare_nodes, most + 1):
        shape = Shape(n_nodes=count, n_gpus_per_node=gpus, port=port)
        try:
            groups(needs, shape)
        except Unplaceable as error:
            if count == most:
                raise ValueError(
                    f"{count} machines of {gpus} GPU(s) are too few: {error}"
                ) from error
        else:
            return shape
    raise AssertionError("the loop returns or raises")


def groups(needs: Needs, shape: Shape) -> Sequence[Group]:
    """Machines by role, as the run places its processes: those that generate, train, do both, or
    wait as spares.
    """
    gpus = shape.n_gpus_per_node if needs.gpu else 0
    hosts = [HostSlots(name=f"{index}", gpus=gpus) for index in range(shape.n_nodes)]
    placement = place(
        hosts,
        Demand(
            engines=needs.servers,
            gpus_per_engine=needs.tensor_parallel if needs.gpu else 0,
            trainer_ranks=needs.trainer_ranks,
            gpus_per_rank=int(needs.gpu),
            trainer_hosts=needs.trainer_nodes,
            spare_hosts=needs.spare_nodes,
            shared=needs.shared,
        ),
    )
    servers, ranks = Counter(placement.engines), Counter(placement.trainer)
    busiest = {"engines": (max(servers.values(), default=0), 0)}
    busiest["trainer"] = (0, max(ranks.values(), default=0))
    busiest["nodes"] = (busiest["engines"][0], busiest["trainer"][1])
    busiest["spares"] = busiest["nodes"]
    roles = Counter(_role(host.name, servers, ranks, placement.spares) for host in hosts)
    return [
        Group(name=name, nodes=roles[name], gpus=gpus, servers=most[0], ranks=most[1])
        for name, most in busiest.items()
        if roles[name]
    ]


def _role(
    host: str, servers: Mapping[str, int], ranks: Mapping[str, int], spares: Sequence[str]
) -> str:
    if host in spares:
        return "spares"
    if servers[host] and ranks[host]:
        return "nodes"
    return "trainer" if ranks[host] else "engines"


def machine_of(
    needs: Needs, group: Group, *, cpus: int | None = None, memory_gib: int | None = None
) -> Machine:
    """Size of a group's machines.

    `cpus` and `memory_gib` (which includes shared memory) replace the computed numbers.
    """
    shared = max(1, math.ceil(_SHARED_SETS * needs.version_bytes / GIB))
    trainer = needs.trainer_bytes * group.ranks / needs.trainer_ranks
    used = math.ceil((group.servers * needs.server_bytes + trainer) / GIB)
    if memory_gib is not None and memory_gib <= shared:
        raise ValueError(
            f"--memory is {memory_gib} (GiB), but weights take {shared} GiB of shared memory; give "
            f"--memory {shared + used + _CONTROLLER_GIB}"
        )
    computed = _GPU_CPUS * group.gpus if group.gpus else 1 + group.servers + group.ranks
    return Machine(
        cpus=cpus or max(2, computed),
        memory_gib=memory_gib or _CONTROLLER_GIB + shared + used,
        shared_gib=shared,
        gpus=group.gpus,
    )


def largest(machines: Sequence[Machine]) -> Machine:
    """One size that is enough for each of them."""
    return Machine(
        cpus=max(one.cpus for one in machines),
        memory_gib=max(one.memory_gib for one in machines),
        shared_gib=max(one.shared_gib for one in machines),
        gpus=max(one.gpus for one in machines),
    )

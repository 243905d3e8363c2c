"""Whether a run uses several hosts, and what it asks of them."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lab.config.problem import Kind, Problem
from areal_lab.config.schema import TrainConfig
from areal_lab.control.liveness import loss_s
from areal_lab.control.placement import Demand, HostSlots, Unplaceable, place
from areal_lab.engines.weights.records import Transfer
from areal_lab.preflight.allocation import engine_plan
from areal_lab.preflight.placement import (
    check_placement,
    machine_of,
    place_engines,
    place_trainer,
    runs_on_hosts,
)


def host_demand(config: TrainConfig) -> Demand:
    """What a run asks of its hosts together.

    Raises:
        ConfigError: as `check_placement`.
    """
    machine, plan, cluster = machine_of(config), engine_plan(config), config.cluster
    engines, trainer = place_engines(config, machine), place_trainer(config, machine)
    return Demand(
        engines=0 if config.rollout.addresses else plan.servers,
        gpus_per_engine=plan.tensor_parallel if engines.device == "cuda" else 0,
        trainer_ranks=trainer.ranks,
        gpus_per_rank=int(trainer.device == "cuda"),
        trainer_hosts=cluster.trainer_nodes,
        spare_hosts=cluster.spare_nodes,
        shared=plan.shared,
    )


def explain_hosts(config: TrainConfig) -> list[str]:
    """Describe which host of a run would do what, one line each, as `placement.explain` does for
    one machine.

    Raises:
        ConfigError: as `check_placement`.
        Unplaceable: the hosts have no room.
    """
    plan, cluster = check_placement(config, machine_of(config)), config.cluster
    placed = place(_promised(config), host_demand(config))
    by = (
        "agents that are started by hand"
        if config.scheduler.type == "manual"
        else (f"scheduler {config.scheduler.type}")
    )
    lines = [f"asks for {cluster.n_nodes} hosts (by {by}), in their order:"]
    for host in _promised(config):
        engines = [str(n) for n, seat in enumerate(placed.engines) if seat == host.name]
        ranks = placed.trainer.count(host.name)
        work = [f"{plan.backend} engine{'s' * (len(engines) > 1)} {', '.join(engines)}"] * bool(
            engines
        ) + [f"{ranks} trainer process{'es' * (ranks > 1)}"] * bool(ranks)
        gpus = f" ({host.gpus} GPUs)" if host.gpus else ""
        lines.append(f"host {host.name}{gpus}: {' and '.join(work) or 'a spare'}")
    return lines


def _promised(config: TrainConfig) -> list[HostSlots]:
    """The hosts as the settings promise them."""
    return [
        HostSlots(name=f"h{number}", gpus=config.cluster.n_gpus_per_node)
        for number in range(1, config.cluster.n_nodes + 1)
    ]


def check_hosts(config: TrainConfig) -> Iterator[Problem]:
    """Check that hosts as the settings promise them have room; call it after `check_placement`."""
    if not runs_on_hosts(config):
        return
    if engine_plan(config).shared:
        yield Problem(
            Kind.PLACEMENT,
            "allocation_mode",
            f"allocation_mode is {config.allocation_mode}, but engines and trainer take turns on "
            "the devices of one machine only; write + instead of |, or cluster.n_nodes=1",
        )
        return
    transfer = Transfer(config.rollout.transfer)
    by_folder = transfer in (Transfer.FOLDER, Transfer.ADAPTER)
    if config.rollout.addresses and by_folder and config.scheduler.type != "local":
        yield Problem(
            Kind.SETTINGS,
            "rollout.transfer",
            f"rollout.transfer is {transfer}, but the trainer writes weights on its own host, "
            "where servers that the run did not start (rollout.addresses) do not find them; set it "
            f"to {Transfer.HTTP_TENSOR} or {Transfer.DISTRIBUTED}",
        )
    if config.token_fields:
        yield Problem(
            Kind.SETTINGS,
            "token_fields",
            "token_fields is true, but the trainer writes them on its own host; leave it out, or "
            "write cluster.n_nodes=1",
        )
    cluster = config.cluster
    if cluster.lease_s <= (found_s := loss_s(cluster.heartbeat_s, cluster.lost_after)):
        yield Problem(
            Kind.SETTINGS,
            "cluster.lease_s",
            f"cluster.lease_s is {cluster.lease_s:g}, but must be above {found_s:g}, the time in "
            "which a lost host is found (cluster.heartbeat_s times cluster.lost_after + 1): a host "
            "that is not lost would end its processes; raise it",
        )
    try:
        place(_promised(config), host_demand(config))
    except Unplaceable as error:
        yield Problem(Kind.PLACEMENT, "cluster.n_nodes", str(error))

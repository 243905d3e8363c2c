"""What a run asks of several hosts, and whether engines can join and leave while it continues."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lab.config.problem import Kind, Problem
from areal_lab.config.schema import TrainConfig
from areal_lab.control.liveness import loss_s
from areal_lab.control.placement import Demand, HostSlots, Unplaceable, place
from areal_lab.engines.weights.records import Transfer
from areal_lab.resolve.limits import schedule_of
from areal_lab.resolve.placement import Placed, runs_on_hosts

_SCALING = "rollout.scaling.max_engines"


def host_demand(placed: Placed) -> Demand:
    """What a run asks of its hosts together."""
    plan, cluster = placed.engines, placed.config.cluster
    return Demand(
        engines=0 if placed.config.rollout.addresses else plan.servers,
        gpus_per_engine=plan.tensor_parallel if plan.device == "cuda" else 0,
        trainer_ranks=placed.trainer.ranks,
        gpus_per_rank=int(placed.trainer.device == "cuda"),
        trainer_hosts=cluster.trainer_nodes,
        spare_hosts=cluster.spare_nodes,
        shared=plan.shared,
    )


def explain_hosts(placed: Placed) -> list[str]:
    """Describe which host of a run would do what, one line each, as `placement.explain` does for
    one machine.

    Raises:
        Unplaceable: the hosts have no room.
    """
    config, plan, cluster = placed.config, placed.engines, placed.config.cluster
    parts = place(_promised(config), host_demand(placed))
    by = (
        "agents that are started by hand"
        if config.scheduler.type == "manual"
        else (f"scheduler {config.scheduler.type}")
    )
    lines = [f"asks for {cluster.n_nodes} hosts (by {by}), in their order:"]
    for host in _promised(config):
        engines = [str(n) for n, seat in enumerate(parts.engines) if seat == host.name]
        ranks = parts.trainer.count(host.name)
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


def check_hosts(placed: Placed) -> Iterator[Problem]:
    """Check that hosts as the settings promise them have room."""
    config = placed.config
    if not runs_on_hosts(config):
        return
    if placed.engines.shared:
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
        place(_promised(config), host_demand(placed))
    except Unplaceable as error:
        yield Problem(Kind.PLACEMENT, "cluster.n_nodes", str(error))


def check_scaling(placed: Placed) -> Iterator[Problem]:
    """Check the bounds, the schedule and the room of more engines."""
    config, machine, plan = placed.config, placed.machine, placed.engines
    scaling = config.rollout.scaling
    if not (most := scaling.max_engines):
        return
    if config.rollout.addresses:
        yield Problem(
            Kind.SETTINGS,
            _SCALING,
            f"{_SCALING} is {most}, but a run starts no engines beside those of rollout.addresses; "
            "leave one of them out",
        )
        return
    if not scaling.min_engines <= plan.servers <= most:
        yield Problem(
            Kind.SETTINGS,
            _SCALING,
            f"the run starts with {plan.servers} engines, but rollout.scaling keeps "
            f"{scaling.min_engines} (min_engines) to {most} (max_engines) of them; change these, "
            "or rollout.engines",
        )
    schedule = schedule_of(config)
    if plan.shared or schedule.largest_eta < 1:
        yield Problem(
            Kind.SETTINGS,
            _SCALING,
            f"{_SCALING} is {most}, but "
            + (
                "engines and trainer share devices"
                if plan.shared
                else f"schedule {schedule.name} with eta {schedule.largest_eta:g} makes the "
                "trainer wait for engines however many there are"
            )
            + "; use rollout.schedule=asynchronous with eta >= 1 and devices of their own, or 0",
        )
        return
    if not runs_on_hosts(config) and plan.device == "cuda":
        needed = most * plan.tensor_parallel + len(placed.trainer.gpus)
        if needed > len(machine.gpus):
            yield Problem(
                Kind.PLACEMENT,
                _SCALING,
                f"{_SCALING} is {most}, but engines and trainer would then need {needed} GPUs of "
                f"the {len(machine.gpus)} here; lower it",
            )

"""Check that the engines and the trainer of a config can run on this machine.

TrainConfig, Machine --check_placement--> EnginePlan, or a one-line error
                     --explain--> lines that say what would start where
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from areal_lab.config.problem import refusal
from areal_lab.config.schema import TrainConfig
from areal_lab.engines.client.addresses import without_key
from areal_lab.engines.launch.backends import BACKENDS, Build
from areal_lab.engines.launch.device import Device, engine_device
from areal_lab.engines.launch.environments import (
    Condition,
    Environment,
    environment,
    own_torch_cuda,
)
from areal_lab.host.gpus import share_of, visible_gpus
from areal_lab.host.memory import memory_bytes
from areal_lab.preflight.allocation import (
    Allocation,
    EnginePlan,
    Sizes,
    engine_plan,
    parse_allocation,
)
from areal_lab.preflight.trainer import (
    FreeGpus,
    TrainerPlan,
    check_trainer,
    trainer_plan,
    trainer_ranks,
)
from areal_lab.preflight.turns import check_turns

_LEAST_BYTES: Final = 256 << 20
"""Private memory of a server without weights: an embedded one with a tiny model took 278 MiB
(torch 2.13); SGLang and vLLM take more."""
_LISTED: Final = 8
"""Maximum lines about engines or addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware and installed engines."""

    cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    engines: Mapping[str, Environment]
    torch_has_cuda: bool = False
    """Whether the trainer's torch can use GPUs."""


def this_machine() -> Machine:
    """Inspect cores, memory, GPUs and installed engines, without running anything."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes(),
        gpus=visible_gpus(),
        engines={name: environment(name) for name in BACKENDS},
        torch_has_cuda=bool(own_torch_cuda()),
    )


def runs_on_hosts(config: TrainConfig) -> bool:
    """Whether host agents start the engines and the trainer of a run, and not the run itself."""
    return config.cluster.n_nodes > 1 or config.scheduler.type != "local"


def machine_of(config: TrainConfig) -> Machine:
    """The machine of a run: this one, or a host like it with the GPUs that all are to have.

    What hosts really have is not known before they join; each says so itself.
    """
    here = this_machine()
    if not runs_on_hosts(config):
        return here
    gpus = config.cluster.n_nodes * config.cluster.n_gpus_per_node
    build: Build = "gpu" if gpus else "cpu"
    return Machine(
        cores=here.cores,
        memory_bytes=here.memory_bytes,
        gpus=tuple(map(str, range(gpus))),
        engines={
            name: replace(found, condition=Condition.READY, build=build)
            for name, found in here.engines.items()
        },
        torch_has_cuda=gpus > 0,
    )


def check_placement(config: TrainConfig, machine: Machine) -> EnginePlan:
    """The servers that a run would start here.

    Raises:
        ConfigError: in one line, with the setting, what is available and a fix.
    """
    try:
        plan = engine_plan(config)
    except ValueError as error:
        raise refusal("rollout.backend", str(error)) from error
    if config.allocation_mode:
        _check_allocation(parse_allocation(config.allocation_mode), config.allocation_mode)
    _check_sizes(config)
    if config.rollout.addresses:
        _check_shared(config, plan, machine)
        place_trainer(config, machine)
        return plan
    found = machine.engines[plan.backend]
    if not found.condition.usable:
        raise refusal(
            "rollout.backend",
            f"rollout.backend is {plan.backend}, but this engine is {found.condition} (looked in "
            f"{found.folder})",
            command=f"areal-lab engine install {plan.backend}",
        )
    _check_shared(config, plan, machine)
    if plan.tensor_parallel > 1 and not BACKENDS[plan.backend].tensor_parallel:
        raise refusal(
            "rollout.backend",
            f"{plan.backend}:t{plan.tensor_parallel} is tensor parallel, which {plan.backend} does "
            f"not support; write {plan.backend}:d{plan.servers}",
        )
    if found.build == "gpu" and BACKENDS[plan.backend].own_environment:
        if not runs_on_hosts(config):  # else `check_hosts` does, host by host
            _check_gpus(plan, machine)
    elif plan.tensor_parallel > 1:
        raise refusal(
            "rollout.backend",
            f"{plan.backend}:t{plan.tensor_parallel} is tensor parallel, which needs GPUs, but the "
            f"CPU build is installed; write {plan.backend}:d{plan.servers}",
        )
    place_trainer(config, machine)
    if not runs_on_hosts(config):
        _check_memory(plan, machine)
    return plan


def _check_shared(config: TrainConfig, plan: EnginePlan, machine: Machine) -> None:
    if plan.shared:
        allocation = parse_allocation(config.allocation_mode)
        place = place_engines(config, machine)
        check_turns(config, allocation, machine.engines[plan.backend].build, place.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """Where the servers of a run compute."""

    device: Device
    gpus: tuple[tuple[str, ...], ...] = ()
    """GPUs of each server, as `CUDA_VISIBLE_DEVICES` names them."""


def place_engines(config: TrainConfig, machine: Machine) -> EnginePlace:
    """Where the servers of a run would compute here: on the first GPUs, if on any. Attached servers
    count as on the CPU.

    Raises:
        ConfigError: in one line, if they cannot compute where they were asked to.
    """
    if config.rollout.addresses:
        return EnginePlace(device="cpu")
    plan, asked = engine_plan(config), config.rollout.device
    width = plan.tensor_parallel
    # `auto` leaves the trainer the GPUs that were asked for.
    kept = 0
    if asked == "auto" and config.actor.device == "cuda" and not plan.shared:
        kept = trainer_ranks(config)
    try:
        device = engine_device(
            machine.engines[plan.backend],
            asked,
            gpus=len(machine.gpus) - kept,
            needed=plan.servers * width,
        )
    except ValueError as error:
        raise refusal("rollout.device", f"rollout.device is {asked}, but {error}") from error
    if device == "cpu" or not machine.gpus:
        return EnginePlace(device=device)
    return EnginePlace(
        device=device,
        gpus=tuple(share_of(index, width, machine.gpus) for index in range(plan.servers)),
    )


def place_trainer(config: TrainConfig, machine: Machine) -> TrainerPlan:
    """Where the trainer of a run would compute here; the first GPUs are those of the engines, which
    may share them with it.

    Raises:
        ConfigError: in one line, if GPUs were asked for that are not there.
    """
    used = sum(map(len, place_engines(config, machine).gpus))
    shared = not config.rollout.addresses and engine_plan(config).shared
    free = machine.gpus[:used] if shared else machine.gpus[used:]
    return trainer_plan(
        config,
        FreeGpus(
            free=free,
            visible=len(machine.gpus),
            torch_has_cuda=machine.torch_has_cuda,
        ),
    )


def explain(config: TrainConfig, machine: Machine) -> list[str]:
    """Describe where a run would start its processes, one line each.

    Raises:
        ConfigError: as `check_placement`.
    """
    plan = check_placement(config, machine)
    if config.rollout.addresses:
        urls = [without_key(address) for address in config.rollout.addresses]
        lines = _each(len(urls), lambda i: f"attaches to {urls[i]}; starts no engine")
    else:
        found = machine.engines[plan.backend]
        folder = f" from {found.folder}" if BACKENDS[plan.backend].own_environment else ""
        lines = [
            f"starts {plan.servers} x {plan.backend} {found.version} ({found.build.upper()} build)"
            f"{folder}"
        ]
        place = place_engines(config, machine)
        lines += _each(plan.servers, lambda i: f"engine {i}: {_where(i, place, machine)}")
    turns = ", in turns with the engines" if plan.shared else ""
    lines.append(f"trainer: {_trainer_place(place_trainer(config, machine), machine)}{turns}")
    if config.allocation_mode:
        plain = parse_allocation(config.allocation_mode)
        lines.append(f"allocation_mode {config.allocation_mode} is read as {plain}")
    on_cpu = not config.rollout.addresses and place_engines(config, machine).device == "cpu"
    if on_cpu and plan.servers > machine.cores:
        lines.append(
            f"{plan.servers} engines share {machine.cores} core(s) with each other and the "
            "trainer: more engines are not faster here"
        )
    return lines


def _each(count: int, line: Callable[[int], str]) -> list[str]:
    """One line each; with many, only the first ones and the last."""
    if count <= _LISTED:
        return [line(index) for index in range(count)]
    first = [line(index) for index in range(_LISTED - 2)]
    return [*first, f"... {count - len(first) - 1} more ...", line(count - 1)]


def _where(index: int, place: EnginePlace, machine: Machine) -> str:
    if place.gpus:
        return f"GPU {', '.join(place.gpus[index])}"
    return f"CPU, {machine.cores} core(s) shared"


def _trainer_place(plan: TrainerPlan, machine: Machine) -> str:
    plural = "" if plan.ranks == 1 else "es"
    where = f"GPU {', '.join(plan.gpus)}" if plan.gpus else f"{machine.cores} core(s)"
    divided = [
        f"{count} of them divide each {what}"
        for count, what in ((plan.tensor, "layer"), (plan.context, "sequence"))
        if count > 1
    ]
    return ", ".join([f"{plan.ranks} process{plural} on {where}", *divided])


def _check_allocation(allocation: Allocation, text: str) -> None:
    trainer = allocation.trainer
    if allocation.evaluation_only:
        raise refusal(
            "allocation_mode", f"allocation_mode {text} only evaluates; to train, write +fsdp:d1"
        )
    if trainer is not None:
        check_trainer(trainer, text)


def _check_sizes(config: TrainConfig) -> None:
    """Refuse sizes of engines other than data and tensor parallel."""
    for setting, text in (
        ("rollout.backend", config.rollout.backend),
        ("allocation_mode", config.allocation_mode),
    ):
        if not text or text in BACKENDS:
            continue
        engines = parse_allocation(text).engines
        if engines is None:
            continue
        sizes = engines.sizes
        for name in ("pipeline", "context", "expert"):
            if getattr(sizes, name) > 1:
                raise refusal(
                    setting,
                    f"{setting} {text} has engines with {name} parallelism, which is not "
                    f"supported; use "
                    f"{engines.backend}:{Sizes(data=sizes.data, tensor=sizes.tensor)}",
                )


def _check_gpus(plan: EnginePlan, machine: Machine) -> None:
    needed = plan.servers * plan.tensor_parallel
    if needed > len(machine.gpus):
        raise refusal(
            "rollout.backend",
            f"{plan.backend}:{Sizes(data=plan.servers, tensor=plan.tensor_parallel)} needs "
            f"{needed} GPU(s), but {len(machine.gpus)} are visible; ask for fewer servers, or run: "
            f"areal-lab engine install {plan.backend} --build cpu",
        )


def _check_memory(plan: EnginePlan, machine: Machine) -> None:
    """Refuse an absurd number of servers early, before anything is created per server."""
    most = max(1, machine.memory_bytes // _LEAST_BYTES)
    if plan.servers > most:
        raise refusal(
            "rollout.engines",
            f"rollout.engines (the d of rollout.backend and allocation_mode) is {plan.servers}, "
            f"but {machine.memory_bytes / 2**30:.1f} GiB of memory hold at most {most} servers "
            f"({_LEAST_BYTES >> 20} MiB each, without weights); lower it",
        )

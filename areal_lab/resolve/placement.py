"""Decide where the engines and the trainer of a config compute, or why they cannot.

TrainConfig, Machine --place_run--> Placed, or a one-line error
                                      '--explain--> lines that say what would start where
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from areal_lab.config.problem import refusal
from areal_lab.config.record import value_of
from areal_lab.config.schema import TrainConfig
from areal_lab.control.schedule import SCHEDULES, schedule_named
from areal_lab.engines.client.addresses import without_key
from areal_lab.engines.launch.backends import BACKENDS, Build
from areal_lab.engines.launch.environments import (
    Condition,
    Environment,
    environment,
    own_torch_cuda,
)
from areal_lab.engines.launch.options import engine_device
from areal_lab.engines.protocol import PauseMode
from areal_lab.engines.weights.records import Transfer
from areal_lab.host.machine import share_of, visible_gpus
from areal_lab.host.memory import memory_bytes
from areal_lab.resolve.allocation import (
    Allocation,
    EnginePlan,
    Layout,
    Sizes,
    layout_of,
)
from areal_lab.resolve.trainer import (
    NO_TRAINER,
    FreeGpus,
    TrainerPlan,
    check_trainer,
    trainer_plan,
)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A config, and where its engines and its trainer compute."""

    config: TrainConfig
    machine: Machine
    """Of the run."""
    engines: EnginePlan
    trainer: TrainerPlan = NO_TRAINER
    allocation: Allocation | None = None
    """Of `allocation_mode`, if it is set."""

    @property
    def engine_count(self) -> int:
        """Servers of the run, launched or attached."""
        return len(self.config.rollout.addresses) or self.engines.servers


def place_run(config: TrainConfig, machine: Machine | None = None) -> Placed:
    """Check that the engines and the trainer of a run can compute, and place them.

    Args:
        machine: that they are placed on; None is `machine_of(config)`.

    Raises:
        ConfigError: in one line, with the setting, what is available and a fix.
    """
    machine, layout = machine or machine_of(config), _layout(config)
    plan = layout.engines
    _check_layout(config, layout)
    if not config.rollout.addresses:
        found = machine.engines[plan.backend]
        if not found.condition.usable:
            raise refusal(
                "rollout.backend",
                f"rollout.backend is {plan.backend}, but this engine is {found.condition} (looked "
                f"in {found.folder})",
                command=f"areal-lab engine install {plan.backend}",
            )
    if plan.together:
        _check_together(config, layout, machine)
    elif plan.shared:
        _check_turns(config, layout, machine)
    if not config.rollout.addresses:
        _check_tensor_parallel(config, plan, machine)
    placed = _placed(config, machine, layout)
    if not (config.rollout.addresses or runs_on_hosts(config)):
        _check_memory(plan, machine)
    return placed


def place_parts(config: TrainConfig, machine: Machine | None = None) -> Placed:
    """As `place_run`, without looking whether the engines are installed and have enough GPUs.

    Raises:
        ConfigError: in one line, if they or the trainer cannot compute where they were asked to.
    """
    return _placed(config, machine or machine_of(config), _layout(config))


def place_servers(config: TrainConfig, machine: Machine | None = None) -> Placed:
    """As `place_parts`, of a config that trains nothing."""
    machine, layout = machine or machine_of(config), _layout(config)
    engines = _place_engines(config, layout, machine)
    return Placed(config=config, machine=machine, engines=engines)


def _placed(config: TrainConfig, machine: Machine, layout: Layout) -> Placed:
    engines = _place_engines(config, layout, machine)
    used = sum(map(len, engines.gpus))
    shared = (engines.shared or engines.together) and not config.rollout.addresses
    free = machine.gpus[:used] if shared else machine.gpus[used:]
    gpus = FreeGpus(free=free, visible=len(machine.gpus), torch_has_cuda=machine.torch_has_cuda)
    return Placed(
        config=config,
        machine=machine,
        engines=engines,
        trainer=trainer_plan(config, layout.trainer, gpus),
        allocation=layout.allocation,
    )


def _layout(config: TrainConfig) -> Layout:
    try:
        return layout_of(config)
    except ValueError as error:
        raise refusal("rollout.backend", str(error)) from error


def _place_engines(config: TrainConfig, layout: Layout, machine: Machine) -> EnginePlan:
    """On the first GPUs, if on any."""
    check_visible(machine.gpus)
    plan, asked = layout.engines, config.rollout.device
    if config.rollout.addresses:
        return plan
    width = plan.tensor_parallel
    # `auto` leaves the trainer the GPUs that were asked for.
    kept = 0
    if asked == "auto" and config.actor.device == "cuda" and not (plan.shared or plan.together):
        kept = layout.trainer.devices
    try:
        device = engine_device(
            machine.engines[plan.backend],
            asked,
            gpus=len(machine.gpus) - kept,
            needed=plan.servers * width,
        )
    except ValueError as error:
        raise refusal("rollout.device", f"rollout.device is {asked}, but {error}") from error
    gpus: tuple[tuple[str, ...], ...] = ()
    if device == "cuda" and machine.gpus:
        gpus = tuple(share_of(index, width, machine.gpus) for index in range(plan.servers))
    return replace(plan, device=device, gpus=gpus)


def explain(placed: Placed) -> list[str]:
    """Describe where a run would start its processes, one line each."""
    config, machine, plan = placed.config, placed.machine, placed.engines
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
        lines += _each(plan.servers, lambda i: f"engine {i}: {_where(i, plan, machine)}")
    turns = ", in turns with the engines" if plan.shared else ""
    turns = ", at the same time as the engines" if plan.together else turns
    lines.append(f"trainer: {_trainer_place(placed.trainer, machine)}{turns}")
    if placed.allocation is not None:
        lines.append(f"allocation_mode {config.allocation_mode} is read as {placed.allocation}")
    on_cpu = not config.rollout.addresses and plan.device == "cpu"
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


def _where(index: int, plan: EnginePlan, machine: Machine) -> str:
    if plan.gpus:
        return f"GPU {', '.join(plan.gpus[index])}"
    return f"CPU, {machine.cores} core(s) shared"


def _trainer_place(plan: TrainerPlan, machine: Machine) -> str:
    plural = "" if plan.ranks == 1 else "es"
    where = f"GPU {', '.join(plan.gpus)}" if plan.gpus else f"{machine.cores} core(s)"
    divided = [
        f"{count} of them divide each {what}"
        for count, what in ((plan.sizes.tensor, "layer"), (plan.sizes.context, "sequence"))
        if count > 1
    ]
    return ", ".join([f"{plan.ranks} process{plural} on {where}", *divided])


def _check_layout(config: TrainConfig, layout: Layout) -> None:
    """Refuse an allocation that trains nothing or in a way that is not supported, and sizes of
    engines other than data and tensor parallel."""
    allocation, mode = layout.allocation, config.allocation_mode
    if allocation is not None and allocation.evaluation_only:
        raise refusal(
            "allocation_mode", f"allocation_mode {mode} only evaluates; to train, write +fsdp:d1"
        )
    if allocation is not None and allocation.trainer is not None:
        check_trainer(allocation.trainer, mode)
    sizes, setting = layout.sizes, layout.setting
    for name in ("pipeline", "context", "expert"):
        if getattr(sizes, name) > 1:
            raise refusal(
                setting,
                f"{setting} {value_of(config, setting)} has engines with {name} parallelism, which "
                f"is not supported; use {layout.engines.backend}:"
                f"{Sizes(data=sizes.data, tensor=sizes.tensor)}",
            )


def _check_tensor_parallel(config: TrainConfig, plan: EnginePlan, machine: Machine) -> None:
    """Refuse servers that need GPUs or several of them where there are none or too few."""
    backend, several = BACKENDS[plan.backend], plan.tensor_parallel > 1
    asked = f"{plan.backend}:t{plan.tensor_parallel} is tensor parallel, which"
    if several and not backend.tensor_parallel:
        raise refusal(
            "rollout.backend",
            f"{asked} {plan.backend} does not support; write {plan.backend}:d{plan.servers}",
        )
    if machine.engines[plan.backend].build == "gpu" and backend.own_environment:
        if not runs_on_hosts(config):  # else `check_hosts` does, host by host
            _check_gpus(plan, machine)
    elif several:
        raise refusal(
            "rollout.backend",
            f"{asked} needs GPUs, but the CPU build is installed; write "
            f"{plan.backend}:d{plan.servers}",
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


def check_visible(gpus: Sequence[str]) -> None:
    """Refuse a GPU that `CUDA_VISIBLE_DEVICES` names twice.

    Processes that believe to have a GPU each would wait for each other in NCCL without end.

    Raises:
        ConfigError: in one line.
    """
    twice = next((gpu for gpu in gpus if gpus.count(gpu) > 1), None)
    if twice is not None:
        raise refusal(
            "CUDA_VISIBLE_DEVICES",
            f"CUDA_VISIBLE_DEVICES is {','.join(gpus)}, which names GPU {twice} twice; name it "
            "once, and set rollout.share_gpu=true to let an engine and the trainer share it",
        )


def _check_together(config: TrainConfig, layout: Layout, machine: Machine) -> None:
    """Check that engines and trainer can compute on the same devices at the same time."""
    for setting, why in _sharing_problems(config, layout, machine):
        raise refusal(setting, f"rollout.share_gpu is true, but {why}")


def _sharing_problems(
    config: TrainConfig, layout: Layout, machine: Machine
) -> Iterator[tuple[str, str]]:
    """The setting, and why it does not go with GPUs that are used by two at the same time."""
    rollout, plan, trainer = config.rollout, layout.engines, layout.trainer
    if rollout.addresses:
        yield (
            "rollout.addresses",
            "the servers of rollout.addresses are not started by the run, which cannot limit their "
            "memory; remove one of the two",
        )
    if plan.shared:
        yield (
            "allocation_mode",
            f"allocation_mode {config.allocation_mode} takes turns on the devices; write + instead "
            "of |, or leave out rollout.share_gpu",
        )
    if plan.backend != "embedded":
        yield (
            "rollout.backend",
            f"only embedded engines share their GPU, not {plan.backend}; write "
            "rollout.backend=embedded, or | in allocation_mode to take turns",
        )
    if runs_on_hosts(config):
        yield (
            "rollout.share_gpu",
            "engines and trainer share GPUs of one machine only; write cluster.n_nodes=1 and "
            "scheduler.type=local, or leave it out",
        )
    if rollout.scaling.max_engines:
        yield (
            "rollout.scaling.max_engines",
            "an engine that is added later would have no GPU of a trainer process; leave out "
            "rollout.scaling.max_engines",
        )
    if Transfer(rollout.transfer) is Transfer.DISTRIBUTED:
        yield (
            "rollout.transfer",
            "NCCL refuses two processes of a group on one GPU; set rollout.transfer=folder",
        )
    if plan.servers != trainer.devices:
        yield (
            "allocation_mode",
            f"there are {plan.servers} engine(s) for {trainer.devices} trainer process(es); write "
            f"allocation_mode=embedded:d{trainer.devices}+fsdp:{trainer}",
        )
    for setting, device in (("rollout", rollout.device), ("actor", config.actor.device)):
        if device == "cpu":
            yield f"{setting}.device", f"{setting}.device is cpu; write auto or cuda"
    if not machine.torch_has_cuda or len(machine.gpus) < trainer.devices:
        why = f"{len(machine.gpus)} are visible"
        if not machine.torch_has_cuda:
            why = "the installed torch was built without CUDA"
        yield (
            "rollout.share_gpu",
            f"it needs {trainer.devices} GPU(s), and {why}; leave it out to compute on the CPU",
        )


def _check_turns(config: TrainConfig, layout: Layout, machine: Machine) -> None:
    """Check that engines and trainer can take turns on the same devices."""
    allocation = layout.allocation
    assert allocation is not None, "only allocation_mode shares devices"
    for setting, why in _turn_problems(config, layout, allocation, machine):
        raise refusal(setting, f"allocation_mode {config.allocation_mode} shares devices{why}")


def _turn_problems(
    config: TrainConfig, layout: Layout, allocation: Allocation, machine: Machine
) -> Iterator[tuple[str, str]]:
    """The setting, and why it does not go with devices that are shared."""
    engines, trainer = allocation.engines, allocation.trainer
    assert engines is not None, "devices are shared by two"
    assert trainer is not None, "devices are shared by two"
    build = machine.engines[engines.backend].build
    device = _place_engines(config, layout, machine).device
    rollout, apart = config.rollout, f"write + instead of |: {engines}+{trainer}"
    name = rollout.schedule
    if not schedule_named(name, eta=1).takes_turns:
        able = [one for one in SCHEDULES if schedule_named(one, eta=1).takes_turns]
        yield (
            "rollout.schedule",
            f", but schedule {name} generates while it trains; set rollout.schedule to "
            f"{' or '.join(able)}, or {apart}",
        )
    if rollout.addresses:
        yield (
            "rollout.addresses",
            ", but the servers of rollout.addresses are not started by the run, which cannot know "
            "their devices; remove rollout.addresses, or write + instead of |",
        )
    backend = BACKENDS[engines.backend]
    if build not in backend.releases_memory:
        yield (
            "allocation_mode",
            f", but {backend.name} cannot give its memory to the trainer: "
            f"{backend.releases_reason}; {apart}",
        )
    if engines.sizes.devices != trainer.sizes.devices:
        yield (
            "allocation_mode",
            f", but its engines have {engines.sizes.devices} and its trainer "
            f"{trainer.sizes.devices}; write the same number of devices on both sides of |",
        )
    if Transfer(rollout.transfer) is Transfer.ADAPTER:
        yield (
            "rollout.transfer",
            ", so that engines lose the weights that adapters belong to; set "
            "rollout.transfer=folder",
        )
    if Transfer(rollout.transfer) is Transfer.DISTRIBUTED and device == "cuda":
        yield (
            "rollout.transfer",
            ", but NCCL refuses two processes of a group on one GPU; set rollout.transfer=folder",
        )
    if PauseMode(rollout.pause_mode) is PauseMode.IN_PLACE:
        yield (
            "rollout.pause_mode",
            ", so that engines lose the cache that rollout.pause_mode=in_place keeps; set "
            "rollout.pause_mode=retract",
        )

"""Check that engines and trainer can take turns on the same devices (`sglang:d4|fsdp:d4`)."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lab.config.problem import refusal
from areal_lab.config.schema import TrainConfig
from areal_lab.control.schedule import SCHEDULES, schedule_named
from areal_lab.engines.launch.backends import BACKENDS, Build
from areal_lab.engines.launch.device import Device
from areal_lab.engines.protocol import PauseMode
from areal_lab.engines.weights.records import Transfer
from areal_lab.preflight.allocation import Allocation


def check_turns(config: TrainConfig, allocation: Allocation, build: Build, device: Device) -> None:
    """Check an allocation whose engines and trainer share devices.

    Args:
        config: the settings around it.
        allocation: parsed from `config.allocation_mode`.
        build: of the engines that are installed.
        device: where they compute.

    Raises:
        ConfigError: in one line, with the setting and a fix.
    """
    for setting, why in _problems(config, allocation, build, device):
        raise refusal(setting, f"allocation_mode {config.allocation_mode} shares devices{why}")


def _problems(
    config: TrainConfig, allocation: Allocation, build: Build, device: Device
) -> Iterator[tuple[str, str]]:
    """The setting, and why it does not go with devices that are shared."""
    engines, trainer = allocation.engines, allocation.trainer
    assert engines is not None, "devices are shared by two"
    assert trainer is not None, "devices are shared by two"
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

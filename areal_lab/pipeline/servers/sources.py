"""The sources of a run's engines: servers to launch or to attach to, and their weights folder.

launched   a server started here with the model folder, which has the trainer's first weights
attached   a server that the run did not start; waits until it is ready
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import EngineId, Version
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.client.addresses import is_local
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.launch.backends import ServerOptions
from areal_lab.engines.launch.start import EngineProcess, launch_engine
from areal_lab.engines.protocol import LoraShape
from areal_lab.engines.weights.records import Transfer
from areal_lab.engines.weights.root import ROOM_FACTOR, choose_weights_root
from areal_lab.models.folder import read_model_facts
from areal_lab.models.vision import is_vision_model
from areal_lab.pipeline.servers.attach import attach, load_base_model
from areal_lab.pipeline.servers.pool import EngineSource
from areal_lab.preflight.allocation import engine_plan
from areal_lab.preflight.limits import lora_of, version_bytes
from areal_lab.preflight.placement import machine_of, place_engines
from areal_lab.runlog.folder import RunFolder


class LaunchEngine(Protocol):
    """Starts a server, as `launch.start.launch_engine` does here."""

    async def __call__(
        self,
        backend: str,
        options: ServerOptions,
        *,
        index: int,
        log_path: Path,
        ready_timeout_s: float,
        request_timeout_s: float | None,
    ) -> EngineProcess:
        """Start a server; returns when it is ready."""
        ...


def count_engines(config: TrainConfig) -> int:
    """Number of servers of the run, launched or attached."""
    return len(config.rollout.addresses) or engine_plan(config).servers


@dataclass(frozen=True, slots=True)
class LaunchModel:
    """What a server is launched with."""

    path: Path
    version: Version = 0
    lora: LoraShape | None = None
    """Shape of the LoRA adapters that it will get."""


def known_before_trainer(
    config: TrainConfig, model_path: Path, version: Version = 0
) -> LaunchModel | None:
    """What servers are launched with, if that does not depend on the trainer; else None.

    The trainer's first weights are those of the model folder. It has to write them for servers that
    cannot read the folder, and to say which layers its adapters are for. Servers that share its
    devices wait until it has left them.

    Args:
        model_path: the model, or the checkpoint that a run continues from.
        version: of these weights.
    """
    if Transfer(config.rollout.transfer) is Transfer.ADAPTER or engine_plan(config).shared:
        return None
    known = any(model_path.glob("*.safetensors"))
    return LaunchModel(model_path, version) if known else None


def engine_sources(
    config: TrainConfig,
    folder: RunFolder,
    first: asyncio.Future[LaunchModel],
    *,
    model_path: Path,
    codec: TextCodec,
    threads: int,
    conversations: bool | None = None,
    launch: LaunchEngine | None = None,
) -> dict[EngineId, EngineSource]:
    """The sources of all engines, of those that may join later too; nothing is started yet.

    Args:
        first: what a server is launched with the first time; it waits for this.
        model_path: what it is launched with after a loss.
        codec: the model's tokenizer.
        threads: CPU threads of each engine.
        conversations: whether prompts continue earlier responses; None if there is a workflow.
        launch: starts a server on a host; None starts it here.
    """
    if conversations is None:
        conversations = bool(config.rollout.workflow)
    if addresses := config.rollout.addresses:
        return {
            index: _attached(address, config, model_path) for index, address in enumerate(addresses)
        }
    return {
        index: _launched(
            index,
            config,
            folder,
            first=first,
            model_path=model_path,
            finds_strings=bool(codec.stops(config.gconfig.stop).strings),
            threads=threads,
            conversations=conversations,
            launch=launch or launch_engine,
        )
        for index in range(max(count_engines(config), config.rollout.scaling.max_engines))
    }


async def attach_to(address: str, config: TrainConfig, model_path: Path) -> EngineClient:
    """Attach to the server at an address with the settings of the configuration."""
    client = await attach(
        address,
        model_path,
        request_timeout_s=config.rollout.request_timeout_s,
        ready_timeout_s=config.rollout.ready_timeout_s,
        transfer=config.rollout.transfer,
        lora=lora_of(config) if Transfer(config.rollout.transfer) is Transfer.ADAPTER else None,
        top_p=config.gconfig.top_p,
        top_k=config.gconfig.top_k,
    )
    client.stream_every(config.rollout.stream_interval)
    return client


def make_weights_root(config: TrainConfig, folder: RunFolder, model_path: Path) -> Path:
    """Make the folder for weights: not in shared memory if a server is on another machine."""
    rollout = config.rollout
    if not all(is_local(address) for address in rollout.addresses):
        root = folder.path / "weights"
        root.mkdir(exist_ok=True)  # a run that was killed left it
        return root
    # An engine that is restarted or added needs the weights that the others hold: one more set.
    sets = ROOM_FACTOR + (rollout.max_engine_restarts > 0 or rollout.scaling.max_engines > 0)
    size_bytes = version_bytes(config, model_path, read_model_facts(model_path).parameters)
    return choose_weights_root(folder.path, size_bytes, sets=sets)


def _attached(address: str, config: TrainConfig, model_path: Path) -> EngineSource:
    async def open_() -> EngineClient:
        client = await attach_to(address, config, model_path)
        if Transfer(config.rollout.transfer) is Transfer.ADAPTER:
            await load_base_model(client, model_path)
        return client

    return open_


def _launched(
    index: EngineId,
    config: TrainConfig,
    folder: RunFolder,
    *,
    first: asyncio.Future[LaunchModel],
    model_path: Path,
    finds_strings: bool,
    threads: int,
    conversations: bool,
    launch: LaunchEngine,
) -> EngineSource:
    """Make the function that starts engine `index`.

    A folder that the trainer wrote is removed once there are newer weights; a restarted server gets
    the newer ones before it gets work.

    Args:
        finds_strings: whether it needs a tokenizer to end responses at stop strings.
        conversations: whether prompts continue earlier responses.
    """
    rollout, plan = config.rollout, engine_plan(config)
    device = place_engines(config, machine_of(config)).device
    restarts = index >= count_engines(config)  # it joins later, when that folder may be gone

    async def start() -> EngineProcess:
        nonlocal restarts
        model = await first
        if restarts:
            model = replace(model, path=model_path)
        restarts = True
        options = ServerOptions(
            model=model.path,
            version=str(model.version),
            port=rollout.port + index if rollout.port else 0,
            threads=threads,
            dtype=rollout.dtype,
            device=device,
            max_running_requests=rollout.max_running_requests,
            tensor_parallel=plan.tensor_parallel,
            tokenizer=model_path if finds_strings or is_vision_model(model_path) else None,
            keeps_prefixes=conversations,
            lora=model.lora,
            releases_memory=plan.shared,
            extra=tuple(rollout.engine_args),
        )
        engine = await launch(
            plan.backend,
            options,
            index=index,
            log_path=folder.log(f"engine-{index}"),
            ready_timeout_s=rollout.ready_timeout_s,
            request_timeout_s=rollout.request_timeout_s,
        )
        # The folder of the trainer's first weights has no tokenizer, and may be on another host.
        engine.client.note_tokenizer(model_path)
        engine.client.note_end_tokens(model_path)
        engine.client.stream_every(rollout.stream_interval)
        return engine

    return start

"""Where the engines of a run come from, the first time and again; where their weights lie.

launched   a server started here: first with the trainer's weights, then with the model's own
attached   a server that somebody else runs, waited for until it is ready
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import EngineId
from areal_lab.engines.client.addresses import is_local
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.launch.backends import ServerOptions
from areal_lab.engines.launch.start import EngineProcess, launch_engine
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.records import Transfer
from areal_lab.engines.weights.root import ROOM_FACTOR, choose_weights_root
from areal_lab.models.folder import read_model_facts
from areal_lab.pipeline.servers.attach import attach, give_base
from areal_lab.pipeline.servers.pool import Place
from areal_lab.preflight.allocation import engine_plan
from areal_lab.preflight.limits import lora_of, version_bytes
from areal_lab.runlog.folder import RunFolder


def count_engines(config: TrainConfig) -> int:
    """Servers of the run, whoever runs them."""
    return len(config.rollout.addresses) or engine_plan(config).servers


def engine_places(
    config: TrainConfig, folder: RunFolder, weights: WeightsFolder, model_path: Path, threads: int
) -> dict[EngineId, Place]:
    """The engines of the run, none of them started yet.

    Args:
        weights: what a server is started with the first time.
        threads: CPU threads of each engine.
    """
    if addresses := config.rollout.addresses:
        return {
            index: Place(open=_attached(address, config, model_path))
            for index, address in enumerate(addresses)
        }

    def launched(index: EngineId) -> Place:
        start = _launched(
            index, config, folder, weights=weights, model_path=model_path, threads=threads
        )
        return Place(open=start)

    return {index: launched(index) for index in range(count_engines(config))}


async def attach_to(address: str, config: TrainConfig, model_path: Path) -> EngineClient:
    """Wait until the server at an address is ready, as long as the configuration says."""
    return await attach(
        address,
        model_path,
        request_timeout_s=config.rollout.request_timeout_s,
        ready_timeout_s=config.rollout.ready_timeout_s,
        transfer=config.rollout.transfer,
        lora=lora_of(config) if Transfer(config.rollout.transfer) is Transfer.ADAPTER else None,
        top_p=config.gconfig.top_p,
        top_k=config.gconfig.top_k,
    )


def make_weights_root(config: TrainConfig, folder: RunFolder, model_path: Path) -> Path:
    """Where the engines find weights: servers on other machines do not see our shared memory."""
    rollout = config.rollout
    if not all(is_local(address) for address in rollout.addresses):
        root = folder.path / "weights"
        root.mkdir()
        return root
    # An engine that comes back needs what the others hold: one set of weights more.
    sets = ROOM_FACTOR + (rollout.max_engine_restarts > 0)
    size_bytes = version_bytes(config, model_path, read_model_facts(model_path).parameters)
    return choose_weights_root(folder.path, size_bytes, sets=sets)


def _attached(
    address: str, config: TrainConfig, model_path: Path
) -> Callable[[], Awaitable[EngineClient]]:
    async def open_() -> EngineClient:
        client = await attach_to(address, config, model_path)
        if Transfer(config.rollout.transfer) is Transfer.ADAPTER:
            await give_base(client, model_path)
        return client

    return open_


def _launched(
    index: EngineId,
    config: TrainConfig,
    folder: RunFolder,
    *,
    weights: WeightsFolder,
    model_path: Path,
    threads: int,
) -> Callable[[], Awaitable[EngineProcess]]:
    """Starts engine `index`.

    The folder of the first weights goes when there are newer ones; a server that is started again
    is given those before it gets work.
    """
    rollout, plan = config.rollout, engine_plan(config)
    folders = chain([weights], repeat(replace(weights, path=model_path)))

    async def start() -> EngineProcess:
        weights = next(folders)
        options = ServerOptions(
            model=weights.path,
            version=str(weights.version),
            port=rollout.port + index if rollout.port else 0,
            threads=threads,
            dtype=rollout.dtype,
            max_running_requests=rollout.max_running_requests,
            tensor_parallel=plan.tensor_parallel,
            lora=weights.adapter,
            extra=tuple(rollout.engine_args),
        )
        return await launch_engine(
            plan.backend,
            options,
            index=index,
            log_path=folder.log(f"engine-{index}"),
            ready_timeout_s=rollout.ready_timeout_s,
            request_timeout_s=rollout.request_timeout_s,
        )

    return start

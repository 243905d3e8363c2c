"""Sources of a run's engines: launch servers or attach to them, and make the weights folder.

launched   a server that the run starts with the model folder, which has the first weights
attached   a server that the run did not start: wait until it is ready, check it, push weights to
           it, never stop it

    address --ready?--> dialect? same model shape? transfer supported? --> EngineClient

Every error is one line that names the address and the fix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from areal_lab.control.events import EngineId, Version
from areal_lab.engines.client.addresses import CannotAttach, is_local, port_of
from areal_lab.engines.client.dialect import Dialect
from areal_lab.engines.client.engine_client import EngineClient, EngineError, EngineUnreachable
from areal_lab.engines.keys import key_for
from areal_lab.engines.launch.backends import (
    BACKENDS,
    ServerOptions,
    lora_refusal,
    transfer_refusal,
    truncation_refusal,
)
from areal_lab.engines.launch.detect import dialect_at
from areal_lab.engines.launch.start import EngineProcess, launch_engine
from areal_lab.engines.protocol import LoraShape, PauseMode, WeightsFolder
from areal_lab.engines.weights.records import Transfer
from areal_lab.engines.weights.root import ROOM_FACTOR, choose_weights_root
from areal_lab.models.files import read_object
from areal_lab.models.vision import is_vision_model
from areal_lab.pipeline.servers.pool import EngineSource
from areal_lab.resolve.limits import lora_of
from areal_lab.resolve.resolved import Served
from areal_lab.runlog.folder import RunFolder


class LaunchEngine(Protocol):
    """Function that starts a server, here or on another host; see `launch.start.launch_engine`."""

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


@dataclass(frozen=True, slots=True)
class LaunchModel:
    """Model with which a server is launched."""

    path: Path
    version: Version = 0
    lora: LoraShape | None = None
    """Shape of the LoRA adapters that the server will receive."""


def known_before_trainer(
    served: Served, model_path: Path, version: Version = 0
) -> LaunchModel | None:
    """Return the model for the launch if it does not depend on the trainer, else None.

    The trainer's first weights equal those of the model folder. Servers wait for the trainer if
    they cannot read the folder, if they receive adapters (the trainer chooses the layers), or if
    they share the trainer's devices, which it uses first.

    Args:
        served: model and engines of the run.
        model_path: the model, or the checkpoint from which a run continues.
        version: version of these weights.
    """
    by_adapter = Transfer(served.config.rollout.transfer) is Transfer.ADAPTER
    if by_adapter or served.engines.shared:
        return None
    known = any(model_path.glob("*.safetensors"))
    return LaunchModel(model_path, version) if known else None


def engine_sources(
    served: Served,
    folder: RunFolder,
    first: asyncio.Future[LaunchModel],
    *,
    threads: int,
    clients: bool = False,
    launch: LaunchEngine | None = None,
) -> dict[EngineId, EngineSource]:
    """Return the sources of all engines, including those that may join later; starts nothing.

    Args:
        served: model and engines; a server is launched with this model after a loss.
        folder: run folder, for the logs of servers.
        first: model of the first launch, for which a server waits.
        threads: CPU threads of each engine.
        clients: requests are those of a gateway's clients: prompts continue earlier responses, and
            responses may have to match JSON schemas.
        launch: starts a server on a host; None starts it here.
    """
    rollout = served.config.rollout
    if rollout.addresses:
        return {
            index: _attached(address, served) for index, address in enumerate(rollout.addresses)
        }
    return {
        index: _launched(
            index,
            served,
            folder,
            first=first,
            threads=threads,
            clients=clients,
            launch=launch or launch_engine,
        )
        for index in range(max(served.engine_count, rollout.scaling.max_engines))
    }


async def attach_to(address: str, served: Served) -> EngineClient:
    """Attach to the server at an address, with the settings of the configuration."""
    config = served.config
    client = await attach(
        address,
        served.model,
        request_timeout_s=config.rollout.request_timeout_s,
        ready_timeout_s=config.rollout.ready_timeout_s,
        transfer=config.rollout.transfer,
        lora=lora_of(config) if Transfer(config.rollout.transfer) is Transfer.ADAPTER else None,
        top_p=config.gconfig.top_p,
        top_k=config.gconfig.top_k,
    )
    client.stream_every(config.rollout.stream_interval)
    return client


def make_weights_root(served: Served, folder: RunFolder) -> Path:
    """Make the weights folder, on a disk instead of shared memory if a server is remote."""
    rollout = served.config.rollout
    # A restarted or added engine needs the current weights of the others: one more set.
    sets = ROOM_FACTOR + (rollout.max_engine_restarts > 0 or rollout.scaling.max_engines > 0)
    local = all(is_local(address) for address in rollout.addresses)
    return choose_weights_root(folder.path, served.version_bytes, sets=sets, local=local)


def _attached(address: str, served: Served) -> EngineSource:
    async def open_() -> EngineClient:
        client = await attach_to(address, served)
        if Transfer(served.config.rollout.transfer) is Transfer.ADAPTER:
            await load_base_model(client, served.model)
        return client

    return open_


def _launched(
    index: EngineId,
    served: Served,
    folder: RunFolder,
    *,
    first: asyncio.Future[LaunchModel],
    threads: int,
    clients: bool,
    launch: LaunchEngine,
) -> EngineSource:
    """Make the function that starts engine `index`.

    The folder of the first weights may be removed later, so a restarted server starts with the
    model folder, and gets the current weights before it gets requests.
    """
    config, plan, model_path = served.config, served.engines, served.model
    rollout, share = config.rollout, served.gpu_share
    # The server needs a tokenizer for stop strings, for images and for JSON schemas.
    tokenizes = (
        bool(served.codec.stops(config.gconfig.stop).strings)
        or is_vision_model(model_path)
        or (clients and plan.device == "cpu" and BACKENDS[rollout.backend].grammars)
    )
    restarts = index >= served.engine_count  # a server that joins later also starts this way

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
            device=plan.device,
            max_running_requests=rollout.max_running_requests,
            tensor_parallel=plan.tensor_parallel,
            tokenizer=model_path if tokenizes else None,
            keeps_prefixes=clients or bool(rollout.workflow),
            lora=model.lora,
            releases_memory=plan.shared,
            cache_limit_bytes=_cache_limit_bytes(served),
            gpu_memory_fraction=1.0 if share is None else share.engine_fraction,
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


def _cache_limit_bytes(served: Served) -> int | None:
    """Limit of an engine's keys and values: that of a shared GPU, or `rollout.cache_gib`."""
    if served.gpu_share is not None:
        return served.gpu_share.cache_bytes
    return int(served.config.rollout.cache_gib * 2**30) or None


POLL_S = 0.2
_SHAPE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
"""Fields of config.json that must be equal for the weights of one model to fit another."""


async def attach(
    address: str,
    model_path: Path,
    *,
    request_timeout_s: float,
    ready_timeout_s: float,
    transfer: str = "folder",
    lora: LoraShape | None = None,
    top_p: float = 1.0,
    top_k: int = -1,
) -> EngineClient:
    """Wait until the server at `address` is ready, check it, and return a client of it.

    The key is looked up at every call, because a restarted server has a new one.

    Args:
        address: URL of the server.
        model_path: folder of the model that the server must have.
        request_timeout_s: timeout of requests to the server.
        ready_timeout_s: maximum wait until the server is ready.
        transfer: method by which the server will receive weights.
        lora: shape of the adapters that the server will receive, if any.
        top_p: top-p of sampling.
        top_k: top-k of sampling.

    Raises:
        CannotAttach: the server is not ready in time, serves another model, does not support the
            transfer, or does not report log-probs for this sampling.
    """
    try:
        key = key_for(port_of(address) if is_local(address) else None)
        async with asyncio.timeout(ready_timeout_s):
            client, info = await _when_ready(address, key, request_timeout_s)
    except TimeoutError as error:
        raise CannotAttach(
            f"the server at {address} was not ready within {ready_timeout_s:g} s "
            "(rollout.ready_timeout_s)"
        ) from error
    except (EngineError, ValueError) as error:
        raise CannotAttach(f"the server at {address} cannot be used: {error}") from error
    if (difference := model_difference(info, model_path)) is not None:
        await client.close()
        raise CannotAttach(f"the server at {address} serves another model: {difference}")
    backend = BACKENDS[client.api.name]
    refusal = transfer_refusal(backend, transfer)
    refusal = refusal or truncation_refusal(backend, top_p=top_p, top_k=top_k)
    if refusal is None and lora is not None:
        refusal = lora_refusal(backend, lora) or await _adapters_refusal(client, lora)
    if refusal is not None:
        await client.close()
        raise CannotAttach(f"the server at {address} cannot be used: {refusal}")
    client.note_model(model_path)
    return client


async def _adapters_refusal(client: EngineClient, lora: LoraShape) -> str | None:
    try:
        if await client.supports_adapters():
            return None
    except EngineError as error:
        return str(error)
    return (
        "it was started without LoRA adapters; start it by areal-lab engine serve "
        f"{client.api.name} --lora-rank {lora.rank}, or set rollout.transfer"
    )


async def load_base_model(client: EngineClient, model_path: Path) -> None:
    """Load the base model of the adapters, since an earlier user may have left other weights.

    Raises:
        CannotAttach: the server refused.
    """
    base = WeightsFolder(path=model_path, version=0, checksum="", size_bytes=0)
    try:
        await client.load_weights(base, PauseMode.ABORT)
    except EngineError as error:
        await client.close()
        raise CannotAttach(f"the server at {client.base_url} cannot be used: {error}") from error
    client.use_adapters(base.version)


async def _when_ready(
    address: str, key: str, request_timeout_s: float
) -> tuple[EngineClient, dict[str, Any]]:
    """Return a client for the server's API, and the server's report of its weights."""
    api = await _dialect_when_reachable(address, key)
    client = EngineClient(address, api=api, request_timeout_s=request_timeout_s, key=key)
    try:
        while not await client.ready():
            # A server left paused by an earlier user, or by this run before the server was lost,
            # does not become ready by itself.
            with suppress(EngineError):
                await client.resume()
            await asyncio.sleep(POLL_S)
        return client, await client.info()
    except BaseException:
        await client.close()
        raise


async def _dialect_when_reachable(address: str, key: str) -> Dialect:
    while True:
        try:
            return await dialect_at(address, key=key)
        except EngineUnreachable:
            await asyncio.sleep(POLL_S)


def model_difference(info: Mapping[str, Any], model_path: Path) -> str | None:
    """Describe a difference between the server's model and ours; None if none is known.

    The embedded engine reports the sizes of its model. Other servers report the folder, which is
    read if the server is on this machine.
    """
    ours = _config(model_path)
    theirs: dict[str, Any] = {}
    if isinstance(folder := info.get("model_path"), str):
        theirs |= _config(Path(folder))
    theirs |= {name: value for name, value in info.items() if value is not None}
    for name in _SHAPE:
        if name in ours and name in theirs and ours[name] != theirs[name]:
            return f"its {name} is {theirs[name]}, ours is {ours[name]} (actor.path {model_path})"
    return None


def _config(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / "config.json")
    except ValueError:
        return {}

"""Servers that somebody else runs: looked at first, given our weights, never stopped.

    address --ready?--> which dialect? a model like ours? weights this way? --> EngineClient

Every error is one line that names the address and what to do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal_lab.engines.client.addresses import CannotAttach
from areal_lab.engines.client.dialect import Dialect
from areal_lab.engines.client.engine_client import EngineClient, EngineError, EngineUnreachable
from areal_lab.engines.launch.backends import (
    BACKENDS,
    lora_refusal,
    transfer_refusal,
    truncation_refusal,
)
from areal_lab.engines.launch.detect import dialect_at
from areal_lab.engines.protocol import LoraShape, PauseMode, WeightsFolder

POLL_S = 0.2
_SHAPE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
"""What two models must have in common for the weights of one to fit the other; names of their
config.json."""


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
    """A client of the server at `address`, when that is ready and serves a model like ours.

    Args:
        transfer: how it is to be given weights.
        lora: the adapters that it is to be given, if it is given adapters.
        top_p: how it is to draw.
        top_k: the same.

    Raises:
        CannotAttach: in one line, if it is not ready in time, serves another model, does not take
            weights in this way or does not tell the log-probs of such draws.
    """
    try:
        async with asyncio.timeout(ready_timeout_s):
            client, info = await _when_ready(address, request_timeout_s)
    except TimeoutError as error:
        raise CannotAttach(
            f"the server at {address} was not ready within {ready_timeout_s:g} s "
            "(rollout.ready_timeout_s)"
        ) from error
    except EngineError as error:
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
        "it was not started for adapters; start it by areal-lab engine serve "
        f"{client.api.name} --lora-rank {lora.rank}, or set rollout.transfer"
    )


async def load_base_model(client: EngineClient, model_path: Path) -> None:
    """Give a server the model that adapters are to: whoever had it before may have left another.

    Raises:
        CannotAttach: in one line, if it refuses.
    """
    base = WeightsFolder(path=model_path, version=0, checksum="", size_bytes=0)
    try:
        await client.load_weights(base, PauseMode.ABORT)
    except EngineError as error:
        await client.close()
        raise CannotAttach(f"the server at {client.base_url} cannot be used: {error}") from error
    client.use_adapters(base.version)


async def _when_ready(
    address: str, request_timeout_s: float
) -> tuple[EngineClient, dict[str, Any]]:
    """A client that speaks as the server does, and what the server says about its weights."""
    api = await _dialect_when_reachable(address)
    client = EngineClient(address, api=api, request_timeout_s=request_timeout_s)
    try:
        while not await client.ready():
            # A server that whoever had it before left paused, this run too before it was lost,
            # does not get ready by itself.
            with suppress(EngineError):
                await client.resume()
            await asyncio.sleep(POLL_S)
        return client, await client.info()
    except BaseException:
        await client.close()
        raise


async def _dialect_when_reachable(address: str) -> Dialect:
    while True:
        try:
            return await dialect_at(address)
        except EngineUnreachable:
            await asyncio.sleep(POLL_S)


def model_difference(info: Mapping[str, Any], model_path: Path) -> str | None:
    """How the model that a server serves differs from ours, as far as the server tells.

    A server tells its sizes itself (the embedded engine), or the folder of its model, which can be
    read here if it is on this machine.
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
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}

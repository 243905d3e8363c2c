"""Attach to servers that the run did not start: check them, give them weights, never stop them.

    address --ready?--> dialect? same model shape? transfer supported? --> EngineClient

Every error is one line that names the address and the fix.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal_lab.engines.client.addresses import CannotAttach, is_local, port_of
from areal_lab.engines.client.dialect import Dialect
from areal_lab.engines.client.engine_client import EngineClient, EngineError, EngineUnreachable
from areal_lab.engines.keys import key_for
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
"""Fields of config.json that must agree for the weights of one model to fit the other."""


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

    Its key is looked up each time: a server that was restarted has another one.

    Args:
        transfer: how the server will receive weights.
        lora: shape of the adapters it will receive, if any.
        top_p: for sampling.
        top_k: for sampling.

    Raises:
        CannotAttach: in one line, if it is not ready in time, serves another model, does not
            support the transfer, or reports no log-probs for such sampling.
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
    address: str, key: str, request_timeout_s: float
) -> tuple[EngineClient, dict[str, Any]]:
    """A client for the server's dialect, and what the server reports about its weights."""
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
    """How the server's model differs from ours, as far as the server reports it.

    A server reports its sizes (the embedded engine) or the folder of its model, which can be read
    here if it is on this machine.
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

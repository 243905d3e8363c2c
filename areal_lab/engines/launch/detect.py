"""Detect the engine behind an address."""

from __future__ import annotations

import asyncio
from typing import Final

import httpx2

from areal_lab.engines.client.dialect import Dialect
from areal_lab.engines.client.sglang import SGLANG
from areal_lab.engines.client.vllm import (
    ASK_FOR_EXTENSION,
    NO_EXTENSION,
    VLLM,
    VLLM_ON_CPU,
    on_cpu,
)
from areal_lab.engines.keys import KEY_VARIABLE, authorization
from areal_lab.engines.launch.backends import Backend, Build
from areal_lab.engines.protocol import EngineError, EngineUnreachable
from areal_lab.host.certificates import certificates_for

DIALECTS: Final = {dialect.name: dialect for dialect in (SGLANG, VLLM)}
_TIMEOUT_S: Final = 10.0


def dialect_of(backend: Backend, build: Build) -> Dialect:
    """Dialect of a server that we start."""
    dialect = DIALECTS[backend.api]
    return VLLM_ON_CPU if dialect is VLLM and build == "cpu" else dialect


async def dialect_at(
    base_url: str, *, key: str = "", transport: httpx2.AsyncBaseTransport | None = None
) -> Dialect:
    """Dialect of the server at this address: the one in which it reports a weight version."""
    async with httpx2.AsyncClient(
        base_url=base_url,
        headers=authorization(key),
        timeout=_TIMEOUT_S,
        trust_env=False,
        verify=certificates_for(base_url),
        transport=transport,
    ) as http:
        dialects = list(DIALECTS.values())
        try:
            replies = await asyncio.gather(*(http.get(one.held.path) for one in dialects))
            for dialect, reply in zip(dialects, replies, strict=True):
                if reply.status_code == httpx2.codes.OK and "weight_version" in reply.text:
                    return await _variant(dialect, http)
        except httpx2.TransportError as error:
            what = str(error) or type(error).__name__
            raise EngineUnreachable(f"no engine responds at {base_url} ({what})") from error
    if httpx2.codes.UNAUTHORIZED in [reply.status_code for reply in replies]:
        raise EngineError(
            f"it has another key than the one sent; set {KEY_VARIABLE} to its key"
            if key
            else f"it requires a key; set {KEY_VARIABLE} to it"
        )
    paths = " nor ".join(one.held.path for one in dialects)
    raise EngineError(
        f"the server at {base_url} is neither SGLang nor vLLM with VLLM_SERVER_DEV_MODE=1: "
        f"neither {paths} reports a weight version"
    )


async def _variant(dialect: Dialect, http: httpx2.AsyncClient) -> Dialect:
    """The dialect, in its CPU variant if the server runs on a CPU."""
    if dialect is not VLLM:
        return dialect
    sums = await http.post(dialect.digest.path, json=dialect.digest.body)
    try:
        if sums.is_error or not on_cpu(sums.json()):
            return dialect
    except ValueError as error:
        raise EngineError(
            f"the server at {http.base_url} sent malformed JSON in reply to "
            f"{dialect.digest.path} ({error}): {sums.text[:100]!r}"
        ) from error
    if (await http.post(ASK_FOR_EXTENSION.path, json=ASK_FOR_EXTENSION.body)).is_error:
        raise EngineError(NO_EXTENSION)
    return VLLM_ON_CPU

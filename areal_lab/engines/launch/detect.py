"""What is behind an address that someone else serves."""

from __future__ import annotations

import asyncio
from typing import Final

import httpx

from areal_lab.engines.client.dialect import Dialect
from areal_lab.engines.client.sglang import SGLANG
from areal_lab.engines.client.vllm import (
    ASK_FOR_EXTENSION,
    NO_EXTENSION,
    VLLM,
    VLLM_ON_CPU,
    on_cpu,
)
from areal_lab.engines.errors import EngineError, EngineUnreachable
from areal_lab.engines.launch.backends import Backend, Build

DIALECTS: Final = {dialect.name: dialect for dialect in (SGLANG, VLLM)}
_TIMEOUT_S: Final = 10.0


def dialect_of(backend: Backend, build: Build) -> Dialect:
    """The dialect of a server that we start."""
    dialect = DIALECTS[backend.api]
    return VLLM_ON_CPU if dialect is VLLM and build == "cpu" else dialect


async def dialect_at(
    base_url: str, *, transport: httpx.AsyncBaseTransport | None = None
) -> Dialect:
    """The dialect of the server at this address: the one whose question about the version of its
    weights it answers.

    Raises:
        EngineUnreachable: if nothing answers there.
        EngineError: if what answers speaks neither dialect, or lacks what we need.
    """
    async with httpx.AsyncClient(
        base_url=base_url, timeout=_TIMEOUT_S, trust_env=False, transport=transport
    ) as http:
        dialects = list(DIALECTS.values())
        try:
            answers = await asyncio.gather(*(http.get(one.held.path) for one in dialects))
            for dialect, answer in zip(dialects, answers, strict=True):
                if answer.status_code == httpx.codes.OK and "weight_version" in answer.text:
                    return await _variant(dialect, http)
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise EngineUnreachable(f"no engine answers at {base_url} ({what})") from error
    paths = " nor ".join(one.held.path for one in dialects)
    raise EngineError(
        f"what answers at {base_url} is neither SGLang nor vLLM with VLLM_SERVER_DEV_MODE=1: "
        f"neither {paths} tells a weight version"
    )


async def _variant(dialect: Dialect, http: httpx.AsyncClient) -> Dialect:
    """The dialect, as a server on a CPU speaks it if this is one."""
    if dialect is not VLLM:
        return dialect
    sums = await http.post(dialect.digest.path, json=dialect.digest.body)
    try:
        if sums.is_error or not on_cpu(sums.json()):
            return dialect
    except ValueError as error:
        raise EngineError(
            f"what answers at {http.base_url} sent malformed JSON in reply to "
            f"{dialect.digest.path} ({error}): {sums.text[:100]!r}"
        ) from error
    if (await http.post(ASK_FOR_EXTENSION.path, json=ASK_FOR_EXTENSION.body)).is_error:
        raise EngineError(NO_EXTENSION)
    return VLLM_ON_CPU

"""What is behind an address that someone else serves."""

from __future__ import annotations

import asyncio
from typing import Final

import httpx

from areal_lab.engines.dialect import Dialect
from areal_lab.engines.errors import EngineError, EngineUnreachable
from areal_lab.engines.sglang_api import SGLANG
from areal_lab.engines.vllm_api import VLLM

DIALECTS: Final = {dialect.name: dialect for dialect in (SGLANG, VLLM)}
_TIMEOUT_S: Final = 10.0


async def dialect_at(
    base_url: str, *, transport: httpx.AsyncBaseTransport | None = None
) -> Dialect:
    """The dialect of the server at this address: the one whose question about the version of its
    weights it answers.

    Raises:
        EngineUnreachable: if nothing answers there.
        EngineError: if what answers speaks neither dialect.
    """
    async with httpx.AsyncClient(
        base_url=base_url, timeout=_TIMEOUT_S, trust_env=False, transport=transport
    ) as http:
        dialects = list(DIALECTS.values())
        try:
            answers = await asyncio.gather(*(http.get(one.held.path) for one in dialects))
        except httpx.TransportError as error:
            what = str(error) or type(error).__name__
            raise EngineUnreachable(f"no engine answers at {base_url} ({what})") from error
    for dialect, answer in zip(dialects, answers, strict=True):
        if answer.status_code == httpx.codes.OK and "weight_version" in answer.text:
            return dialect
    paths = " nor ".join(one.held.path for one in dialects)
    raise EngineError(
        f"what answers at {base_url} is neither SGLang nor vLLM with VLLM_SERVER_DEV_MODE=1: "
        f"neither {paths} tells a weight version"
    )

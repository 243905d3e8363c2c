"""Rewards of a service over HTTP: `reward.fn=http://host/path`.

    POST {"completion": ..., "problem": {"prompt", "answer", ...}} --> {"reward": 0.5}, or a number,
                                                                       or named components

The completions of a group are sent concurrently, from a reward worker. A temporary failure (no
connection, a timeout, 429, 5xx) is retried with increasing pauses.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any, Final

import httpx2

from areal_lab.host.certificates import certificates_for
from areal_lab.rewards.wire import Unreachable

MOST_REPLY_BYTES: Final = 1 << 20
_CHECK_S: Final = 5.0
_SHOWN: Final = 200
"""Characters of a refusal in messages."""


class HttpReward:
    """A reward function that calls a service.

    Args:
        url: address of the service, `http://` or `https://`. No proxy is used.
        timeout_s: limit of one attempt. `reward.timeout_s` limits all attempts of a completion.
        retries: further attempts.
        backoff_s: wait before the second attempt, doubled for each further one. The service may ask
            for more with `Retry-After`.
        key_variable: environment variable with a key, sent as `Authorization: Bearer`, so the key
            is in no setting. Empty sends none.

    Raises:
        ValueError: a number is out of its bounds, or the variable is not set.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 5.0,
        retries: int = 3,
        backoff_s: float = 0.25,
        key_variable: str = "",
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, but must be > 0 (seconds)")
        if retries < 0:
            raise ValueError(f"retries is {retries}, but must be >= 0")
        if not backoff_s >= 0:
            raise ValueError(f"backoff_s is {backoff_s}, but must be >= 0 (seconds)")
        self._url = url
        self._retries = retries
        self._backoff_s = backoff_s
        self._headers = {"Content-Type": "application/json", **_authorization(key_variable)}
        self._client: dict[str, Any] = {
            "timeout": timeout_s,
            "trust_env": False,
            "verify": certificates_for(url),
        }

    @classmethod
    def check(cls, url: str = "", **keywords: Any) -> None:
        """Check that the service replies, with any status; `areal_lab.resolve` calls this."""
        cls(url, **keywords)
        try:
            with httpx2.Client(
                timeout=_CHECK_S, trust_env=False, verify=certificates_for(url)
            ) as client:
                client.get(url, headers=_authorization(keywords.get("key_variable", "")))
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            raise Unreachable(
                f"{url} cannot be reached: {_reason(error)}; start the service, or correct the "
                "address"
            ) from error

    async def __call__(self, completion: str, example: Mapping[str, Any]) -> Any:
        """Reward from the service; None, which is no reward, for `null`."""
        body = json.dumps({"completion": completion, "problem": dict(example)}, default=str)
        wait_s, failure = self._backoff_s, ""
        async with httpx2.AsyncClient(**self._client) as client:
            for attempt in range(self._retries + 1):
                if attempt:
                    await asyncio.sleep(wait_s)
                    wait_s *= 2
                try:
                    status, headers, reply = await self._post(client, body.encode())
                except httpx2.TransportError as error:
                    failure = _reason(error)
                    continue
                if status == httpx2.codes.TOO_MANY_REQUESTS or status >= 500:
                    failure = f"status {status}: {_shown(reply)}"
                    wait_s = max(wait_s, _retry_after_s(headers))
                    continue
                if status != httpx2.codes.OK:
                    raise RuntimeError(f"{self._url} replied {status}: {_shown(reply)}")
                return self._reward(reply)
        raise RuntimeError(f"{self._url} failed {self._retries + 1} times; at last: {failure}")

    async def _post(
        self, client: httpx2.AsyncClient, body: bytes
    ) -> tuple[int, httpx2.Headers, bytes]:
        """Send one request; returns status, headers and content."""
        content = bytearray()
        async with client.stream("POST", self._url, content=body, headers=self._headers) as reply:
            async for part in reply.aiter_bytes():
                content += part
                if len(content) > MOST_REPLY_BYTES:
                    raise ValueError(
                        f"{self._url} replied more than {MOST_REPLY_BYTES} bytes, but must reply "
                        "a reward"
                    )
            return reply.status_code, reply.headers, bytes(content)

    def _reward(self, reply: bytes) -> Any:
        try:
            value = json.loads(reply)
        except (ValueError, RecursionError):
            value = ""
        if isinstance(value, bool) or not isinstance(value, int | float | dict | None):
            raise ValueError(
                f"{self._url} replied {_shown(reply)!r}, but must reply JSON: a number, an "
                "object of named numbers, or null"
            )
        return value


def _authorization(key_variable: str) -> dict[str, str]:
    if not key_variable:
        return {}
    key = os.environ.get(key_variable, "")
    if not key:
        raise ValueError(f"key_variable names {key_variable}, which is not set; export it")
    return {"Authorization": f"Bearer {key}"}


def _retry_after_s(headers: httpx2.Headers) -> float:
    """Seconds from `Retry-After`; 0 without it, or for a date."""
    text = headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    said = " ".join(str(error).split())
    return f"{kind}: {said}" if said else kind


def _shown(reply: bytes) -> str:
    return " ".join(reply.decode(errors="replace").split())[:_SHOWN]

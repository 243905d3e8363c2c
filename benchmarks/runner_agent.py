"""The agent of `benchmarks.runner`: it asks, and asks again with the reply.

The same function is called in the process of the run, and by the Python of an environment, which
has no areal_lab: standard library only.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

TASK = "question"
_THREADS = 64


def ask(base_url: str, key: str, turns: int) -> float:
    """Ask `turns` times on one connection; returns the reward."""
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(address.netloc)
    messages = [{"role": "user", "content": TASK}]
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    for _ in range(turns):
        body = json.dumps({"model": "any", "messages": messages})
        connection.request("POST", f"{address.path}/chat/completions", body, headers)
        reply = connection.getresponse()
        text = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"the gateway replied {reply.status}: {text[:200]!r}")
        answer = json.loads(text)["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": TASK}]
    connection.close()
    return 1.0


def play(data: Mapping[str, Any]) -> float:
    """The agent in the process of the run."""
    return ask(data["base_url"], data["api_key"], data["turns"])


class Standard:
    """The same agent as an environment."""

    version = "1"

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        """Take the number of turns."""
        del name
        self._turns: int = args["turns"]
        self._threads = ThreadPoolExecutor(_THREADS)

    def tasks(self) -> list[dict[str, Any]]:
        """The only task."""
        return [{"id": TASK}]

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """One episode; the key is part of the address."""
        loop = asyncio.get_running_loop()
        reward = await loop.run_in_executor(
            self._threads, ask, request["base_url"], "none", self._turns
        )
        return {"ok": True, "reward": reward}

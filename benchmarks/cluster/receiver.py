"""A process that fetches what it is told to on standard input, and replies with its CPU seconds."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Final

import httpx2

from areal_lab.cluster.folders.connections import Call, Connections
from areal_lab.cluster.folders.mirror import mirror
from areal_lab.cluster.folders.replies import CHECKSUM
from areal_lab.engines.keys import authorization

WAYS: Final = ("readinto", "four streams", "httpx")
"""See the module that measures them."""


class Collected(Connections):
    """Connections whose reads collect a body with httpx2 and copy it."""

    def __init__(self, key: str) -> None:
        super().__init__(key, streams=1)
        self._client = httpx2.Client(headers=authorization(key), trust_env=False)

    def read(self, call: Call, start: int, target: memoryview) -> str:
        """As `Connections.read`."""
        headers = {"range": f"bytes={start}-{start + len(target) - 1}"}
        reply = self._client.get(f"http://{call.agent.address}{call.path}", headers=headers)
        reply.raise_for_status()
        target[:] = reply.content
        checksum: str = reply.headers[CHECKSUM]
        return checksum


def connections(way: str, key: str) -> Connections:
    """The connections of a way."""
    match way:
        case "httpx":
            return Collected(key)
        case "readinto":
            return Connections(key, streams=1)
        case _:
            return Connections(key)


def main() -> None:
    """Fetch until the input ends."""
    key = json.loads(sys.stdin.readline())["key"]
    known = {way: connections(way, key) for way in WAYS}
    for line in sys.stdin:
        asked = json.loads(line)
        before_s = time.process_time()
        fetched = mirror(asked["url"], Path(asked["destination"]), known[asked["way"]])
        reply = {"cpu_s": time.process_time() - before_s, "bytes": fetched.fetched_bytes}
        shutil.rmtree(asked["destination"])
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()

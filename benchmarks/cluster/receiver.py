"""A process that fetches what it is told to on standard input, and replies with its CPU seconds."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx2
import numpy as np

from areal_lab.cluster.shards.client import HttpStore
from areal_lab.cluster.shards.connections import Agent, Call, Connections, Part
from areal_lab.cluster.shards.fetched import FetchedBatch
from areal_lab.cluster.shards.metadata import DistributedBatch, batch_from_json
from areal_lab.cluster.shards.mirror import mirror
from areal_lab.cluster.shards.replies import CHECKSUM
from areal_lab.data.arrays.jagged import Jagged
from areal_lab.engines.keys import authorization

WAYS: Final = ("readinto", "four streams", "httpx")
"""See the module that measures them."""


class Collected(Connections):
    """Connections whose reads collect a body with httpx2 and copy it."""

    def __init__(self, key: str) -> None:
        super().__init__(key, streams=1)
        self._client = httpx2.Client(headers=authorization(key), trust_env=False)

    def read_start(self, call: Call, target: memoryview) -> Part:
        """As `Connections.read_start`."""
        return self._copied(call, 0, [target])

    def read(self, call: Call, start: int, targets: Sequence[memoryview]) -> str:
        """As `Connections.read`."""
        return self._copied(call, start, targets).checksum

    def _copied(self, call: Call, start: int, targets: Sequence[memoryview]) -> Part:
        size = sum(map(len, targets))
        headers = {"range": f"bytes={start}-{start + size - 1}"}
        reply = self._client.get(f"http://{call.agent.address}{call.path}", headers=headers)
        reply.raise_for_status()
        body = memoryview(reply.content)
        at = 0
        for target in targets:
            count = min(len(target), len(body) - at)
            target[:count] = body[at : at + count]
            at += count
        whole = int(reply.headers["content-range"].partition("/")[2])
        return Part(whole, len(body), reply.headers[CHECKSUM])


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
        fetched = _fetch(asked, known[asked["way"]])
        reply = {"cpu_s": time.process_time() - before_s, "bytes": fetched}
        if "destination" in asked:
            shutil.rmtree(asked["destination"])
        print(json.dumps(reply), flush=True)


def _fetch(asked: dict[str, Any], through: Connections) -> int:
    """Fetch a part of a batch, or a folder; returns the bytes."""
    if "destination" in asked:
        return mirror(asked["url"], Path(asked["destination"]), through).fetched_bytes
    metadata = batch_from_json(asked["batch"])
    home = metadata.shards[0]
    store = HttpStore(Agent(home.node_addr, home.incarnation), through)
    found = FetchedBatch(DistributedBatch(metadata), store, at_once=through.streams)
    found.fetch()
    return sum(
        one.values.nbytes if isinstance(one, Jagged) else np.asarray(one).nbytes
        for one in found.values()
    )


if __name__ == "__main__":
    main()

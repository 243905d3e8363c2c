"""A run that `ray job submit` starts: it waits for one host, and prints where it is."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.cluster.ray.lab import new_run, started


async def main() -> None:
    with TemporaryDirectory() as folder:
        async with started(new_run(sys.argv[1], Path(folder), 1)) as run:
            (host,) = run.hosts.working
            print(f"host {host.name} has joined", flush=True)


asyncio.run(main())

"""The host agent as a child process: `python -m areal_lab.cluster.agent.main --join ADDRESS:PORT`.

It ends with its parent. The token is in the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from areal_lab.cluster.agent.run import JOIN_S, REJOIN_S, Joining, NotTaken, run_agent
from areal_lab.cluster.records import TOKEN_VARIABLE
from areal_lab.host.processes import watch_parent


def main() -> int:
    """Parse the command line and run the agent. Returns the exit code."""
    watch_parent()
    parser = argparse.ArgumentParser(description="host agent of areal_lab")
    parser.add_argument("--join", required=True, help="ADDRESS:PORT of the run")
    parser.add_argument("--name", default="", help="of this host")
    parser.add_argument("--address", default="", help="of this host, as others reach it")
    parser.add_argument("--join-s", type=float, default=JOIN_S, help="longest wait for the run")
    parser.add_argument("--rejoin-s", type=float, default=REJOIN_S, help="the same after a lease")
    arguments = parser.parse_args()
    joining = Joining(
        run=arguments.join,
        token=os.environ.pop(TOKEN_VARIABLE, ""),
        name=arguments.name,
        address=arguments.address,
        join_s=arguments.join_s,
        rejoin_s=arguments.rejoin_s,
    )

    def say(text: str) -> None:
        print(text, flush=True)

    try:
        asyncio.run(run_agent(joining, say))
    except (NotTaken, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`areal-lab host`: the agent of this machine for a run on another one."""

from __future__ import annotations

import asyncio
import os

import typer

from areal_lab.cli.outputs import FAILED, error_exit
from areal_lab.cluster.agent.run import Joining, NotTaken, run_agent
from areal_lab.cluster.records import TOKEN_VARIABLE


def run_host(*, join: str, name: str, address: str, join_s: float, rejoin_s: float) -> None:
    """Run the agent until its run dismisses it, or SIGTERM or Ctrl-C."""
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if not token:
        raise ValueError(f"{TOKEN_VARIABLE} is not set; set it to the secret that the run has, too")
    joining = Joining(
        run=join, token=token, name=name, address=address, join_s=join_s, rejoin_s=rejoin_s
    )
    try:
        asyncio.run(run_agent(joining, typer.echo))
    except NotTaken as error:
        raise error_exit(str(error), FAILED) from error

"""Run a host agent until its run has dismissed it: `areal-lab host --join ADDRESS:PORT`.

As a child process: `python -m areal_lab.cluster.agent.run --join ADDRESS:PORT`.

The host agent as a child process: `python -m areal_lab.cluster.agent.run --join ADDRESS:PORT`.

It ends with its parent. The token is in the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx2
import psutil

from areal_lab.cluster.agent.app import agent_app
from areal_lab.cluster.agent.lease import HostAgent
from areal_lab.cluster.records import (
    TOKEN_VARIABLE,
    HostFacts,
    Refused,
    Welcome,
    from_json,
    to_json,
)
from areal_lab.engines.keys import authorization
from areal_lab.host.asgi import served
from areal_lab.host.certificates import certificates_for
from areal_lab.host.owned_folders import (
    make_owned_folder,
    remove_abandoned_folders,
    remove_owned_folder,
)
from areal_lab.host.ports import address_towards
from areal_lab.host.process_groups import SHARED_MEMORY
from areal_lab.host.processes import watch_parent

JOIN_S: Final = 300.0
"""Longest wait for the run."""
REJOIN_S: Final = 15.0
"""The same after a lease: a run that is gone does not return to this address."""
_RETRY_S: Final = 0.5
_REPLY_S: Final = 5.0
_SAY_EVERY_S: Final = 10.0


class NotTaken(RuntimeError):
    """The run did not accept this host; the message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """Address of the run that a host joins, and the host's identity."""

    run: str
    """`ADDRESS:PORT` of the run."""
    token: str
    name: str = ""
    """Name of the host; empty takes that of this machine."""
    address: str = ""
    """Address of this host for others; empty takes the one from which it reaches the run."""
    join_s: float = JOIN_S
    rejoin_s: float = REJOIN_S


async def run_agent(joining: Joining, say: Callable[[str], None]) -> None:
    """Join, and serve until the run dismisses this host or is gone."""
    address = joining.address or address_towards(_host_of(joining.run))
    try:
        listener = socket.create_server((address, 0))
    except OSError as error:
        raise ValueError(
            f"--address is {address}, but must be an address of this machine ({error})"
        ) from error
    for variable, value in group_environment(address).items():
        os.environ.setdefault(variable, value)
    for parent in (Path(tempfile.gettempdir()), SHARED_MEMORY):
        remove_abandoned_folders(parent)  # left by an agent that was killed
    folder = make_owned_folder(Path(tempfile.gettempdir()), mode=0o700)
    agent = HostAgent(
        joining.name or socket.gethostname(),
        address,
        listener.getsockname()[1],
        folder,
        joining.token,
        say,
    )
    wait_s = joining.join_s
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, agent.dismissed.set)
    try:
        async with served(agent_app(agent, joining.token), listener):
            while True:
                facts = agent.next_incarnation()
                say(f"host {agent.name} ({address}) joins the run at {joining.run}")
                welcome = await _join(joining, facts, wait_s, say, agent.dismissed)
                if welcome is None:
                    return
                say(f"host {agent.name} is part of the run")
                if await agent.serve_out_lease(welcome):
                    say(f"host {agent.name} was dismissed")
                    return
                say(
                    f"the run did not ask for {welcome.lease_s:g} s: every process of this host "
                    "was ended"
                )
                wait_s = joining.rejoin_s
    finally:
        await agent.held.stop_all()
        listener.close()
        remove_owned_folder(folder)


async def _join(
    joining: Joining,
    facts: HostFacts,
    wait_s: float,
    say: Callable[[str], None],
    dismissed: asyncio.Event,
) -> Welcome | None:
    """Ask until the run replies; None if the agent has to end before that."""
    until_s = time.monotonic() + wait_s
    said_s, last = time.monotonic(), ""
    run = f"http://{joining.run}"
    async with httpx2.AsyncClient(
        base_url=run,
        headers=authorization(joining.token),
        trust_env=False,
        verify=certificates_for(run),
    ) as http:
        while True:
            try:
                left_s = max(_RETRY_S, until_s - time.monotonic())
                reply = await http.post(
                    "/join", content=to_json(facts), timeout=min(_REPLY_S, left_s)
                )
            except httpx2.TransportError as error:
                last = str(error) or type(error).__name__
            else:
                if reply.status_code == httpx2.codes.OK:
                    return from_json(Welcome, reply.content)
                if reply.status_code == httpx2.codes.UNAUTHORIZED:
                    raise NotTaken(
                        f"the run at {joining.run} has another token; start the agent with the "
                        "AREAL_LAB_CLUSTER_TOKEN of the run"
                    )
                raise NotTaken(_reason(joining, reply))
            if time.monotonic() > until_s:
                raise NotTaken(
                    f"no run replied at {joining.run} for {wait_s:g} s ({last}); is it running, "
                    "and does a firewall let its port through?"
                )
            if time.monotonic() - said_s > _SAY_EVERY_S:
                said_s = time.monotonic()
                say(f"waiting for the run at {joining.run} ({last})")
            with suppress(TimeoutError):
                await asyncio.wait_for(dismissed.wait(), _RETRY_S)
                return None


def _reason(joining: Joining, reply: httpx2.Response) -> str:
    try:
        return from_json(Refused, reply.content).reason
    except ValueError:
        return (
            f"what replied at {joining.run} (status {reply.status_code}) is not a run of areal_lab "
            "with several hosts"
        )


def group_environment(address: str) -> dict[str, str]:
    """Variables that make process groups of this host's children use the interface of an
    address. By default they use that of the machine's name; none for a loopback address, the
    default on one machine.
    """
    if ipaddress.ip_address(address).is_loopback:
        return {}
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    return {}


def _host_of(text: str) -> str:
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdecimal():
        raise ValueError(f"--join is {text!r}, but must be ADDRESS:PORT, as in 10.0.0.1:6380")
    return host


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

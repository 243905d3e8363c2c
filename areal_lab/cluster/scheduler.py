"""What a scheduler does for a run: it brings host agents to hosts, and ends them.

    start(n, invitation) --> agents that join     replace(name) --> another one     stop()

`local`, `ray`, `slurm` and `manual` differ in nothing else: above the agents, all is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What an agent needs to join a run."""

    run: str
    """`ADDRESS:PORT` of the run."""
    token: str = field(repr=False)
    """For its environment (`records.TOKEN_VARIABLE`), and no command line."""


class NoHosts(RuntimeError):
    """Hosts that were asked for will not come; the message says why."""


class Scheduler(Protocol):
    """Brings host agents up."""

    async def start(self, hosts: int, invitation: Invitation) -> None:
        """Bring agents to this many hosts; returns when they are on their way.

        Raises:
            ValueError: in one sentence, if that is impossible.
        """
        ...

    async def state(self) -> str:
        """What the hosts that have not joined wait for, in a few words.

        Raises:
            NoHosts: if some will not join however long the run waits.
        """
        ...

    async def replace(self, name: str) -> None:
        """Bring up another agent in place of a lost host's; it joins when it can.

        Raises:
            Exception: if that is impossible; the run continues without it.
        """
        ...

    async def stop(self) -> None:
        """End every agent that was started. Idempotent."""
        ...

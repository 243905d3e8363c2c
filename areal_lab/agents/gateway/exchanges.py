"""Samplings in flight, and which of them a call that is sent again belongs to.

    call --> Exchange (a task that samples) <-- the same call again: client gave up, or retries
                |                                  gets the same answer
                v
             Answer, recorded in the session whether or not a client still waits

A sampling outlives its client. Its tokens are in the session's conversation either way; if it were
canceled, the client's next attempt would sample the same turn once more.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_lab.agents.gateway.calls import Answer
from areal_lab.agents.gateway.sessions import Session


@dataclass(slots=True, eq=False, kw_only=True)
class Exchange:
    """One call that is sampled once, and the clients that wait for its answer."""

    session: Session
    digest: bytes
    """Of the body; a client sends the same one again."""
    task: asyncio.Task[Answer] = field(init=False)
    clients: int = 1
    """Connections that wait for the answer, or read it."""
    delivered: bool = False
    """Whether one of them got all of it."""
    done_s: float | None = None
    """When the answer was there."""

    def left(self, *, delivered: bool) -> None:
        """A client has got the answer, or has hung up."""
        self.clients -= 1
        if not delivered:
            return
        self.delivered = True
        interaction = self.session.interactions.get(self.task.result().interaction_id)
        assert interaction is not None
        interaction.delivered = True


def body_digest(dialect: str, body: Mapping[str, Any]) -> bytes:
    """The same for two bodies with the same values, whatever their order and spaces."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{dialect}\n{text}".encode("ascii")).digest()


def sent_again(known: Sequence[Exchange], digest: bytes, *, retries: int) -> Exchange | None:
    """The exchange that this call asks for a second time; None if it is a new call.

    An agent may well ask the same twice, to get two samples. So an equal body alone is no proof:

    - an answer that nobody waits for and nobody has received belongs to the next equal body;
    - any answer does if the client says that it sends the call again (`X-Stainless-Retry-Count`).

    Args:
        known: the session's exchanges that run or have ended recently, oldest first.
        digest: of the body.
        retries: how often the client says it has sent this call before.
    """
    equal = [each for each in known if each.digest == digest]
    for each in equal:
        if not each.clients and not each.delivered:
            return each
    return equal[-1] if equal and retries > 0 else None

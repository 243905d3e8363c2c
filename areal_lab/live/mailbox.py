"""Requests to a run and its replies, as lines of two files in its folder.

    any process                           the run, five times a second
    ask(): a line in requests.jsonl ----> Inbox.take()
    a line with the same id         <---- Inbox.reply(): a line in replies.jsonl

Files, and not a socket: they work wherever the folder can be seen, on a network disk and in a
container too, have no limit to the length of a path, are protected by permissions, and stay as a
record. Both files are opened at each look, which makes a network disk show what another machine
appended. A line that a crash has cut is skipped. Requests name the key of the run's presence, so
one that was written for a run that was killed is not done by a later one.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from areal_lab.control.events import (
    EtaRequested,
    PauseRequested,
    Request,
    ResumeRequested,
    StopRequested,
)
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.by_hand import in_words
from areal_lab.runlog.records import finite_json

REQUESTS: Final = "requests.jsonl"
REPLIES: Final = "replies.jsonl"
LOOK_EVERY_S: Final = 0.2
"""Time between two looks of the run into its mailbox."""
_LOOK_FOR_REPLY_S: Final = 0.05


class RunEnded(RuntimeError):
    """There is no run that could do what was asked: it has ended, or was killed."""


class RequestRefused(RuntimeError):
    """The run continues, and cannot do what was asked; the message says why."""


@dataclass(frozen=True, slots=True)
class Letter:
    """One request as the run receives it."""

    id: str
    request: Request
    sender: str
    """User, host and process, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request and what became of it, as the files of a mailbox have them."""

    at_s: float
    """When it was asked, seconds since the epoch."""
    sender: str
    asked: str
    """In a word or two: `pause`, `eta 4`."""
    reply: str
    """What the run replied; empty if it has not."""
    done: bool | None
    """Whether it was done; None without a reply."""


def exchanges(folder: Path) -> list[Exchange]:
    """Everything that was asked of the run in a folder, in order; nothing for an older run.

    Raises:
        PermissionError: if the run belongs to somebody else.
    """
    replies = {one.get("id"): one for one in _lines(folder / REPLIES)}
    found = []
    for value in _lines(folder / REQUESTS):
        reply = replies.get(value.get("id"), {})
        with suppress(KeyError, TypeError, ValueError):  # what the run did not take as a request
            found.append(
                Exchange(
                    at_s=float(value["at_s"]),
                    sender=str(value.get("from", "?")),
                    asked=in_words(_decoded(value)),
                    reply=str(reply.get("text", "")),
                    done=None if not reply else bool(reply.get("done")),
                )
            )
    return found


# --- the asking side -----------------------------------------------------------------------------


def ask(
    folder: Path,
    key: str,
    request: Request,
    *,
    timeout_s: float,
    alive: Callable[[], bool | None],
) -> str:
    """Send a request and wait for the reply; returns what the run says it does.

    Args:
        key: of the run's presence.
        timeout_s: longest wait for the reply.
        alive: whether the run continues; no reply comes from one that does not.

    Raises:
        RequestRefused: if the run cannot do it.
        RunEnded: if the run has ended, or ends before it replies.
        TimeoutError: if there is no reply in time; the run may still do it later.
        PermissionError: if the folder belongs to somebody else.
    """
    if alive() is False:
        raise RunEnded(f"the run in {folder} is not alive")
    number = secrets.token_hex(8)
    line = {"id": number, "key": key, "at_s": time.time(), "from": _sender(), **_coded(request)}
    _append(folder / REQUESTS, line)
    until_s, position = time.monotonic() + timeout_s, 0
    while True:
        ending = alive() is False
        with suppress(FileNotFoundError):
            found = read_appended(folder / REPLIES, position)
            position = found.end
            for reply in _objects(found.lines):
                if reply.get("id") == number:
                    return _accepted(reply)
        if ending:
            raise RunEnded(f"the run in {folder} ended before it replied to {in_words(request)!r}")
        if time.monotonic() >= until_s:
            raise TimeoutError(
                f"the run in {folder} did not reply to {in_words(request)!r} within {timeout_s:g} s"
            )
        time.sleep(_LOOK_FOR_REPLY_S)


def _accepted(reply: dict[str, Any]) -> str:
    text = str(reply.get("text", ""))
    if not reply.get("done"):
        raise RequestRefused(text)
    return text


def _sender() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}, process {os.getpid()}"


# --- the run's side ------------------------------------------------------------------------------


@dataclass(slots=True)
class Inbox:
    """The mailbox of this process's run."""

    folder: Path
    key: str
    _position: int = 0
    _taken: set[str] = field(default_factory=set)

    def take(self) -> Iterator[Letter]:
        """The requests since the last look, in order; those for another run are skipped.

        Raises:
            OSError: if the files cannot be read.
        """
        try:
            found = read_appended(self.folder / REQUESTS, self._position)
        except ValueError:  # the file was replaced; what was taken before is known
            found = read_appended(self.folder / REQUESTS)
        self._position = found.end
        for value in _objects(found.lines):
            number = str(value.get("id"))
            if value.get("key") != self.key or number in self._taken:
                continue
            self._taken.add(number)
            try:
                request = _decoded(value)
            except (KeyError, TypeError, ValueError) as error:
                self.reply(number, f"this is no request: {error}", done=False)
            else:
                yield Letter(number, request, str(value.get("from", "?")))

    def reply(self, number: str, text: str, *, done: bool) -> None:
        """Answer the request with this id."""
        _append(self.folder / REPLIES, {"id": number, "done": done, "text": text})


def open_mailbox(folder: Path) -> None:
    """Create the files of a mailbox, for this user only, if they do not exist."""
    for name in (REQUESTS, REPLIES):
        os.close(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))


# --- lines ---------------------------------------------------------------------------------------

_VERBS: Final[dict[str, Request]] = {
    "pause": PauseRequested(),
    "resume": ResumeRequested(),
    "stop": StopRequested(),
}
_ETA: Final = "eta"


def _coded(request: Request) -> dict[str, Any]:
    if isinstance(request, EtaRequested):
        return {"ask": _ETA, _ETA: request.eta}
    return {"ask": in_words(request)}


def _decoded(value: dict[str, Any]) -> Request:
    asked = value["ask"]
    if asked == _ETA:
        return EtaRequested(float(value[_ETA]))
    if asked not in _VERBS:
        raise ValueError(f"ask is {asked!r}, but must be one of {', '.join((*_VERBS, _ETA))}")
    return _VERBS[asked]


def _append(file: Path, value: dict[str, Any]) -> None:
    # The empty line before it ends a line that a crash has cut. Locked, because appending from
    # several machines is not one piece on a network disk.
    line = f"\n{json.dumps(finite_json(value))}\n".encode()
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
    try:
        with suppress(OSError):  # some disks have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    return _objects(read_appended(file).lines) if file.exists() else iter(())


def _objects(lines: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(ValueError):
            if isinstance(value := json.loads(line), dict):
                yield value

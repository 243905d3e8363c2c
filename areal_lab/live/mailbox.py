"""Control channel of a run: requests and replies, as lines of two files in its folder.

    any process                           the run, five times a second
    ask(): a line in requests.jsonl ----> Inbox.take()
    a line with the same id         <---- Inbox.reply(): a line in replies.jsonl

Files and not a socket: they work wherever the folder is visible, including network disks and
containers, have no limit on the length of a path, are protected by permissions, and stay as a
record. Both files are opened for each poll, which makes a network disk show lines from another
machine. A line that a crash has cut is skipped. Requests name the key of the run's presence, so a
later run ignores requests that were written for a killed one.
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
from areal_lab.host.durable import append_whole, writing
from areal_lab.host.foreign import Parsed, parse_json
from areal_lab.host.terminal import printable
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.incidents import in_words
from areal_lab.runlog.records import Seconds, finite_json

REQUESTS: Final = "requests.jsonl"
REPLIES: Final = "replies.jsonl"
LOOK_EVERY_S: Final = 0.2
"""Interval at which the run polls its mailbox."""
_LOOK_FOR_REPLY_S: Final = 0.05


_SECONDS: Final = Parsed[float](Seconds)


class RunEnded(RuntimeError):
    """The run that should handle the request has ended, or was killed."""


class RequestRefused(RuntimeError):
    """The run continues, but cannot do this; the message explains why."""


@dataclass(frozen=True, slots=True)
class Letter:
    """One request as the run receives it."""

    id: str
    request: Request
    sender: str
    """User, host and process, for display."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request and its reply, as stored in the files of a mailbox."""

    at_s: float
    """Time of the request, in seconds since the epoch."""
    sender: str
    asked: str
    """Short form of the request: `pause`, `eta 4`."""
    reply: str
    """Reply of the run; empty without one."""
    done: bool | None
    """True if it was done; None without a reply."""


def exchanges(folder: Path) -> list[Exchange]:
    """All requests to the run in a folder, in order; empty for an older run."""
    replies = {str(one.get("id")): one for one in _lines(folder / REPLIES)}
    found = []
    for value in _lines(folder / REQUESTS):
        reply = replies.get(str(value.get("id")), {})
        with suppress(*_NO_REQUEST):  # lines that the run did not accept as requests
            found.append(
                Exchange(
                    at_s=_SECONDS(value["at_s"]),
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
    """Send a request and wait for the reply, which is returned.

    `alive` returns whether the run continues. Raises RunEnded if it ends before it replies, and
    TimeoutError without a reply in time; the run may still handle the request later.
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
        """Requests since the last poll, in order; those for another run are skipped."""
        try:
            found = read_appended(self.folder / REQUESTS, self._position)
        except ValueError:  # the file was replaced; requests taken before are known
            found = read_appended(self.folder / REQUESTS)
        self._position = found.end
        for value in _objects(found.lines):
            number = str(value.get("id"))
            if value.get("key") != self.key or number in self._taken:
                continue
            self._taken.add(number)
            try:
                request = _decoded(value)
            except _NO_REQUEST as error:
                self.reply(number, f"not a valid request: {error}", done=False)
            else:
                yield Letter(number, request, printable(str(value.get("from", "?")))[:_MOST_SENDER])

    def reply(self, number: str, text: str, *, done: bool) -> None:
        """Reply to the request with this id."""
        _append(self.folder / REPLIES, {"id": number, "done": done, "text": text})


def open_mailbox(folder: Path) -> None:
    """Create the files of a mailbox, for this user only, if they do not exist."""
    for name in (REQUESTS, REPLIES):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
        os.close(os.open(folder / name, flags, 0o600))


# --- lines ---------------------------------------------------------------------------------------

_VERBS: Final[dict[str, Request]] = {
    "pause": PauseRequested(),
    "resume": ResumeRequested(),
    "stop": StopRequested(),
}
_ETA: Final = "eta"


_NO_REQUEST: Final = (KeyError, TypeError, ValueError, OverflowError)
"""Exceptions for a line that is not a request."""
_MOST_SENDER: Final = 200
"""Maximum characters of the sender's name."""


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
    # The empty line before it ends a line that a crash has cut. Locked, because appends from
    # several machines may interleave on a network disk.
    line = f"\n{json.dumps(finite_json(value))}\n".encode()
    # Not through a link: the folder of a run may belong to someone else.
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        with suppress(OSError):  # some disks have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        with writing(file, len(line)):
            append_whole(descriptor, line)
    finally:
        os.close(descriptor)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    return _objects(read_appended(file).lines) if file.exists() else iter(())


def _objects(lines: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(ValueError):
            if isinstance(value := parse_json(line), dict):
                yield value

"""Keys of inference servers: requests without the key are refused, whatever their path.

    start           new_key() --environment--> server: take_key() --> KeyGuard(its HTTP app)
                    new_key() --memory-------> client, trainer: Authorization: Bearer KEY
    engine serve    the same, and a file with the key that only its user can read
    attach          key_for(port): the variable AREAL_LAB_ENGINE_KEY, else that file

Every user of a machine can read the command line of every process (/proc/PID/cmdline), but only the
environment of their own processes. So a key is in no command line, log, setting or run folder.

Standard library only: the engines' own Python imports this file (`launch.in_engine`).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

KEY_VARIABLE: Final = "AREAL_LAB_ENGINE_KEY"
"""Environment variable with the key of a server: for the server itself, for `areal-lab engine
serve`, and for runs that attach to servers."""
_KEY_BYTES: Final = 32

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""

_REFUSAL: Final = json.dumps(
    {"error": {"message": "the request has no key or a wrong one (Authorization: Bearer KEY)"}}
).encode()
_POLICY_VIOLATION: Final = 1008
"""Code of a closed WebSocket."""


def new_key() -> str:
    """Create a random key."""
    return secrets.token_urlsafe(_KEY_BYTES)


def authorization(key: str) -> dict[str, str]:
    """Headers of a request with this key; none for an empty key."""
    return {"authorization": f"Bearer {key}"} if key else {}


def take_key() -> str:
    """Take the key of this process out of its environment, which its children inherit; empty
    without a key.
    """
    return _checked(os.environ.pop(KEY_VARIABLE, ""))


def key_for(port: int | None) -> str:
    """Key of a server that this process did not start; empty if unknown.

    `port` is that of a server on this machine; None for other machines.
    """
    if key := os.environ.get(KEY_VARIABLE, ""):
        return _checked(key)
    if port is None:
        return ""
    try:
        return _checked(key_file(port).read_text())
    except OSError:
        return ""


def key_file(port: int) -> Path:
    """File with the key of a server of this user on a port of this machine."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "areal_lab" / "keys" / f"{socket.gethostname()}-{port}"


def write_key_file(port: int, key: str) -> Path:
    """Write the file; only this user can read it."""
    file = key_file(port)
    try:
        write_private(file, key)
    except OSError as error:
        raise ValueError(
            f"the key of the server cannot be written to {file} ({error.strerror}); set "
            f"XDG_STATE_HOME to another folder, or {KEY_VARIABLE} to a key"
        ) from error
    return file


def write_private(file: Path, key: str) -> None:
    """Write a key into a new file that only this user can read."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A new file: one that a killed server left behind may have another mode.
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(key)


def remove_key_file(port: int, key: str) -> None:
    """Remove the file, unless a later server has written another key into it."""
    with suppress(OSError):
        file = key_file(port)
        if file.read_text() == key:
            file.unlink()


class KeyGuard:
    """An ASGI application that passes on only requests with the key.

    It replies 401 to others, whether the path exists or not, and closes their WebSockets.
    """

    def __init__(self, app: App, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan" or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _REFUSAL})

    def _has_key(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            scheme, _, key = value.partition(b" ")
            if name == b"authorization" and scheme.lower() == b"bearer":
                return secrets.compare_digest(key.strip(), self._key)
        return False


def _checked(key: str) -> str:
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{KEY_VARIABLE} must be printable ASCII characters without spaces")
    return key

"""Sessions of OpenEnv servers: `{name: openenv, url: "http://localhost:8000"}`.

    reset --WebSocket /ws--> observation --text--> model --> action --> observation, reward, done

A sample is a session of the server. Only `/ws` has sessions: over HTTP, `/step` forgets `/reset`.
An action that the server's schema refuses is the model's mistake: it reads the message. An error of
the environment raises, and the sample has no reward. Written against openenv 0.10.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

from areal_lab.agents.environments.protocol import Step
from areal_lab.extras import require

require("areal_lab.agents.environments.openenv", "openenv")

from websockets.asyncio.client import ClientConnection, connect  # noqa: E402 - if it is there
from websockets.exceptions import ConnectionClosed, WebSocketException  # noqa: E402 - as above

_MESSAGE_BYTES: Final = 2**24
_SCHEMES: Final = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_LOCAL: Final = ("127.0.0.1", "localhost", "::1")
_SHOWN: Final = 200


class ServerGone(RuntimeError):
    """The server is not there, or has left a session without a word."""


class OpenEnv:
    """One session of an OpenEnv server.

    The session is reset with the problem's `seed`, if it has one, so a group plays the same task.

    Args:
        url: address of the server, such as `http://127.0.0.1:8000`.
        action: field of the action that gets the completion; empty if the completion is a JSON
            object with all fields.
        observation: field of the observation that the model reads; empty takes the only text among
            its fields, else the whole observation as JSON.
        reset: more fields for the environment's `reset`.

    Raises:
        ValueError: in one line: the address is not one.
    """

    def __init__(
        self,
        *,
        url: str,
        action: str = "",
        observation: str = "",
        reset: Mapping[str, Any] | None = None,
    ) -> None:
        self._address = _address(url)
        self._action = action
        self._observation = observation
        self._reset = dict(reset or {})
        self._socket: ClientConnection | None = None

    @classmethod
    def check(cls, **kwargs: Any) -> None:
        """Check the settings, without a server; `Play` calls this."""
        cls(**kwargs)

    async def reset(self, data: Mapping[str, Any]) -> str:
        """Open a session; returns the text of the first observation."""
        fields = {**({"seed": data["seed"]} if "seed" in data else {}), **self._reset}
        local = urlsplit(self._address).hostname in _LOCAL
        try:
            self._socket = await connect(
                self._address,
                max_size=_MESSAGE_BYTES,
                ping_interval=None,  # an environment may block its server; calls have a time limit
                proxy=None if local else True,
            )
        except (OSError, WebSocketException) as error:
            raise ServerGone(f"no OpenEnv server at {self._address}: {_line(error)}") from error
        try:
            reply = await self._ask("reset", fields)
        except _ActionInvalid as error:
            raise RuntimeError(f"the OpenEnv server refuses the reset: {error}") from error
        except ConnectionClosed as error:
            raise _lost(error)(
                self._full(f"closed the session with code {_code(error)}")
            ) from error
        return self._text(reply)

    async def step(self, completion: str) -> Step:
        """Send an action."""
        try:
            reply = await self._ask("step", self._fields(completion))
        except _ActionInvalid as error:
            return Step(text=f"error: {error}")
        except ConnectionClosed as error:
            raise _lost(error)(
                f"the OpenEnv server at {self._address} closed the session with code {_code(error)}"
            ) from error
        done = reply.get("done")
        if not isinstance(done, bool):
            raise RuntimeError(f"the OpenEnv server says done is {done!r:.60}, not true or false")
        return Step(text=self._text(reply), done=done, reward=_reward(reply.get("reward")))

    async def close(self) -> None:
        """End the session, and wait until the server has room for another one."""
        if self._socket is None:
            return
        try:
            with suppress(ConnectionClosed):
                await self._socket.send(json.dumps({"type": "close"}))
                while True:
                    await self._socket.recv()
        finally:
            self._socket.transport.abort()  # if the server does not end it

    async def _ask(self, kind: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Data of the reply to a message."""
        assert self._socket is not None
        await self._socket.send(json.dumps({"type": kind, "data": fields}))
        raw = await self._socket.recv()
        try:
            reply = json.loads(raw)
            said, data = reply["type"], reply["data"]
            if not isinstance(data, Mapping):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RuntimeError(
                f"the OpenEnv server replied {raw[:_SHOWN]!r}, which is no message of it"
            ) from None
        if said == "observation":
            return data
        code, message = str(data.get("code")), _line(str(data.get("message")))
        if code == "VALIDATION_ERROR":
            raise _ActionInvalid(_problem(data) or message)
        if code == "CAPACITY_REACHED":
            raise RuntimeError(self._full(message))
        raise RuntimeError(f"the OpenEnv server replied {said} {code}: {message}")

    def _full(self, reason: str) -> str:
        return (
            f"the OpenEnv server at {self._address} began no session: {reason}; it has at most "
            "max_concurrent_envs at once: start it with as many as samples that run at once, or "
            "lower rollout.max_concurrent_rollouts"
        )

    def _fields(self, completion: str) -> Mapping[str, Any]:
        if self._action:
            return {self._action: completion}
        try:
            found = json.loads(completion)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise _ActionInvalid("an action is one JSON object")
        return found

    def _text(self, reply: Mapping[str, Any]) -> str:
        found = reply.get("observation")
        if not isinstance(found, Mapping):
            raise RuntimeError(f"the OpenEnv server sent the observation {found!r:.60}")
        if self._observation:
            if self._observation not in found:
                raise RuntimeError(
                    f"the observation has no field {self._observation!r}, only {', '.join(found)}"
                )
            text = found[self._observation]
            return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        told = {name: value for name, value in found.items() if name != "metadata"}
        texts = [value for value in told.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(told, ensure_ascii=False)


class _ActionInvalid(Exception):
    """The action does not fit its schema; the message is for the model."""


def _address(url: str) -> str:
    """Address of the WebSocket of a server.

    >>> _address("http://127.0.0.1:8000/")
    'ws://127.0.0.1:8000/ws'
    """
    try:
        parts = urlsplit(str(url))
        scheme, port = _SCHEMES[parts.scheme], parts.port
        if not parts.hostname or port == 0:
            raise ValueError
    except (ValueError, KeyError):  # of a port that is no number, too
        raise ValueError(
            f"url is {url!r}, but must be the address of an OpenEnv server, such as "
            "http://127.0.0.1:8000; give command instead to start one"
        ) from None
    path = parts.path.rstrip("/").removesuffix("/ws")
    return parts._replace(scheme=scheme, path=f"{path}/ws").geturl()


def _reward(value: Any) -> float | None:
    """The reward of a step, if it has one.

    Raises:
        RuntimeError: it is not a finite number.
    """
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise RuntimeError(f"the OpenEnv server gave the reward {value!r:.60}, not a finite number")
    return float(value)


def _problem(data: Mapping[str, Any]) -> str:
    """The first problem of an action, in one line; empty if the reply names none."""
    try:
        first = data["errors"][0]
        return f"{'.'.join(map(str, first['loc']))}: {_line(str(first['msg']))}"
    except (KeyError, IndexError, TypeError):
        return ""


def _code(error: ConnectionClosed) -> str:
    return "1006" if error.rcvd is None else f"{error.rcvd.code} {error.rcvd.reason}".strip()


def _lost(error: ConnectionClosed) -> type[RuntimeError]:
    return RuntimeError if error.rcvd else ServerGone


def _line(error: object) -> str:
    return " ".join(str(error).split())[:_SHOWN] or type(error).__name__

"""A server that speaks the protocol of OpenEnv, without the library.

python openenv_server.py PORT FILE    makes the file when it ends after a SIGTERM
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection, serve


class Server:
    """Guess the seed: 1 for the right number, -0.5 for another one; like openenv 0.10.

    `fault` is what it sends instead of the reply to a step; `at` is the message it is the reply to.
    """

    def __init__(self, *, sessions: int = 64, fault: str = "", at: str = "step") -> None:
        self._sessions = sessions
        self._fault = fault
        self._at = at
        self.open = 0
        self.most = 0
        self.received: list[dict[str, Any]] = []

    async def __call__(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        assert socket.request.path == "/ws"
        if self.open == self._sessions:
            return  # which closes it with 1000
        self.open += 1
        self.most = max(self.most, self.open)
        seed = -1
        try:
            async for raw in socket:
                message = json.loads(raw)
                self.received.append(message)
                if message["type"] == "close":
                    break
                if message["type"] == "reset":
                    seed = message["data"].get("seed", -1)
                if self._fault and message["type"] == self._at:
                    if self._fault == "close":
                        break
                    if self._fault == "hang":
                        await socket.wait_closed()
                        break
                    await socket.send(self._fault)
                    continue
                await socket.send(json.dumps(self._reply(message, seed)))
        finally:
            await asyncio.sleep(0)  # a session ends a little after its last message
            self.open -= 1

    def _reply(self, message: dict[str, Any], seed: int) -> dict[str, Any]:
        if message["type"] == "reset":
            return observation("A number from 0 to 9?", None, False)
        try:
            guess = int(message["data"]["guess"])
        except (ValueError, KeyError, TypeError):
            problem = {"type": "int_parsing", "loc": ["guess"], "msg": "must be an\ninteger"}
            return error("VALIDATION_ERROR", "Invalid message", errors=[problem])
        right = guess == seed
        return observation("right" if right else "wrong", 1.0 if right else -0.5, right)


def observation(text: str, reward: Any, done: Any) -> dict[str, Any]:
    data = {"observation": {"message": text, "metadata": {}}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message, **more}}


class Ending(Server):
    """Says its process, and that of a child in another session; a guess may end it.

    98 exits, and 99 is killed.
    """

    def __init__(self, child: int) -> None:
        super().__init__()
        self._child = child

    def _reply(self, message: dict[str, Any], seed: int) -> dict[str, Any]:
        match message["type"], message["data"].get("guess"):
            case "reset", _:
                return observation(f"{os.getpid()} {self._child}", None, False)
            case _, "98":
                print("something about it", file=sys.stderr, flush=True)
                os._exit(3)
            case _, "99":
                os.kill(os.getpid(), signal.SIGKILL)
        return super()._reply(message, seed)


async def _main(port: int, ended: str) -> None:
    child = subprocess.Popen(["sleep", "infinity"], start_new_session=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with serve(Ending(child.pid), "127.0.0.1", port):
        await stop.wait()
    Path(ended).touch()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), sys.argv[2]))

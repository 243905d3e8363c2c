"""A standard of tests, which does what its settings say. Its Python knows nothing of areal_lab.

args: tasks, and a fault (exits, forks, hangs, garbage, raises) at a call (hello, list, run, cancel,
close); of the calls `run`, at those whose number in a process `every` divides.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from typing import Any


class Standard:
    version = "1"

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        if name == "unknown":
            raise ValueError("there is no environment unknown")
        self._args = args
        self._runs = 0
        self._fault("hello")

    def tasks(self) -> list[dict[str, Any]]:
        self._fault("list")
        return [{"id": str(n), "prompt": f"{n} + 1 ="} for n in range(self._args.get("tasks", 8))]

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        self._runs += 1
        if self._runs % self._args.get("every", 1) == 0:
            self._fault("run")
        match request["task"]:
            case "waits":
                try:
                    await asyncio.Event().wait()
                finally:
                    self._fault("cancel")
            case "fails":
                raise ValueError("the judge does not answer")
            case "leaves":
                # In a session of its own, as tool servers are.
                waits = "import signal; print(flush=True); signal.pause()"
                command = [sys.executable, "-c", waits]
                child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
                assert child.stdout is not None
                child.stdout.readline()  # its variables cannot be read while it is being loaded
            case "invalid":
                return {"ok": True, "reward": float("nan")}
            case "refuses":
                return {"ok": False, "reward": 0.0, "error": "a sandbox was lost"}
            case "limited":
                return {"ok": True, "reward": 1, "truncated": True, "metrics": {"turns": 2}}
        if request["task"].isdecimal() and request["base_url"].startswith("http"):
            await asyncio.to_thread(_ask, request["base_url"], request["task"])
        measured = {"lines read": 2}
        return {"ok": True, "reward": 0.5, "rewards": {"half": 0.5}, "metrics": measured}

    async def close(self) -> None:
        self._fault("close")

    def _fault(self, at: str) -> None:
        match self._args.get("fault") if self._args.get("at") == at else "":
            case "exits" | "forks" as fault:
                print("something about it")
                if fault == "forks" and os.fork() == 0:
                    while True:  # with the connection of the runner
                        signal.pause()
                os._exit(3)
            case "hangs":
                while True:
                    signal.pause()
            case "garbage":
                os.write(int(sys.argv[1]), b"no JSON\n")
            case "raises":
                raise ValueError("of the environment")


def _ask(url: str, task: str) -> None:
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": f"{task} +"}]})
    request = urllib.request.Request(
        f"{url}/chat/completions", body.encode(), {"Content-Type": "application/json"}
    )
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).read()

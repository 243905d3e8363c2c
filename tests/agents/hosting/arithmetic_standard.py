"""A standard of tests: a task says what happens. Its Python knows nothing of areal_lab."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from typing import Any


class Standard:
    """Tasks are named after what they do."""

    version = "1"

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        if name == "unknown":
            raise ValueError("there is no environment unknown")
        if name == "exits":
            os._exit(3)
        self._args = args

    def tasks(self) -> list[dict[str, Any]]:
        return [{"id": str(n), "prompt": f"{n} + 1 ="} for n in range(self._args.get("tasks", 8))]

    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        task = request["task"]
        if task == "exits":
            os._exit(3)
        if task == "waits":
            await asyncio.Event().wait()
        if task == "fails":
            raise ValueError("the judge does not answer")
        if task == "garbage":
            fd = int(sys.argv[1])
            os.write(fd, b"no JSON\n")
            await asyncio.Event().wait()
        if task == "leaves":
            # In a session of its own, as tool servers are.
            waits = "import signal; signal.pause()"
            subprocess.Popen([sys.executable, "-c", waits], start_new_session=True)
        if task == "invalid":
            return {"ok": True, "reward": float("nan")}
        if task == "refuses":
            return {"ok": False, "reward": 0.0, "error": "a sandbox was lost"}
        if task.isdecimal() and request["base_url"].startswith("http"):
            await asyncio.to_thread(_ask, request["base_url"], task)
        return {"ok": True, "reward": 0.5, "rewards": {"half": 0.5}}


def _ask(url: str, task: str) -> None:
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": f"{task} +"}]})
    request = urllib.request.Request(
        f"{url}/chat/completions", body.encode(), {"Content-Type": "application/json"}
    )
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).read()

"""A program outside of a run that makes its samples: it knows an address and a key.

python -m tests.pipeline.outside http://127.0.0.1:8000 KEY_FILE    until the gateway is gone
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.pipeline.programs import ask

CLIENTS = 4


def post(url: str, key: str, body: Any = None) -> dict[str, Any]:
    """A request that is sent again as long as the gateway says so."""
    request = urllib.request.Request(
        url, json.dumps(body or {}).encode(), {"Authorization": f"Bearer {key}"}
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                found: dict[str, Any] = json.load(reply)
                return found
        except urllib.error.HTTPError as error:
            if error.code != 429:
                raise
            # A run of this test is faster than those that the header is for.
            time.sleep(0.01 * float(error.headers["Retry-After"]))


def play(url: str, admin: str) -> None:
    """One session: two turns on the problem of the run, a reward, the end."""
    session = post(f"{url}/rl/start_session", admin)
    key, question = session["api_key"], session["data"]["prompt"].splitlines()[-1]
    messages = [{"role": "user", "content": question}]
    first = ask(f"{url}/v1", key, messages)["choices"][0]["message"]
    messages += [{"role": "assistant", "content": first["content"]}]
    messages += [{"role": "user", "content": "9 + 9 ="}]
    second = ask(f"{url}/v1", key, messages)["choices"][0]["message"]
    said = first["content"] + second["content"]
    if len(said) % 7 == 3:
        post(f"{url}/rl/end_session", key)  # without a reward
        return
    post(f"{url}/rl/set_reward", key, {"reward": len(said) % 2})
    post(f"{url}/rl/end_session", key)


def play_until_gone(url: str, admin: str) -> None:
    """Session after session."""
    while True:
        try:
            play(url, admin)
        except (urllib.error.HTTPError, OSError):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=60).close()
            except OSError:
                return  # the run has ended


if __name__ == "__main__":
    address, file = sys.argv[1:]
    key = Path(file).read_text()
    players = [
        threading.Thread(target=play_until_gone, args=(address, key)) for _ in range(CLIENTS)
    ]
    for player in players:
        player.start()
    for player in players:
        player.join()

"""A client of a run's gateway: sessions until something fails, which it writes down.

python -m tests.fault_lab.hosts.client http://198.18.0.1:8000 KEY_FILE REPORT
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

CLIENTS: Final = 3
SILENCE_S: Final = 15.0
"""Longest wait for an answer."""
TOO_MANY: Final = 429
RETRY_S: Final = 0.05


def post(url: str, key: str, body: Any) -> dict[str, Any]:
    """A request and its reply; sent again as long as the gateway says so."""
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=SILENCE_S) as reply:
                found: dict[str, Any] = json.load(reply)
                return found
        except urllib.error.HTTPError as error:
            if error.code != TOO_MANY:
                raise
            time.sleep(RETRY_S)


def play(url: str, admin: str, report: Path) -> None:
    """Sessions of one turn until a request fails."""
    try:
        while True:
            session = post(f"{url}/rl/start_session", admin, {})
            key = session["api_key"]
            question = {"role": "user", "content": session["data"]["prompt"].splitlines()[-1]}
            asked = {"model": "any", "messages": [question]}
            answer = post(f"{url}/v1/chat/completions", key, asked)
            said = answer["choices"][0]["message"]["content"]
            post(f"{url}/rl/set_reward", key, {"reward": len(said) % 2})
            post(f"{url}/rl/end_session", key, {})
    except Exception as error:
        with report.open("a") as file:
            file.write(f"{type(error).__name__}: {error}\n")


if __name__ == "__main__":
    address, key_file, file = sys.argv[1:]
    threads = [
        threading.Thread(target=play, args=(address, Path(key_file).read_text(), Path(file)))
        for _ in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

"""Keys of real servers: no path of an engine replies without its key, and nothing tells the key."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import httpx2

from areal_lab.engines.keys import authorization
from areal_lab.host.process_groups import members
from tests.real_engines.lab import BOUND_S, Lab, request

UNLISTED = [
    *(("GET", path) for path in ("/health", "/ready", "/metrics", "/openapi.json", "/docs", "/")),
    *(("POST", path) for path in ("/generate", "/pause_generation", "/collective_rpc")),
    ("OPTIONS", "/generate"),
]
"""In addition to what the engine lists, if it does."""


async def paths_of(lab: Lab) -> list[tuple[str, str]]:
    """Every method and path that the engine lists."""
    headers = authorization(lab.client.key)
    async with httpx2.AsyncClient(base_url=lab.engine.base_url, headers=headers) as http:
        reply = await http.get("/openapi.json")
    listed = reply.json().get("paths", {}) if reply.is_success else {}
    return [(method.upper(), path) for path, methods in listed.items() for method in methods]


def test_no_path_replies_without_the_key(lab: Lab) -> None:
    async def scenario() -> None:
        asked = [*await paths_of(lab), *UNLISTED]
        assert len(asked) > (len(UNLISTED) if lab.facts.name == "embedded" else 40) - 1
        for key in ("", "guessed"):
            headers = authorization(key)
            async with httpx2.AsyncClient(
                base_url=lab.engine.base_url, headers=headers, timeout=BOUND_S
            ) as http:
                for method, path in asked:
                    reply = await http.request(method, path, json={})
                    assert (method, path, reply.status_code) == (method, path, 401)
        await lab.client.generate([request("r", [5, 6], 3)])

    lab.run(scenario())


def test_the_key_is_in_no_command_line_and_no_log(lab: Lab) -> None:
    """SGLang prints all its settings, and shows them to those who have the key."""
    key = lab.client.key
    processes = list(members(lab.engine.child.pid))
    assert len(processes) >= (1 if lab.facts.name == "embedded" else 2)
    for process in processes:
        assert key not in " ".join(process.cmdline())
    assert key not in lab.engine.child.log_path.read_text(errors="replace")
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            assert key.encode() not in file.read_bytes(), file
    if (scratch := lab.engine._scratch) is not None:
        for file in scratch.folder.rglob("*"):
            assert not file.is_file() or key.encode() not in file.read_bytes(), file
    left = Path(f"/proc/{processes[0].pid}/environ").stat().st_mode
    assert left & 0o077 == 0

    async def scenario() -> None:
        headers = authorization(key)
        for path in ("/server_info", "/get_server_info"):
            # A connection each: vLLM closes that of the first, which fails without pip.
            async with httpx2.AsyncClient(base_url=lab.engine.base_url, headers=headers) as http:
                assert key not in (await http.get(path)).text

    lab.run(scenario())

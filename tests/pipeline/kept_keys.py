"""The keys of a run's servers and agents, and the search for them where they must not be."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_lab.agents.gateway.sessions import Sessions
from areal_lab.engines import keys
from areal_lab.engines.launch import start
from areal_lab.shell.step_report import StepReport


@dataclass
class KeptKeys:
    """All keys that servers and sessions were started with."""

    made: list[str] = field(default_factory=list)
    of_sessions: int = 0
    """Of agents, among them; the gateway's own key is one more."""
    command_lines: int = 0
    """Searched."""

    def look(self, _: StepReport) -> None:
        """Search the command lines of all processes, which every user can read; and look where this
        program and its processes listen."""
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found = file.read_bytes()
            except OSError:
                continue  # it has ended
            self.command_lines += 1
            assert not [key for key in self.made if key.encode() in found], file
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            try:
                sockets = process.net_connections("inet")
            except psutil.NoSuchProcess:
                continue
            for one in sockets:
                if one.status == psutil.CONN_LISTEN:
                    assert one.laddr.ip == "127.0.0.1", (process, one)

    def assert_not_in(self, folder: Path) -> None:
        """Search every file below a run folder."""
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert {"config.yaml", "env.json", "events.jsonl", "engine-0.log", "trainer.log"} <= {
            path.name for path in files
        }
        for path in files:
            content = path.read_bytes()
            assert not [key for key in self.made if key.encode() in content], path

    def assert_not_in_text(self, text: str) -> None:
        """Search what was printed, or is the message of an error."""
        assert self.made
        assert not [key for key in self.made if key in text]


def keep_keys(patch: pytest.MonkeyPatch) -> KeptKeys:
    """Record the keys of the servers and sessions that are started from now on."""
    kept = KeptKeys()

    def new_key() -> str:
        kept.made.append(keys.new_key())
        return kept.made[-1]

    start_session, make = Sessions.start, Sessions.__init__

    def make_noted(sessions: Sessions, admin_key: str, *rest: Any) -> None:
        kept.made.append(admin_key)
        make(sessions, admin_key, *rest)

    def start_noted(*arguments: Any) -> Any:
        started = start_session(*arguments)
        kept.made.append(started[1])
        kept.of_sessions += 1
        return started

    patch.setattr(start, "new_key", new_key)
    patch.setattr(Sessions, "__init__", make_noted)
    patch.setattr(Sessions, "start", start_noted)
    return kept

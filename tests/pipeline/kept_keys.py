"""The keys of a run's servers, and the search for them where they must not be."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from areal_lab.engines import keys
from areal_lab.engines.launch import start
from areal_lab.pipeline.step_report import StepReport


@dataclass
class KeptKeys:
    """All keys that servers were started with."""

    made: list[str] = field(default_factory=list)
    command_lines: int = 0
    """Searched."""

    def look(self, _: StepReport) -> None:
        """Search the command lines of all processes, which every user can read."""
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found = file.read_bytes()
            except OSError:
                continue  # it has ended
            self.command_lines += 1
            assert not [key for key in self.made if key.encode() in found], file

    def assert_not_in(self, folder: Path) -> None:
        """Search every file below a run folder."""
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert {"config.yaml", "env.json", "events.jsonl", "engine-0.log", "trainer.log"} <= {
            path.name for path in files
        }
        for path in files:
            content = path.read_bytes()
            assert not [key for key in self.made if key.encode() in content], path


def keep_keys(patch: pytest.MonkeyPatch) -> KeptKeys:
    """Record the keys of the servers that are started from now on."""
    kept = KeptKeys()

    def new_key() -> str:
        kept.made.append(keys.new_key())
        return kept.made[-1]

    patch.setattr(start, "new_key", new_key)
    return kept

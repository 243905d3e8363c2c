"""Progress of an installation: one updated line on a terminal, separate lines elsewhere.

pip reports its downloads; while it unpacks it prints nothing, but packages appear on disk.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.status import Status

_INTERVAL_S: Final = 10.0
"""Seconds between two lines without a terminal."""


@dataclass(slots=True)
class Progress:
    """Prints the current stage of an installation."""

    console: Console
    started_s: float = field(default_factory=time.monotonic)
    downloaded_bytes: float = 0.0
    _collected: set[str] = field(default_factory=set)
    _unpacking: bool = False
    _last: str = ""
    _printed_s: float = -_INTERVAL_S
    _status: Status | None = None

    def stage(self, text: str) -> None:
        """Start a new stage."""
        self._printed_s = -_INTERVAL_S
        self._print(text)

    def pip(self, output: str, present: int, total: int | None) -> None:
        """Show the progress of pip.

        Args:
            output: pip's output since the last call.
            present: packages in the environment.
            total: packages to install, if known.
        """
        for line in output.splitlines():
            # pip processes local files and collects everything else.
            if found := re.match(r"Collecting (\S+)|Processing \S*?([^/\s-]+)-\S*\.whl", line):
                self._last = re.split(r"[=<>!~\[;@]", found[1] or found[2])[0]
                self._collected.add(self._last)
            elif found := re.search(r"Downloading .*\((\d+(?:\.\d+)?) (k|M|G)?B\)", line):
                size = float(found.group(1)) * {"k": 1e3, "M": 1e6, "G": 1e9, None: 1}[found[2]]
                self.downloaded_bytes += size
                self._last = f"{self._last.split(' (')[0]} ({found.group(1)} {found[2] or ''}B)"
            elif line.startswith("Installing collected packages"):
                self._unpacking = True
                self._printed_s = -_INTERVAL_S
        of = "" if total is None else f" of {total}"
        if self._unpacking:
            self._print(f"unpacking: {present}{of} packages")
        else:
            self._print(
                f"downloading: {len(self._collected)}{of} packages, now {self._last or '...'}"
            )

    def end(self) -> None:
        """Stop updating."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _print(self, text: str) -> None:
        now = time.monotonic()
        if self.console.is_terminal:
            text = f"{text}  ({now - self.started_s:.0f} s)"
            if self._status is None:
                self._status = self.console.status(text)
                self._status.start()
            self._status.update(text)
        elif now - self._printed_s >= _INTERVAL_S:
            self._printed_s = now
            line = f"[{now - self.started_s:6.1f} s] {text}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

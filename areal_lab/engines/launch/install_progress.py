"""How far an installation is: a line that is redrawn on a terminal, lines elsewhere.

pip says what it fetches; while it unpacks it says nothing, but packages appear in the environment.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Final

from rich.console import Console
from rich.status import Status

_QUIET_S: Final = 10.0
"""Longest time without a line where lines are not redrawn."""


@dataclass(slots=True)
class Progress:
    """Tells what is being done."""

    console: Console
    began_s: float = field(default_factory=time.monotonic)
    downloaded_bytes: float = 0.0
    _collected: set[str] = field(default_factory=set)
    _unpacking: bool = False
    _last: str = ""
    _told_s: float = -_QUIET_S
    _status: Status | None = None

    def stage(self, text: str) -> None:
        """Something else begins."""
        self._told_s = -_QUIET_S
        self._tell(text)

    def pip(self, said: str, present: int, total: int | None) -> None:
        """What pip has said since the last call, and how many packages are in the environment."""
        for line in said.splitlines():
            # What lies in a folder of this machine is processed, everything else collected.
            if found := re.match(r"Collecting (\S+)|Processing \S*?([^/\s-]+)-\S*\.whl", line):
                self._last = re.split(r"[=<>!~\[;@]", found[1] or found[2])[0]
                self._collected.add(self._last)
            elif found := re.search(r"Downloading .*\((\d+(?:\.\d+)?) (k|M|G)?B\)", line):
                size = float(found.group(1)) * {"k": 1e3, "M": 1e6, "G": 1e9, None: 1}[found[2]]
                self.downloaded_bytes += size
                self._last = f"{self._last.split(' (')[0]} ({found.group(1)} {found[2] or ''}B)"
            elif line.startswith("Installing collected packages"):
                self._unpacking = True
                self._told_s = -_QUIET_S
        of = "" if total is None else f" of {total}"
        if self._unpacking:
            self._tell(f"unpacking: {present}{of} packages")
        else:
            self._tell(f"fetching: {len(self._collected)}{of} packages, now {self._last or '...'}")

    def end(self) -> None:
        """Nothing more comes."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _tell(self, text: str) -> None:
        now = time.monotonic()
        if self.console.is_terminal:
            text = f"{text}  ({now - self.began_s:.0f} s)"
            if self._status is None:
                self._status = self.console.status(text)
                self._status.start()
            self._status.update(text)
        elif now - self._told_s >= _QUIET_S:
            self._told_s = now
            line = f"[{now - self.began_s:6.1f} s] {text}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

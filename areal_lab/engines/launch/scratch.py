"""The temporary folder of a server, with a list of the shared memory that is to go with it.

start --> folder, and whatever the server maps is listed in it --> stop: both go
this process is killed     the server removes both (`in_engine`)
both are killed at once    the next start of a server does
"""

from __future__ import annotations

import atexit
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from areal_lab.host.owned_folders import (
    make_owned_folder,
    remove_abandoned_folders,
    remove_owned_folder,
)
from areal_lab.host.shared_memory import SHARED_MEMORY, Segments, remove_segments

_LIST = "shared_memory"
_NO_GROUP = 0
"""Whatever any process maps stays."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """What is to be removed after a server."""

    folder: Path
    _segments: Segments = field(default_factory=Segments)

    @staticmethod
    def make() -> Scratch:
        """Before a server is started."""
        place = Path(tempfile.gettempdir())
        remove_abandoned_folders(place, _remove_listed)
        scratch = Scratch(make_owned_folder(place, mode=0o700))
        # Of a server that was killed, and whose stop was cancelled before it came to this.
        atexit.register(scratch.remove, _NO_GROUP)
        return scratch

    def look(self, group: int) -> None:
        """Note what the processes of the server map now: once they are dead nobody can tell."""
        if self._segments.look(group):
            (self.folder / _LIST).write_text("\n".join(map(str, self._segments.found)))

    def remove(self, group: int) -> None:
        """When the processes of the server have ended. Idempotent."""
        remove_segments(self._segments.found, group)
        remove_owned_folder(self.folder)


def _remove_listed(folder: Path) -> None:
    try:
        listed = map(Path, (folder / _LIST).read_text().splitlines())
    except OSError:
        return  # its server had none
    remove_segments([one for one in listed if one.parent == SHARED_MEMORY], _NO_GROUP)

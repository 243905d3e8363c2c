"""The temporary folder of a server, with a list of its shared memory, removed with it.

start --> create the folder, list the server's shared memory in it --> stop: remove both
this process is killed     the server removes both (`in_engine`)
both are killed at once    the next start of a server removes both
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
"""No group is exempt: memory that any process maps stays."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Temporary folder and shared memory to remove after a server."""

    folder: Path
    _segments: Segments = field(default_factory=Segments)

    @staticmethod
    def make() -> Scratch:
        """Create the folder before a server is started, and remove abandoned ones."""
        parent = Path(tempfile.gettempdir())
        remove_abandoned_folders(parent, _remove_listed)
        scratch = Scratch(make_owned_folder(parent, mode=0o700))
        # In case a server was killed and its `stop` was cancelled before the removal.
        atexit.register(scratch.remove, _NO_GROUP)
        return scratch

    def record_segments(self, group: int) -> None:
        """Record the shared memory of the server's processes while they are alive."""
        if self._segments.record(group):
            (self.folder / _LIST).write_text("\n".join(map(str, self._segments.found)))

    def remove(self, group: int) -> None:
        """Remove everything after the server's processes have ended. Idempotent."""
        remove_segments(self._segments.found, group)
        remove_owned_folder(self.folder)


def _remove_listed(folder: Path) -> None:
    try:
        listed = map(Path, (folder / _LIST).read_text().splitlines())
    except OSError:
        return  # the server had no shared memory
    remove_segments([one for one in listed if one.parent == SHARED_MEMORY], _NO_GROUP)

"""Files of JSON lines that may still grow: read on from where the last reading ended.

    |--- read before ---|--- new lines ---|{"kind":"sp      <- being written, or cut by a kill
                        start             end

An incomplete last line is left for the next reading. Positions are in bytes. A compressed file
(.gz) is complete: it is read once, and nothing is appended to it.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Appended:
    """What a reading found."""

    lines: tuple[str, ...]
    """Complete lines, without their ends."""
    end: int
    """Where the next reading starts."""
    cut: bool = False
    """Whether an incomplete line follows."""


def read_appended(path: Path, start: int = 0) -> Appended:
    """Read the lines of a file from position `start` on.

    Raises:
        ValueError: if the file is shorter than `start`: it is another one than before.
        OSError, EOFError: if it cannot be read.
    """
    if path.suffix == ".gz":
        return Appended((), start) if start else _split(gzip.decompress(path.read_bytes()), 0)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < start:
            raise ValueError(
                f"{path} has {size} bytes, but {start} were read before: it was replaced; "
                "read the run again with read_run"
            )
        file.seek(start)
        data = file.read()
    if start and data.startswith(b"\n"):
        # The line before was complete except for its end, and was already read.
        start, data = start + 1, data[1:]
    return _split(data, start)


def _split(data: bytes, start: int) -> Appended:
    pieces = data.split(b"\n")
    if pieces[-1] == b"":
        pieces.pop()
    end, cut = start + len(data), False
    if pieces and not _is_json(pieces[-1]):
        cut = True
        end -= len(pieces.pop()) + data.endswith(b"\n")
    return Appended(tuple(piece.decode(errors="replace") for piece in pieces), end, cut)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line.decode(errors="replace"))
    except ValueError:
        return False
    return True

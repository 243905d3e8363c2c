"""Files of JSON lines that may still grow: continue reading where the last reading ended.

    |--- read before ---|--- new lines ---|{"kind":"sp      <- being written, or cut by a kill
                        start             end

An incomplete last line is left for the next reading. Positions are in bytes. A compressed file
(.gz) is complete: it is read once, and nothing is appended to it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from areal_lab.host.foreign import FILE_BYTES, parse_json, read_bytes


@dataclass(frozen=True, slots=True)
class Appended:
    """Result of a reading."""

    lines: tuple[str, ...]
    """Complete lines, without line ends."""
    end: int
    """Start of the next reading."""
    cut: bool = False
    """True if an incomplete line follows."""


def read_appended(path: Path, start: int = 0) -> Appended:
    """Read the lines of a file from position `start` on."""
    if path.suffix == ".gz" and start:
        return Appended((), start)
    data = read_bytes(path, start=start, limit_bytes=FILE_BYTES)
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
        parse_json(line.decode(errors="replace"))
    except json.JSONDecodeError:
        return False
    except ValueError:
        return True  # complete, and refused by the readers
    return True

"""Find the few lines of a log that matter, at the speed of `bytes.find`.

    chunk --anchors--> position --> lines, while an extractor wants more --> next position

Most of a log is progress and server lines. An extractor names byte strings ("anchors"), of which
each of its records has at least one in its first line. Everything else is skipped unread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from areal_lab.foreign.text import Line, clean, parts

VALUES_KEPT: Final = 1_500_000
"""Values of unknown keys that are kept in total; later ones are counted."""
ROWS_KEPT: Final = 200_000
"""Records that are kept; later ones are counted."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One record of a log: pairs as printed."""

    kind: str
    """What the record is in its framework: train, validation, rollout, config, ..."""
    step: int | None
    values: dict[str, Any]
    process: str = ""
    pid: int | None = None
    time_s: float | None = None
    line: int = 0
    source: int = 0
    """Number of the file among those given."""
    cut: bool = False
    """True if the record ended early."""


@dataclass(slots=True)
class Rows:
    """Records of one reader, and what it could not read."""

    rows: list[Row] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    marks: Counter[str] = field(default_factory=Counter)
    """Other facts that lines told, by name."""
    values: int = 0

    def add(self, row: Row) -> None:
        """Keep a record, within bounds."""
        if len(self.rows) >= ROWS_KEPT or self.values > VALUES_KEPT:
            self.unread["records beyond the bound"] += 1
            return
        self.values += len(row.values)
        self.rows.append(row)


class Extractor(Protocol):
    """Reads the lines of one shape. A record may have several lines."""

    def feed(self, line: Line, into: Rows, /) -> int:
        """Read a line; return how many of the next lines it wants to see."""

    def close(self, into: Rows, /) -> None:
        """Finish the last record."""


@dataclass(slots=True)
class Feed:
    """An extractor with its anchors and its records."""

    name: str
    anchors: Sequence[bytes]
    extractor: Extractor
    into: Rows = field(default_factory=Rows)
    wants: int = 0
    head: bool = False
    """Its records begin in the first piece of a file."""
    back: int = 0
    """Lines before that with an anchor that the extractor sees, too."""
    seen: int = 0
    """End of the last line that it saw, in the current piece."""


SETTLED: Final = 3
"""Records after which readers without any look at each `SAMPLED`-th piece only."""
SAMPLED: Final = 8
LOOKED_BYTES: Final = 4096
"""Most bytes of the lines before that with an anchor."""
COARSE: Final = (b"{'", b"':", b"tep ", b'tep"', b"(ms)", b" ..")
"""Parts that several anchors have in common: searched once in place of each of them."""


def scan(
    pieces: Iterable[bytes],
    feeds: Sequence[Feed],
    *,
    source: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Feed the lines of a log to those extractors whose anchors they have."""
    number, done = 1, 0
    before = [len(one.into.rows) for one in feeds]
    for index, piece in enumerate(pieces):
        active = _active(feeds, index)
        number = _scan_chunk(piece, active, number)
        done += len(piece)
        progress(done)
    for one, first in zip(feeds, before, strict=True):
        one.extractor.close(one.into)
        one.wants = 0
        for row in one.into.rows[first:]:
            row.source = source


def _active(feeds: Sequence[Feed], index: int) -> Sequence[Feed]:
    """Extractors for a piece of the file, by its index."""
    if index == 0:
        return feeds
    settled = any(len(one.into.rows) >= SETTLED for one in feeds)
    everything = not settled or index % SAMPLED == 0
    return [
        one for one in feeds if one.wants > 0 or ((one.into.rows or everything) and not one.head)
    ]


def _coarse(feeds: Sequence[Feed]) -> list[bytes]:
    """Byte strings of which each line with an anchor has at least one."""
    return list(
        dict.fromkeys(
            next((part for part in COARSE if part in anchor), anchor)
            for one in feeds
            for anchor in one.anchors
        )
    )


def _scan_chunk(piece: bytes, feeds: Sequence[Feed], number: int) -> int:
    """Scan whole lines; return the number of the next line."""
    end, at, counted = len(piece), 0, 0
    anchors = _coarse(feeds)
    for one in feeds:
        one.seen = 0
    nearest = [piece.find(anchor) for anchor in anchors]
    while at < end:
        if not any(one.wants > 0 for one in feeds):
            hit = -1
            for index, anchor in enumerate(anchors):
                if 0 <= nearest[index] < at:
                    nearest[index] = piece.find(anchor, at)
                if nearest[index] >= 0 and (hit < 0 or nearest[index] < hit):
                    hit = nearest[index]
            if hit < 0:
                break
            at = piece.rfind(b"\n", at, hit) + 1 or at
        number += piece.count(b"\n", counted, at)
        counted = at
        stop = piece.find(b"\n", at)
        ended = stop >= 0
        raw = piece[at : stop if ended else end]
        behind = stop + 1 if ended else end
        _look_back(piece, at, behind, feeds, number)
        at = behind
        _feed_line(raw, feeds, number, ended=ended)
    return number + piece.count(b"\n", counted, end)


def _look_back(piece: bytes, at: int, end: int, feeds: Sequence[Feed], number: int) -> None:
    """Feed the lines before one with an anchor to an extractor that wants and has not seen them."""
    for one in feeds:
        if one.back == 0:
            continue
        if one.wants <= 0 and any(piece.find(anchor, at, end) >= 0 for anchor in one.anchors):
            before = piece[max(one.seen, at - LOOKED_BYTES) : at].split(b"\n")[:-1]
            for raw in before[-one.back :]:
                text = raw.decode("utf-8", "replace").removesuffix("\r")
                one.extractor.feed(clean(parts(text)[-1], number), one.into)
            one.seen = end
        elif one.wants > 0:
            one.seen = end


def _feed_line(raw: bytes, feeds: Sequence[Feed], number: int, *, ended: bool) -> None:
    wanted = [one for one in feeds if one.wants > 0 or any(anchor in raw for anchor in one.anchors)]
    text = raw.decode("utf-8", "replace").removesuffix("\r")
    shown = parts(text)
    for index, part in enumerate(shown):
        line = clean(part, number, ended=ended or index < len(shown) - 1)
        for one in wanted:
            one.wants = max(one.wants - (index == 0), one.extractor.feed(line, one.into))
            one.wants = max(one.wants, 0)

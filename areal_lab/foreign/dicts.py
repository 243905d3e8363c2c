"""Records that are one printed dictionary, on one line or on many: `HEADER {...}`.

A header function finds where the dictionary begins. Lines are joined without a blank while the
dictionary is open and the join reads on; lines of other processes between them are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from areal_lab.foreign.literal import Parsed, flat, read_dict
from areal_lab.foreign.scan import Row, Rows
from areal_lab.foreign.text import STRONG_START, Line

RECORD_CHARACTERS: Final = 400_000
PATIENCE: Final = 6
"""Lines of others that may stand inside a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Where a record begins in its line."""

    kind: str
    step: int | None
    start: int | None
    """Position of the dictionary; None if it begins on the next line."""
    opened: bool = False
    """The brace is missing, and `start` is the first key."""


class DictExtractor:
    """Dictionaries behind headers."""

    def __init__(
        self,
        header: Callable[[Line], Header | None],
        *,
        step_key: str = "",
        watch: Callable[[Line, Rows], None] = lambda _line, _into: None,
        finish: Callable[[Row, Rows], None] = lambda _row, _into: None,
        patience: int = PATIENCE,
    ) -> None:
        """
        Args:
            header: finds the start of a record in a line.
            step_key: key of the step's number, for records whose header has none.
            watch: sees every line that is fed, such as a bar.
            finish: completes a record before it is kept.
            patience: lines of others that may stand inside a record.
        """
        self._header, self._step_key = header, step_key
        self._watch, self._finish, self._most = watch, finish, patience
        self._open: tuple[Line, Header] | None = None
        self._text = ""
        self._parsed: Parsed | None = None
        self._patience = 0

    def feed(self, line: Line, into: Rows) -> int:
        """See `scan.Extractor`."""
        self._watch(line, into)
        header = self._header(line)
        if header is not None and self._goes_on(header, line):
            self._read_on(line, into)
        elif header is not None:
            self.close(into)
            self._open, self._patience = (line, header), self._most
            self._text = "" if header.start is None else line.text[header.start :]
            self._parsed = None
            if header.start is not None:
                self._parse(line, into)
        elif self._open is not None:
            self._read_on(line, into)
        return self._patience if self._open is not None else 0

    def _goes_on(self, header: Header, line: Line) -> bool:
        """True if a line without a brace has more pairs of the open record, and none again."""
        if self._open is None or self._parsed is None or not header.opened or header.start is None:
            return False
        if not line.may_continue(self._open[0]) or not self._text.rstrip().endswith(","):
            return False
        more = read_dict(line.text, header.start, opened=True).value
        return not more.keys() & self._parsed.value.keys()

    def _read_on(self, line: Line, into: Rows) -> None:
        assert self._open is not None
        begun = self._open[0]
        other = not line.may_continue(begun) or STRONG_START.match(line.text) is not None
        if not self._text:
            if not other and line.text.lstrip().startswith("{"):
                self._text = line.text.strip()
                self._parse(line, into)
                return
        elif not other and len(self._text) + len(line.text) < RECORD_CHARACTERS:
            # Printed over several lines, a dictionary has its pairs indented.
            before = self._parsed
            assert before is not None
            joined = self._text + line.text.lstrip()
            after = read_dict(joined, opened=self._open[1].opened)
            pairs = _count(after.value) - _count(before.value)
            grown = after.complete or pairs > 0
            lost = (after.lost - (not after.complete)) - (before.lost - (not before.complete))
            # A damaged quote loses a pair of a line that has several others.
            if pairs >= 3 * lost if lost > 0 else grown or _part(line.text):
                self._text, self._patience = joined, self._most
                self._take(after, line, into)
                return
        self._patience -= 1
        if self._patience <= 0:
            self.close(into)

    def _parse(self, line: Line, into: Rows) -> None:
        assert self._open is not None
        try:
            parsed = read_dict(self._text, opened=self._open[1].opened)
        except RecursionError:
            self._open = None
            into.unread["records nested too deep"] += 1
            return
        self._take(parsed, line, into)

    def _take(self, parsed: Parsed, line: Line, into: Rows) -> None:
        self._parsed = parsed
        if parsed.complete or not line.ended:
            self.close(into)

    def close(self, into: Rows) -> None:
        """See `scan.Extractor`."""
        if self._open is None:
            return
        line, header = self._open
        parsed, self._open = self._parsed, None
        if parsed is None:
            into.unread["records without values"] += 1
            return
        into.unread["values that are cut or unreadable"] += parsed.lost
        values = flat(parsed.value)
        step = header.step if header.step is not None else _step(values.get(self._step_key))
        if not values:
            return
        row = Row(
            kind=header.kind,
            step=step,
            values=values,
            process=line.process,
            pid=line.pid,
            time_s=line.time_s,
            line=line.number,
            cut=not parsed.complete,
        )
        self._finish(row, into)
        into.add(row)


def _step(raw: Any) -> int | None:
    try:
        return int(float(raw))
    except (TypeError, ValueError, OverflowError):
        return None


def _count(value: dict[str, Any]) -> int:
    return sum(1 + (len(one) if isinstance(one, dict) else 0) for one in value.values())


def _part(text: str) -> bool:
    """True if a line may be a part of a broken pair: no words."""
    return len(text.strip()) > 0 and len(text.split()) <= 3

r"""Lines of a console log, whatever a terminal or a paste did to them.

    bytes --decoded--> UTF-8 --unwrapped--> whole lines --clean--> Line(process, pid, time, text)

Removed: compression, byte order marks, CRLF, colors (also without their escape character), progress
bars before `\r`, prefixes of Ray and `[repeated 4x across cluster]`, quotes `> `, `**`. A log that
a terminal wrapped is recognized by its longest lines, which all have the same length.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

CHUNK_BYTES: Final = 4 * 1024**2
LINE_BYTES: Final = 8 * 1024**2
"""Bytes after which a line without an end is cut."""
SAMPLE_BYTES: Final = 1024**2
"""Bytes at the start that show whether a terminal wrapped the log."""

_ESCAPES: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"
    r"|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?"
    r"|\x1b[@-Z\\-_]"
    # colors whose escape character was lost in a paste, or written out
    r"|(?:\\x1b|\\033|\\u001b|\^\[|␛)?\[(?:0|1|2|3|4|7|22|39|49|[39][0-7]|10[0-7]|[34]8;[25];[\d;]{1,12}"
    r"|[0-9]{1,2};[\d;]{1,20})?m(?! ?\d+s)"
)
_PREFIX: Final = re.compile(
    r"\s*\((?P<name>[A-Za-z_][\w.:<>-]*)"
    r"(?:\s+(?:pid=(?P<pid>\d+)(?:,\s*ip=[\w.:]+)?|\+[\w. ]{1,12}))?"
    r"(?:,\s*ip=[\w.:]+)?\) ?"
)
_PROCESSES: Final = frozenset(("raylet", "autoscaler", "AReaL", "gcs_server"))
"""Names that stand in brackets without a pid."""
_REPEATED: Final = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_QUOTED: Final = re.compile(r"^(?:\s{0,3}>[ >]*)?(?:\[rank\d+\]:\s?)?(?:`{1,3}(?=[({]|step:))?")
_DATE: Final = re.compile(r"(\d{4})-?(\d\d)-?(\d\d)[-T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_TIME: Final = re.compile(r"(?:^|\s)(\d\d):(\d\d):(\d\d)(?:\s|$)")
STRONG_START: Final = re.compile(
    r"\s{0,3}(?:\x1b\[[\d;]*m)*(?:\((?:\w[\w.:]*\s+pid=\d+|raylet|AReaL\))"
    r"|\[?\d{4}-\d\d-\d\d[ T]|\d\d:\d\d:\d\d\s+(?:INFO|SUCCESS|WARN|DEBUG|ERROR)"
    r"|(?:INFO|WARNING|ERROR|DEBUG)\s|=====|step:\d+ - |\{\"|Traceback )|\s{2,8}[•*-]\s"
)
"""Start of a line that no broken line continues with."""
_ONE_CHARACTER: Final = re.compile(r"\s*([\W_])\1+\s*|[╒╕╘╛╞╡╤╧╪═├┼┤─┬┴┌┐└┘│|+=\-\s]+")
_BORDERS: Final = frozenset("│┃║╭╮╰╯")
_BLANK_OR_COLOR: Final = frozenset(" \x1b[\\^␛")
_WIDTHS: Final = frozenset(
    (72, 78, 79, 80, 88, 96, 99, 100, 110, 119, 120, 128, 132, 140, 150, 160, 180, 200, 240)
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line without what a terminal or a collector added."""

    text: str
    chain: tuple[tuple[str, int | None], ...]
    """Processes of its prefixes, name and pid, the outer one (of a collector) first."""
    time_s: float | None
    """Time stamp, in seconds: since 1970 if it has a date, else since midnight."""
    number: int
    """In its file, from 1."""
    ended: bool = True
    """False for the end of the file without a line end: its last word may be cut."""

    @property
    def process(self) -> str:
        """Name before `pid=`; empty if the line has none."""
        return self.chain[-1][0] if self.chain else ""

    @property
    def pid(self) -> int | None:
        """Process id of the prefix."""
        return self.chain[-1][1] if self.chain else None

    def may_continue(self, begun: Line) -> bool:
        """True if the line may belong to a record that began in `begun`.

        The rest of a broken line has no prefix, or only that of a collector around it.
        """
        return self.chain == begun.chain[: len(self.chain)]


def chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Bytes of a file in pieces that end with a line; unpacked, decoded from UTF-16."""
    rest, size = [], 0
    for piece in _decoded(_unpacked(pieces)):
        end = piece.rfind(b"\n") + 1
        if end == 0:
            rest.append(piece)
            size += len(piece)
            if size > LINE_BYTES:
                yield b"".join(rest) + b"\n"
                rest, size = [], 0
            continue
        yield b"".join([*rest, piece[:end]])
        rest, size = ([piece[end:]], len(piece) - end) if end < len(piece) else ([], 0)
    if rest:
        yield b"".join(rest)


def _unpacked(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Unpack gzip; a damaged or cut end is the end of the file."""
    unpack: zlib._Decompress | None = None
    first = True
    for piece in pieces:
        if first and piece[:2] == b"\x1f\x8b":
            unpack = zlib.decompressobj(wbits=31)
        first = False
        if unpack is None:
            yield piece
            continue
        data = piece
        while data:
            try:
                out = unpack.decompress(data, CHUNK_BYTES)
            except zlib.error:
                return
            if out:
                yield out
            data = unpack.unconsumed_tail
            if unpack.eof:
                data = unpack.unused_data
                if data[:2] != b"\x1f\x8b":
                    return
                unpack = zlib.decompressobj(wbits=31)
            elif not data and not out:
                break


def _decoded(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """UTF-8 from UTF-16 with a byte order mark; UTF-8 as it is."""
    decoder: codecs.IncrementalDecoder | None = None
    first = True
    for piece in pieces:
        if first and piece[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            decoder = codecs.getincrementaldecoder("utf-16")("replace")
        plain = piece.removeprefix(codecs.BOM_UTF8) if first else piece
        first = False
        yield plain if decoder is None else decoder.decode(piece).encode("utf-8", "replace")


def wrap_width(sample: bytes) -> int | None:
    """Width at which a terminal wrapped the log, or None.

    The longest lines of a wrapped log all have the width, no line is longer, few are a little
    shorter, and the line behind a full one rarely begins with a blank or as it does.
    """
    lines = [one.removesuffix("\r") for one in sample.decode("utf-8", "replace").split("\n")]
    long = [one for one in lines[:-1] if len(one) >= 40 and _wrappable(one)]
    if not long:
        return None
    width = max(map(len, long))
    pairs = list(pairwise(lines))
    behind = {one: two for one, two in pairs if len(one) == width and _wrappable(one)}
    full = list(behind.values())  # a line that comes again says nothing
    nearly = sum(width - 8 <= len(two) < width and len(one) != width for one, two in pairs)
    standard = width in _WIDTHS
    if len(full) < 3:
        return width if standard and (len(full) == 2 or len(lines) < 40) else None
    broken = sum(two[:1] != " " and STRONG_START.match(two) is None for two in full)
    if width > 400 or 4 * nearly > len(full) or (3 if standard else 2) * broken < len(full):
        return None
    return width


def _wrappable(line: str) -> bool:
    """False for rules, borders and rows of tables, whose width says nothing."""
    if line[:1] in _BORDERS and line[-1:] in _BORDERS:
        return False
    return "\t" not in line and _ONE_CHARACTER.fullmatch(line) is None


def unwrapped(pieces: Iterable[bytes], width: int) -> Iterator[bytes]:
    """Join the lines that a terminal wrapped at `width` columns."""
    open_line, parts = False, list[str]()
    for piece in pieces:
        ended = piece.endswith(b"\n")
        lines = piece.decode("utf-8", "replace").split("\n")
        if ended:
            lines.pop()
        out = list[str]()
        for index, raw in enumerate(lines):
            line = raw.removesuffix("\r")
            if open_line and _continues(parts[0], parts[-1], line):
                parts.append(line)
            else:
                if parts:
                    out.append("".join(parts))
                parts = [line]
            open_line = len(line) == width and _wrappable(line)
            if index == len(lines) - 1 and not ended:
                out.append("".join(parts))
                parts = []
        text = "\n".join(out)
        if text or out:
            yield (text + ("\n" if ended else "")).encode("utf-8", "replace")
    if parts:
        yield ("".join(parts) + "\n").encode("utf-8", "replace")


def _continues(first: str, before: str, line: str) -> bool:
    """False if a line behind a full one begins something new, as `first` did."""
    if STRONG_START.match(line) is not None or _shape(first) == _shape(line):
        return False
    if (indent := _indent(first)) >= 2 and indent == _indent(line):  # of a list
        return False
    return not (line.startswith("{") and before.rstrip().endswith("}"))


def _indent(line: str) -> int:
    """Blanks before the text, behind a color."""
    if line[:1] not in _BLANK_OR_COLOR:
        return 0
    text = _ESCAPES.sub("", line[:40])
    return len(text) - len(text.lstrip())


def _shape(line: str) -> str:
    return re.sub(r"\d+", "0", line[:10])


def clean(raw: str, number: int, *, ended: bool = True) -> Line:
    """Remove colors, prefixes and quotes from one part of a physical line."""
    text = raw
    if "\x1b" in text or "[" in text:
        text = _ESCAPES.sub("", text)
    found = _QUOTED.match(text)
    if found is not None and found.end():
        text = text[found.end() :]
    if "**" in text:
        text = text.replace("**", "")
    if (end := text.rstrip("\r\n ")).endswith("`"):
        text = end.removesuffix("```").removesuffix("`")
    chain = []
    while (prefix := _PREFIX.match(text)) is not None:
        if prefix["pid"] is None and prefix["name"] not in _PROCESSES:
            break
        pid = int(prefix["pid"]) if prefix["pid"] and len(prefix["pid"]) < 12 else None
        chain.append((prefix["name"], pid))
        text = text[prefix.end() :]
    if "[repeated " in text:
        text = _REPEATED.sub("", text)
    return Line(text.rstrip("\r\n"), tuple(chain), stamp(text), number, ended)


def stamp(text: str) -> float | None:
    """Time stamp near the start of a line, in seconds."""
    head = text[:80]
    if (found := _DATE.search(head)) is not None:
        year, month, day, hour, minute, second = (int(one) for one in found.groups()[:6])
        try:
            moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
        except ValueError:
            return None
        fraction = found[7]
        return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    if (found := _TIME.search(head)) is not None:
        return int(found[1]) * 3600.0 + int(found[2]) * 60.0 + int(found[3])
    return None


def parts(raw: str) -> list[str]:
    r"""What one physical line showed in turn: a bar, blanks that erase it, a record."""
    if "\r" not in raw:
        return [raw]
    return [one for one in raw.split("\r") if one.strip()] or [""]

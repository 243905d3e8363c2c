"""Read the logs of one run: open, recognize the framework, assemble.

files --sniff--> console text | JSON lines | CSV | YAML | event files | ... --> rows of a reader
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Final

from areal_lab.foreign import mlflow, trackio
from areal_lab.foreign.config_values import settings_of
from areal_lab.foreign.documents import (
    ARRAY_ANCHORS,
    CSV_ANCHORS,
    JSON_ANCHORS,
    STATE_ANCHORS,
    STEP_KEYS,
    YAML_ANCHORS,
    CsvTable,
    JsonArray,
    JsonLines,
    TrainerState,
    YamlConfig,
)
from areal_lab.foreign.protobuf import (
    SWANLAB_MAGIC,
    WANDB_MAGIC,
    event_file_starts,
    read_events,
    read_swanlab,
    read_wandb,
)
from areal_lab.foreign.quantities import whole
from areal_lab.foreign.readers import READERS, Reader, named
from areal_lab.foreign.record import ImportedRun
from areal_lab.foreign.rollouts import (
    from_samples,
    number_in_name,
    read_parquet,
    read_pickle,
)
from areal_lab.foreign.scan import Feed, Row, Rows, scan
from areal_lab.foreign.text import CHUNK_BYTES, SAMPLE_BYTES, chunks, unwrapped, wrap_width


def read_run(
    paths: Sequence[Path],
    *,
    framework: str = "",
    stdin: IO[bytes] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> ImportedRun:
    """Read logs of one run.

    Args:
        paths: files of the run; `-` is `stdin`.
        framework: name of a reader; empty recognizes it.
        progress: gets the bytes that are done of the current file.

    Raises:
        ValueError: two readers match, or `framework` is unknown.
        OSError: a file cannot be read.
    """
    readers = [named(framework)] if framework else list(READERS)
    feeds = [Feed(one.name, one.anchors, one.extractor(), back=one.back) for one in readers]
    tables = Rows()
    shapes = [
        Feed("JSON lines", JSON_ANCHORS, JsonLines(), tables),
        Feed("trainer state", STATE_ANCHORS, TrainerState(), tables),
        Feed("CSV", CSV_ANCHORS, CsvTable(), tables, head=True),
        Feed("JSON array", ARRAY_ANCHORS, JsonArray(), tables, head=True),
        Feed("YAML", YAML_ANCHORS, YamlConfig(), tables, head=True),
    ]
    for source, path in enumerate(paths):
        before = len(tables.rows)
        if path.is_dir():
            mlflow.read_folder(path, tables)
            _number_source(tables, before, source)
            continue
        head = _head(path)
        if (whole_file := _whole_reader(head)) is not None:
            if len(paths) > 1:
                raise ValueError(f"{path} has samples, which are read one file at a time")
            return whole_file(path)
        if not _read_binary(path, head, tables) and not _scan_text(
            _pieces(path, stdin), [*feeds, *shapes], source, progress
        ):
            return ImportedRun(framework=None, refused=f"{path} is a diff, and no log.")
        _number_source(tables, before, source)
    samples = [row for row in tables.rows if row.kind.endswith(" sample")]
    if samples and len(samples) == len(tables.rows):
        return from_samples(samples, [number_in_name(one) for one in paths])
    tables.rows = [row for row in tables.rows if not row.kind.endswith(" sample")]
    return _assembled(feeds, readers, tables, asked=bool(framework))


def _number_source(tables: Rows, before: int, source: int) -> None:
    for row in tables.rows[before:]:
        row.source = source


def _whole_reader(head: bytes) -> Callable[[Path], ImportedRun] | None:
    """Reader of a file of samples, by its first bytes."""
    if head.startswith((b"PK\x03\x04", *(bytes([0x80, one]) for one in range(2, 6)))):
        return read_pickle
    return read_parquet if head.startswith(b"PAR1") else None


def _head(path: Path) -> bytes:
    """First bytes of a file; none of standard input, which is text."""
    if str(path) == "-":
        return b""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} is not a file; name a log file, or - for standard input")
    with path.open("rb") as file:
        return file.read(256)


def _read_binary(path: Path, head: bytes, into: Rows) -> bool:
    """Read the file of a tracker; False if it is text."""
    if head.startswith(trackio.MAGIC):
        trackio.read_database(path, into)
    elif head.startswith(WANDB_MAGIC):
        with path.open("rb") as file:
            read_wandb(file, into)
    elif head.startswith(SWANLAB_MAGIC):
        with path.open("rb") as file:
            read_swanlab(file, into)
    elif event_file_starts(head):
        with path.open("rb") as file:
            read_events(file, into)
    else:
        return False
    return True


def _assembled(
    feeds: Sequence[Feed], readers: Sequence[Reader], tables: Rows, *, asked: bool
) -> ImportedRun:
    """Choose the reader with most records and let it make the steps."""
    reader, found = _chosen(feeds, readers, asked=asked)
    records = [row for row in tables.rows if row.kind != "config"]
    configs = [row for row in tables.rows if row.kind == "config"]
    if reader is None or not any(row.kind != "config" for row in found.rows):
        by_keys = _by_keys(records, readers, asked=asked)
        if by_keys is not None and reader is None:
            reader = by_keys
            found = next(one.into for one in feeds if one.name == reader.name)
    if reader is None:
        for one in feeds:
            tables.unread += one.into.unread
        return _without_steps(records, configs, tables)
    if tables.marks["runs in one table"]:
        return ImportedRun(
            framework=reader.name,
            unread=tables.unread,
            refused=f"The table has columns of {tables.marks['runs in one table']} runs; "
            "export one.",
        )
    if records and reader.keyed({key: 0 for row in records for key in row.values}):
        _adopt(records, reader, found)
        found.unread += tables.unread
        found.marks += tables.marks
    found.rows = [*configs, *found.rows]
    return reader.assemble(found)


def _chosen(
    feeds: Sequence[Feed], readers: Sequence[Reader], *, asked: bool
) -> tuple[Reader | None, Rows]:
    counts = sorted(
        (
            (sum(row.kind != "config" for row in feed.into.rows), place)
            for place, feed in enumerate(feeds)
            if feed.into.rows
        ),
        key=lambda one: -one[0],
    )
    if not counts:
        return (readers[0], feeds[0].into) if asked else (None, Rows())
    most, place = counts[0]
    rivals = [place for count, place in counts if 2 * count >= most and count > 0]
    if len(rivals) > 1:
        names = " and ".join(
            f"{readers[one].name} ({len(feeds[one].into.rows)} records)" for one in rivals
        )
        raise ValueError(f"the log matches {names}; choose with --framework NAME")
    return readers[place], feeds[place].into


def _by_keys(records: Sequence[Row], readers: Sequence[Reader], *, asked: bool) -> Reader | None:
    """Reader that knows most keys of records without a shape."""
    if asked:
        return readers[0]
    keys = {key: 0 for row in records for key in row.values}
    scores = sorted(((one.keyed(keys), place) for place, one in enumerate(readers)), reverse=True)
    if not scores or scores[0][0] < _LEAST_KEYS:
        return None
    best = [readers[place] for score, place in scores if score == scores[0][0]]
    if len(best) > 1:
        names = " and ".join(one.name for one in best)
        raise ValueError(
            f"the keys match {names} equally ({scores[0][0]} each); choose with --framework NAME"
        )
    return best[0]


_LEAST_KEYS: Final = 2
"""Known keys below which records belong to no framework."""


def _adopt(records: Sequence[Row], reader: Reader, found: Rows) -> None:
    """Give records without a shape to a reader: number and kind after its rules."""
    for row in records:
        for key in reader.step_keys:
            if (number := whole(row.values.get(key))) is not None:
                row.step = number
                break
        for key in (*STEP_KEYS, "_runtime"):
            row.values.pop(key, None)
        row.kind = reader.kind(row.values)
        found.add(row)


def _without_steps(records: Sequence[Row], configs: Sequence[Row], tables: Rows) -> ImportedRun:
    run = ImportedRun(framework=None, unread=tables.unread)
    for row in configs:
        run.settings |= settings_of(row.values)
    if run.settings:
        run.notes.append("The file has settings of a run, and no steps.")
    else:
        run.refused = _UNKNOWN
        if records:
            run.refused = "The keys of the records are not those of a known framework. " + _UNKNOWN
    return run


_UNKNOWN: Final = (
    "No line is a training step of a known framework. Known are "
    + ", ".join(one.name for one in READERS)
    + "."
)


def _scan_text(
    pieces: Iterable[bytes], feeds: Sequence[Feed], source: int, progress: Callable[[int], None]
) -> bool:
    """Feed a text to the readers; False if it is a diff, which has two versions of its lines."""
    text = chunks(pieces)
    first = next(text, b"")
    if _DIFF.match(first) is not None:
        return False
    width = wrap_width(first[:SAMPLE_BYTES])
    whole: Iterable[bytes] = chain([first], text)
    if width is not None:
        whole = unwrapped(whole, width)
    scan(_after_head(whole), feeds, source=source, progress=progress)
    return True


_DIFF: Final = re.compile(rb"\s*(?:diff --git |Index: \S+\n=|--- \S[^\n]*\n\+\+\+ \S)")


HEAD_BYTES: Final = 64 * 1024
"""Bytes in which a table or a configuration that fills its file begins."""


def _after_head(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Give the head of a file as a piece of its own, which all extractors look at."""
    for index, piece in enumerate(pieces):
        end = piece.rfind(b"\n", 0, HEAD_BYTES) + 1 if index == 0 else 0
        if 0 < end < len(piece):
            yield piece[:end]
            yield piece[end:]
        else:
            yield piece


def _pieces(path: Path, stdin: IO[bytes] | None) -> Iterator[bytes]:
    """Bytes of a file or of standard input."""
    if str(path) == "-":
        if stdin is None:
            raise ValueError("- reads standard input, which is not given")
        while piece := stdin.read(CHUNK_BYTES):
            yield piece
        return
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece

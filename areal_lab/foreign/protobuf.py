"""Binary files of trackers: TensorBoard's events, offline logs of wandb and SwanLab, no packages.

    TensorBoard   length, checksum, Event, checksum;  Event = wall time, step, values by tag
    wandb         LevelDB's log: blocks of 32 KiB with pieces of records;  Record = history | config
    SwanLab       the same log;  Record = scalar (key, step, time, value), and others

Protocol buffers are read by field number. A file that ends early gives the records before its end.
Sources: summary.proto and event.proto of tensorflow/core, wandb/proto/wandb_internal.proto, the
package swanlab 0.10.3 (`swanlab/proto`: `Record.scalar`, `ScalarRecord`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import IO, Any, Final

from areal_lab.foreign.documents import keyed_row
from areal_lab.foreign.literal import flat
from areal_lab.foreign.scan import Row, Rows
from areal_lab.host.foreign import parse_json

RECORD_BYTES: Final = 64 * 1024**2
_BLOCK: Final = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
WANDB_MAGIC: Final = b":W&B"
SWANLAB_MAGIC: Final = b":SWL"
_HISTORY, _CONFIG, _RUN = 2, 5, 17
"""Fields of wandb's `Record`."""
_SCALAR: Final = 13
"""Field of SwanLab's `Record`."""


def fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Fields of a message: number and value, which is an int or bytes.

    Raises:
        ValueError: the content is not a message.
    """
    at, end = 0, len(content)
    while at < end:
        key, at = _varint(content, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(content, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(content, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError("not a protocol buffer")
        if at + size > end:
            raise ValueError("a protocol buffer that is cut")
        yield key >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(content) or shift > 63:
            raise ValueError("a protocol buffer that is cut")
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def event_file_starts(head: bytes) -> bool:
    """True if a file begins like TensorBoard's, whose first event names a version."""
    return len(head) >= 24 and head[8 + 4 :].find(b"brain.Event:") in range(60)


def read_events(file: IO[bytes], into: Rows) -> None:
    """Add a row for each step of an event file; a later value of a tag replaces an earlier one."""
    steps: dict[int, dict[str, Any]] = {}
    times: dict[int, float] = {}
    while len(head := file.read(12)) == 12:
        (size,) = struct.unpack("<Q", head[:8])
        if size > RECORD_BYTES:
            into.unread["events that are damaged"] += 1
            break
        content = file.read(size + 4)
        if len(content) < size + 4:
            into.unread["events that are cut"] += 1
            break
        try:
            wall, step, values = _event(content[:size])
        except (ValueError, struct.error):
            into.unread["events that are damaged"] += 1
            continue
        if values:
            steps.setdefault(step, {}).update(values)
            times[step] = wall
    for step in sorted(steps):
        row = Row(kind="", step=step, values=steps[step], time_s=times[step])
        into.add(row)


def _event(content: bytes) -> tuple[float, int, dict[str, float]]:
    wall, step, values = 0.0, 0, dict[str, float]()
    for number, value in fields(content):
        if number == 1 and isinstance(value, bytes) and len(value) == 8:
            (wall,) = struct.unpack("<d", value)
        elif number == 2 and isinstance(value, int):
            step = value if value < 2**63 else value - 2**64
        elif number == 5 and isinstance(value, bytes):
            for inner, one in fields(value):
                if inner == 1 and isinstance(one, bytes):
                    tag, amount = _summary_value(one)
                    if amount is not None:
                        values[tag] = amount
    return wall, step, values


def _summary_value(content: bytes) -> tuple[str, float | None]:
    tag, amount = "", None
    for number, value in fields(content):
        if number == 1 and isinstance(value, bytes):
            tag = value[:300].decode("utf-8", "replace")
        elif number == 2 and isinstance(value, bytes) and len(value) == 4:
            amount = _shortest(value)
        elif number == 8 and isinstance(value, bytes):
            amount = _tensor(value)
    return tag, amount


def _tensor(content: bytes) -> float | None:
    """A tensor of one float."""
    kind = 0
    for number, value in fields(content):
        if number == 1:
            kind = value
        elif isinstance(value, bytes) and number in (4, 5) and len(value) == 4 and kind == 1:
            return _shortest(value)
        elif isinstance(value, bytes) and number in (4, 6) and len(value) == 8 and kind == 2:
            return float(struct.unpack("<d", value)[0])
    return None


def _shortest(content: bytes) -> float:
    """The shortest decimal number that is this 32-bit float: 0.1, not 0.10000000149."""
    (value,) = struct.unpack("<f", content)
    for digits in range(6, 9):
        text = f"{value:.{digits}g}"
        try:
            if struct.pack("<f", float(text)) == content:
                return float(text)
        except OverflowError:
            continue
    return float(value)


def read_wandb(file: IO[bytes], into: Rows) -> None:
    """Add rows of history and the configuration of wandb's offline log."""
    for content in _log_records(file, into):
        try:
            for number, value in fields(content):
                if number == _HISTORY and isinstance(value, bytes):
                    _add_history(value, into)
                elif number == _CONFIG and isinstance(value, bytes):
                    _add_config(value, into)
                elif number == _RUN and isinstance(value, bytes):
                    for inner, one in fields(value):
                        if inner == 4 and isinstance(one, bytes):
                            _add_config(one, into)
        except ValueError:
            into.unread["records that are damaged"] += 1


def read_swanlab(file: IO[bytes], into: Rows) -> None:
    """Add a row for each step of SwanLab's log; its settings are in `files/config.yaml` beside it.

    A later value of a key replaces an earlier one of the same step.
    """
    steps: dict[int, dict[str, Any]] = {}
    times: dict[int, float] = {}
    for content in _log_records(file, into):
        try:
            scalars = [value for number, value in fields(content) if number == _SCALAR]
            for scalar in scalars:
                key, step, time_s, amount = _scalar(scalar)
                if key and amount is not None:
                    steps.setdefault(step, {})[key] = amount
                    times[step] = time_s
        except (ValueError, TypeError, struct.error):
            into.unread["records that are damaged"] += 1
    for step in sorted(steps):
        into.add(Row(kind="", step=step, values=steps[step], time_s=times[step] or None))


def _scalar(content: bytes) -> tuple[str, int, float, float | None]:
    """Key, step, time in seconds and value of a `ScalarRecord`."""
    key, step, time_s, amount = "", 0, 0.0, None
    for number, value in fields(content):
        if number == 1 and isinstance(value, bytes):
            key = value[:300].decode("utf-8", "replace")
        elif number == 2 and isinstance(value, int):
            step = value if value < 2**63 else value - 2**64
        elif number == 4 and isinstance(value, bytes):
            parts = dict(fields(value))
            time_s = float(parts.get(1, 0)) + 1e-9 * float(parts.get(2, 0))
        elif number == 5 and isinstance(value, bytes):
            amount = 0.0  # proto3 leaves out a number that is 0
            for inner, one in fields(value):
                if inner == 1 and isinstance(one, bytes) and len(one) == 8:
                    (amount,) = struct.unpack("<d", one)
    return key, step, time_s, amount


def _log_records(file: IO[bytes], into: Rows) -> Iterator[bytes]:
    """Records of LevelDB's log format, whose pieces never cross a block."""
    file.read(7)  # magic and version, which count as a part of the first block
    at, parts = 7, list[bytes]()
    while True:
        left = _BLOCK - at % _BLOCK
        if left < 7:
            file.read(left)
            at += left
            continue
        head = file.read(7)
        if len(head) < 7:
            break
        _, size, kind = struct.unpack("<IHB", head)
        content = file.read(size)
        at += 7 + size
        if len(content) < size or (kind == 0 and size == 0):
            into.unread["records that are cut"] += len(content) < size
            break
        if kind == _FULL:
            yield content
        elif kind in (_FIRST, _MIDDLE, _LAST):
            parts = [content] if kind == _FIRST else [*parts, content]
            if kind == _LAST:
                yield b"".join(parts)
                parts = []
            elif sum(map(len, parts)) > RECORD_BYTES:
                into.unread["records that are too long"] += 1
                parts = []
        else:
            into.unread["records that are damaged"] += 1
            break
    if parts:
        into.unread["records that are cut"] += 1


def _items(content: bytes, number: int) -> Iterator[tuple[str, Any]]:
    """Keys and values of a history or a configuration."""
    for field, item in fields(content):
        if field != number or not isinstance(item, bytes):
            continue
        names, text = [], b""
        for inner, value in fields(item):
            if inner in (1, 2) and isinstance(value, bytes) and value:
                names.append(value[:300].decode("utf-8", "replace"))
            elif inner == 16 and isinstance(value, bytes):
                text = value
        if names and text:
            try:
                yield "/".join(names), parse_json(_plain(text))
            except ValueError:
                continue


def _plain(text: bytes) -> bytes:
    return b"null" if text in (b"NaN", b"Infinity", b"-Infinity") else text


def _add_history(content: bytes, into: Rows) -> None:
    values = dict(_items(content, 1))
    for field, value in fields(content):
        if field == 2 and isinstance(value, bytes):
            values.setdefault("_step", next((one for key, one in fields(value) if key == 1), 0))
    row = keyed_row(flat(values), 0)
    if row is not None:
        into.add(row)


def _add_config(content: bytes, into: Rows) -> None:
    values = {key: one for key, one in _items(content, 1) if not key.startswith("_wandb")}
    if values:
        into.add(Row(kind="config", step=None, values=flat(values)))

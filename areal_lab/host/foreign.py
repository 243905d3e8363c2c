"""Files that may come from others: only regular files, only as much as fits in memory.

    read_bytes   a file, or its new part; a compressed one (.gz) unpacked
    parse_json   a JSON text, `read_json` a file
    parse_yaml   a YAML text
    Parsed       JSON values as records

Each raises a ValueError of one line that names the bound. A pipe instead of a file does not block,
a small file that unpacks to a large one does not fill the memory, and deep nesting, huge numbers or
aliases of aliases never reach callers.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import os
import re
import stat
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

FILE_BYTES: Final = 2 * 1024**3
"""Maximum bytes of a file of lines."""
UNPACKED_BYTES: Final = 256 * 1024**2
"""Maximum bytes of an unpacked file, and of one line of any file."""
SMALL_BYTES: Final = 16 * 1024**2
"""Maximum bytes of a file with one value, such as summary.json."""
DEPTH: Final = 64
"""Maximum nesting of lists and objects."""
_YAML_VALUES: Final = 100_000
"""Maximum values of a YAML text, each alias counted with all values that it refers to."""
_LARGEST: Final = 2**64
"""Bound of the absolute value of whole numbers: seeds have up to 64 bits."""
_LONG_NUMBER: Final = re.compile(r"\d{19}")
_HALF_PAIR: Final = re.compile(
    r"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]"
)
_CHUNK_BYTES: Final = 8 * 1024**2

T = TypeVar("T")


def read_bytes(path: Path, *, start: int = 0, limit_bytes: int = SMALL_BYTES) -> bytes:
    """Read a file from position `start` on; a `.gz` file is unpacked.

    Args:
        start: in bytes; only of files that are not compressed.
        limit_bytes: of the content; a compressed one also has at most `UNPACKED_BYTES`.
    """
    # Not blocking: to open a pipe would wait until somebody writes into it.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    _check_regular(path, os.stat(path).st_mode)  # before, because to open some devices does harm
    with os.fdopen(os.open(path, flags), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        _check_regular(path, status.st_mode)
        if path.suffix == ".gz":
            return _unpacked(path, file, min(limit_bytes, UNPACKED_BYTES))
        if status.st_size < start:
            raise ValueError(
                f"{path} has {status.st_size} bytes, but {start} were read before: it was "
                "replaced; read the run again with read_run"
            )
        file.seek(start)
        content, in_line = bytearray(), 0
        while piece := file.read(_CHUNK_BYTES):
            content += piece
            end = piece.rfind(b"\n")
            in_line = in_line + len(piece) if end < 0 else len(piece) - end - 1
            if len(content) > limit_bytes:
                raise ValueError(
                    f"{path} has more than {limit_bytes:,} bytes, which is the most that is read"
                )
            if in_line > UNPACKED_BYTES:
                raise ValueError(
                    f"{path} has a line of more than {UNPACKED_BYTES:,} bytes, which is the most "
                    "that is read"
                )
        return bytes(content)


def read_text(path: Path, *, limit_bytes: int = SMALL_BYTES, encoding: str = "utf-8") -> str:
    """Read the text of a file; see `read_bytes`."""
    return read_bytes(path, limit_bytes=limit_bytes).decode(encoding)


def read_table_text(path: Path) -> str:
    """Read the text of a table (CSV), which may start with a mark of its encoding."""
    try:
        return read_text(path, limit_bytes=UNPACKED_BYTES, encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def table_cells(lines: Iterable[str], path: Path) -> list[list[str]]:
    """Parse lines of a table (CSV) into cells."""
    try:
        return list(csv.reader(lines))
    except csv.Error as error:
        raise unreadable(path, error) from error


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text with at most `DEPTH` levels and whole numbers of 64 bits.

    Half of a surrogate pair, which UTF-8 cannot encode, becomes a question mark.
    """
    if isinstance(text, bytes):
        text = text.decode()
    try:
        value = json.loads(text, parse_int=_whole_number if _LONG_NUMBER.search(text) else None)
    except RecursionError:
        raise _too_deep() from None
    if text.count("[") + text.count("{") > DEPTH:
        _check_depth(value)
    if _HALF_PAIR.search(text):
        value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    return value


def read_json(path: Path, *, limit_bytes: int = SMALL_BYTES) -> Any:
    """Read the value of a JSON file."""
    try:
        return parse_json(read_text(path, limit_bytes=limit_bytes))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def parse_yaml(text: str) -> Any:
    """Parse a YAML text without objects; see `check_yaml`."""
    yaml: Any = importlib.import_module("yaml")  # by name, because it has no types
    try:
        check_yaml(text)
        return yaml.load(text, _yaml_loader(yaml))
    except Exception as error:  # its constructors raise many types, such as AttributeError
        raise ValueError(f"it is not YAML: {_first_line(error)}") from error


def check_yaml(text: str) -> None:
    """Raise unless any reader may read a YAML text: it is small, also with its aliases resolved."""
    yaml: Any = importlib.import_module("yaml")
    level = 0
    # First the events: the parser in C makes nodes by recursion, and many levels end the process.
    for event in yaml.parse(text, _yaml_loader(yaml)):
        level += isinstance(event, yaml.CollectionStartEvent)
        level -= isinstance(event, yaml.CollectionEndEvent)
        if level > DEPTH:
            raise _too_deep()
    if (node := yaml.compose(text, _yaml_loader(yaml))) is not None:
        _check_nodes(node)


class Parsed(Generic[T]):
    """Parser of JSON values into records: dataclasses, typed dictionaries, and their parts."""

    def __init__(self, kind: Any) -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(kind)

    def __call__(self, value: Any) -> T:
        """Return the record of a value from `parse_json`."""
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            reason = _first_line(first["msg"]).removeprefix("Value error, ")
            where = ".".join(map(str, first["loc"]))
            if first["type"] == "missing":
                reason = f"it has no {where!r}"
            elif first["type"] != "value_error":
                reason = f"{where or 'the value'} is {_shown(first['input'])}: {reason}"
            raise ValueError(reason) from error


def unreadable(path: Path, error: Exception) -> ValueError:
    """Return the error of a file, in one line that names it."""
    reason = _first_line(error.strerror if isinstance(error, OSError) and error.strerror else error)
    return ValueError(reason if str(path) in reason else f"{path} cannot be read: {reason}")


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        kind = kinds.get(stat.S_IFMT(mode), "a device")
        raise ValueError(f"{path} is {kind}, but must be a file")


def _unpacked(path: Path, file: Any, limit_bytes: int) -> bytes:
    content = bytearray()
    try:
        with gzip.GzipFile(fileobj=file) as opened:
            while piece := opened.read(_CHUNK_BYTES):
                content += piece
                if len(content) > limit_bytes:
                    raise ValueError(
                        f"{path} unpacks to more than {limit_bytes:,} bytes, which is the most "
                        "that is read of a compressed file; if you trust it, unpack it with gunzip"
                    )
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not a complete gzip file: {_first_line(error)}") from error
    return bytes(content)


def _whole_number(text: str) -> int:
    if len(text) > 21 or not -_LARGEST < (number := int(text)) < _LARGEST:
        raise ValueError(f"the number {text[:24]}... has more than 64 bits")
    return number


def _yaml_loader(yaml: Any) -> Any:
    """Loader of values without objects; the one in C is ten times as fast, and not everywhere."""
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, list | dict)
            for inner in (one if isinstance(one, list) else one.values())
            if isinstance(inner, list | dict)
        ]
        if not level:
            return
    raise _too_deep()


def _check_nodes(root: Any) -> None:
    """Count values below a YAML node, including those of an alias at each of its places."""
    sizes: dict[int, int] = {}
    inside: set[int] = set()

    def size(node: Any, depth: int) -> int:
        if not isinstance(node.value, list):
            return 1
        if id(node) in inside or depth > DEPTH:
            raise _too_deep()
        if id(node) not in sizes:
            inside.add(id(node))
            children = [
                one for item in node.value for one in (item if isinstance(item, tuple) else (item,))
            ]
            sizes[id(node)] = 1 + sum(size(one, depth + 1) for one in children)
            inside.remove(id(node))
        if sizes[id(node)] > _YAML_VALUES:
            raise ValueError(
                f"it has more than {_YAML_VALUES:,} values, with each alias counted as what it "
                "stands for"
            )
        return sizes[id(node)]

    size(root, 0)


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {DEPTH} levels deep")


def _first_line(what: object) -> str:
    return str(what).strip().split("\n", 1)[0][:500]


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    return repr(value[:60] if isinstance(value, str) else value)

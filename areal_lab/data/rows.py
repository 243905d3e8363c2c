"""Rows of data sets, from files and from objects of a program, with unchanged values.

JSON lines, a JSON list, CSV, TSV      read here: errors name the line, and importing `datasets`
                                       takes 2 s and 140 MB
Parquet, Arrow                         `pyarrow`
folders of `save_to_disk`              `datasets`
lists, frames, tables, `datasets`      in memory

Text is never interpreted: a CSV has only text, so `007`, `1e5`, `N/A` and `True` stay unchanged. A
number counts as text where its text is unambiguous; any other value that would change (NaN,
decimals, dates, bytes, `0.10` in JSON) is refused by `text_of` with file, row and field.
"""

from __future__ import annotations

import bz2
import csv
import glob
import gzip
import io
import json
import lzma
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias

from areal_lab.host.durable import expanded

Row: TypeAlias = tuple[str, Mapping[str, Any]]
"""Location for errors, such as `train.jsonl, line 12`, and the fields by name."""

_JSON: Final = frozenset({".jsonl", ".json", ".ndjson", ""})
_TABLES: Final = frozenset({".parquet", ".arrow", ".feather"})
_SEPARATED: Final = {".csv": ",", ".tsv": "\t"}
_PACKED: Final = (".gz", ".bz2", ".xz", ".zst")
_KNOWN: Final = _JSON | _TABLES | _SEPARATED.keys()
_ABOUT: Final = frozenset({"dataset_info.json", "dataset_infos.json"})
"""Files in a data set of the Hub without rows."""
_WRAPPERS: Final = ("data", "rows", "examples", "instances")
"""Fields in which a JSON file may have its list of rows."""
_SHOWN_CHARACTERS: Final = 60
_MOST_BYTES: Final = 2**30
"""Longest line, and largest JSON file with a single list: both are read into memory as a whole."""
_SHARD: Final = re.compile(r"([-_.]?\d+(-of-\d+)?)+$")
_MAGIC: Final = 6
_LFS: Final = b"version https://git-lfs"
_CONTENT_ERRORS: Final = (OSError, EOFError, zlib.error, lzma.LZMAError)


class Written(float):
    """A number whose text differs from that of the float, such as `0.10`; otherwise a float."""

    def __new__(cls, value: float, text: str) -> Written:
        """Keep the text with the value."""
        made = super().__new__(cls, value)
        made.text = text
        return made

    text: str

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """Pickle as the float."""
        return float, (float(self),)


# --- fields --------------------------------------------------------------------------------------


def text_of(row: Mapping[str, Any], where: str, field: str) -> str:
    """Text of a field, or its number as text."""
    value = value_of(row, where, field)
    if isinstance(value, str):
        if (bad := _not_unicode(value)) is not None:
            raise ValueError(f"{where} has half of a surrogate pair ({bad!r}) in {field!r}")
        return value
    if isinstance(value, Written):
        raise ValueError(
            f"{where} has the number {value.text} in {field!r}, which as text is "
            f"{float.__repr__(value)}; write it as text ({json.dumps(value.text)})"
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"{where} has {type(value).__name__} in {field!r}, but must have text or a number; "
            "write it as text"
        )
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} has {value} in {field!r}, but must have text or a number")
        return float.__repr__(value)
    try:
        return int.__repr__(value)
    except ValueError as error:  # Python's limit for digits
        raise ValueError(f"{where} has a number of too many digits in {field!r}") from error


def value_of(row: Mapping[str, Any], where: str, field: str) -> Any:
    """Value of a field; dots lead into objects and, with numbers, into lists, unless a field has
    exactly this name.
    """
    if field in row:
        return row[field]
    value: Any = row
    for name in field.split("."):
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
            continue
        if not isinstance(value, Mapping) or name not in value:
            named = ", ".join(map(repr, _names(row)))
            raise ValueError(f"{where} has no field {field!r}; it has {named}")
        value = value[name]
    return value


def has_field(row: Mapping[str, Any], field: str) -> bool:
    """Return whether a row has a field; a name with dots leads into objects."""
    try:
        value_of(row, "", field)
    except ValueError:
        return False
    return True


def messages_of(row: Mapping[str, Any], where: str, field: str) -> tuple[tuple[str, str], ...]:
    """Messages of a field: role and content of each.

    A content may be a list of parts, as in OpenAI's requests; an image in it becomes its mark.
    """
    given = value_of(row, where, field)
    if not isinstance(given, list | tuple) or not given:
        raise ValueError(f"{where} has {given!r:.60} in {field!r}, but needs a list of messages")
    return tuple(_message(one, where, field) for one in given)


def _message(one: object, where: str, field: str) -> tuple[str, str]:
    if isinstance(one, Mapping):
        for name in ("tool_calls", "function_call", "reasoning_content", "thinking"):
            if one.get(name):
                raise ValueError(
                    f"{where} has a message with {name!r} in {field!r}, which only text can hold "
                    "here; write it into the content as the model's chat template does"
                )
        role, content = one.get("role"), one.get("content")
        if isinstance(content, list):
            content = _joined(content)
        if isinstance(role, str) and isinstance(content, str) and _not_unicode(content) is None:
            return role, content
    raise ValueError(
        f"{where} has {one!r:.60} in {field!r}, but each message needs a role and a content, both "
        "text"
    )


def _joined(parts: list[Any]) -> str | None:
    """Text of the parts of a content, with `<image>` for images; None if there are other parts."""
    texts: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if kind == "text" else "<image>" if kind == "image" else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


def _names(row: Mapping[str, Any]) -> list[str]:
    """Names of the fields, those of objects with dots."""
    found: list[str] = []
    for name, value in row.items():
        inside = [f"{name}.{key}" for key in value] if isinstance(value, Mapping) else []
        found += [str(one) for one in inside or [name]]
    return found


def _not_unicode(text: str) -> str | None:
    """First half of a surrogate pair in a text, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


# --- objects of a program ------------------------------------------------------------------------


def object_rows(
    data: object, name: str, kept: type | tuple[type, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Rows of an object: a list, an iterable, columns, a frame, a table, a data set, or a path.

    Each row is a mapping, or a row of a frame or a table.
    """
    if isinstance(data, str | PathLike):
        yield from read_rows(Path(data))
        return
    for number, row in enumerate(_rows_of(data, name), start=1):
        where = f"{name}, row {number}"
        if isinstance(row, kept):
            yield where, row
            continue
        if not isinstance(row, Mapping):
            raise ValueError(
                f"{where} is {type(row).__name__} ({_one_line(row)}), but must have fields, such "
                'as {"question": "2 + 3 =", "answer": "5"}'
            )
        yield where, _plain(row)


def _rows_of(  # noqa: PLR0911 - a line for each library
    data: Any, name: str
) -> Iterable[object]:
    if hasattr(data, "with_format") and hasattr(data, "column_names"):  # of `datasets`
        return _of_datasets(data)
    if hasattr(data, "to_pylist") and hasattr(data, "schema"):  # of pyarrow
        return _of_arrow(data)
    if hasattr(data, "to_dicts") and hasattr(data, "columns"):  # of polars
        return _printed(data.to_dicts(), data.schema)
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # of pandas
        _check_names([*data.columns], name)
        return _printed(data.to_dict("records"), data.dtypes)
    if isinstance(data, Mapping):
        columns = [list(c) if hasattr(c, "dtype") else c for c in data.values()]
        if not columns or not all(isinstance(column, list | tuple) for column in columns):
            raise ValueError(
                f"{name} is one mapping ({_one_line([*data])}), but must be a list of them, or "
                "have a list for each field"
            )
        if len({len(column) for column in columns}) > 1:
            raise ValueError(f"{name} has lists of different lengths: its fields must have equal")
        return (dict(zip(data, row, strict=True)) for row in zip(*columns, strict=True))
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not hasattr(data, "__iter__"):
        return map(data.__getitem__, range(len(data)))  # of torch
    if isinstance(data, Iterable) and not isinstance(data, bytes):
        return data
    raise ValueError(
        f"{name} is {type(data).__name__}, but must be a list of rows, such as "
        '[{"question": "2 + 3 =", "answer": "5"}, ...], a table, or the path of a file'
    )


def _check_names(names: Sequence[object], where: str) -> None:
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ValueError(f"{where} has the field {twice[0]!r} twice")


def _one_line(value: object) -> str:
    return _shown(" ".join(repr(value).split()).encode())


def _plain(value: Any) -> Any:
    """Value without numpy's scalars and object arrays, which frames contain."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if type(value).__module__ != "numpy":
        return value
    if getattr(value, "ndim", 0):
        return [_plain(one) for one in value] if value.dtype == object else value
    number = value.item()
    if isinstance(number, float) and str(value) != repr(number):  # float32, float16
        return Written(number, str(value))
    return number


def _printed(rows: Iterable[dict[Any, Any]], kinds: Any) -> Iterator[object]:
    """Rows of a frame; numbers of 32 or 16 bits keep their printed form."""
    import numpy

    widths: dict[str, Any] = {
        "float32": numpy.float32, "float16": numpy.float16,
        "float": numpy.float32, "halffloat": numpy.float16,  # Arrow's names
    }  # fmt: skip
    forms = {
        name: widths[text]
        for name, kind in kinds.items()
        if (text := str(kind).lower().removesuffix("[pyarrow]")) in widths
    }
    for row in rows:
        yield row | {
            name: _plain(form(row[name]))
            for name, form in forms.items()
            if isinstance(row[name], float)
        }


def _of_datasets(data: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(data, dict):
        raise ValueError(f"the data set holds several splits ({', '.join(data)}); give one of them")
    if not hasattr(data, "num_rows") and data.features is None:  # a stream of rows
        yield from data
        return
    for table in data.with_format("arrow").iter(batch_size=1000):
        yield from _of_arrow(table)


def _of_arrow(table: Any) -> Iterator[Mapping[str, Any]]:
    """Rows of a table or a batch; numbers of 32 or 16 bits keep their printed form.

    Arrow's JSON is read as values: `datasets` 4.7 and newer use it for objects whose fields differ
    from row to row.
    """
    table.validate(full=True)  # a damaged file would crash the process: Arrow trusts its offsets
    _check_names(table.schema.names, "the table")
    converts = {
        field.name: convert
        for field in table.schema
        if (convert := _narrow(field.type)) is not None
    }
    for row in table.to_pylist():
        for name, convert in converts.items():
            row[name] = convert(row[name])
        yield row


def _narrow(kind: Any) -> Callable[[Any], Any] | None:
    """Conversion of an Arrow type that keeps the printed form of floats, and reads JSON.

    None if none is needed.
    """
    import numpy
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda text: (
            None if text is None else _parsed("its JSON", f'{{"value": {text}}}')["value"]
        )
    if types.is_float32(kind) or types.is_float16(kind):
        form: Any = numpy.float32 if types.is_float32(kind) else numpy.float16
        return lambda value: None if value is None else _plain(form(value))
    if types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        inner = {one.name: act for one in fields if (act := _narrow(one.type)) is not None}
        if inner:
            return lambda value: (
                value
                and {name: inner.get(name, lambda one: one)(one) for name, one in value.items()}
            )
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        act = _narrow(kind.value_type)
        if act is not None:
            return lambda value: value and [act(one) for one in value]
    return None


# --- files ---------------------------------------------------------------------------------------


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a file, of a folder of shards, or of all files that a pattern (`*`) names.

    The content determines the type of a file, then its extension.
    """
    file = path
    try:
        for file in _files(expanded(path, "the file")):
            yield from _saved_to_disk(file) if file.is_dir() else _of_file(file)
    except _CONTENT_ERRORS as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ValueError(f"{file} cannot be read: {reason}") from error


def _files(path: Path) -> list[Path]:
    """Files of a path, in order; or one folder of `save_to_disk`."""
    if not path.exists():
        found = sorted(map(Path, glob.glob(str(path))))
        if not found:
            raise ValueError(f"{path} does not exist (paths are relative to {Path.cwd()})")
        return found
    if not path.is_dir() or (path / "state.json").exists():
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = sorted(one.name for one in path.iterdir() if one.is_dir())
        raise ValueError(
            f"{path} holds several splits ({', '.join(splits)}); name the folder of one of them"
        )
    known = sorted(
        one
        for one in path.iterdir()
        if (_suffix(one) or one.name) in _KNOWN and one.name not in _ABOUT and one.is_file()
    )
    kinds = {(_SHARD.sub("", one.name.split(".")[0]), _suffix(one)) for one in known}
    if not known:
        inside = sorted(one.name for one in path.iterdir())[:5]
        raise ValueError(
            f"{path} is a folder without files of rows (it has {', '.join(inside) or 'nothing'}); "
            "name a file, or a folder of save_to_disk or of shards"
        )
    if len(kinds) > 1:
        names = ", ".join(one.name for one in known[:4])
        raise ValueError(
            f"{path} has files of several kinds ({names}), which may be several splits; name one, "
            f"or a pattern, such as {path}/train*{_suffix(known[0])}"
        )
    return known


def _suffix(path: Path) -> str:
    """Extension; that before `.gz` and the like for a compressed file."""
    return Path(path.stem).suffix if path.suffix in _PACKED else path.suffix


def _of_file(path: Path) -> Iterator[Row]:
    with path.open("rb") as raw:
        magic = raw.read(_MAGIC)
        raw.seek(0)
        file = _unpacked(path, raw, magic)
        begin = file.peek(64) if magic else b""
        suffix = _suffix(path).lower()
        # A stream of Arrow begins with four bytes of ones, or with the length of its schema.
        is_table = begin.startswith((b"PAR1", b"ARROW1", b"FEA1", b"\xff\xff\xff\xff"))
        text = begin.removeprefix(b"\xef\xbb\xbf").lstrip()
        if is_table or (suffix in _TABLES and not text.startswith((b"{", b"[", _LFS))):
            yield from _table(path, begin, packed=file is not raw)
        elif begin.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise ValueError(f"{path} is UTF-16, but must be UTF-8; convert it: iconv -f UTF-16")
        elif begin.startswith(b"PK\x03\x04"):
            raise ValueError(f"{path} is a zip archive (or a workbook); unpack or export it")
        elif begin.startswith(_LFS):
            raise ValueError(f"{path} is a pointer of Git LFS without the content; git lfs pull")
        elif suffix in _JSON or text.startswith((b"{", b"[")):
            yield from _json(path, file)
        elif suffix in _SEPARATED:
            yield from _separated(path, file, _SEPARATED[suffix])
        else:
            known = ", ".join(sorted(_KNOWN - {""}))
            raise ValueError(f"{path} has an unknown extension; known are {known}")


def _unpacked(path: Path, raw: BinaryIO, magic: bytes) -> io.BufferedReader:
    """Content of a file, decompressed."""
    opened: Any = raw
    if magic.startswith(b"\x1f\x8b"):
        opened = gzip.GzipFile(fileobj=raw)
    elif magic.startswith(b"BZh"):
        opened = bz2.BZ2File(raw)
    elif magic == b"\xfd7zXZ\x00":
        opened = lzma.LZMAFile(raw)  # noqa: SIM115 - the caller closes the file below it
    elif magic.startswith(b"\x28\xb5\x2f\xfd"):
        import pyarrow  # Python's library reads it from 3.14 on

        opened = pyarrow.input_stream(str(path), compression="zstd")
    return opened if isinstance(opened, io.BufferedReader) else io.BufferedReader(opened)


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers, without a byte order mark."""
    number = 0
    while line := file.readline(_MOST_BYTES + 1):
        number += 1
        if len(line) > _MOST_BYTES:
            raise ValueError(f"{path}, line {number} has more than {_MOST_BYTES >> 30} GiB")
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if line.strip():
            yield number, line


def _json(path: Path, file: BinaryIO) -> Iterator[Row]:
    """Rows of JSON lines, of one list, or of multi-line objects."""
    lines = _lines(path, file)
    head = [line for _, line in zip(range(2), lines, strict=False)]
    if not head:
        return
    try:
        first = _DECODER.decode(_decoded(*head[0], path))
    except (ValueError, RecursionError):
        first = None
    if isinstance(first, dict) and (len(head) > 1 or _wrapped(first) is None):
        for number, line in chain(head, lines):
            where = f"{path}, line {number}"
            row = _parsed(where, _decoded(number, line, path))
            if not isinstance(row, dict):
                raise ValueError(f"{where} is not a JSON object: {_shown(line)}")
            yield where, row
        return
    # Line numbers are those of the file: its blank lines count.
    texts, before, total = list[str](), 0, 0
    for number, line in chain(head, lines):
        texts.append("\n" * (number - before - 1) + _decoded(number, line, path))
        before, total = number, total + len(line)
        if total > _MOST_BYTES:
            raise ValueError(f"{path} is larger than {_MOST_BYTES >> 30} GiB; write JSON lines")
    yield from _documents(path, "".join(texts))


def _documents(path: Path, text: str) -> Iterator[Row]:
    """Rows of consecutive JSON values, each an object or a list of objects."""
    at = _SPACE.match(text, 0).end()  # type: ignore[union-attr]  # it matches nothing, too
    while at < len(text):
        where = f"{path}, line {1 + text.count(chr(10), 0, at)}"
        value, end = _parsed_at(path, text, at)
        rows = _wrapped(value) if isinstance(value, dict) else value
        if isinstance(value, dict) and rows is None:
            yield where, value
        elif not isinstance(rows, list) or not any(isinstance(row, dict) for row in rows):
            raise ValueError(f"{where} is not a JSON object: {_shown(text[at:end].encode())}")
        else:
            for number, row in enumerate(rows, start=1):
                if not isinstance(row, dict):
                    raise ValueError(
                        f"{path}, row {number} is not a JSON object: {_shown(repr(row).encode())}"
                    )
                yield f"{path}, row {number}", row
        at = _SPACE.match(text, end).end()  # type: ignore[union-attr]  # it matches nothing, too


def _wrapped(value: dict[str, Any]) -> list[Any] | None:
    """The list of rows in an object without other usable fields."""
    for name in _WRAPPERS:
        rows = value.get(name)
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            return rows
    # Columns, such as `{"question": ["1+1=", ...]}`, or of pandas: `{"question": {"0": "1+1=",
    # ...}}`.
    kinds = {type(column) for column in value.values()}
    if kinds not in ({list}, {dict}) or len({*map(len, value.values())}) != 1:
        return None
    columns = value if kinds == {list} else {name: [*one.values()] for name, one in value.items()}
    if kinds == {dict} and any([*one] != [*map(str, range(len(one)))] for one in value.values()):
        return None
    if any(isinstance(one, dict | list) for column in columns.values() for one in column):
        return None  # fields of one row: messages
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _decoded(number: int, line: bytes, path: Path) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number} is not UTF-8 at byte {error.start + 1}") from error


def _parsed(where: str, text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except _Refused as error:
        raise ValueError(f"{where} {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is not JSON: {error.msg} at column {error.colno}: {_shown(text.encode())}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{where} has JSON that is nested too deeply") from error


def _parsed_at(path: Path, text: str, at: int) -> tuple[Any, int]:
    where = f"{path}, line {1 + text.count(chr(10), 0, at)}"
    try:
        found: tuple[Any, int] = _DECODER.raw_decode(text, at)
        return found
    except _Refused as error:
        raise ValueError(f"{where} {error}") from error
    except json.JSONDecodeError as error:
        line = text[error.pos - error.colno + 1 :].split("\n", 1)[0]
        raise ValueError(
            f"{path}, line {error.lineno} is not JSON: {error.msg} at column {error.colno}: "
            f"{_shown(line.encode())}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{where} has JSON that is nested too deeply") from error


class _Refused(ValueError):
    """A JSON value that cannot be represented; the message follows the name of the place."""


class _NoNumber(NamedTuple):
    """Placeholder for an invalid number, until its field is known."""

    text: str


def _float(text: str) -> object:
    value = float(text)
    if math.isinf(value):
        return _NoNumber(text)
    return value if repr(value) == text else Written(value, text)


def _int(text: str) -> object:
    if len(text) > sys.int_info.default_max_str_digits:
        return _NoNumber(text)
    return Written(-0.0, text) if text == "-0" else int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise _Refused(f"has the field {name!r} twice")
        if (bad := _no_number(value)) is not None:
            raise _Refused(
                f"has {_shown(bad.encode())} in {name!r}, which is not a number of JSON that can "
                "be kept; write it as text, or null"
            )
        made[name] = value
    return made


def _no_number(value: object) -> str | None:
    if isinstance(value, list):
        return next((bad for one in value if (bad := _no_number(one)) is not None), None)
    return value.text if isinstance(value, _NoNumber) else None


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_float, parse_int=_int, parse_constant=_NoNumber
)
_SPACE: Final = re.compile(r"[ \t\n\r]*")


def _separated(path: Path, file: io.BufferedReader, delimiter: str) -> Iterator[Row]:
    """Rows of CSV or TSV, all text; the first one has the names of the fields."""
    csv.field_size_limit(2**31 - 1)
    names: list[str] = []
    line = 0
    try:
        with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text, delimiter=delimiter, strict=True)
            for values in reader:
                where, line = f"{path}, line {line + 1}", reader.line_num
                if not values:
                    continue
                if not names:
                    names = values
                    other = next(
                        (one for one in ";\t|," if one in names[0] and one != delimiter), ""
                    )
                    if len(names) == 1 and other:
                        raise ValueError(
                            f"{where} has one field, {names[0]!r}, but fields are separated by "
                            f"{delimiter!r} here; convert the file, or name it .tsv if it has tabs"
                        )
                    _check_names(names, where)
                    continue
                if len(values) != len(names):
                    raise ValueError(
                        f"{where} has {len(values)} values, but there are {len(names)} fields "
                        f"({', '.join(map(repr, names))}); put quotes around values with "
                        f"{delimiter!r} or line breaks"
                    )
                yield where, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}, line {line + 1} is not CSV: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 behind line {line}") from error


def _table(path: Path, begin: bytes, *, packed: bool) -> Iterator[Row]:
    """Rows of Parquet or Arrow."""
    import pyarrow
    from pyarrow import ipc, parquet

    if packed:
        raise ValueError(f"{path} is a packed table; unpack it")
    number = 0
    try:
        with pyarrow.OSFile(str(path)) as file:
            if begin.startswith(b"PAR1"):
                batches: Any = parquet.ParquetFile(file).iter_batches()
            elif begin.startswith(b"ARROW1"):
                reader = ipc.open_file(file)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                batches = ipc.open_stream(file)
            for batch in batches:
                for row in _of_arrow(batch):
                    number += 1
                    yield f"{path}, row {number}", row
    except Exception as error:  # pyarrow raises errors of many types
        reason = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]
        kind = _suffix(path).removeprefix(".") or "table"
        raise ValueError(f"{path} cannot be read as {kind}: {reason}") from error


def _saved_to_disk(folder: Path) -> Iterator[Row]:
    import datasets

    try:
        data = datasets.load_from_disk(str(folder))
        for number, row in enumerate(_of_datasets(data), start=1):
            yield f"{folder}, row {number}", row
    except Exception as error:  # each format's reader raises different errors
        reason = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]
        raise ValueError(f"datasets cannot read {folder}: {reason}") from error


def _shown(line: bytes) -> str:
    text = line[: 4 * _SHOWN_CHARACTERS].decode(errors="replace").strip()
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."

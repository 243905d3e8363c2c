"""Read the files of a model folder: JSON objects and safetensors headers.

A folder may be damaged or untrusted. Each reader is bounded in bytes, needs no torch, reads no
tensor, and raises one line that names the file, its size and the problem.

8 bytes     length of the header, little endian
header      {name: {dtype, shape, data_offsets: [begin, end]}}, JSON
data        the tensors, without gaps
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

_MOST_JSON_BYTES: Final = 16 << 20  # the largest known config.json has 3 MB
MOST_INDEX_BYTES: Final = 128 << 20
"""Maximum size of an index of weights: about 100 bytes a tensor."""
_MOST_HEADER_BYTES: Final = 32 << 20  # 300,000 tensors; as objects they take ten times as much
_LENGTH_BYTES: Final = 8
_BITS: Final = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits per number; other types have an unknown size."""
_SNIFFED_BYTES: Final = 512


class StoredTensor(BaseModel):
    """A tensor in a safetensors header."""

    model_config = ConfigDict(strict=True, frozen=True)

    dtype: str
    shape: list[Annotated[int, Field(ge=0)]]
    data_offsets: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]

    @property
    def numbers(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


_HEADER: Final = TypeAdapter(dict[str, StoredTensor])


def read_object(path: Path, most_bytes: int = _MOST_JSON_BYTES) -> dict[str, Any]:
    """Parse the object in a JSON file."""
    content = _content(path, most_bytes)
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError(f"{path} cannot be read: its JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {_why(content, error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, but must hold an object")
    return value


def check_json_ends(path: Path) -> None:
    """Reject a large JSON file that is not an object or is cut off, by its first and last bytes."""
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            start = file.read(_SNIFFED_BYTES)
            file.seek(max(0, path.stat().st_size - _SNIFFED_BYTES))
            end = file.read()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if not start.lstrip().startswith(b"{") or not end.rstrip().endswith(b"}"):
        size = path.stat().st_size
        why = foreign(start) or f"it has {size:,} bytes and does not end with }}: it is cut off"
        raise ValueError(f"{path} cannot be read: {why}")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a safetensors file, which must be complete."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise ValueError("it is not a regular file")
        with path.open("rb") as file:
            start = file.read(_SNIFFED_BYTES)
            if why := foreign(start):
                raise ValueError(why)
            length = int.from_bytes(start[:_LENGTH_BYTES], "little")
            most = min(_MOST_HEADER_BYTES, size - _LENGTH_BYTES)
            if not 0 < length <= most:
                raise ValueError(
                    f"it has {size:,} bytes, but its first 8 say that a header of {length:,} bytes "
                    f"follows (at most {max(most, 0):,} can): it is cut off or of another kind"
                )
            file.seek(_LENGTH_BYTES)
            header = file.read(length)
        return _tensors(header, size - _LENGTH_BYTES - length)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def foreign(start: bytes) -> str:
    """Why a file with this beginning is neither JSON nor weights; empty if it may be either."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not text:
        return "it is empty" if not start else "it has only spaces"
    if text.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file itself; run git lfs pull in its folder"
    if text[:1] == b"<":
        return "it is an HTML or XML page, not the file itself; download it again"
    return ""


def listed(names: Iterable[str], most: int = 5) -> str:
    """The first names, and the number of further ones."""
    names = list(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(name[:120] for name in names[:most]) + more


def invalid(error: ValidationError) -> str:
    """First problem of a record, in one line."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(key)[:120] for key in first["loc"])
    given = repr(first["input"])
    given = given if len(given) <= 60 else f"{given[:60]}..."
    return f"{where} is {given}: {first['msg'][:1].lower()}{first['msg'][1:]}"


def _content(path: Path, most_bytes: int) -> bytes:
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise ValueError(f"{path} cannot be read: it is not a regular file")
        if size > most_bytes:
            raise ValueError(
                f"{path} has {size:,} bytes, but may have {most_bytes:,}; it is not such a file"
            )
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _why(content: bytes, error: ValueError) -> str:
    if why := foreign(content[:_SNIFFED_BYTES]):
        return why
    cut = "" if content.rstrip().endswith(b"}") else ", and it does not end with }: it is cut off"
    return f"it has {len(content):,} bytes, which are not JSON ({error}){cut}"


def _tensors(header: bytes, data_bytes: int) -> dict[str, StoredTensor]:
    """Tensors of a header, which must fill the data behind it."""
    try:
        value = json.loads(header, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("its header is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"its header is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"its header is a {type(value).__name__}, but must be an object")
    value.pop("__metadata__", None)
    try:
        tensors = _HEADER.validate_python(value)
    except ValidationError as error:
        raise ValueError(f"in its header {invalid(error)}") from None
    for name, tensor in tensors.items():
        begin, end = tensor.data_offsets
        bits = _BITS.get(tensor.dtype)
        if bits is not None and end - begin != -(-tensor.numbers * bits // 8):
            raise ValueError(
                f"{name[:120]} of type {tensor.dtype} and shape {tensor.shape} takes "
                f"{-(-tensor.numbers * bits // 8):,} bytes, but has those from {begin:,} to {end:,}"
            )
    ranges = sorted(tuple(tensor.data_offsets) for tensor in tensors.values())
    expected = ranges[-1][1] if ranges else 0
    if expected != data_bytes:
        raise ValueError(
            f"its tensors take {expected:,} bytes, but {data_bytes:,} bytes follow the header"
            + (": it is cut off; copy or download it again" if data_bytes < expected else "")
        )
    if any(one[1] != other[0] for one, other in pairwise([(0, 0), *ranges])):
        raise ValueError("its tensors overlap, or leave gaps between them")
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"its header has {twice[:120]!r} twice")
    return found

"""Files of others: only regular files, up to a bound, and values that every reader can walk."""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_lab.config.load import read_yaml
from areal_lab.host import foreign
from areal_lab.host.foreign import Parsed, parse_json, parse_yaml, read_bytes, read_json
from tests.fuzz import damaged_json, mutations, one_line, refused


def test_what_is_no_file_is_refused_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "circle").symlink_to("circle")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
        for name in ("pipe", "folder", "socket", "device"):
            with pytest.raises(ValueError, match=rf"{name} is a {name}, but must be a file"):
                read_bytes(tmp_path / name)
    for name in ("circle", "folder"):
        with pytest.raises(ValueError, match=name):
            read_json(tmp_path / name)


def test_content_is_bounded_and_the_error_names_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b"x\n" * 600)
    packed = tmp_path / "events.jsonl.gz"
    packed.write_bytes(gzip.compress(b"x\n" * 600))
    assert read_bytes(file, start=2) == b"x\n" * 599
    assert read_bytes(packed) == read_bytes(file)
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        read_bytes(file, limit_bytes=1000)
    monkeypatch.setattr(foreign, "UNPACKED_BYTES", 1000)
    with pytest.raises(ValueError, match=r"unpacks to more than 1,000 bytes.*gunzip"):
        read_bytes(packed, limit_bytes=10**9)
    file.write_bytes(b"\0" * 1001)
    with pytest.raises(ValueError, match="a line of more than 1,000 bytes"):
        read_bytes(file)
    for damaged in (packed.read_bytes()[:-5], b"x", packed.read_bytes()[:-12] + b"\0" * 12):
        packed.write_bytes(damaged)
        with pytest.raises(ValueError, match="not a complete gzip file"):
            read_bytes(packed)


def test_a_sparse_file_is_refused_before_it_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "UNPACKED_BYTES", 2**20)
    file = tmp_path / "events.jsonl"
    file.touch()
    os.truncate(file, 10**12)
    with pytest.raises(ValueError, match="a line of more than 1,048,576 bytes"):
        read_bytes(file, limit_bytes=10**13)


def test_json_is_shallow_and_its_numbers_are_of_64_bits() -> None:
    assert parse_json('{"a": [1, 2.5, NaN], "b": 18446744073709551615}')["b"] == 2**64 - 1
    assert parse_json("[" * 64 + "]" * 64)
    for deep in ("[" * 65 + "]" * 65, "[" * 100_000, '{"a":' * 70 + "1" + "}" * 70):
        with pytest.raises(ValueError, match="nested more than 64 levels deep"):
            parse_json(deep)
    for large in ("9" * 20, "[-" + "9" * 5000 + "]"):
        with pytest.raises(ValueError, match="more than 64 bits"):
            parse_json(large)
    assert parse_json(r'["\ud83d\ude00", "\ud800", "\udc00 a"]') == [
        "\N{GRINNING FACE}",
        "?",
        "? a",
    ]


def test_yaml_is_small_with_its_aliases_too(tmp_path: Path) -> None:
    laughs = "a0: &a0 {x: 1, y: 2}\n" + "".join(
        f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}, z: *a{i - 1}}}\n" for i in range(1, 40)
    )
    file = tmp_path / "config.yaml"
    for text, message in (
        (laughs, "more than 100,000 values"),
        ("a: &a [*a]\n", "nested more than 64 levels"),
        ("a: " + "[" * 200_000, "nested more than 64 levels"),
        ("- " * 200_000, "nested more than 64 levels"),
        ("a: !!timestamp x\n", "groupdict"),
        ("a: !!python/object/apply:os.system [true]\n", "could not determine a constructor"),
    ):
        file.write_text(text)
        for read in (parse_yaml, lambda _: read_yaml(file)):
            with pytest.raises(ValueError, match=message) as caught:
                read(text)
            assert one_line(caught.value)
    assert parse_yaml("a: &a {b: 1}\nc: *a\n") == {"a": {"b": 1}, "c": {"b": 1}}


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    tokens: tuple[int, ...]


@mutations
def test_a_record_is_made_or_refused_in_one_line(count: int) -> None:
    rng, parsed = random.Random(count), Parsed[tuple[_Part, ...]](tuple[_Part, ...])
    value = [{"name": "a", "tokens": [1, 2]}, {"name": "b", "tokens": []}]
    assert parsed(value)[0] == _Part("a", (1, 2))
    for _ in range(count):
        text = json.dumps(damaged_json(rng, value))
        made: list[_Part] = []
        refused(lambda text=text, made=made: made.extend(parsed(parse_json(text))))
        assert all(isinstance(part.name, str) for part in made)

"""Files that are written aside and renamed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_lab.host.durable import (
    WriteError,
    append_lines,
    disk_error,
    open_new,
    replace_link,
    replace_text,
    replacing,
)


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    replace_text(path, "new é", flush=True)
    assert path.read_bytes() == "new é".encode()
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_block_that_raises_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def write_half() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    behind, link = tmp_path / "behind", tmp_path / "link"
    behind.write_text("kept")
    link.symlink_to(behind)
    replace_text(link, "new")
    assert (behind.read_text(), link.read_text(), link.is_symlink()) == ("kept", "new", False)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        open_new(dangling)


def test_files_have_the_mode_that_the_umask_allows(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    before = os.umask(0o027)
    try:
        replace_text(path, "x")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


# --- disks that take no more ---------------------------------------------------------------------

LIMITED = """
import os, resource, sys
from pathlib import Path
from areal_lab.host.durable import Lines, WriteError, append_lines, replace_text
folder, size = Path(sys.argv[1]), int(sys.argv[2])
if sys.argv[3] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
log = Lines(folder / "log.jsonl", new=True)
line = b'{"text": "' + b"x" * 988 + b'"}\\n'
replace_text(folder / "small.json", "old")
if sys.argv[3] == "full":
    with (folder / "filler").open("wb", buffering=0) as filler:
        for part in (4096, 512, 1):
            try:
                while True:
                    filler.write(b"x" * part)
            except OSError:
                pass
        os.ftruncate(filler.fileno(), os.fstat(filler.fileno()).st_size - 8192)
try:
    for _ in range(10**6):
        log.append(line)
except WriteError as error:
    print(error)
try:
    replace_text(folder / "small.json", "x" * 2 * size)
except WriteError as error:
    print(error)
try:
    append_lines(folder / "other.jsonl", "x" * 2 * size + "\\n")
except WriteError as error:
    print(error)
"""


def check_full(folder: Path, printed: str, reason: str) -> None:
    """What is left after every kind of writer has failed."""
    lines = printed.splitlines()
    assert len(lines) == 3, printed
    for line, name in zip(lines, ("log.jsonl", "small.json", "other.jsonl"), strict=True):
        assert line.startswith(f"{folder / name} cannot be written: {reason} (")
        assert "bytes are needed, " in line
        assert "bytes are free)" in line
    written = (folder / "log.jsonl").read_bytes()
    assert written.endswith(b'"}\n')
    assert len(written) % 1001 == 0
    assert (folder / "small.json").read_text() == "old"
    assert (folder / "other.jsonl").read_bytes() == b""
    assert not list(folder.glob(".*"))


def test_a_limit_on_files_leaves_whole_lines_and_old_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path), "10000", "limit"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    check_full(tmp_path, done.stdout, "it would be larger than the limit for one file")


def test_a_full_disk_leaves_whole_lines_and_old_files(tmp_path: Path) -> None:
    inside = 'mount -t tmpfs -o size=256k none "$1" && shift && "$@" && cp -a "$MOUNTED" "$COPY"'
    mounted, copy = tmp_path / "disk", tmp_path / "copy"
    mounted.mkdir()
    program = [sys.executable, "-c", LIMITED, str(mounted), "262144", "full"]
    done = subprocess.run(
        [
            *["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"],
            inside,
            "sh",
            mounted,
            *program,
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MOUNTED": str(mounted), "COPY": str(copy)},
    )
    if done.returncode:
        pytest.skip(f"this machine gives no file system to unprivileged users: {done.stderr}")
    (copy / "filler").unlink()
    check_full(copy, done.stdout.replace(str(mounted), str(copy)), "the disk is full")


def test_a_device_that_is_full_is_named() -> None:
    full = Path("/dev/full")
    with pytest.raises(WriteError, match=r"/dev/full cannot be written: the disk is full \(2 b"):
        append_lines(full, "x\n")
    with pytest.raises(FileExistsError, match="not a file is here"):
        replace_text(full, "x")
    assert full.is_char_device()


def test_a_half_line_is_removed_before_another_one_follows(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for before, after in (
        ("", ""),
        ('{"a": 1}\n', '{"a": 1}\n'),
        ('{"a": 1}\n{"b"', '{"a": 1}\n'),
        ('{"a": 1}\n{"b": 2}', '{"a": 1}\n{"b": 2}\n'),  # readers take it for a line
        ('{"b', ""),
        ('{"a": 1}\n' + "x" * 200_000, '{"a": 1}\n'),
    ):
        path.write_text(before)
        append_lines(path, '{"c": 3}\n')
        assert path.read_text() == after + '{"c": 3}\n'


def test_something_else_in_the_place_of_a_file_is_renamed(tmp_path: Path) -> None:
    for name in ("a.json", "link"):
        (tmp_path / name / "inside").mkdir(parents=True)
    replace_text(tmp_path / "a.json", "new")
    replace_link(tmp_path / "link", "a.json")
    assert (tmp_path / "link").read_text() == "new"
    assert all((path / "inside").is_dir() for path in tmp_path.glob("*.before-*"))
    assert len(list(tmp_path.glob("*.before-*"))) == 2


def test_what_a_library_says_of_the_disk_gets_path_and_reason(tmp_path: Path) -> None:
    said = "I/O error: No space left on device (os error 28)"
    assert str(disk_error(said, tmp_path / "a")).startswith(f"{tmp_path / 'a'} cannot be written:")
    assert "cannot write" in str(disk_error("something else", tmp_path / "a"))

"""Files that readers see whole, and that survive a power failure or a full disk.

    replacing:    written aside, then renamed
    append_lines: whole lines at the end of a file; nothing stays of a line that did not fit

An error in writing (`WriteError`) is one line with the path, the reason and the space that is left.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import BinaryIO, Final

_REASONS: Final = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your quota on this disk is used up",
    errno.EFBIG: "it would be larger than the limit for one file",
    errno.EIO: "the disk reports an error",
    errno.EROFS: "the disk is mounted read-only",
}
"""Errors of the disk, as opposed to those of names and permissions."""
_TAIL_BYTES: Final = 1 << 16


class WriteError(OSError):
    """The disk refused a write to `filename`; in one line."""

    # simpy makes an exception again from `args`, which are without the path
    def __init__(self, number: int, message: str, path: str | None = None) -> None:
        super().__init__(number, message, path)

    def __str__(self) -> str:
        return str(self.strerror)


def with_type(error: BaseException) -> str:
    """Format an error for a message, with its type unless the text says it."""
    return str(error) if isinstance(error, WriteError) else f"{type(error).__name__}: {error}"


@contextmanager
def writing(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Raise errors of the disk inside the block as `WriteError`."""
    try:
        yield
    except OSError as error:
        known = isinstance(error, WriteError) and needed_bytes is None
        if known or error.errno not in _REASONS:
            raise
        raise write_error(error.errno, path, needed_bytes) from error


def write_error(number: int, path: Path, needed_bytes: int | None = None) -> WriteError:
    """Return the error of a write that failed with this `errno`."""
    reason = _REASONS.get(number) or os.strerror(number)
    sizes = [] if needed_bytes is None else [f"{needed_bytes:,} bytes are needed"]
    with suppress(OSError):
        sizes.append(f"{shutil.disk_usage(path.parent).free:,} bytes are free")
    full = number in (errno.ENOSPC, errno.EDQUOT)
    fix = "; free some space, what was written before is complete" if full else ""
    return WriteError(
        number, f"{path} cannot be written: {reason} ({', '.join(sizes)}){fix}", str(path)
    )


def disk_error(reason: str, path: Path) -> OSError:
    """Return the error of a library that reports the disk's refusal in words alone."""
    for number in _REASONS:
        if f"os error {number})" in reason or os.strerror(number) in reason:
            return write_error(number, path)
    return OSError(f"cannot write {path}: {reason}")


def make_way(path: Path, *, folder: bool = True) -> None:
    """Rename the file or folder of this name, so that another can have the name; nothing is
    removed.

    Args:
        folder: False leaves files and links, which a rename replaces.
    """
    if os.path.lexists(path) and (folder or (path.is_dir() and not path.is_symlink())):
        os.replace(path, path.with_name(f"{path.name[:200]}.before-{secrets.token_hex(4)}"))


@contextmanager
def replacing(path: Path, *, flush: bool = False) -> Iterator[BinaryIO]:
    """Write a file that replaces `path` when the block ends.

    Readers see the old content or all of the new. If the block raises, `path` stays as it was. The
    file is written next to `path` under a name that cannot be predicted, and is created there: in a
    folder that another user filled, nothing is written through a link. A link at `path` itself is
    replaced, and what it leads to stays as it is.
    """
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.tmp")
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        # Root could replace a device.
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
            raise FileExistsError(errno.EEXIST, "something that is not a file is here", str(path))
    with writing(path):
        file = open_new(temporary)
        try:
            with file:
                yield file
                file.flush()
                if flush:
                    os.fsync(file.fileno())
            make_way(path, folder=False)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if flush:
            flush_file(path.parent)


def replace_text(path: Path, text: str, *, flush: bool = False) -> None:
    """Write a text file in UTF-8 that readers see whole; see `replacing`."""
    replace_bytes(path, text.encode(), flush=flush)


def replace_bytes(path: Path, content: bytes, *, flush: bool = False) -> None:
    """Write a file that readers see whole; see `replacing`."""
    with writing(path, len(content)), replacing(path, flush=flush) as file:
        file.write(content)


def append_lines(path: Path, text: str) -> None:
    """Append whole lines to a file, which is created if it is not there; see `Lines.append`."""
    with Lines(path) as lines:
        lines.append(text.encode())


class Lines:
    """File of lines to which one process at a time appends.

    When it is opened, a half line at its end (of a killed or an older program) is removed: no
    line follows it. Lines are JSON.
    """

    def __init__(self, path: Path, *, new: bool = False) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if new else 0)
        self.path = path
        with writing(path):
            self._file = os.open(path, flags, 0o666)
            try:
                _end_line(self._file)
            except BaseException:
                os.close(self._file)
                raise

    def append(self, lines: bytes) -> None:
        """Append all of these bytes, which end with a newline, or nothing."""
        with writing(self.path, len(lines)):
            append_whole(self._file, lines)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def append_whole(file: int, data: bytes) -> None:
    """Append all of `data` to an open file, or nothing if that fails."""
    # One call of `write` if the disk takes it, so that readers never see parts of two lines mixed.
    end, left = os.fstat(file).st_size, memoryview(data)
    try:
        while left:
            left = left[os.write(file, left) :]
    except BaseException:
        with suppress(OSError):  # a device has no end to cut back to
            os.ftruncate(file, end)
        raise


def _end_line(file: int) -> None:
    """Remove a half line at the end of a file; a JSON object without its newline gets one."""
    end = size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) == b"\n":
        return
    tail = b""
    while end:
        start = max(0, end - _TAIL_BYTES)
        head, newline, tail_of_part = os.pread(file, end - start, start).rpartition(b"\n")
        tail = tail_of_part + tail
        if newline:
            end = start + len(head) + 1
            break
        end = start
    if end == size:
        return
    try:
        json.loads(tail)
    except (ValueError, RecursionError):
        os.ftruncate(file, end)
    else:
        append_whole(file, b"\n")  # readers have taken it for a line


def open_new(path: Path) -> BinaryIO:
    """Open a file that does not exist yet, for writing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def replace_link(link: Path, target: str) -> None:
    """Point a link to this path, in one step; another link or a file is replaced."""
    temporary = link.with_name(f".{link.name[:200]}.{secrets.token_hex(8)}.tmp")
    with writing(link):
        temporary.symlink_to(target)
        try:
            make_way(link, folder=False)
            os.replace(temporary, link)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def mode_by_umask(path: Path) -> None:
    """Give a file the mode that the user's umask asks for: safetensors 0.8.0 leaves 0600."""
    probe = path.with_name(f".mode-{path.name}")
    probe.touch()
    path.chmod(stat.S_IMODE(probe.stat().st_mode))
    probe.unlink()


def flush_file(path: Path) -> None:
    """Wait until the content of a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Wait until a folder is on the disk with everything in it."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            flush_file(Path(parent) / name)
        flush_file(Path(parent))


def replace_flushed(temporary: Path, path: Path) -> None:
    """Rename a file or folder that was flushed; the new name is on the disk at the return."""
    os.replace(temporary, path)
    flush_file(path.parent)


_MOST_BYTES: Final = 4095  # of Linux, as the next one
_MOST_OF_NAME: Final = 255
_SHOWN_CHARACTERS: Final = 60


def expanded(path: str | PathLike[str], setting: str) -> Path:
    """Replace `~` or `~user` in a path by the home folder."""
    text = str(path)
    names = [len(name.encode(errors="surrogatepass")) for name in text.split("/")]
    if max(names) > _MOST_OF_NAME or sum(names) + len(names) > _MOST_BYTES:
        raise ValueError(
            f"{setting} is {text[:_SHOWN_CHARACTERS]!r}... ({len(text)} characters), but a path "
            f"has at most {_MOST_BYTES} bytes, and {_MOST_OF_NAME} between slashes"
        )
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(
            f"{setting} is {path}, but no home folder is known for {Path(path).parts[0]}; "
            "write the full path"
        ) from error

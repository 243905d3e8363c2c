"""Checkpoint files: names that belong to a step, and checkpoint.json with a digest of each file.

checkpoint.json: which step a checkpoint is of, and a digest of every file in it.

    step-00012/ model.safetensors config.json trainer/... --write_digests--> checkpoint.json
    checkpoint_fault(step-00012, 12) --> "" if each file is as it was written, else the reason

The file has a digest of itself, too, so that one flipped bit anywhere in the folder is found. Other
files in the folder are ignored. Folders of older versions have no checkpoint.json: they are not
verified.

Names in a run folder that belong to a step; everything else there is somebody else's.

checkpoints/step-00012/  trajectories/step-00012.jsonl[.gz]  trajectories/step-00012.npz
checkpoints/step-00012-copy, step-abc, .DS_Store, a file step-00012   foreign: ignored
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge
from pydantic import StringConstraints, TypeAdapter, ValidationError

from areal_lab.control.events import Version
from areal_lab.host.durable import replace_text
from areal_lab.host.foreign import parse_json, read_text

CHECKPOINTS: Final = "checkpoints"
TRAJECTORIES: Final = "trajectories"
SAMPLES: Final = (".jsonl", ".jsonl.gz")
FIELDS: Final = ".npz"
_STEP: Final = re.compile(r"step-(\d{5}|[1-9]\d{5,17})", re.ASCII)
_TEMPORARY: Final = re.compile(
    r"\.step-\d{5,18}"
    r"(\.writing-\w+|\.removed(-[0-9a-f]+)?|\.(jsonl|npz)(\.[0-9a-f]{16})?\.tmp)",
    re.ASCII,
)
"""Names of entries that are being written or removed, also by older versions."""


def step_of(name: str, endings: tuple[str, ...] = ("",)) -> Version | None:
    """Step of `step-00012`, or of `step-00012.jsonl` with that ending; None for other names."""
    for ending in endings:
        if name.endswith(ending) and (match := _STEP.fullmatch(name.removesuffix(ending))):
            return int(match.group(1))
    return None


def checkpoints_of(run: Path) -> dict[Version, Path]:
    """Folders with the name of a checkpoint, by step, in ascending order."""
    return _named(run / CHECKPOINTS, ("",), folders=True)


def step_files(run: Path, *endings: str) -> dict[Version, Path]:
    """The files of `trajectories/` with these endings, by step, in ascending order."""
    return _named(run / TRAJECTORIES, endings, folders=False)


def foreign_names(run: Path) -> list[str]:
    """Entries of `checkpoints/` and `trajectories/` that no run has written."""
    own = {*checkpoints_of(run).values(), *step_files(run, *SAMPLES, FIELDS).values()}
    return [
        str(path.relative_to(run))
        for name in (CHECKPOINTS, TRAJECTORIES)
        for path in _entries(run / name)
        if path not in own and not _TEMPORARY.fullmatch(path.name)
    ]


def temporary_entries(run: Path) -> Iterator[Path]:
    """Entries that were being written or removed when the run was killed."""
    for name in (CHECKPOINTS, TRAJECTORIES):
        yield from (path for path in _entries(run / name) if _TEMPORARY.fullmatch(path.name))


def _named(folder: Path, endings: tuple[str, ...], *, folders: bool) -> dict[Version, Path]:
    found = {
        step: path
        for path in _entries(folder)
        if (step := step_of(path.name, endings)) is not None
        and (path.is_dir() if folders else path.is_file())
    }
    return dict(sorted(found.items()))


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(Path(entry.path) for entry in os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


FILE: Final = "checkpoint.json"
_PART_BYTES: Final = 1 << 22
_KEPT: Final = 64
_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Content of a file."""

    bytes: Annotated[int, Ge(0)]
    xxh3_128: _Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Content of checkpoint.json."""

    step: Annotated[int, Ge(0)]
    files: dict[str, FileDigest]
    """Files by path in the folder, with `/`."""
    own: _Digest
    """Digest of step and files."""
    schema: Literal[1] = 1


_adapter: Final[TypeAdapter[Digests]] = TypeAdapter(Digests)
_lock = threading.Lock()
_verified: dict[Path, tuple[Any, ...]] = {}
"""State of verified folders, so each is read once."""


def write_digests(folder: Path, step: int) -> None:
    """Write checkpoint.json of a complete folder."""
    files = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            files[path.relative_to(folder).as_posix()] = _digest(path)
    files.pop(FILE, None)
    _write(folder, step, files)


def forget_files(folder: Path, names: Iterable[str]) -> None:
    """Remove files, and all files below folders, from checkpoint.json before they are deleted."""
    found = read_digests(folder)
    if found is None:
        return
    gone = [PurePosixPath(name) for name in names]
    kept = {
        name: one
        for name, one in found.files.items()
        if not any(PurePosixPath(name).is_relative_to(parent) for parent in gone)
    }
    if kept != found.files:
        _write(folder, found.step, kept)


def read_digests(folder: Path) -> Digests | None:
    """Content of checkpoint.json; None if the file does not exist."""
    file = folder / FILE
    try:
        found = _adapter.validate_python(parse_json(read_text(file)))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "its content"
        raise ValueError(f"{FILE} cannot be read: {where}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{FILE} cannot be read: {error}") from error
    if found.own != _own(found.step, found.files):
        raise ValueError(f"{FILE} has other content than when it was saved")
    return found


def checkpoint_fault(folder: Path, step: int | None = None) -> str:
    """Why a checkpoint differs from its saved state, in one line; empty if it does not.

    It is also empty for a folder without checkpoint.json. Each folder is read once per process,
    unless its files change. `step` is the expected step; None accepts any.
    """
    try:
        found = read_digests(folder)
        if found is None:
            return ""
        if step is not None and found.step != step:
            return f"{folder} is a copy of the checkpoint of step {found.step}"
        _verify(folder, found)
    except FileNotFoundError as error:
        return f"{folder} is damaged: {Path(str(error.filename)).relative_to(folder)} is missing"
    except (OSError, ValueError) as error:
        return f"{folder} is damaged: {error}"
    return ""


def _verify(folder: Path, found: Digests) -> None:
    """Compare the files of a folder with their digests, unless they were verified and have not
    changed.
    """
    seen = (found.own, *(_seen(folder, name) for name in found.files))
    with _lock:
        if _verified.get(folder) == seen:
            return
    for name, expected in found.files.items():
        size = (folder / name).stat().st_size
        if size != expected.bytes:
            raise ValueError(f"{name} has {size:,} bytes, but was saved with {expected.bytes:,}")
        if _digest(folder / name) != expected:
            raise ValueError(f"{name} has other content than when it was saved")
    with _lock:
        _verified.pop(folder, None)
        _verified[folder] = seen
        while len(_verified) > _KEPT:
            del _verified[next(iter(_verified))]


def _write(folder: Path, step: int, files: dict[str, FileDigest]) -> None:
    files = dict(sorted(files.items()))
    value = asdict(Digests(step=step, files=files, own=_own(step, files)))
    replace_text(folder / FILE, json.dumps(value, indent=1) + "\n", flush=True)


def _own(step: int, files: dict[str, FileDigest]) -> str:
    text = json.dumps([step, {name: asdict(one) for name, one in sorted(files.items())}])
    import xxhash  # in the extra `train`; doctor checks folders without it

    return xxhash.xxh3_128_hexdigest(text.encode(errors="surrogatepass"))


def _seen(folder: Path, name: str) -> tuple[int, int, int]:
    """Values that change with a file."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{FILE} names {name!r}, which is not in the folder")
    found = (folder / name).stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{name} is not a file")
    return found.st_ino, found.st_size, found.st_mtime_ns


def _digest(path: Path) -> FileDigest:
    import xxhash

    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        while part := file.read(_PART_BYTES):
            digest.update(part)
            size += len(part)
    return FileDigest(size, digest.hexdigest())

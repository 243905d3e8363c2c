"""Install an engine into its own virtual environment: `areal-lab engine install sglang|vllm`.

    choose() -> Recipe --install()--> venv, pip, test import --> stamp
                                      ^ removes an incomplete, broken or outdated one first

A stamp with "complete": false is written first and replaced last, so an interrupted installation is
recognized and starts over; pip reuses its downloads.

Progress of an installation: one updated line on a terminal, separate lines elsewhere.

pip reports its downloads; while it unpacks it prints nothing, but packages appear on disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.status import Status

from areal_lab.config.unknown import nearest
from areal_lab.engines.launch.backends import (
    BACKENDS,
    INSTALLABLE,
    Build,
    InstallCost,
    ServerOptions,
)
from areal_lab.engines.launch.environments import (
    STAMP,
    Condition,
    Environment,
    engine_version,
    environment_folder,
    installed,
    pinned,
    requirements_file,
    requirements_hash,
    torch_cuda,
)
from areal_lab.host.durable import replace_text
from areal_lab.host.machine import visible_gpus
from areal_lab.host.owned_folders import nearest_existing
from areal_lab.host.processes import last_lines

__all__ = ["engine_version", "environment_folder", "installed"]  # re-exported

_GIB: Final = 1 << 30
_LOCK: Final = ".lock"
_LOG: Final = "install.log"
_POLL_S: Final = 0.2  # between two updates of the progress


class InstallError(RuntimeError):
    """An installation failed; one line, followed by the end of pip's log if pip failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Instructions for installing one engine."""

    name: str
    folder: Path
    build: Build
    reason: str
    """Reason for this build."""
    requirements: Path
    stamp: str
    """Hash of the requirements."""
    with_dependencies: bool
    """True if pip also installs dependencies of the requirements."""
    test: Sequence[str]
    """Arguments of the new Python for a test at the end; its output is the error message."""
    variables: Mapping[str, str]
    """Environment variables of this test."""
    cost: InstallCost


def choose(backend: str, build: Build | None = None) -> Recipe:
    """Choose an installation for this machine."""
    if backend not in INSTALLABLE:
        if backend in BACKENDS:
            raise ValueError(f"engine {backend} is part of this package; nothing to install")
        hint = nearest(backend, INSTALLABLE)
        raise ValueError(
            f"{backend!r} is not an engine to install; known are {', '.join(INSTALLABLE)}{hint}"
        )
    if build is None:
        gpus = visible_gpus()
        build = "gpu" if gpus else "cpu"
        reason = f"{len(gpus)} GPU(s) are visible" if gpus else "no GPU is visible"
    else:
        reason = "it was requested"
    facts = BACKENDS[backend]
    options = ServerOptions(model=Path(), port=0, build=build)
    return Recipe(
        name=backend,
        folder=environment_folder(backend),
        build=build,
        reason=reason,
        requirements=requirements_file(backend, build),
        stamp=requirements_hash(backend, build),
        with_dependencies=build == "gpu",
        test=("-c", f"import {facts.first_import or facts.module}"),
        variables=facts.environment(options),
        cost=facts.install_costs[build],
    )


def needed(recipe: Recipe, found: Environment) -> bool:
    """Return whether anything must be installed."""
    return found.condition is not Condition.READY or found.build != recipe.build


def describe(recipe: Recipe, found: Environment) -> list[str]:
    """Describe the installation before it starts."""
    cost = recipe.cost
    lines = pinned(recipe.requirements)
    packages = f"{len(lines)} packages with pinned versions"
    state = f"{found.condition}: {found.missing}" if found.missing else found.condition
    if recipe.with_dependencies:
        packages = f"{', '.join(lines)} and its dependencies"
    note = "" if cost.measured else " (estimated)"
    return [
        f"{recipe.name}: {recipe.build.upper()} build, because {recipe.reason}",
        f"  folder    {recipe.folder} ({state})",
        f"  packages  {packages}",
        f"  needs     about {cost.download_bytes / _GIB:.1f} GiB to download, "
        f"{cost.disk_bytes / _GIB:.1f} GiB on disk, {cost.time}{note}",
    ]


def check(recipe: Recipe, *, force: bool = False) -> None:
    """Refuse an installation that cannot work or would overwrite other files."""
    if sys.platform != "linux":
        raise InstallError(f"engines run on Linux only; this is {sys.platform}")
    if find_spec("pip") is None:
        raise InstallError(f"this Python has no pip; run: {sys.executable} -m ensurepip")
    folder = recipe.folder
    foreign = folder.exists() and not (folder / STAMP).exists()
    if foreign and not force and (not folder.is_dir() or any(folder.iterdir())):
        raise InstallError(
            f"{folder} exists, but was not created by this command; move it away, set "
            "AREAL_LAB_ENGINES to another folder, or replace it with --force"
        )
    parent = nearest_existing(folder if folder.is_dir() else folder.parent)
    if not parent.is_dir():
        raise InstallError(
            f"{folder} cannot be created, as {parent} is not a folder; set AREAL_LAB_ENGINES to "
            "another folder"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InstallError(f"{parent} is not writable; set AREAL_LAB_ENGINES to another folder")
    free = shutil.disk_usage(parent).free + _size(folder)
    if free < recipe.cost.disk_bytes:
        raise InstallError(
            f"{parent} has {free / _GIB:.1f} GiB free, but {recipe.name} needs "
            f"{recipe.cost.disk_bytes / _GIB:.1f} GiB; free some space, or set "
            "AREAL_LAB_ENGINES to another folder"
        )


def install(recipe: Recipe, progress: Progress) -> None:
    """Install an engine, replacing an existing environment."""
    folder = recipe.folder
    try:
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InstallError(
            f"{folder} cannot be created ({error.strerror}); set AREAL_LAB_ENGINES to another "
            "folder"
        ) from error
    with _locked(folder, recipe.name):
        _write_stamp(recipe, complete=False)
        for old in folder.iterdir():
            if old.name in (_LOCK, STAMP):
                continue
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            else:
                old.unlink()
        progress.stage("creating the environment")
        # Without pip: ours installs packages into it from outside.
        venv.create(folder, symlinks=True, with_pip=False)
        log = folder / _LOG
        log.touch()
        total = None if recipe.with_dependencies else len(pinned(recipe.requirements))
        requirements = ("--requirement", str(recipe.requirements))
        deep = recipe.with_dependencies
        _pip(folder, [*(() if deep else ("--no-deps",)), *requirements], progress, total)
        if not deep and torch_cuda(_packages(folder)):
            # If pip finds no CPU build of torch, it installs the CUDA build, which does not work
            # without its libraries.
            progress.stage("pip found only the CUDA build of torch: downloading its dependencies")
            torch = next(line for line in pinned(recipe.requirements) if line.startswith("torch="))
            _pip(folder, [torch], progress, None)
        progress.stage("testing the engine")
        _run(recipe, [_python(folder), *recipe.test], "the test of the engine", recipe.variables)
        _write_stamp(recipe, complete=True)


def _pip(folder: Path, arguments: Sequence[str], progress: Progress, total: int | None) -> None:
    log = folder / _LOG
    command = [
        *(sys.executable, "-m", "pip", "--python", _python(folder), "install"),
        *("--progress-bar", "off", "--disable-pip-version-check", "--no-input"),
        *arguments,
    ]
    with log.open("r", errors="replace") as output:
        output.seek(0, os.SEEK_END)
        with log.open("ab") as out:
            pip = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=_variables({})
            )
        try:
            while pip.poll() is None:
                present = len(list(_packages(folder).glob("*.dist-info")))
                progress.pip(output.read(), present, total)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(_POLL_S)
        finally:
            # After Ctrl-C, too; the terminal has sent it to pip as well.
            if pip.poll() is None:
                pip.terminate()
            pip.wait()
    if pip.returncode != 0:
        raise InstallError(f"pip failed; the last lines of {log}:\n{last_lines(log)}")


def _packages(folder: Path) -> Path:
    return next(folder.glob("lib/python3*/site-packages"))


def _run(recipe: Recipe, command: Sequence[str], what: str, variables: Mapping[str, str]) -> None:
    log = recipe.folder / _LOG
    with log.open("ab") as out:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False,
            env=_variables(variables),
        )  # fmt: skip
    if ended.returncode != 0:
        raise InstallError(f"{what} failed; the last lines of {log}:\n{last_lines(log)}")


def _variables(more: Mapping[str, str]) -> dict[str, str]:
    """This process's variables without those that change Python's module path."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, **more}


@contextlib.contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends
        except OSError as error:
            raise InstallError(f"another process is installing {name} into {folder}") from error
        yield


def _write_stamp(recipe: Recipe, *, complete: bool) -> None:
    stamp = {
        "complete": complete,
        "engine": recipe.name,
        "build": recipe.build,
        "requirements": recipe.stamp,
        "python": sys.version.split()[0],
        "made_at": time.time(),
    }
    replace_text(recipe.folder / STAMP, json.dumps(stamp) + "\n")


def _python(folder: Path) -> str:
    return str(folder / "bin" / "python")


def _size(folder: Path) -> int:
    """Bytes that removing the folder would free."""
    if not folder.is_dir() or folder.is_symlink():
        return 0
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_symlink())


_INTERVAL_S: Final = 10.0
"""Seconds between two lines without a terminal."""


@dataclass(slots=True)
class Progress:
    """Prints the current stage of an installation."""

    console: Console
    started_s: float = field(default_factory=time.monotonic)
    downloaded_bytes: float = 0.0
    _collected: set[str] = field(default_factory=set)
    _unpacking: bool = False
    _last: str = ""
    _printed_s: float = -_INTERVAL_S
    _status: Status | None = None

    def stage(self, text: str) -> None:
        """Start a new stage."""
        self._printed_s = -_INTERVAL_S
        self._print(text)

    def pip(self, output: str, present: int, total: int | None) -> None:
        """Show the progress of pip."""
        for line in output.splitlines():
            # pip processes local files and collects everything else.
            if found := re.match(r"Collecting (\S+)|Processing \S*?([^/\s-]+)-\S*\.whl", line):
                self._last = re.split(r"[=<>!~\[;@]", found[1] or found[2])[0]
                self._collected.add(self._last)
            elif found := re.search(r"Downloading .*\((\d+(?:\.\d+)?) (k|M|G)?B\)", line):
                size = float(found.group(1)) * {"k": 1e3, "M": 1e6, "G": 1e9, None: 1}[found[2]]
                self.downloaded_bytes += size
                self._last = f"{self._last.split(' (')[0]} ({found.group(1)} {found[2] or ''}B)"
            elif line.startswith("Installing collected packages"):
                self._unpacking = True
                self._printed_s = -_INTERVAL_S
        of = "" if total is None else f" of {total}"
        if self._unpacking:
            self._print(f"unpacking: {present}{of} packages")
        else:
            self._print(
                f"downloading: {len(self._collected)}{of} packages, now {self._last or '...'}"
            )

    def end(self) -> None:
        """Stop updating."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _print(self, text: str) -> None:
        now = time.monotonic()
        if self.console.is_terminal:
            text = f"{text}  ({now - self.started_s:.0f} s)"
            if self._status is None:
                self._status = self.console.status(text)
                self._status.start()
            self._status.update(text)
        elif now - self._printed_s >= _INTERVAL_S:
            self._printed_s = now
            line = f"[{now - self.started_s:6.1f} s] {text}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

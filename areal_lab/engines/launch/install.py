"""Make the virtual environment of an engine: `areal-lab engine install sglang|vllm`.

    choose() -> Recipe --make()--> venv, pip, a look at what came --> stamp
                                   ^ the old one goes first, if it is half made, broken or outdated

A stamp that says "not complete" is written first and replaced last, so an environment that was left
halfway is known as such, and made again from the beginning: pip keeps what it has downloaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from areal_lab.config.suggest import nearest
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
from areal_lab.engines.launch.install_progress import Progress
from areal_lab.host.gpus import visible_gpus
from areal_lab.host.owned_folders import nearest_existing
from areal_lab.host.processes import last_lines

__all__ = ["engine_version", "environment_folder", "installed"]  # part of what this module offers

_GIB: Final = 1 << 30
_LOCK: Final = ".lock"
_LOG: Final = "install.log"
_POLL_S: Final = 0.2  # between two looks at how far pip is


class InstallError(RuntimeError):
    """An environment could not be made; one line, and the end of pip's log if it has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one environment is made."""

    name: str
    folder: Path
    build: Build
    why: str
    """Why this build."""
    requirements: Path
    stamp: str
    """Identifies the requirements."""
    with_dependencies: bool
    """Whether pip looks for what the requirements themselves require."""
    look: Sequence[str]
    """Arguments for the new Python; what it says when it fails is the error."""
    variables: Mapping[str, str]
    """Environment variables of this look."""
    cost: InstallCost


def choose(backend: str, build: Build | None = None) -> Recipe:
    """What would be installed here, and why.

    Raises:
        ValueError: if there is no such engine to install.
    """
    if backend not in INSTALLABLE:
        if backend in BACKENDS:
            raise ValueError(f"engine {backend} is part of this package; there is nothing to do")
        hint = nearest(backend, INSTALLABLE)
        raise ValueError(
            f"{backend!r} cannot be installed; there are {', '.join(INSTALLABLE)}{hint}"
        )
    if build is None:
        gpus = visible_gpus()
        build = "gpu" if gpus else "cpu"
        why = f"{len(gpus)} GPU(s) are visible" if gpus else "no GPU is visible"
    else:
        why = "it was asked for"
    facts = BACKENDS[backend]
    options = ServerOptions(model=Path(), port=0, build=build)
    return Recipe(
        name=backend,
        folder=environment_folder(backend),
        build=build,
        why=why,
        requirements=requirements_file(backend, build),
        stamp=requirements_hash(backend, build),
        with_dependencies=build == "gpu",
        look=("-c", f"import {facts.first_import or facts.module}"),
        variables=facts.environment(options),
        cost=facts.install_costs[build],
    )


def needed(recipe: Recipe, found: Environment) -> bool:
    """Whether there is anything to do."""
    return found.condition is not Condition.READY or found.build != recipe.build


def describe(recipe: Recipe, found: Environment) -> list[str]:
    """What will be done, said before it begins."""
    cost = recipe.cost
    lines = pinned(recipe.requirements)
    packages = f"{len(lines)} packages, each with its version"
    state = f"{found.condition}: {found.lacks}" if found.lacks else found.condition
    if recipe.with_dependencies:
        packages = f"{', '.join(lines)} and what it requires"
    rough = "" if cost.measured else " (not measured)"
    return [
        f"{recipe.name}: {recipe.build.upper()} build, because {recipe.why}",
        f"  folder  {recipe.folder} ({state})",
        f"  what    {packages}",
        f"  costs   about {cost.download_bytes / _GIB:.1f} GiB to download, "
        f"{cost.disk_bytes / _GIB:.1f} GiB on disk, {cost.time}{rough}",
    ]


def check(recipe: Recipe, *, force: bool = False) -> None:
    """Refuse what cannot work, or would destroy what somebody else made.

    Raises:
        InstallError: in one line.
    """
    if sys.platform != "linux":
        raise InstallError(f"engines run on Linux only; this is {sys.platform}")
    if find_spec("pip") is None:
        raise InstallError(f"this Python has no pip; run: {sys.executable} -m ensurepip")
    folder = recipe.folder
    foreign = folder.exists() and not (folder / STAMP).exists()
    if foreign and not force and (not folder.is_dir() or any(folder.iterdir())):
        raise InstallError(
            f"{folder} is there, but was not made by this command; move it away, let "
            "AREAL_LAB_ENGINES name another folder, or replace it with --force"
        )
    place = nearest_existing(folder if folder.is_dir() else folder.parent)
    if not place.is_dir():
        raise InstallError(
            f"{folder} cannot be made, as {place} is not a folder; let AREAL_LAB_ENGINES name "
            "another folder"
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise InstallError(f"{place} is not writable; let AREAL_LAB_ENGINES name another folder")
    free = shutil.disk_usage(place).free + _size(folder)
    if free < recipe.cost.disk_bytes:
        raise InstallError(
            f"{place} has {free / _GIB:.1f} GiB free, but {recipe.name} takes "
            f"{recipe.cost.disk_bytes / _GIB:.1f}; free some space, or let AREAL_LAB_ENGINES name "
            "another folder"
        )


def make(recipe: Recipe, progress: Progress) -> None:
    """Make the environment, from the beginning.

    Raises:
        InstallError: if another process is at it, or pip or the look fails.
        KeyboardInterrupt: what is there then counts as half made.
    """
    folder = recipe.folder
    try:
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InstallError(
            f"{folder} cannot be made ({error.strerror}); let AREAL_LAB_ENGINES name another folder"
        ) from error
    with _only_one(folder, recipe.name):
        _write_stamp(recipe, complete=False)
        for old in folder.iterdir():
            if old.name in (_LOCK, STAMP):
                continue
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            else:
                old.unlink()
        progress.stage("making the environment")
        # pip is not put into it: ours installs into it from outside.
        venv.create(folder, symlinks=True, with_pip=False)
        log = folder / _LOG
        log.touch()
        total = None if recipe.with_dependencies else len(pinned(recipe.requirements))
        wanted = ("--requirement", str(recipe.requirements))
        deep = recipe.with_dependencies
        _pip(folder, [*(() if deep else ("--no-deps",)), *wanted], progress, total)
        if not deep and torch_cuda(_packages(folder)):
            # Where pip knows no CPU build of torch, the ordinary one comes, which is nothing
            # without its libraries.
            progress.stage("torch came as its CUDA build: fetching what that needs")
            torch = next(line for line in pinned(recipe.requirements) if line.startswith("torch="))
            _pip(folder, [torch], progress, None)
        progress.stage("a first look at the engine")
        _run(recipe, [_python(folder), *recipe.look], "the look at the engine", recipe.variables)
        _write_stamp(recipe, complete=True)


def _pip(folder: Path, arguments: Sequence[str], progress: Progress, total: int | None) -> None:
    log = folder / _LOG
    command = [
        *(sys.executable, "-m", "pip", "--python", _python(folder), "install"),
        *("--progress-bar", "off", "--disable-pip-version-check", "--no-input"),
        *arguments,
    ]
    with log.open("r", errors="replace") as said:
        said.seek(0, os.SEEK_END)
        with log.open("ab") as out:
            pip = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=_variables({})
            )
        try:
            while pip.poll() is None:
                present = len(list(_packages(folder).glob("*.dist-info")))
                progress.pip(said.read(), present, total)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(_POLL_S)
        finally:
            # After Ctrl-C too, of which the terminal has told pip as well.
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
    """This process's own variables, less those that lead Python elsewhere."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, **more}


@contextlib.contextmanager
def _only_one(folder: Path, name: str) -> Iterator[None]:
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # gone with its holder
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
    aside = recipe.folder / f"{STAMP}.tmp"
    aside.write_text(json.dumps(stamp) + "\n", encoding="utf-8")
    aside.replace(recipe.folder / STAMP)


def _python(folder: Path) -> str:
    return str(folder / "bin" / "python")


def _size(folder: Path) -> int:
    """Bytes that removing the folder gives back."""
    if not folder.is_dir() or folder.is_symlink():
        return 0
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_symlink())

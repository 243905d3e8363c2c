"""Environments for programs that tests run and that are no dependencies of this project.

    requirements/NAME.txt --pip--> folder/NAME, with a copy of the file as its stamp

Each has an environment of its own: they disagree about versions. The stamp is written last, so an
installation that was interrupted, or is of other requirements, begins again. Its Python is ours,
unless a line of the requirements names versions: `# Python: 3.13 or 3.12`.
"""

from __future__ import annotations

import fcntl
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
_STAMP: Final = ".requirements"
_VERSIONS: Final = re.compile(r"^# Python: (.+)$", re.MULTILINE)


class InstallError(RuntimeError):
    """pip failed; the message has the end of what it said."""


class MissingPythonError(InstallError):
    """This machine has no Python of the versions that an environment needs; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """Environments of one kind."""

    what: str
    """What they are, for messages: `clients`."""
    folder: Path
    requirements: Path
    """Folder of the files NAME.txt, each with all packages and their versions."""
    target: str
    """Of the Makefile, that installs them."""
    takes: str
    """Time and space, for messages."""

    @property
    def names(self) -> tuple[str, ...]:
        """All environments."""
        return tuple(sorted(file.stem for file in self.requirements.glob("*.txt")))

    def python_of(self, name: str) -> Path:
        """The Python of an environment.

        Raises:
            InstallError: it is not ready.
        """
        if not self.is_ready(name):
            raise InstallError(f"{self.folder / name} is not installed; run: make {self.target}")
        return self.folder / name / "bin" / "python"

    def is_ready(self, name: str) -> bool:
        """Whether the environment has what the requirements of today ask for."""
        stamp = self.folder / name / _STAMP
        if not stamp.is_file():
            return False
        text, _, version = stamp.read_text().rpartition("# Python ")
        fits = any(f"{version.strip()}.".startswith(f"{one}.") for one in self._versions(name))
        return fits and text == self._requirements(name)

    def interpreter(self, name: str) -> tuple[str, str]:
        """The Python that an environment is made with, and its version.

        Raises:
            MissingPythonError: this machine has no such Python.
        """
        versions = self._versions(name)
        for version in versions:
            for candidate in _candidates(version):
                found = _version(candidate)
                if f"{found}.".startswith(f"{version}."):
                    return candidate, found
        raise MissingPythonError(
            f"{name} needs Python {' or '.join(versions)}, which is not on PATH as "
            f"{' or '.join(f'python{one}' for one in versions)}, nor among the versions of pyenv"
        )

    def install(self, name: str) -> None:
        """Create an environment again from nothing.

        Raises:
            InstallError: pip failed, or there is no Python for it.
        """
        python, version = self.interpreter(name)
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        for command in (
            # Without pip: ours installs into it from outside.
            [python, "-m", "venv", "--without-pip", str(folder)],
            [
                *(sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")),
                *("install", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"),
                *("--no-compile", "--requirement", str(self.requirements / f"{name}.txt")),
            ],
        ):
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode != 0:
                said = "\n".join((ended.stdout + ended.stderr).splitlines()[-20:])
                raise InstallError(f"pip could not install {name} into {folder}:\n{said}")
        (folder / _STAMP).write_text(f"{self._requirements(name)}# Python {version}\n")

    def install_missing(self) -> int:
        """Install what is missing, and say what and how large it is; returns the exit code.

        An environment for which this machine has no Python is left out.
        """
        missing = [name for name in self.names if not self.is_ready(name)]
        if not missing:
            print(f"The {len(self.names)} {self.what} in {self.folder.name} are ready.")
            return 0
        print(f"Installing {self.what} into {self.folder.name} ({self.takes}).")
        self.folder.mkdir(exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends
            for number, name in enumerate(missing, 1):
                if self.is_ready(name):  # another process had the lock before
                    continue
                packages = sum("==" in line for line in self._requirements(name).splitlines())
                begun = f"[{number}/{len(missing)}] {name}: {packages} packages ... "
                print(begun, end="", flush=True)
                began_s = time.monotonic()
                try:
                    self.install(name)
                except MissingPythonError as error:
                    print(f"left out: {error}")
                    continue
                except InstallError as error:
                    print(f"failed\n{error}", file=sys.stderr)
                    return 1
                took_s = time.monotonic() - began_s
                print(f"{_megabytes(self.folder / name):.0f} MB, {took_s:.0f} s")
        return 0

    def _requirements(self, name: str) -> str:
        return (self.requirements / f"{name}.txt").read_text()

    def _versions(self, name: str) -> list[str]:
        found = _VERSIONS.search(self._requirements(name))
        return found[1].split(" or ") if found else [platform.python_version()]


def _candidates(version: str) -> Iterator[str]:
    """Programs that may be a Python of this version."""
    yield sys.executable
    yield f"python{version}"  # of pyenv: one that only says which versions there are
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False)
        versions = Path(root.stdout.strip(), "versions")
        yield from map(str, sorted(versions.glob(f"{version}.*/bin/python")))


def _version(python: str) -> str:
    """Version of a Python; empty if it does not run."""
    program = "import platform; print(platform.python_version())"
    try:
        ended = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return ended.stdout.strip()


def _megabytes(folder: Path) -> float:
    return sum(file.lstat().st_size for file in folder.rglob("*")) / 1e6

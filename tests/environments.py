"""Environments for programs that tests run and that are no dependencies of this project.

    requirements/NAME.txt --pip--> folder/NAME, with a copy of the file as its stamp

Each has an environment of its own: they disagree about versions. The stamp is written last, so an
installation that was interrupted, or is of other requirements, begins again.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
_STAMP: Final = ".requirements"


class InstallError(RuntimeError):
    """pip failed; the message has the end of what it said."""


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
        return stamp.is_file() and stamp.read_text() == self._wanted(name)

    def install(self, name: str) -> None:
        """Create an environment again from nothing.

        Raises:
            InstallError: pip failed.
        """
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        # Without pip: ours installs into it from outside.
        venv.create(folder, symlinks=True, with_pip=False)
        command = [
            *(sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"),
            *("--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"),
            *("--no-compile", "--requirement", str(self.requirements / f"{name}.txt")),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            said = "\n".join((ended.stdout + ended.stderr).splitlines()[-20:])
            raise InstallError(f"pip could not install {name} into {folder}:\n{said}")
        (folder / _STAMP).write_text(self._wanted(name))

    def install_missing(self) -> int:
        """Install what is missing, and say what and how large it is; returns the exit code."""
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
                packages = sum("==" in line for line in self._wanted(name).splitlines())
                begun = f"[{number}/{len(missing)}] {name}: {packages} packages ... "
                print(begun, end="", flush=True)
                began_s = time.monotonic()
                try:
                    self.install(name)
                except InstallError as error:
                    print(f"failed\n{error}", file=sys.stderr)
                    return 1
                took_s = time.monotonic() - began_s
                print(f"{_megabytes(self.folder / name):.0f} MB, {took_s:.0f} s")
        return 0

    def _wanted(self, name: str) -> str:
        text = (self.requirements / f"{name}.txt").read_text()
        return f"{text}# Python {sys.version.split()[0]}\n"


def _megabytes(folder: Path) -> float:
    return sum(file.lstat().st_size for file in folder.rglob("*")) / 1e6

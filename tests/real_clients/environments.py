"""The clients' environments: `python -m tests.real_clients.environments` installs what is missing.

    requirements/NAME.txt --pip--> .venv-agents/NAME, with a copy of the file as its stamp

Each client has an environment of its own: they disagree about versions, and none of them is a
dependency of this project. The stamp is written last, so an installation that was interrupted, or
is of other requirements, begins again.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".venv-agents"
REQUIREMENTS: Final = Path(__file__).with_name("requirements")
NAMES: Final = tuple(sorted(file.stem for file in REQUIREMENTS.glob("*.txt")))
_STAMP: Final = ".requirements"


class InstallError(RuntimeError):
    """pip failed; the message has the end of what it said."""


def python_of(name: str) -> Path:
    """The Python of a client.

    Raises:
        InstallError: its environment is not ready.
    """
    if not is_ready(name):
        raise InstallError(f"{FOLDER / name} is not installed; run: make test-agents")
    return FOLDER / name / "bin" / "python"


def is_ready(name: str) -> bool:
    """Whether the environment has what the requirements of today ask for."""
    stamp = FOLDER / name / _STAMP
    return stamp.is_file() and stamp.read_text() == _wanted(name)


def install(name: str) -> None:
    """Create the environment of a client again from nothing.

    Raises:
        InstallError: pip failed.
    """
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    # Without pip: ours installs into it from outside.
    venv.create(folder, symlinks=True, with_pip=False)
    command = [
        *(sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"),
        *("--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"),
        *("--requirement", str(REQUIREMENTS / f"{name}.txt")),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        said = "\n".join((ended.stdout + ended.stderr).splitlines()[-20:])
        raise InstallError(f"pip could not install {name} into {folder}:\n{said}")
    (folder / _STAMP).write_text(_wanted(name))


def main() -> int:
    """Install what is missing, and say what and how large it is."""
    missing = [name for name in NAMES if not is_ready(name)]
    if not missing:
        print(f"The {len(NAMES)} clients in {FOLDER.name} are ready.")
        return 0
    print(
        f"Installing clients into {FOLDER.name} (one to two minutes; 0.9 GB for all {len(NAMES)})."
    )
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends
        for number, name in enumerate(missing, 1):
            if is_ready(name):  # another process had the lock before
                continue
            packages = sum("==" in line for line in _wanted(name).splitlines())
            print(f"[{number}/{len(missing)}] {name}: {packages} packages ... ", end="", flush=True)
            began_s = time.monotonic()
            try:
                install(name)
            except InstallError as error:
                print(f"failed\n{error}", file=sys.stderr)
                return 1
            print(f"{_megabytes(FOLDER / name):.0f} MB, {time.monotonic() - began_s:.0f} s")
    return 0


def _wanted(name: str) -> str:
    return (REQUIREMENTS / f"{name}.txt").read_text() + f"# Python {sys.version.split()[0]}\n"


def _megabytes(folder: Path) -> float:
    return sum(file.lstat().st_size for file in folder.rglob("*")) / 1e6


if __name__ == "__main__":
    sys.exit(main())

"""The engines' virtual environments: their folders and condition; read-only.

    AREAL_LAB_ENGINES=/path       /path/sglang          /path/vllm
    inside a checkout             .venv-sglang          .venv-vllm         next to .venv
    elsewhere                     ~/.local/share/areal_lab/engines/sglang  ... (XDG)

`areal-lab engine install` writes a stamp into each environment, with the hash of the requirements
file that it was installed from.

Verify that nothing is missing from a finished environment, in a second and without imports.

    environment() --ready?--> its Python, its packages, the files of each --> ready | broken

Checked are the packages that the requirements pin, and the files in each package's RECORD.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.metadata import distributions, version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from areal_lab.engines.launch.backends import BACKENDS, Build
from areal_lab.host.durable import expanded

STAMP: Final = ".areal_lab.json"
_PACKAGE: Final = Path(__file__).resolve().parents[2]
_REQUIREMENTS: Final = Path(__file__).parent / "requirements"


class Condition(StrEnum):
    """Condition of an engine's environment."""

    READY = "ready"
    OUTDATED = "outdated"
    """Works, but was installed from other requirements than those of this package."""
    MANUAL = "installed manually"
    """Seems to work, but was not installed by `areal-lab engine install`."""
    BROKEN = "broken"
    """Was ready, but something is missing now; only `verify` detects this."""
    INCOMPLETE = "incomplete"
    MISSING = "not installed"

    @property
    def usable(self) -> bool:
        """True if a server can be started from it."""
        return self in (Condition.READY, Condition.OUTDATED, Condition.MANUAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """State of an engine's virtual environment."""

    backend: str
    folder: Path
    condition: Condition
    version: str = ""
    """Version of the engine; empty without one."""
    build: Build = "cpu"
    """For the embedded engine: whether the torch of this environment can use GPUs."""
    missing: str = ""
    """First missing part of a broken environment."""


def environment_folder(backend: str) -> Path:
    """Folder of an engine's environment, whether it exists or not."""
    own = os.environ.get("AREAL_LAB_ENGINES")
    if own:
        return expanded(own, "AREAL_LAB_ENGINES").absolute() / backend
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file():
        return checkout / f".venv-{backend}"
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "areal_lab" / "engines" / backend


def python_of(backend: str) -> Path:
    """The Python that runs this engine; this one for the embedded engine."""
    if not BACKENDS[backend].own_environment:
        return Path(sys.executable)
    return environment_folder(backend) / "bin" / "python"


def requirements_file(backend: str, build: Build) -> Path:
    """The file with the engine's pinned requirements."""
    return _REQUIREMENTS / f"{backend}-{build}.txt"


def pinned(requirements: Path) -> list[str]:
    """The lines of a requirements file, without comments."""
    lines = (line.split("#")[0].strip() for line in requirements.read_text().splitlines())
    return [line for line in lines if line]


def requirements_hash(backend: str, build: Build) -> str:
    """Hash of the requirements file."""
    return hashlib.sha256(requirements_file(backend, build).read_bytes()).hexdigest()


def installed(backend: str) -> bool:
    """Return whether a server of this engine can be started."""
    return environment(backend).condition.usable


def engine_version(backend: str) -> str:
    """Version of the engine's package; of this package for the embedded engine."""
    if not BACKENDS[backend].own_environment:
        return version("areal_lab")
    return environment(backend).version


def environment(backend: str) -> Environment:
    """Inspect an engine's environment, without running anything in it."""
    if not BACKENDS[backend].own_environment:
        return Environment(
            backend=backend,
            folder=Path(sys.prefix),
            condition=Condition.READY,
            version=version("areal_lab"),
            build="gpu" if own_torch_cuda() else "cpu",
        )
    folder = environment_folder(backend)
    if not folder.is_dir():
        return Environment(backend=backend, folder=folder, condition=Condition.MISSING)
    found = _engine_package(backend, folder)
    if found is None or not (folder / "bin" / "python").exists():
        return Environment(backend=backend, folder=folder, condition=Condition.INCOMPLETE)
    build, package_version = found
    return Environment(
        backend=backend,
        folder=folder,
        condition=_condition(backend, folder, build),
        version=package_version,
        build=build,
    )


def torch_cuda(packages: Path) -> str | None:
    """CUDA version of the torch in a site-packages folder; None for a CPU build.

    Reads torch's version file, since importing torch takes seconds.
    """
    try:
        text = (packages / "torch" / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None


def own_torch_cuda() -> str | None:
    """CUDA version of the torch in this environment; None for a CPU build, or without torch."""
    torch = find_spec("torch")  # finds it without importing it
    return torch_cuda(Path(torch.origin).parents[1]) if torch and torch.origin else None


def _condition(backend: str, folder: Path, build: Build) -> Condition:
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Condition.MANUAL
    except (OSError, ValueError):
        return Condition.INCOMPLETE
    if not isinstance(stamp, dict) or not stamp.get("complete"):
        return Condition.INCOMPLETE
    current = requirements_hash(backend, build)
    return Condition.READY if stamp.get("requirements") == current else Condition.OUTDATED


def _engine_package(backend: str, folder: Path) -> tuple[Build, str] | None:
    """Build and version of the engine in the environment, from its packages."""
    found: dict[str, str] = {
        canonicalize_name(d.name or ""): d.version
        for d in distributions(path=[str(p) for p in folder.glob("lib/python3*/site-packages")])
    }
    facts = BACKENDS[backend]
    build: Build = "gpu" if facts.gpu_package in found else "cpu"
    package_version = found.get(facts.distribution[build])
    return None if package_version is None else (build, package_version)


_PYTHON_S: Final = 20.0
_PURELIB: Final = "import sysconfig; print(sysconfig.get_path('purelib'))"


def verify(found: Environment) -> Environment:
    """The environment, marked as broken if it counts as ready but something is missing."""
    if found.condition is not Condition.READY:
        return found
    requirements = requirements_file(found.backend, found.build)
    missing = next(chain(_missing(found.folder, requirements), _python(found.folder)), "")
    return replace(found, condition=Condition.BROKEN, missing=missing) if missing else found


def _missing(folder: Path, requirements: Path) -> Iterator[str]:
    """Missing packages, and missing files of installed packages."""
    infos = sorted(folder.glob("lib/python3*/site-packages/*.dist-info"))
    present = {canonicalize_name(info.name.partition("-")[0]) for info in infos}
    for line in pinned(requirements):
        needed = Requirement(line)
        if needed.specifier and canonicalize_name(needed.name) not in present:
            yield f"package {needed.name} is missing"
    for info in infos:
        name = info.name.removesuffix(".dist-info")
        try:
            text = (info / "RECORD").read_text(encoding="utf-8", errors="replace")
            rows = list(csv.reader(text.splitlines()))
        except (OSError, csv.Error):
            yield f"the file list of {name} is missing"
            continue
        for file, *_ in filter(None, rows):
            # Compiled files may be missing.
            if "__pycache__" not in file and not os.path.lexists(info.parent / file):
                yield f"{file} of {name} is missing"


def _python(folder: Path) -> Iterator[str]:
    """Problems of its Python; if it was replaced, it may look for packages elsewhere."""
    command = [str(folder / "bin" / "python"), "-I", "-c", _PURELIB]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_PYTHON_S
        )
    except (OSError, subprocess.SubprocessError):
        yield "its Python does not run"
        return
    packages = Path(ended.stdout.strip())
    if not packages.is_dir() or not any(packages.glob("*.dist-info")):
        yield f"its Python looks for packages in {packages}, which has none"

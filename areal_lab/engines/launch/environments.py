"""Where the engines' virtual environments are, and what is in them; looks and changes nothing.

    AREAL_LAB_ENGINES=/path       /path/sglang          /path/vllm
    inside a checkout             .venv-sglang          .venv-vllm         beside .venv
    elsewhere                     ~/.local/share/areal_lab/engines/sglang  ... (XDG)

An environment made by `areal-lab engine install` carries a stamp with the hash of the file of
requirements that it was made from.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name

from areal_lab.engines.launch.backends import BACKENDS, Build
from areal_lab.host.home import expanded

STAMP: Final = ".areal_lab.json"
_PACKAGE: Final = Path(__file__).resolve().parents[2]
_REQUIREMENTS: Final = Path(__file__).parent / "requirements"


class Condition(StrEnum):
    """What can be said of an engine's environment."""

    READY = "ready"
    OUTDATED = "outdated"
    """Works, but was made from other requirements than those of this package."""
    FOREIGN = "made by hand"
    """Works, as far as can be seen; not made by `areal-lab engine install`."""
    BROKEN = "broken"
    """Was ready, and lacks something now; only a closer look tells (`damage`)."""
    HALF_MADE = "half made"
    MISSING = "not installed"

    @property
    def usable(self) -> bool:
        """Whether a server can be started from it."""
        return self in (Condition.READY, Condition.OUTDATED, Condition.FOREIGN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An engine's virtual environment, as it is now."""

    backend: str
    folder: Path
    condition: Condition
    version: str = ""
    """Of the engine; empty if there is none."""
    build: Build = "cpu"
    lacks: str = ""
    """Of a broken one: the first thing that is missing."""


def environment_folder(backend: str) -> Path:
    """Where the environment of this engine is, or would be made.

    Raises:
        ValueError: AREAL_LAB_ENGINES names the home folder of an unknown user.
    """
    own = os.environ.get("AREAL_LAB_ENGINES")
    if own:
        return expanded(own, "AREAL_LAB_ENGINES").absolute() / backend
    checkout = _PACKAGE.parent
    if (checkout / "pyproject.toml").is_file():
        return checkout / f".venv-{backend}"
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "areal_lab" / "engines" / backend


def python_of(backend: str) -> Path:
    """The Python that runs this engine; our own for the embedded one."""
    if not BACKENDS[backend].own_environment:
        return Path(sys.executable)
    return environment_folder(backend) / "bin" / "python"


def requirements_file(backend: str, build: Build) -> Path:
    """The file of pinned requirements."""
    return _REQUIREMENTS / f"{backend}-{build}.txt"


def pinned(requirements: Path) -> list[str]:
    """The lines of a file of requirements, without comments."""
    lines = (line.split("#")[0].strip() for line in requirements.read_text().splitlines())
    return [line for line in lines if line]


def requirements_hash(backend: str, build: Build) -> str:
    """Identifies the requirements; changes whenever a line of the file does."""
    return hashlib.sha256(requirements_file(backend, build).read_bytes()).hexdigest()


def installed(backend: str) -> bool:
    """Whether a server of this kind can be started."""
    return environment(backend).condition.usable


def engine_version(backend: str) -> str:
    """Version of the engine's package; of this package for the embedded engine."""
    if not BACKENDS[backend].own_environment:
        return version("areal_lab")
    return environment(backend).version


def environment(backend: str) -> Environment:
    """Look at an engine's environment, without running anything in it."""
    if not BACKENDS[backend].own_environment:
        return Environment(
            backend=backend,
            folder=Path(sys.prefix),
            condition=Condition.READY,
            version=version("areal_lab"),
        )
    folder = environment_folder(backend)
    if not folder.is_dir():
        return Environment(backend=backend, folder=folder, condition=Condition.MISSING)
    found = _engine_package(backend, folder)
    if found is None or not (folder / "bin" / "python").exists():
        return Environment(backend=backend, folder=folder, condition=Condition.HALF_MADE)
    build, package_version = found
    return Environment(
        backend=backend,
        folder=folder,
        condition=_condition(backend, folder, build),
        version=package_version,
        build=build,
    )


def torch_cuda(packages: Path) -> str | None:
    """CUDA version that the torch in a folder of packages was built for; None for a CPU build.

    From the file that torch was built with: importing torch takes seconds.
    """
    try:
        text = (packages / "torch" / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match.group(1) if match else None


def _condition(backend: str, folder: Path, build: Build) -> Condition:
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Condition.FOREIGN
    except (OSError, ValueError):
        return Condition.HALF_MADE
    if not isinstance(stamp, dict) or not stamp.get("complete"):
        return Condition.HALF_MADE
    current = requirements_hash(backend, build)
    return Condition.READY if stamp.get("requirements") == current else Condition.OUTDATED


def _engine_package(backend: str, folder: Path) -> tuple[Build, str] | None:
    """Build and version of the engine in the environment, told by its packages."""
    found: dict[str, str] = {
        canonicalize_name(d.name or ""): d.version
        for d in distributions(path=[str(p) for p in folder.glob("lib/python3*/site-packages")])
    }
    facts = BACKENDS[backend]
    build: Build = "gpu" if facts.gpu_package in found else "cpu"
    package_version = found.get(facts.distribution[build])
    return None if package_version is None else (build, package_version)

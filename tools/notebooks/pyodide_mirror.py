"""A mirror of what Pyodide pages need, of packages from npm and PyPI.

Pyodide's distribution lies on its own package mirror. npm has its core, and PyPI has pure wheels
and those that their authors build for Pyodide. Both together serve pages that need nothing else;
numpy, pandas and matplotlib were not among them in November 2026.

    FOLDER/pyodide/   the core, and a lock file that names the wheels beside it
    FOLDER/index/     a package index with the same wheels
"""

from __future__ import annotations

import email
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

PAGE: Final = (
    *("micropip", "packaging", "docutils", "pygments", "jedi", "pyodide-http"),
    *("marimo-base", "black"),
)
"""What every page of marimo loads."""
PYTHON: Final = "3.14"
PLATFORM: Final = "pyemscripten_2026_0_wasm32"
FROM_SOURCE: Final = ("pyyaml",)
"""Without a wheel for Pyodide, and pure Python when built without a C library."""
BROWSER: Final = {
    **{"sys_platform": "emscripten", "platform_system": "Emscripten", "os_name": "posix"},
    **{
        "platform_machine": "wasm32",
        "python_version": PYTHON,
        "python_full_version": f"{PYTHON}.0",
    },
}


def write_mirror(folder: Path, wanted: Iterable[str] = ()) -> None:
    """Fetch Pyodide's core and the wheels of `wanted`, with all that they require.

    Args:
        folder: made if it does not exist.
        wanted: requirements beyond those of every page of marimo.

    Raises:
        RuntimeError: npm or pip failed; PyPI may have no such wheel for Pyodide.
    """
    from marimo import __version__ as marimo_version
    from marimo._pyodide.pyodide_constraints import PYODIDE_VERSION

    core, index = folder / "pyodide", folder / "index"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        _run(["npm", "pack", "--silent", f"pyodide@{PYODIDE_VERSION}"], Path(scratch))
        with tarfile.open(next(Path(scratch).glob("*.tgz"))) as file:
            file.extractall(scratch, filter="data")
        shutil.copytree(Path(scratch) / "package", core, dirs_exist_ok=True)
    marimo = [f"{name}=={marimo_version}" if name == "marimo-base" else name for name in PAGE]
    wheels = download([*marimo, *wanted], core)
    lock = json.loads((core / "pyodide-lock.json").read_text(encoding="utf-8"))
    # Only what lies beside the lock file: the rest would be asked of the network.
    lock["packages"] = {name: _entry(name, wheel, wheels) for name, wheel in wheels.items()}
    (core / "pyodide-lock.json").write_text(json.dumps(lock), encoding="utf-8")
    for name, wheel in wheels.items():
        page = index / name / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        link = f'<a href="../../pyodide/{wheel.name}">{html.escape(wheel.name)}</a>'
        page.write_text(f"<!doctype html>{link}", encoding="utf-8")


def download(wanted: Sequence[str], folder: Path) -> dict[str, Path]:
    """Wheels for Pyodide of these requirements and of all that they require, by project.

    pip cannot pretend to run on another system, so this walks from requirement to requirement.

    Raises:
        RuntimeError: pip found no wheel of one of them.
    """
    found: dict[str, Path] = {}
    pending = [Requirement(each) for each in wanted]
    while pending:
        names = {canonicalize_name(one.name): one for one in pending}
        new = {name: one for name, one in names.items() if name not in found}
        with tempfile.TemporaryDirectory() as scratch:
            for source in [name for name in new if name in FROM_SOURCE]:
                build = ["wheel", "--no-binary", source, *_where(scratch), _text(new[source])]
                _pip(build, {"PYYAML_FORCE_LIBYAML": "0"})
            ready = [_text(one) for name, one in new.items() if name not in FROM_SOURCE]
            if ready:
                platform = ["--platform", PLATFORM, "--platform", "any", "--python-version", PYTHON]
                abi = ["--implementation", "cp", "--abi", "cp314", "--abi", "none"]
                binary = ["--only-binary=:all:", *platform, *abi]
                _pip(["download", *binary, *_where(scratch), *ready])
            for wheel in Path(scratch).glob("*.whl"):
                name = parse_wheel_filename(wheel.name)[0]
                found[name] = Path(shutil.move(wheel, folder / wheel.name))
        pending = [
            one
            for name, asked in new.items()
            for one in requirements_of(found[name], asked.extras)
            if canonicalize_name(one.name) not in found
        ]
    return found


def requirements_of(wheel: Path, extras: Iterable[str] = ()) -> list[Requirement]:
    """What a wheel requires in a browser."""
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        stated = email.message_from_bytes(file.read(name)).get_all("Requires-Dist", [])
    here: dict[str, Any] = {**default_environment(), **BROWSER}
    environments: list[dict[str, str]] = [{**here, "extra": one} for one in ("", *extras)]
    found = [Requirement(each) for each in stated]
    return [
        one
        for one in found
        if one.marker is None or any(one.marker.evaluate(each) for each in environments)
    ]


def _entry(name: str, wheel: Path, wheels: Mapping[str, Path]) -> dict[str, Any]:
    """The wheel in a lock file of Pyodide."""
    depends = {canonicalize_name(one.name) for one in requirements_of(wheel)}
    with zipfile.ZipFile(wheel) as file:
        tops = {part.split("/")[0].removesuffix(".py") for part in file.namelist()}
    return {
        "name": name,
        "version": str(parse_wheel_filename(wheel.name)[1]),
        "file_name": wheel.name,
        "install_dir": "site",
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "package_type": "package",
        "imports": sorted(top for top in tops if re.fullmatch(r"\w+", top)),
        "depends": sorted(depends & wheels.keys()),
        "unvendored_tests": False,
    }


def _text(requirement: Requirement) -> str:
    """The requirement without its marker, which pip would hold against this system."""
    return f"{requirement.name}{requirement.specifier}"


def _where(folder: str) -> list[str]:
    return ["--no-deps", "--quiet", "--disable-pip-version-check", "--dest", folder]


def _pip(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    if arguments[0] == "wheel":
        arguments = ["--wheel-dir" if each == "--dest" else each for each in arguments]
    _run([sys.executable, "-m", "pip", *arguments], None, environment)


def _run(
    command: Sequence[str], folder: Path | None, environment: Mapping[str, str] | None = None
) -> None:
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ... failed:\n{ended.stderr.strip()[-2000:]}")

"""Collect what a GPU machine without a network lacks, as wheels: `make gpu-pack`.

    pyproject.toml: base, train, math, tests --closure--> packages --minus what it has--> wheels
    constraints.txt ------------------------------------> versions       our own wheel --> .whl/

Needs of packages are those of this environment, with the markers of the other machine. A package
that is there in a version which nothing allows is packed too. The folder goes along with the tree;
docs/gpu.md has the command that installs it there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from benchmarks.packaging import build_wheel

ROOT: Final = Path(__file__).parents[1]
IMAGE: Final = Path(__file__).with_name("gpu_image.txt")
PYTHON: Final = "3.12"
EXTRAS: Final = ("train", "math")
TESTS: Final = ("beartype", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
"""What `python -m pytest -m gpu` needs besides."""
PLATFORMS: Final = (
    *("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64"),
    *("manylinux2014_x86_64", "manylinux1_x86_64"),
)
MOST_MIB: Final = 64
"""Of the tree and the wheels together."""
_MARKERS: Final = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": f"{PYTHON}.3",
    "python_version": PYTHON,
    "sys_platform": "linux",
}


@dataclass(slots=True)
class Need:
    """A package, and which of its versions its dependents allow."""

    allowed: SpecifierSet = field(default_factory=SpecifierSet)
    needs_torch: bool = False


def needed(requirements: Iterable[str]) -> dict[str, Need]:
    """The packages that these requirements bring, by canonical name."""
    found: dict[str, Need] = {}
    dependents: dict[str, set[str]] = {}
    waiting = [(Requirement(text), "") for text in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        one, by = waiting.pop()
        name = canonicalize_name(one.name)
        need = found.setdefault(name, Need())
        need.allowed &= one.specifier
        dependents.setdefault(name, set()).add(by)
        for extra in ("", *one.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in _requires(name):
                more = Requirement(text)
                if more.marker is None or more.marker.evaluate({**_MARKERS, "extra": extra}):
                    # Without an extra, those of the package itself have been seen.
                    waiting.append((more, name))
    above = ["torch"]
    while above:
        dependent = above.pop()
        if dependent in found and not found[dependent].needs_torch:
            found[dependent].needs_torch = True
            above += dependents[dependent]
    return found


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:  # needed there only, such as the kernels of a CUDA build
        return []


def missing(needs: Mapping[str, Need], has: Mapping[str, str]) -> list[str]:
    """Needed packages that are not there, or in a version that is not allowed.

    Args:
        has: version of each package that is there; empty if unknown.
    """
    return sorted(
        name
        for name, need in needs.items()
        if name not in has or (has[name] and not need.allowed.contains(has[name], prereleases=True))
    )


def pins(text: str) -> dict[str, str]:
    """Versions by name, of lines `name==version` or `name`."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    parts = (line.partition("==") for line in lines if line)
    return {canonicalize_name(name): version for name, _, version in parts}


def own_requirements(project: Path = ROOT / "pyproject.toml") -> list[str]:
    """What a run and the tests on a GPU need."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    optional = table["optional-dependencies"]
    known = (*optional["test"], *optional["dev"])
    tests = [text for text in known if Requirement(text).name in TESTS]
    return [*table["dependencies"], *(text for extra in EXTRAS for text in optional[extra]), *tests]


def tree_bytes(root: Path = ROOT) -> int:
    """Bytes of the files that git knows or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    files = (root / name for name in listed.split("\0") if name)
    return sum(file.stat().st_size for file in files if file.is_file())


def check_size(tree: int, wheels: int, most_mib: float = MOST_MIB) -> None:
    """Refuse what does not fit.

    Raises:
        ValueError: with both sizes.
    """
    most = most_mib * 2**20
    if tree + wheels > most:
        raise ValueError(
            f"the tree has {tree / 2**20:.1f} MiB and the wheels {wheels / 2**20:.1f}, together "
            f"more than {most_mib:g}; move large untracked files away, or raise --most-mib"
        )


def download(names: Sequence[str], versions: Mapping[str, str], folder: Path) -> None:
    """Fetch wheels for the other machine.

    Raises:
        ValueError: a package has no version in constraints.txt.
    """
    unknown = [name for name in names if not versions.get(name)]
    if unknown:
        raise ValueError(
            f"constraints.txt has no version of {', '.join(unknown)}, which the GPU machine lacks; "
            "add one"
        )
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--only-binary=:all:", "--implementation", "cp"),
            *("--python-version", PYTHON, *platforms, "--dest", str(folder)),
            *(f"{name}=={versions[name]}" for name in names),
        ],
        check=True,
    )


def find_python() -> str | None:
    """A Python of the other machine's version that runs here."""
    path = shutil.which(f"python{PYTHON}")
    if path is None:
        return None
    asked = subprocess.run(
        [path, "-c", "import ensurepip"], capture_output=True, check=False
    )  # a shim may stand for a version that is not chosen
    return path if asked.returncode == 0 else None


def try_imports(
    python: str, folder: Path, needs: Mapping[str, Need], versions: Mapping[str, str]
) -> list[str]:
    """Install the wheels as the other machine will, and import what does not need torch.

    Its own packages are installed before, without torch and what needs it.

    Returns:
        The imported modules.
    """
    packed = {canonicalize_name(wheel.name.split("-")[0]) for wheel in folder.glob("*.whl")}
    there = [n for n, need in needs.items() if n not in packed and not need.needs_torch]
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
    script = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    with tempfile.TemporaryDirectory(prefix="gpu-pack-") as made:
        own = str(Path(made, "venv", "bin", "python"))
        site = str(Path(made, "site"))
        subprocess.run([python, "-m", "venv", str(Path(made, "venv"))], check=True)
        known = [f"{name}=={versions[name]}" for name in there if versions.get(name)]
        subprocess.run([own, *pip, *known], check=True)
        wheels = [str(wheel) for wheel in folder.glob("*.whl")]
        subprocess.run([own, *pip, "--no-index", "--target", site, *wheels], check=True)
        without_torch = {name for name in packed if name in needs and not needs[name].needs_torch}
        modules = sorted({_module(name) for name in without_torch})
        modules += ["areal_lab.cli.app", "areal_lab.resolve.resolved", "simulator"]
        subprocess.run(
            [own, "-c", script, *modules], check=True, cwd=made, env={"PYTHONPATH": site}
        )
    return modules


def _module(package: str) -> str:
    named = {"antlr4-python3-runtime": "antlr4", "opentelemetry-api": "opentelemetry.trace"}
    return named.get(package, package.replace("-", "_"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Collect, check and try the wheels."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_pack", description=__doc__)
    parser.add_argument("--has", type=Path, default=IMAGE, metavar="FILE")
    parser.add_argument("--to", type=Path, default=ROOT / ".whl", metavar="FOLDER")
    parser.add_argument("--most-mib", type=float, default=MOST_MIB)
    parser.add_argument("--list", action="store_true", help="print what is missing, and end")
    given = parser.parse_args(arguments)
    try:
        _pack(given.has, given.to, most_mib=given.most_mib, only_list=given.list)
    except (ValueError, OSError) as error:
        print(f"gpu-pack: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"gpu-pack: {' '.join(error.cmd[:5])} ... ended with {error.returncode}",
              file=sys.stderr)  # fmt: skip
        return 1
    return 0


def _pack(has: Path, to: Path, *, most_mib: float, only_list: bool) -> None:
    needs = needed(own_requirements())
    there = pins(has.read_text(encoding="utf-8"))
    versions = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    names = missing(needs, there)
    print(f"{len(names)} of {len(needs)} packages are missing there: {', '.join(names)}")
    for name in names:
        if there.get(name):
            print(f"{name} {there[name]} is there, but {needs[name].allowed} is needed")
    if only_list:
        return
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    print(f"downloading {len(names)} wheels for Python {PYTHON}", flush=True)
    download(names, versions, to)
    with tempfile.TemporaryDirectory(prefix="gpu-pack-") as made:
        shutil.copy(build_wheel(Path(made)), to)
    size, tree = sum(wheel.stat().st_size for wheel in to.iterdir()), tree_bytes()
    check_size(tree, size, most_mib)
    print(
        f"{to}: {len(list(to.iterdir()))} wheels, {size / 2**20:.1f} MiB; with the tree "
        f"{(tree + size) / 2**20:.1f} of {most_mib:g} MiB"
    )
    python = find_python()
    if python is None:
        print(f"not tried: no python{PYTHON} that runs is on the PATH")
        return
    print(f"trying the wheels with {python}", flush=True)
    print(f"imported: {', '.join(try_imports(python, to, needs, versions))}")


if __name__ == "__main__":
    sys.exit(main())

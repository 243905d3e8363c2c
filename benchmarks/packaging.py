"""Cost of an installation: megabytes on disk, seconds to import, seconds to a first line.

    tree --copy, pip wheel--> wheel --pip install--> a new virtual environment for the base and
                                                     each extra, with the same measurements in each

`disk_mb` is what installing adds to an empty environment, compiled Python files included, and
`largest` lists the largest packages. `help_cpu_s` is CPU time of `areal-lab --help`,
`first_line_s` wall time until `areal-lab simulate --preset small` has printed a line, both in
the base install. Versions are those of constraints.txt. With `--quick` only the base is installed.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.harness import parse, repeat, report, spread

ROOT: Final = Path(__file__).resolve().parents[1]
IMPORTS: Final = {
    "base": ("areal_lab", "simulator", "simulator.assembly.simulate"),
    "train": ("areal_lab", "simulator", "areal_lab.functional", "areal_lab.pipeline.train"),
    "notebooks": ("areal_lab", "simulator", "marimo"),
    "tensorboard": ("areal_lab", "tensorboard"),
    "math": ("areal_lab", "math_verify"),
    "json": ("areal_lab", "jsonschema"),
    "search": ("areal_lab", "bm25s"),
    "mcp": ("areal_lab", "mcp"),
    "openenv": ("areal_lab", "websockets"),
    "reasoning-gym": ("areal_lab", "reasoning_gym"),
    "textarena": ("areal_lab", "textarena"),
    "openai": ("areal_lab", "openai"),
    "wandb": ("areal_lab", "wandb"),
    "swanlab": ("areal_lab", "swanlab"),
    "trackio": ("areal_lab", "trackio"),
    "ray": ("areal_lab", "ray"),
    "fast": ("areal_lab", "simulator.run.compiled_loop"),
    "test": ("areal_lab", "pytest", "hypothesis"),
    "dev": ("areal_lab", "simulator", "areal_lab.functional"),
}
"""Modules to import in each installation; all but `base` are extras."""
_SOURCES: Final = ("pyproject.toml", "README.md", "LICENSE", "areal_lab", "cosim", "simulator")
_LARGEST: Final = 8
_TELL_S: Final = 15.0
"""Seconds between two progress lines of a long command."""


def build_wheel(folder: Path) -> Path:
    """The wheel of this tree, built from a copy to keep the tree clean.

    Raises:
        RuntimeError: with the output of the build, if there is no wheel.
    """
    tree = folder / "tree"
    tree.mkdir()
    for name in _SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    _run([sys.executable, "-m", "pip", "wheel", *options, str(tree)], "building the wheel")
    return next(folder.glob("*.whl"))


@dataclass(frozen=True, slots=True)
class Installation:
    """A Python environment with areal_lab."""

    bin: Path
    packages: Path
    """The site-packages folder."""

    def largest(self) -> dict[str, float]:
        """Megabytes of the largest entries of site-packages, by name."""
        sizes = {one.name: disk_bytes(one) / 1e6 for one in self.packages.iterdir()}
        return dict(sorted(sizes.items(), key=lambda item: -item[1])[:_LARGEST])

    def import_s(self, module: str) -> float:
        """Wall seconds to import a module in a new process, without Python's startup."""
        script = f"import time; t = time.perf_counter(); import {module}; "
        output = self._output("python", "-c", f"{script}print(time.perf_counter() - t)")
        return float(output.splitlines()[-1])

    def help_cpu_s(self) -> float:
        """CPU seconds of `areal-lab --help`."""
        before_s = _children_cpu_s()
        self._output("areal-lab", "--help")
        return _children_cpu_s() - before_s

    def first_line_s(self) -> float:
        """Wall seconds until `areal-lab simulate --preset small` has printed a line."""
        began_s = time.perf_counter()
        with subprocess.Popen(
            [str(self.bin / "areal-lab"), "simulate", "--preset", "small"],
            stdout=subprocess.PIPE,
            cwd=self.bin,
            env=_environment(),
        ) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            took_s = time.perf_counter() - began_s
            process.stdout.read()
        if process.returncode or not line.strip():
            raise RuntimeError(f"areal-lab simulate ended with {process.returncode}")
        return took_s

    def _output(self, program: str, *arguments: str) -> str:
        return subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=self.bin,  # in the tree, its packages would be imported instead
            env=_environment(),
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout


def disk_bytes(path: Path) -> int:
    """Size of a file or folder on disk, in whole blocks; hard links count once."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    status = {(one.st_dev, one.st_ino): one for one in (file.lstat() for file in files)}
    return sum(one.st_blocks * 512 for one in status.values())


def install(folder: Path, wheel: Path, extra: str) -> Installation:
    """A new virtual environment with the wheel and one extra, or `base` for none."""
    # Without pip, which takes longer to install than some extras.
    venv.create(folder, symlinks=True)
    wanted = str(wheel) if extra == "base" else f"{wheel}[{extra}]"
    pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"))
    options = ("--constraint", str(ROOT / "constraints.txt"))
    _run([*pip, "install", *options, wanted], f"installing {extra}")
    (packages,) = folder.glob("lib/python3*/site-packages")
    return Installation(folder / "bin", packages)


def measure(extras: Sequence[str], repeats: int) -> dict[str, Any]:
    """Measure each installation."""
    figures: dict[str, Any] = {"rows": [], "largest": {}, "spread": {}}
    with TemporaryDirectory(prefix="areal_lab-packaging-") as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        figures["wheel_kb"] = wheel.stat().st_size / 1e3
        for extra in extras:
            found = install(folder / extra, wheel, extra)
            times = {
                f"import {module}": spread(repeat(partial(found.import_s, module), repeats))
                for module in IMPORTS[extra]
            }
            row = {
                "install": extra,
                "packages": len(list(distributions(path=[str(found.packages)]))),
                "disk_mb": round(disk_bytes(found.packages) / 1e6, 1),
            }
            figures["rows"].append({**row, **{one: t["median"] for one, t in times.items()}})
            figures["largest"][extra] = found.largest()
            figures["spread"] |= {f"{extra}: {one}": t for one, t in times.items()}
            if extra == "base":
                measured = {"help_cpu_s": found.help_cpu_s, "first_line_s": found.first_line_s}
                spreads = {
                    one: spread(repeat(measure, repeats)) for one, measure in measured.items()
                }
                figures["spread"] |= spreads
                figures |= {one: found["median"] for one, found in spreads.items()}
                figures["base_disk_mb"] = row["disk_mb"]
            shutil.rmtree(folder / extra)  # all of them together could fill the disk
    return figures


def _run(command: Sequence[str], what: str) -> None:
    """Run a command that may take minutes; its output is shown if it fails.

    Raises:
        RuntimeError: with that output.
    """
    began_s = time.monotonic()
    print(what, file=sys.stderr, flush=True)
    with TemporaryDirectory() as name, (Path(name) / "output").open("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=_environment()
        )
        while process.returncode is None:
            try:
                process.wait(timeout=_TELL_S)
            except subprocess.TimeoutExpired:
                passed_s = time.monotonic() - began_s
                print(f"{what}: {passed_s:.0f} s so far", file=sys.stderr, flush=True)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"{what} failed:\n{output.read()[-4000:]}")


def _environment() -> dict[str, str]:
    """This process's environment without variables that change Python's module path."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Read the command line, measure, report."""
    arguments = parse(__doc__)
    extras = ("base",) if arguments.quick else tuple(IMPORTS)
    report(measure(extras, arguments.repeats), arguments)


if __name__ == "__main__":
    main()

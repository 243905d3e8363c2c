"""The wheel: it has every file of the packages, and works without the tree."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.packaging import build_wheel

ROOT = Path(__file__).parents[1]
PACKAGES = ("areal_lab", "cosim", "simulator")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(folder)
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for package in PACKAGES
        for path in (folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_every_file_of_the_packages(installed: Path) -> None:
    assert files(installed) == files(ROOT)
    folders = {path.name for path in installed.iterdir() if path.is_dir()}
    assert folders.isdisjoint({"tests", "benchmarks", "reproductions", "tools", "configs"})


def test_it_works_without_the_tree(installed: Path, tmp_path: Path) -> None:
    script = (
        "import areal_lab, simulator\n"
        "from areal_lab.engines.launch import backends, environments\n"
        f"assert areal_lab.__file__.startswith({str(installed)!r}), areal_lab.__file__\n"
        "areal_lab.load_config('arithmetic')\n"
        "simulator.simulate(simulator.load_simulation('small'))\n"
        "simulator.load_plan('plan_example')\n"
        "assert (backends.SHIM / 'sitecustomize.py').is_file()\n"
        "assert (backends.VLLM_EXTENSION / 'areal_lab_vllm.py').is_file()\n"
        "assert environments.pinned(environments.requirements_file('sglang', 'cpu'))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr

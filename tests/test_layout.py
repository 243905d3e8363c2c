"""The layout of the tree: small packages without repeated names, each with a docstring."""

from __future__ import annotations

import ast
import subprocess
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("areal_lab", "cosim", "simulator", "tools", "benchmarks", "reproductions")
MOST_MODULES = 20
INDEXES = {"areal_lab", "areal_lab/functional", "simulator"}
"""The only packages that re-export names."""


def modules() -> list[Path]:
    """The Python files that git knows or would add, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = (Path(line) for line in listed.stdout.splitlines())
    existing = [file for file in files if file.suffix == ".py" and (ROOT / file).exists()]
    return sorted(existing, key=lambda file: (file.parent, file.name))


ROOMS = {
    room: [file for file in files if file.name != "__init__.py"]
    for room, files in groupby(modules(), key=lambda file: file.parent)
}
LAUNCH = Path("areal_lab/engines/launch")
IN_ENGINES = {LAUNCH / "sglang_shim", LAUNCH / "vllm_extension"}
"""Folders on the path of an engine's process; `areal_lab` does not import them."""
PACKAGE_INITS = [file for file in modules() if file.name == "__init__.py"]


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_a_room_has_a_readable_number_of_modules(room: Path) -> None:
    assert len(ROOMS[room]) <= MOST_MODULES


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_no_file_repeats_the_name_of_its_room(room: Path) -> None:
    repeated = {room.name, room.name.removesuffix("s")}
    for file in ROOMS[room]:
        assert file.stem != room.name
        assert file.stem.split("_")[0] not in repeated or "_" not in file.stem, file


@pytest.mark.parametrize("room", sorted(ROOMS.keys() - IN_ENGINES), ids=str)
def test_a_room_has_a_docstring(room: Path) -> None:
    text = (ROOT / room / "__init__.py").read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("init", PACKAGE_INITS, ids=str)
def test_only_the_three_indexes_re_export_names(init: Path) -> None:
    tree = ast.parse((ROOT / init).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not imports or str(init.parent) in INDEXES or "sgl_kernel" in init.parts

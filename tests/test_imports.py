"""Import rules that import-linter cannot check, in a new interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "areal_lab"
CONTROL = [*sorted((PACKAGE / "control").glob("*.py")), PACKAGE / "capacity.py"]
PURE = {
    *("__future__", "abc", "bisect", "collections", "dataclasses", "enum", "fractions"),
    *("functools", "heapq", "itertools", "json", "math", "operator", "types", "typing"),
}


def imported_modules(path: Path) -> set[str]:
    """Top-level names of all imports of a file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or ".")
    return names


@pytest.mark.parametrize("path", CONTROL, ids=lambda path: path.name)
def test_control_imports_pure_standard_library_and_itself_only(path: Path) -> None:
    allowed = {name for name in imported_modules(path) if name.split(".")[0] in PURE}
    own = ("areal_lab.control", "areal_lab.capacity")
    allowed |= {name for name in imported_modules(path) if name.startswith(own)}
    assert imported_modules(path) - allowed == set()


@pytest.mark.parametrize(
    "module",
    [
        "areal_lab",
        "areal_lab.config.schema",
        "areal_lab.host.processes",
        "areal_lab.control.schedule",
        "areal_lab.data.trajectory",
        "areal_lab.engines.protocol",
        "areal_lab.training.protocol",
    ],
)
def test_light_modules_do_not_load_torch(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'torch', 'numpy'}} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"

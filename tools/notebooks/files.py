"""The notebooks as files: which there are, their headers, their prose in the order of the page."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "notebooks"

NAMES: Final = (
    "01_ratio_and_clip",
    "02_advantages",
    "03_staleness",
    "04_speedup",
    "05_buy_a_cluster",
    "06_train_live",
    "07_trajectories",
    "08_custom_loss",
    "09_response_lengths",
    "10_does_staleness_hurt",
    "11_how_stale_may_it_be",
    "12_your_own_run",
)

WITH_TORCH: Final = {
    "01_ratio_and_clip",
    "02_advantages",
    "08_custom_loss",
    "10_does_staleness_hurt",
}
"""Notebooks whose own process computes with torch; the others may not load it, not even late."""

THUMBNAIL_PX: Final = (640, 335)
"""Width and height of the picture of a card."""

_HEADER = re.compile(r"^# /// script$\n(?P<body>(?:^#(?: .*)?$\n)+?)^# ///$", re.MULTILINE)


def existing() -> list[str]:
    """Names of the notebooks in the folder, in the order of the gallery."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def thumbnail(name: str) -> Path:
    """Where marimo looks for the picture of a notebook's card."""
    return FOLDER / "__marimo__" / "assets" / name / "opengraph.png"


def source(name: str) -> str:
    """The text of a notebook."""
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def header(text: str) -> dict[str, Any]:
    """What the PEP 723 block at the top of a script says.

    Raises:
        ValueError: if there is no such block.
    """
    found = _HEADER.match(text)
    if found is None:
        raise ValueError('the file does not begin with a PEP 723 block ("# /// script")')
    lines = found["body"].splitlines()
    return tomllib.loads("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines))


def app_title(text: str) -> str | None:
    """`app_title` of `marimo.App(...)`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("App"):
            for keyword in node.keywords:
                if keyword.arg == "app_title" and isinstance(keyword.value, ast.Constant):
                    return str(keyword.value.value)
    return None


def prose(text: str) -> list[str]:
    """Paragraphs of all `mo.md(...)`, top to bottom; `{}` stands where a value is filled in."""
    calls = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "mo.md" and node.args
    ]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    pieces = (_literal(call.args[0]) for call in calls)
    paragraphs = (part.strip() for piece in pieces for part in re.split(r"\n\s*\n", piece))
    return [paragraph for paragraph in paragraphs if paragraph]


def headings(text: str) -> list[str]:
    """The headings of the page, such as `## Try this`."""
    lines = (line.strip() for paragraph in prose(text) for line in paragraph.splitlines())
    return [line for line in lines if re.match(r"#{1,6} ", line)]


def setup_imports(text: str) -> list[tuple[str, list[str]]]:
    """Modules that a notebook's setup imports, in its order, each with the names taken from it."""
    found: list[tuple[str, list[str]]] = []
    setups = (part for part in ast.parse(text).body if isinstance(part, ast.With))
    for node in (node for setup in setups for node in setup.body):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.module, [alias.name for alias in node.names]))
    return found


def _literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return _literal(node.left) + _literal(node.right)
    return ""

"""Check the layout of the tree, and print its lines by room: `python -m tools.layout`.

A room may grow by 3 %, or 100 lines, over what `tools/room_lines.json` recorded (`--record`
rewrites it, at a release). Growth beyond that needs a line in CHANGELOG.md, under
"Unreleased", with the new size and what it buys:

    - `areal_lab/data`, 3,400 lines: reads data sets made for verl.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
RECORDED: Final = Path(__file__).with_name("room_lines.json")
WORLDS: Final = ("areal_lab", "cosim", "simulator")
"""Packages of the product; the folders in them are rooms."""
PACKAGES: Final = (*WORLDS, "tools", "benchmarks", "reproductions")
INDEXES: Final = {Path("areal_lab"), Path("areal_lab/functional"), Path("simulator")}
"""The only packages that re-export names."""
LAUNCH: Final = Path("areal_lab/engines/launch")
OTHER_PYTHONS: Final = {
    LAUNCH / "sglang_shim",
    LAUNCH / "vllm_extension",
    Path("areal_lab/data/runners/standards"),
}
"""Folders of processes with another Python; `areal_lab` does not import them."""
MOST_MODULES: Final = 30
GROWTH: Final = 1.03
GROWTH_LINES: Final = 100
MAPS: Final = ("docs/contributing.md", "docs/design.md")


def python_files(root: Path = ROOT) -> list[Path]:
    """Python files that git knows or would add, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES, "tests"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    files = (Path(line) for line in listed.stdout.splitlines())
    return sorted(file for file in files if file.suffix == ".py" and (root / file).exists())


def room_of(file: Path) -> str:
    """Return the room of a file: a folder of areal_lab, simulator or tests, or a whole package."""
    deep = len(file.parts) > 2 and file.parts[0] in ("areal_lab", "simulator", "tests")
    return "/".join(file.parts[: 2 if deep else 1])


def room_lines(files: Iterable[Path], root: Path = ROOT) -> Counter[str]:
    """Count the lines of each room."""
    lines: Counter[str] = Counter()
    for file in files:
        lines[room_of(file)] += (root / file).read_bytes().count(b"\n")
    return lines


def unnamed_growth(
    lines: Mapping[str, int], recorded: Mapping[str, int], changelog: str
) -> list[str]:
    """Return a problem for each room that grew further than the changelog names."""
    unreleased = changelog.partition("## Unreleased")[2].partition("\n## ")[0]
    stated = re.findall(r"^- `([\w/]+)`, ([\d,]+) lines: \S", unreleased, re.MULTILINE)
    named = {room: int(number.replace(",", "")) for room, number in stated}
    return [
        f"{room} has {now:,} lines, {recorded.get(room, 0):,} were recorded: shrink it, or name "
        f"the growth in CHANGELOG.md: - `{room}`, {now:,} lines: what it buys"
        for room, now in sorted(lines.items())
        if now > _allowed(max(recorded.get(room, 0), named.get(room, 0)))
    ]


def _allowed(lines: int) -> float:
    return max(GROWTH * lines, lines + GROWTH_LINES)


def misplaced(files: Sequence[Path], root: Path = ROOT) -> list[str]:
    """Return a problem for each package that breaks a rule of docs/design.md."""
    found = []
    for room in sorted({file.parent for file in files if file.parts[0] in PACKAGES}):
        names = [file.stem for file in files if file.parent == room and file.stem != "__init__"]
        if len(names) > MOST_MODULES:
            found.append(f"{room} has {len(names)} modules; at most {MOST_MODULES}")
        repeated = {room.name, room.name.removesuffix("s")}
        found += [
            f"{room}/{name}.py repeats the name of its folder"
            for name in names
            if name == room.name or ("_" in name and name.split("_")[0] in repeated)
        ]
        if room in OTHER_PYTHONS or any(above in OTHER_PYTHONS for above in room.parents):
            continue
        init = root / room / "__init__.py"
        tree = ast.parse(init.read_text(encoding="utf-8") if init.exists() else "")
        if not ast.get_docstring(tree):
            found.append(f"{room}/__init__.py needs a sentence that says what the room is for")
        imports = any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree))
        if imports and room not in INDEXES:
            found.append(f"{room}/__init__.py imports; only {len(INDEXES)} indexes re-export")
    return found


def missing_in_maps(files: Iterable[Path], maps: Mapping[str, str]) -> list[str]:
    """Return a problem for each room that no drawing of a page names, as a word or as `name/`.

    Args:
        files: the Python files of the tree.
        maps: text of each page; a drawing is a block of code without a language. If the drawing of
            a page has lines that begin with `name/`, each room needs one.
    """
    rooms = {room_of(file) for file in files if file.parts[0] in WORLDS} | {*WORLDS}
    found = []
    for page, text in maps.items():
        drawn = "\n".join(re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
        listed = set(re.findall(r"^ *(\w+)/(?: |$)", drawn, re.MULTILINE))
        names = listed or set(re.findall(r"\w+", drawn))
        found += [
            f"{page}: its drawing does not name {room}"
            for room in sorted(rooms)
            if room.rpartition("/")[2] not in names
        ]
    return found


def problems(root: Path = ROOT) -> list[str]:
    """Return all that is wrong with the layout, one line each."""
    files = python_files(root)
    return [
        *misplaced(files, root),
        *missing_in_maps(files, {page: (root / page).read_text("utf-8") for page in MAPS}),
        *unnamed_growth(
            room_lines(files, root),
            json.loads(RECORDED.read_text("utf-8")),
            (root / "CHANGELOG.md").read_text("utf-8"),
        ),
    ]


def main() -> int:
    """Print lines by room and all problems; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.layout", description="Check the layout.")
    parser.add_argument("--record", action="store_true", help="record today's lines by room")
    record = parser.parse_args().record
    lines = room_lines(python_files())
    if record:
        RECORDED.write_text(json.dumps(dict(sorted(lines.items())), indent=1) + "\n", "utf-8")
    recorded = json.loads(RECORDED.read_text("utf-8"))
    for package in (*PACKAGES, "tests"):
        rooms = sorted(room for room in lines if room.split("/")[0] == package)
        print(f"{package}: {sum(lines[room] for room in rooms):,} lines")
        inner = [room for room in rooms if "/" in room]
        shown = [f"{room.partition('/')[2]} {_size(room, lines, recorded)}" for room in inner]
        text = textwrap.wrap(" · ".join(item.replace(" ", "\0") for item in shown), 96)
        print(*(f"  {line}\n".replace("\0", " ") for line in text), sep="", end="")
    found = problems()
    print(*found, sep="\n", file=sys.stderr)
    return 1 if found else 0


def _size(room: str, lines: Mapping[str, int], recorded: Mapping[str, int]) -> str:
    change = lines[room] - recorded.get(room, 0)
    return f"{lines[room]:,}" + (f" ({change:+,})" if change else "")


if __name__ == "__main__":
    sys.exit(main())

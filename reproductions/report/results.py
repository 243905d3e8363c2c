"""Results that are packaged, so that a notebook shows them at once: `results/NAME.json`.

python -m reproductions.NAME --save --> results/NAME.json --load--> Saved, with who made it and how
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import Arguments, recorded
from reproductions.report.records import Reproduction, Row, to_json

RESULTS: Final = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A packaged result."""

    rows: tuple[Row, ...]
    why: tuple[str, ...]
    """Assumptions, and the best explanation of each gap."""
    sensitivity: tuple[Mapping[str, Any], ...]
    """The same numbers under other assumptions."""
    data: Mapping[str, Any]
    """Numbers behind the rows."""
    seeds: int
    command: str
    version: str
    """Of areal_lab."""
    date: str
    """ISO 8601."""
    wall_s: float
    """How long the command took."""
    cpu: str
    """Name of the processor."""
    cores: int

    def row(self, name: str) -> Row:
        """The row with this name.

        Raises:
            KeyError: there is none; with the names that there are.
        """
        found = {row.name: row for row in self.rows}
        if name not in found:
            raise KeyError(f"no row {name!r}; there are {', '.join(found)}")
        return found[name]

    @property
    def origin(self) -> str:
        """Who made it and how, in a line."""
        return (
            f"{self.seeds} seeds, `{self.command}`, areal_lab {self.version}, {self.date[:10]}, "
            f"{self.cpu}, {self.cores} cores"
        )


def save(result: Reproduction, arguments: Arguments) -> Path:
    """Write a result with its command, machine, date and version.

    Raises:
        ValueError: of a quick run, whose numbers are no result.
    """
    if arguments.quick:
        raise ValueError("--save keeps no results of --quick; leave one of them out")
    record = recorded({**to_json(result), "version": version("areal_lab")}, arguments)
    path = RESULTS / f"{result.name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def load(name: str) -> Saved:
    """The packaged result of a reproduction.

    Raises:
        ValueError: there is none.
    """
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        module = _module_of(name)
        raise ValueError(f"{path} is missing; make it: python -m {module} --save")
    record = json.loads(path.read_text(encoding="utf-8"))
    return Saved(
        rows=tuple(map(Row.from_json, record["rows"])),
        why=tuple(record["why"]),
        sensitivity=tuple(record["sensitivity"]),
        data=record["data"],
        seeds=record["repeats"],
        command=record["command"],
        version=record["version"],
        date=record["date"],
        wall_s=record["wall_s"],
        cpu=record["machine"]["cpu"],
        cores=record["machine"]["cores"],
    )


def _module_of(name: str) -> str:
    """The program that makes a result; some are in a room of their own."""
    package = RESULTS.parent
    found = next(package.rglob(f"{name}.py"), package / f"{name}.py")
    return ".".join(found.relative_to(package.parent).with_suffix("").parts)

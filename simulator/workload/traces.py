"""Traces: observed response lengths, shipped with the package or from a CSV file of your own.

The shipped ones (`simulator/workload/data`) have one row per bin, and a header with their source
and license; `simulator.workload.length_table` says what your own file may look like.
"""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from typing import Final

from areal_lab.config.suggest import did_you_mean, plain
from simulator.workload.histogram import Histogram
from simulator.workload.length_table import read_table

_DATA: Final = Path(__file__).parent / "data"
_TABLES: Final = {".csv", ".tsv", ".txt"}


def traces() -> dict[str, str]:
    """Names of the shipped traces, and what each has, in a sentence."""
    return {name: _shipped(path).source.splitlines()[0] for name, path in _files().items()}


def load_histogram(name: str) -> Histogram:
    """A shipped trace, or one from the user's CSV file.

    Args:
        name: a name of `traces`, in any case and punctuation, or a CSV file.

    Raises:
        ValueError: one line: no such name (with the nearest one), or a broken file, with its line.
    """
    if not name:
        raise ValueError(f"no trace is given; known names are {', '.join(_files())}")
    if Path(name).suffix.lower() in _TABLES:
        return read_histogram(Path(name))
    known = {plain(one): path for one, path in _files().items()}
    if plain(name) not in known:
        raise ValueError(
            f"unknown trace {name!r}; {did_you_mean(name, _files())} "
            "(the path of your own CSV file also works)"
        )
    return _shipped(known[plain(name)])


def read_histogram(path: Path) -> Histogram:
    """The lengths in a CSV file."""
    return _read(path, path.stat().st_mtime_ns if path.is_file() else 0)


def text_of(path: Path) -> str:
    """The text of a CSV file.

    Raises:
        ValueError: one line: there is none, or it is not text.
    """
    if not path.is_file():
        raise ValueError(f"trace {path} does not exist (looked in {Path.cwd()})")
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"trace {path} cannot be read: {error}") from error


def _files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_DATA.glob("*.csv"))}


@lru_cache(maxsize=8)
def _read(path: Path, changed_ns: int) -> Histogram:  # noqa: ARG001
    """Read a file once: every check of a config needs it, and `changed_ns` expires old ones."""
    return read_table(text_of(path), name=str(path)).histogram


@cache
def _shipped(path: Path) -> Histogram:
    return read_histogram(path)

"""Count the functions that a setting passes from `train` to its uses: `python -m tools.stays`.

Way of counting: one step of the configuration `tiny` is trained, and each read of the setting in
the process of `train` records the product's functions on the stack, from the outermost one inward.
Paths that were seen before are left out. A reader who follows the others in their order goes from
one to the next by way of the last function that both have in common:

    stays     functions entered on this way, comprehensions and lambdas left out
    rooms     folders of these functions
    returns   times that the way enters a room that it was in before

Engines and the trainer get their settings as values; what they do with them is not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from itertools import groupby, takewhile
from operator import attrgetter, eq
from pathlib import Path
from types import FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
WORLDS: Final = ("areal_lab", "cosim", "simulator")
SETTINGS: Final = ("rollout.backend", "actor.path", "gconfig.max_new_tokens")

Stay = tuple[str, str]
"""File, relative to the root, and function."""


def way_of(paths: Iterable[tuple[Stay, ...]]) -> list[Stay]:
    """Join the paths to the reads of a setting into one way."""
    way: list[Stay] = []
    before: tuple[Stay, ...] = ()
    for path in dict.fromkeys(paths):
        same = takewhile(bool, map(eq, path, before))
        way += path[len(list(same)) :]
        before = path
    return way


def product_functions() -> tuple[Stay, ...]:
    """Return the functions of the product on the stack of the caller's caller, outermost first."""
    found: list[Stay] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if file.is_relative_to(ROOT) and not name.startswith("<"):
            relative = file.relative_to(ROOT)
            if relative.parts[0] in WORLDS:
                found.append((str(relative), name))
        frame = frame.f_back
    return tuple(reversed(found))


def read_paths(group: type, name: str, config: object) -> list[tuple[Stay, ...]]:
    """Train with the config, and record the path to each read of a field of this group."""
    from areal_lab.pipeline.train import train  # torch and transformers come with it

    paths: list[tuple[Stay, ...]] = []

    def recorded(record: object, field: str) -> Any:
        if field == name:
            paths.append(product_functions())
        return object.__getattribute__(record, field)

    group.__getattribute__ = recorded  # type: ignore[method-assign,assignment]  # put back below
    try:
        train(config).start().wait()  # type: ignore[arg-type]  # a TrainConfig
    finally:
        del group.__getattribute__
    return paths


def main() -> None:
    """Print one line for each setting."""
    from areal_lab.config.load import load_config

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("settings", nargs="*", default=SETTINGS, help="as rollout.backend")
    options = parser.parse_args()
    for setting in options.settings:
        groups, _, name = setting.rpartition(".")
        with tempfile.TemporaryDirectory() as runs:
            config = load_config("tiny", ["total_train_steps=1", f"run_dir={runs}"])
            group = attrgetter(groups)(config) if groups else config
            way = way_of(read_paths(type(group), name, config))
        rooms = [room for room, _ in groupby(str(Path(file).parent) for file, _ in way)]
        once = len(set(rooms))
        print(f"{setting}: {len(way)} stays in {once} rooms, {len(rooms) - once} returns")
        print("\n".join(f"    {file}: {function}" for file, function in way))


if __name__ == "__main__":
    main()

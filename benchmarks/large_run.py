"""A run folder of any number of tokens, tiled from a recorded one: real texts and training fields.

    python -m benchmarks.large_run INTO [--tokens 500000] [--source notebooks/data/haiku-eta4]

Repetition `k` has the steps, groups and versions of the source behind those of the repetition
before, so that lags stay as they are. The log, metrics and settings are those of the source.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from areal_lab.runlog.appended import read_appended

RECORDED: Final = Path(__file__).parents[1] / "notebooks" / "data" / "haiku-eta4"
TOKENS: Final = 500_000


def tile_run(source: Path, into: Path, *, tokens: int = TOKENS) -> int:
    """Write a run folder with at least that many tokens, to the end of a step.

    Returns:
        The number of its response tokens.

    Raises:
        ValueError: if the source has no trajectories.
        FileExistsError: if `into` exists.
    """
    files = sorted((source / "trajectories").glob("step-*.jsonl*"))
    if not files:
        raise ValueError(f"{source} has no trajectories to tile")
    steps = [[json.loads(line) for line in read_appended(file).lines] for file in files]
    groups = 1 + max(line["group"] for step in steps for line in step)
    into.mkdir(parents=True)
    (into / "trajectories").mkdir()
    for file in source.iterdir():
        if file.suffix == ".gz":
            (into / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
        elif file.is_file():
            shutil.copy(file, into)
    written = 0
    for repetition in itertools.count():
        for file, step in zip(files, steps, strict=True):
            shifted = [_shifted(line, repetition, len(steps), groups) for line in step]
            name = f"step-{shifted[0]['step']:05d}"
            with (into / "trajectories" / f"{name}.jsonl").open("w", encoding="utf-8") as lines:
                lines.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in shifted)
            fields = file.with_name(file.name.split(".")[0] + ".npz")
            if fields.is_file():
                shutil.copy(fields, into / "trajectories" / f"{name}.npz")
            written += sum(
                len(part.get("tokens", part.get("observation")))
                for line in shifted
                for sample in line["samples"]
                for part in sample["parts"]
            )
            if written >= tokens:
                return written
    raise AssertionError("itertools.count does not end")


def _shifted(line: dict[str, Any], repetition: int, steps: int, groups: int) -> dict[str, Any]:
    later = repetition * steps
    samples = [
        {
            **sample,
            "parts": [
                {**part, "version": part["version"] + later} if "version" in part else part
                for part in sample["parts"]
            ],
        }
        for sample in line["samples"]
    ]
    return {
        **line,
        "step": line["step"] + later,
        "group": line["group"] + repetition * groups,
        "samples": samples,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("into", type=Path, metavar="INTO", help="the folder to create")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"default {TOKENS}")
    parser.add_argument("--source", type=Path, default=RECORDED, help="a recorded run")
    chosen = parser.parse_args(argv)
    written = tile_run(chosen.source, chosen.into, tokens=chosen.tokens)
    print(f"{chosen.into}: {written:,} tokens")


if __name__ == "__main__":
    main()

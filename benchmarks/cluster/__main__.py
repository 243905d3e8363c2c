"""Several hosts on one machine: moving data between them, and through one process.

`--only data_plane`: weights from host to host, in seconds and CPU.

A host agent serves a folder of 270 MB (SmolLM2-135M in bfloat16). Receivers are processes, each of
which fetches a mirror of its own. Ways:

- `readinto`: one connection at a time, bodies read into buffers.
- `four streams`: the same on four connections, four ranges at a time; the default.
- `httpx`: one connection at a time, bodies collected by httpx2 (`.content`), then copied.

`--only controllers`: a loop of controllers on three hosts that share no folder. How long it takes
until hosts, trainer and engines are ready and the first batch is there; the bytes of all messages
of this process, against those of the tensors, by length of responses; and what has grown after 200
steps: memory, and shards that this process keeps.

`--only receiving`: the CPU time that the process of a run takes to receive responses of 2,048
tokens from an engine that has them all, by `rollout.stream_interval`.

`--only roads`: bytes through one process, and seconds, from the host that generates a batch to two
and four trainer processes: `trajectories` (of `train`) and `arrays` (of controllers).

`controller_inputs` in the JSON is what `controller.inputs` of the simulator reads.

All over loopback: ratios matter more than seconds. Ways take turns within a repeat.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.cluster import controllers, data_plane, receiving, roads
from benchmarks.harness import parse, report

PARTS = {
    "data_plane": data_plane.measure,
    "controllers": controllers.measure,
    "receiving": receiving.measure,
    "roads": roads.measure,
}
"""Each returns its figures and rows."""


def main() -> None:
    """Measure and report."""

    def add_own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", choices=PARTS, help="one part (default all)")

    arguments = parse(__doc__, repeats=5, quick_repeats=1, add_own=add_own)
    figures: dict[str, Any] = {"rows": [], "spread": {}, "controller_inputs": {}}
    for name, part in PARTS.items():
        if arguments.own.only in (None, name):
            found = part(quick=arguments.quick, repeats=arguments.repeats)
            figures["rows"] += found.pop("rows")
            figures["spread"] |= found.pop("spread")
            figures["controller_inputs"] |= found.pop("inputs")
            figures |= found
    report(figures, arguments)


if __name__ == "__main__":
    main()

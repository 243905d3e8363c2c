"""Rewrite the reference pages of `docs/`: `python -m tools.pages`.

With `--picture` also the timeline in `docs/simulator.md`, whose bytes depend on the version of
matplotlib.
"""

from __future__ import annotations

import argparse

from tools.pages import (
    environments,
    hardware,
    imports,
    kernels,
    losses,
    metrics,
    settings,
    simulator,
)

parser = argparse.ArgumentParser(prog="python -m tools.pages", description="Rewrite the pages.")
parser.add_argument("--picture", action="store_true", help="also draw the simulator's timeline")
arguments = parser.parse_args()
for module in (settings, losses, metrics, simulator, hardware, kernels, environments, imports):
    module.PAGE.write_text(module.page(), encoding="utf-8")
if arguments.picture:
    simulator.draw_picture()

"""Check a reward function of the user's: `python -m areal_lab.rewards.usable module:name LEVEL`.

In a process of its own, because the module's imports may be heavy. Prints what is wrong and exits
with 1.
"""

from __future__ import annotations

import sys

from areal_lab.config.functions import load_function, main
from areal_lab.host.isolation import LevelSetting
from areal_lab.rewards.sandbox.levels import NoSandbox, choose, runs_programs


def check(name: str, setting: LevelSetting) -> None:
    """Import a function; if it has a parameter `sandbox`, look for a level that works.

    Raises:
        ValueError: it cannot be imported, or model code cannot be contained; in one line.
    """
    if runs_programs(load_function(name)):
        try:
            choose(setting)
        except NoSandbox as error:
            raise ValueError(f"reward.{error}") from error


if __name__ == "__main__":
    name, setting = sys.argv[1:]
    sys.exit(main([name], lambda one: check(one, setting)))  # type: ignore[arg-type]

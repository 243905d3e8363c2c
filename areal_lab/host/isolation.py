"""Names of the ways to contain model code, for settings and for `areal_lab.rewards.sandbox`."""

from __future__ import annotations

from typing import Literal, TypeAlias

Level: TypeAlias = Literal["bubblewrap", "namespaces", "unsafe"]
"""Level of containment. `bubblewrap`: by the program of that name. `namespaces`: by the kernel
alone, with landlock. `unsafe`: limits, and no containment."""

LevelSetting: TypeAlias = Literal["auto", "bubblewrap", "namespaces", "unsafe"]
"""Setting of the level: `auto` is the first of `bubblewrap` and `namespaces` that works."""

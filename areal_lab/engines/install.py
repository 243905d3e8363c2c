"""Make the virtual environment of an engine."""

from __future__ import annotations

from areal_lab.engines.environments import engine_version, environment_folder, installed

__all__ = ["engine_version", "environment_folder", "installed"]

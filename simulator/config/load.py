"""From a preset or a YAML file, and `a.b=c` overrides, to a `SimulationConfig`.

    defaults (simulator.config.schema) <- preset or YAML file <- overrides, the last one wins

A preset is a YAML file that is shipped; its first line says what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from areal_lab.config.load import Overrides, load_record
from areal_lab.config.shipped import named_file, settings_file
from simulator.config.schema import SimulationConfig

ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "eta": "schedule.eta",
        "max_staleness": "schedule.eta",
        "staleness_limit": "schedule.eta",
        "max_head_offpolicyness": "schedule.eta",
        "rollout.max_head_offpolicyness": "schedule.eta",
        "gpu": "cluster.gpu",
        "gpus": "cluster.gpus",
        "rollout_gpus": "cluster.rollout_gpus",
        "steps": "workload.steps",
        "warmup_steps": "workload.warmup_steps",
    }
)
"""Other spellings of a setting: short ones, and AReaL's."""

_PRESETS: Final = Path(__file__).parents[1] / "presets"


def load_simulation(
    source: str | Path | None = None, overrides: Overrides = ()
) -> SimulationConfig:
    """Merge a YAML file or a preset, and overrides, onto the defaults.

    Args:
        source: a YAML file, or the name of a preset; None takes the defaults.
        overrides: `a.b=c` each, the value in YAML: `schedule.eta=inf`, `gpus=64`; or values
            by name: `{"schedule.eta": 4, "gpus": 64}`.

    Raises:
        ValueError: in one line: no such file or preset, broken file; or a line for each unknown key
            (with the nearest name) and each value that is not allowed.
            `simulator.assembly.check` says whether the numbers fit together.
    """
    path = None if source is None else settings_file(source, _preset_files(), "preset")
    start = SimulationConfig()
    config = load_record(start, path, overrides, ALIASES, may_be_empty=False)
    if path is not None and config.name == start.name:
        config.name = path.stem
    return config


def presets() -> dict[str, str]:
    """Names of the presets and what they are, smallest first and then by name."""
    return {name: _title(path) for name, path in _preset_files().items()}


def preset_path(name: str) -> Path:
    """The file of a preset, whatever the case and punctuation of its name.

    Raises:
        ValueError: in one line, with the nearest names.
    """
    return named_file(name, _preset_files(), "preset")


def _preset_files() -> dict[str, Path]:
    paths = sorted(_PRESETS.glob("*.yaml"), key=lambda path: (path.stem != "small", path))
    return {path.stem: path for path in paths}


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").rstrip()

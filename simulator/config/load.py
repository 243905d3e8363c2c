"""Load a `SimulationConfig` from a preset or a YAML file, and `a.b=c` overrides.

    defaults (simulator.config.schema) <- preset or YAML file <- overrides, the last one wins

A preset is a YAML file that is shipped; its first line says what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from areal_lab.config.given import Overrides, Source, given_config, source_files
from areal_lab.config.load import load_record
from areal_lab.config.shipped import named_file
from simulator.config.schema import SimulationConfig

ALIASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "eta": "schedule.eta",
        "max_staleness": "schedule.eta",
        "staleness_limit": "schedule.eta",
        "max_head_offpolicyness": "schedule.eta",
        "rollout.max_head_offpolicyness": "schedule.eta",
        "schedule.drop_late": "schedule.on_late",
        "gpu": "cluster.gpu",
        "gpus": "cluster.gpus",
        "rollout_gpus": "cluster.rollout_gpus",
        "steps": "workload.steps",
        "warmup_steps": "workload.warmup_steps",
    }
)
"""Other spellings of a setting: short ones, AReaL's, and older ones."""

_PRESETS: Final = Path(__file__).parents[1] / "presets"


def load_simulation(
    source: Source | None = None, overrides: Overrides | None = ()
) -> SimulationConfig:
    """Merge a YAML file or a preset, and overrides, onto the defaults.

    Args:
        source: a YAML file, the name of a preset, settings by name, or a config to start from; None
            takes the defaults.
        overrides: `a.b=c` each, the value in YAML: `schedule.eta=inf`, `gpus=64`; or values
            by name: `{"schedule.eta": 4, "gpus": 64}`.

    Raises:
        ValueError: in one line: no such file or preset, broken file; or a line for each unknown key
            (with the nearest name) and each value that is not allowed.
            `simulator.assembly.check` says whether the numbers fit together.
    """
    files = source_files(source, _preset_files(), "preset")
    start = SimulationConfig()
    config = load_record(start, files, overrides, ALIASES, may_be_empty=False)
    for path in files:
        if isinstance(path, Path) and config.name == start.name:
            config.name = path.stem
    return config


def simulation_config(given: object) -> SimulationConfig:
    """The config of an argument: a `SimulationConfig`, or what `load_simulation` takes."""
    return given_config(given, SimulationConfig, load_simulation)


def presets() -> dict[str, str]:
    """Names of the presets and what they are, smallest first and then by name."""
    return {name: _title(path) for name, path in _preset_files().items()}


def preset_path(name: str) -> Path:
    """The file of a preset, whatever the case and punctuation of its name."""
    return named_file(name, _preset_files(), "preset")


def _preset_files() -> dict[str, Path]:
    paths = sorted(_PRESETS.glob("*.yaml"), key=lambda path: (path.stem != "small", path))
    return {path.stem: path for path in paths}


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").rstrip()

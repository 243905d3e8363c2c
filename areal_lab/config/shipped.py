"""Config files shipped with the package, found by name: `areal-lab train arithmetic`.

arithmetic                 the shipped file, wherever areal_lab is installed
configs/arithmetic.yaml    a path; in a checkout it is the same file
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from areal_lab.config.unknown import did_you_mean, near_names, plain
from areal_lab.host.durable import expanded

CONFIGS: Final = Path(__file__).parents[1] / "configs"
_PLAN: Final = "plan_"
"""Prefix of the files for `areal-lab plan`."""
_COSIM: Final = "cosim"
"""Prefix of the files for `areal-lab cosim`."""
_STUDY: Final = "study_"
"""Prefix of the files for `areal-lab sweep`; those without a prefix are for `train`."""
_OFFLINE: Final = ("sft_", "rm_", "dpo_")
"""Prefixes of the files for `areal-lab sft`, `rm` and `dpo`."""
_MOST_LISTED: Final = 8
"""With more names, an error lists only the nearest ones."""


def training_configs() -> dict[str, Path]:
    """Return shipped files for `areal-lab train`, by name."""
    prefixes = (_PLAN, _COSIM, _STUDY, *_OFFLINE)
    return {name: path for name, path in _shipped().items() if not name.startswith(prefixes)}


def recipes() -> dict[str, Path]:
    """Return shipped objectives, by name, to merge over a config: `areal-lab train tiny dapo`."""
    return {path.stem: path for path in sorted((CONFIGS / "recipes").glob("*.yaml"))}


def cosim_configs() -> dict[str, Path]:
    """Return shipped files for `areal-lab cosim`, by name."""
    return {name: path for name, path in _shipped().items() if name.startswith(_COSIM)}


def offline_configs(command: str = "") -> dict[str, Path]:
    """Return shipped files for `areal-lab sft`, `rm` and `dpo`, or for one of them, by name."""
    prefixes = (f"{command}_",) if command else _OFFLINE
    return {name: path for name, path in _shipped().items() if name.startswith(prefixes)}


def plan_questions() -> dict[str, Path]:
    """Return shipped files for `areal-lab plan`, by name."""
    return {name: path for name, path in _shipped().items() if name.startswith(_PLAN)}


def studies() -> dict[str, Path]:
    """Return shipped files for `areal-lab sweep`, by name."""
    return {name: path for name, path in _shipped().items() if name.startswith(_STUDY)}


def is_shipped(path: str | Path) -> bool:
    """Return whether a path leads to one of the shipped files."""
    return Path(path).resolve().is_relative_to(CONFIGS.resolve())


def settings_file(source: str | Path, shipped: Mapping[str, Path], kind: str) -> Path:
    """Return the file at a path; a name that is not a file or folder is that of a shipped file."""
    text, path = str(source), expanded(source, f"the {kind}")
    is_path = not isinstance(source, str) or text.endswith((".yaml", ".yml")) or "/" in text
    if path.is_file() or (is_path and path.exists()):
        return path
    if is_path:
        named = f"; the shipped {kind} is named {path.stem!r}" if path.stem in shipped else ""
        raise ValueError(f"{text} does not exist (looked in {Path.cwd()}){named}")
    if path.is_dir() and plain(text) not in map(plain, shipped):
        raise ValueError(f"{text} is a folder, but must be a YAML file, or the name of a {kind}")
    return named_file(text, shipped, kind)


def named_file(name: str, shipped: Mapping[str, Path], kind: str) -> Path:
    """Return the shipped file of this name, ignoring case and punctuation."""
    known = {plain(one): one for one in shipped}
    if plain(name) in known:
        return shipped[known[plain(name)]]
    hint = did_you_mean(name, shipped)
    longer = [one for one in shipped if plain(one).startswith(plain(name))]
    if len(longer) > 1:
        hint = f"did you mean {', '.join(longer)}?"
    if len(shipped) <= _MOST_LISTED and (longer or near_names(name, shipped)):
        hint += f" Known are {', '.join(shipped)}"
    raise ValueError(f"unknown {kind} {name!r}; {hint}")


def _shipped() -> dict[str, Path]:
    paths = (*sorted(CONFIGS.glob("*.yaml")), *sorted((CONFIGS / "agents").glob("*.yaml")))
    return {path.stem: path for path in paths}

"""Files and packages that a config needs in an image: extras, models, secrets, and missing
paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from areal_lab.config.problem import ConfigError, Kind, Problem
from areal_lab.config.record import settings, value_of
from areal_lab.config.schema import TrainConfig
from areal_lab.engines.keys import KEY_VARIABLE
from areal_lab.extras import Extra
from areal_lab.models.locate import PACKAGED_MODELS, known_models

WORK: Final = PurePosixPath("/work")
"""Working folder of a container; relative paths of a config are below it."""
RUNS: Final = WORK / "runs"
"""Run folders of a container: the only folder that outlives it."""
Files = Literal["container", "synced", "shared"]
"""Files of this machine that the others have: none, those below the current folder, or all."""
_BY_TEXT: Final[Mapping[Extra, str]] = {
    "math": "areal_lab.rewards.math_answer",
    "json": "areal_lab.rewards.text:JsonSchema",
    "search": "search",
    "mcp": "mcp",
    "openenv": "openenv",
    "reasoning-gym": "reasoning_gym",
    "textarena": "textarena",
    "openai": "areal_lab.agents.examples",
}
"""Text anywhere in a config that requires the extra."""
_ONLINE: Final = {"wandb": "WANDB_API_KEY", "swanlab": "SWANLAB_API_KEY"}
_LEAVES: Final = re.compile(r"(?:.*_)?(?:path|dir|logdir|folder|file)")
_FUNCTION: Final = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_][\w.]*")
_SECRET: Final = re.compile(
    r"(?:.*_)?(?:api_?key|secret|password|token|access_?key)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Mount:
    """Files, and the path at which they appear."""

    source: str
    """A claim (Kubernetes), a folder or volume (compose), a folder or bucket (SkyPilot)."""
    path: PurePosixPath

    def __post_init__(self) -> None:
        if not self.source or not self.path.is_absolute() or self.path == PurePosixPath("/"):
            raise ValueError(
                f"--mount is {self.source}:{self.path}, but must be SOURCE:/PATH, as data:/data"
            )

    @property
    def named(self) -> bool:
        """True if the source is a name (of a volume), not a path."""
        return not self.source.startswith((".", "/", "~"))


def parse_mount(text: str) -> Mount:
    """`SOURCE:/PATH`; a bucket's address may have colons, too."""
    source, _, path = text.rpartition(":")
    if not re.fullmatch(r"/[\w./-]+", path) or ".." in path or not source.isprintable():
        raise ValueError(f"--mount is {text!r}, but must be SOURCE:/PATH, as data:/data")
    return Mount(source, PurePosixPath(path))


def extras_of(config: TrainConfig) -> list[Extra]:
    """Extras of the package that a run with this config imports."""
    words = [text for _, text in _texts(config)]
    found: list[Extra] = ["train"]
    found += [extra for extra, word in _BY_TEXT.items() if any(word in text for text in words)]
    return [*found, *config.sinks]


def packaged_models_of(config: TrainConfig) -> list[str]:
    """Requirements of the packages that have the config's models."""
    named = {text for _, text in _texts(config)}
    return [model.requirement for name, model in PACKAGED_MODELS.items() if name in named]


def secrets_of(config: TrainConfig) -> list[str]:
    """Environment variables with keys that a run with this config reads."""
    found = [name for sink in config.sinks if (name := _online(config, sink))]
    found += [
        text for setting, text in _texts(config) if setting.endswith(".key_variable") and text
    ]
    return list(dict.fromkeys([*found, *([KEY_VARIABLE] if config.rollout.addresses else [])]))


def own_modules(config: TrainConfig) -> list[tuple[str, str]]:
    """Settings that name functions outside of this package, with the module of each."""
    found = [
        (setting, match.group(1))
        for setting, text in _texts(config)
        if (match := _FUNCTION.fullmatch(text)) and not match.group(1).startswith("areal_lab.")
    ]
    return list(dict.fromkeys(found))


def check_contents(config: TrainConfig, mounts: Sequence[Mount], files: Files) -> None:
    """Refuse paths that other machines do not have, and keys in the settings."""
    found = [
        Problem(
            Kind.SETTINGS,
            setting,
            f"{setting} looks like a secret, and would be in a file in plain text; remove it, and "
            "pass it as an environment variable with --secret NAME",
        )
        for setting, text in _texts(config)
        if text and _SECRET.fullmatch(setting.rpartition(".")[2])
    ]
    found += [
        Problem(
            Kind.SETTINGS,
            "rollout.addresses",
            f"rollout.addresses has a key in an address; set {KEY_VARIABLE} to it, which is passed "
            "on as a secret",
        )
        for address in config.rollout.addresses
        if "@" in address
    ]
    if found := [*found, *_missing_paths(config, mounts, files)]:
        raise ConfigError(*found)


def expected_files(config: TrainConfig, mounts: Sequence[Mount]) -> list[tuple[str, str]]:
    """Settings with a relative path that does not exist here: a container must have it below
    `WORK`.
    """
    return [
        (setting, text)
        for setting, text in _texts(config)
        if setting != "run_dir"
        and _LEAVES.fullmatch(setting.rpartition(".")[2])
        and text
        and not text.startswith(("/", "~"))
        and text not in known_models()
        and not any((WORK / text).is_relative_to(mount.path) for mount in mounts)
    ]


def _missing_paths(config: TrainConfig, mounts: Sequence[Mount], files: Files) -> Iterator[Problem]:
    if files == "shared":
        return
    for setting, text in _texts(config):
        leaf = setting.rpartition(".")[2]
        own = text.startswith("~")
        if not text or "\n" in text or not _is_path(leaf, text):
            continue
        place = WORK / text
        if not own and any(place.is_relative_to(mount.path) for mount in mounts):
            continue
        run_folder = setting == "run_dir"
        if run_folder and not own and place.is_relative_to(RUNS):
            continue
        absolute = own or text.startswith("/")
        if files == "synced" and not absolute:
            continue
        mount = "--mount SOURCE:/PATH for what has it"
        if run_folder:
            why = "is lost with the container"
            fix = f"leave run_dir out, for {RUNS}, or give {mount}"
        else:
            why = "is on this machine, and not in the image"
            fix = f"give {mount}, and write its path there"
            if not absolute:
                fix = f"give --mount SOURCE:{place.parent}, or {fix}"
        if files == "synced":
            why = "is on this machine, and not below the folder that is copied"
            fix = f"write a path relative to the current folder, or give {mount}"
        yield Problem(Kind.SETTINGS, setting, f"{setting} is {text}, which {why}; {fix}")


def _is_path(leaf: str, text: str) -> bool:
    """Return whether text is the path of something on this machine, or must be a path.

    A slash alone is text, such as `gconfig.stop`, unless the setting is named like a path.
    """
    if text in known_models():
        return False
    named = _LEAVES.fullmatch(leaf) is not None
    try:
        exists = bool(Path(text).name) and Path(text).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a null byte
        exists = False
    return (text.startswith(("/", "~/")) and (named or exists)) or (
        named and (exists or leaf == "run_dir")
    )


def _online(config: TrainConfig, sink: str) -> str:
    """Variable with the key of a sink that uploads; empty if it does not."""
    options = getattr(config.stats_logger, sink)
    return _ONLINE.get(sink, "") if getattr(options, "mode", "") == "online" else ""


def _texts(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """All text in the settings, by dotted name."""
    for one in settings(type(config)):
        yield from _named_texts(one.name, value_of(config, one.name))


def _named_texts(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _named_texts(f"{name}.{key}", one)
    elif isinstance(value, list):
        for one in value:
            yield from _named_texts(name, one)

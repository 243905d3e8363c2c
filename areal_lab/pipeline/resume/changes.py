"""Check settings that changed when a run continues: refuse them, report them or ignore them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from areal_lab.config.load import read_yaml
from areal_lab.config.offline import KINDS, RunConfig
from areal_lab.config.problem import ConfigError, Kind, Problem, refusal
from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import Version
from areal_lab.engines.weights.records import Transfer

FIXED: Final = (
    *("seed", "dataset.", "gconfig.", "save_every_steps"),
    *("actor.path", "actor.use_lora", "actor.lora_", "actor.target_modules"),
    *("actor.optimizer.", "actor.ppo_n_minibatches", "actor.max_gradient_cosine"),
    *("critic.share_body", "critic.optimizer."),
    *("rollout.schedule", "rollout.max_head_offpolicyness", "rollout.interruptible"),
    *("rollout.max_concurrent_rollouts", "rollout.batch_order", "rollout.max_lag"),
    *("rollout.slots", "rollout.on_late", "rollout.routing", "rollout.dynamic_sampling."),
)
"""Names and prefixes of settings that a run keeps: its groups, optimizer and log depend on them."""
_SILENT: Final = ("plots", "sinks", "stats_logger.", "alarms.", "checkpoint.", "run_dir")
"""Settings whose change affects no result."""


def notes_of_changes(before: TrainConfig, config: TrainConfig, version: Version) -> tuple[str, ...]:
    """Return a line for each changed setting that may affect results.

    Args:
        before: settings until the checkpoint.
        config: settings after it.
        version: version of the checkpoint.
    """
    return tuple(
        f"{name} is {_value(now)} from step {version + 1} on (was {_value(was)})"
        for name, was, now in changed_settings(before, config)
        if not name.startswith(_SILENT)
    )


def check_settings(before: TrainConfig, config: TrainConfig, path: Path) -> Iterator[Problem]:
    """Yield a problem for each changed setting that a run must keep or cannot continue with."""
    for name, was, now in changed_settings(before, config):
        if name.startswith(FIXED):
            fix = "it cannot change when a run continues; start a new run to change it"
            if name == "rollout.max_head_offpolicyness":
                fix = f"change it while the run continues: areal-lab control {path} eta=..."
            yield Problem(
                Kind.SETTINGS, name, f"{name} is {_value(now)}, but was {_value(was)}: {fix}"
            )
    if Transfer(config.rollout.transfer) is Transfer.ADAPTER:
        yield Problem(
            Kind.SETTINGS,
            "rollout.transfer",
            "rollout.transfer=adapter cannot continue: engines start without an adapter; continue "
            "with rollout.transfer=folder",
        )


def changed_settings(before: RunConfig, config: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name, the old and the new value of each changed setting."""
    yield from _changed(before.model_dump(), config.model_dump())


def _changed(was: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    # The members of a section that is unset on one side are changes, but a mapping that was filled
    # or emptied is one change.
    sections = all(value is None or isinstance(value, dict) for value in (was, now))
    if sections and {} not in (was, now):
        was, now = was or {}, now or {}
        for key in sorted(was.keys() | now.keys()):
            yield from _changed(was.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif was != now:
        yield name, was, now


def check_whole(file: Path, saved_in: Path | None) -> None:
    """Refuse a config.yaml that is cut off; older versions left one if they were killed.

    Args:
        file: config.yaml; a complete file ends with a line break.
        saved_in: file of a checkpoint with the same settings, if there is one.

    Raises:
        ConfigError: the file is cut off; the message has a command that restores it.
    """
    content = file.read_bytes()
    if not content.endswith(b"\n"):
        last = content.decode(errors="replace").rsplit("\n", 1)[-1][:40]
        raise damaged_settings(file, f"it ends with {last!r}, in the middle of a line", saved_in)


def check_kind(kind: str, file: Path) -> None:
    """Refuse a run of another command.

    Args:
        kind: name of the command.
        file: config.yaml; an unreadable file passes, because reading it reports the error.

    Raises:
        ConfigError: the run belongs to another command, which the message names.
    """
    try:
        names = read_yaml(file).keys()
    except ValueError:
        return
    fits = (name for name, one in KINDS.items() if one.model_fields.keys() <= names)
    theirs = next(fits, "train")
    if theirs != kind:
        raise refusal(
            "resume",
            f"{file.parent} is a run of areal-lab {theirs}; continue it by areal-lab {theirs} "
            "--resume",
        )


def check_complete(file: Path, saved: Mapping[str, Any], config: RunConfig, saved_in: Path) -> None:
    """Refuse a config.yaml that lacks settings of the checkpoint that differ from the defaults.

    Args:
        file: config.yaml.
        saved: settings in the checkpoint.
        config: settings read from the file.
        saved_in: file of the checkpoint.

    Raises:
        ConfigError: settings are missing; the message has a command that restores the file.
    """
    now, there = dict(_flat(config.model_dump())), dict(_flat(dict(read_yaml(file))))
    missing = [
        name
        for name, value in _flat(dict(saved))
        if name not in there and name in now and now[name] != value
    ]
    if missing:
        reason = f"it has no {missing[0]}, although the run was started with it"
        raise damaged_settings(file, reason, saved_in)


def damaged_settings(file: Path, reason: str, saved_in: Path | None) -> ConfigError:
    """Return the error for a damaged config.yaml, with the command that restores it."""
    if saved_in is None or not saved_in.is_file():
        return refusal("resume", f"{file} is damaged: {reason}; start a new run")
    program = "import json, sys; json.dump(json.load(open(sys.argv[1]))['config'], sys.stdout)"
    return refusal(
        "resume",
        f"{file} is damaged: {reason}; nothing was changed. {saved_in} also has the settings",
        command=shlex.join(["python", "-c", program, str(saved_in)])
        + f" | sed '$a\\' > {shlex.quote(str(file))}",
    )


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _value(value: Any) -> str:
    return "unset" if value is None else json.dumps(value)

"""Settings that are other ones when a run continues: refused, named, or of no account."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from areal_lab.config.offline import RunConfig
from areal_lab.config.problem import Kind, Problem
from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import Version
from areal_lab.engines.weights.records import Transfer

FIXED: Final = (
    *("seed", "dataset.", "gconfig.", "save_every_steps"),
    *("actor.path", "actor.use_lora", "actor.lora_", "actor.target_modules"),
    *("actor.optimizer.", "actor.ppo_n_minibatches"),
    *("critic.share_body", "critic.optimizer."),
    *("rollout.schedule", "rollout.max_head_offpolicyness", "rollout.interruptible"),
    *("rollout.max_concurrent_rollouts", "rollout.batch_order", "rollout.max_lag"),
    *("rollout.drop_late", "rollout.routing", "rollout.dynamic_sampling."),
)
"""Settings, and beginnings of names, that a run keeps: what its groups, its optimizer and its log
are made of."""
_SILENT: Final = ("plots", "sinks", "stats_logger.", "alarms.", "checkpoint.", "run_dir")
"""Settings whose change affects no result."""


def notes_of_changes(before: TrainConfig, config: TrainConfig, version: Version) -> tuple[str, ...]:
    """A line per changed setting that may affect results.

    Args:
        version: of the checkpoint.
    """
    return tuple(
        f"{name} is {_value(now)} from step {version + 1} on (was {_value(was)})"
        for name, was, now in changed_settings(before, config)
        if not name.startswith(_SILENT)
    )


def check_settings(before: TrainConfig, config: TrainConfig, path: Path) -> Iterator[Problem]:
    """The changed settings that a run keeps, and those with which none can continue."""
    for name, was, now in changed_settings(before, config):
        if name.startswith(FIXED):
            fix = "a run keeps it; start a new run to change it"
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
    """Dotted name, value before and value now of each setting that differs."""
    was, now = dict(_flat(before.model_dump())), dict(_flat(config.model_dump()))
    for name in sorted(was.keys() | now.keys()):
        if was.get(name) != now.get(name):
            yield name, was.get(name), now.get(name)


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _value(value: Any) -> str:
    return "unset" if value is None else json.dumps(value)

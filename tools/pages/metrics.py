"""`docs/metrics.md`: every metric of a run, its healthy range, and the alarms."""

from __future__ import annotations

import inspect
from itertools import groupby
from pathlib import Path
from typing import Final

from areal_lab.config.dump import description
from areal_lab.config.record import find_setting
from areal_lab.config.schema import TrainConfig
from areal_lab.config.sections import AlarmsConfig
from areal_lab.metrics.alarm import AlarmName
from areal_lab.metrics.glossary import (
    ENVIRONMENT,
    GLOSSARY,
    OF_A_COMPONENT,
    OF_A_CUSTOM_LOSS,
    Metric,
)
from areal_lab.runlog.alarms import RULES

PAGE: Final = Path(__file__).parents[2] / "docs" / "metrics.md"
_HEAD: Final = """# Metrics and alarms

A run appends one line to `metrics.jsonl` for each training step. These are all metrics of a
line. `areal-lab watch RUN` draws the most important ones, [sinks](train.md#watch-a-run) get all
of them. A metric without tokens is omitted from its line.
"""
_ALARMS: Final = """## Alarms

`alarms.steps` steps in a row beyond its bound raise an alarm ({steps} by default). The same number
of steps in a row within the bound ends it. The run reports the start and the end of an alarm: in
its output, in `alarms.jsonl` and `summary.json` of its folder, and in `areal-lab watch`. An alarm
never changes or ends a run. `alarms.off=[entropy]` turns one off. A task counts as solved when its
mean reward reaches `alarms.solved`.
"""
_BOUND_OF: Final[dict[AlarmName, str]] = {
    "truncated": "truncated",
    "stale_weights": "lag",
}
"""Settings that are not named as their alarm."""


def page() -> str:
    """The page as it should be."""
    parts = [_HEAD]
    for group, members in groupby(GLOSSARY, key=lambda one: one.group):
        parts += [f"## {group}", _table(list(members))]
    parts += [
        "## Components of rewards",
        f"`{OF_A_COMPONENT}`: the mean of each named component that a reward function returns, "
        "over the batch and before `reward.weights`.",
        "## Environments of other libraries",
        f"`{ENVIRONMENT}NAME`: the mean of each metric and each named reward of an [environment]"
        "(environments.md), by its name, over the samples of the batch that have it; the last ones "
        "are in `summary.json`, too. Characters that trackers refuse become `_`.",
        "## Custom losses",
        f"`{OF_A_CUSTOM_LOSS}`: the mean of each per-token field that a [custom loss]"
        "(functional/per_sample_gradients.md#a-custom-loss) returns besides `loss`, by its name.",
        _ALARMS.format(steps=AlarmsConfig().steps),
        _alarms(),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _table(metrics: list[Metric]) -> str:
    lines = [
        "| metric | unit | meaning | healthy | outside of this range | measured by |",
        "|---|---|---|---|---|---|",
    ]
    for one in metrics:
        only = "" if one.written_by == "train and cosim" else f" (`{one.written_by}` only)"
        gpu = " on a GPU" if one.on_gpu else ""
        cells = (one.meaning, one.healthy, one.outside, one.source + gpu + only)
        text = " | ".join(cell.replace("|", "\\|") for cell in cells)
        lines.append(f"| `{one.name}` | {one.unit} | {text} |")
    return "\n".join(lines)


def _alarms() -> str:
    lines = ["| alarm | compares | setting | default | bound |", "|---|---|---|---|---|"]
    for name, rule in RULES.items():
        setting = find_setting(TrainConfig, f"alarms.{_BOUND_OF.get(name, name)}")
        what = inspect.getdoc(rule) or ""
        what = what.split("\n", 1)[0].replace("|", "\\|")
        bound = description(setting).replace("|", "\\|")
        lines.append(f"| `{name}` | {what} | `{setting.name}` | `{setting.default:g}` | {bound} |")
    return "\n".join(lines)

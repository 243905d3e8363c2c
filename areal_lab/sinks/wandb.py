"""Weights & Biases, offline (`wandb sync` later) or online."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

# Before the import, which reads these variables: no output, no measurements of this process.
os.environ |= {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_X_DISABLE_STATS": "true"}

import wandb

from areal_lab.sinks.protocol import HELD_OUT, Point, RunFacts

_OWN_STEP: Final = "held_out_step"


class WandbSink:
    """A run whose id is the folder's name, so a resumed run continues it."""

    def __init__(self, run: RunFacts) -> None:
        mode = run.options["mode"]
        self._run = wandb.init(
            mode=mode,
            project=run.option("project"),
            entity=run.option("entity"),
            group=run.option("group"),
            name=run.name,
            tags=run.option("tags"),
            dir=run.option("dir") or str(run.folder),
            id=run.folder.name,
            resume="allow",
            config=dict(run.config),
        )
        # W&B ignores values of an earlier step than the last one. Those of held-out problems come
        # late, and have a separate step.
        self._run.define_metric(f"{HELD_OUT}*", step_metric=_OWN_STEP)
        self._last_step = 0
        files = Path(self._run.dir).parent
        self.where = str(self._run.url) if mode == "online" else f"wandb sync {files}"

    def log(self, point: Point) -> None:
        """See `Sink`."""
        self._last_step = max(self._last_step, point.step)
        values = dict(point.values)
        if any(name.startswith(HELD_OUT) for name in values):
            values[_OWN_STEP] = point.step
        self._run.log(values, step=self._last_step)

    def picture(self, name: str, file: Path, step: int) -> None:
        """See `Sink`."""
        self._run.log({name: wandb.Image(str(file))}, step=step)

    def close(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """See `Sink`."""
        self._run.summary.update({f"run/{key}": value for key, value in summary.items()})
        self._run.finish(exit_code=int(failed))

"""SwanLab, offline (`swanlab sync` later) or online."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import swanlab

from areal_lab.sinks.protocol import Point, RunFacts


class SwanLabSink:
    """A run of SwanLab; numbers of the summary become values of the last step."""

    def __init__(self, run: RunFacts) -> None:
        mode, folder = run.options["mode"], Path(run.option("logdir") or run.folder / "swanlab")
        folder.mkdir(parents=True, exist_ok=True)
        self._run = swanlab.init(
            mode=mode,
            project=run.option("project"),
            workspace=run.option("workspace"),
            group=run.option("group"),
            name=run.name,
            tags=run.option("tags"),
            log_dir=str(folder),
            config=dict(run.config),
        )
        self.where = "swanlab.cn" if mode == "online" else f"swanlab sync {folder}/run-*"
        self._last_step = 0

    def log(self, point: Point) -> None:
        """See `Sink`."""
        self._last_step = max(self._last_step, point.step)
        self._run.log(dict(point.values), step=point.step)

    def picture(self, name: str, file: Path, step: int) -> None:
        """See `Sink`."""
        self._run.log({name: swanlab.Image(str(file))}, step=step)

    def close(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """See `Sink`."""
        numbers = {
            f"summary/{key}": float(value)
            for key, value in summary.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        if numbers:
            self._run.log(numbers, step=self._last_step)
        if failed:
            swanlab.finish(state="crashed", error=str(summary.get("error", "the run was killed")))
        else:
            swanlab.finish()

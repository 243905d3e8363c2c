"""Trackio, in a database on this machine or a Hugging Face Space."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_lab.sinks.protocol import Point, RunFacts


class TrackioSink:
    """A run of Trackio; numbers of the summary become values of the last step."""

    def __init__(self, run: RunFacts) -> None:
        folder = Path(run.option("dir") or run.folder / "trackio")
        os.environ["TRACKIO_DIR"] = str(folder)
        import trackio  # reads the variable

        self._trackio = trackio
        project, space = str(run.options["project"]), run.option("space_id")
        self._run = trackio.init(
            project=project,
            name=run.name,
            group=run.option("group"),
            space_id=space,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        show = f"TRACKIO_DIR={folder} trackio show --project {project}"
        self.where = f"https://huggingface.co/spaces/{space}" if space else show
        self._last_step = 0

    def log(self, point: Point) -> None:
        """See `Sink`."""
        self._last_step = max(self._last_step, point.step)
        self._run.log(dict(point.values), step=point.step)

    def picture(self, name: str, file: Path, step: int) -> None:
        """See `Sink`."""
        self._run.log({name: self._trackio.Image(str(file))}, step=step)

    def close(self, summary: Mapping[str, Any], *, failed: bool) -> None:
        """See `Sink`."""
        numbers = {
            f"summary/{key}": float(value)
            for key, value in summary.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        self._run.log({**numbers, "summary/failed": float(failed)}, step=self._last_step)
        self._trackio.finish()

"""A run on fixed data in this process, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from areal_lab.config.offline import OfflineConfig
from areal_lab.config.problem import refusal
from areal_lab.offline.job import Note, Phase, Stepped, Told
from areal_lab.offline.report import recorded
from areal_lab.offline.rows import RowSet
from areal_lab.offline.run import run
from areal_lab.offline.start import begin, prepare
from areal_lab.pipeline.progress import Display, Silent


def train_here(
    config: OfflineConfig,
    rows: RowSet | None = None,
    *,
    on_step: Callable[[int, Mapping[str, float]], object] = lambda *_: None,
    display: Display | None = None,
) -> dict[str, Any]:
    """Check a config and train to the end; returns the content of summary.json, with `folder`.

    Args:
        rows: train on these instead of `config.dataset`.
        on_step: called with the number and the metrics of each step.
        display: where to show progress; None shows nothing.

    Raises:
        ConfigError: one line per problem, before anything is loaded.
        Exception: whatever ended the run early.
    """
    if config.actor.processes > 1:
        raise refusal(
            "actor.processes",
            f"actor.processes is {config.actor.processes}, but this trains in its own process; set "
            "it to 1, or use the command",
        )
    prepared = prepare(config, rows)
    shown = display or Silent()
    job = begin(prepared)
    torch.set_num_threads(job.threads)

    def tell(told: Told) -> None:
        match told:
            case Phase(text):
                present.phase(text)
                shown.phase(text)
            case Note(text):
                shown.note(text)
            case Stepped(step, _, metrics):
                on_step(step, metrics)
            case _:
                pass

    with recorded(job, shown) as (summary, present):
        summary.update(run(job, prepared.rows, tell=tell, stop=lambda: False))
    return {**summary, "folder": str(job.folder)}

"""Asynchronous reinforcement learning for language models, after AReaL (arXiv:2505.24298).

Names are loaded at their first use, so that `import areal_lab` is free and parts that do not need
torch do not import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_lab.config.load import load_config as load_config
    from areal_lab.config.schema import TrainConfig as TrainConfig
    from areal_lab.data.problems import Problem as Problem
    from areal_lab.data.problems import ProblemSet as ProblemSet
    from areal_lab.data.trajectory import Segment as Segment
    from areal_lab.data.trajectory import Trajectory as Trajectory
    from areal_lab.live.attach import AttachedRun as AttachedRun
    from areal_lab.live.attach import attach_run as attach_run
    from areal_lab.live.attach import live_runs as live_runs
    from areal_lab.live.mailbox import RequestRefused as RequestRefused
    from areal_lab.live.mailbox import RunEnded as RunEnded
    from areal_lab.live.snapshot import Snapshot as Snapshot
    from areal_lab.pipeline.compare_losses import LossComparison as LossComparison
    from areal_lab.pipeline.compare_losses import compare_losses as compare_losses
    from areal_lab.pipeline.console import start_run as start_run
    from areal_lab.pipeline.train import TrainingRun as TrainingRun
    from areal_lab.pipeline.train import resume_run as resume_run
    from areal_lab.pipeline.train import train as train
    from areal_lab.runlog.compare import RunComparison as RunComparison
    from areal_lab.runlog.compare import compare as compare
    from areal_lab.runlog.read_run import read_run as read_run
    from areal_lab.runlog.seeds import SeedResults as SeedResults
    from areal_lab.runlog.seeds import load_seed_results as load_seed_results
    from areal_lab.shell.step_report import StepReport as StepReport
    from areal_lab.sweep.read import RecordedSweep as RecordedSweep
    from areal_lab.sweep.read import read_sweep as read_sweep

_HOMES = {
    "AttachedRun": "areal_lab.live.attach",
    "LossComparison": "areal_lab.pipeline.compare_losses",
    "Problem": "areal_lab.data.problems",
    "ProblemSet": "areal_lab.data.problems",
    "RecordedSweep": "areal_lab.sweep.read",
    "RequestRefused": "areal_lab.live.mailbox",
    "RunComparison": "areal_lab.runlog.compare",
    "RunEnded": "areal_lab.live.mailbox",
    "SeedResults": "areal_lab.runlog.seeds",
    "Segment": "areal_lab.data.trajectory",
    "Snapshot": "areal_lab.live.snapshot",
    "StepReport": "areal_lab.shell.step_report",
    "TrainConfig": "areal_lab.config.schema",
    "TrainingRun": "areal_lab.pipeline.train",
    "Trajectory": "areal_lab.data.trajectory",
    "attach_run": "areal_lab.live.attach",
    "compare": "areal_lab.runlog.compare",
    "compare_losses": "areal_lab.pipeline.compare_losses",
    "live_runs": "areal_lab.live.attach",
    "load_config": "areal_lab.config.load",
    "load_seed_results": "areal_lab.runlog.seeds",
    "read_run": "areal_lab.runlog.read_run",
    "read_sweep": "areal_lab.sweep.read",
    "resume_run": "areal_lab.pipeline.train",
    "start_run": "areal_lab.pipeline.console",
    "train": "areal_lab.pipeline.train",
}

__all__ = [  # noqa: PLE0604 - the table above is the one list of names
    *_HOMES
]


def __getattr__(name: str) -> object:
    """Load a public name from its module (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_HOMES[name])
    except ModuleNotFoundError:
        from areal_lab.extras import require

        require(f"areal_lab.{name}", "train")
        raise
    return getattr(module, name)


def __dir__() -> list[str]:
    """All public names, loaded or not."""
    return sorted(_HOMES)

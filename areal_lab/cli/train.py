"""`areal-lab train`: a new run or one that continues, in this process or with restarts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from areal_lab.config.load import load_config, split_arguments
from areal_lab.config.problem import refusal
from areal_lab.config.shipped import training_configs
from areal_lab.host.claim import RunTaken
from areal_lab.host.terminal import printable
from areal_lab.pipeline import console
from areal_lab.pipeline.resume.recovery import find_recovery
from areal_lab.pipeline.resume.restart import run_with_restarts
from areal_lab.pipeline.run import prepare
from areal_lab.runlog.folder import RunFolder


def run_train(arguments: Sequence[str], *, resume: Path | None, restarts: int) -> int:
    """Train to the end; returns the exit code.

    Args:
        arguments: a config, recipes and changed settings; with `resume` changed settings only.
        resume: the folder of a run to continue.
        restarts: how often to continue it after a crash.

    Raises:
        ConfigError: one line per problem, before any process starts; or another process continues
            the run.
        Exception: whatever ended the run early.
    """
    configs, changes = split_arguments(arguments)
    if resume is None:
        if not configs:
            raise refusal(
                "CONFIG",
                f"give a CONFIG ({', '.join(training_configs())}, or a file), or --resume",
            )
        config = load_config(configs, changes)
        if not restarts:
            return console.run_to_end(config)
        prepare(config)
        return run_with_restarts(RunFolder.create(config).path, restarts=restarts, note=_note)
    if configs:
        raise refusal(
            "CONFIG",
            f"{configs[0]!r} is a config, but --resume takes that of the run; give changed "
            "settings only, as total_train_steps=60",
        )
    recovery = find_recovery(resume, changes)
    if not restarts:
        try:
            return console.run_to_end(recovery.config, recovery=recovery)
        except RunTaken as error:  # not to be continued by `run_with_restarts`
            raise refusal("resume", str(error)) from error
    return run_with_restarts(recovery.folder.path, changes, restarts=restarts, note=_note)


def run_distill(arguments: Sequence[str]) -> int:
    """Distill a teacher to the end; returns the exit code.

    Args:
        arguments: a config, recipes and changed settings, of which one is `teacher.path`.

    Raises:
        ConfigError: one line per problem, before any process starts.
    """
    (config, *more), changes = split_arguments(arguments)
    run = load_config([config, "distill", *more], changes)
    if not run.teacher.path:
        raise refusal(
            "teacher.path",
            "teacher.path is empty, but distill needs a teacher: give a model folder or name, as "
            "teacher.path=Adder-75K",
        )
    return console.run_to_end(run)


def _note(text: str) -> None:
    typer.secho(printable(text), err=True, fg="yellow")

"""`areal-lab train`, `sft`, `rm` and `dpo`: a new run, or the continuation of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from areal_lab.config.load import load_config, split_arguments
from areal_lab.config.offline import load_offline
from areal_lab.config.problem import ConfigError, problems_of, refusal
from areal_lab.config.shipped import training_configs
from areal_lab.host.claim import RunTaken
from areal_lab.host.terminal import printable
from areal_lab.offline.console import run_to_end
from areal_lab.offline.resume import find_resumable
from areal_lab.offline.start import resolve_offline
from areal_lab.pipeline import console
from areal_lab.pipeline.resume.recovery import find_recovery
from areal_lab.pipeline.resume.restart import run_with_restarts
from areal_lab.resolve.resolved import resolve
from areal_lab.runlog.folder import RunFolder


def run_train(arguments: Sequence[str], *, resume: Path | None, restarts: int) -> int:
    """Train to the end; returns the exit code.

    `arguments` are a config, recipes and changed settings; with `resume`, the folder of a run to
    continue, changed settings only. `restarts` is the maximum number of continuations after a
    crash.
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
        with console.loading(config):
            resolve(config)
        return run_with_restarts(RunFolder.create(config).path, restarts=restarts, note=_note)
    if configs:
        raise refusal(
            "CONFIG",
            f"{configs[0]!r} is a config, but --resume takes that of the run; give changed "
            "settings only, such as total_train_steps=60",
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

    `arguments` are a config, recipes and changed settings, including `teacher.path`.
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


def run_offline(command: str, arguments: Sequence[str], *, resume: Path | None) -> int:
    """Train to the end with the command `sft`, `rm` or `dpo`; returns the exit code.

    `arguments` are configs and changed settings; with `resume`, the folder of a run to continue,
    changed settings only.
    """
    configs = [one for one in arguments if "=" not in one]
    changes = [one for one in arguments if one not in configs]
    if resume is None:
        if not arguments:
            raise refusal(
                "CONFIG",
                f"give a CONFIG ({command}_adder, a file), settings (dataset.path=rows.jsonl), or "
                "--resume",
            )
        try:
            config = load_offline(command, configs, changes)
        except ValueError as error:
            raise ConfigError(*problems_of(error, "CONFIG", named=True)) from error
        return run_to_end(resolve_offline(config))
    if configs:
        raise refusal(
            "CONFIG",
            f"{configs[0]!r} is a config, but --resume takes that of the run; give changed "
            "settings only, such as total_train_steps=60",
        )
    found = find_resumable(command, resume, changes)
    return run_to_end(resolve_offline(found.config), found)

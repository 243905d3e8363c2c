"""Find the checkpoint that a run continues from, and bring its folder back to it.

    find_recovery: RUN, changed settings --> Recovery, or every reason against it
    check_data: the problems are those of the checkpoint
    cut_back: lines, samples and checkpoints after it are removed

Nothing is written before `cut_back`. A run that was killed before its first checkpoint starts over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import OmegaConf

from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError, Kind, Problem, problems_of, refusal
from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import EngineId, GroupId, RunStarted, Version
from areal_lab.control.frontier import recovered_start
from areal_lab.control.limits import Limits
from areal_lab.data.problems import ProblemSet, PromptSource
from areal_lab.live.presence import read_presence
from areal_lab.pipeline.evaluate import HeldOutReward
from areal_lab.pipeline.resume.changes import check_settings, notes_of_changes
from areal_lab.pipeline.resume.positions import cut_back
from areal_lab.pipeline.resume.retention import apply_retention
from areal_lab.pipeline.resume.saved_run import (
    OpenTokens,
    SavedRun,
    is_resumable,
    read_open_tokens,
    read_saved_run,
)
from areal_lab.preflight.limits import limits_of
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.held_out import FILE as HELD_OUT
from areal_lab.runlog.read_run import METRICS
from areal_lab.training.protocol import STATE_FOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How a run continues."""

    folder: RunFolder
    config: TrainConfig
    """Of the run from here on."""
    checkpoint: Path | None
    """None: the run was killed before its first one, and starts over."""
    saved: SavedRun | None
    """What the checkpoint says; None without one."""
    notes: tuple[str, ...] = ()
    """A process that may still run it; settings that are other ones than before. A line each."""

    @property
    def version(self) -> Version:
        """Of the checkpoint; 0 without one."""
        return 0 if self.saved is None else self.saved.frontier.version

    @property
    def state_folder(self) -> str:
        """The trainer's state; empty without a checkpoint."""
        return "" if self.checkpoint is None else str(self.checkpoint / STATE_FOLDER)

    @property
    def before(self) -> HeldOutReward | None:
        """Held-out rewards before training, if the run measured them."""
        if self.saved is None or not self.saved.held_out_before:
            return None
        return HeldOutReward(self.saved.held_out_before, self.saved.unscored_before)

    @property
    def limits(self) -> Limits:
        """Of the coordinator, with the eta that was in force."""
        before = self.config if self.saved is None else TrainConfig(**self.saved.config)
        limits = limits_of(before)
        if self.saved is None:
            return limits
        return replace(limits, schedule=replace(limits.schedule, eta=self.saved.frontier.eta))

    def started(self, engines: tuple[EngineId, ...]) -> RunStarted:
        """The event with which the coordinator continues."""
        if self.saved is None:
            return RunStarted(engines)
        steps, before = self.config.total_train_steps, self.saved.config["total_train_steps"]
        return recovered_start(
            self.saved.frontier,
            engines,
            self._kept,
            train_steps=0 if steps == before else steps,
        )

    @property
    def _kept(self) -> frozenset[GroupId]:
        saved = self.saved
        return frozenset(() if saved is None else (*saved.finished_groups, *saved.running_groups))

    def open_tokens(self, source: PromptSource) -> OpenTokens:
        """The tokens of open groups that were saved.

        Raises:
            ValueError: if they cannot be read, or are not those of the checkpoint.
        """
        if self.checkpoint is None:
            return OpenTokens()
        tokens = read_open_tokens(self.checkpoint, source)
        if (found := tokens.finished.keys() | tokens.running.keys()) != self._kept:
            raise ValueError(
                f"{self.checkpoint} has the tokens of groups {sorted(found)}, but names "
                f"{sorted(self._kept)}"
            )
        return tokens

    def metrics(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl until the checkpoint."""
        file = self.folder.path / METRICS
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def _measured_at_the_checkpoint(self) -> list[str]:
        """Lines of held-out rewards that were written after the checkpoint, of versions up to it.

        The weights of the checkpoint itself are measured again if no step is left.
        """
        file = self.folder.path / HELD_OUT
        if self.saved is None or not file.is_file():
            return []
        newest = self.version - (self.version == self.config.total_train_steps)
        lines = read_appended(file, self.saved.positions.get(HELD_OUT, 0)).lines
        return [f"{line}\n" for line in lines if json.loads(line)["version"] <= newest]

    def in_words(self) -> str:
        """What the run continues with, in a line."""
        if self.saved is None:
            return "the run has no checkpoint and starts over"
        finished, running = len(self.saved.finished_groups), len(self.saved.running_groups)
        over = len(self.saved.frontier.open) - finished - running
        return (
            f"continuing after step {self.version} of {self.config.total_train_steps}: "
            f"{finished} groups are finished, {running} continue with "
            f"{self.saved.running_tokens} tokens, {over} start over"
        )

    def cut_back(self) -> None:
        """Remove what the run wrote after the checkpoint, and its summary.

        Raises:
            ValueError: if a file lost lines from before the checkpoint.
        """
        path = self.folder.path
        measured = self._measured_at_the_checkpoint()
        cut_back(path, {} if self.saved is None else self.saved.positions, self.version)
        if measured:
            with (path / HELD_OUT).open("a", encoding="utf-8") as file:
                file.writelines(measured)
        (path / "summary.json").unlink(missing_ok=True)
        (path / "config.yaml").write_text(OmegaConf.to_yaml(self.config.model_dump()))
        if self.checkpoint is not None:
            self.folder.point("model", self.checkpoint)
        apply_retention(self.folder, keep=0)  # the best may have been a later one


def find_recovery(folder: Path | str, overrides: Sequence[str] = ()) -> Recovery:
    """Read how a run can continue.

    Args:
        folder: of the run.
        overrides: changed settings, as `total_train_steps=60`.

    Raises:
        ConfigError: a line per reason why it cannot.
    """
    path = Path(folder).expanduser()
    if not (path / "config.yaml").is_file():
        raise refusal("resume", f"{path} is not a run folder: it has no config.yaml")
    path = path.resolve()
    unseen = _check_ended(path)
    before = load_config(path / "config.yaml", [])
    config = load_config(path / "config.yaml", list(overrides))
    checkpoints = sorted(path.glob("checkpoints/step-*"))
    usable = [checkpoint for checkpoint in checkpoints if is_resumable(checkpoint)]
    if checkpoints and not usable:
        raise refusal(
            "checkpoint.resumable",
            f"{path} has no checkpoint to continue from, only models: it was trained with "
            "checkpoint.resumable=false, or by an older version; start a run with "
            f"actor.path={checkpoints[-1]}",
        )
    run_folder = RunFolder(path)
    if not usable:
        return Recovery(folder=run_folder, config=config, checkpoint=None, saved=None, notes=unseen)
    try:
        saved = read_saved_run(usable[-1])
        before = TrainConfig(**saved.config)
    except ValueError as error:
        raise ConfigError(*problems_of(error, "resume", named=True)) from error
    found = [*check_settings(before, config, path), *_check_steps(saved, config, path)]
    if found:
        raise ConfigError(*found)
    return Recovery(
        folder=run_folder,
        config=config,
        checkpoint=usable[-1],
        saved=saved,
        notes=(*unseen, *notes_of_changes(before, config, saved.frontier.version)),
    )


def check_given(recovery: Recovery, given: Sequence[str]) -> None:
    """Refuse to continue without the functions that a program gave to the run.

    Args:
        given: those that it gives now: `reward_fn`, `loss`.

    Raises:
        ConfigError: one line per function.
    """
    before = () if recovery.saved is None else recovery.saved.given
    missing = [
        Problem(
            Kind.SETTINGS,
            name,
            f"the run was given a {name} by a program; give it again: "
            f"resume_run({str(recovery.folder.path)!r}, {name}=...)",
        )
        for name in before
        if name not in given
    ]
    if missing:
        raise ConfigError(*missing)


def check_data(recovery: Recovery, problems: ProblemSet) -> None:
    """Refuse other problems than those of the checkpoint: group n would be another prompt.

    Raises:
        ConfigError: in one line.
    """
    if recovery.saved is not None and problems.digest() != recovery.saved.data:
        raise refusal(
            "dataset",
            f"the problems are not those that {recovery.folder.path} was trained on; restore its "
            "data, or start a new run with actor.path set to its model",
        )


def _check_ended(path: Path) -> tuple[str, ...]:
    """A line of a process that may run, but cannot be seen from here; none without one."""
    try:
        found = read_presence(path)
    except ValueError as error:
        raise ConfigError(*problems_of(error, "resume", named=True)) from error
    if found is not None and found.alive and found.process.pid != os.getpid():
        raise refusal(
            "resume",
            f"{path} is still running (process {found.process.pid}); stop it first: "
            f"areal-lab control {path} stop",
        )
    if found is None or found.alive is not None:
        return ()
    who = f"process {found.process.pid} on host {found.process.host}"
    return (
        f"note: {who} had the run before, and cannot be seen from here; if it still runs, it ends "
        "before it writes anything more",
    )


def _check_steps(saved: SavedRun, config: TrainConfig, path: Path) -> Iterator[Problem]:
    version, steps = saved.frontier.version, config.total_train_steps
    if steps < version or (steps == version and _is_complete(path)):
        yield Problem(
            Kind.SETTINGS,
            "total_train_steps",
            f"{path} has trained {version} of {steps} steps; raise total_train_steps to continue: "
            f"areal-lab train --resume {path} total_train_steps={2 * version}",
        )
    elif steps < saved.config["total_train_steps"]:
        yield Problem(
            Kind.SETTINGS,
            "total_train_steps",
            f"total_train_steps is {steps}, but the run was started with "
            f"{saved.config['total_train_steps']} and may have begun groups for all of them; stop "
            f"it earlier instead: areal-lab control {path} stop",
        )


def _is_complete(path: Path) -> bool:
    """Whether the run has ended with its summary; it may have been killed before."""
    try:
        return bool(json.loads((path / "summary.json").read_text())["status"] == "complete")
    except (OSError, ValueError, KeyError):
        return False

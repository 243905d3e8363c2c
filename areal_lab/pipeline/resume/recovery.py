"""Find the checkpoint from which a run continues, and reset the run folder to it.

    find_recovery: RUN, changed settings --> Recovery, or all reasons of a refusal
    check_data: refuses other problems than those of the checkpoint
    cut_back: removes lines and samples that were written after the checkpoint

Nothing is written before `cut_back`. A run that has not trained a step yet starts over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal_lab.config.given import Overrides
from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError, Kind, Problem, problems_of, refusal
from areal_lab.config.schema import TrainConfig
from areal_lab.control.events import EngineId, GroupId, RunStarted, Version
from areal_lab.control.frontier import recovered_start
from areal_lab.control.limits import Limits
from areal_lab.data.problems import ProblemSet, PromptSource
from areal_lab.host.durable import append_lines
from areal_lab.live.presence import read_presence
from areal_lab.models.checkpoint_files import checkpoint_fault
from areal_lab.pipeline.resume.changes import (
    check_complete,
    check_kind,
    check_settings,
    check_whole,
    damaged_settings,
    notes_of_changes,
)
from areal_lab.pipeline.resume.checkpoints import apply_retention, newest_checkpoint, newest_file
from areal_lab.pipeline.resume.positions import cut_back
from areal_lab.pipeline.resume.saved_run import (
    RUN_FILE,
    OpenTokens,
    SavedRun,
    read_open_tokens,
    read_saved_run,
    saved_version,
)
from areal_lab.resolve.limits import limits_of
from areal_lab.resolve.resolved import Resolved, given_names, resolve
from areal_lab.rewards.service import RewardFunction
from areal_lab.runlog.appended import read_appended
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.held_out import FILE as HELD_OUT
from areal_lab.runlog.held_out import HeldOutReward
from areal_lab.runlog.read_run import METRICS
from areal_lab.training.protocol import STATE_FOLDER


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Checkpoint, settings and notes of a run that continues."""

    folder: RunFolder
    config: TrainConfig
    """Settings from the checkpoint on."""
    checkpoint: Path | None
    """None if the run has not trained: it starts over."""
    saved: SavedRun | None
    """State of the pipeline in the checkpoint; None without a checkpoint."""
    notes: tuple[str, ...] = ()
    """A line for each changed setting, and for a process that may still run the training."""

    @property
    def version(self) -> Version:
        """Version of the checkpoint; 0 without one."""
        return 0 if self.saved is None else self.saved.frontier.version

    @property
    def state_folder(self) -> str:
        """Folder with the trainer's state; empty without a checkpoint."""
        return "" if self.checkpoint is None else str(self.checkpoint / STATE_FOLDER)

    @property
    def before(self) -> HeldOutReward | None:
        """Held-out rewards before training, if the run measured them."""
        if self.saved is None or not self.saved.held_out_before:
            return None
        return HeldOutReward(self.saved.held_out_before, self.saved.unscored_before)

    @property
    def saved_settings(self) -> TrainConfig:
        """Settings until the checkpoint."""
        return self.config if self.saved is None else TrainConfig(**self.saved.config)

    @property
    def limits(self) -> Limits:
        """Limits of the coordinator at the checkpoint, including a changed eta."""
        limits = limits_of(self.saved_settings)
        if self.saved is None:
            return limits
        return replace(limits, schedule=replace(limits.schedule, eta=self.saved.frontier.eta))

    def started(self, engines: tuple[EngineId, ...]) -> RunStarted:
        """Return the event with which the coordinator continues."""
        if self.saved is None:
            return RunStarted(engines)
        steps = self.config.total_train_steps
        before = self.saved_settings.total_train_steps
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
        """Read the saved tokens of open groups.

        Raises:
            ValueError: the tokens cannot be read, or belong to other groups than run.json names.
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
        """Return the lines of metrics.jsonl, which ends at the checkpoint after `cut_back`."""
        file = self.folder.path / METRICS
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def _measured_at_the_checkpoint(self) -> list[str]:
        """Return later lines of held_out.jsonl about versions up to the checkpoint.

        The version of the checkpoint is left out if no step is left, because it is measured again.
        """
        file = self.folder.path / HELD_OUT
        if self.saved is None or not file.is_file():
            return []
        newest = self.version - (self.version == self.config.total_train_steps)
        lines = read_appended(file, self.saved.positions.get(HELD_OUT, 0)).lines
        try:
            return [f"{line}\n" for line in lines if int(json.loads(line)["version"]) <= newest]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{file} cannot be read after the checkpoint: {error}; nothing was changed"
            ) from error

    def in_words(self) -> str:
        """Describe the recovered state in a line."""
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
        """Remove everything that the run wrote after the checkpoint, and its summary.

        Raises:
            ValueError: a file lost lines from before the checkpoint, or the checkpoint has changed
                since `find_recovery`; nothing is removed.
        """
        path = self.folder.path
        if self.checkpoint is not None and (fault := checkpoint_fault(self.checkpoint)):
            raise ValueError(fault)
        measured = self._measured_at_the_checkpoint()
        cut_back(path, {} if self.saved is None else self.saved.positions, self.version)
        if measured:
            append_lines(path / HELD_OUT, "".join(measured))
        (path / "summary.json").unlink(missing_ok=True)
        self.folder.write_config(self.config)
        if self.checkpoint is not None:
            self.folder.point("model", self.checkpoint)
        apply_retention(self.folder, keep=0)  # the best one may have come after the checkpoint


def find_recovery(folder: Path | str, overrides: Overrides | None = ()) -> Recovery:
    """Find the checkpoint from which a run can continue, and check changed settings.

    Args:
        folder: run folder.
        overrides: changed settings, such as `total_train_steps=60`.

    Raises:
        ConfigError: the run cannot continue; one line per reason.
    """
    path = Path(folder).expanduser()
    if not (path / "config.yaml").is_file():
        raise refusal("resume", f"{path} is not a run folder: it has no config.yaml")
    path = path.resolve()
    unseen = _check_ended(path)
    file, saved_in = path / "config.yaml", newest_file(path, RUN_FILE)
    check_whole(file, saved_in)
    check_kind("train", file)
    try:
        before = load_config(file, [])
    except ValueError as error:
        reason = str(error).split("\n", 1)[0]
        raise damaged_settings(file, reason, saved_in) from error
    config = load_config(file, overrides, files_are_given=False)
    newest = newest_checkpoint(path, RUN_FILE, saved_version)
    run_folder = RunFolder(path)
    notes = (*unseen, *(f"note: {one}" for one in newest.notes))
    if newest.checkpoint is None:
        return Recovery(folder=run_folder, config=config, checkpoint=None, saved=None, notes=notes)
    try:
        saved = read_saved_run(newest.checkpoint)
        check_complete(file, saved.config, before, newest.checkpoint / RUN_FILE)
        before = TrainConfig(**saved.config)
    except ValueError as error:
        raise ConfigError(*problems_of(error, "resume", named=True)) from error
    steps = before.total_train_steps
    found = [*check_settings(before, config, path), *_check_steps(saved, steps, config, path)]
    if found:
        raise ConfigError(*found)
    return Recovery(
        folder=run_folder,
        config=config,
        checkpoint=newest.checkpoint,
        saved=saved,
        notes=(*notes, *notes_of_changes(before, config, saved.frontier.version)),
    )


def check_given(recovery: Recovery, given: Sequence[str]) -> None:
    """Refuse to continue without the functions that a program passed to the run.

    Args:
        recovery: the run.
        given: names of the functions passed now: `reward_fn`, `loss`, `advantage`.

    Raises:
        ConfigError: one line per function.
    """
    before = () if recovery.saved is None else recovery.saved.given
    missing = [
        Problem(
            Kind.SETTINGS,
            name,
            f"a program passed {name} to the run; pass it again: "
            f"resume_run({str(recovery.folder.path)!r}, {name}=...)",
        )
        for name in before
        if name not in given
    ]
    if missing:
        raise ConfigError(*missing)


def resolve_recovery(
    recovery: Recovery,
    problems: object = None,
    reward_fn: RewardFunction | None = None,
    loss: Callable[..., Any] | None = None,
    advantage: Callable[..., Any] | None = None,
) -> Resolved:
    """Check a run that continues, as `resolve` checks a new one.

    Raises:
        ConfigError: one line per problem.
    """
    check_given(recovery, given_names(reward_fn=reward_fn, loss=loss, advantage=advantage))
    resolved = resolve(recovery.config, problems, loss, reward_fn, advantage)
    check_data(recovery, resolved.problems)
    return resolved


def check_data(recovery: Recovery, problems: ProblemSet) -> None:
    """Refuse problems that differ from the checkpoint's: group n would get another prompt.

    Raises:
        ConfigError: the problems differ.
    """
    if recovery.saved is not None and problems.digest() != recovery.saved.data:
        raise refusal(
            "dataset",
            f"the problems are not those that {recovery.folder.path} was trained on; restore its "
            "data, or start a new run with actor.path set to its model",
        )


def _check_ended(path: Path) -> tuple[str, ...]:
    """Refuse a run that is still running; return a note if its process is on another host."""
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
        f"note: {who} had the run before and cannot be seen from here; if it is still alive, it "
        "exits before its next write",
    )


def _check_steps(
    saved: SavedRun, before: int, config: TrainConfig, path: Path
) -> Iterator[Problem]:
    version, steps = saved.frontier.version, config.total_train_steps
    if steps < version or (steps == version and _is_complete(path)):
        yield Problem(
            Kind.SETTINGS,
            "total_train_steps",
            f"{path} has trained {version} of {steps} steps; raise total_train_steps to continue: "
            f"areal-lab train --resume {path} total_train_steps={2 * version}",
        )
    elif steps < before:
        yield Problem(
            Kind.SETTINGS,
            "total_train_steps",
            f"total_train_steps is {steps}, but the run was started with {before} and may have "
            "started groups for all of them; continue it without this setting and stop it earlier: "
            f"areal-lab control {path} stop",
        )


def _is_complete(path: Path) -> bool:
    """Return whether the run has ended with its summary; it may have been killed before."""
    try:
        return bool(json.loads((path / "summary.json").read_text())["status"] == "complete")
    except (OSError, ValueError, KeyError):
        return False

"""Check a run before anything is loaded, and make its folder, or find where to continue.

config --prepare--> Prepared --begin--> Job      RUN --find_resumable--> Resumable
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from omegaconf import OmegaConf

from areal_lab.config.load import Overrides, load_record, read_yaml
from areal_lab.config.offline import ALIASES, KINDS, DPOConfig, OfflineConfig
from areal_lab.config.problem import ConfigError, Kind, Problem, problems_of, refusal
from areal_lab.config.shipped import offline_configs, settings_file
from areal_lab.config.suggest import nearest
from areal_lab.control.events import Version
from areal_lab.live.presence import read_presence
from areal_lab.models.locate import known_models, resolve_model_path
from areal_lab.offline.job import Job
from areal_lab.offline.rows import RowSet, load_rows
from areal_lab.pipeline.resume.changes import changed_settings
from areal_lab.pipeline.resume.positions import cut_back
from areal_lab.preflight.check import check_model, check_run_folder
from areal_lab.preflight.placement import Machine, this_machine
from areal_lab.runlog.folder import RunFolder
from areal_lab.sinks.start import check_sinks

FIXED: Final = (
    *("seed", "dataset.", "train_on", "center_rewards_coefficient"),
    *("ref.", "loss", "beta", "label_smoothing", "length_normalized"),
    *("actor.path", "actor.use_lora", "actor.lora_", "actor.target_modules", "actor.optimizer."),
)
"""Settings, and beginnings of names, that a run keeps."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked run."""

    config: OfflineConfig
    rows: RowSet
    model_path: Path
    reference_path: Path | None
    device: str
    gpus: tuple[str, ...]
    """GPU of each process, with `cuda`."""
    threads: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Resumable:
    """A run that can continue."""

    config: OfflineConfig
    folder: RunFolder
    checkpoint: Path | None
    """None starts over: the run ended before its first checkpoint."""
    changes: tuple[str, ...]
    """A line per changed setting."""


def load_offline(
    kind: str, files: str | Path | Sequence[str | Path] = (), overrides: Overrides = ()
) -> OfflineConfig:
    """The settings of a command: defaults, files or names of shipped ones, changes.

    Raises:
        ConfigError: one line for each wrong setting.
        ValueError: in one line, if a file does not exist.
    """
    sources = [files] if isinstance(files, str | Path) else files
    known = offline_configs(kind)
    paths = [settings_file(one, known, f"config of areal-lab {kind}") for one in sources]
    return load_record(KINDS[kind](), paths, overrides, ALIASES, bases=offline_configs())


def prepare(
    config: OfflineConfig, rows: RowSet | None = None, *, machine: Machine | None = None
) -> Prepared:
    """Find everything wrong with a run that can be known without loading a model.

    Args:
        rows: replace `config.dataset`.
        machine: that the run is for; None inspects this one.

    Raises:
        ConfigError: with all problems.
    """
    machine = machine or this_machine()
    device, gpus, found = _place(config, machine)
    found += [*_check_settings(config), *check_sinks(config), *check_run_folder(config)]
    dataset = config.rows
    try:
        rows = rows or load_rows(dataset, seed=config.seed)
        if dataset.batch_size > len(rows.train):
            raise ValueError(
                f"batch_size is {dataset.batch_size}, but there are {len(rows.train)} rows to "
                f"train on (and {len(rows.held_out)} held out); lower it, or dataset.eval_size"
            )
    except ValueError as error:
        found += problems_of(error, "dataset")
    try:
        model_path = check_model(config)
        reference_path = _reference(config)
    except ConfigError as error:
        raise ConfigError(*found, *error.problems) from error
    if found:
        raise ConfigError(*found)
    assert rows is not None, "refused above"
    return Prepared(
        config=config,
        rows=rows,
        model_path=model_path,
        reference_path=reference_path,
        device=device,
        gpus=gpus,
        threads=config.actor.threads or max(1, machine.cores // config.actor.processes),
        notes=tuple(_notes(config)),
    )


def begin(prepared: Prepared, resumable: Resumable | None = None) -> Job:
    """The job of a prepared run, in a new folder or in that of the run that continues."""
    checkpoint = None
    if resumable is None:
        folder = RunFolder.create(prepared.config)
    else:
        folder, checkpoint = resumable.folder, resumable.checkpoint
        _cut_back(resumable)
    return Job(
        config=prepared.config,
        folder=folder.path,
        model_path=prepared.model_path,
        reference_path=prepared.reference_path,
        checkpoint=checkpoint,
        device=prepared.device,
        threads=prepared.threads,
    )


def find_resumable(kind: str, path: Path, overrides: Overrides = ()) -> Resumable:
    """Read how a run can continue.

    Args:
        kind: name of the command.
        path: of the run folder.
        overrides: changed settings, as `total_train_steps=60`.

    Raises:
        ConfigError: a line per reason why it cannot.
    """
    from areal_lab.offline.checkpoints import newest_saved  # loads torch

    file = path.expanduser() / "config.yaml"
    if not file.is_file():
        raise refusal("resume", f"{path} is not a run folder: it has no config.yaml")
    path = file.parent.resolve()
    keys = read_yaml(file).keys()
    theirs = next((name for name, one in KINDS.items() if set(one.model_fields) <= keys), "train")
    if theirs != kind:
        raise refusal(
            "resume",
            f"{path} is a run of areal-lab {theirs}; continue it by areal-lab {theirs} --resume",
        )
    before = load_offline(kind, file)
    config = load_offline(kind, file, overrides)
    _check_ended(path)
    changed = list(changed_settings(before, config))
    fixed = [one for one in changed if one[0].startswith(FIXED)]
    if fixed:
        raise ConfigError(
            *(
                Problem(
                    Kind.SETTINGS,
                    name,
                    f"{name} is {now!r}, but was {was!r}: a run keeps it; start a new run to "
                    "change it",
                )
                for name, was, now in fixed
            )
        )
    checkpoint = newest_saved(path)
    models = sorted(path.glob("checkpoints/step-*"))
    if checkpoint is None and models:
        raise refusal(
            "checkpoint.resumable",
            f"{path} has no checkpoint to continue from, only models: it was trained with "
            f"checkpoint.resumable=false; start a run with actor.path={models[-1]}",
        )
    return Resumable(
        config=config,
        folder=RunFolder(path),
        checkpoint=checkpoint,
        changes=tuple(f"{name} is {now!r} from now on (was {was!r})" for name, was, now in changed),
    )


def _cut_back(resumable: Resumable) -> None:
    """Remove what the run wrote after its checkpoint."""
    from areal_lab.offline.checkpoints import read_saved  # loads torch

    folder, checkpoint = resumable.folder, resumable.checkpoint
    step: Version = 0
    where: dict[str, int] = {}
    if checkpoint is not None:
        saved = read_saved(checkpoint)
        step, where = saved.step, saved.positions
    cut_back(folder.path, where, step)
    (folder.path / "summary.json").unlink(missing_ok=True)
    text = OmegaConf.to_yaml(resumable.config.model_dump())
    (folder.path / "config.yaml").write_text(text)
    if checkpoint is not None:
        folder.point("model", checkpoint)


def _check_ended(path: Path) -> None:
    found = read_presence(path)
    if found is not None and found.alive and found.process.pid != os.getpid():
        raise refusal(
            "resume",
            f"{path} is still running (process {found.process.pid}); stop it first: "
            f"kill -INT {found.process.pid}",
        )


def _check_settings(config: OfflineConfig) -> Iterator[Problem]:
    actor, dataset = config.actor, config.rows
    if actor.processes > dataset.batch_size:
        yield _wrong(
            "actor.processes",
            f"actor.processes is {actor.processes}, but a batch has {dataset.batch_size} rows "
            "(dataset.batch_size), which are divided among them; lower it",
        )
    if actor.shard_ranks and actor.processes % actor.shard_ranks:
        yield _wrong(
            "actor.shard_ranks",
            f"actor.shard_ranks is {actor.shard_ranks}, but must divide actor.processes, "
            f"{actor.processes}; 0 shards over all of them",
        )
    if isinstance(config, DPOConfig) and config.loss == "ipo" and config.label_smoothing:
        yield _wrong(
            "label_smoothing",
            f"label_smoothing is {config.label_smoothing}, but loss=ipo has none; leave it out, or "
            "set loss=dpo",
        )


def _place(config: OfflineConfig, machine: Machine) -> tuple[str, tuple[str, ...], list[Problem]]:
    """Device, GPU of each process, and why the wanted ones are not there."""
    actor, gpus = config.actor, machine.gpus
    enough = machine.torch_has_cuda and len(gpus) >= actor.processes
    if actor.device != "cpu" and enough:
        return "cuda", gpus[: actor.processes], []
    if actor.device != "cuda":
        return "cpu", (), []
    why = f"{len(gpus)} GPU(s) are visible here for {actor.processes} process(es)"
    if gpus and not machine.torch_has_cuda:
        why = "the installed torch was built without CUDA"
    text = f"actor.device is cuda, but {why}; write actor.device=cpu, or auto"
    return "cpu", (), [_wrong("actor.device", text)]


def _reference(config: OfflineConfig) -> Path | None:
    if not (isinstance(config, DPOConfig) and config.ref.path):
        return None
    try:
        return resolve_model_path(config.ref.path)
    except ValueError as error:
        reason = " ".join(str(error).split())
        text = f"ref.path: {reason}{nearest(config.ref.path, known_models())}"
        raise ConfigError(_wrong("ref.path", text)) from error


def _notes(config: OfflineConfig) -> Iterator[str]:
    actor, usual = config.actor, type(config.actor)()
    names = ("lora_rank", "lora_alpha", "target_modules")
    unused = [f"actor.{name}" for name in names if getattr(actor, name) != getattr(usual, name)]
    if unused and not actor.use_lora:
        yield f"{', '.join(unused)} has no effect without actor.use_lora=true"
    if config.total_train_steps and config.total_train_epochs != type(config)().total_train_epochs:
        yield "total_train_epochs has no effect with total_train_steps"


def _wrong(setting: str, message: str) -> Problem:
    return Problem(Kind.SETTINGS, setting, message)

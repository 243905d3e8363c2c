"""Check a run before anything is loaded, and make its folder.

config --prepare--> Prepared --begin--> Job
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from areal_lab.config.offline import DPOConfig, OfflineConfig
from areal_lab.config.problem import ConfigError, Kind, Problem, problems_of
from areal_lab.config.suggest import nearest
from areal_lab.models.locate import known_models, resolve_model_path
from areal_lab.offline.job import Job
from areal_lab.offline.resume import Resumable, cut_back_to
from areal_lab.offline.rows import RowSet, load_rows
from areal_lab.preflight.check import check_model, check_run_folder
from areal_lab.preflight.placement import Machine, this_machine
from areal_lab.preflight.trainer import check_layers
from areal_lab.runlog.folder import RunFolder
from areal_lab.sinks.start import check_sinks


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
    """The job of a prepared run, in a new folder or in that of the run that continues.

    Raises:
        ConfigError: the rows are not those that the run was trained on.
    """
    checkpoint = None
    if resumable is None:
        folder = RunFolder.create(prepared.config)
    else:
        folder, checkpoint = resumable.folder, resumable.checkpoint
        cut_back_to(resumable, prepared.rows)
    return Job(
        config=prepared.config,
        folder=folder.path,
        model_path=prepared.model_path,
        reference_path=prepared.reference_path,
        checkpoint=checkpoint,
        device=prepared.device,
        threads=prepared.threads,
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
    device = "cuda" if actor.device != "cpu" and enough else "cpu"
    if device == "cuda" or actor.device != "cuda":
        try:
            check_layers(actor, device)
        except ConfigError as error:
            return device, (), [*error.problems]
        return device, gpus[: actor.processes] if device == "cuda" else (), []
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

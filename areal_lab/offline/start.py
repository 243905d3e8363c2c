"""Check the settings of a run before a model is loaded, and make its folder.

config --resolve_offline--> ResolvedJob --begin--> ResolvedJob with a folder
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from areal_lab.config.offline import DPOConfig, OfflineConfig
from areal_lab.config.problem import ConfigError, Kind, Problem, problems_of
from areal_lab.config.unknown import nearest
from areal_lab.models.locate import is_converted_first, known_models, sound_model_path
from areal_lab.offline.job import ResolvedJob, total_steps
from areal_lab.offline.resume import Resumable, cut_back_to
from areal_lab.offline.rows import RowSet, load_rows
from areal_lab.resolve.check import check_model, check_run_folder
from areal_lab.resolve.learning import rates_without_effect, slow_rates
from areal_lab.resolve.placement import Machine, check_visible, this_machine
from areal_lab.resolve.trainer import check_layers
from areal_lab.resolve.unread import OFFLINE
from areal_lab.runlog.folder import RunFolder
from areal_lab.sinks.start import check_sinks


def resolve_offline(
    config: OfflineConfig, rows: RowSet | None = None, *, machine: Machine | None = None
) -> ResolvedJob:
    """Check a run without loading a model, and report all problems.

    Args:
        config: settings of the run.
        rows: rows instead of `config.dataset`.
        machine: machine of the run; None inspects this one.

    Raises:
        ConfigError: one line per problem.
    """
    machine = machine or this_machine()
    device, gpus, found = _place(config, machine)
    found += [*_check_settings(config), *check_sinks(config), *check_run_folder(config)]
    unread = OFFLINE[type(config)].refusals(config)
    found += [one for one in unread if not (rows and one.setting.startswith("dataset."))]
    found += rates_without_effect("actor.optimizer", config.actor.optimizer)
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
    if found and is_converted_first(config.actor.path):
        raise ConfigError(*found)  # at once, not after the conversion
    try:
        model_path = check_model(config)
        reference_path = _reference(config)
    except ConfigError as error:
        raise ConfigError(*found, *error.problems) from error
    if found:
        raise ConfigError(*found)
    assert rows is not None, "refused above"
    return ResolvedJob(
        config=config,
        rows=rows,
        model_path=model_path,
        reference_path=reference_path,
        device=device,
        gpus=gpus,
        threads=config.actor.threads or max(1, machine.cores // config.actor.processes),
        notes=(
            *OFFLINE[type(config)].notes(config),
            *slow_rates(
                "actor.optimizer", config.actor.optimizer, total_steps(config, len(rows.train))
            ),
        ),
    )


def begin(job: ResolvedJob, resumable: Resumable | None = None) -> ResolvedJob:
    """Give a job its run folder: a new one, or that of the run that continues.

    Raises:
        ConfigError: the continued run was trained on other rows.
    """
    if resumable is None:
        return replace(job, folder=RunFolder.create(job.config).path)
    cut_back_to(resumable, job.rows)
    return replace(job, folder=resumable.folder.path, checkpoint=resumable.checkpoint)


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
            f"label_smoothing is {config.label_smoothing}, but loss=ipo has no smoothing; leave it "
            "out, or set loss=dpo",
        )
    if isinstance(config, DPOConfig) and config.label_smoothing == 0.5:
        yield _wrong(
            "label_smoothing",
            "label_smoothing is 0.5, which makes both responses of a pair equally likely to be the "
            "better one, so nothing is learned; set it below 0.5 (0 to 0.3 are usual)",
        )


def _place(config: OfflineConfig, machine: Machine) -> tuple[str, tuple[str, ...], list[Problem]]:
    """Return the device, the GPU of each process, and problems with them."""
    actor, gpus = config.actor, machine.gpus
    try:
        check_visible(gpus)
    except ConfigError as error:
        return "cpu", (), [*error.problems]
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
        return sound_model_path(config.ref.path)
    except ValueError as error:
        reason = " ".join(str(error).split())
        text = f"ref.path: {reason}{nearest(config.ref.path, known_models())}"
        raise ConfigError(_wrong("ref.path", text)) from error


def _wrong(setting: str, message: str) -> Problem:
    return Problem(Kind.SETTINGS, setting, message)

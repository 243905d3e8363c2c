"""Serve the requests of the pipeline in the trainer process.

load model -> export first version -> TrainerReady
TrainBatchRequest -> step (-> its token fields, in a file) -> TrainStepResult
                                                  until None or the end of the pipe
ExportRequest -> weights for engines, in a folder or in memory -> Exported
PushRequest -> weights in memory to engines -> Pushed, in a separate thread (`pushing`)
SaveRequest -> Hugging Face folder, trainer's state, files of the pipeline -> Saved
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers import PreTrainedModel

from areal_lab.control.events import Version
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.folder import write_weights
from areal_lab.engines.weights.push import Pusher
from areal_lab.engines.weights.records import Transfer, WeightsInMemory
from areal_lab.host.durable import flush_tree, replace_flushed
from areal_lab.host.processes import on_parent_death
from areal_lab.models.dtypes import compute_dtype
from areal_lab.runlog.tokens.fields import fields_path, write_fields
from areal_lab.training.checkpoint import load_state, save_state, seed_step
from areal_lab.training.learner import Learner, make_learner
from areal_lab.training.lora import (
    adapter_tensors,
    add_lora,
    has_lora,
    merged_tensors,
    target_modules,
    write_adapter,
    write_adapter_folder,
)
from areal_lab.training.metrics import token_fields
from areal_lab.training.model import load_policy
from areal_lab.training.process.pushing import make_pusher, start_pushing
from areal_lab.training.protocol import (
    STATE_FOLDER,
    Exported,
    ExportRequest,
    Saved,
    SaveRequest,
    Span,
    TrainBatchRequest,
    TrainerReady,
    TrainStepResult,
)
from areal_lab.training.settings import TrainerSettings
from areal_lab.training.step import train_batch

ADAPTER_FOLDER = "adapter"
"""Subfolder of a checkpoint with the LoRA adapter, for `peft.PeftModel.from_pretrained`."""


def serve(pipe: Connection, push_pipe: Connection | None, settings_json: str) -> bool:
    """Load the model and serve messages until `None` or the end of the pipe.

    Returns:
        True after `None`; False if the pipeline is gone.
    """
    settings = TrainerSettings.from_json(settings_json)
    actor = settings.actor
    # If the pipeline is killed, only this process can remove the weights.
    on_parent_death(lambda: shutil.rmtree(settings.weights_root, ignore_errors=True))
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.config.seed)
    _log(f"loading {settings.model_path}")
    model = load_policy(
        Path(settings.model_path),
        device=settings.device,
        gradient_checkpointing=actor.gradient_checkpointing,
    )
    if actor.use_lora:
        targets = target_modules(model, actor.target_modules)
        add_lora(
            model,
            rank=actor.lora_rank,
            alpha=actor.lora_alpha,
            targets=targets,
            merged=Transfer(settings.config.rollout.transfer) is not Transfer.ADAPTER,
        )
    learner = make_learner(model, settings)
    version = settings.first_version
    if settings.state_folder:
        _log(f"continuing from {settings.state_folder}")
        load_state(learner, Path(settings.state_folder))
    pusher = make_pusher(settings)
    if pusher is not None and push_pipe is not None:
        start_pushing(push_pipe, pusher)
    exported = export(learner, version, pusher)
    ready = TrainerReady(
        weights=first_weights(learner, version, exported),
        exported=exported,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        compute_dtype=str(learner.dtype).removeprefix("torch."),
        device=settings.device,
    )
    _log(
        f"ready: {ready.parameters:,} parameters, {ready.trained_parameters:,} of them trained, "
        f"computing in {ready.compute_dtype}"
    )
    pipe.send(ready)
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            _log("the pipeline closed the connection")
            return False
        match message:
            case TrainBatchRequest():
                pipe.send(train(learner, message, version))
                version += 1
            case ExportRequest():
                start_s = time.time()
                weights = export(learner, version, pusher)
                pipe.send(Exported(weights, Span("export weights", start_s, time.time())))
            case SaveRequest():
                start_s = time.time()
                save(learner, message)
                pipe.send(Saved(message.path, version, Span("save", start_s, time.time())))
            case None:
                _log("stopping as requested")
                return True
            case _:
                raise TypeError(f"the trainer got a {type(message).__name__}, which is no request")


def train(learner: Learner, request: TrainBatchRequest, version: Version) -> TrainStepResult:
    """Run one step.

    Raises:
        ValueError: if the request is for another version than the trainer has.
        NonFiniteStep: from `train_batch`.
    """
    if request.version != version:
        raise ValueError(f"asked to train version {request.version}, but the trainer has {version}")
    seed_step(learner.settings.config.seed, version)
    outcome = train_batch(learner, request)
    spans = outcome.spans
    if folder := learner.settings.fields_folder:
        start_s = time.time()
        fields = token_fields(outcome.advantages, outcome.records)
        write_fields(fields_path(Path(folder), version + 1), fields)
        spans = (*spans, Span("token fields", start_s, time.time()))
    return TrainStepResult(version + 1, outcome.metrics, spans)


def export(
    learner: Learner, version: Version, pusher: Pusher | None
) -> WeightsFolder | WeightsInMemory:
    """Export the weights in the form that the run's transfer uses, in the engines' dtype."""
    if pusher is not None:
        tensors = merged_tensors(learner.model)
        return pusher.hold(tensors, version, dtype=_export_dtype(learner.settings))
    if Transfer(learner.settings.config.rollout.transfer) is Transfer.ADAPTER:
        settings = learner.settings
        return write_adapter_folder(
            learner.model, Path(settings.weights_root), version, dtype=_export_dtype(settings)
        )
    return _model_folder(learner, version)


def first_weights(
    learner: Learner, version: Version, exported: WeightsFolder | WeightsInMemory
) -> WeightsFolder:
    """The folder that engines are started with: the first version as a model folder.

    Args:
        exported: the same version in the form that running engines receive.
    """
    if isinstance(exported, WeightsInMemory):
        return _model_folder(learner, version)
    if exported.adapter is not None:
        # A new adapter is zero, so the model is the same without it.
        return replace(exported, path=Path(learner.settings.model_path))
    return exported


def _model_folder(learner: Learner, version: Version) -> WeightsFolder:
    settings = learner.settings
    return write_weights(
        learner.model,
        Path(settings.weights_root),
        version,
        dtype=_export_dtype(settings),
        tensors=merged_tensors(learner.model),
    )


def _export_dtype(settings: TrainerSettings) -> torch.dtype:
    # The engines' type: that of this machine's CPU, also for a trainer on a GPU.
    return compute_dtype(settings.config.rollout.dtype)


def save(learner: Learner, request: SaveRequest) -> None:
    """Write a checkpoint of the learner."""

    def add(folder: Path) -> None:
        if request.state:
            save_state(learner, folder / STATE_FOLDER)
        for name, content in request.files.items():
            (folder / name).write_bytes(content)

    save_folder(learner.model, Path(learner.settings.model_path), request.path, add)


def save_folder(
    model: PreTrainedModel,
    source: Path,
    path: Path,
    add: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write float32 weights, configuration and tokenizer; appears complete or not at all, also
    after a power failure.

    Adapters are merged into the weights, and also saved separately in `ADAPTER_FOLDER`.

    Args:
        source: folder that the model was loaded from; its tokenizer files are copied.
        path: folder to create; an older one of that name is replaced.
        add: adds to the folder before it appears.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.writing-", dir=path.parent))
    try:
        model.save_pretrained(temporary, state_dict=merged_tensors(model))
        if has_lora(model):
            adapter = temporary / ADAPTER_FOLDER
            adapter.mkdir()
            write_adapter(model, adapter_tensors(model, dtype=torch.float32), adapter)
        for file in _tokenizer_files(source):
            shutil.copy(file, temporary)
        add(temporary)
        temporary.chmod(0o755)
        flush_tree(temporary)
        if path.exists():
            shutil.rmtree(path)
        replace_flushed(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tokenizer_files(source: Path) -> list[Path]:
    """All files besides the weights that a tokenizer may consist of.

    They are copied because loading and saving a tokenizer may change it.
    """
    own = {"config.json", "generation_config.json", "source.json"}
    kinds = {".json", ".jinja", ".model", ".txt"}
    return [
        file
        for file in sorted(source.iterdir())
        if file.suffix in kinds and file.name not in own and not file.name.endswith(".index.json")
    ]


def _log(line: str) -> None:
    print(f"trainer: {line}", file=sys.stderr, flush=True)

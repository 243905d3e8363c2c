"""What the trainer gives away: weights for engines, and checkpoints.

    learner --export--> folder, adapter folder, or memory of the first rank (for `Pusher`)
            --save----> Hugging Face folder, trainer's state, critic

All ranks walk over the names in one order and gather tensor by tensor; the first one keeps them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from areal_lab.control.events import Version
from areal_lab.data import wrapping
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.folder import write_weights
from areal_lab.engines.weights.push import Pusher
from areal_lab.engines.weights.records import Transfer, WeightsInMemory
from areal_lab.host.durable import flush_tree, replace_flushed
from areal_lab.models.dtypes import compute_dtype
from areal_lab.training.checkpoint import save_state
from areal_lab.training.critic import Critic
from areal_lab.training.learner import Learner
from areal_lab.training.lora import (
    adapter_tensors,
    has_lora,
    merged_tensors,
    write_adapter,
    write_adapter_folder,
)
from areal_lab.training.protocol import STATE_FOLDER, SaveRequest
from areal_lab.training.ranks import ALONE, Ranks
from areal_lab.training.settings import TrainerSettings

_OF_A_CHECKPOINT = ("run.json", "offline.json", wrapping.FILE)
"""Files that runs add to a checkpoint; a run that starts from that one has its own."""
ADAPTER_FOLDER = "adapter"
"""Subfolder of a checkpoint with the LoRA adapter, for `peft.PeftModel.from_pretrained`."""
CRITIC_FOLDER = "critic"
"""Subfolder of a checkpoint with the critic, for `critic.path` and for
`AutoModelForSequenceClassification.from_pretrained`."""


def export(
    learner: Learner, version: Version, pusher: Pusher | None
) -> WeightsFolder | WeightsInMemory | None:
    """Export the weights in the form that the run's transfer uses, in the engines' dtype.

    Args:
        learner: whole, or one of several ranks, which must all export.
        version: of its weights.
        pusher: holds them, where engines get them from memory; the first rank's.

    Returns:
        Where the weights are; None on all ranks but the first.
    """
    settings, ranks = learner.settings, learner.ranks
    dtype = _export_dtype(settings)
    if Transfer(settings.config.rollout.transfer) is Transfer.ADAPTER:
        adapter = adapter_tensors(learner.model, ranks, dtype=dtype)
        if not ranks.first:
            return None
        root = Path(settings.weights_root)
        return write_adapter_folder(learner.model, root, version, dtype=dtype, tensors=adapter)
    if pusher is None and not _from_memory(settings):
        return _model_folder(learner, version)
    tensors = merged_tensors(learner.model, ranks, dtype=dtype)
    return None if pusher is None else pusher.hold(tensors, version, dtype=dtype)


def first_weights(
    learner: Learner, version: Version, exported: WeightsFolder | WeightsInMemory | None
) -> WeightsFolder | None:
    """The folder that engines are started with: the first version as a model folder.

    Args:
        learner: one of the ranks, which must all call this.
        version: of its weights.
        exported: the same version in the form that running engines receive.

    Returns:
        None on all ranks but the first.
    """
    elsewhere = exported is None and _from_memory(learner.settings)
    if elsewhere or isinstance(exported, WeightsInMemory):
        return _model_folder(learner, version)
    if exported is not None and exported.adapter is not None:
        # A new adapter is zero, so the model is the same without it.
        return replace(exported, path=Path(learner.settings.model_path))
    return exported


def _model_folder(learner: Learner, version: Version) -> WeightsFolder | None:
    settings, ranks = learner.settings, learner.ranks
    dtype = _export_dtype(settings)
    tensors = merged_tensors(learner.model, ranks, dtype=dtype)
    if not ranks.first:
        return None
    root = Path(settings.weights_root)
    return write_weights(learner.model, root, version, dtype=dtype, tensors=tensors)


def _from_memory(settings: TrainerSettings) -> bool:
    transfer = Transfer(settings.config.rollout.transfer)
    return transfer in (Transfer.HTTP_TENSOR, Transfer.DISTRIBUTED)


def _export_dtype(settings: TrainerSettings) -> torch.dtype:
    # That of the engines, wherever the trainer computes.
    return compute_dtype(settings.config.rollout.dtype, settings.engine_device)


def save(learner: Learner, request: SaveRequest) -> None:
    """Write a checkpoint of the learner; all ranks take part, the first one makes the folder."""

    source = Path(learner.settings.model_path)

    def add(folder: Path) -> None:
        if request.state:
            save_state(learner, folder / STATE_FOLDER)
        for name, content in request.files.items() if learner.ranks.first else ():
            (folder / name).write_bytes(content)
        if isinstance(learner.critic, Critic):
            model = learner.critic.values.model
            tensors = merged_tensors(model, learner.ranks)
            if learner.ranks.first:
                model.save_pretrained(folder / CRITIC_FOLDER, state_dict=tensors)
                for file in _tokenizer_files(source):
                    shutil.copy(file, folder / CRITIC_FOLDER)

    save_folder(learner.model, source, request.path, add, ranks=learner.ranks)


def save_folder(
    model: PreTrainedModel,
    source: Path,
    path: Path,
    add: Callable[[Path], None] = lambda _: None,
    *,
    ranks: Ranks = ALONE,
) -> None:
    """Write float32 weights, configuration and tokenizer; appears complete or not at all, also
    after a power failure.

    Adapters are merged into the weights, and also saved separately in `ADAPTER_FOLDER`.

    Args:
        model: whole, or one of the shards.
        source: folder that the model was loaded from; its tokenizer files are copied.
        path: folder to create; an older one of that name is replaced.
        add: adds to the folder before it appears; called by every rank.
        ranks: all of them call this.
    """
    tensors = merged_tensors(model, ranks)
    adapter = adapter_tensors(model, ranks, dtype=torch.float32) if has_lora(model) else None
    if not ranks.first:
        add(Path(ranks.announce(None)))
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.writing-", dir=path.parent))
    try:
        # What all ranks do comes first: nobody waits while this one writes.
        ranks.announce(str(temporary))
        add(temporary)
        model.save_pretrained(temporary, state_dict=tensors)
        if adapter is not None:
            (temporary / ADAPTER_FOLDER).mkdir()
            write_adapter(model, adapter, temporary / ADAPTER_FOLDER)
        for file in _tokenizer_files(source):
            shutil.copy(file, temporary)
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
    own = {"config.json", "generation_config.json", "source.json", *_OF_A_CHECKPOINT}
    kinds = {".json", ".jinja", ".model", ".txt"}
    return [
        file
        for file in sorted(source.iterdir())
        if file.suffix in kinds and file.name not in own and not file.name.endswith(".index.json")
    ]

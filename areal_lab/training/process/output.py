"""Outputs of the trainer: weights for engines, and checkpoints.

    learner --export--> folder, adapter folder, or memory of the first rank (for `Pusher`)
            --save----> Hugging Face folder, trainer's state, critic: gathered, then written

All ranks walk over the names in one order and gather tensor by tensor; the first one keeps them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from areal_lab.control.events import Version
from areal_lab.data import wrapping
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.folder import write_weights
from areal_lab.engines.weights.push import Pusher
from areal_lab.engines.weights.records import Transfer, WeightsInMemory
from areal_lab.host.claim import Claim
from areal_lab.host.durable import (
    disk_error,
    flush_tree,
    make_way,
    mode_by_umask,
    replace_flushed,
    writing,
)
from areal_lab.host.owned_folders import remove_tree
from areal_lab.models import checkpoint_files
from areal_lab.models.checkpoint_files import step_of
from areal_lab.models.folder import compute_dtype
from areal_lab.training.checkpoint import state_of_learner, write_state
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

_OF_A_CHECKPOINT = ("run.json", "offline.json", wrapping.FILE, checkpoint_files.FILE)
"""Files that runs add to a checkpoint; a run that starts from it writes new ones."""
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
        pusher: keeps them, if engines get them from memory; the first rank's.

    Returns:
        Location of the weights; None on all ranks but the first.
    """
    settings, ranks = learner.settings, learner.ranks
    dtype = export_dtype(settings)
    if Transfer(settings.config.rollout.transfer) is Transfer.ADAPTER:
        adapter = adapter_tensors(learner.model, ranks, dtype=dtype)
        if not ranks.first:
            return None
        root = Path(settings.weights_root)
        return write_adapter_folder(learner.model, root, version, dtype=dtype, tensors=adapter)
    if pusher is None and not _from_memory(settings):
        return _model_folder(learner, version)
    tensors = merged_tensors(learner.model, ranks, dtype=dtype, rounded=settings.param_dtype)
    return None if pusher is None else pusher.hold(tensors, version, dtype=dtype)


def first_weights(
    learner: Learner, version: Version, exported: WeightsFolder | WeightsInMemory | None
) -> WeightsFolder | None:
    """Return the folder with which engines start: the first version as a model folder.

    Args:
        learner: one of the ranks, which must all call this.

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
    dtype = export_dtype(settings)
    tensors = merged_tensors(learner.model, ranks, dtype=dtype, rounded=settings.param_dtype)
    if not ranks.first:
        return None
    root = Path(settings.weights_root)
    return write_weights(learner.model, root, version, dtype=dtype, tensors=tensors)


def _from_memory(settings: TrainerSettings) -> bool:
    transfer = Transfer(settings.config.rollout.transfer)
    return transfer in (Transfer.HTTP_TENSOR, Transfer.DISTRIBUTED, Transfer.CUDA_IPC)


def export_dtype(settings: TrainerSettings) -> torch.dtype:
    """The type of the weights that engines get: theirs, wherever the trainer computes."""
    return compute_dtype(settings.config.rollout.dtype, settings.engine_device)


def save(learner: Learner, request: SaveRequest) -> None:
    """Write a checkpoint of the learner; all ranks take part, the first one makes the folder."""
    prepare_save(learner, request).write(learner.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSave:
    """Contents of a checkpoint; writing needs no group of ranks except that of its state."""

    request: SaveRequest
    source: Path
    """Folder that the model was loaded from."""
    folder: WholeFolder
    state: dict[str, Any] | None
    """The trainer's, of this rank."""
    critic: ModelParts | None

    def write(self, ranks: Ranks, group: ProcessGroup | None = None) -> None:
        """Write the folder and let it appear; every rank calls this.

        Args:
            group: of these ranks, in which they agree on the parts of the state; the default one
                if None, which then nothing else may use.
        """

        def add(folder: Path) -> None:
            if self.state is not None:
                write_state(self.state, folder / STATE_FOLDER, ranks, group)
            if not ranks.first:
                return
            for name, content in self.request.files.items():
                (folder / name).write_bytes(content)
            if self.critic is not None:
                self.critic.write(folder / CRITIC_FOLDER)
                for file in _tokenizer_files(self.source):
                    shutil.copy(file, folder / CRITIC_FOLDER)

        tensors = tree_leaves((self.state, None if self.critic is None else self.critic.tensors))
        more_bytes = sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))
        self.folder.write(self.source, add, more_bytes)


def prepare_save(learner: Learner, request: SaveRequest) -> PreparedSave:
    """Gather what a checkpoint is written from; a collective call where there are several ranks.

    Args:
        request: if it is asynchronous, everything is copied, so that the learner may train on.
    """
    ranks = learner.ranks
    copy, critic = request.asynchronous, None
    if isinstance(learner.critic, Critic):
        model = learner.critic.values.model
        critic = ModelParts(model, merged_tensors(model, ranks, copy=copy))
    state = state_of_learner(learner) if request.state else None
    return PreparedSave(
        request=request,
        source=Path(learner.settings.model_path),
        state=copied(state) if copy else state,
        critic=critic,
        folder=begin_folder(
            learner.model, request.path, ranks=ranks, copy=copy, claim=learner.settings.claim
        ),
    )


def copied(value: Any) -> Any:
    """The same containers with copies of their tensors, in main memory."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), value)


class ModelParts(NamedTuple):
    """Model and the tensors to save instead of its parameters; empty on all ranks but the first."""

    model: PreTrainedModel
    tensors: dict[str, torch.Tensor]
    adapter: dict[str, torch.Tensor] | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, folder: Path) -> None:
        """Write a model folder, and the adapter into `ADAPTER_FOLDER` of it."""
        try:
            self.model.save_pretrained(folder, state_dict=self.tensors)
        except SafetensorError as error:
            raise disk_error(str(error), folder) from error
        for file in folder.glob("*.safetensors"):
            mode_by_umask(file)
        if self.adapter is not None:
            (folder / ADAPTER_FOLDER).mkdir()
            write_adapter(self.model, self.adapter, folder / ADAPTER_FOLDER)


class WholeFolder(NamedTuple):
    """A folder that appears complete or not at all, also after a power failure."""

    path: Path
    """Final path; an existing file or folder of that name is renamed."""
    temporary: Path
    """Path while writing; made by the first rank, and the same on all."""
    parts: ModelParts
    first: bool
    """True if this is the first rank, which writes the model."""
    claim: Claim | None
    """Claim of the run to the folder around it."""

    def write(self, source: Path, add: Callable[[Path], None], more_bytes: int = 0) -> None:
        """Write it.

        Args:
            source: folder that the model was loaded from; its tokenizer files are copied.
        """
        if not self.first:
            return add(self.temporary)
        try:
            with writing(self.path, self.parts.size_bytes + more_bytes):
                self._write(source, add)
        finally:
            remove_tree(self.temporary)

    def _write(self, source: Path, add: Callable[[Path], None]) -> None:
        # What all ranks do comes first: nobody waits while this one writes.
        add(self.temporary)
        self.parts.write(self.temporary)
        for file in _tokenizer_files(source):
            shutil.copy(file, self.temporary)
        self.temporary.chmod(0o755)
        if (step := step_of(self.path.name)) is not None:
            checkpoint_files.write_digests(self.temporary, step)
        flush_tree(self.temporary)
        if self.claim is not None:
            self.claim.check()
        make_way(self.path)
        replace_flushed(self.temporary, self.path)


def begin_folder(
    model: PreTrainedModel,
    path: Path,
    *,
    ranks: Ranks = ALONE,
    copy: bool = False,
    claim: Claim | None = None,
) -> WholeFolder:
    """Gather a model to save, and make the folder to write it into."""
    tensors = merged_tensors(model, ranks, copy=copy)
    adapter = None
    if has_lora(model):
        adapter = adapter_tensors(model, ranks, dtype=torch.float32)
        adapter = copied(adapter) if copy else adapter
    temporary = None
    if ranks.first:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.mkdtemp(prefix=f".{path.name}.writing-", dir=path.parent)
    return WholeFolder(
        path,
        Path(ranks.announce(temporary)),
        ModelParts(model, tensors, adapter),
        ranks.first,
        claim,
    )


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
        source: folder that the model was loaded from; its tokenizer files are copied.
        path: folder to create; what has that name is renamed (`durable.make_way`).
    """
    begin_folder(model, path, ranks=ranks).write(source, add)


def _tokenizer_files(source: Path) -> list[Path]:
    """Files of a tokenizer, all files except the weights.

    They are copied because loading and saving a tokenizer may change it.
    """
    own = {"config.json", "generation_config.json", "source.json", *_OF_A_CHECKPOINT}
    kinds = {".json", ".jinja", ".model", ".txt"}
    return [
        file
        for file in sorted(source.iterdir())
        if file.suffix in kinds and file.name not in own and not file.name.endswith(".index.json")
    ]

"""Weights from the trainer to the engines as folders, one per version.

    root/.tmp-v00000003/  --complete--rename-->  root/v00000003/
        model.safetensors  config.json  generation_config.json  manifest.json

The folder is an ordinary Hugging Face model folder (without a tokenizer). The rename makes it
appear complete or not at all; the manifest has a checksum over names, shapes, types and bytes,
which readers compute again. The newest two folders are kept, because an engine may still be reading
the previous one; the pipeline removes versions that all engines hold.
"""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from areal_lab.control.events import Version
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.root import in_memory
from areal_lab.engines.weights.verify_folder import MANIFEST
from areal_lab.host.durable import disk_error, mode_by_umask, replace_text
from areal_lab.host.owned_folders import remove_tree
from areal_lab.models.files import read_object
from areal_lab.models.image_features import sees

KEPT_FOLDERS = 2


class CorruptWeights(RuntimeError):
    """A weights folder is incomplete, unreadable, or differs from its manifest."""


def write_weights(
    model: PreTrainedModel,
    root: Path,
    version: Version,
    *,
    dtype: torch.dtype,
    tensors: Mapping[str, Tensor] | None = None,
) -> WeightsFolder:
    """Write the model's weights, cast to `dtype`, as folder `version` below `root`.

    Tied weights are stored once. A folder of the same version is replaced. `tensors` replace the
    model's tensors, for example by those with adapters merged in.
    """
    state = stored_state(model) if tensors is None else tensors
    cast = {name: value.detach().to(dtype) for name, value in state.items()}
    return write_folder(
        root,
        version,
        cast,
        dtype=dtype,
        write=lambda folder: _write_model_folder(model, cast, folder, dtype),
    )


def write_folder(
    root: Path,
    version: Version,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    write: Callable[[Path], None],
) -> WeightsFolder:
    """Create folder `version` below `root`; it appears complete or not at all."""
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    root.mkdir(parents=True, exist_ok=True)
    folder, temporary = root / f"v{version:08d}", root / f".tmp-v{version:08d}"
    remove_tree(temporary)
    _remove_oldest(root, keep=KEPT_FOLDERS - 1, spare=folder)
    _require_room(root, size_bytes)
    temporary.mkdir()
    try:
        write(temporary)
        weights = WeightsFolder(
            path=folder, version=version, checksum=checksum(tensors), size_bytes=size_bytes
        )
        manifest = {
            "version": version,
            "checksum": weights.checksum,
            "size_bytes": size_bytes,
            "dtype": _name(dtype),
        }
        replace_text(temporary / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        if not in_memory(root):
            for file in temporary.iterdir():
                _sync(file)
            _sync(temporary)
        remove_tree(folder)
        temporary.rename(folder)
        if not in_memory(root):
            _sync(root)
    except BaseException:
        remove_tree(temporary)
        raise
    return weights


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model folder, mapped into memory, checked against its manifest.

    A folder without a manifest (any Hugging Face folder) is read unchecked.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CorruptWeights(f"{folder} has no *.safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    tensors[name] = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CorruptWeights(f"{file} cannot be read: {error}") from error
    manifest = read_manifest(folder)
    if manifest is not None:
        found = checksum(tensors)
        if found != manifest["checksum"]:
            raise CorruptWeights(
                f"{folder} is damaged: its tensors have checksum {found}, "
                f"but its manifest says {manifest['checksum']}"
            )
    return tensors


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, or `None` if it was not written by `write_weights`."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = read_object(path)
    except ValueError as error:
        raise CorruptWeights(str(error)) from error
    if missing := [name for name in ("checksum", "version") if name not in manifest]:
        raise CorruptWeights(f"{path} cannot be read: it has no {missing[0]}")
    return manifest


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """`xxh3_128:` and 32 hexadecimal digits over name, type, shape and bytes, sorted by name."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {_name(tensor.dtype)} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return f"xxh3_128:{digest.hexdigest()}"


def deduplicated_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """State of the model, without the second and later names of shared tensors."""
    seen: set[tuple[int, torch.Size]] = set()
    once = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        # Shards may be empty, without memory to identify them.
        sharded = isinstance(tensor, DTensor)
        place = (id(tensor) if sharded else tensor.data_ptr(), tensor.shape)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        once[name] = tensor.detach()
    return once


def stored_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """`deduplicated_state` by the names that tensors have in model folders."""
    state = deduplicated_state(model)
    names = stored_names(model, state)
    return {names[name]: tensor for name, tensor in state.items()}


def stored_names(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names of parameters in model folders, by their names in the model.

    They differ for some vision-language models, which transformers builds differently than the
    folders on the hub were written; SGLang reads the latter.
    """
    if not (isinstance(model, PreTrainedModel) and sees(model)):
        return {name: name for name in names}
    from transformers.core_model_loading import revert_weight_conversion

    # One tensor at a time, because the function renames the keys of tensors.
    given = {name: torch.empty(0) for name in names}
    stored = revert_weight_conversion(model, dict(given))
    by_tensor = {id(tensor): name for name, tensor in stored.items()}
    return {name: by_tensor[id(tensor)] for name, tensor in given.items()}


def _write_model_folder(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], folder: Path, dtype: torch.dtype
) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    write_tensors(tensors, folder / "model.safetensors")


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a safetensors file as transformers and peft read it."""
    try:
        save_file(
            {name: tensor.cpu().contiguous() for name, tensor in tensors.items()},
            file,
            metadata={"format": "pt"},
        )
    except SafetensorError as error:
        raise disk_error(str(error), file) from error
    mode_by_umask(file)


def _require_room(root: Path, size_bytes: int) -> None:
    free = shutil.disk_usage(root).free
    if free < size_bytes + (1 << 20):
        raise OSError(
            errno.ENOSPC,
            f"no room for weights of {size_bytes / 2**20:.0f} MiB, "
            f"only {free / 2**20:.0f} MiB are free",
            str(root),
        )


def _remove_oldest(root: Path, *, keep: int, spare: Path) -> None:
    folders = sorted(path for path in root.glob("v*") if path.is_dir() and path != spare)
    for folder in folders[: max(0, len(folders) - keep)]:
        remove_tree(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Verify a folder of weights against its checksum and shapes before an engine loads it.

SGLang and vLLM do not check what they load: they would serve a flipped bit, and some end up with
half of the new weights after reading a truncated file. Computes the checksum of `folder.checksum`
from the files, without torch. The embedded engine verifies a folder itself, so the pipeline reads
only the manifest for it (`read_manifest_here`).
"""

from __future__ import annotations

import asyncio
import mmap
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import xxhash

from areal_lab.engines.protocol import ALL_LINEAR, EngineError, LoraShape, WeightsFolder
from areal_lab.models.files import read_header, read_object

Shapes: TypeAlias = Mapping[str, Sequence[int]]
"""Shape of each tensor, by name."""
ReadFolder: TypeAlias = Callable[[WeightsFolder], Awaitable[tuple[WeightsFolder, Shapes]]]
"""Check a folder of weights in the place where an engine will read it; returns the folder there,
and the shapes of its tensors. Raises `EngineError`."""
MANIFEST: Final = "manifest.json"
"""File of a folder with its checksum and version."""
_KIND: Final = "xxh3_128:"
_TYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Type names in safetensors and in torch."""
_HEADER_BYTES: Final = 8
_IN_A_LAYER: Final = re.compile(r"\.layers\.\d+\..*?([^.]+)\.weight$")
_lock = threading.Lock()
_checked: dict[Path, tuple[str, tuple[int, ...]]] = {}
"""Verified folders, so each is read once and not for every engine."""
_KEPT: Final = 8


def check_folder(weights: WeightsFolder) -> None:
    """Compare the files with the checksum, unless that is of another kind than ours."""
    if not weights.checksum.startswith(_KIND):
        return
    with _lock:
        files = sorted(weights.path.glob("*.safetensors"))
        if not files:
            raise EngineError(f"{weights.path} has no *.safetensors file")
        seen = (weights.checksum, tuple(file.stat().st_mtime_ns for file in files))
        if _checked.get(weights.path) == seen:
            return
        found = folder_checksum(files)
        if found != weights.checksum:
            raise EngineError(
                f"{weights.path} is damaged: its tensors have checksum {found}, "
                f"but version {weights.version} was written with {weights.checksum}"
            )
        _checked.pop(weights.path, None)
        _checked[weights.path] = seen
        while len(_checked) > _KEPT:
            del _checked[next(iter(_checked))]


async def read_folder_here(weights: WeightsFolder) -> tuple[WeightsFolder, Shapes]:
    """Check a folder of this host."""
    await asyncio.to_thread(check_folder, weights)
    return weights, await asyncio.to_thread(folder_shapes, weights.path)


async def read_manifest_here(weights: WeightsFolder) -> tuple[WeightsFolder, Shapes]:
    """The same for an engine that compares the files with their manifest: reads only the manifest,
    unless it does not say the checksum of these weights.
    """
    if _recorded_checksum(weights.path) != weights.checksum:
        return await read_folder_here(weights)
    return weights, await asyncio.to_thread(folder_shapes, weights.path)


def _recorded_checksum(folder: Path) -> object:
    path = folder / MANIFEST
    try:
        return read_object(path).get("checksum") if path.exists() else None
    except (OSError, ValueError):
        return None  # the engine would refuse it, too


def check_fit(weights: WeightsFolder, found: Shapes, known: Shapes) -> None:
    """Compare the shapes of the tensors with those that an engine has.

    SGLang loads part of a tensor that does not fit, and reports success.
    """
    common = sorted(found.keys() & known.keys())
    if not common:
        raise EngineError(f"{weights.path} has no tensor with a name that the engine's model has")
    for name in common:
        if list(found[name]) != list(known[name]):
            raise EngineError(
                f"{weights.path} is of another model: {name} has shape {list(found[name])}, "
                f"but the engine's has {list(known[name])}"
            )


def folder_shapes(folder: Path) -> dict[str, Sequence[int]]:
    """Shape of each tensor, by name; empty if there is no safetensors file."""
    shapes: dict[str, Sequence[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            shapes |= {name: tensor.shape for name, tensor in read_header(file).items()}
        except ValueError as error:
            raise EngineError(f"{file} is damaged: {error}") from error
    return shapes


def linear_layers(folder: Path) -> dict[str, int]:
    """Matrices inside a model's layers: for each LoRA target name, the sum of the rows and
    columns of its matrices.
    """
    sides: dict[str, int] = {}
    for name, shape in sorted(folder_shapes(folder).items()):
        if len(shape) == 2 and (match := _IN_A_LAYER.search(name)):
            sides[match.group(1)] = sides.get(match.group(1), 0) + sum(shape)
    return sides


def adapter_parameters(folder: Path, lora: LoraShape) -> int | None:
    """Parameters of an adapter to a model; None if the folder has no matching matrices."""
    sides = linear_layers(folder)
    chosen = sides if lora.target_modules == (ALL_LINEAR,) else lora.target_modules
    return lora.rank * sum(sides.get(name, 0) for name in chosen) or None


def folder_checksum(files: list[Path]) -> str:
    """Checksum over names, types, shapes and bytes of all tensors."""
    contents: list[mmap.mmap] = []
    tensors: dict[str, tuple[str, memoryview]] = {}
    try:
        for file in files:
            try:
                with file.open("rb") as opened:
                    contents.append(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
                tensors.update(_tensors(file, memoryview(contents[-1])))
            except (OSError, ValueError, KeyError) as error:
                raise EngineError(f"{file} is damaged: {error}") from error
        digest = xxhash.xxh3_128()
        for name in sorted(tensors):
            head, data = tensors[name]
            digest.update(head.encode())
            digest.update(data)
        return f"{_KIND}{digest.hexdigest()}"
    finally:
        for _, data in tensors.values():
            data.release()


def _tensors(file: Path, content: memoryview) -> dict[str, tuple[str, memoryview]]:
    """The hashed content of each tensor: a line with its name, type and shape, and its bytes."""
    start = _HEADER_BYTES + int.from_bytes(content[:_HEADER_BYTES], "little")
    tensors = {}
    for name, tensor in read_header(file).items():
        first, end = tensor.data_offsets
        line = f"{name} {_TYPES[tensor.dtype]} {tensor.shape}\n"
        tensors[name] = (line, content[start + first : start + end])
    return tensors

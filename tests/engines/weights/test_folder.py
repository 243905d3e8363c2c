"""Weights arrive complete, checked and once - or not at all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_lab.engines.weights import folder as weights_module
from areal_lab.engines.weights import root as weights_root
from areal_lab.engines.weights.folder import (
    CorruptWeights,
    checksum,
    deduplicated_state,
    read_manifest,
    read_weights,
    write_weights,
)
from areal_lab.engines.weights.root import (
    choose_weights_root,
    remove_weights_root,
)
from areal_lab.host.owned_folders import remove_abandoned_folders
from tests.engines.tiny import tiny_model

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_is_an_ordinary_model_folder(
    tmp_path: Path, tied: bool, dtype: torch.dtype
) -> None:
    model = tiny_model(tied=tied)
    folder = write_weights(model, tmp_path, 3, dtype=dtype)
    assert folder.path == tmp_path / "v00000003"
    assert folder.version == 3
    tensors = read_weights(folder.path)
    assert ("lm_head.weight" in tensors) != tied
    assert checksum(tensors) == folder.checksum
    assert folder.size_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
    manifest = read_manifest(folder.path)
    assert manifest is not None
    assert manifest["version"] == 3
    # The umask decides, also of what safetensors wrote.
    assert len({file.stat().st_mode for file in folder.path.iterdir()}) == 1

    loaded = AutoModelForCausalLM.from_pretrained(folder.path)
    assert loaded.dtype == dtype
    for name, value in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value.to(dtype), atol=0, rtol=0)


def test_the_newest_two_are_kept_and_nothing_else_is_left(tmp_path: Path) -> None:
    model = tiny_model()
    for version in range(5):
        write_weights(model, tmp_path, version, dtype=torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000003", "v00000004"]


def test_a_version_written_again_replaces_the_old_folder(tmp_path: Path) -> None:
    write_weights(tiny_model(seed=0), tmp_path, 1, dtype=torch.float32)
    again = write_weights(tiny_model(seed=1), tmp_path, 1, dtype=torch.float32)
    assert checksum(read_weights(again.path)) == again.checksum


def test_the_checksum_sees_names_shapes_types_and_every_byte() -> None:
    base = {"a": torch.arange(6.0), "b": torch.ones(2)}
    others = [
        {"a": torch.arange(6.0), "c": torch.ones(2)},
        {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)},
        {"a": torch.arange(6.0), "b": torch.ones(2).to(torch.int32).view(torch.float32)},
        {"a": torch.arange(6.0).double(), "b": torch.ones(2)},
        {"a": torch.arange(6.0), "b": torch.tensor([1.0, 1.0000001])},
        {"a": torch.arange(6.0)},
    ]
    sums = {checksum(tensors) for tensors in (base, *others)}
    assert len(sums) == len(others) + 1
    assert checksum(dict(reversed(base.items()))) == checksum(base)


def test_tied_weights_are_named_once() -> None:
    assert "lm_head.weight" not in deduplicated_state(tiny_model(tied=True))
    assert "lm_head.weight" in deduplicated_state(tiny_model(tied=False))


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "manifest"])
def test_damage_is_found(tmp_path: Path, damage: str) -> None:
    folder = write_weights(tiny_model(), tmp_path, 1, dtype=torch.float32).path
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    match damage:
        case "flipped":
            content[-5] ^= 1
            file.write_bytes(content)
        case "truncated":
            file.write_bytes(content[:-100])
        case "empty":
            file.unlink()
        case "manifest":
            (folder / "manifest.json").write_text("{")
    with pytest.raises(CorruptWeights, match="v00000001") as raised:
        read_weights(folder)
    assert "\n" not in str(raised.value)


def test_no_room_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module.shutil, "disk_usage", lambda _: Usage(0, 0, 5 << 20 >> 3))
    with pytest.raises(OSError, match="no room for weights of 0 MiB") as raised:
        write_weights(tiny_model(), tmp_path, 1, dtype=torch.float32)
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_folder_before_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = write_weights(tiny_model(seed=0), tmp_path, 1, dtype=torch.float32)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(weights_module, "save_file", fail)
    with pytest.raises(OSError, match="broken disk"):
        write_weights(tiny_model(seed=1), tmp_path, 1, dtype=torch.float32)
    assert checksum(read_weights(before.path)) == before.checksum
    assert [path.name for path in tmp_path.iterdir()] == ["v00000001"]


# --- where ---


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "shm"
    place.mkdir()
    monkeypatch.setattr(weights_root, "SHARED_MEMORY", place)
    return place


def test_shared_memory_is_taken_if_it_has_room(memory: Path, tmp_path: Path) -> None:
    first, second = (choose_weights_root(tmp_path / "run", 1 << 20) for _ in range(2))
    assert first != second
    assert first.parent == second.parent == memory
    assert first.name.startswith(f"areal_lab-{os.getpid()}-")
    for root in (first, second):
        assert root.stat().st_mode & 0o777 == 0o700, "other users could read the weights"
        remove_weights_root(root)
        remove_weights_root(root)
    assert list(memory.iterdir()) == []


def test_else_the_run_folder(memory: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "weights").mkdir(parents=True)
    (run / "weights" / "mine").touch()
    for size_bytes, local, mode in ((1 << 60, True, 0o700), (1, False, 0o755)):
        root = choose_weights_root(run, size_bytes, local=local)
        assert root.parent == run
        assert root.stat().st_mode & 0o755 == mode
        remove_weights_root(root)
    assert [path.name for path in run.rglob("*")] == ["weights", "mine"]
    assert list(memory.iterdir()) == []


def test_roots_of_the_dead_go_and_those_of_the_living_stay(memory: Path) -> None:
    mine = choose_weights_root(memory, 0)
    source = (
        "import os, sys; from pathlib import Path; from areal_lab.engines.weights import root\n"
        "root.SHARED_MEMORY = Path(sys.argv[1])\n"
        "place = root.choose_weights_root(Path(sys.argv[1]), 0)\n"
        "(place / 'weights').write_text('big'); print(place.name, flush=True)\n"
        "if sys.argv[2] == 'killed': os.kill(os.getpid(), 9)\n"
    )

    def other(how: str) -> str:
        run = subprocess.run(
            [sys.executable, "-c", source, str(memory), how],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        return run.stdout.strip()

    assert not (memory / other("ends normally")).exists()
    dead = memory / other("killed")
    assert (dead / "weights").exists()
    remove_abandoned_folders(memory)
    assert not dead.exists()
    assert mine.exists()
    remove_weights_root(mine)


def test_manifests_are_readable(tmp_path: Path) -> None:
    folder = write_weights(tiny_model(), tmp_path, 1, dtype=torch.float32)
    assert json.loads((folder.path / "manifest.json").read_text())["checksum"] == folder.checksum
    assert read_manifest(tmp_path) is None

"""One GPU for engine and trainer at the same time: placement, refusals, memory by bytes."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_lab.config.load import load_config
from areal_lab.config.offline import SFTConfig
from areal_lab.config.problem import ConfigError
from areal_lab.config.schema import TrainConfig
from areal_lab.engines.launch.backends import EMBEDDED, ServerOptions
from areal_lab.host.machine import gpu_memory_bytes
from areal_lab.models.copies import limit_process_memory
from areal_lab.models.folder import cache_room, read_model_facts
from areal_lab.offline.start import resolve_offline
from areal_lab.resolve.check import check_transfer
from areal_lab.resolve.memory import estimate
from areal_lab.resolve.placement import Machine, explain, place_parts, place_run
from areal_lab.resolve.shared_gpu import CONTEXT_BYTES, GpuShare, share_gpu
from areal_lab.training.process.client import _allocator
from areal_lab.training.settings import TrainerSettings
from tests.resolve.test_placement import machine
from tests.training.tiny import save_model

GIB = 1 << 30
SHARE = "rollout.share_gpu=true"


def config_of(*overrides: str) -> TrainConfig:
    return load_config(None, [SHARE, *overrides])


def gpus(count: int) -> Machine:
    return machine(gpus=count, cuda=True)


def test_an_engine_and_the_trainer_get_the_same_gpu_and_any_schedule() -> None:
    for schedule in ("asynchronous", "one_step_overlap", "synchronous"):
        placed = place_run(config_of(f"rollout.schedule={schedule}"), gpus(1))
        assert (placed.engines.device, placed.engines.gpus) == ("cuda", (("0",),))
        assert (placed.trainer.device, placed.trainer.gpus) == ("cuda", ("0",))
        assert explain(placed)[-1] == (
            "trainer: 1 process on GPU 0, at the same time as the engines"
        )
    asked = place_run(config_of("actor.device=cuda", "rollout.device=cuda"), gpus(1))
    assert asked.trainer.gpus == asked.engines.gpus[0] == ("0",)


def test_several_engines_and_trainer_processes_share_a_gpu_each() -> None:
    placed = place_run(config_of("allocation_mode=embedded:d2+fsdp:d2"), gpus(3))
    assert placed.engines.gpus == (("0",), ("1",))
    assert placed.trainer.gpus == ("0", "1")


@pytest.mark.parametrize(
    ("overrides", "where", "message"),
    [
        ([], gpus(0), "it needs 1 GPU(s), and 0 are visible; leave it out to compute on the CPU"),
        ([], machine(gpus=1), "the installed torch was built without CUDA"),
        (["rollout.device=cpu"], gpus(1), "rollout.device is cpu; write auto or cuda"),
        (["actor.device=cpu"], gpus(1), "actor.device is cpu; write auto or cuda"),
        (
            ["allocation_mode='embedded:d1|fsdp:d1'"],
            gpus(1),
            "takes turns on the devices; write + instead of |, or leave out rollout.share_gpu",
        ),
        (["rollout.transfer=distributed"], gpus(1), "NCCL refuses two processes of a group on one"),
        (
            ["rollout.backend=sglang"],
            machine(gpus=1, build="gpu", cuda=True),
            "only embedded engines share their GPU, not sglang",
        ),
        (
            ["allocation_mode=embedded:d1+fsdp:d2"],
            gpus(2),
            "there are 1 engine(s) for 2 trainer process(es); write "
            "allocation_mode=embedded:d2+fsdp:d2",
        ),
        (["rollout.addresses=['http://127.0.0.1:1']"], gpus(1), "cannot limit their memory"),
        (["rollout.scaling.max_engines=2"], gpus(2), "would have no GPU of a trainer process"),
        (
            ["cluster.n_nodes=2", "cluster.n_gpus_per_node=1"],
            gpus(2),
            "engines and trainer share GPUs of one machine only",
        ),
    ],
)
def test_what_cannot_share_a_gpu_is_refused(
    overrides: list[str], where: Machine, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as refusal:
        place_run(config_of(*overrides), where)
    assert "rollout.share_gpu is true, but" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_gpu_that_is_named_twice_is_refused_with_the_setting() -> None:
    twice = dataclasses.replace(gpus(2), gpus=("0", "0"))
    message = (
        "CUDA_VISIBLE_DEVICES is 0,0, which names GPU 0 twice; name it once, and set "
        "rollout.share_gpu=true"
    )
    for config in (load_config(None, []), config_of()):
        for place in (place_run, place_parts):
            with pytest.raises(ConfigError, match=message):
                place(config, twice)
    with pytest.raises(ConfigError, match=message):
        resolve_offline(SFTConfig(), machine=twice)


def test_one_gpu_for_two_names_the_setting() -> None:
    asked = load_config(None, ["actor.device=cuda", "rollout.device=cuda"])
    with pytest.raises(ConfigError, match=r"or rollout\.share_gpu=true to share the GPUs"):
        place_run(asked, gpus(1))


# --- memory ----------------------------------------------------------------------------------


def share(folder: Path, total: int | None, *overrides: str) -> GpuShare | None:
    placed = place_run(config_of(*overrides), gpus(1))
    return share_gpu(placed, folder, None, memory_of=lambda _: total)


def test_memory_is_divided_by_bytes_and_nothing_is_left(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    divided = share(folder, 80 * GIB)
    assert divided is not None
    trainer = estimate(config_of(), folder, device="cuda")
    assert trainer is not None
    assert divided.trainer_bytes == int(1.1 * trainer.tensors)
    assert divided.trainer_bytes + divided.engine_bytes + 2 * CONTEXT_BYTES == 80 * GIB
    weights = 2 * read_model_facts(folder).parameters
    assert divided.engine_bytes - divided.cache_bytes >= weights + GIB
    assert divided.trainer_fraction + divided.engine_fraction == pytest.approx(78 / 80)
    assert "reckoned" in divided.line()


def test_an_asked_cache_leaves_the_trainer_the_rest(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    free, asked = share(folder, 80 * GIB), share(folder, 80 * GIB, "rollout.cache_gib=10")
    assert free is not None
    assert asked is not None
    assert asked.cache_bytes == 10 * GIB
    moved = free.cache_bytes - asked.cache_bytes
    assert asked.trainer_bytes == free.trainer_bytes + moved
    assert asked.engine_bytes == free.engine_bytes - moved


def test_what_does_not_fit_is_refused_with_numbers(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    divided = share(folder, 80 * GIB)
    assert divided is not None
    # The smallest GPU that has room for one sequence, and one byte less.
    one = cache_room(folder, dtype="bfloat16", sequences=1).bytes
    least = 80 * GIB - divided.cache_bytes + one
    smallest = share(folder, least)
    assert smallest is not None
    assert smallest.cache_bytes == one
    message = (
        r"a GPU of \d\.\d GiB does not hold all: the trainer \d\.\d GiB, the engine \d\.\d GiB"
    )
    with pytest.raises(ConfigError, match=message):
        share(folder, least - 1)
    with pytest.raises(ConfigError, match=r"rollout\.cache_gib 90\.0 GiB; take .*a lower rollout"):
        share(folder, 80 * GIB, "rollout.cache_gib=90")
    with pytest.raises(ConfigError, match="nvidia-smi does not report the memory of GPU 0"):
        share(folder, None)


def test_other_runs_divide_nothing(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    placed = place_run(load_config(None, []), gpus(2))
    assert share_gpu(placed, folder, None, memory_of=lambda _: None) is None


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ('[ "$1" = --id=3 ] && echo 81559', 81559 << 20),
        ("echo '[N/A]'", None),
        ("echo No devices were found; exit 6", None),
    ],
)
def test_nvidia_smi_tells_the_memory_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: int | None
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gpu_memory_bytes("3") == found


def test_without_nvidia_smi_memory_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory_bytes("0") is None


# --- processes -------------------------------------------------------------------------------


def test_servers_get_their_limits_as_arguments() -> None:
    options = ServerOptions(
        model=Path("/m"), build="gpu", cache_limit_bytes=12345, gpu_memory_fraction=0.25
    )
    line = EMBEDDED.arguments(options)
    assert line[line.index("--cache-limit-bytes") + 1] == "12345"
    assert line[line.index("--gpu-memory-fraction") + 1] == "0.25"
    plain = EMBEDDED.arguments(ServerOptions(model=Path("/m")))
    assert not {"--cache-limit-bytes", "--gpu-memory-fraction"} & set(plain)


def test_a_process_on_a_shared_gpu_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    limit_process_memory("cpu", 0.5)
    limit_process_memory("cuda", 1.0)
    limit_process_memory("cuda", 0.3)
    assert limits == [0.3]


def test_the_allocator_grows_segments_unless_the_user_has_set_it_up() -> None:
    plain, handles = (
        TrainerSettings(config=load_config(None, asked), model_path="m", weights_root="w")
        for asked in ([], ["rollout.transfer=cuda_ipc"])
    )
    assert _allocator({}, plain) == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert _allocator({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, plain) == {}
    assert _allocator({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, plain) == {}
    assert _allocator({}, handles) == {}


def test_handles_need_one_engine_and_one_trainer_process_on_a_gpu() -> None:
    ipc = "rollout.transfer=cuda_ipc"
    assert not [*check_transfer(place_run(config_of(ipc), gpus(1)))]
    two = ["allocation_mode=embedded:d2+fsdp:d2", "rollout.share_gpu=true"]
    for overrides, where in (([], gpus(2)), ([], gpus(0)), (two, gpus(2))):
        (problem,) = check_transfer(place_run(load_config(None, [ipc, *overrides]), where))
        assert "set rollout.share_gpu=true with one of each" in str(problem)


def test_copies_for_handles_count_as_the_trainers_memory(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    weights = 2 * read_model_facts(folder).parameters
    asked = ("rollout.transfer=cuda_ipc", "rollout.max_engine_restarts=1")
    without, one, kept = (share(folder, 80 * GIB, *asked[:count]) for count in (0, 1, 2))
    assert without is not None
    assert one is not None
    assert kept is not None
    assert one.trainer_bytes == without.trainer_bytes + weights
    assert kept.trainer_bytes == without.trainer_bytes + 2 * weights

"""Whether a config fits the machine, and the messages about it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from areal_lab.config.load import load_config
from areal_lab.config.problem import ConfigError
from areal_lab.config.schema import TrainConfig
from areal_lab.engines.launch.backends import BACKENDS
from areal_lab.engines.launch.environments import Condition, Environment
from areal_lab.host.machine import share_of, visible_gpus
from areal_lab.resolve.allocation import layout_of
from areal_lab.resolve.placement import (
    Machine,
    explain,
    place_parts,
    place_run,
)
from areal_lab.resolve.trainer import check_division
from tests.model_folder import save_weights

GIB = 1 << 30


def machine(
    *,
    gpus: int = 0,
    build: str = "cpu",
    condition: Condition = Condition.READY,
    memory_bytes: int = 16 * GIB,
    cuda: bool = False,
) -> Machine:
    engines = {
        name: Environment(
            backend=name,
            folder=Path("/engines") / name,
            condition=condition if BACKENDS[name].own_environment else Condition.READY,
            version="1.2",
            build="gpu" if (build == "gpu" if BACKENDS[name].own_environment else cuda) else "cpu",
        )
        for name in BACKENDS
    }
    return Machine(
        cores=2,
        memory_bytes=memory_bytes,
        gpus=tuple(map(str, range(gpus))),
        engines=engines,
        torch_has_cuda=cuda,
    )


@pytest.mark.parametrize(
    ("override", "where", "message"),
    [
        (
            "rollout.backend=sglang",
            machine(condition=Condition.MISSING),
            "engine is not installed (looked in /engines/sglang); run: areal-lab engine install",
        ),
        ("rollout.backend=vllm", machine(condition=Condition.INCOMPLETE), "engine is incomplete"),
        (
            "rollout.backend=embedded:d1t2",
            machine(),
            "which embedded does not support; write embedded:d1",
        ),
        ("rollout.backend=sglang:d1t2", machine(), "but the CPU build is installed; write sgl"),
        (
            "rollout.backend=sglang:d2p2",
            machine(),
            "with pipeline parallelism, which is not supported; use sg",
        ),
        (
            "rollout.backend=sglang:d2c2",
            machine(),
            "with context parallelism, which is not supported",
        ),
        (
            "rollout.backend=sglang:d2t4",
            machine(gpus=4, build="gpu"),
            "sglang:d2t4 needs 8 GPU(s), but 4 are visible",
        ),
        ("allocation_mode=sglang:d1+megatron:d1", machine(), "trains with megatron, which is not"),
        ("allocation_mode=sglang:d1+megatron:d2p2", machine(), "protocol.py); write fsdp:d4"),
        (
            "allocation_mode=sglang:d1+archon:d2p2t2",
            machine(),
            "trains with p2, but trainer processes have no pipeline of stages: each of them takes "
            "part in every layer; write fsdp:d4t2",
        ),
        (
            "allocation_mode=sglang:d1+fsdp:d2e2",
            machine(),
            "trains with e2, but experts are sharded like all other weights; write fsdp:d2",
        ),
        (
            "allocation_mode=sglang:d1+fsdp:d2t2c2",
            machine(),
            "trains with d2t2c2, but t and c divide the same heads, and only one of them can; "
            "write fsdp:d4t2",
        ),
        (
            "allocation_mode=sglang:d1+fsdp:d64",
            machine(),
            "trains in 64 data ranks, but a minibatch",
        ),
        ("allocation_mode=sglang:d1+eval", machine(), "only evaluates"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_one_line(
    override: str, where: Machine, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        place_run(load_config(None, [override]), where)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("condition", [Condition.OUTDATED, Condition.MANUAL])
def test_an_outdated_or_manual_environment_is_used(condition: Condition) -> None:
    config = load_config(None, ["rollout.backend=sglang:d2"])
    assert place_run(config, machine(condition=condition)).engines.servers == 2


def test_gpus_are_assigned_in_order() -> None:
    config = load_config(None, ["allocation_mode=sglang.d2t2p1+d1"])
    lines = explain(place_run(config, machine(gpus=4, build="gpu")))
    assert lines[0] == "starts 2 x sglang 1.2 (GPU build) from /engines/sglang"
    assert lines[1:3] == ["engine 0: GPU 0, 1", "engine 1: GPU 2, 3"]
    assert lines[-1] == "allocation_mode sglang.d2t2p1+d1 is read as sglang:d2t2+fsdp:d1"


@pytest.mark.parametrize(
    ("gpus", "has_cuda", "device", "place"),
    [
        (0, True, "auto", "cpu"),
        (1, True, "auto", "cpu"),  # the engine has it
        (2, True, "auto", "cuda 1"),
        (2, False, "auto", "cpu"),
        (2, True, "cpu", "cpu"),
        (2, True, "cuda", "cuda 1"),
        (4, True, "cuda", "cuda 3"),
    ],
)
def test_a_trainer_gets_a_gpu_that_no_engine_has(
    gpus: int, has_cuda: bool, device: str, place: str
) -> None:
    where = dataclasses.replace(machine(gpus=gpus, build="gpu"), torch_has_cuda=has_cuda)
    config = load_config(None, ["rollout.backend=sglang:d1", f"actor.device={device}"])
    plan = place_parts(config, where).trainer
    assert " ".join([plan.device, *plan.gpus]) == place


@pytest.mark.parametrize(
    ("gpus", "has_cuda", "reason"),
    [
        (0, True, "no GPU is visible here"),
        (2, False, "the installed torch was built without CUDA"),
        (1, True, "of 1 visible GPU(s) the engines leave 0"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(gpus: int, has_cuda: bool, reason: str) -> None:
    where = dataclasses.replace(machine(gpus=gpus, build="gpu"), torch_has_cuda=has_cuda)
    config = load_config(None, ["rollout.backend=sglang:d1", "actor.device=cuda"])
    with pytest.raises(ConfigError, match=f"actor.device is cuda, but .*{re.escape(reason)}"):
        place_parts(config, where)


@pytest.mark.parametrize(
    ("overrides", "where", "message"),
    [
        (["schedule=asynchronous"], machine(), "but schedule asynchronous generates while it tra"),
        (["schedule=asynchronous", "max_head_offpolicyness=0"], machine(), "set rollout.schedule "),
        (["schedule=one_step_overlap"], machine(), "to synchronous or partial_rollout, or write"),
        (["transfer=adapter"], machine(), "lose the weights that adapters belong to"),
        (["pause_mode=in_place"], machine(), "lose the cache that rollout.pause_mode=in_place"),
        (["addresses=['http://127.0.0.1:1']"], machine(), "are not started by the run"),
        (
            ["allocation_mode='sglang:d1|fsdp:d1'"],
            machine(),
            "but sglang cannot give its memory to the trainer: its",
        ),
        (
            ["allocation_mode='vllm:d1|fsdp:d1'"],
            machine(gpus=1, build="gpu"),
            "its sleep at level 2",
        ),
        (
            ["allocation_mode='sglang:d2t2|fsdp:d2'"],
            machine(gpus=4, build="gpu"),
            "its engines have 4 and its tra",
        ),
        (
            ["allocation_mode='sglang:d1|fsdp:d1'", "transfer=distributed"],
            machine(gpus=1, build="gpu", cuda=True),
            "NCCL refuses two processes of a group on one GPU; set rollout.transfer=folder",
        ),
    ],
)
def test_turns_that_cannot_be_taken_are_refused(
    overrides: list[str], where: Machine, message: str
) -> None:
    chosen = {"allocation_mode": "'embedded:d1|fsdp:d1'", "rollout.schedule": "synchronous"}
    for text in overrides:
        name, value = text.split("=", 1)
        chosen[name if name == "allocation_mode" else f"rollout.{name}"] = value
    config = load_config(None, [f"{name}={value}" for name, value in chosen.items()])
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        place_run(config, where)
    assert "\n" not in str(refused.value)


def turns(allocation: str, schedule: str = "synchronous") -> TrainConfig:
    return load_config(None, [f"allocation_mode='{allocation}'", f"rollout.schedule={schedule}"])


@pytest.mark.parametrize("schedule", ["synchronous", "partial_rollout"])
def test_a_trainer_that_takes_turns_has_the_gpus_of_the_engines(schedule: str) -> None:
    where = machine(gpus=6, build="gpu", cuda=True)
    config = turns("sglang:d2t2|fsdp:d4", schedule)
    assert place_run(config, where).engines.shared
    assert place_parts(config, where).trainer.gpus == ("0", "1", "2", "3")
    assert explain(place_run(config, where))[-2].endswith(
        "GPU 0, 1, 2, 3, in turns with the engines"
    )
    apart = turns("sglang:d2+fsdp:d4", schedule)
    assert not place_run(apart, where).engines.shared
    assert place_parts(apart, where).trainer.gpus == ("2", "3", "4", "5")


@pytest.mark.parametrize(
    ("gpus", "settings", "engines", "trainer"),
    [
        (0, [], "cpu", "cpu"),
        (1, [], "cuda 0", "cpu"),
        (1, ["actor.device=cuda"], "cpu", "cuda 0"),  # `auto` leaves it to the trainer
        (1, ["rollout.device=cpu"], "cpu", "cuda 0"),
        (2, [], "cuda 0", "cuda 1"),
        (2, ["rollout.engines=3"], "cpu", "cuda 1"),
        (2, ["rollout.engines=2"], "cuda 0 1", "cpu"),
        (8, ["allocation_mode=embedded:d4+fsdp:d4"], "cuda 0 1 2 3", "cuda 4 5 6 7"),
        (8, ["allocation_mode=embedded:d6+fsdp:d4"], "cuda 0 1 2 3 4 5", "cpu"),
        (8, ["rollout.device=cuda"], "cuda 0", "cuda 7"),
    ],
)
def test_embedded_engines_get_the_first_gpus_and_the_trainer_the_last(
    gpus: int, settings: list[str], engines: str, trainer: str
) -> None:
    config, where = load_config(None, settings), machine(gpus=gpus, cuda=True)
    placed = place_run(config, where)
    place, plan = placed.engines, placed.trainer
    assert " ".join([place.device, *(gpu for share in place.gpus for gpu in share)]) == engines
    assert " ".join([plan.device, *plan.gpus]) == trainer
    lines = explain(place_run(config, where))
    if place.gpus:
        assert lines[1] == "engine 0: GPU 0"
    elif not plan.gpus:
        assert not any("GPU" in line for line in lines[1:])


@pytest.mark.parametrize(
    ("settings", "where", "reason"),
    [
        (["rollout.device=cuda"], machine(), "the installed torch was built without CUDA"),
        (["rollout.device=cuda"], machine(gpus=1), "the installed torch was built without CUDA"),
        (["rollout.device=cuda"], machine(cuda=True), "1 server(s) need a GPU each, and 0 are"),
        (
            ["rollout.device=cuda", "rollout.engines=3"],
            machine(gpus=2, cuda=True),
            "3 server(s) need a GPU each, and 2 are free for them; take fewer servers, auto or cpu",
        ),
        (
            ["rollout.device=cuda", "rollout.backend=sglang"],
            machine(gpus=2, cuda=True),
            "the CPU build of sglang is installed; run: areal-lab engine install sglang --build g",
        ),
        (
            ["rollout.device=cpu", "rollout.backend=vllm"],
            machine(gpus=2, cuda=True, build="gpu"),
            "the GPU build of vllm is installed; run: areal-lab engine install vllm --build cpu",
        ),
    ],
)
def test_a_device_that_engines_cannot_have_is_refused(
    settings: list[str], where: Machine, reason: str
) -> None:
    with pytest.raises(ConfigError, match="rollout.device is c.*, but " + re.escape(reason)):
        place_run(load_config(None, settings), where)


@pytest.mark.parametrize(
    ("settings", "where", "reason"),
    [
        (
            ["actor.attention=varlen"],
            machine(),
            "computes on the CPU, for which it has",
        ),
        (["actor.attention=flex"], machine(gpus=1), "write actor.attention=auto, or sdpa"),
        (
            ["actor.attention=varlen", "actor.dtype=float32"],
            machine(gpus=2, cuda=True),
            "computes in 16 bits only, but actor.dtype is float32; write actor.dtype=bfloat16",
        ),
        (
            ["actor.attention=flex"],
            machine(gpus=2, cuda=True),
            "is compiled, but there is no C compiler; install gcc",
        ),
    ],
)
def test_attention_kernels_that_the_device_does_not_have_are_refused(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], where: Machine, reason: str
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ConfigError, match="actor.attention is .*" + re.escape(reason)):
        place_run(load_config(None, settings), where)


@pytest.mark.parametrize(
    ("where", "variable", "what"),
    [
        (machine(), "CXX", "no C++ compiler here, which torch needs for a trainer on cpu"),
        (machine(gpus=2, cuda=True), "CC", "no C compiler here, which torch needs for"),
    ],
)
def test_compilation_needs_a_compiler(
    monkeypatch: pytest.MonkeyPatch, where: Machine, variable: str, what: str
) -> None:
    config = load_config(None, ["actor.compile=true"])
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, "true")
    place_parts(config, where)
    monkeypatch.setenv(variable, "no-such-compiler")
    with pytest.raises(ConfigError, match="actor.compile is true, but there is " + re.escape(what)):
        place_parts(config, where)


@pytest.mark.parametrize(
    "settings", [["actor.attention=varlen"], ["actor.attention=flex", "actor.dtype=float32"]]
)
def test_a_gpu_has_them(monkeypatch: pytest.MonkeyPatch, settings: list[str]) -> None:
    monkeypatch.setenv("CC", "true")  # a program that is on every machine
    assert (
        place_parts(load_config(None, settings), machine(gpus=2, cuda=True)).trainer.device
        == "cuda"
    )


@pytest.mark.parametrize("engines", ["sglang", "embedded"])
def test_gsm8k_takes_eight_gpus(engines: str) -> None:
    config = load_config("gsm8k", [f"allocation_mode={engines}:d4+fsdp:d4", "actor.path=model"])
    lines = explain(place_run(config, machine(gpus=8, build="gpu", cuda=True)))
    assert lines[1:5] == [f"engine {i}: GPU {i}" for i in range(4)]
    assert lines[5] == "trainer: 4 processes on GPU 4, 5, 6, 7"
    assert len(lines) == 7  # and how allocation_mode is read


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["actor.dtype=float32"], "but the trainer computes in float32 (actor.dtype float32 on"),
        (["actor.dtype=bfloat16", "actor.use_lora=true"], "but adapters (actor.use_lora) are"),
    ],
)
@pytest.mark.parametrize("where", [machine(), machine(gpus=2, cuda=True)], ids=["cpu", "cuda"])
def test_working_copies_have_the_type_of_products_and_no_adapters(
    settings: list[str], reason: str, where: Machine
) -> None:
    copies = load_config(None, ["actor.param_dtype=bfloat16", *settings])
    with pytest.raises(ConfigError, match="actor.param_dtype is bfloat16, " + re.escape(reason)):
        place_run(copies, where)
    place_run(load_config(None, ["actor.param_dtype=bfloat16", "actor.dtype=bfloat16"]), where)


def test_one_trainer_process_and_several_can_offload() -> None:
    offload = load_config(None, ["actor.offload=true"])
    place_parts(offload, machine())
    two = offload.with_settings({"allocation_mode": "embedded:d1+fsdp:d2"})
    assert place_parts(two, machine()).trainer.ranks == 2


@pytest.mark.parametrize("trainer", ["fsdp:d2t2", "archon:d2t2"])
def test_layers_are_divided_under_either_name(trainer: str) -> None:
    config = load_config(None, [f"allocation_mode=sglang:d1+{trainer}"])
    plan = place_parts(config, machine()).trainer
    assert (plan.ranks, plan.sizes.tensor, plan.sizes.context) == (4, 2, 1)
    assert "trainer: 4 processes on 2 core(s), 2 of them divide each layer" in explain(
        place_run(config, machine())
    )
    gpus = dataclasses.replace(machine(gpus=5, build="gpu"), torch_has_cuda=True)
    assert place_parts(config, gpus).trainer.gpus == ("1", "2", "3", "4")


def test_groups_are_divided_among_data_ranks_only() -> None:
    sizes = ["dataset.batch_size=2", "allocation_mode=embedded:d1+fsdp:d2c2"]
    assert place_parts(load_config(None, sizes), machine()).trainer.ranks == 4
    sizes[1] = "allocation_mode=embedded:d1+fsdp:d3c2"
    with pytest.raises(ConfigError, match=r"trains in 3 data ranks, .*; write fsdp:d2c2"):
        place_parts(load_config(None, sizes), machine())


def test_adapters_are_not_divided() -> None:
    config = load_config(None, ["allocation_mode=embedded:d1+fsdp:d1t2", "actor.use_lora=true"])
    with pytest.raises(ConfigError, match=r"adapters .* are not divided; write fsdp:d2"):
        place_parts(config, machine())


def test_divided_layers_are_not_compiled() -> None:
    config = load_config(None, ["allocation_mode=embedded:d1+fsdp:d1t2", "actor.compile=true"])
    with pytest.raises(ConfigError, match=r"cannot compile the layers .*; leave it out, or write"):
        place_parts(config, machine())


@pytest.mark.parametrize(
    ("sizes", "shape", "why"),
    [
        ("d1t2", {"num_key_value_heads": 1}, "2 does not divide the 1 key-value heads"),
        ("d1t2", {"vocab_size": 97}, "2 does not divide the 97 tokens in its vocabulary"),
        ("d1c3", {}, "3 does not divide the 4 heads"),
        ("d1t2", {"model_type": "gpt_neox"}, "layers of gpt_neox are not divided"),
        ("d1t2", {}, ""),
        ("d1c4", {"num_key_value_heads": 1}, ""),
    ],
)
def test_a_model_that_is_not_divisible_is_refused(
    tmp_path: Path, sizes: str, shape: dict[str, Any], why: str
) -> None:
    config_json = {
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16,
        "tie_word_embeddings": True, **shape,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    save_weights(tmp_path)
    allocation = f"allocation_mode=embedded:d1+fsdp:{sizes}"
    config = load_config(None, [allocation, f"actor.path={tmp_path}"])
    found = list(check_division(config, layout_of(config).trainer))
    assert [why in one.message for one in found] == [True] * bool(why)
    assert all(
        one.message.endswith(f"(actor.path {tmp_path}); write fsdp:d{sizes[-1]}") for one in found
    )


def test_more_engines_than_cores_get_a_note() -> None:
    lines = explain(place_run(load_config(None, ["rollout.backend=vllm:d3"]), machine()))
    assert lines[1] == "engine 0: CPU, 2 core(s) shared"
    assert "3 engines share 2 core(s)" in lines[-1]


@pytest.mark.parametrize(
    "override",
    [
        "rollout.engines=65",
        "rollout.engines=200000000",
        "rollout.engines=1000000000000000000",
        "rollout.backend=embedded:d1000",
        "rollout.backend=sglang:d999999",
        "allocation_mode=vllm:d1000+fsdp:d1",
    ],
)
def test_more_engines_than_fit_into_memory_are_refused(override: str) -> None:
    """16 GiB are 64 times 256 MiB."""
    with pytest.raises(ValueError, match="hold at most 64 servers") as refusal:
        explain(place_run(load_config(None, [override]), machine()))
    count = re.sub(r"\D*(\d+).*", r"\1", override)
    assert str(refusal.value) == (
        f"rollout.engines (the d of rollout.backend and allocation_mode) is {count}, but 16.0 GiB "
        "of memory hold at most 64 servers (256 MiB each, without weights); lower it"
    )


def test_one_engine_is_always_allowed_and_as_many_as_fit() -> None:
    assert place_run(load_config(None, []), machine(memory_bytes=1)).engines.servers == 1
    config = load_config(None, ["rollout.engines=64"])
    assert place_run(config, machine()).engines.servers == 64


def test_a_long_list_of_engines_is_abbreviated() -> None:
    lines = explain(place_run(load_config(None, ["rollout.engines=8"]), machine()))
    assert [line.partition(":")[0] for line in lines[1:9]] == [f"engine {i}" for i in range(8)]
    lines = explain(place_run(load_config(None, ["rollout.engines=60"]), machine()))
    assert lines[6:10] == [
        "engine 5: CPU, 2 core(s) shared",
        "... 53 more ...",
        "engine 59: CPU, 2 core(s) shared",
        "trainer: 1 process on 2 core(s)",
    ]
    addresses = ",".join(f"http://127.0.0.1:{port}" for port in range(1, 10))
    lines = explain(place_run(load_config(None, [f"rollout.addresses=[{addresses}]"]), machine()))
    assert lines[5:8] == [
        "attaches to http://127.0.0.1:6; starts no engine",
        "... 2 more ...",
        "attaches to http://127.0.0.1:9; starts no engine",
    ]


def test_running_servers_need_no_installation() -> None:
    config = load_config(
        None, ["rollout.backend=sglang", "rollout.addresses=['http://127.0.0.1:30000']"]
    )
    lines = explain(place_run(config, machine(condition=Condition.MISSING)))
    assert lines[0] == "attaches to http://127.0.0.1:30000; starts no engine"


@pytest.mark.parametrize(
    ("files", "listed", "gpus"),
    [
        ((), None, ()),
        ((), "0,1", ()),
        (("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"), None, ("0", "1")),
        (("nvidia0", "nvidia1"), "1", ("1",)),
        (("nvidia0", "nvidia1"), "", ()),
        (("nvidia0", "nvidia1"), "1,-1,0", ("1",)),
        (("nvidia3",), None, ("0",)),
        (("nvidia0",), "GPU-8a2f", ("GPU-8a2f",)),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_see(
    tmp_path: Path, files: tuple[str, ...], listed: str | None, gpus: tuple[str, ...]
) -> None:
    for name in files:
        (tmp_path / name).touch()
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_gpus(tmp_path, environment) == gpus


def test_engines_share_gpus_if_there_are_too_few() -> None:
    assert [share_of(index, 1, ("4", "5")) for index in range(3)] == [("4",), ("5",), ("4",)]

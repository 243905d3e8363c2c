"""Facts about the inference servers that can be started: their command lines and capabilities.

    ServerOptions --arguments(), environment()--> the command line of one server

Facts only: nothing here inspects an installation (`environments`) or starts a process (`start`).
Each of the three speaks one of two dialects, and one client speaks both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from areal_lab.engines.keys import KEY_VARIABLE
from areal_lab.engines.protocol import ALL_LINEAR, LoraShape, PauseMode
from areal_lab.engines.weights.records import Transfer

Api = Literal["sglang", "vllm"]
"""HTTP dialect of a server."""
Build = Literal["cpu", "gpu"]
_GIB: Final = 1 << 30
_ADAPTERS_AT_ONCE: Final = 3
"""The one being sent, the one in use, and its predecessor, which a request may still name."""
_PREFILL_TOKENS: Final = 512
"""New tokens of one forward pass of SGLang on a CPU. Requests that start in the same pass do not
share the common part of their prompts: with the default of 4096, all interrupted requests
recompute it after an update."""
SHIM: Final = Path(__file__).parent / "sglang_shim"
VLLM_EXTENSION: Final = Path(__file__).parent / "vllm_extension"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of one server, the same for every backend.

    `options.fit_to_machine` sets those that depend on this machine: build, type, cache.
    """

    model: Path
    version: str = "0"
    """Weight version that the server reports."""
    host: str = "127.0.0.1"
    port: int = 0
    threads: int = 1
    dtype: str = "float32"
    """`float32` or `bfloat16`; `auto` is resolved by `fit_to_machine`."""
    max_running_requests: int = 64
    context_length: int | None = None
    """Maximum tokens per request; None takes the model's limit."""
    cache_tokens: int = 32768
    """Size of the KV cache in tokens on a CPU; on a GPU the server takes the free memory."""
    cache_bytes: int = _GIB
    """Size of this KV cache."""
    tensor_parallel: int = 1
    device: str = "auto"
    """`auto`, `cpu` or `cuda`, see `device.engine_device`."""
    build: Build = "cpu"
    """`gpu` for a server that computes on a GPU."""
    tokenizer: Path | None = None
    """Folder of a tokenizer, to serve text as well as tokens and to find stop strings; a run's
    weight folders have none. The embedded engine uses the model's tokenizer, if there is one."""
    keeps_prefixes: bool = True
    """True if the embedded engine keeps the caches of ended requests, for the next turns of
    conversations. The other backends keep as much as fits into their cache."""
    lora: LoraShape | None = None
    """Shape of the LoRA adapters that it will get; None without adapters."""
    images: bool = False
    """True if its model may have images in its prompts; `fit_to_machine` sets it."""
    releases_memory: bool = False
    """True if it lends its memory to the trainer on the same device."""
    cache_limit_bytes: int | None = None
    """Most memory of keys and values of the embedded engine; None as without its
    `--cache-limit-bytes`."""
    gpu_memory_fraction: float = 1.0
    """Part of the GPU's memory that the embedded engine may allocate."""
    extra: tuple[str, ...] = ()
    """Extra command-line arguments, appended last."""


@dataclass(frozen=True, slots=True)
class InstallCost:
    """Disk space and time of an installation."""

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
    """Package with the engine's version, by build; empty for the embedded engine."""
    gpu_package: str = ""
    """A package that only the GPU build has."""
    first_import: str = ""
    """Imported at the end of an installation, to detect a missing package before a run; empty
    imports `module`."""
    install_costs: Mapping[Build, InstallCost] = field(default_factory=dict)
    """Cost of an installation, by build; empty for our own."""
    ready_path: str
    """GET this path: status 200 means that the server is ready."""
    version_path: str = ""
    """POST `{"new_version": ...}` to this path once it is ready; empty if an argument sets it."""
    pause_modes: tuple[PauseMode, ...]
    biased_in_place: bool
    """True if a response continues with old keys and values after an update in place."""
    transfers: tuple[str, ...]
    """Supported ways to transfer weights."""
    transfers_reason: str = ""
    """Why the other ways are not supported."""
    whole_logprobs: bool
    """True if log-probs are of softmax(logits / temperature) over the whole vocabulary even with
    top-k and top-p; otherwise over the remaining tokens."""
    own_seeds: bool
    """True if the sampled tokens of a request depend on its seed alone, not on its batch."""
    grammars: bool
    """True if responses can match a JSON schema, on a CPU; it needs a tokenizer."""
    tempered_top_1: bool
    """True if log-probs with `top_k=1` are at the requested temperature; otherwise at 1."""
    reports_spans: bool
    """True if `GET /spans` reports the work of the engine over time."""
    verifies_folders: bool = False
    """True if it compares a folder of weights with its manifest before it loads any of them."""
    tensor_parallel: bool
    """True if one server can use several GPUs."""
    images_refusal: str = ""
    """Why it cannot serve vision-language models; empty if it can."""
    images_as_text: bool = False
    """True if it turns the tokens of a prompt with images into text and back. A resubmitted
    response, which is part of a prompt, may then change its tokens."""
    reserved_tokens: int = 0
    """Tokens of a model's context that no request may use; a longer prompt is refused."""
    releases_memory: tuple[Build, ...] = ()
    """Builds that can give back the memory of weights and cache, and take it again."""
    releases_reason: str = ""
    """Why the other builds cannot."""
    unguarded: tuple[str, ...] = ()
    """Arguments that open interfaces other than HTTP, which its key does not protect."""
    lora_ranks: tuple[int, ...] = ()
    """Maximum LoRA ranks that a server can be started with; empty allows any."""
    lora_targets: tuple[str, ...] = ()
    """Layers that can have an adapter; empty allows any."""
    lora_needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By layer, other layers that must have an adapter, too, because the server fuses them."""
    arguments: Callable[[ServerOptions], list[str]]
    environment: Callable[[ServerOptions], dict[str, str]]

    @property
    def own_environment(self) -> bool:
        """True if it has a separate virtual environment."""
        return bool(self.distribution)


def _embedded_arguments(options: ServerOptions) -> list[str]:
    return [
        *("--model-path", str(options.model)),
        *("--weight-version", options.version),
        *("--host", options.host),
        *("--port", str(options.port)),
        *("--threads", str(options.threads)),
        *("--dtype", options.dtype),
        *("--device", "cuda" if options.build == "gpu" else "cpu"),
        *("--max-running-requests", str(options.max_running_requests)),
        *_length("--context-length", options),
        *_tokenizer("--tokenizer-path", options),
        *(() if options.keeps_prefixes else ("--prefix-cache-gib", "0")),
        *_share(options),
        *options.extra,
    ]


def _share(options: ServerOptions) -> tuple[str, ...]:
    """Limits of an embedded engine's memory."""
    limit, fraction = options.cache_limit_bytes, options.gpu_memory_fraction
    return (
        *(() if limit is None else ("--cache-limit-bytes", str(limit))),
        *(() if fraction == 1.0 else ("--gpu-memory-fraction", repr(fraction))),
    )


def _sglang_arguments(options: ServerOptions) -> list[str]:
    arguments = [
        *("--model-path", str(options.model)),
        *("--weight-version", options.version),
        *("--host", options.host),
        *("--port", str(options.port)),
        *("--dtype", options.dtype),
        *("--max-running-requests", str(options.max_running_requests)),
        *_length("--context-length", options),
        *(_tokenizer("--tokenizer-path", options) or ("--skip-tokenizer-init",)),
        # Otherwise an idle scheduler polls for work and takes three quarters of a core, which the
        # trainer could use.
        "--sleep-on-idle",
        # Otherwise a batch that is paused for five minutes counts as hung, and the server exits;
        # the health checks of the pipeline know about the pause.
        *("--watchdog-timeout", str(24 * 3600)),
        # Otherwise each message of a stream repeats all tokens so far.
        "--incremental-streaming-output",
        # Otherwise small models fill JSON with white space until the response is full.
        "--constrained-json-disable-any-whitespace",
    ]
    if options.build == "gpu":
        # Triton and torch for all three, so measurements do not depend on which vendor kernels fit
        # the GPU.
        arguments += ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
        arguments += ["--grammar-backend", "none", "--tp-size", str(options.tensor_parallel)]
    else:
        # The default attention on x86 needs AMX instructions.
        arguments += ["--device", "cpu", "--attention-backend", "torch_native"]
        # The overlapped schedule hides the CPU's work behind a GPU's; here both are the same
        # device.
        arguments += ["--disable-overlap-schedule"]
        arguments += ["--max-total-tokens", str(options.cache_tokens)]
        arguments += ["--chunked-prefill-size", str(_PREFILL_TOKENS)]
    if options.lora is not None:
        arguments += [
            "--enable-lora",
            *("--max-lora-rank", str(options.lora.rank)),
            *("--lora-target-modules", *options.lora.target_modules),
            *("--max-loras-per-batch", str(_ADAPTERS_AT_ONCE + 1)),  # the base weights count
        ]
        # The default backend has GPU kernels only.
        arguments += [] if options.build == "gpu" else ["--lora-backend", "torch_native"]
    if options.images:
        # Its warm-up would chat about an image, which needs a chat template.
        arguments += ["--enable-multimodal", "--skip-server-warmup"]
    if options.releases_memory:
        arguments += ["--enable-memory-saver"]
    return [*arguments, *options.extra]


_VLLM_ON_CPU: Final = (
    # Compilation takes longer than a short run; on a GPU it pays off.
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
        *(_tokenizer("--tokenizer", options) or ("--skip-tokenizer-init",)),
        # Required by the endpoint that takes and returns tokens.
        "--enable-scale-out",
        # Log-probs after the temperature; the default is before it. They are then also after top-k
        # and top-p, as vLLM has no mode in between.
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
    # `lora_refusal` has refused ranks without a kernel.
    rank = min((one for one in _VLLM_LORA_RANKS if one >= lora.rank), default=lora.rank)
    most = str(_ADAPTERS_AT_ONCE)
    return ("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", most)


def _length(flag: str, options: ServerOptions) -> tuple[str, ...]:
    return () if options.context_length is None else (flag, str(options.context_length))


def _tokenizer(flag: str, options: ServerOptions) -> tuple[str, ...]:
    return () if options.tokenizer is None else (flag, str(options.tokenizer))


def _embedded_environment(options: ServerOptions) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"}


def _sglang_environment(options: ServerOptions) -> dict[str, str]:
    common = {
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        # By default /health generates a token, which hangs while the engine is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # By default it caches features of images, computed with older weights: neither an update
        # nor a flush drops them.
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
    }
    if options.build == "gpu":
        return common
    return {**common, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(SHIM)}


def _vllm_environment(options: ServerOptions) -> dict[str, str]:
    common = {
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # needed for pause, resume and weight updates
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
        # By default every server binds its threads to the same cores.
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
    transfers=("folder", "http_tensor", "distributed", "cuda_ipc"),
    transfers_reason="only sglang and vllm take adapters",
    whole_logprobs=True,
    tempered_top_1=True,
    own_seeds=True,
    grammars=True,
    reports_spans=True,
    verifies_folders=True,
    tensor_parallel=False,
    releases_memory=("cpu", "gpu"),
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
    # It refuses prompts longer than the context minus 7 tokens (`get_worker_info`,
    # `validate_input_length`).
    reserved_tokens=6,
    # Seeds count with --enable-deterministic-inference only, which needs other attention kernels
    # than a CPU has.
    own_seeds=False,
    grammars=True,
    reports_spans=False,
    tensor_parallel=True,
    releases_memory=("gpu",),
    releases_reason="its CPU build lacks torch_memory_saver, which frees memory of GPUs only",
    unguarded=("--grpc-port", "--grpc-mode", "--smg-grpc-mode"),
    images_as_text=True,
    lora_targets=_SGLANG_LORA_TARGETS,
    lora_needs=_SGLANG_LORA_NEEDS,
    arguments=_sglang_arguments,
    environment=_sglang_environment,
)
VLLM: Final = Backend(
    name="vllm",
    api="vllm",
    # Not `vllm serve`: it requires a package named `vllm`, but the CPU build has another name.
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
    transfers_reason="vLLM's own weight transfer engines (nccl, ipc) need a GPU",
    # Its log-probs are either before the temperature or after all changes of the distribution.
    whole_logprobs=False,
    tempered_top_1=True,
    own_seeds=True,
    grammars=False,
    reports_spans=False,
    tensor_parallel=True,
    releases_reason=(
        "its sleep at level 2, which discards weights, has not been tried with new weights after it"
    ),
    images_refusal="vllm has not been tried with one",
    lora_ranks=_VLLM_LORA_RANKS,
    arguments=_vllm_arguments,
    environment=_vllm_environment,
)
BACKENDS: Final = {backend.name: backend for backend in (EMBEDDED, SGLANG, VLLM)}
INSTALLABLE: Final = tuple(name for name, backend in BACKENDS.items() if backend.own_environment)
"""Engines that `areal-lab engine install` can install."""


def transfer_refusal(backend: Backend, transfer: str) -> str | None:
    """Why a server does not support this transfer, and what to set; None if it does."""
    if transfer in backend.transfers:
        return None
    reason = f": {backend.transfers_reason}" if backend.transfers_reason else ""
    return (
        f"rollout.transfer is {transfer!r}, but {backend.name} supports "
        f"{', '.join(backend.transfers)} only{reason}; set rollout.transfer={backend.transfers[0]}"
    )


def adapter_refusal(
    backend: Backend | None, *, pause_mode: str, use_lora: bool, lora: LoraShape
) -> str | None:
    """Why adapters cannot be sent alone, and what to set; None if they can.

    `backend` is None if the engine is not known. The name of a group of layers in `lora` is not
    checked.
    """
    if not use_lora:
        return (
            "rollout.transfer is 'adapter', but actor.use_lora is false: there is no adapter to "
            "send; set actor.use_lora=true, or rollout.transfer=folder"
        )
    if pause_mode != PauseMode.ABORT:
        return (
            f"rollout.pause_mode is {pause_mode!r}, but must be 'abort' with "
            "rollout.transfer=adapter: a request names its adapter once, so it must be sent "
            "again to continue with a new one; set rollout.pause_mode=abort"
        )
    return None if backend is None else lora_refusal(backend, lora)


def lora_refusal(backend: Backend, lora: LoraShape) -> str | None:
    """Why a server cannot take adapters of this shape, and what to set; None if it can."""
    if Transfer.ADAPTER not in backend.transfers:
        supporting = [one.name for one in BACKENDS.values() if Transfer.ADAPTER in one.transfers]
        return f"{backend.name} does not support adapters, only {' and '.join(supporting)} do"
    fix = "or set rollout.transfer=folder, which sends merged weights"
    if backend.lora_ranks and lora.rank > (most := max(backend.lora_ranks)):
        return (
            f"actor.lora_rank is {lora.rank}, but {backend.name} supports adapters up to rank "
            f"{most}; lower it, {fix}"
        )
    for name in () if lora.target_modules == (ALL_LINEAR,) else lora.target_modules:
        if backend.lora_targets and name not in backend.lora_targets:
            return (
                f"actor.target_modules has {name}, but {backend.name} supports adapters only on "
                f"{', '.join(backend.lora_targets)}; remove it, {fix}"
            )
        missing = [
            one for one in backend.lora_needs.get(name, ()) if one not in lora.target_modules
        ]
        if missing:
            return (
                f"actor.target_modules has {name} without {' and '.join(missing)}, but "
                f"{backend.name} fuses these layers; add {' and '.join(missing)}, {fix}"
            )
    return None


def arguments_refusal(backend: Backend, extra: Sequence[str]) -> str | None:
    """Why these extra arguments are refused; None if they are accepted."""
    names = [one.partition("=")[0] for one in extra]
    if key := next((one for one in names if one in _KEY_ARGUMENTS), None):
        return (
            f"rollout.engine_args has {key}, which every user of this machine can read in the "
            f"process list; leave it out: a server gets a random key, or that of {KEY_VARIABLE} "
            "with areal-lab engine serve"
        )
    if open_ := next((one for one in names if one in backend.unguarded), None):
        return (
            f"rollout.engine_args has {open_}, but {backend.name} replies there to requests "
            "without its key; leave it out"
        )
    return None


_KEY_ARGUMENTS: Final = ("--api-key", "--admin-api-key")


def truncation_refusal(backend: Backend, *, top_p: float, top_k: int) -> str | None:
    """Why responses sampled with this top-p and top-k cannot be trained on; None if they can."""
    if top_k == 1 and not backend.tempered_top_1:
        return (
            f"gconfig.top_k is 1, but must be -1 or >= 2 with {backend.name}, which treats 1 as "
            "greedy decoding with log-probs at temperature 1; set gconfig.top_k=-1"
        )
    cut = {"top_p": (top_p, 1), "top_k": (top_k, -1)}
    wrong = {name: pair for name, pair in cut.items() if pair[0] != pair[1]}
    if backend.whole_logprobs or not wrong:
        return None
    name, (value, whole) = next(iter(wrong.items()))
    return (
        f"gconfig.{name} is {value:g}, but must be {whole} with {backend.name}: its log-probs are "
        "over the tokens that top_p and top_k keep, the trainer's over the whole vocabulary; set "
        + " ".join(f"gconfig.{name}={whole}" for name, (_, whole) in wrong.items())
    )


def backend_of(name: str) -> Backend:
    """The backend of this name."""
    if name not in BACKENDS:
        from areal_lab.config.unknown import nearest

        hint = nearest(name, list(BACKENDS))
        raise ValueError(f"unknown engine {name!r}; known are {', '.join(BACKENDS)}{hint}")
    return BACKENDS[name]

"""vLLM's dialect: request bodies, paths, parsed replies. Written for vLLM 0.32.0.

The server needs `VLLM_SERVER_DEV_MODE=1` (pause, resume, weights), `--enable-scale-out` (tokens in,
tokens out) and, for temperatures other than 1, `--logprobs-mode processed_logprobs`.

    our mode    vLLM
    retract     pause and keep; after loading, preempt running requests and reset the prefix cache
    abort       pause and abort
    in_place    pause and keep

On a CPU it must be started with the worker extension in `vllm_extension`, as `areal-lab engine
serve vllm` does; without it, models with tied embeddings keep their first output layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn

import httpx2

from areal_lab.control.events import Version
from areal_lab.engines.client.dialect import (
    Call,
    Chunk,
    Dialect,
    Digest,
    GenerateOptions,
    Reply,
    ScoreRequest,
    get,
    parse_adapters,
    parse_finish_reason,
    parse_spans,
    parse_version,
    post,
)
from areal_lab.engines.protocol import (
    CannotScore,
    EngineError,
    EngineUnreachable,
    GenerateRequest,
    PauseMode,
    RequestRefused,
    WeightsFolder,
)

_ID_START = "generate-tokens-"
"""vLLM puts this prefix before a request id; other ids are ignored silently."""
_NO_LOGPROB = -9999.0
"""Sent where vLLM has no log-prob."""
_EMPTY_DIGEST = hashlib.sha256().hexdigest()
"""vLLM's digest of a weight that it has repacked, as it does in linear layers on a CPU."""
_PAUSE = {
    PauseMode.RETRACT: "keep",
    PauseMode.ABORT: "abort",
    PauseMode.IN_PLACE: "keep",
}


def generate(requests: Sequence[GenerateRequest], options: GenerateOptions) -> Call:
    """One sample."""
    (request,) = requests
    sampling = request.sampling
    if request.images or sampling.never:
        raise EngineError(
            f"request {request.request_id} is for a vision-language model, but vllm has not been "
            "tried with one; use sglang or the embedded engine"
        )
    if sampling.json_schema:
        raise RequestRefused(
            f"request {request.request_id} has a json_schema, which is not supported with vllm; "
            "use the embedded engine"
        )
    params: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "seed": sampling.seed,
        "logprobs": 0,
        "detokenize": False,
    }
    body: dict[str, Any] = {
        "request_id": request.request_id,
        "token_ids": list(request.prompt_tokens),
        "sampling_params": params,
    }
    if options.stream:
        body["stream"] = True
        params["stream_interval"] = options.stream_interval
    if sampling.stop and options.send_stops:
        params |= {
            "stop": list(sampling.stop),
            "detokenize": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
    if options.cache_name:
        body["cache_salt"] = options.cache_name
    if options.adapter:
        body["model"] = options.adapter
    return post("/inference/v1/generate", body)


def read(reply: Reply) -> Chunk:
    """One message about one sample: the tokens since the previous message."""
    if not isinstance(reply, Mapping) or not reply.get("choices"):
        raise _error(reply)
    choice = reply["choices"][0]
    tokens = tuple(int(token) for token in choice["token_ids"])
    content = (choice.get("logprobs") or {}).get("content") or []
    if [int(entry["token_id"]) for entry in content] != list(tokens):
        raise EngineError(f"{len(tokens)} tokens came with log-probs of {len(content)} others")
    logprobs = tuple(float(entry["logprob"]) for entry in content)
    if any(value <= _NO_LOGPROB for value in logprobs):
        raise EngineError("a sampled token came without a log-prob")
    spans = choice.get("weight_versions")
    return Chunk(
        tokens=tokens,
        logprobs=logprobs,
        spans=None if not spans else parse_spans(spans),
        finish_reason=parse_finish_reason(choice.get("finish_reason")),
    )


def _error(reply: Reply) -> EngineError:
    """The error in a reply that is not a message: a dead compute process, or a refusal."""
    error = reply.get("error") if isinstance(reply, Mapping) else None
    if isinstance(error, Mapping) and error.get("code") == httpx2.codes.INTERNAL_SERVER_ERROR:
        return EngineUnreachable(f"it is broken: {error.get('message')!s:.200}")
    return EngineError(f"the reply is {reply!r:.200}")


def load(
    weights: WeightsFolder, mode: PauseMode, *, method: str = "reload_weights"
) -> tuple[Call, ...]:
    """Load a folder. The version is set last, since vLLM does not undo a failed sequence."""
    reload = {"method": method, "kwargs": {"weights_path": str(weights.path)}}
    forget = post("/reset_prefix_cache?reset_running_requests=true")
    return (
        post("/collective_rpc", reload),
        *(() if mode is PauseMode.IN_PLACE else (forget,)),
        _name_version(weights.version),
    )


def _abort(request_ids: Sequence[str]) -> Call:
    return post("/abort_requests", {"request_ids": [_ID_START + name for name in request_ids]})


def _name_version(version: Version) -> Call:
    return post("/update_weight_version", {"new_version": str(version)})


def _refusal(reply: Reply) -> str | None:
    if isinstance(reply, Mapping) and reply.get("success") is False:
        return "its cache could not be reset"
    return None


def _no_scores(_reply: Reply, _request: ScoreRequest) -> NoReturn:
    raise CannotScore("vllm is not asked for log-probs of prompts")


def _read_digest(reply: Reply) -> Digest | None:
    sums = reply.get("checksums")
    if not sums:
        return None
    value = " ".join(f"{name}={sums[name]}" for name in sorted(sums))
    return Digest(value, whole=_EMPTY_DIGEST not in value)


VLLM: Final = Dialect(
    name="vllm",
    together=False,
    generate=generate,
    read=read,
    # Its /inference/v1/generate takes `prompt_logprobs`; this was not tried.
    score=None,
    read_scores=_no_scores,
    pause=lambda mode: post(f"/pause?mode={_PAUSE[mode]}"),
    resume=post("/resume"),
    abort=lambda request_id: _abort([request_id]),
    abort_all=_abort,
    # Its sleep at level 2 discards weights; whether new ones can be loaded then was not tried.
    release=None,
    take=None,
    load=load,
    refusal=_refusal,
    adapters=get("/v1/models"),
    held_adapters=parse_adapters,
    adapter_support=get("/openapi.json"),
    supports_adapters=lambda reply: "/v1/load_lora_adapter" in reply.get("paths", {}),
    load_adapter=lambda name, weights: post(
        "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(weights.path)}
    ),
    unload_adapter=lambda name: post("/v1/unload_lora_adapter", {"lora_name": name}),
    name_version=_name_version,
    held=get("/weight_info"),
    held_version=lambda reply: parse_version(reply.get("weight_version")),
    digest=post("/weight_checker", {"action": "checksum"}),
    read_digest=_read_digest,
    info=get("/version"),
    engine_name=lambda _: "vllm",
    engine_version=lambda reply: str(reply.get("version", "")),
    # Without a tokenizer it ignores them.
    checks_stops=lambda _: True,
    has_grammars=lambda _: False,
    tells_interruptions=False,
    ready=get("/health"),
    ping_compute=get("/is_paused"),
)
VLLM_ON_CPU: Final = replace(VLLM, load=partial(load, method="reload_all_weights"))
"""The dialect on a CPU, with the worker extension."""
ASK_FOR_EXTENSION: Final = post("/collective_rpc", {"method": "can_reload_all_weights"})
"""Fails if the worker extension is missing."""
NO_EXTENSION: Final = (
    "on a CPU vLLM must be started with the worker extension of areal_lab, or models with tied "
    "embeddings keep their first output layer; start it with `areal-lab engine serve vllm`"
)


def on_cpu(reply: Reply) -> bool:
    """Return whether the weights are packed for a CPU, from the reply to `digest`."""
    digest = _read_digest(reply)
    return digest is not None and not digest.whole

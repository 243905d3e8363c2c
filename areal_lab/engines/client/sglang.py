"""SGLang's dialect, which the embedded engine uses too: request bodies, paths, parsed replies.

Written for SGLang 0.5.23; `weight_versions`, which servers before 0.5.19 lack, may be missing.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final

from areal_lab.control.events import Version
from areal_lab.data.images import one_placeholder_each
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
    NEVER,
    EngineError,
    GenerateRequest,
    PauseMode,
    RequestRefused,
    SamplingParams,
    ScoredTokens,
    WeightsFolder,
)

_ID_END = ";"
"""End mark of request ids: SGLang aborts every request whose id *begins* with the given one."""
_BAD_REQUEST, _SERVER_ERROR = 400, 500


def generate(requests: Sequence[GenerateRequest], options: GenerateOptions) -> Call:
    """All samples in one request."""
    body: dict[str, Any] = {
        "rid": [_rid(request.request_id) for request in requests],
        "input_ids": [
            list(one_placeholder_each(request.prompt_tokens, request.images))
            for request in requests
        ],
        "sampling_params": [_sampling(request.sampling, options) for request in requests],
        "return_logprob": True,
    }
    if any(request.images for request in requests):
        files = {placed.image.digest: placed.image for one in requests for placed in one.images}
        texts = {name: base64.b64encode(image.png).decode() for name, image in files.items()}
        body["image_data"] = [
            [texts[placed.image.digest] for placed in request.images] for request in requests
        ]
        # SGLang turns prompts with images into text and back, and replies normally if it loses an
        # image.
        body["return_prompt_token_ids"] = True
    if options.stream:
        body["stream"] = True
    if options.cache_name:
        body["extra_key"] = options.cache_name
    if options.adapter:
        body["lora_path"] = options.adapter
    return post("/generate", body)


def read(reply: Reply) -> Chunk:
    """One message about one sample: all its tokens, or those since the previous message."""
    if not isinstance(reply, Mapping) or "meta_info" not in reply:
        # SGLang streams an invalid request's error in this form.
        kind = RequestRefused if isinstance(reply, Mapping) and "error" in reply else EngineError
        raise kind(f"the reply is {_message(reply) or reply!r:.200}")
    meta = reply["meta_info"]
    reason = meta.get("finish_reason")
    if isinstance(reason, Mapping):
        status = reason.get("status_code") or 0
        if status >= _BAD_REQUEST:  # a separate token
            kind = RequestRefused if status < _SERVER_ERROR else EngineError
            raise kind(f"it gave up: {reason.get('message')}")
        reason = reason.get("type")
    tokens = tuple(int(token) for token in reply["output_ids"])
    entries = meta.get("output_token_logprobs") or []
    # A sample aborted while it waits to run again repeats its last token with all log-probs.
    entries = entries[max(0, len(entries) - len(tokens)) :]
    if [int(entry[1]) for entry in entries] != list(tokens):
        raise EngineError(f"{len(tokens)} tokens came with log-probs of {len(entries)} others")
    spans, prompt = meta.get("weight_versions"), reply.get("prompt_token_ids")
    return Chunk(
        index=int(reply.get("index", 0)),
        tokens=tokens,
        logprobs=tuple(float(entry[0]) for entry in entries),
        total=meta.get("completion_tokens", len(tokens)),
        spans=None if not spans else parse_spans(spans),
        version=parse_version(meta["weight_version"]) if "weight_version" in meta else None,
        finish_reason=parse_finish_reason(reason),
        retractions=int(meta.get("num_retractions") or 0),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        prompt_tokens=None if prompt is None else tuple(map(int, prompt)),
    )


def score(request: ScoreRequest) -> Call:
    """Scores without a new token. The first entry of a reply has no log-prob, so it begins one
    token earlier.
    """
    body: dict[str, Any] = {
        "rid": _rid(request.request_id),
        "input_ids": list(request.tokens),
        "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": max(0, request.start - 1),
        "top_logprobs_num": request.top,
    }
    if request.adapter:
        body["lora_path"] = request.adapter
    return post("/generate", body)


def read_scores(reply: Reply, request: ScoreRequest) -> ScoredTokens:
    """Log-probs of the tokens from `start` on."""
    if not isinstance(reply, Mapping) or "meta_info" not in reply:
        raise EngineError(f"the reply is {_message(reply) or reply!r:.200}")
    meta = reply["meta_info"]
    skipped = min(request.start, 1)
    entries = (meta.get("input_token_logprobs") or [])[skipped:]
    wanted = list(request.tokens[request.start :])
    if [int(entry[1]) for entry in entries] != wanted:
        raise EngineError(
            f"{len(wanted)} tokens were to be scored, but log-probs of {len(entries)} others came"
        )
    logprobs = tuple(None if entry[0] is None else float(entry[0]) for entry in entries)
    ranked = (meta.get("input_top_logprobs") or [])[skipped:] if request.top else []
    if request.top and len(ranked) != len(wanted):
        raise EngineError(f"{len(wanted)} places came with the top tokens of {len(ranked)}")
    if any(value is None for value in logprobs[1 if request.start == 0 else 0 :]):
        raise EngineError("a token came without a log-prob")
    return ScoredTokens(
        version=parse_version(meta.get("weight_version")),
        logprobs=logprobs,
        top=tuple(tuple((int(each[1]), float(each[0])) for each in one or ()) for one in ranked)
        or ((),) * len(wanted),
    )


def load(weights: WeightsFolder, mode: PauseMode) -> tuple[Call, ...]:
    """Load a folder. With `in_place`, running requests keep using the cache, and flushing it
    would fail after the weights have changed; in the other modes an unflushed cache would serve
    stale prefixes.
    """
    return (
        post(
            "/update_weights_from_disk",
            {
                "model_path": str(weights.path),
                "weight_version": str(weights.version),
                "flush_cache": mode is not PauseMode.IN_PLACE,
            },
        ),
    )


def _refusal(reply: Reply) -> str | None:
    return None if reply.get("success") else _message(reply) or "no reason given"


def _message(reply: Reply) -> str:
    if not isinstance(reply, Mapping):
        return ""
    error = reply.get("error")
    found = error.get("message") if isinstance(error, Mapping) else error
    return str(found or reply.get("message") or "")


def _held_version(reply: Reply) -> Version:
    return parse_version(reply.get("weight_version"))


def _read_digest(reply: Reply) -> Digest | None:
    """Our checksum of all weights, or SGLang's checksums of each rank's part."""
    if isinstance(reply.get("checksum"), str):
        return Digest(reply["checksum"])
    found = _find(reply, "per_gpu_checksum")
    return Digest(" ".join(sorted(found))) if found else None


def _find(value: Reply, name: str) -> list[str]:
    if isinstance(value, Mapping):
        here = [str(value[name])] if name in value else []
        return here + [one for inner in value.values() for one in _find(inner, name)]
    if isinstance(value, list):
        return [one for inner in value for one in _find(inner, name)]
    return []


def _sampling(params: SamplingParams, options: GenerateOptions) -> dict[str, Any]:
    values: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "sampling_seed": params.seed,
    }
    if options.stream:
        values["stream_interval"] = options.stream_interval
    if params.stop and options.send_stops:
        values["stop"] = list(params.stop)
    if params.json_schema:
        values["json_schema"] = params.json_schema
    if params.never:
        values["logit_bias"] = {str(token): NEVER for token in params.never}
    return values


def _rid(request_id: str) -> str:
    return request_id + _ID_END


def _has_grammars(info: Reply) -> bool:
    backend = info.get("grammar_backend") or "none"
    return backend != "none" and not info.get("skip_tokenizer_init", True)


SGLANG: Final = Dialect(
    name="sglang",
    together=True,
    generate=generate,
    read=read,
    score=score,
    read_scores=read_scores,
    pause=lambda mode: post("/pause_generation", {"mode": mode.value}),
    resume=post("/continue_generation"),
    abort=lambda request_id: post("/abort_request", {"rid": _rid(request_id)}),
    abort_all=lambda _: post("/abort_request", {"abort_all": True}),
    release=lambda tag: post("/release_memory_occupation", {"tags": [tag.value]}),
    take=lambda tag: post("/resume_memory_occupation", {"tags": [tag.value]}),
    load=load,
    refusal=_refusal,
    adapters=get("/v1/models"),
    held_adapters=parse_adapters,
    adapter_support=get("/server_info"),
    supports_adapters=lambda reply: bool(reply.get("enable_lora")),
    load_adapter=lambda name, weights: post(
        "/load_lora_adapter", {"lora_name": name, "lora_path": str(weights.path)}
    ),
    unload_adapter=lambda name: post("/unload_lora_adapter", {"lora_name": name}),
    name_version=lambda version: post(
        "/update_weight_version", {"new_version": str(version), "abort_all_requests": False}
    ),
    held=get("/model_info"),
    held_version=_held_version,
    digest=post("/weights_checker", {"action": "checksum"}),
    read_digest=_read_digest,
    info=get("/server_info"),
    engine_name=lambda reply: str(reply.get("engine", "sglang")),
    engine_version=lambda reply: str(reply.get("version", "")),
    checks_stops=lambda reply: not reply.get("skip_tokenizer_init", True),
    has_grammars=_has_grammars,
    tells_interruptions=True,
    ready=get("/ready"),
    ping_compute=get("/server_info"),
)

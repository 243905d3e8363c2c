"""Convert between SGLang's HTTP JSON and our records: pure functions that check their input."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from areal_lab.engines.embedded.batcher import Refused, Sample
from areal_lab.engines.protocol import GenerateRequest, PauseMode, SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128
DEFAULT_STREAM_INTERVAL = 1
_INTEGERS = ("max_new_tokens", "top_k", "sampling_seed", "stream_interval")
_NUMBERS = ("temperature", "top_p")


def parse_generate(body: Mapping[str, Any]) -> tuple[list[GenerateRequest], bool]:
    """The requests of a /generate body, and whether it was a batch.

    Raises:
        Refused: in one line that names the problem.
    """
    prompts = body.get("input_ids")
    if not isinstance(prompts, list):
        raise Refused("input_ids is missing: a list of token ids, or a list of such lists")
    batch = bool(prompts) and isinstance(prompts[0], list)
    if not batch:
        prompts = [prompts]
    ids = _one_each(body.get("rid"), len(prompts), "rid")
    params = _one_each(body.get("sampling_params"), len(prompts), "sampling_params")
    return [
        _request(rid, prompt, values)
        for rid, prompt, values in zip(ids, prompts, params, strict=True)
    ], batch


def parse_stream(body: Mapping[str, Any]) -> int | None:
    """Tokens between two messages of a streamed reply; `None` if it is not streamed.

    Raises:
        Refused: if it is not a positive number.
    """
    if not body.get("stream"):
        return None
    params = body.get("sampling_params")
    each = params if isinstance(params, list) else [params]
    interval: int = min(
        (one or {}).get("stream_interval") or DEFAULT_STREAM_INTERVAL for one in each
    )
    if interval < 1:
        raise Refused(f"stream_interval is {interval}, but must be >= 1")
    return interval


def parse_sampling(values: object) -> SamplingParams:
    """Sampling parameters; absent ones have SGLang's defaults.

    Raises:
        Refused: for an unknown name, since ignoring it would sample from another distribution.
    """
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise Refused(f"sampling_params is {values!r}, but must be an object")
    known = {*_INTEGERS, *_NUMBERS, "stop_token_ids", "ignore_eos"}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise Refused(
            f"sampling parameter {unknown[0]!r} is not known; known: {', '.join(sorted(known))}"
        )
    for name in _INTEGERS:
        if not _is_integer(values.get(name, 0)):
            raise Refused(f"{name} is {values[name]!r}, but must be an integer")
    for name in _NUMBERS:
        value = values.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Refused(f"{name} is {value!r}, but must be a number")
    try:
        return SamplingParams(
            max_new_tokens=values.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS),
            temperature=values.get("temperature", 1.0),
            top_p=values.get("top_p", 1.0),
            top_k=values.get("top_k", -1),
            stop_token_ids=_tokens(values.get("stop_token_ids") or []),
            ignore_eos=bool(values.get("ignore_eos", False)),
            seed=values.get("sampling_seed", 0),
        )
    except ValueError as error:
        raise Refused(str(error)) from error


def parse_pause_mode(body: Mapping[str, Any]) -> PauseMode:
    """The mode of a /pause_generation body; SGLang's default is `abort`."""
    mode = body.get("mode", PauseMode.ABORT)
    try:
        return PauseMode(mode)
    except ValueError as error:
        raise Refused(f"pause mode {mode!r} is not known: abort, retract or in_place") from error


def reply(
    sample: Sample, version: str, latency_s: float, *, start: int = 0, index: int | None = None
) -> dict[str, Any]:
    """The reply of /generate for one request, ended or not; it may grow meanwhile.

    Args:
        version: reported as the last one if the request has no token.
        latency_s: from the arrival of the request until now.
        start: index of the first token to include; later than 0 in a stream.
        index: index of the request in a streamed batch.
    """
    # Read in this order: the scheduler's thread appends tokens, log-probs, spans, and ends last.
    reason = _finish_reason(sample)
    spans: list[dict[str, Any]] = [
        {"version": span.version, "start": span.start, "end": span.end} for span in [*sample.spans]
    ]
    count = spans[-1]["end"] if spans else 0
    tokens, logprobs = sample.tokens[start:count], sample.logprobs[start:count]
    body: dict[str, Any] = {
        "output_ids": tokens,
        "meta_info": {
            "id": sample.request.request_id,
            "finish_reason": reason,
            "prompt_tokens": len(sample.request.prompt_tokens),
            "completion_tokens": count,
            "cached_tokens": sample.cached_tokens or 0,
            "weight_version": spans[-1]["version"] if spans else version,
            "weight_versions": spans,
            "output_token_logprobs": [
                [logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)
            ],
            "output_token_logprobs_length": len(tokens),
            "num_retractions": sample.retractions,
            "e2e_latency": latency_s,
        },
    }
    return body if index is None else {"index": index, **body}


def _finish_reason(sample: Sample) -> dict[str, Any] | None:
    match sample.finish_reason:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": sample.last_token}
        case "length":
            return {"type": "length", "length": len(sample.tokens)}
        case _:
            return {"type": "abort", "message": "aborted", "status_code": None, "err_type": None}


def _request(rid: object, prompt: object, values: object) -> GenerateRequest:
    sampling = parse_sampling(values)
    try:
        return GenerateRequest(
            request_id=_request_id(rid), prompt_tokens=_tokens(prompt), sampling=sampling
        )
    except ValueError as error:
        raise Refused(str(error)) from error


def _one_each(value: object, count: int, name: str) -> Sequence[Any]:
    if not isinstance(value, list):
        if isinstance(value, str) and count > 1:
            raise Refused(f"{name} must be a list of {count}, one for each prompt")
        return [value] * count
    if len(value) != count:
        raise Refused(f"{name} has {len(value)} entries for {count} prompts")
    return value


def _request_id(value: object) -> str:
    if value is None:
        return uuid.uuid4().hex
    if not isinstance(value, str):
        raise Refused(f"rid is {value!r}, but must be a string")
    return value


def _tokens(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(_is_integer, value)):
        raise Refused("token ids must be a list of integers")
    return tuple(value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

"""Convert between SGLang's HTTP JSON and our records: pure functions that check their input."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from areal_lab.config.sections import MOST_INT32, shown
from areal_lab.data.images import EncodedImage, EncodedPrompt, image_of_bytes, place_images
from areal_lab.engines.embedded.batcher import Refused, Sample
from areal_lab.engines.embedded.scoring import Scores
from areal_lab.engines.protocol import NEVER, GenerateRequest, SamplingParams
from areal_lab.models.vision import VisionFacts

_MOST_ID: Final = 1024
"""Maximum characters of a request's id."""
MOST_TOP: Final = 20
"""Maximum most likely tokens of a place."""


class Sampling(BaseModel):
    """Sampling parameters; absent ones have SGLang's defaults.

    An unknown one is refused, since ignoring it would sample from another distribution.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int = 0
    json_schema: str | None = None
    logit_bias: dict[str, float] | None = None
    """Tokens that are never sampled, with a bias of `NEVER` or less; other biases are not
    supported."""
    stream_interval: int = Field(default=1, ge=1, le=MOST_INT32)
    """Tokens between two messages of a stream."""


class Generate(BaseModel):
    """One request of a /generate body; other fields of SGLang's protocol are ignored."""

    model_config = ConfigDict(strict=True)

    input_ids: list[int]
    rid: str | None = None
    sampling_params: Sampling | None = None
    image_data: str | list[str] | None = None
    """PNG files in base64, one for each placeholder, in order."""
    stream: bool | None = None
    """Applies to all requests of the body."""


def parse_generate(
    body: Mapping[str, Any], vision: VisionFacts | None = None
) -> tuple[list[GenerateRequest], bool, int | None]:
    """Parse a /generate body: its requests, whether it is a batch, and the stream interval in
    tokens.

    The interval is `None` if the reply is not streamed; `vision` is None if the model has no
    images.
    """
    prompts = body.get("input_ids")
    batch = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], list)
    if isinstance(prompts, list) and batch:
        names = ("rid", "sampling_params", "image_data")
        ids, params, images = (_one_each(body, name, len(prompts)) for name in names)
        rows = [
            {
                "input_ids": prompt,
                "rid": rid,
                "sampling_params": values,
                "image_data": data,
                "stream": body.get("stream"),
            }
            for prompt, rid, values, data in zip(prompts, ids, params, images, strict=True)
        ]
    else:
        rows = [dict(body)]
    parsed = [Generate.model_validate(row) for row in rows]
    interval = min((one.sampling_params or Sampling()).stream_interval for one in parsed)
    seen: dict[str, EncodedImage] = {}
    requests = [_request(one, vision, seen) for one in parsed]
    return requests, batch, interval if parsed[0].stream else None


class _NoTokens(BaseModel):
    """Sampling parameters of a request that samples nothing."""

    max_new_tokens: Literal[0]


class Score(BaseModel):
    """A /generate body that asks for log-probs of its prompt, and for no new token."""

    model_config = ConfigDict(strict=True)

    input_ids: list[int] = Field(min_length=1)
    rid: str = ""
    sampling_params: _NoTokens
    logprob_start_len: int = Field(ge=0)
    """Index of the first entry, which has no log-prob."""
    top_logprobs_num: int = Field(default=0, ge=0, le=MOST_TOP)


def asks_for_scores(body: Mapping[str, Any]) -> bool:
    """Return whether a /generate body asks for log-probs of its prompt; it must be a `Score`."""
    return body.get("return_logprob") is True and body.get("logprob_start_len", -1) not in (
        -1,
        None,
    )


def scores(asked: Score, found: Scores, version: str) -> dict[str, Any]:
    """Reply of /generate to a `Score`, with `found` from the token after `logprob_start_len`."""
    first = asked.logprob_start_len
    return {
        "output_ids": [],
        "meta_info": {
            "id": asked.rid,
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": len(asked.input_ids),
            "completion_tokens": 0,
            "weight_version": version,
            "input_token_logprobs": [
                [None, asked.input_ids[first], None],
                *(
                    [logprob, token, None]
                    for logprob, token in zip(
                        found.logprobs, asked.input_ids[first + 1 :], strict=True
                    )
                ),
            ],
            "input_top_logprobs": [
                None,
                *([[value, token, None] for token, value in one] for one in found.top),
            ],
        },
    }


def problem(errors: Sequence[Mapping[str, Any]]) -> str:
    """First of pydantic's errors in one line: the field, its value, and the bound."""
    first = errors[0]
    name = shown(".".join(str(part) for part in first["loc"] if part != "body"))[1:-1] or "the body"
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['ctx']['error']}"
    if first["type"] == "missing":
        return f"{name} is missing"
    if first["type"] == "extra_forbidden":
        return f"{name} is not known; known are {', '.join(sorted(Sampling.model_fields))}"
    why = first["msg"].splitlines()[0].replace("Input should be", "must be")
    return f"{name} is {shown(first['input'])}, but {why}"


def reply(
    sample: Sample, version: str, latency_s: float, *, start: int = 0, index: int | None = None
) -> dict[str, Any]:
    """Reply of /generate for one request, ended or not; it may grow meanwhile.

    `start` is the index of the first token to include; above 0 in a stream.
    """
    # Read in this order: the scheduler's thread appends tokens, log-probs and spans, and sets the
    # end last.
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
    if sample.request.images and start == 0:
        body["prompt_token_ids"] = list(sample.request.prompt_tokens)
    return body if index is None else {"index": index, **body}


def _finish_reason(sample: Sample) -> dict[str, Any] | None:
    match sample.finish_reason:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": sample.last_token}
        case "length":
            return {"type": "length", "length": len(sample.tokens)}
        case _ if sample.error is not None:  # as SGLang reports a request that it gives up
            return {"type": "abort", "message": sample.error, "status_code": 400, "err_type": None}
        case _:
            return {"type": "abort", "message": "aborted", "status_code": None, "err_type": None}


def _request(
    one: Generate, vision: VisionFacts | None, seen: dict[str, EncodedImage]
) -> GenerateRequest:
    sampling = one.sampling_params or Sampling()
    stop = sampling.stop or ()
    bias = sampling.logit_bias or {}
    try:
        for token, value in bias.items():
            if not value <= NEVER:
                raise ValueError(
                    f"logit_bias of token {shown(token)[1:-1]} is {value:g}, but must be {NEVER:g} "
                    "or less: tokens can only be left out"
                )
        if one.rid is not None and not _is_id(one.rid):
            raise ValueError(
                f"rid is {shown(one.rid)}, but must be 1 to {_MOST_ID} characters, without halves "
                "of surrogate pairs"
            )
        prompt = _prompt(one, vision, seen)
        return GenerateRequest(
            request_id=uuid.uuid4().hex if one.rid is None else one.rid,
            prompt_tokens=prompt.tokens,
            images=prompt.images,
            sampling=SamplingParams(
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                stop_token_ids=tuple(sampling.stop_token_ids or ()),
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                ignore_eos=sampling.ignore_eos,
                json_schema=sampling.json_schema or "",
                never=tuple(int(token) for token in bias),
                seed=sampling.sampling_seed,
            ),
        )
    except ValueError as error:
        raise Refused(str(error)) from error


def _is_id(text: str) -> bool:
    return 0 < len(text) <= _MOST_ID and not any("\ud800" <= one <= "\udfff" for one in text)


def _prompt(
    one: Generate, vision: VisionFacts | None, seen: dict[str, EncodedImage]
) -> EncodedPrompt:
    """The prompt with all placeholders of its images."""
    data = one.image_data or []
    texts = [data] if isinstance(data, str) else data
    if vision is None:
        if texts:
            raise ValueError(
                f"image_data has {len(texts)} image(s), but the engine's model has none, or its "
                "folder lacks preprocessor_config.json"
            )
        return EncodedPrompt(tuple(one.input_ids))
    for text in texts:
        if text not in seen:
            seen[text] = image_of_bytes(base64.b64decode(text, validate=True), what="image_data")
    return place_images(one.input_ids, [seen[text] for text in texts], vision)


def _one_each(body: Mapping[str, Any], name: str, count: int) -> Sequence[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        if isinstance(value, str) and count > 1:
            raise Refused(f"{name} must be a list of {count}, one for each prompt")
        return [value] * count
    if len(value) != count:
        raise Refused(f"{name} has {len(value)} entries for {count} prompts")
    return value

"""OpenAI's completions of plain text: POST /completions, for evaluation keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from areal_lab.agents.gateway import reading
from areal_lab.agents.gateway.calls import (
    Answer,
    Call,
    Completion,
    CompletionRequest,
    Dialect,
    TokenScore,
    usage_of,
)
from areal_lab.agents.gateway.chat import MOST_REPLIES
from areal_lab.agents.gateway.errors import ApiError, invalid, openai_error
from areal_lab.agents.gateway.reading import Body
from areal_lab.agents.gateway.stream import COMMENT, DONE, event
from areal_lab.agents.messages import ChatRequest

MOST_COMPLETIONS: Final = 1024
"""Maximum completions of one request: prompts times `n`."""
MOST_TOP: Final = 20
_KNOWN: Final = frozenset(
    {
        *("prompt", "model", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options"),
        *("logprobs", "echo", "stop", "seed", "best_of", "suffix"),
    }
)


def parse(body: Body) -> Call:
    """Parse the body of a request."""
    replies = reading.integer(body, "n", least=1, most=MOST_REPLIES) or 1
    best_of = reading.integer(body, "best_of", least=1)
    if best_of not in (None, replies):
        raise invalid(f"best_of is {best_of}, but must equal n, which is {replies}", "best_of")
    if reading.text(body, "suffix"):
        raise invalid("suffix is not served: this model completes texts at their end", "suffix")
    prompts = _prompts(body.get("prompt"))
    if len(prompts) * replies > MOST_COMPLETIONS:
        raise invalid(
            f"prompt has {len(prompts):,} entries and n is {replies}, but one request has at most "
            f"{MOST_COMPLETIONS:,} completions",
            "prompt",
        )
    form = reading.json_form(body)
    options = body.get("stream_options")
    options = {} if options is None else reading.record(options, "stream_options")
    return Call(
        request=ChatRequest(messages=(), seed=reading.seed(body)),
        completion=CompletionRequest(
            prompts=prompts,
            max_new_tokens=reading.integer(body, "max_tokens", least=0),
            temperature=reading.temperature(body),
            top_p=reading.top_p(body),
            stop=reading.stops(body, "stop"),
            replies=replies,
            seed=reading.seed(body),
            echo=reading.flag(body, "echo"),
            logprobs=reading.integer(body, "logprobs", least=0, most=MOST_TOP),
            json_schema=form.schema,
        ),
        model=reading.text(body, "model") or "",
        stream=reading.flag(body, "stream"),
        stream_usage=reading.flag(options, "include_usage"),
        schema_field=form.field,
        notes=(
            *reading.sampling_notes(body, reading.Choice("auto"), form),
            *reading.unknown_note(body, _KNOWN),
        ),
    )


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """Parse a text, tokens, or a list of one of these."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise _wrong_prompt(value)
    if all(isinstance(each, str) for each in value):
        return tuple(value)
    many = value if all(isinstance(each, list) for each in value) else [value]
    return tuple(_tokens(each) for each in many)


def _tokens(value: list[Any]) -> tuple[int, ...]:
    if not value or not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        raise _wrong_prompt(value)
    return tuple(value)


def _wrong_prompt(value: object) -> ApiError:
    return invalid(
        f"prompt is {reading.shown(value)}, but must be a text, a list of texts, a list of tokens "
        "(whole numbers), or a list of such lists, none of them empty",
        "prompt",
    )


def reply(call: Call, answer: Answer) -> dict[str, Any]:
    """Encode the whole reply as one object."""
    return {
        **_head(call, answer),
        "choices": [_choice(call, index, each) for index, each in enumerate(answer.completions)],
        "usage": _usage(answer),
    }


def events(call: Call, answer: Answer) -> Iterator[bytes]:
    """Encode the reply as a stream: one event for each choice."""
    head = _head(call, answer)
    for index, each in enumerate(answer.completions):
        yield event({**head, "choices": [_choice(call, index, each)]})
    if call.stream_usage:
        yield event({**head, "choices": [], "usage": _usage(answer)})
    yield DONE


def _head(call: Call, answer: Answer) -> dict[str, Any]:
    return {
        "id": answer.interaction_id,
        "object": "text_completion",
        "created": answer.created_s,
        "model": call.model,
    }


def _choice(call: Call, index: int, each: Completion) -> dict[str, Any]:
    asked = call.completion
    assert asked is not None
    wanted = asked.logprobs is not None
    return {
        "index": index,
        "text": each.text,
        "logprobs": _logprobs(each.scores, asked.logprobs or 0) if wanted else None,
        "finish_reason": each.finish,
    }


def _logprobs(scores: tuple[TokenScore, ...], top: int) -> dict[str, Any]:
    """Encode log-probs as parallel lists; the likeliest of several tokens with one text counts."""
    offsets, at = [], 0
    for each in scores:
        offsets.append(at)
        at += len(each.text) if each.visible else 0
    return {
        "tokens": [each.text for each in scores],
        "token_logprobs": [each.logprob for each in scores],
        "top_logprobs": [_by_text(each) for each in scores] if top else None,
        "text_offset": offsets,
    }


def _by_text(score: TokenScore) -> dict[str, float] | None:
    if score.logprob is None:
        return None
    found: dict[str, float] = {}
    for text, logprob in (*score.top, (score.text, score.logprob)):
        found[text] = max(logprob, found.get(text, logprob))
    return found


def _usage(answer: Answer) -> dict[str, Any]:
    usage = usage_of(answer)
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def unknown(interaction_id: str) -> ApiError:
    """Error of a call that follows an unknown reply; this protocol has no such calls."""
    return invalid(f"there is no completion {interaction_id}")


COMPLETIONS: Final = Dialect(
    name="completions",
    id_prefix="cmpl-",
    parse=parse,
    reply=reply,
    events=events,
    unknown=unknown,
    error=openai_error,
    error_event=lambda error: event(openai_error(error)),
    keep_alive=COMMENT,
)

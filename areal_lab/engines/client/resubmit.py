"""Continue requests that an `abort` pause or a lost engine ended: the rules, without a network.

    request:        prompt                  --> aborted after tokens a b
    continuation:   prompt a b              --> c d
    merged:         tokens a b c d, one segment per version

    requests, partial --remaining_requests--> requests for the rest --(another engine)--> rest
    requests, partial, rest --merged_samples--> the samples, as if from one engine

The tokens so far become part of the prompt: they are computed again but not sampled again. Random
numbers depend on the seed and the position in the sequence, so a continuation repeats none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

from areal_lab.data.trajectory import Segment
from areal_lab.engines.protocol import Generated, GenerateRequest


def completed_sample(
    request: GenerateRequest, sample: Generated, end_tokens: Set[int] = frozenset()
) -> Generated | None:
    """The sample if it needs no further token, else None.

    Its last token may be an end token although the server reported an abort: SGLang samples one
    more token for a running request that it aborts, and does not check it. Stop strings need no
    such check: the client finds them itself (`stream`).
    """
    if sample.finish_reason != "abort":
        return sample
    last = sample.segments[-1].tokens[-1] if sample.segments else None
    its_own = not request.sampling.ignore_eos and last in end_tokens
    if its_own or last in request.sampling.stop_token_ids:
        return replace(sample, finish_reason="stop")
    if len(sample.tokens) >= request.sampling.max_new_tokens:
        return replace(sample, finish_reason="length")
    return None


def continuation(request: GenerateRequest, aborted: Generated) -> GenerateRequest:
    """The request for the missing tokens of an aborted one."""
    tokens = aborted.tokens
    return replace(
        request,
        prompt_tokens=request.prompt_tokens + tokens,
        continued_tokens=request.continued_tokens + len(tokens),
        sampling=replace(
            request.sampling, max_new_tokens=request.sampling.max_new_tokens - len(tokens)
        ),
    )


def merge(aborted: Generated, rest: Generated) -> Generated:
    """Join an aborted sample and its continuation; adjacent segments of one version are merged.

    The cache lost by the abort counts as a retraction.
    """
    segments = list(aborted.segments)
    for segment in rest.segments:
        if segments and segments[-1].version == segment.version:
            segments[-1] = Segment(
                segments[-1].tokens + segment.tokens,
                segments[-1].logprobs + segment.logprobs,
                segment.version,
            )
        else:
            segments.append(segment)
    return Generated(
        request_id=aborted.request_id,
        segments=tuple(segments),
        finish_reason=rest.finish_reason,
        retractions=aborted.retractions + rest.retractions + bool(aborted.segments),
        cached_tokens=aborted.cached_tokens,
    )


PartialSamples: TypeAlias = Mapping[str, Generated]
"""Samples so far, by request id; unfinished ones have the finish reason `abort`."""


NO_SAMPLES: PartialSamples = MappingProxyType({})


def remaining_requests(
    requests: Sequence[GenerateRequest], partial: PartialSamples
) -> list[GenerateRequest]:
    """Requests for the missing tokens of incomplete samples."""
    left = []
    for request in requests:
        sample = partial.get(request.request_id)
        if sample is None:
            left.append(request)
        elif completed_sample(request, sample) is None:
            left.append(continuation(request, sample))
    return left


def merged_samples(
    requests: Sequence[GenerateRequest], partial: PartialSamples, rest: PartialSamples
) -> dict[str, Generated]:
    """The samples so far; `rest` are those of `remaining_requests(requests, partial)`."""
    samples = {}
    for request in requests:
        name = request.request_id
        before, after = partial.get(name), rest.get(name)
        if before is None:
            if after is not None:
                samples[name] = after
        elif after is None:
            samples[name] = completed_sample(request, before) or before
        else:
            samples[name] = merge(before, after)
    return samples


def samples_so_far(before: PartialSamples, received: PartialSamples) -> dict[str, Generated]:
    """Samples of a running group: its initial tokens, and those received since."""
    samples = dict(before)
    for name, sample in received.items():
        samples[name] = merge(samples[name], sample) if name in samples else sample
    return samples


def recomputed_tokens(sample: Generated, prompt_tokens: int) -> int:
    """Tokens of prompt and response that were recomputed where the version changed."""
    lengths = [len(segment.tokens) for segment in sample.segments]
    return sum(prompt_tokens + sum(lengths[:cut]) for cut in range(1, len(lengths)))

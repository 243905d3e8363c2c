"""What a lost engine left of a group: samples that had ended, and samples that go on elsewhere.

    requests, partial --to_go_on--> requests for what is missing --(another engine)--> rest
    requests, partial, rest --joined--> the samples, as one engine would have given them

The tokens so far become part of the prompt, so they are computed again but not drawn again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from areal_lab.engines.client.resubmit import continuation, ended, merge
from areal_lab.engines.protocol import Generated, GenerateRequest

Partial: TypeAlias = Mapping[str, Generated]
"""Tokens so far, by request id; `abort` is the finish reason of what has not ended."""


NOTHING: Partial = MappingProxyType({})


def to_go_on(requests: Sequence[GenerateRequest], partial: Partial) -> list[GenerateRequest]:
    """The requests that are left, each with the tokens it has."""
    left = []
    for request in requests:
        sample = partial.get(request.request_id)
        if sample is None:
            left.append(request)
        elif ended(request, sample) is None:
            left.append(continuation(request, sample))
    return left


def joined(
    requests: Sequence[GenerateRequest], partial: Partial, rest: Partial
) -> dict[str, Generated]:
    """What there is of each request now; `rest` came of `to_go_on(requests, partial)`."""
    samples = {}
    for request in requests:
        name = request.request_id
        before, after = partial.get(name), rest.get(name)
        if before is None:
            if after is not None:
                samples[name] = after
        elif after is None:
            samples[name] = ended(request, before) or before
        else:
            samples[name] = merge(before, after)
    return samples


def recomputed_tokens(sample: Generated, prompt_tokens: int) -> int:
    """Tokens, prompt and answer, that were computed again where the version changed."""
    lengths = [len(segment.tokens) for segment in sample.segments]
    return sum(prompt_tokens + sum(lengths[:cut]) for cut in range(1, len(lengths)))

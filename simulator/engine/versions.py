"""Which version generated which tokens of a response, computed from step counters.

    weights    version 3 ......... version 4 .............. version 5 ...
    step       0                   70                       212
    response         50 |-- 20 ---|-------- 142 -----------|-- 9 --| 221

A change of weights adds one `Epoch`; a response stores the one in which it began. Each epoch refers
to the next one and nothing refers to the first, so epochs that no response needs are freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from areal_lab.control.events import Version

Segments: TypeAlias = tuple[tuple[Version, int], ...]
"""(version, tokens generated under it), in order; neighbors have different versions."""
Stretch: TypeAlias = tuple[Version, int, int]
"""Version; tokens of the response when this version begins, and when the next one does."""


class Epoch:
    """Decode steps under the same weights."""

    __slots__ = ("first_step", "following", "version")

    def __init__(self, version: Version, first_step: int) -> None:
        self.version = version
        self.first_step = first_step
        self.following: Epoch | None = None

    def change(self, version: Version, step: int) -> Epoch:
        """Start a new epoch: the engine holds `version` from `step` on."""
        assert self.following is None
        assert step >= self.first_step
        self.following = Epoch(version, step)
        return self.following


class Tally(NamedTuple):
    """A training batch: counts by version."""

    heads: Mapping[Version, int]
    """Responses by the version of their first token."""
    tails: Mapping[Version, int]
    """Responses by the version of their last token."""
    tokens: Mapping[Version, int]
    several: int
    """Responses with tokens of two or more versions."""


# Tuples for speed: there is one per cohort.
Ended: TypeAlias = tuple[Epoch, int, Segments, Sequence[int]]
"""Responses that decoded together and have all ended: the epoch in which they began or continued;
the step before their first token, as if they had never been interrupted; what each had generated
before it continued (the same for all); their indices among the lengths."""
Decoded: TypeAlias = tuple[Sequence[int], Sequence[Stretch]]
"""Responses that decoded together, or a single one: their lengths, and the stretch of tokens of
each version. The last stretch ends at the longest of the lengths, or later."""


def segments(ended: Iterable[Ended], lengths: Sequence[int]) -> tuple[Segments, ...]:
    """The segments of the responses of one group, one per length.

    Args:
        ended: all cohorts of the group.
        lengths: tokens of each response, those in `past` included.
    """
    responses: dict[int, Segments] = {}
    for epoch, start_step, past, members in ended:
        stretches = _stretches(epoch, start_step, past, max([lengths[one] for one in members]))
        for member in members:
            length = lengths[member]
            responses[member] = tuple(
                [
                    (version, min(length, end) - before)
                    for version, before, end in stretches
                    if before < length
                ]
            )
    return tuple([responses[member] for member in range(len(lengths))])


def decoded(ended: Iterable[Ended], lengths: Sequence[int]) -> list[Decoded]:
    """The responses of one group, from the same arguments; faster than their segments."""
    found: list[Decoded] = []
    for epoch, start_step, past, members in ended:
        mine = lengths
        if len(members) < len(lengths):
            mine = [lengths[member] for member in members]
        if epoch.following is None and not past:
            found.append((mine, ((epoch.version, 0, _NO_END),)))
        else:
            found.append((mine, _stretches(epoch, start_step, past, max(mine))))
    return found


def decoded_alone(responses: Iterable[Segments]) -> list[Decoded]:
    """The same from segments, one response per entry."""
    found: list[Decoded] = []
    for response in responses:
        ends = [*accumulate([tokens for _, tokens in response])]
        stretches = [
            (version, end - tokens, end)
            for (version, tokens), end in zip(response, ends, strict=True)
        ]
        found.append((ends[-1:], stretches))
    return found


def first_and_last(parts: Sequence[Decoded]) -> tuple[Version, Version]:
    """The oldest version of a first token, and the newest of a last one."""
    _, stretches = parts[0]
    first, last = stretches[0][0], stretches[-1][0]
    for _, stretches in parts[1:]:
        first, last = min(first, stretches[0][0]), max(last, stretches[-1][0])
    return first, last


def tally(batch: Iterable[Decoded]) -> Tally:
    """Count the responses of a training batch by version; vectorized, as there are thousands."""
    lengths_of, stretches_of = zip(*batch, strict=True)
    responses = np.fromiter(map(len, lengths_of), np.int64, len(lengths_of))
    count = np.fromiter(map(len, stretches_of), np.int64, len(stretches_of))
    lengths = np.fromiter(chain.from_iterable(lengths_of), np.int64, int(responses.sum()))
    stretches = np.fromiter(
        chain.from_iterable(chain.from_iterable(stretches_of)), np.int64, 3 * int(count.sum())
    )
    version, end = stretches[::3], stretches[2::3]
    # numpy takes counts and places as intp, which has 32 bits in a browser.
    count, responses = count.astype(np.intp, copy=False), responses.astype(np.intp, copy=False)
    # For each stretch, one row per response that may have tokens in it.
    width = np.repeat(responses, count)
    starts = (np.cumsum(width) - width).astype(np.intp, copy=False)
    offset = np.repeat(np.cumsum(responses) - responses, count) - starts
    length = lengths[np.arange(int(width.sum())) + np.repeat(offset, width)]
    end = np.repeat(end, width)
    until = np.add.reduceat(np.minimum(length, end), starts)
    longer = np.add.reduceat(length > end, starts, dtype=np.int64)
    # A stretch begins where the one before has ended.
    first = np.cumsum(count) - count
    before, reached = np.zeros_like(until), np.zeros_like(longer)
    before[1:], reached[1:] = until[:-1], longer[:-1]
    before[first], reached[first] = 0, responses
    heads = np.zeros_like(width)
    heads[first] = responses
    return Tally(
        heads=_by_version(version, heads),
        tails=_by_version(version, reached - longer),
        tokens=_by_version(version, until - before),
        several=int(longer[first].sum()),
    )


def _by_version(versions: NDArray[np.int64], counts: NDArray[np.int64]) -> dict[Version, int]:
    oldest = int(versions.min())
    sums = np.zeros(int(versions.max()) - oldest + 1, np.int64)
    np.add.at(sums, versions - oldest, counts)
    return {oldest + place: count for place, count in enumerate(sums.tolist()) if count}


_NO_END = 1 << 62
"""End of the stretch of the newest version."""


def _stretches(epoch: Epoch, start_step: int, past: Segments, longest: int) -> list[Stretch]:
    """Stretches of responses of at most `longest` tokens."""
    stretches: list[Stretch] = []
    done = 0
    for version, tokens in past:
        stretches.append((version, done, done + tokens))
        done += tokens
    this: Epoch | None = epoch
    while this is not None and done < longest:
        version, this = this.version, this.following
        until = _NO_END if this is None else this.first_step - start_step
        if until > done:
            before = done
            if stretches and stretches[-1][0] == version:  # as before the interruption
                before = stretches.pop()[1]
            stretches.append((version, before, until))
            done = until
    return stretches

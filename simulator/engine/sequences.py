"""Sequences of an engine: groups and responses, versions of their tokens, kept contexts.

    Group --submit--> Queued --admission--> Cohort --last of them ends--> Ended
                         ^                     |
                         +---- preempted ------+

A response has no record of its own: it is an index into its group's lengths, which is in exactly
one of the group's cohorts, queued items or ended cohorts.

Contexts of ended sequences, which stay in an engine's cache until others need the room.

Those that were used last are kept longest, and lose their ends first (radix cache of SGLang, block
cache of vLLM). Running sequences always come first.

Which version generated which tokens of a response, computed from step counters.

    weights    version 3 ......... version 4 .............. version 5 ...
    step       0                   70                       212
    response         50 |-- 20 ---|-------- 142 -----------|-- 9 --| 221

A change of weights adds one `Epoch`; a response stores the one in which it began. Each epoch refers
to the next one and nothing refers to the first, so epochs that no response needs are freed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
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
    """The segments of the responses of one group, one per length."""
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
    """Entries from segments, one response each."""
    found: list[Decoded] = []
    for response in responses:
        ends = [*accumulate([tokens for _, tokens in response])]
        stretches = [
            (version, end - tokens, end)
            for (version, tokens), end in zip(response, ends, strict=True)
        ]
        found.append((ends[-1:], stretches))
    return found


def versions_of(parts: Sequence[Decoded]) -> tuple[dict[Version, int], Version, Version]:
    """The responses of one group by the version of their first token; the oldest of these, and the
    newest version of a last token.
    """
    lengths, stretches = parts[0]
    first, last = stretches[0][0], stretches[-1][0]
    heads = {first: len(lengths)}
    for lengths, stretches in parts[1:]:
        head = stretches[0][0]
        heads[head] = heads.get(head, 0) + len(lengths)
        first, last = min(first, head), max(last, stretches[-1][0])
    return heads, first, last


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


class Group:
    """A prompt and the responses that are being generated for it."""

    __slots__ = (
        *("cohorts", "ended", "begins_with", "left", "lengths", "number"),
        *("prompt_tokens", "serial"),
    )

    def __init__(
        self, number: int, serial: int, prompt_tokens: int, lengths: Sequence[int]
    ) -> None:
        self.number = number
        self.serial = serial  # in order of submission
        self.prompt_tokens = prompt_tokens
        # Key of an earlier context that may be in the cache, and whether others begin with it too.
        self.begins_with: tuple[Hashable, bool] | None = None
        self.lengths = lengths
        self.left = len(lengths)  # responses that are in no ended cohort
        self.cohorts = 0  # that decode; the prompt is cached while there are any
        self.ended: list[Ended] = []  # cohorts without running sequences


class Cohort:
    """Sequences of one group that decode in step: equal prompts, equal numbers of tokens so far.

    Each slot of the batch has one record, reused by one cohort after another to save time.
    """

    __slots__ = ("epoch", "group", "members", "past", "slot", "start_step")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.group = _NO_GROUP
        self.members: list[int] = []  # indices into group.lengths, ascending; ended ones stay
        self.start_step = NO_START  # before its first token, as if it had never been interrupted
        self.epoch = _NO_EPOCH
        self.past: Segments = ()  # what it generated before it last started


NO_START = -(1 << 62)
"""Start of a free slot: before any other start."""
_NO_GROUP = Group(-1, -1, 0, ())
_NO_EPOCH = Epoch(-1, 0)


class Queued:
    """Responses of one group that wait for a slot: new ones, or one that was preempted."""

    __slots__ = ("done", "group", "members", "past")

    def __init__(self, group: Group, members: list[int], done: int, past: Segments) -> None:
        self.group = group
        self.members = members
        self.done = done  # tokens generated before
        self.past = past  # their versions

    def take(self, count: int) -> list[int]:
        """Remove and return the first `count` of them."""
        taken = self.members
        self.members = []
        if count < len(taken):
            taken, self.members = taken[:count], taken[count:]
        return taken


class KeptContexts:
    """Tokens by key, in the order of their last use."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, int] = {}
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens in total."""
        return self._tokens

    def keep(self, key: Hashable, tokens: int, room: int) -> None:
        """Keep a context that was just used, and as much of older ones as fits."""
        self._tokens += tokens - self._kept.pop(key, 0)
        self._kept[key] = tokens
        self.make_room(room)

    def find(self, key: Hashable, room: int) -> int:
        """Tokens that are left of a context."""
        self.make_room(room)
        return self._kept.get(key, 0)

    def forget(self, key: Hashable) -> None:
        """Remove a context that now belongs to a running sequence."""
        self._tokens -= self._kept.pop(key, 0)

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()
        self._tokens = 0

    def make_room(self, room: int) -> None:
        """Forget the oldest ones until the others fit."""
        while self._tokens > max(0, room):
            oldest = next(iter(self._kept))
            lost = min(self._tokens - max(0, room), self._kept[oldest])
            self._tokens -= lost
            self._kept[oldest] -= lost
            if not self._kept[oldest]:
                del self._kept[oldest]

"""Which version generated which tokens of an answer, read from step counters.

    weights    version 3 ......... version 4 .............. version 5 ...
    step       0                   70                       212
    answer           50 |-- 20 ---|-------- 142 -----------|-- 9 --| 221

A change of weights adds one `Epoch`; an answer remembers the one in which it began. An epoch knows
the next one and nobody knows the first, so those that no answer needs any more are forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from areal_lab.control.events import Version

Segments: TypeAlias = tuple[tuple[Version, int], ...]
"""(version, tokens generated under it), in order; neighbors have different versions."""


class Epoch:
    """Decode steps under the same weights."""

    __slots__ = ("first_step", "following", "version")

    def __init__(self, version: Version, first_step: int) -> None:
        self.version = version
        self.first_step = first_step
        self.following: Epoch | None = None

    def change(self, version: Version, step: int) -> Epoch:
        """From `step` on the engine holds `version`; returns the new epoch."""
        assert self.following is None
        assert step >= self.first_step
        self.following = Epoch(version, step)
        return self.following


class Tally(NamedTuple):
    """Answers of one group by version: all that a training batch needs to know of them."""

    heads: Mapping[Version, int]
    """Answers by the version of their first token."""
    tails: Mapping[Version, int]
    """Answers by the version of their last token."""
    tokens: Mapping[Version, int]
    several: int
    """Answers with tokens of two or more versions."""


class Ended(NamedTuple):
    """Answers that decoded together and have all ended."""

    epoch: Epoch
    """In which they began, or went on after `past`."""
    start_step: int
    """The step before their first token, as if they had never been interrupted."""
    past: Segments
    """What they had generated before that, the same for all."""
    members: Sequence[int]
    """Their places among the lengths."""


def segments(ended: Iterable[Ended], lengths: Sequence[int]) -> tuple[Segments, ...]:
    """The segments of the answers of one group, one per length.

    Args:
        ended: the group's, with all of its places.
        lengths: tokens of each answer, what was generated before `past` and in it included.
    """
    answers: dict[int, Segments] = {}
    for epoch, start_step, past, members in ended:
        stretches = _stretches(epoch, start_step, past)
        for member in members:
            length = lengths[member]
            answers[member] = tuple(
                [
                    (version, min(length, end) - before)
                    for version, before, end in stretches
                    if before < length
                ]
            )
    return tuple([answers[member] for member in range(len(lengths))])


def tally(ended: Iterable[Ended], lengths: Sequence[int]) -> Tally:
    """The sums of `segments`, of the same arguments, in much less time."""
    heads: dict[Version, int] = {}
    tails: dict[Version, int] = {}
    tokens: dict[Version, int] = {}
    several = 0
    for epoch, start_step, past, members in ended:
        count = len(members)
        left = lengths if count == len(lengths) else [lengths[member] for member in members]
        total = sum(left)
        if epoch.following is None and not past:
            version = epoch.version
            heads[version] = heads.get(version, 0) + count
            tails[version] = tails.get(version, 0) + count
            tokens[version] = tokens.get(version, 0) + total
            continue
        stretches = _stretches(epoch, start_step, past)
        version = stretches[0][0]
        heads[version] = heads.get(version, 0) + count
        first_end = stretches[0][2]
        for version, before, end in stretches:
            left = [length for length in left if length > end]
            longer, longer_total = len(left), sum(left)
            inside = total - longer_total - (count - longer) * before + longer * (end - before)
            tokens[version] = tokens.get(version, 0) + inside
            if longer < count:
                tails[version] = tails.get(version, 0) + count - longer
            if end == first_end:
                several += longer
            if not longer:
                break
            count, total = longer, longer_total
    return Tally(heads, tails, tokens, several)


def tally_of(answers: Iterable[Segments]) -> Tally:
    """The tally of answers whose segments are known."""
    heads: Counter[Version] = Counter()
    tails: Counter[Version] = Counter()
    tokens: Counter[Version] = Counter()
    several = 0
    for answer in answers:
        heads[answer[0][0]] += 1
        tails[answer[-1][0]] += 1
        several += len(answer) > 1
        for version, count in answer:
            tokens[version] += count
    return Tally(heads, tails, tokens, several)


_NO_END = 1 << 62
"""Tokens at which the newest weights end."""


def _stretches(epoch: Epoch, start_step: int, past: Segments) -> list[tuple[Version, int, int]]:
    """Version, and the tokens that an answer has when it begins and when the next one does."""
    stretches: list[tuple[Version, int, int]] = []
    done = 0
    for version, tokens in past:
        stretches.append((version, done, done + tokens))
        done += tokens
    this: Epoch | None = epoch
    while this is not None:
        version, this = this.version, this.following
        until = _NO_END if this is None else this.first_step - start_step
        if until > done:
            before = done
            if stretches and stretches[-1][0] == version:  # as before the interruption
                before = stretches.pop()[1]
            stretches.append((version, before, until))
            done = until
    return stretches

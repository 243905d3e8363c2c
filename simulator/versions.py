"""Which version generated which tokens of an answer, read from step counters.

    weights    version 3 ......... version 4 .............. version 5 ...
    step       0                   70                       212
    answer           50 |-- 20 ---|-------- 142 -----------|-- 9 --| 221

A change of weights adds one `Epoch`; an answer remembers the one in which it began. An epoch knows
the next one and nobody knows the first, so those that no answer needs any more are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

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


def segments(
    epoch: Epoch, start_step: int, past: Segments, lengths: Iterable[int]
) -> list[Segments]:
    """The segments of answers that decode together, one per length.

    Args:
        epoch: in which they began, or went on after `past`.
        start_step: the step before their first token, as if they had never been interrupted.
        past: what they had generated before that, the same for all.
        lengths: tokens of each, `past` included.
    """
    if epoch.following is None and not past:
        version = epoch.version
        return [((version, length),) for length in lengths]
    # Latest first. An answer that ends there: the segments before, and the tokens of those.
    stretches: list[tuple[int, Segments, Version, int]] = []
    done, whole = sum([tokens for _, tokens in past]), past
    this: Epoch | None = epoch
    while this is not None:
        version, this = this.version, this.following
        until = done + 1 if this is None else this.first_step - start_step
        if until > done:
            same = bool(whole) and whole[-1][0] == version  # as before the interruption
            before = whole[:-1] if same else whole
            offset = done - whole[-1][1] if same else done
            stretches.insert(0, (done, before, version, offset))
            done, whole = until, (*before, (version, until - offset))
    answers = []
    for length in lengths:
        for done, before, version, offset in stretches:
            if done < length:
                answers.append((*before, (version, length - offset)))
                break
    return answers

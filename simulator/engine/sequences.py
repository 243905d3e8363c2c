"""What an engine remembers of its work: groups, and their answers that wait or decode together.

    Group --submit--> Queued --admission--> Cohort --last of them ends--> Ended
                         ^                     |
                         +---- preempted ------+

An answer has no record of its own: it is a place in its group's lengths, in exactly one of the
group's cohorts, queued items and ended cohorts.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.engine.versions import Ended, Epoch, Segments


class Group:
    """A prompt and the answers to it that are being generated."""

    __slots__ = ("cohorts", "ended", "left", "lengths", "number", "prompt_tokens", "serial")

    def __init__(
        self, number: int, serial: int, prompt_tokens: int, lengths: Sequence[int]
    ) -> None:
        self.number = number
        self.serial = serial  # in order of submission
        self.prompt_tokens = prompt_tokens
        self.lengths = lengths
        self.left = len(lengths)  # answers that are in no ended cohort
        self.cohorts = 0  # that decode; while there are any the prompt is cached
        self.ended: list[Ended] = []  # cohorts of which nothing runs any more


class Cohort:
    """Sequences of one group that decode in step: equal prompts, equal numbers of tokens so far.

    A slot of the batch has one record, for one cohort after another: making records takes time.
    """

    __slots__ = ("epoch", "group", "members", "past", "slot", "start_step")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.group = _NOBODY
        self.members: list[int] = []  # places in group.lengths, ascending; those that ended stay
        self.start_step = NO_START  # before its first token, as if it had never been interrupted
        self.epoch = _NO_EPOCH
        self.past: Segments = ()  # what it generated before it last began


NO_START = -(1 << 62)
"""Where no cohort is: before any other start."""
_NOBODY = Group(-1, -1, 0, ())
_NO_EPOCH = Epoch(-1, 0)


class Queued:
    """Answers of one group that wait for a place: new ones, or one that was preempted."""

    __slots__ = ("done", "group", "members", "past")

    def __init__(self, group: Group, members: list[int], done: int, past: Segments) -> None:
        self.group = group
        self.members = members
        self.done = done  # tokens generated before
        self.past = past  # their versions

    def take(self, count: int) -> list[int]:
        """The first of them, who wait no more."""
        taken = self.members
        self.members = []
        if count < len(taken):
            taken, self.members = taken[:count], taken[count:]
        return taken

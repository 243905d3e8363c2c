"""The work of an engine: groups, and their responses that wait or decode together.

    Group --submit--> Queued --admission--> Cohort --last of them ends--> Ended
                         ^                     |
                         +---- preempted ------+

A response has no record of its own: it is an index into its group's lengths, which is in exactly
one of the group's cohorts, queued items or ended cohorts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from simulator.engine.versions import Ended, Epoch, Segments


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

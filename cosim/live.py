"""Live responses: the simulated engines generate what a real model does, token by token.

    StartGroup ... --begin--> generate under the engines' version; n tokens are k n simulated ones,
                              and in the same batch the groups that this version is likely to begin
    Interrupt, Resume --go_on--> keep what was generated, the rest comes from the new version
    Train --learn--> one real step; its weights wait until the engines hold them

So long responses take long, become stale, and are cut by new weights, as on the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from areal_lab.control.drift import Measured, measured
from areal_lab.control.events import GroupId, Train, Version
from areal_lab.runlog.records import Mode
from cosim.policy import Policy
from cosim.sampler import Row
from cosim.steps import Steps
from simulator.run.responses import Draws, GroupDraws, Scores
from simulator.run.system import System

_PARTS: Final = 4
"""After a version has started a whole batch, a batch divided by this is generated ahead."""


class Live:
    """The responses of a policy, as `simulator.run.responses.Responses`.

    Args:
        policy: generates and learns.
        steps: receives what it learns.
        system: for latencies.
        seed: of the latencies.
        tokens_per_token: simulated tokens that a real one stands for.
    """

    mode: Final[Mode] = "cosim"
    revised: Final = True

    def __init__(
        self, policy: Policy, steps: Steps, system: System, *, seed: int, tokens_per_token: int
    ) -> None:
        self._policy = policy
        self._steps = steps
        self._latencies = Draws(system, seed)
        self._tokens_per_token = tokens_per_token
        self._rows: dict[GroupId, list[Row]] = {}
        self._under: dict[GroupId, Version] = {}
        """Version that generated the last tokens of a group."""
        self._ahead: dict[GroupId, list[Row]] = {}
        """Groups that the newest version has generated, and that have not started."""
        self._ahead_version: Version = -1
        self._started = 0
        """Groups that have started under the newest version."""
        self._next: GroupId = 0
        """The first group that has never started, nor any after it."""
        limits = system.limits
        self._batch = limits.batch_groups
        self._end = limits.batch_groups * (limits.train_steps or 0)

    def begin(self, groups: Sequence[GroupId], version: Version) -> None:
        """Generate the groups under `version`, in one batch with those that may begin next.

        Groups begin one by one as others end, and a batch of one group takes nearly as long as one
        of many.
        """
        if version != self._ahead_version:
            self._ahead, self._ahead_version, self._started = {}, version, 0
        self._started += len(groups)
        self._next = max(self._next, max(groups) + 1)
        new = [group for group in groups if group not in self._ahead]
        if new:
            new += self._likely()
            rows = {group: self._policy.begin(group) for group in new}
            self._policy.generate([row for some in rows.values() for row in some], version)
            self._ahead |= rows
        for group in groups:
            self._rows[group] = self._ahead.pop(group)
            self._under[group] = version

    def _likely(self) -> list[GroupId]:
        """The groups that are likely to begin next under the newest version.

        A training step makes room for one batch; groups that engines take without a bound on
        staleness come on top.
        """
        count = self._batch - self._started
        if count < 0:
            count = max(1, self._batch // _PARTS)
        numbers = range(self._next, min(self._next + count, self._end))
        return [number for number in numbers if number not in self._ahead]

    def of(self, group: GroupId) -> GroupDraws:
        """The lengths of a group in simulated tokens, and its latencies."""
        lengths = [self._tokens_per_token * len(row.tokens) for row in self._rows[group]]
        return self._latencies.of(group)._replace(
            lengths=lengths, tokens=np.array(lengths, dtype=np.int64)
        )

    def go_on(self, done: Mapping[GroupId, Sequence[int]], version: Version) -> None:
        """Cut the rows that have not ended at what was generated; continue them in one batch."""
        cut: list[Row] = []
        for group, tokens in done.items():
            if self._under[group] == version:
                continue  # an interruption by hand, without new weights
            self._under[group] = version
            for row, simulated in zip(self._rows[group], tokens, strict=True):
                if simulated < self._tokens_per_token * len(row.tokens):
                    row.cut(simulated // self._tokens_per_token)
                    cut.append(row)
        self._policy.generate(cut, version)

    # Part of the protocol; rows know their lengths.
    def scores(self, group: GroupId, lengths: Sequence[int]) -> Scores:  # noqa: ARG002
        """Compute the rewards of a group."""
        rows = self._rows[group]
        self._policy.score(rows)
        return Scores(
            tuple(row.reward for row in rows),
            tuple(str(row.finish_reason) for row in rows),
            self._policy.masked(rows),
        )

    def learn(self, train: Train) -> None:
        """One real training step."""
        groups = [self._rows.pop(group) for group in train.groups]
        self._steps.learn(self._policy, groups)
        for group in train.groups:
            del self._under[group]

    # Part of the protocol; the policy measures it.
    def measured(self, lag: float) -> Measured:  # noqa: ARG002
        """What the step measured."""
        return measured(self._steps.pending)

    def give_up(self, group: GroupId) -> None:
        """Forget a group."""
        self._rows.pop(group, None)
        self._under.pop(group, None)

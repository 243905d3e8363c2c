"""Live responses: the simulated engines generate what a real model does, token by token.

    StartGroup ... --begin--> generate under the engines' version; n tokens are k n simulated ones
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

    def begin(self, groups: Sequence[GroupId], version: Version) -> None:
        """Generate the groups under `version`, in one batch."""
        for group in groups:
            self._rows[group] = self._policy.begin(group)
            self._under[group] = version
        self._policy.generate([row for group in groups for row in self._rows[group]], version)

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

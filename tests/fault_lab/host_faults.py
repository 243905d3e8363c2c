"""Faults of whole hosts: which part has its host struck, how, at which moment.

`host_runs` causes them in whole runs, and `docs/reliability.md` has a row of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Blow(StrEnum):
    """What happens to a host."""

    KILLED = "killed"
    HUNG = "hung (SIGSTOP), then continued"
    CUT = "cut off, then healed"


class Moment(StrEnum):
    """When it happens."""

    GENERATING = "in the middle of an answer"
    TRAINING = "during a training step"
    LOADING = "while the engines load weights"
    SAVING = "while a checkpoint is saved"
    SCORING = "while it scores"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFault:
    """One row of the third table in `docs/reliability.md`."""

    part: str
    blow: Blow
    moment: Moment
    outcome: str

    @property
    def name(self) -> str:
        """Of the row, and of the properties in which a test records what it measured."""
        return f"{self.part}: {self.blow} {self.moment}"


ENGINE: Final = "engine"
TRAINER: Final = "trainer"
CONTROLLER: Final = "controller"
GATEWAY: Final = "gateway"
WORKER: Final = "reward worker"

ENGINE_FAULTS: Final = tuple(
    HostFault(
        part=ENGINE,
        blow=blow,
        moment=moment,
        outcome="continues: other engines finish its samples, and it comes back with its host",
    )
    for moment in (Moment.GENERATING, Moment.TRAINING, Moment.LOADING, Moment.SAVING)
    for blow in Blow
)
TRAINER_FAULTS: Final = tuple(
    HostFault(
        part=TRAINER,
        blow=blow,
        moment=moment,
        outcome="ends; continued from its newest checkpoint on another host, it trains the same",
    )
    for blow, moment in (
        (Blow.HUNG, Moment.GENERATING),
        (Blow.KILLED, Moment.TRAINING),
        (Blow.CUT, Moment.TRAINING),
        (Blow.HUNG, Moment.LOADING),
        (Blow.CUT, Moment.SAVING),
        (Blow.KILLED, Moment.SAVING),
    )
)
_LEASE: Final = "its hosts end what they run with their leases; the run is continued elsewhere"
CONTROLLER_FAULTS: Final = (
    HostFault(part=CONTROLLER, blow=Blow.KILLED, moment=Moment.TRAINING, outcome=_LEASE),
    HostFault(part=CONTROLLER, blow=Blow.HUNG, moment=Moment.LOADING, outcome=_LEASE),
    HostFault(part=CONTROLLER, blow=Blow.CUT, moment=Moment.SAVING, outcome=_LEASE),
    HostFault(
        part=f"{WORKER} of a run (host of the controller)",
        blow=Blow.KILLED,
        moment=Moment.SCORING,
        outcome=_LEASE,
    ),
)
GATEWAY_FAULTS: Final = tuple(
    HostFault(
        part=f"{GATEWAY} (host of the controller)",
        blow=blow,
        moment=Moment.GENERATING,
        outcome="clients on other hosts get no answer, but an error or silence; then as above",
    )
    for blow in Blow
)
ROLLOUT_FAULTS: Final = tuple(
    HostFault(
        part=f"{WORKER} of a rollout worker",
        blow=blow,
        moment=Moment.SCORING,
        outcome="continues: its groups start again on other hosts",
    )
    for blow in (Blow.HUNG, Blow.CUT, Blow.KILLED)
)

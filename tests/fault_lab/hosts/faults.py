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

    GENERATING = "in the middle of a response"
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
    shown: str = ""
    """Instead of what is counted, if the run does not end well."""

    @property
    def name(self) -> str:
        """Of the row, and of the properties in which a test records what it measured."""
        return f"{self.part}: {self.blow} {self.moment}"


IN_A_RUN: Final = (Moment.GENERATING, Moment.TRAINING, Moment.LOADING, Moment.SAVING)
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
    for moment in IN_A_RUN
    for blow in Blow
)
TRAINER_FAULTS: Final = tuple(
    HostFault(
        part=TRAINER,
        blow=blow,
        moment=moment,
        outcome="ends, and is continued from its newest checkpoint with another host",
    )
    for moment in IN_A_RUN
    for blow in Blow
)
_OUTCOMES: Final = {
    Blow.KILLED: "is continued elsewhere; its hosts end its processes when their leases expire",
    Blow.HUNG: "as killed; once it continues it ends, and writes nothing",
    Blow.CUT: "as killed; it loses its hosts, and ends",
}
_SUMMARIES: Final = {
    Blow.KILLED: "no summary",
    Blow.HUNG: "no summary",
    Blow.CUT: "`status` failed",
}
"""That the controller itself writes."""
CONTROLLER_FAULTS: Final = tuple(
    HostFault(
        part=part,
        blow=blow,
        moment=moment,
        outcome=_OUTCOMES[blow],
        shown=_SUMMARIES[blow],
    )
    for part, moments in (
        (CONTROLLER, IN_A_RUN),
        (f"{WORKER} of a run, on the host of its controller", (Moment.SCORING,)),
    )
    for moment in moments
    for blow in Blow
)
GATEWAY_FAULTS: Final = tuple(
    HostFault(
        part=f"{GATEWAY}, on the host of its controller",
        blow=blow,
        moment=moment,
        outcome=f"{_OUTCOMES[blow]}; clients get an error or silence, no response",
        shown=_SUMMARIES[blow],
    )
    for moment in IN_A_RUN
    for blow in Blow
)
ROLLOUT_FAULTS: Final = tuple(
    HostFault(
        part=f"{WORKER} of a rollout worker",
        blow=blow,
        moment=Moment.SCORING,
        outcome="continues: the groups of the host start again on others",
    )
    for blow in (Blow.HUNG, Blow.CUT, Blow.KILLED)
)
HOST_FAULTS: Final = (
    *(*ENGINE_FAULTS, *TRAINER_FAULTS),
    *(*CONTROLLER_FAULTS, *GATEWAY_FAULTS, *ROLLOUT_FAULTS),
)
"""In the order of the table."""

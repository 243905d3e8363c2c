"""Faults of rewards, sandbox, agents and gateway, and what a run counts of each.

`part_runs` causes them in whole runs, several in one, each in a group of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

NO_REWARD: Final = "has no reward, so its group is not trained on"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFault:
    """One row of the second table in `docs/reliability.md`."""

    part: str
    what: str
    """Happens to it, and when."""
    outcome: str
    counts: Mapping[str, int] = field(default_factory=dict, compare=False)
    """What the fault adds to fields of summary.json; nothing if nothing is lost."""
    measured: bool = False
    """Whether the counts are those of the run, since they depend on how far the engine was."""
    shown: str = ""
    """Instead of the counts, if the run does not end well."""

    @property
    def name(self) -> str:
        """Of the row, and of the property in which a test records what was counted."""
        return f"{self.part}: {self.what}"


IDLE = "killed while it is idle"
LOADING = "killed while the engines load weights"
SAVING = "killed while a checkpoint is saved"
IDLE_HUNG = "hung (SIGSTOP) while it is idle"
REPLACED = "continues with a new process; nothing is lost"

_WORKER = "reward worker"
WORKER_IDLE = PartFault(part=_WORKER, what=IDLE, outcome=REPLACED)
WORKER_LOADING = PartFault(part=_WORKER, what=LOADING, outcome=REPLACED)
WORKER_SAVING = PartFault(part=_WORKER, what=SAVING, outcome=REPLACED)
WORKER_KILLED = PartFault(
    part=_WORKER,
    what="killed while it scores",
    outcome=f"continues with a new process, which scores the rest; the completion {NO_REWARD}",
    counts={"rewards.error": 1, "filtered": 1},
)
WORKER_HUNG = PartFault(
    part=_WORKER,
    what="hung (SIGSTOP) while it scores",
    outcome="is killed after `reward.timeout_s`; then as above",
    counts={"rewards.timeout": 1, "filtered": 1},
)
WORKER_IDLE_HUNG = PartFault(
    part=_WORKER,
    what=IDLE_HUNG,
    outcome="is noticed at the next call: as while it scores",
    counts={"rewards.timeout": 1, "filtered": 1},
)
KEEPER_KILLED = PartFault(
    part="sandbox's keeper",
    what="killed while a program runs",
    outcome=f"the program ends with it; the completion {NO_REWARD}",
    counts={"rewards.error": 1, "filtered": 1},
)
KEEPER_HUNG = PartFault(
    part="sandbox's keeper",
    what="hung (SIGSTOP) while a program runs",
    outcome="its worker is killed after `reward.timeout_s`, and both end with it; then as above",
    counts={"rewards.timeout": 1, "filtered": 1},
)
PROGRAM_KILLED = PartFault(
    part="sandbox's program",
    what="killed",
    outcome="the reward function gets a crashed program and scores it",
)

_AGENT = "agent's process"
AGENT_IDLE = PartFault(part=_AGENT, what=IDLE, outcome=REPLACED)
AGENT_LOADING = PartFault(part=_AGENT, what=LOADING, outcome=REPLACED)
AGENT_SAVING = PartFault(part=_AGENT, what=SAVING, outcome=REPLACED)
AGENT_BETWEEN = PartFault(
    part=_AGENT,
    what="killed between two turns",
    outcome=f"continues with a new process; the sample {NO_REWARD}; its tokens are in the log",
    counts={"workflow.error": 1, "filtered": 1},
)
AGENT_ASKING = PartFault(
    part=_AGENT,
    what="killed while the model responds to it",
    outcome="the response ends at once; its tokens so far are in the log; then as above",
    counts={"workflow.error": 1, "filtered": 1, "sample_ends.abort": 1},
)
AGENT_STREAM = PartFault(
    part=_AGENT,
    what="killed while it reads a stream",
    outcome="as above; the response is complete",
    counts={"workflow.error": 1, "filtered": 1},
)
AGENT_HUNG = PartFault(
    part=_AGENT,
    what="hung (SIGSTOP) between two turns",
    outcome="is killed after `timeout_s` of the workflow; then as above",
    counts={"workflow.timeout": 1, "filtered": 1},
)

AGENT_IDLE_HUNG = PartFault(
    part=_AGENT,
    what=IDLE_HUNG,
    outcome="is noticed at the next call: as between two turns",
    counts={"workflow.timeout": 1, "filtered": 1},
)

ENGINE_TURN = PartFault(
    part="engine",
    what="killed in the second turn of an agent",
    outcome="the turn continues on another engine, with its tokens so far; the agent sees nothing",
    counts={"engine_losses": 1},
    measured=True,
)
ENGINE_TOOL = PartFault(
    part="engine",
    what="killed in the second turn of `tool_use`",
    outcome="as above",
    counts={"engine_losses": 1},
    measured=True,
)

GATEWAY_KILLED = PartFault(
    part="gateway",
    what="killed, which is the run: it lives in the run's process",
    outcome="agents, workers and engines end, also those that compute in C; nothing stays behind",
    shown="no summary; the run continues from its newest checkpoint",
)
GATEWAY_DEAF = PartFault(
    part="gateway",
    what="its listening socket is closed",
    outcome="no agent can connect: above `reward.max_error_rate` the run stops with their error",
    shown="`status` failed, `error` has the agent's",
)

PART_FAULTS: Final = (
    *(WORKER_IDLE, WORKER_LOADING, WORKER_SAVING, WORKER_KILLED, WORKER_HUNG, WORKER_IDLE_HUNG),
    *(KEEPER_KILLED, KEEPER_HUNG, PROGRAM_KILLED),
    *(AGENT_IDLE, AGENT_LOADING, AGENT_SAVING, AGENT_BETWEEN, AGENT_ASKING, AGENT_STREAM),
    *(AGENT_HUNG, AGENT_IDLE_HUNG, ENGINE_TURN, ENGINE_TOOL, GATEWAY_KILLED, GATEWAY_DEAF),
)
"""In the order of the table."""

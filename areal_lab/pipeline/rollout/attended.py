"""Open a workflow; if its samples wait for something outside of the run, say where.

gateway.json    {"url": ..., "admin_key_file": ...}, as long as the workflow is open
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from areal_lab.agents.catalogue import make_workflow
from areal_lab.agents.workflow import Attended, Workflow, opened
from areal_lab.host.isolation import LevelSetting
from areal_lab.pipeline.progress import Display
from areal_lab.runlog.folder import RunFolder

FILE: Final = "gateway.json"


@asynccontextmanager
async def opened_workflow(
    setting: Mapping[str, Any],
    model: Path,
    *,
    sandbox: LevelSetting,
    folder: RunFolder,
    display: Display,
) -> AsyncIterator[Workflow | None]:
    """The workflow of a setting, open until the end of the block; None of an empty one.

    Args:
        setting: `rollout.workflow`.
        model: folder with the tokenizer of the model that is sampled.
        sandbox: `reward.sandbox`, for tools that run programs.
        folder: gets the address of what samples wait for.
        display: shows it.
    """
    async with opened(make_workflow(setting, sandbox=sandbox), model) as workflow:
        beside: object = workflow  # which says nothing of `Attended`
        if not isinstance(beside, Attended):
            yield workflow
            return
        folder.write_json(FILE, beside.address())
        for line in beside.notices():
            display.note(line)
        try:
            yield workflow
        finally:
            if folder.claim is None or not folder.claim.taken:  # else it is another one's
                (folder.path / FILE).unlink(missing_ok=True)


def waits_for(workflow: Workflow | None) -> str:
    """What samples wait for now, outside of the run; empty if none does."""
    beside: object = workflow
    return beside.waiting_for() if isinstance(beside, Attended) else ""

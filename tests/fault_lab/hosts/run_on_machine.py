"""A run on a machine of a test, held at a moment.

python -m tests.fault_lab.hosts.run_on_machine CONFIG MOMENT FILE NAME

At the moment it writes the process that is stopped into the file; then the test strikes.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from rich.console import Console

from areal_lab.config.load import load_config
from areal_lab.host.processes import watch_parent
from areal_lab.live import presence
from areal_lab.live.presence import ProcessIdentity, identity_of
from areal_lab.pipeline.run import run
from areal_lab.pipeline.state import RunState
from areal_lab.resolve.resolved import resolve
from areal_lab.shell.display import Lines
from areal_lab.shell.stop import StopSignal
from tests.fault_lab.hosts.faults import Moment
from tests.fault_lab.hosts.moments import Held, Moments

EXACT_TOKENS: Final = 24
"""Of every response."""


def as_seen_from_another_machine(name: str, pid: int) -> ProcessIdentity:
    """A process of a machine of this name: network namespaces share their process ids."""
    return replace(identity_of(pid), host=name, boot=f"of {name}")


def main() -> None:
    """Run until it is struck."""
    watch_parent()
    config_file, wanted, report, name = sys.argv[1:]
    config, state = load_config(config_file, []), RunState()
    moments = [Moment(wanted)] if wanted else []

    def claim(moment: Moment) -> bool:
        saved = state.performer is not None and state.performer.last_checkpoint
        return bool(saved and moment in moments and not moments.remove(moment))

    async def strike(held: Held) -> None:
        Path(report).with_suffix(".new").write_text(str(held.process))
        Path(report).with_suffix(".new").rename(report)
        await asyncio.Event().wait()

    with pytest.MonkeyPatch.context() as patch:
        Moments(state, claim, strike).arm(patch)
        patch.setattr(presence, "identity_of", partial(as_seen_from_another_machine, name))
        asyncio.run(
            run(
                resolve(config),
                on_step=lambda _: None,
                display=Lines(Console()),
                stop=StopSignal(),
                state=state,
                response_tokens=lambda *_: EXACT_TOKENS,
            )
        )


if __name__ == "__main__":
    main()

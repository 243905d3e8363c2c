"""Python programs of a model, in the sandbox of the rewards: their output is the result."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any, Final

from areal_lab.agents.tools.box import ToolBroken, ToolFailure
from areal_lab.host.isolation import LevelSetting
from areal_lab.rewards.sandbox.levels import choose
from areal_lab.rewards.sandbox.run import Finished, Limits, SandboxError

_MB: Final = 1 << 20
_NOTHING: Final = "(nothing was printed)"


class Python:
    """Run programs, each in a new process and an empty folder (docs/sandbox.md).

    Args:
        sandbox: containment of programs; the workflow's is `reward.sandbox`.
        timeout_s: wall time of a program, without queueing.
        memory_mb: memory of all processes of a program together.
        at_once: concurrent programs; 0 is the number of cores.

    Raises:
        NoSandbox: programs cannot be contained like that here.
        ValueError: a number is out of its bounds.
    """

    name = "python"
    description = "Run a Python program; returns what it prints."
    parameters: Final[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
    }
    limits_itself: Final = True

    def __init__(
        self,
        *,
        sandbox: LevelSetting = "auto",
        timeout_s: float = 10.0,
        memory_mb: int = 512,
        at_once: int = 0,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, but must be > 0 (seconds)")
        if memory_mb < 1:
            raise ValueError(f"memory_mb is {memory_mb}, but must be >= 1")
        if at_once < 0:
            raise ValueError(f"at_once is {at_once}, but must be >= 0 (0: the number of cores)")
        self._sandbox = choose(sandbox)
        self._limits = Limits(timeout_s=timeout_s, memory_bytes=memory_mb * _MB)
        # More programs than cores would slow each other down within their time limit.
        self._places = asyncio.Semaphore(at_once or len(os.sched_getaffinity(0)))

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Output of the program `code`; if it fails, with the last line of its error."""
        async with self._places:
            try:
                found = await self._sandbox.run_async(str(arguments["code"]), limits=self._limits)
            except SandboxError as error:
                raise ToolBroken(f"the tool python cannot run a program: {error}") from error
        if found.passed:
            return found.stdout.rstrip("\n") or _NOTHING
        printed = f"{found.stdout.rstrip()}\n" if found.stdout.strip() else ""
        outcome = "timeout" if found.end == "timeout" else "error"
        raise ToolFailure(printed + self._reason(found), outcome)

    def _reason(self, found: Finished) -> str:
        match found.end:
            case "exited":
                errors = found.stderr.strip().splitlines()
                return errors[-1] if errors else f"error: exit code {found.code}"
            case "timeout":
                return f"error: no end within {self._limits.timeout_s:g} s"
            case "memory":
                return f"error: more than {self._limits.memory_bytes // _MB} MB of memory"
            case "output":
                return f"error: more than {self._limits.output_bytes // 1024} kB of output"
            case "processes":
                return f"error: more than {self._limits.processes} processes"
            case "crashed" | "stopped":
                return f"error: ended by signal {found.code}"

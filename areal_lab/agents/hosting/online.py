"""Samples from programs outside of the run, which know only an address and a key.

run's gateway: host, port --> gateway.json of the run folder
admin key                 --> a file that only its user can read
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from areal_lab.agents.gateway.server import HOST, base_url, bind, is_loopback, served
from areal_lab.agents.hosting.admin_key import admin_key, check_admin_key_file, how_to_start
from areal_lab.agents.hosting.conversations import (
    RUN_REQUESTS,
    Conversations,
    Serving,
    check_gateway,
    run_limits,
)
from areal_lab.agents.hosting.outside import OutsideSamples
from areal_lab.agents.workflow import Episode, WorkflowEngine

_MOST_TASKS: Final = 3
"""Maximum tasks that the display names."""


class Online:
    """Samples from programs outside of the run over HTTP, while the weights change.

    Each session that ends with a reward is a sample. Its reward is that of the session, or the sum
    of the rewards of single replies, whose turns are then compared by their returns. Sessions with
    the same `task_id` are samples of one group.

    Args:
        host: address to listen on. Other machines that reach it must be trusted: requests are not
            encrypted.
        port: port to listen on; 0 takes a free one.
        admin_key_file: file with the key that starts sessions; it is created if missing. Empty
            creates a new key for each run.
        session_timeout_s: idle time after which a session is ended, and also a group whose task
            starts no further session.
        reward_timeout_s: time after its end in which a session may still get its reward.
        requests: concurrent calls of all sessions; one more is refused with 429.
        session_requests: concurrent calls of one session.
        turn_discount: discount of a reward from a reply to the one before it.
        turn_discount_style: `tree` carries rewards back along each conversation; `linear` in order
            of creation, as AReaL does, so parallel conversations get each other's rewards.
        tool_call_parser: grammar of tool calls (`tool_calls.GRAMMARS`); `auto` takes the one
            that the model's template writes.
        template: file of a chat template, instead of the model's.
        describe_tools: whether tools are described in the system message if the template ignores
            them. False leaves that to the agent's own messages.

    Raises:
        ValueError: a number is out of its bounds, or the file of the key cannot be used.
    """

    def __init__(
        self,
        *,
        host: str = HOST,
        port: int = 0,
        admin_key_file: str = "",
        session_timeout_s: float = 3600.0,
        reward_timeout_s: float = 0.0,
        requests: int = RUN_REQUESTS,
        session_requests: int = 64,
        turn_discount: float = 1.0,
        turn_discount_style: str = "tree",
        tool_call_parser: str = "auto",
        template: str = "",
        describe_tools: bool = True,
    ) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"port is {port}, but must be in [0, 65535]; 0 takes a free one")
        check_admin_key_file(admin_key_file)
        self._host = host
        self._port = port
        self._key_file = admin_key_file
        self._serving = Serving(
            tool_call_parser=tool_call_parser,
            template=template,
            describe_tools=describe_tools,
            turn_discount=turn_discount,
            turn_discount_style=turn_discount_style,
            limits=run_limits(
                requests=requests,
                session_requests=session_requests,
                session_timeout_s=session_timeout_s,
                reward_timeout_s=reward_timeout_s,
            ),
        )
        self._stack = AsyncExitStack()

    def check_model(self, model: Path) -> None:
        """See `ReadsModel`; the port must be free, too."""
        self._serving.check_model(model)
        bind(self._port, self._host).close()

    async def open(self, model: Path) -> None:
        """See `Opens`."""
        listener = bind(self._port, self._host)
        self._stack.callback(listener.close)
        self._url = base_url(listener)
        self._open_to_others = not is_loopback(listener)
        key = self._stack.enter_context(admin_key(listener.getsockname()[1], self._key_file))
        self._file = key.file
        self._samples = OutsideSamples(
            Conversations(model, self._serving),
            self._serving,
            admin_key=key.key,
            model=model.name,
        )
        self._stack.callback(self._samples.close)
        self._gateway = await self._stack.enter_async_context(
            served(self._samples.service, listener)
        )

    async def close(self) -> None:
        """See `Opens`."""
        await self._stack.aclose()

    def address(self) -> Mapping[str, str]:
        """See `Attended`."""
        return {"url": self._url, "admin_key_file": str(self._file)}

    def notices(self) -> tuple[str, ...]:
        """See `Attended`."""
        lines = [
            f"the run waits for sessions from outside at {self._url}; its admin key is in "
            f"{self._file}",
            f"start one: {how_to_start(self._url, self._file)}",
        ]
        if self._open_to_others:
            lines.append(
                f"the gateway listens on {self._host}: other machines can reach it, and requests "
                "are not encrypted"
            )
        return tuple(lines)

    def waiting_for(self) -> str:
        """See `Attended`."""
        samples = len(self._samples.waiting)
        if not samples:
            return ""
        facts = [f"{self._samples.service.sessions.open} open"]
        unfilled = self._samples.waiting.unfilled().items()
        facts += [
            f"{count} more wanted on {task!r}" for task, count in list(unfilled)[:_MOST_TASKS]
        ]
        ends = self._samples.ends
        if abandoned := ends.total() - ends["rewarded"] - ends["not_started"]:
            facts.append(f"{abandoned} ended without a reward")
        sessions = f"{samples} session{'s' if samples > 1 else ''} from outside"
        return f"{sessions} at {self._url} ({', '.join(facts)})"

    async def run(self, engine: WorkflowEngine, data: Mapping[str, Any]) -> Episode:
        """See `Workflow.run`."""
        sample = asyncio.create_task(self._samples.run(engine, data))
        try:
            await asyncio.wait((sample, self._gateway), return_when=asyncio.FIRST_COMPLETED)
            check_gateway(self._gateway)
            return await sample
        finally:
            sample.cancel()
            await asyncio.gather(sample, return_exceptions=True)

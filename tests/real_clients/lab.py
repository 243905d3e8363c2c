"""A gateway in this process, and an unmodified client in a process and an environment of its own.

    program of the client --HTTP--> gateway --> conversation --> a model that a script writes
            '--JSON: what it was told--> test <--JSON: exported rows--'

A program gets a URL, and for each of its tasks a key; it knows nothing else of this project.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from areal_lab.agents.conversation import TreeConversation
from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.gateway.server import base_url, bind, serve
from areal_lab.agents.gateway.service import Service
from areal_lab.agents.gateway.sessions import Limits, Session
from areal_lab.engines.protocol import SamplingParams
from tests.agents.scripted_model import Said, Sample, Sampled, ScriptedModel, writing
from tests.agents.templates import chat_format
from tests.real_clients.environments import CLIENTS

Script = Callable[[list[Said]], str]

_PROGRAMS: Final = Path(__file__).with_name("programs")
_ADMIN: Final = "the-admins-key"
_HUNG_S: Final = 240
"""A program that takes longer hangs."""

QUESTION: Final = "How much are 2 + 3 and 4 + 5?"
AGAIN: Final = "And together?"
SUMS: Final = "\nThat is 5 and 9. \N{PARTY POPPER}"
"""The blank line and the character of four bytes would be other tokens if they were encoded."""
TOGETHER: Final = "That is 14."
ADD: Final = (
    '<tool_call>{ "name": "add", "arguments": { "b": 3,"a":2} }</tool_call>\n'
    '<tool_call>{"name": "add", "arguments": {"a": 4, "b": 5}}</tool_call>'
)
"""Two calls at once; spaces and order of keys are what clients change."""


def adds(said: list[Said]) -> str:
    """Calls the tool twice, says what it returned, and answers a second question."""
    results = [each.text.strip() for each in said[-2:] if each.role == "tool"]
    if results:
        return SUMS.replace("5 and 9", " and ".join(results))
    return TOGETHER if AGAIN in said[-1].text else ADD


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One task of a client, done."""

    said: Any
    """What the program says that it was told."""
    model: ScriptedModel
    conversation: TreeConversation
    session: Session
    rows: list[dict[str, Any]]

    @property
    def forks(self) -> dict[str, int]:
        """Requests that do not continue the turn before them, by cause."""
        return dict(self.conversation.tree.forks)

    @property
    def matches(self) -> dict[str, int]:
        """How the client sent sampled answers back."""
        return dict(self.conversation.tree.matches)

    def check(self) -> None:
        """Every sampled token is trained once, and every answer was delivered."""
        assert self.model.answers
        self.model.check(self.conversation, self.rows)
        assert all(each.delivered for each in self.session.interactions.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """All tasks of a client."""

    outcomes: Mapping[str, Outcome]
    counts: Mapping[str, int]
    """Of the gateway."""

    def __getitem__(self, task: str) -> Outcome:
        return self.outcomes[task]


def run(client: str, tasks: Mapping[str, Script], folder: Path, *, held: str = "") -> Done:
    """Run the program of a client, in its environment.

    Args:
        client: name of its requirements; its program is `use_` and this.
        tasks: names of its tasks, each with what the model says.
        folder: where it may write.
        held: the task whose model says nothing until its client has asked a second time.
    """
    program = _PROGRAMS / f"use_{client.replace('-', '_')}.py"
    return asyncio.run(_run([str(CLIENTS.python_of(client)), str(program)], tasks, folder, held))


async def _run(command: list[str], tasks: Mapping[str, Script], folder: Path, held: str) -> Done:
    form = chat_format("SMOLLM2")
    service = Service(_refused, admin_key=_ADMIN, model="smollm2", limits=Limits(retry_after_s=0.1))
    listener = bind()
    serving = asyncio.create_task(serve(service, listener))
    models = {task: ScriptedModel(writing(form, script)) for task, script in tasks.items()}
    if held:
        models[held].sample = _once_sent_again(models[held].sample, service)
    conversations = {task: model.conversation(form, session=task) for task, model in models.items()}
    sessions = {
        task: service.start_session(task, conversation=conversation)
        for task, conversation in conversations.items()
    }
    given = {
        "url": base_url(listener),
        "keys": {task: key for task, (_, key) in sessions.items()},
        "question": QUESTION,
        "again": AGAIN,
    }
    try:
        said = json.loads(await _output(command, json.dumps(given), folder))
        outcomes = {}
        for task, (session, _) in sessions.items():
            service.set_reward(session, 1.0)
            service.end_session(session)
            await service.settled(session)
            exported = json.loads(json.dumps(service.export(session, style="concat")))
            outcomes[task] = Outcome(
                said=said[task],
                model=models[task],
                conversation=conversations[task],
                session=session,
                rows=exported["rows"],
            )
        return Done(outcomes=outcomes, counts=dict(service.sessions.counts))
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def _once_sent_again(sample: Sample, service: Service) -> Sample:
    async def waiting(prompt: tuple[int, ...], sampling: SamplingParams) -> Sampled:
        while not service.sessions.counts["sent_again"]:
            await asyncio.sleep(0.001)
        return await sample(prompt, sampling)

    return waiting


async def _output(command: list[str], given: str, folder: Path) -> str:
    """The last line that a program writes; its errors are ours."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        # No proxies or keys of this machine, and no home in which a client could have settings.
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"},
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_HUNG_S):
            out, errors = await process.communicate(given.encode())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    assert process.returncode == 0, f"{' '.join(command)}\n{errors.decode()[-5000:]}"
    return out.decode().splitlines()[-1]


def _refused(task_id: str) -> NoReturn:
    raise ApiError(403, f"sessions are started by the test, and not for {task_id!r}")

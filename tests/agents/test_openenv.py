"""Sessions of OpenEnv servers: one that speaks the protocol, with faults; also as a process."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import serve

from areal_lab.agents.catalogue import make_workflow
from areal_lab.agents.environments import openenv_server
from areal_lab.agents.environments.openenv import OpenEnv
from areal_lab.agents.environments.protocol import Step
from areal_lab.agents.workflow import Episode, opened
from areal_lab.rewards.service import RewardError
from tests.agents.openenv_server import Server, error, observation
from tests.agents.scripted import Scripted
from tests.ended import gone, kill_and_wait

DATA = {"prompt": "Play. ", "seed": 3}


@asynccontextmanager
async def served(server: Server) -> Any:
    async with serve(server, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def with_server(server: Server, body: Callable[[str], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with served(server) as url:
            return await body(url)

    return asyncio.run(main())


def episode(server: Server, *script: str, **settings: Any) -> tuple[Episode, Scripted]:
    engine = Scripted(script)

    async def body(url: str) -> Episode:
        given = {"name": "openenv", "url": url, "action": "guess", "timeout_s": 300.0, **settings}
        workflow = make_workflow(given)
        assert workflow is not None
        return await workflow.run(engine, DATA)

    return with_server(server, body), engine


def test_a_session_is_a_sample() -> None:
    server = Server()
    found, engine = episode(server, "2", "many", "3", turn_discount=1.0)
    assert engine.prompts == [
        "Play. A number from 0 to 9?",
        "Play. A number from 0 to 9?2\nwrong\n",
        "Play. A number from 0 to 9?2\nwrong\nmany\nerror: guess: must be an integer\n",
    ]
    assert found.outcome.reward == 0.5
    assert [turn.reward for turn in found.turns] == [-0.5, None, 1.0]
    assert found.rows[0].turn_returns == (0.5, 1.0, 1.0)
    kinds = [message["type"] for message in server.received]
    assert kinds == ["reset", "step", "step", "step", "close"], "nothing after done but the end"
    assert server.received[0]["data"] == {"seed": 3}


def test_a_session_that_is_not_finished_is_closed() -> None:
    server = Server()
    found, _ = episode(server, "1", "2", max_turns=2, reset={"largest": 4})
    assert (found.outcome.reward, found.end) == (-1.0, "turns")
    assert server.received[0]["data"] == {"seed": 3, "largest": 4}
    assert server.received[-1]["type"] == "close"
    assert server.open == 0


def test_an_action_may_be_json() -> None:
    found, engine = episode(Server(), "3", '{"guess": "x"}', '{"guess": 3}', action="")
    assert found.outcome.reward == 1.0
    assert "\nerror: an action is one JSON object\n" in engine.prompts[1]
    assert "\nerror: guess: must be an integer\n" in engine.prompts[2]


SAID = '{"type": "observation", "data": {"observation": {"message": "x"}, "done": %s}}'


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("close", "closed the session with code 1000"),
        ("no JSON", "replied 'no JSON', which is no message"),
        ("[]", "replied '\\[\\]', which is no message"),
        ('{"type": "observation", "data": 3}', "which is no message"),
        (json.dumps(error("EXECUTION_ERROR", "of the\ncode")), "EXECUTION_ERROR: of the code$"),
        (json.dumps({"type": "state", "data": {}}), "replied state None"),
        (json.dumps(observation("x", "much", True)), "reward 'much', not a finite number"),
        (json.dumps(observation("x", float("nan"), True)), "reward nan, not a finite number"),
        (json.dumps(observation("x", 1, "yes")), "done is 'yes', not true or false"),
        (SAID.replace('{"message": "x"}', "7") % "true", "sent the observation 7"),
    ],
)
def test_a_failure_of_the_server_is_no_reward(fault: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as raised:
        episode(Server(fault=fault), "3")
    assert "\n" not in str(raised.value)


def test_a_server_that_hangs_is_a_timeout() -> None:
    server = Server(fault="hang")

    async def body(url: str) -> Episode:
        workflow = make_workflow({"name": "openenv", "url": url, "timeout_s": 0.2})
        assert workflow is not None
        found = await workflow.run(Scripted(['{"guess": 3}']), DATA)
        while server.open:  # its session does not stay open
            await asyncio.sleep(0.01)
        return found

    outcome = with_server(server, body).outcome
    assert outcome.status == "timeout"
    assert "of the environment took over 0.2 s" in outcome.detail


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("close", "began no session: closed the session with code 1000; .*max_concurrent_envs"),
        (
            json.dumps(error("CAPACITY_REACHED", "at capacity: 1/1")),
            "began no session: at capacity: 1/1; .*max_concurrent_envs",
        ),
        (
            json.dumps(error("VALIDATION_ERROR", "no such level")),
            "refuses the reset: no such level",
        ),
        (json.dumps(error("FACTORY_ERROR", "no corpus")), "FACTORY_ERROR: no corpus"),
    ],
)
def test_a_session_that_cannot_begin_is_no_reward(fault: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as raised:
        episode(Server(fault=fault, at="reset"), "3")
    assert "\n" not in str(raised.value)


def test_sessions_beyond_the_servers_limit_name_the_setting() -> None:
    async def body(url: str) -> list[Any]:
        first, second = OpenEnv(url=url), OpenEnv(url=url)
        await first.reset(DATA)
        with pytest.raises(RuntimeError, match=r"max_concurrent_envs.*max_concurrent_rollouts"):
            await second.reset(DATA)
        await second.close()
        await first.close()
        third = OpenEnv(url=url)  # a closed session has left room
        text = await third.reset(DATA)
        await third.close()
        return [text]

    assert with_server(Server(sessions=1), body) == ["A number from 0 to 9?"]


def test_64_sessions_at_once() -> None:
    server = Server()

    async def one(url: str, seed: int) -> Step:
        session = OpenEnv(url=url, action="guess")
        await session.reset({"seed": seed})
        while server.most < 64:
            await asyncio.sleep(0.001)
        step = await session.step(str(seed))
        await session.close()
        return step

    async def body(url: str) -> list[Step]:
        return await asyncio.gather(*(one(url, seed) for seed in range(64)))

    assert with_server(server, body) == [Step(text="right", done=True, reward=1.0)] * 64


def test_what_the_model_reads() -> None:
    def text(fields: dict[str, Any], name: str = "") -> str:
        session = OpenEnv(url="ws://h", observation=name)
        return session._text({"observation": fields})

    assert text({"a": "x", "n": 1, "metadata": {"b": "y"}}) == "x"
    assert text({"a": "x", "b": "y"}) == '{"a": "x", "b": "y"}'
    assert text({"a": "x", "b": "y"}, "b") == "y"
    assert text({"a": "x", "b": [1]}, "b") == "[1]"
    with pytest.raises(RuntimeError, match="the observation has no field 'c', only a, b"):
        text({"a": "x", "b": "y"}, "c")


def test_a_server_that_is_not_there_is_one_line() -> None:
    async def body(url: str) -> str:
        return url

    url = with_server(Server(), body)  # which is closed now
    with pytest.raises(RuntimeError, match="no OpenEnv server at ws://127") as raised:
        asyncio.run(OpenEnv(url=url).reset(DATA))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://h", "http://", "http://h:x", "ftp://h:21", 7]
)
def test_an_address_that_is_none_is_refused(url: Any) -> None:
    with pytest.raises(ValueError, match="but must be the address of an OpenEnv server"):
        make_workflow({"name": "openenv", "url": url})


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:8000", "ws://h:8000/ws"),
        ("https://h/env/", "wss://h/env/ws"),
        ("ws://h/ws", "ws://h/ws"),
    ],
)
def test_addresses(url: str, address: str) -> None:
    assert OpenEnv(url=url)._address == address


PROGRAM = str(Path(__file__).with_name("openenv_server.py"))


def started(
    *episodes: Sequence[str], command: Sequence[str], **settings: Any
) -> list[Scripted | BaseException]:
    """Samples of a server that the workflow starts, in turn; a failed one is its error."""

    async def one(workflow: Any, engine: Scripted) -> Scripted | BaseException:
        try:
            await workflow.run(engine, DATA)
        except RuntimeError as failed:
            return failed
        return engine

    async def main() -> list[Scripted | BaseException]:
        given = {"name": "openenv", "command": command, "action": "guess", "timeout_s": 300.0}
        workflow: Any = make_workflow({**given, **settings})
        async with opened(workflow, Path()):
            return [await one(workflow, Scripted(script)) for script in episodes]

    return asyncio.run(main())


def served_by(engine: Scripted | BaseException) -> list[int]:
    """Processes of the server of a sample."""
    assert isinstance(engine, Scripted), engine
    return [int(pid) for pid in engine.prompts[0].removeprefix("Play. ").split()]


def test_a_command_is_started_and_ends_with_the_run(tmp_path: Path) -> None:
    file = tmp_path / "ended"
    command = [sys.executable, PROGRAM, "{port}", str(file)]
    first, second = started(["3"], ["1", "3"], command=command)
    assert served_by(first) == served_by(second)
    assert file.exists(), "it had the time to end by itself"
    assert gone(*served_by(first)), "also what it has started"


def test_a_server_that_ends_is_one_line_and_is_started_again(tmp_path: Path) -> None:
    command = [sys.executable, PROGRAM, "{port}", str(tmp_path / "ended")]
    found = started(["1", "98"], ["3"], ["1", "99"], ["3"], command=command)
    for failed, message in zip(
        found[::2], ("exited with 3; it said: something about it", "killed by SIGKILL"), strict=True
    ):
        assert isinstance(failed, RuntimeError)
        assert message in str(failed)
        assert "\n" not in str(failed)
    first, second = served_by(found[1]), served_by(found[3])
    assert not {*first} & {*second}
    assert gone(*first, *second)


def test_a_command_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from areal_lab.agents.catalogue import make_workflow\n"
        "from areal_lab.agents.environments.openenv import OpenEnv\n"
        "async def main():\n"
        "    workflow = make_workflow({'name': 'openenv', 'command': sys.argv[1:]})\n"
        "    await workflow.open(Path())\n"
        "    print(await OpenEnv(url=workflow._server.url).reset({}), flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    kill_and_wait(code, sys.executable, PROGRAM, "{port}", str(tmp_path / "e"))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no licence for {port}')", "exited with 1; it said: no licence for"),
        ("import time; time.sleep({port})", "did not listen at http://127.* within 0.5 s, and was"),
    ],
)
def test_a_command_that_does_not_serve_is_refused_in_one_line(
    program: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if "sleep" in program:
        monkeypatch.setattr(openenv_server, "START_TIMEOUT_S", 0.5)
    with pytest.raises(RewardError, match=message) as raised:
        started(["3"], command=[sys.executable, "-c", program])
    assert "\n" not in str(raised.value)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "http://h:1"}, "has the url 'http://h:1' and a command; give url for"),
        ({"command": "sleep {port}"}, "openenv: command is 'sleep {port}', but must be a list"),
        ({"command": ["no-such-program", "{port}"]}, "'no-such-program', which is no program"),
        ({"command": ["sleep", "8000"]}, "command is 'sleep 8000', but must contain {port}"),
        ({"max_turns": 0}, "max_turns is 0"),
    ],
)
def test_a_command_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        make_workflow({"name": "openenv", "command": ["sleep", "{port}"], **settings})
    assert "\n" not in str(raised.value)

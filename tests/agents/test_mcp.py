"""MCP servers as tools, and how they end: real processes; no failure is a result or a reward."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import areal_lab.agents.tools.mcp as mcp_module
from areal_lab.agents.catalogue import make_workflow
from areal_lab.agents.tool_use import ToolUse
from areal_lab.agents.tools.box import ToolBox, ToolBroken, ToolResult
from areal_lab.agents.tools.catalogue import make_tool
from areal_lab.agents.tools.mcp import McpServers
from areal_lab.engines.protocol import SamplingParams
from areal_lab.rewards.service import RewardError
from tests.agents.scripted import Scripted
from tests.ended import gone, kill_and_wait
from tests.pipeline.tiny_run import do_run, tiny_config, trained_samples

SERVER = str(Path(__file__).with_name("mcp_server.py"))


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    return [sys.executable, SERVER, str(tmp_path)]


class Call:
    """Call tools of servers; the attribute `servers` is what is tested."""

    def __init__(self, servers: McpServers, box: ToolBox) -> None:
        self.servers = servers
        self._box = box

    async def __call__(self, name: str, **arguments: Any) -> ToolResult:
        return await self._box.call(f"mcp_{name}", arguments)

    async def process(self) -> list[int]:
        """Ids of a server's process and of one that it has started."""
        return [int(pid) for pid in (await self("process")).text.split()]


def with_tools(body: Callable[[Call], Awaitable[Any]], **settings: Any) -> Any:
    """Result of a function that gets a way to call the tools of servers."""

    async def main() -> Any:
        servers = McpServers(**{"timeout_s": 300.0, **settings})
        try:
            return await body(Call(servers, ToolBox(*await servers.open())))
        finally:
            await servers.close()

    return asyncio.run(main())


async def broken(call: Awaitable[Any]) -> str:
    with pytest.raises(ToolBroken) as raised:
        await call
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_results_and_failures_are_texts(command: list[str]) -> None:
    async def body(call: Call) -> list[ToolResult]:
        return [
            await call("add", a=34, b=27),
            await call("add", a=34),
            await call("add", a=34, b="many"),
            await call("add", a=34, b=27, c=1),
            await call("refuses", text="not today"),
            await call("draws"),
            await call("add", a="\ud800", b=float("nan")),
            *await asyncio.gather(*(call("add", a=n, b=n) for n in range(64))),
        ]

    results = with_tools(body, command=command)
    assert results[0] == ToolResult("61")
    assert results[1] == ToolResult("error: the argument 'b' is missing", "error")
    assert results[2].outcome == "error"
    assert "valid integer" in results[2].text
    assert results[4].outcome == "error"
    assert results[4].text.lower().startswith("error")
    assert "not today" in results[4].text
    assert results[5] == ToolResult("a dot\n(image, which is not text)")
    assert results[6].outcome == "error"
    assert [one.text for one in results[7:]] == [str(2 * n) for n in range(64)]


def test_a_call_that_takes_too_long_leaves_the_server_running(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_module, "PING_TIMEOUT_S", 300.0)

    async def body(call: Call) -> tuple[int, list[ToolResult], int]:
        before, *_ = await call.process()
        call.servers._timeout_s = 0.01
        late = await asyncio.gather(call("waits"), call("waits"))
        call.servers._timeout_s = 300.0
        after, *_ = await call.process()
        return before, late, after

    before, late, after = with_tools(body, command=command)
    assert late == [ToolResult("error: no result within 0.01 s", "timeout")] * 2
    assert before == after


def test_a_server_that_is_lost_fails_its_calls_and_is_started_again(command: list[str]) -> None:
    ends = {
        3: "exited with 3; it said: something about it",
        -9: "was killed by SIGKILL",
        -15: "was killed by SIGTERM",
    }

    async def body(call: Call) -> list[int]:
        pids = await call.process()
        for code, message in ends.items():
            waiting = asyncio.create_task(broken(call("waits")))
            failed = [await broken(call("leaves", code=code)), await waiting]
            assert all(message in one for one in failed), failed
            before, pids = pids, await call.process()
            assert pids[0] != before[0]
            assert gone(*before), "also what it has started"
        assert (await call("add", a=1, b=2)).text == "3"
        return pids

    assert gone(*with_tools(body, command=command)), "at the end of the run"


def test_a_hung_server_is_killed_after_a_ping(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_module, "PING_TIMEOUT_S", 0.05)

    async def body(call: Call) -> tuple[list[str], str]:
        pid, *_ = await call.process()
        first = asyncio.create_task(broken(call("stops")))
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.01)
        call.servers._timeout_s = 0.05
        failed = [await broken(call("add", a=1, b=1)), await first]
        call.servers._timeout_s = 300.0
        return failed, (await call("add", a=1, b=2)).text

    failed, again = with_tools(body, command=command)
    assert all("did not reply for 0.05 s, and was killed" in one for one in failed)
    assert again == "3"


def test_a_server_that_ends_between_calls_fails_one_call(
    command: list[str], tmp_path: Path
) -> None:
    async def body(call: Call) -> tuple[str, str]:
        assert (await call("leaves_later")).text == "soon"
        pid, *_ = await call.process()
        (tmp_path / "leave").touch()
        while not gone(pid):
            await asyncio.sleep(0.01)
        [server] = call.servers._servers
        await server._ended.wait()
        first = await broken(call("add", a=1, b=2))
        return first, (await call("add", a=1, b=2)).text

    first, then = with_tools(body, command=command)
    assert "exited with 5" in first
    assert then == "3"


def test_calls_are_spread_over_the_servers(command: list[str]) -> None:
    async def body(call: Call) -> set[int]:
        one, *_ = await call.process()
        waiting = asyncio.create_task(call("waits"))
        await asyncio.sleep(0)  # the call has begun
        pids = {(await call.process())[0] for _ in range(3)}
        assert len(pids) == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        return {one, *pids}

    assert len(with_tools(body, command=command, servers=2)) == 2


def test_a_server_ends_with_a_run_that_is_killed(command: list[str]) -> None:
    code = (
        "import asyncio, sys\n"
        "from areal_lab.agents.tools.mcp import McpServers\n"
        "async def main():\n"
        "    servers = McpServers(command=sys.argv[1:])\n"
        "    tools = {tool.name: tool for tool in await servers.open()}\n"
        "    print(await tools['mcp_process'].call({}), flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    kill_and_wait(code, *command)


REPLIES = (  # a server with other tools each time that it is started
    "import json, os, sys\n"
    "for line in sys.stdin:\n"
    "    asked = json.loads(line)\n"
    "    if 'id' not in asked: continue\n"
    "    if asked['method'] == 'tools/call': print(TEXT, end='', flush=True); LEAVES\n"
    "    own = {'name': f'tool{os.getpid()}', 'inputSchema': {'type': 'object'}}\n"
    "    reply = {'initialize': {'protocolVersion': '2025-11-25', 'capabilities': {'tools': {}},\n"
    "        'serverInfo': {'name': 'x', 'version': '1'}}, 'tools/list': {'tools': [own]}}\n"
    "    print(json.dumps({'jsonrpc': '2.0', 'id': asked['id'],\n"
    "        'result': reply[asked['method']]}), flush=True)\n"
)


def with_replies(text: str, then: str = "continue") -> str:
    return REPLIES.replace("TEXT", repr(text)).replace("LEAVES", then)


RESULT = '{"jsonrpc": "2.0", "id": 3, "%s"}\n'


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("Loading ...\n", "wrote b'Loading ...\\n' to its standard output"),
        ('{"jsonrpc": "2.0"}\n', "which is no message of MCP, and was killed"),
        (RESULT % 'result": {"content": 3}, "x": "', "content"),
        (RESULT % 'result": 3, "x": "', "which is no message of MCP"),
        ('{"jsonrpc": "2.0", "id": 3, "re', "exited with 4"),
        (RESULT.strip() % 'result": {"content": []}, "x": "', "exited with 4"),
    ],
)
def test_a_reply_that_is_no_result_fails_the_sample(reply: str, message: str) -> None:
    async def main() -> str:
        program = with_replies(reply, "continue" if reply.endswith("\n") else "sys.exit(4)")
        servers = McpServers(command=[sys.executable, "-c", program])
        try:
            [tool] = await servers.open()
            return await broken(tool.call({}))
        finally:
            await servers.close()

    assert message in asyncio.run(main())


@pytest.mark.parametrize("code", [-32602, -32603, -32000, 7])
def test_an_error_of_the_protocol_is_a_text(code: int) -> None:
    async def main() -> ToolResult:
        said = RESULT % f'error": {{"code": {code}, "message": "no such city"}}, "x": "'
        servers = McpServers(command=[sys.executable, "-c", with_replies(said)])
        try:
            [tool] = await servers.open()
            return await ToolBox(tool).call(tool.name, {})
        finally:
            await servers.close()

    assert asyncio.run(main()) == ToolResult("error: no such city", "error")


def test_a_server_must_keep_its_tools() -> None:
    async def main() -> list[str]:
        program = with_replies("", "sys.exit(4)")
        servers = McpServers(command=[sys.executable, "-c", program])
        try:
            [tool] = await servers.open()
            return [await broken(tool.call({})), await broken(tool.call({}))]
        finally:
            await servers.close()

    first, second = asyncio.run(main())
    assert "exited with 4" in first
    assert "has other tools than when it was first started" in second


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no licence')", "exited with 1; it said: no licence"),
        ("print('Welcome')", r"wrote b'Welcome\\n' to its standard output"),
        (f"print('x' * {mcp_module.LINE_BYTES + 2})", "wrote a line of more than 16777216 bytes"),
        ("import os; os.close(0); os.close(1); input", "exited with 0"),
        (REPLIES.replace("[own]", "[]"), "the server has no tools"),
        (REPLIES.replace("{os.getpid()}", ""), "the server has no tool 'add', only tool$"),
        (REPLIES.replace("[own]", "[own], 'nextCursor': '1'"), "more than 1000 tools"),
        (REPLIES.replace("'inputSchema'", "'schema'"), "cannot be used: .*inputSchema"),
    ],
)
def test_a_server_that_does_not_serve_is_refused_in_one_line(
    program: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    servers = McpServers(command=[sys.executable, "-c", program], only=["add"])

    async def main() -> None:
        try:
            await servers.open()
        finally:
            await servers.close()

    with pytest.raises(RewardError, match=message) as raised:
        asyncio.run(main())
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 700


def test_a_server_that_never_lists_its_tools_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_module, "START_TIMEOUT_S", 0.2)
    servers = McpServers(command=["sleep", "infinity"])
    with pytest.raises(RewardError, match=r"did not list its tools in 0.2 s, and was killed"):
        asyncio.run(servers.open())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({}, "command"),
        ({"command": "python server.py"}, "command is 'python server.py', but must be a list"),
        ({"command": []}, "command is .., but must be a list"),
        ({"command": ["no-such-program"]}, "command is 'no-such-program', which is no program"),
        ({"command": ["sleep"], "only": "add"}, "only is 'add', but must be a list"),
        ({"command": ["sleep"], "servers": 0}, "servers is 0, but must be >= 1"),
        ({"command": ["sleep"], "timeout_s": 0}, "timeout_s is 0, but must be > 0"),
        ({"command": ["sleep"], "tool": "add"}, "unexpected keyword argument 'tool'"),
    ],
)
def test_settings_that_cannot_work_are_refused(setting: dict[str, Any], message: str) -> None:
    tools = [{"name": "mcp", **setting}]
    with pytest.raises(ValueError, match=message) as raised:
        make_workflow({"name": "tool_use", "notation": "json", "tools": tools})
    assert "the tool mcp" in str(raised.value)


def test_only_json_calls_servers() -> None:
    with pytest.raises(ValueError, match="the tool mcp needs notation json, but notation is lines"):
        ToolUse(tool={"name": "mcp", "command": ["sleep"]})
    with pytest.raises(ValueError, match="of the workflow tool_use alone"):
        make_tool("mcp")


def test_the_package_is_imported_by_the_first_server_only() -> None:
    code = (
        "import sys\n"
        "from areal_lab.agents.tool_use import ToolUse\n"
        "tool = {'name': 'mcp', 'command': ['sleep']}\n"
        "ToolUse(notation='json', tools=[tool])\n"
        "assert not {'mcp', 'mcp_types', 'anyio'} & {*sys.modules}, 'it takes seconds'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})


def said(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def played(workflow: ToolUse, *engines: Scripted, prompt: str = "?") -> list[Any]:
    """Episodes of a workflow, one after another; a sample that fails is its error."""

    async def main() -> list[Any]:
        try:
            await workflow.open(Path())
            return [
                (
                    await asyncio.gather(
                        workflow.run(one, {"prompt": prompt}), return_exceptions=True
                    )
                )[0]
                for one in engines
            ]
        finally:
            await workflow.close()

    return asyncio.run(main())


def test_a_sample_calls_the_tools_of_servers_and_others(command: list[str]) -> None:
    workflow = ToolUse(
        notation="json",
        tools=[
            "calculator",
            {"name": "mcp", "command": command, "prefix": "sums", "only": ["add", "leaves"]},
        ],
        timeout_s=300.0,
    )
    calls = said("sums_add", '{"a": 34, "b": 27}') + said("calculator", '{"expression": "2*3"}')
    unknown = said("sums_draws", "{}")
    large: dict[str, Any] = {"context_tokens": 9000, "sampling": SamplingParams(max_new_tokens=500)}
    good = Scripted([calls, unknown, "61"], {"61": 1.0}, **large)
    bad = Scripted([said("sums_leaves", '{"code": 3}'), "never"], **large)
    again = Scripted([said("sums_add", '{"a": 1, "b": 2}'), "3"], {"3": 1.0}, **large)
    first, failed, second = played(workflow, good, bad, again, prompt="{tools}?")
    assert first.outcome.reward == second.outcome.reward == 1.0
    assert "<tool_response>\n61\n</tool_response>\n<tool_response>\n6\n" in good.prompts[1]
    assert (
        "there is no tool 'sums_draws', only calculator, sums_add, sums_leaves" in good.prompts[2]
    )
    assert "The sum of two integers." in good.prompts[0]
    assert isinstance(failed, ExceptionGroup)
    assert isinstance(failed.exceptions[0], ToolBroken)
    assert not bad.scored, "it has no reward"


def test_tools_of_two_servers_must_differ(command: list[str]) -> None:
    both = [{"name": "mcp", "command": command, "only": ["add"]}] * 2
    with pytest.raises(RewardError, match="the tools are mcp_add, mcp_add, but their names must"):
        played(ToolUse(notation="json", tools=both))


def test_a_run_starts_servers_and_ends_them(tmp_path: Path, command: list[str]) -> None:
    def config(program: list[str]) -> Any:
        words = ", ".join(map(repr, program))
        return tiny_config(
            tmp_path,
            "rollout.workflow={name: tool_use, notation: json, "
            f"tools: [{{name: mcp, command: [{words}]}}]}}",
            *("evaluation.max_problems=0", "total_train_steps=1"),
        )

    ended = do_run(config(command))
    assert ended.summary["status"] == "complete"
    assert trained_samples(ended.folder)
    running = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    assert not [one for one in running if str(tmp_path) in one], "it gets this folder"
    with pytest.raises(RewardError, match="exited with 1; it said: no licence"):
        do_run(config([sys.executable, "-c", "exit('no licence')"]))

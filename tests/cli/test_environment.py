"""`areal-lab environment`, called as by a user: real runners, a real gateway, a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from areal_lab.cli import app as cli
from benchmarks.tiny_model import write_tiny_model
from tests.agents.hosting.test_runner import STANDARD
from tests.agents.test_agent import TEMPLATE

OWN = ("own", f"environment.standard={STANDARD}", f"environment.python={sys.executable}")
CALLS = '''
import json, urllib.request

class Standard:
    """Offers two tools, and asks twice."""

    version = "3"

    def __init__(self, name, args):
        pass

    def tasks(self):
        return [{"id": "0"}]

    async def run(self, request):
        import asyncio
        asked = [{"role": "user", "content": "?"}]
        for _ in range(2):
            said = await asyncio.to_thread(ask, request["base_url"], asked)
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "2"}
                for call in said.get("tool_calls") or []
            ]
            asked = [*asked, said, *results, *asked[:1]]
        return {"ok": True, "reward": 1}

def ask(url, messages):
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "times")]
    body = json.dumps({"model": "any", "messages": messages, "tools": tools}).encode()
    request = urllib.request.Request(
        f"{url}/chat/completions", body, {"Content-Type": "application/json"}
    )
    opened = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request)
    return json.loads(opened.read())["choices"][0]["message"]
'''
LIES = '''
import json, urllib.request

class Standard:
    """Asks twice, and sends another answer back than it got."""

    version = "2"

    def __init__(self, name, args):
        self.answer = args["answer"]

    def tasks(self):
        return [{"id": "ab1"}, {"id": "ab2"}]

    async def run(self, request):
        import asyncio
        question = {"role": "user", "content": "?"}
        first = await asyncio.to_thread(ask, request["base_url"], [question])
        answer = {"role": "assistant", "content": self.answer or first}
        await asyncio.to_thread(ask, request["base_url"], [question, answer, question])
        return {"ok": True, "reward": 1, "truncated": True}

def ask(url, messages):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(
        f"{url}/chat/completions", body, {"Content-Type": "application/json"}
    )
    opened = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request)
    return json.loads(opened.read())["choices"][0]["message"]["content"]
'''


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["environment", *arguments])


def checked(*arguments: str) -> dict[str, Any]:
    result = call("check", *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def chatml(*turns: str) -> int:
    """Tokens of a prompt in bytes: each marker is one token."""
    text = "".join(f"<{turn}>\n" for turn in turns) + "<assistant\n"
    return len(text.encode())


def test_tasks_are_listed() -> None:
    result = call("list", *OWN, "--limit", "2")
    assert result.exit_code == 0, result.output
    assert "1 + 1 =" in result.stdout
    assert "2 + 1 =" not in result.stdout
    assert result.stdout.splitlines()[-1].endswith("1: 8 tasks, of which 2 are listed (--limit)")
    assert "loading own" in result.stderr
    found = json.loads(call("list", *OWN, "--limit", "0", "--json").stdout)
    assert (found["count"], found["version"]) == (8, "1")
    assert found["tasks"] == [{"id": str(n), "prompt": f"{n} + 1 ="} for n in range(8)]


@pytest.mark.parametrize(
    "command",
    [
        ("environment", "list", "unknown", *OWN[1:]),
        ("environment", "check", "unknown", *OWN[1:]),
        ("train", "verifiers", "environment=unknown", *OWN[1:]),
        ("train", "verifiers", "environment=unknown", *OWN[1:], "--restart", "1"),
        ("eval", "none", "verifiers", "environment=unknown", *OWN[1:]),
    ],
)
def test_loading_is_shown_before_its_end(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 2, result.output
    first, *rest = result.stderr.splitlines()
    assert first.endswith("loading unknown")
    assert any("environment: there is no environment unknown" in line for line in rest), rest


def test_an_episode_of_a_fixed_response_is_described() -> None:
    found = checked(*OWN, "--task", "3", "--response", "zwölf")
    (one,) = found["episodes"]
    assert (found["task"], found["tasks"], found["tokenizer"]) == ("3", 8, "bytes")
    assert (one["reward"], one["rewards"], one["metrics"]) == (
        0.5,
        {"half": 0.5},
        {"lines read": 2},
    )
    assert (one["turns"], one["rows"], one["forks"], one["end"]) == (1, 1, {}, "stop")
    sampled = len("zwölf".encode()) + 1
    assert one["trained_tokens"] == sampled
    assert one["tokens"] == chatml("user\n3 +") + sampled
    assert one["trained_share"] == pytest.approx(sampled / one["tokens"])


@pytest.mark.parametrize("answer", ["", "something else"])
def test_forks_of_a_conversation_and_its_rows_are_counted(answer: str, tmp_path: Path) -> None:
    file = tmp_path / "lies.py"
    file.write_text(LIES)
    settings = ("lies", f"environment.standard={file}", f"environment.python={sys.executable}")
    found = checked(*settings, f"environment.args={{answer: '{answer}'}}", "--task", "ab2")
    (one,) = found["episodes"]
    assert found["task"] == "ab2"
    assert (one["turns"], one["trained_tokens"], one["end"]) == (2, 2 * 15, "turns")
    first, said = "user\n?", f"assistant\n{answer or 'I do not know.'}"
    again = chatml(first, said, first) + 15
    if answer:
        assert (one["rows"], one["forks"]) == (2, {"assistant_rewritten": 1})
        assert one["tokens"] == chatml(first) + 15 + again
    else:
        assert (one["rows"], one["forks"], one["tokens"]) == (1, {}, again)
    ambiguous = call("check", *settings, "environment.args={answer: ''}", "--task", "ab")
    assert ambiguous.exit_code == 2
    assert "with which 2 ids of 2 begin" in ambiguous.stderr


@pytest.mark.parametrize(
    ("called", "calls", "told"),
    [
        ("", {}, "add, times"),
        ("times", {"times": 2}, "add, times (2 calls)"),
        ("minus", {"?": 2}, "add, times; unreadable or unknown calls: 2"),
    ],
)
def test_tools_are_listed_whether_called_or_not(
    called: str, calls: dict[str, int], told: str, tmp_path: Path
) -> None:
    call_text = f'<tool_call>{{"name": "{called}", "arguments": {{}}}}</tool_call>'
    response = call_text if called else "I do not know."
    file = tmp_path / "calls.py"
    file.write_text(CALLS)
    settings = ("calls", f"environment.standard={file}", f"environment.python={sys.executable}")
    (one,) = checked(*settings, "--response", response)["episodes"]
    assert (one["tools"], one["tool_calls"]) == (["add", "times"], calls)
    shown = call("check", *settings, "--response", response).stdout
    (line,) = [line for line in shown.splitlines() if line.split()[:1] == ["tools"]]
    assert line.split(maxsplit=1)[1].strip() == told


def test_a_model_plays_an_episode_too(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny_model(model, initializer_range=0.2)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    settings = (*OWN, "rollout.threads=1", "gconfig.max_new_tokens=5", "--response", "7")
    result = call("check", *settings, "--model", str(model))
    assert result.exit_code == 0, result.output
    assert "a fixed response" in result.stdout
    assert "playing an episode of the model" in result.stderr
    fixed, played = checked(*settings, "--model", str(model))["episodes"]
    assert (fixed["policy"], played["policy"]) == ("a fixed response", str(model))
    assert fixed["trained_tokens"] == 2
    assert 1 <= played["trained_tokens"] <= 5
    assert fixed["tokens"] - 2 == played["tokens"] - played["trained_tokens"] == len("0 +")
    assert played["reward"] == 0.5
    assert 0 < played["model_s"] <= played["episode_s"]
    unwritable = call("check", *settings, "--response", "ü", "--model", str(model))
    assert unwritable.exit_code == 2
    assert "error: the response is 'ü', but the model's tokens write" in unwritable.stderr


def test_an_episode_that_fails_is_told_and_counts_as_a_failure() -> None:
    result = call("check", *OWN, "environment.args={fault: exits, at: run}", "--json")
    assert result.exit_code == 1
    (one,) = json.loads(result.stdout)["episodes"]
    assert (one["status"], one["reward"], one["trained_tokens"]) == ("error", None, 0)
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: the episode of a fixed response has no reward: ")
    assert "exited with 3; it said: something about it" in last
    assert "failure" in call("check", *OWN, "environment.args={fault: exits, at: run}").stdout


@pytest.mark.parametrize("command", ["list", "check"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("own", "environment.python=/none"), "environment.python is '/none', but must be"),
        (("own",), "environment.python is '', but must be the Python"),
        (("own", f"environment.python={sys.executable}"), "verifiers 0.1.10 is of another gen"),
        (("own", "environment=other"), "names the environment own, but environment=other another"),
        (("own", "tiny"), "dataset.type is 'arithmetic', but must be environment"),
        (("own", "actor.path=x"), "no effect on areal-lab environment; use --model"),
        ((*OWN, "environment.args={fault: raises, at: list}"), "environment: of the environment"),
        ((*OWN, "environment.args={tasks: 0}"), "environment own has no tasks"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    command: str,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = tmp_path / "verifiers-0.1.10.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: verifiers\nVersion: 0.1.10\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = call(command, *arguments)
    assert result.exit_code == 2
    assert not result.stdout
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert result.stderr.splitlines()[-1] == errors[0]

"""`areal-lab gateway`, called as by a user: real processes, HTTP, a tiny model."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx2
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from areal_lab.cli import app as cli
from areal_lab.cli import gateway
from areal_lab.engines.keys import key_file
from areal_lab.pipeline.gateway.prepare import GatewayPlan
from areal_lab.pipeline.gateway.serve import Ready
from areal_lab.shell import display
from areal_lab.shell.display import Display
from benchmarks.tiny_model import write_tiny_model
from tests.pipeline.tiny_run import rescored_difference
from tests.warm import ForkedPopen

BOUND_S = 60.0
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}={{ m.content }}<end>{% else %}{{ m.content }}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
"""Describes a tool in a word: the context is small."""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    write_tiny_model(folder, initializer_range=0.2)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@contextmanager
def served(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that a failed test does not wait for."""
    pipe = subprocess.PIPE
    with ForkedPopen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_gateway_serves_sessions_and_loses_no_token(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "areal_lab.cli.app", "gateway", str(model), "--port", "0"]
    command += ["--export", str(out), "--seed", "3", "rollout.threads=1", "rollout.dtype=float32"]
    with served(command) as serving:
        assert serving.stdout is not None
        assert serving.stderr is not None
        told = [serving.stdout.readline()]
        assert told[0], serving.stderr.read()
        while "Ctrl-C" not in told[-1]:
            told.append(serving.stdout.readline())
        address = re.fullmatch(r"tiny is served on (\S+:(\d+)) by 1 embedded engine\n", told[0])
        assert address is not None
        url, port = address[1], int(address[2])
        file = key_file(port)
        assert told[1] == f"the admin key is in {file}, which only you can read\n"
        assert file.stat().st_mode & 0o777 == 0o600
        admin = file.read_text()
        assert told[2] == (
            f'start a session: curl {url}/rl/start_session -H "Authorization: Bearer '
            f"""$(cat {file})" -d '{{"task_id": "try"}}'\n"""
        )
        listening = [
            one.laddr.ip
            for one in psutil.Process(serving.pid).net_connections()
            if one.status == psutil.CONN_LISTEN
        ]
        assert listening == ["127.0.0.1"]
        with httpx2.Client(base_url=url, timeout=BOUND_S, trust_env=False) as http:
            replies = _sessions(http, admin)
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(BOUND_S) == 0
        said, last = serving.stderr.read(), serving.stdout.read()
        assert said.endswith("stopped\n")
        assert last == f"sessions are in {out / 'sessions.jsonl'}\n"
        assert admin not in "".join(told) + last + said + (out / "sessions.jsonl").read_text()
    assert not file.exists()
    _check_file(out / "sessions.jsonl", model, replies)


def test_a_gateway_that_starts_slowly_says_what_it_waits_for_until_it_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "_REMIND_S", 0.0)
    monkeypatch.setattr(display, "_CHECK_S", 0.001)
    said = ""

    class Slow:
        written = None

        def __init__(self, *, display: Display, ready: Callable[[Ready], None], **_: Any) -> None:
            self._display, self._ready = display, ready

        async def run(self) -> None:
            nonlocal said
            self._display.phase("waiting for 1 sglang server to start")
            while "still: waiting for 1 sglang server to start (" not in said:
                await asyncio.sleep(0)
                said += capsys.readouterr().err
            assert "reminders" in {thread.name for thread in threading.enumerate()}
            self._ready(Ready(url="", key_file=Path(), engines="", open_to_others=False))
            assert "reminders" not in {thread.name for thread in threading.enumerate()}

    monkeypatch.setattr(gateway, "StandaloneGateway", Slow)
    monkeypatch.setattr(gateway, "_announce", lambda *_: None)
    asyncio.run(gateway._until_stopped(cast(GatewayPlan, None)))


def test_a_gateway_that_fails_says_where_its_sessions_are(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "areal_lab.cli.app", "gateway", str(model), "--port", "0"]
    command += ["--export", str(out), "rollout.threads=1", "rollout.max_engine_restarts=0"]
    with served(command) as serving:
        assert serving.stdout is not None
        assert serving.stderr is not None
        url = serving.stdout.readline().split(" is served on ")[1].split()[0]
        admin = key_file(int(url.rsplit(":", 1)[1])).read_text()
        with httpx2.Client(base_url=url, timeout=BOUND_S, trust_env=False) as http:
            started = http.post("/rl/start_session", headers=bearer(admin)).json()
            body = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 4}
            http.post("/v1/chat/completions", json=body, headers=bearer(started["api_key"]))
            _check_seeds(http, admin)
            _check_attacks(http, bearer(started["api_key"]))
        for child in psutil.Process(serving.pid).children():
            child.kill()
        assert serving.wait(BOUND_S) == 1
        assert "error: " in serving.stderr.read()
        assert serving.stdout.read().endswith(f"sessions are in {out / 'sessions.jsonl'}\n")


def _check_seeds(http: httpx2.Client, admin: str) -> None:
    """The same seed gives the same samples, in all sessions and dialects that have seeds."""
    found: list[list[str]] = []
    for seed in (5, 5, 6, None, None):
        started = http.post("/rl/start_session", headers=bearer(admin)).json()
        key = bearer(started["api_key"])
        body: dict[str, Any] = {"max_tokens": 12, "seed": seed, "n": 2}
        body["messages"] = [{"role": "user", "content": "12 + 34 ="}]
        reply = http.post("/v1/chat/completions", json=body, headers=key)
        assert reply.status_code == 200, reply.text
        assert "seed" not in reply.headers.get("x-areal-lab-note", "")
        found.append([each["message"]["content"] for each in reply.json()["choices"]])
        asked = {"max_output_tokens": 12, "seed": seed, "input": "12 + 34 ="}
        reply = http.post("/v1/responses", json=asked, headers=key)
        found[-1].append(reply.json()["output"][0]["content"][0]["text"])
        http.post("/rl/end_session", headers=key)
    assert found[0] == found[1]
    assert found[0][0] == found[0][2], "one seed, two dialects"
    assert found[0][0] != found[0][1], "two replies to one call"
    assert len({tuple(each) for each in found}) == 4


def _check_attacks(http: httpx2.Client, key: dict[str, str]) -> None:
    """What cannot be sampled is refused, and the same request gives the same tokens after it."""

    def post(path: str, body: str) -> httpx2.Response:
        return http.post(path, content=body, headers={**key, "content-type": "application/json"})

    valid = '{"messages": [{"role": "user", "content": "1 + 1 ="}], "max_tokens": 6, "seed": 1}'
    expected = post("/v1/chat/completions", valid).json()["choices"][0]["message"]["content"]
    bodies = {
        "/v1/chat/completions": '{"messages": [{"role": "user", "content": "1"}]',
        "/v1/responses": '{"input": "1"',
        "/v1/messages": '{"messages": [{"role": "user", "content": "1"}], "max_tokens": 4',
    }
    both = ("1e-40", "1e39", "1e400", "NaN", "-1e-50", "9" * 400, '"1"', "[]", "true")
    wrong = {"temperature": (*both, "1e-6"), "top_p": (*both, "1e-46", "1.0000001")}
    for path, begin in bodies.items():
        for name, value in [(key, each) for key in wrong for each in wrong[key]]:
            reply = post(path, f'{begin}, "{name}": {value}}}')
            assert reply.status_code == 400, (path, name, value, reply.text)
            assert len(reply.text) < 1000
        stop = "stop_sequences" if path == "/v1/messages" else "stop"
        for value in ('["\\ufffd"]', json.dumps("x" * 2000), json.dumps(["a"] * 300)):
            assert post(path, f'{begin}, "{stop}": {value}}}').status_code == 400, value
    again = post("/v1/chat/completions", valid).json()["choices"][0]["message"]["content"]
    assert again == expected


def _sessions(http: httpx2.Client, admin: str) -> list[dict[str, Any]]:
    """A session of two turns with a tool and a reward, and one that stays open; the replies."""
    started = http.post("/rl/start_session", json={"task_id": "a"}, headers=bearer(admin)).json()
    key, other = bearer(started["api_key"]), bearer("wrong")
    assert http.post("/rl/start_session", headers=other).status_code == 403
    assert http.post("/rl/start_session").status_code == 401
    assert http.post("/v1/chat/completions", headers=other, json={}).status_code == 401
    assert http.post("/v1/chat/completions", headers=bearer(admin), json={}).status_code == 403
    messages: list[dict[str, Any]] = [{"role": "user", "content": "12 + 34 ="}]
    replies = []
    for _ in range(2):
        body = {"messages": messages, "tools": [TOOL], "logprobs": True, "max_tokens": 20}
        reply = http.post("/v1/chat/completions", json=body, headers=key)
        assert reply.status_code == 200, reply.text
        replies.append(reply.json())
        messages.append(replies[-1]["choices"][0]["message"])
        messages.append({"role": "tool", "tool_call_id": "call00000", "content": "46"})
    assert http.post("/rl/set_reward", json={"reward": 0.5}, headers=key).status_code == 200
    assert http.post("/rl/end_session", headers=key).json()["interaction_count"] == 2
    session = {"session_id": started["session_id"], "style": "concat"}
    exported = http.post("/export_trajectories", json=session, headers=bearer(admin)).json()
    assert (exported["outcome"], exported["reward"]) == ("rewarded", 0.5)
    assert [turn["return"] for row in exported["rows"] for turn in row["turns"]] == [0.5, 0.5]
    opened = http.post("/rl/start_session", headers=bearer(admin)).json()
    body = {"messages": messages[:1], "logprobs": True, "temperature": 0.5, "max_tokens": 20}
    reply = http.post("/v1/chat/completions", json=body, headers=bearer(opened["api_key"]))
    statistics = http.get("/statistics", headers=bearer(admin)).json()
    assert statistics["open_sessions"] == 1
    assert statistics["counts"]["generated_tokens"] == sum(
        one["usage"]["completion_tokens"] for one in (*replies, reply.json())
    )
    return [*replies, reply.json()]


def _check_file(file: Path, folder: Path, replies: list[dict[str, Any]]) -> None:
    """The file has what was sampled, with the log-probs that the model gives it."""
    rewarded, opened = (json.loads(line) for line in file.read_text().splitlines())
    models = {0: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)}
    for line, outcome, reward, ended_by, expected in (
        (rewarded, "rewarded", 0.5, "client", replies[:2]),
        (opened, "no_reward", None, "gateway", replies[2:]),
    ):
        (sample,) = line["samples"]
        assert (line["session"]["outcome"], line["session"]["ended_by"]) == (outcome, ended_by)
        assert sample["reward"] == reward
        parts = [part for part in sample["parts"] if "tokens" in part]
        assert len(parts) == len(sample["turns"]) == len(expected)
        for part, reply in zip(parts, expected, strict=True):
            assert len(part["tokens"]) == reply["usage"]["completion_tokens"]
            shown = [one["logprob"] for one in reply["choices"][0]["logprobs"]["content"]]
            assert part["logprobs"][: len(shown)] == pytest.approx(shown, abs=1e-6)
        temperatures = [one["temperature"] for one in line["session"]["sampling"]]
        assert temperatures == ([1.0, 1.0] if reward else [0.5])
        if reward:
            assert rescored_difference(models, {**line, **sample})[0] < 1e-4
    assert rewarded["samples"][0]["completion"].count("46") >= 1
    assert rewarded["prompt"].endswith("12 + 34 ==")


def call(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["gateway", *arguments])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--host", "192.0.2.1"), "host is '192.0.2.1', but must be an address of this machine"),
        (("--template", "none.jinja"), "the chat template none.jinja cannot be read"),
        (("--tool-call-parser", "hermez"), "hermez"),
        (("--turn-discount-style", "lineal"), "but must be one of tree, linear"),
        (("--admin-key-file", "/"), "admin_key_file is /, which is not a file; name a file"),
        (("--export", "/dev/null"), "export is /dev/null, which is a file; name a folder"),
        (("rollout.backend=sglang",), "sglang"),
        (("rollout.workflow=tool_use",), "set rollout.workflow={}"),
        (('rollout.addresses=["http://127.0.0.1:1"]',), "nothing responds at http://127.0.0.1:1"),
        (("gconfig.max_new_tokens=1000",), "but the model's context is 256 tokens"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    model: Path,
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AREAL_LAB_ENGINES", str(tmp_path))
    result = call(str(model), "--port", "0", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_folder_with_sessions_is_not_written_over(tmp_path: Path, model: Path) -> None:
    (tmp_path / "sessions.jsonl").touch()
    result = call(str(model), "--port", "0", "--export", str(tmp_path))
    assert result.exit_code == 2
    assert "which has sessions.jsonl already; name another folder" in result.stderr


@pytest.mark.parametrize(("flag", "described"), [((), True), (("--no-describe-tools",), False)])
def test_tools_are_described_unless_an_option_says_no(
    model: Path, monkeypatch: pytest.MonkeyPatch, flag: tuple[str, ...], described: bool
) -> None:
    plans = []
    monkeypatch.setattr(
        gateway, "run_gateway", lambda *given: plans.append(gateway.gateway_plan(*given))
    )
    result = call(str(model), "--port", "0", *flag)
    assert result.exit_code == 0, result.stderr
    assert [plan.serving.describe_tools for plan in plans] == [described]


def test_a_model_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "no-model").symlink_to("no-model")
    for model in ("no-model", str(tmp_path / "no-model")):
        result = call(model, "--port", "0")
        assert result.exit_code == 2
        assert "no-model" in result.stderr

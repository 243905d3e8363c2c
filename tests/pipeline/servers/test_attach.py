"""Attached servers: waited for, compared with our model, refused in one line."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from areal_lab.engines.client.addresses import CannotAttach
from areal_lab.engines.keys import KEY_VARIABLE, write_key_file
from areal_lab.engines.protocol import LoraShape
from areal_lab.pipeline.servers.sources import attach, model_difference


class Other(ThreadingHTTPServer):
    """What a server says about itself before it is asked for a sample."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model_info: dict[str, Any] = {"weight_version": "3", "vocab_size": 17}
        self.paused = False
        self.enable_lora: bool | None = None
        self.asked: list[str] = []
        self.key = ""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Other

    def do_GET(self) -> None:
        if self.server.key and self.headers["authorization"] != f"Bearer {self.server.key}":
            self.answer(401, {"error": "Unauthorized"})
        elif self.path == "/model_info":
            self.answer(200, self.server.model_info)
        elif self.path == "/server_info":
            self.answer(200, {"enable_lora": self.server.enable_lora})
        elif self.path == "/ready":
            self.answer(503 if self.server.paused else 200, {})
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.asked.append(self.path)
        self.server.paused = False
        self.answer(200, {})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def other() -> Iterator[Other]:
    with Other() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"vocab_size": 17, "hidden_size": 64}')
    return tmp_path


def attached(
    address: str, model: Path, *, ready_timeout_s: float = 10.0, lora: LoraShape | None = None
) -> str:
    """Attach and let go again."""

    async def main() -> str:
        client = await attach(
            address, model, request_timeout_s=1.0, ready_timeout_s=ready_timeout_s, lora=lora
        )
        await client.close()
        return client.base_url

    return asyncio.run(main())


def test_a_server_that_is_ready_is_taken_as_it_is(other: Other, model: Path) -> None:
    assert attached(other.address, model) == other.address
    assert other.asked == []


def test_the_key_is_that_of_the_environment_or_of_this_users_server(
    other: Other, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    other.key = "s3cret"
    with pytest.raises(CannotAttach, match=f"it requires a key; set {KEY_VARIABLE} to it"):
        attached(other.address, model)
    write_key_file(other.server_port, "s3cret")
    assert attached(other.address, model) == other.address
    monkeypatch.setenv(KEY_VARIABLE, "wrong")
    with pytest.raises(CannotAttach, match="it has another key than the one sent") as raised:
        attached(other.address, model)
    assert "wrong" not in str(raised.value)
    monkeypatch.setenv(KEY_VARIABLE, "s3cret")
    assert attached(other.address, model) == other.address
    monkeypatch.setenv(KEY_VARIABLE, "s3cret two")
    with pytest.raises(CannotAttach, match="must be printable ASCII") as raised:
        attached(other.address, model)
    assert "s3cret" not in str(raised.value)


def test_a_server_that_was_left_paused_is_woken(other: Other, model: Path) -> None:
    other.paused = True
    attached(other.address, model)
    assert other.asked == ["/continue_generation"]


def test_a_server_with_another_model_is_refused(other: Other, model: Path) -> None:
    other.model_info["vocab_size"] = 32000
    with pytest.raises(CannotAttach) as raised:
        attached(other.address, model)
    assert str(raised.value) == (
        f"the server at {other.address} serves another model: its vocab_size is 32000, ours is 17 "
        f"(actor.path {model})"
    )


def test_a_server_that_was_not_started_for_adapters_is_refused(other: Other, model: Path) -> None:
    lora = LoraShape(rank=8, target_modules=("all-linear",))
    with pytest.raises(CannotAttach) as raised:
        attached(other.address, model, lora=lora)
    assert str(raised.value) == (
        f"the server at {other.address} cannot be used: it was started without LoRA adapters; "
        "start it by areal-lab engine serve sglang --lora-rank 8, or set rollout.transfer"
    )
    with pytest.raises(CannotAttach, match="has q_proj without v_proj, but sglang fuses"):
        attached(other.address, model, lora=replace(lora, target_modules=("q_proj",)))
    other.enable_lora = True
    assert attached(other.address, model, lora=lora) == other.address
    assert other.asked == [], "nothing was given to it yet"


def test_a_server_that_does_not_come_is_named_with_the_setting(other: Other, model: Path) -> None:
    other.server_close()
    with pytest.raises(CannotAttach) as raised:
        attached(other.address, model, ready_timeout_s=0.5)
    assert str(raised.value) == (
        f"the server at {other.address} was not ready within 0.5 s (rollout.ready_timeout_s)"
    )


def test_what_is_no_inference_server_is_refused(other: Other, model: Path) -> None:
    other.model_info = {"hello": "world"}
    with pytest.raises(CannotAttach, match="is neither SGLang nor vLLM"):
        attached(other.address, model)


def test_a_model_is_compared_by_its_folder_if_the_server_names_one(model: Path) -> None:
    theirs = model / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text('{"vocab_size": 17, "hidden_size": 128}')
    assert model_difference({"model_path": "/nowhere"}, model) is None
    assert "its hidden_size is 128, ours is 64" in (
        model_difference({"model_path": str(theirs)}, model) or ""
    )

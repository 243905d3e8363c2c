"""Serialized tensors, expected checksums of engines, and versions kept in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from areal_lab.engines.weights.folder import checksum, deduplicated_state
from areal_lab.engines.weights.link import difference, sglang_checksums
from areal_lab.engines.weights.push import Pusher
from areal_lab.engines.weights.records import EngineTarget
from areal_lab.engines.weights.tensor import (
    TensorSender,
    UnsafePayload,
    chunks,
    decode,
    encode,
    update_body,
)
from tests.engines.tiny import tiny_model


def sent(*tensors: tuple[str, Tensor]) -> dict[str, Tensor]:
    return decode(encode(tensors).decode())


# --- by value ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_arrive_as_they_were(dtype: torch.dtype) -> None:
    original = torch.arange(12).reshape(3, 4).to(dtype)
    arrived = sent(("a", original), ("b", original[0]))
    assert list(arrived) == ["a", "b"]
    assert torch.equal(arrived["a"], original)
    assert arrived["a"].dtype == dtype
    assert torch.equal(arrived["b"], original[0])


def test_a_view_does_not_bring_its_whole_storage() -> None:
    large = torch.zeros(1 << 16)
    assert len(encode([("row", large[:4])])) < 2000
    assert torch.equal(sent(("t", large[:6].reshape(2, 3).T))["t"], torch.zeros(3, 2))


def test_nothing_is_shared_with_the_receiver() -> None:
    """Handles of shared memory kill SGLang, or leave a manager process behind that holds the
    output of this one open."""
    source = """
import os, subprocess, sys, torch
from pathlib import Path
from areal_lab.engines.weights.tensor import encode
tensors = [("a", torch.ones(1 << 16))]
before = set(os.listdir("/proc/self/fd"))
payload = encode(tensors)
assert len(payload) > (1 << 18), len(payload)
assert set(os.listdir("/proc/self/fd")) == before
assert not list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))
children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
assert not children, children
assert not tensors[0][1].is_shared()
"""
    ended = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.system, ("true",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps([("a", Evil())]),
        pickle.dumps([("a", 3)]),
        pickle.dumps(7),
        b"no pickle",
        pickle.dumps([("a", torch.ones(3))])[:-9],
    ],
)
def test_a_payload_of_other_objects_is_refused(content: bytes) -> None:
    with pytest.raises(UnsafePayload, match="the tensors cannot be read"):
        decode(base64.b64encode(content).decode())


def test_pieces_are_bounded_and_complete() -> None:
    tensors = {str(index): torch.zeros(index) for index in range(1, 9)}  # 4 to 32 bytes
    pieces = list(chunks(tensors, 40))
    assert [name for piece in pieces for name, _ in piece] == list(tensors)
    sizes = [sum(tensor.nbytes for _, tensor in piece) for piece in pieces]
    assert max(sizes) <= 40
    assert [len(piece) for piece in pieces] == [4, 1, 1, 1, 1]
    assert len(next(chunks({"large": torch.zeros(99)}, 40))) == 1


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_body_is_json_with_a_payload_for_each_rank(ranks: int) -> None:
    pieces = update_body(b"QUJD", ranks=ranks, version="7", flush_cache=True)
    body = json.loads(b"".join(pieces))
    assert body == {
        "flush_cache": True,
        "weight_version": "7",
        "serialized_named_tensors": ["QUJD"] * ranks,
    }
    assert "weight_version" not in json.loads(
        b"".join(update_body(b"", ranks=1, version=None, flush_cache=False))
    )


# --- checksums ---


def sha(*parts: Tensor) -> str:
    data = b"".join(part.contiguous().numpy().tobytes() for part in parts)
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_parameters_are_fused_and_padded_as_sglang_does(kind: str) -> None:
    tensors = deduplicated_state(tiny_model(kind))
    found = sglang_checksums(tensors)
    attention = "model.layers.1.self_attn."
    for what in ("weight", "bias") if kind == "qwen2" else ("weight",):
        parts = [tensors[f"{attention}{part}_proj.{what}"] for part in "qkv"]
        assert found[f"{attention}qkv_proj.{what}"] == sha(*parts)
    mlp = "model.layers.0.mlp."
    gate, up = tensors[mlp + "gate_proj.weight"], tensors[mlp + "up_proj.weight"]
    assert found[mlp + "gate_up_proj.weight"] == sha(gate, up)
    vocabulary = tensors["lm_head.weight"]
    assert found["lm_head.weight"] == sha(vocabulary, torch.zeros(128 - 97, 48))
    assert found["model.norm.weight"] == sha(tensors["model.norm.weight"])
    assert not any(name.split(".")[-2] in ("q_proj", "up_proj") for name in found)


def answer(checksums: dict[str, str], ranks: int = 1) -> dict[str, Any]:
    return {"success": True, "ranks": [{"checksums": checksums}] * ranks}


def test_a_difference_is_named() -> None:
    expected = {"a": "1", "b": "2", "c": "3"}
    assert difference(expected, answer(expected)) is None
    assert difference(expected, answer({**expected, "experts": "9"})) is None
    told = difference(expected, answer({**expected, "b": "7"}))
    assert told == "1 of 3 parameters differ, such as b (sent 2, holds 7)"
    assert (
        difference(expected, answer({"x": "1"}))
        == "none of its parameters has a name that was sent"
    )
    assert difference(expected, answer({"a": "part"}, ranks=2)) is None


# --- what the trainer holds ---


def test_a_version_is_held_in_the_memory_of_the_one_before() -> None:
    pusher = Pusher(TensorSender(), timeout_s=1)
    model = tiny_model()
    first = pusher.hold(deduplicated_state(model), 1, dtype=torch.bfloat16)
    cast = {name: tensor.to(torch.bfloat16) for name, tensor in deduplicated_state(model).items()}
    assert (first.version, first.checksum) == (1, checksum(cast))
    assert first.size_bytes == sum(tensor.nbytes for tensor in cast.values())
    places = {tensor.data_ptr() for tensor in pusher._held[1].tensors.values()}
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert checksum(pusher._held[1].tensors) == first.checksum, "a copy, not the parameters"
    second = pusher.hold(deduplicated_state(model), 2, dtype=torch.bfloat16)
    assert second.checksum != first.checksum
    assert {tensor.data_ptr() for tensor in pusher._held[2].tensors.values()} == places
    with pytest.raises(ValueError, match=r"asked to push version 1, but held are \[2\]"):
        pusher.push(1, [], flush_cache=True)


def test_two_versions_are_held_where_an_engine_may_return() -> None:
    pusher = Pusher(TensorSender(), timeout_s=1, kept_versions=2)
    for version in range(4):
        pusher.hold({"a": torch.full((3,), float(version))}, version, dtype=torch.float32)
    assert {v: e.tensors["a"][0].item() for v, e in pusher._held.items()} == {2: 2.0, 3: 3.0}
    pusher.push(2, [], flush_cache=True)
    pusher.close()


# --- to whom ---


class Divided(BaseHTTPRequestHandler):
    """An attached server with two ranks; it records its requests."""

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self.answer({"weight_version": "3", "tp_size": 2, "device": "cuda"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/update_weights_from_tensor":
            self.bodies.append(json.loads(body))
        self.answer({"success": True, "ranks": []})

    def answer(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def test_each_rank_of_a_server_gets_the_tensors_however_it_is_divided() -> None:
    """SGLang's ranks take theirs by number, and a server with one too few ends."""
    pusher = Pusher(TensorSender(), timeout_s=20)
    pusher.hold({"a": torch.ones(3)}, 3, dtype=torch.float32)
    with ThreadingHTTPServer(("127.0.0.1", 0), Divided) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        target = EngineTarget(f"http://127.0.0.1:{server.server_port}")
        outcome = pusher.push(3, [target], flush_cache=True)
        server.shutdown()
        thread.join()
    assert outcome.failures == ()
    (body,) = Divided.bodies
    first, second = body["serialized_named_tensors"]
    assert first == second
    assert torch.equal(decode(first)["a"], torch.ones(3))

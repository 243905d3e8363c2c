"""Two engines, weights pushed from this process: all take them, or who does not is named."""

from __future__ import annotations

import asyncio
import base64
import gc
import inspect
import json
import os
import pickle
import signal
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
import torch
from torch.multiprocessing import reductions

from areal_lab.engines.keys import authorization
from areal_lab.engines.launch.backends import ServerOptions
from areal_lab.engines.launch.start import EngineProcess, launch_engine
from areal_lab.engines.protocol import Generated, PauseMode
from areal_lab.engines.weights.broadcast import BroadcastSender
from areal_lab.engines.weights.folder import deduplicated_state, write_weights
from areal_lab.engines.weights.handles import _CLASSES, PATH, HandleSender, open_handles
from areal_lab.engines.weights.link import EngineLink
from areal_lab.engines.weights.push import Pusher, PushOutcome
from areal_lab.engines.weights.records import EngineTarget, Phase
from areal_lab.engines.weights.tensor import TensorSender, UnsafePayload
from tests.engines.tiny import plain_logprobs, request, tiny_model

T = TypeVar("T")
TIMEOUT_S = 2.0
SENDERS = {
    "http_tensor": lambda: TensorSender(chunk_bytes=64 << 10),  # three pieces
    "distributed": lambda: BroadcastSender(timeout_s=TIMEOUT_S),
    "cuda_ipc": HandleSender,  # with shared memory of the host
}


@dataclass
class Lab:
    """Engines by name, each started when first asked for, and a pusher of each kind."""

    loop: asyncio.AbstractEventLoop
    root: Path
    engines: dict[str, EngineProcess] = field(default_factory=dict)
    version: int = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    def engine(self, name: str) -> EngineProcess:
        if name not in self.engines:
            first = write_weights(tiny_model(seed=0), self.root, 0, dtype=torch.float32)
            self.engines[name] = self.run(
                launch_engine(
                    "embedded",
                    ServerOptions(
                        model=first.path, version=str(first.version), max_running_requests=8
                    ),
                    index=len(self.engines),
                    log_path=self.root / f"engine-{name}.log",
                )
            )
        return self.engines[name]

    def push(self, pusher: Pusher, *names: str, flush_cache: bool = True) -> PushOutcome:
        """The next version, whose weights are those of its number as a seed."""
        self.version += 1
        tensors = deduplicated_state(tiny_model(seed=self.version))
        pusher.hold(tensors, self.version, dtype=torch.float32)
        return pusher.push(self.version, self.targets(*names), flush_cache=flush_cache)

    def targets(self, *names: str) -> list[EngineTarget]:
        engines = [self.engine(name) for name in names]
        return [EngineTarget(one.base_url, key=one.client.key) for one in engines]

    def post(self, name: str, path: str, body: dict[str, str]) -> None:
        """A request that succeeds, from beside the pusher."""
        engine = self.engine(name)
        headers = authorization(engine.client.key)
        httpx2.post(f"{engine.base_url}{path}", json=body, headers=headers).raise_for_status()

    def error(self, name: str) -> float:
        """Of the log-probs an engine reports now, against the version it should hold."""
        client = self.engine(name).client
        (sample,) = self.run(client.generate([request("a", [5, 6, 7], 6, seed=3)]))
        return error_under(sample, {self.version: self.version})

    def pause_in_mid_answer(self, name: str, mode: PauseMode) -> asyncio.Task[list[Generated]]:
        """A response that a pause interrupted after some of its tokens."""
        client = self.engine(name).client

        async def meet() -> asyncio.Task[list[Generated]]:
            while True:
                answer = asyncio.create_task(
                    client.generate([request("r", [5, 6, 7], 200, seed=3)])
                )
                while not (answer.done() or client.received_tokens("r")):
                    await asyncio.sleep(0.005)
                await client.pause(mode)
                held = await client.statistics()
                if held["running_requests"] + held["waiting_requests"]:
                    return answer
                # On a busy machine it may be over before it is seen: another one.
                await client.resume()
                await answer

        return self.run(meet())

    def stop(self) -> None:
        for engine in self.engines.values():
            self.run(engine.stop())


def error_under(sample: Generated, seeds: dict[int, int]) -> float:
    """Largest difference to plain forward passes, each segment under its own version."""
    prompt, worst = [5, 6, 7], 0.0
    for segment in sample.segments:
        model = tiny_model(seed=seeds[segment.version])
        plain = plain_logprobs(model, prompt, list(segment.tokens))
        worst = max(worst, float((plain - torch.tensor(segment.logprobs)).abs().max()))
        prompt = [*prompt, *segment.tokens]
    return worst


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with asyncio.Runner() as runner:
        lab = Lab(runner.get_loop(), tmp_path_factory.mktemp("transfer"))
        yield lab
        lab.stop()


@pytest.fixture
def named_memory() -> Iterator[None]:
    """Restores how torch shares memory, which a sender of handles sets."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    yield
    torch.multiprocessing.set_sharing_strategy(strategy)


@pytest.fixture(params=sorted(SENDERS))
def pusher(request: pytest.FixtureRequest, named_memory: None) -> Iterator[Pusher]:  # noqa: ARG001 - used by handles
    pusher = Pusher(
        SENDERS[request.param](),
        timeout_s=TIMEOUT_S + 2,
        reuses_memory=request.param != "cuda_ipc",
    )
    yield pusher
    pusher.close()


def test_every_engine_holds_what_was_sent(lab: Lab, pusher: Pusher) -> None:
    for _ in range(2):
        outcome = lab.push(pusher, "a", "b")
        assert outcome.failures == ()
        assert set(outcome.seconds) == {"open", "send", "close", "verify"}
        for name in ("a", "b"):
            assert lab.run(lab.engine(name).client.version()) == lab.version
            assert lab.error(name) < 1e-5


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_running_response_continues_under_the_new_weights(
    lab: Lab, pusher: Pusher, mode: str
) -> None:
    assert lab.push(pusher, "a").failures == ()
    client, pause = lab.engine("a").client, PauseMode(mode)
    running = lab.pause_in_mid_answer("a", pause)
    seeds = {lab.version: lab.version}
    assert lab.push(pusher, "a", flush_cache=pause is not PauseMode.IN_PLACE).failures == ()
    seeds[lab.version] = lab.version
    lab.run(client.confirm_push(lab.version, pause))
    lab.run(client.resume())
    (sample,) = lab.run(asyncio.wait_for(running, 30))
    assert [segment.version for segment in sample.segments] == [lab.version - 1, lab.version]
    exact = error_under(sample, seeds) < 1e-5
    assert exact == (mode == "retract"), "keys and values of old weights show in the log-probs"


def test_an_update_that_was_left_open_is_ended(lab: Lab, pusher: Pusher) -> None:
    lab.post("a", "/begin_weight_update", {})
    assert lab.push(pusher, "a").failures == ()
    assert lab.error("a") < 1e-5


def test_without_the_key_nothing_is_pushed(lab: Lab, pusher: Pusher) -> None:
    assert lab.push(pusher, "a").failures == ()
    (target,) = lab.targets("a")
    pusher.hold(deduplicated_state(tiny_model(seed=99)), 99, dtype=torch.float32)
    for key in ("", "guessed"):
        (failure,) = pusher.push(99, [replace(target, key=key)], flush_cache=True).failures
        assert (failure.problem, failure.phase) == ("refused", Phase.OPEN)
        assert "401: the request has no key or a wrong one" in failure.message
    assert lab.error("a") < 1e-5


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(
    lab: Lab, pusher: Pusher
) -> None:
    assert lab.push(pusher, "a").failures == ()
    pusher.hold({"model.norm.weight": torch.ones(3)}, lab.version + 1, dtype=torch.float32)
    (failure,) = pusher.push(lab.version + 1, lab.targets("a"), flush_cache=True).failures
    assert (failure.problem, failure.engine) == ("refused", lab.engine("a").base_url)
    assert failure.phase in (Phase.SEND, Phase.BROADCAST)
    assert "tensors are missing" in failure.message
    assert "\n" not in failure.message
    assert lab.error("a") < 1e-5


def test_a_flush_under_running_requests_is_refused(lab: Lab, pusher: Pusher) -> None:
    assert lab.push(pusher, "a").failures == ()
    client = lab.engine("a").client
    running = lab.pause_in_mid_answer("a", PauseMode.IN_PLACE)
    (failure,) = lab.push(pusher, "a", flush_cache=True).failures
    assert "cannot be flushed" in failure.message
    lab.run(client.resume())
    (sample,) = lab.run(asyncio.wait_for(running, 30))
    assert {segment.version for segment in sample.segments} == {lab.version - 1}


def test_an_engine_with_other_weights_is_a_mismatch(
    lab: Lab, pusher: Pusher, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.version += 1
    pusher.hold(deduplicated_state(tiny_model(seed=lab.version)), lab.version, dtype=torch.float32)
    monkeypatch.setattr(pusher._held[lab.version], "checksum", "xxh3_128:00")
    (failure,) = pusher.push(lab.version, lab.targets("a"), flush_cache=True).failures
    assert (failure.problem, failure.phase) == ("mismatch", Phase.VERIFY)
    assert "sent checksum xxh3_128:00, it holds xxh3_128:" in failure.message


# --- handles ---


def mapped(process: int) -> int:
    """Shared memory of torch that a process maps."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return sum("/torch_" in line for line in lines)


@pytest.mark.usefixtures("named_memory")
def test_handles_are_closed_after_the_copy_and_sent_by_value_never(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(TensorSender, "send")
    pusher = Pusher(HandleSender(), timeout_s=TIMEOUT_S, reuses_memory=False)
    engine = lab.engine("a").child.pid
    gc.collect()  # of other tests, whose errors may still refer to their tensors
    others = mapped(os.getpid())
    held = []
    for _ in range(4):
        assert lab.push(pusher, "a", "b").failures == ()
        held.append((mapped(os.getpid()), len(os.listdir("/proc/self/fd"))))
        assert mapped(engine) == 0
        assert lab.error("a") < 1e-5
    (memory, files), (memory_before, files_before) = held[-1], held[1]
    assert memory == memory_before, "each version frees the memory of the one before"
    assert files <= files_before
    pusher.close()
    assert mapped(os.getpid()) <= others


@pytest.mark.usefixtures("named_memory")
def test_an_engine_that_cannot_open_handles_gets_the_tensors_by_value(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pusher = Pusher(HandleSender(), timeout_s=TIMEOUT_S, reuses_memory=False)
    refusing = lab.engine("b").base_url
    post = EngineLink.post

    def lost(link: EngineLink, phase: Phase, path: str, body: Any) -> Any:
        if path == PATH and link.base_url == refusing:
            payload = base64.b64decode(json.loads(body)["handles"])
            gone = base64.b64encode(payload.replace(b"/torch_", b"/t0rch_")).decode()
            body = json.dumps({"handles": gone, "weight_version": "1"}).encode()
        return post(link, phase, path, body)

    monkeypatch.setattr(EngineLink, "post", lost)
    for _ in range(2):  # a second refusal would be said, too
        assert lab.push(pusher, "a", "b").failures == ()
        assert lab.error("a") < 1e-5
        assert lab.error("b") < 1e-5
    told = capsys.readouterr().err
    assert told.count("sending them by value") == 1
    assert f"engine {refusing} did not take version {lab.version - 1}" in told
    assert "the handles cannot be opened" in told
    assert "sending them by value" in told
    pusher.close()
    assert not [*Path("/dev/shm").glob(f"torch_{os.getpid()}_*")], "refused handles are taken back"


def test_a_payload_of_handles_runs_no_code() -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.getenv, ("HOME",)

    harmful = base64.b64encode(pickle.dumps([("a", Harmful())])).decode()
    with pytest.raises(UnsafePayload, match=r"os\.getenv is not part of a handle"):
        open_handles(harmful)
    other = base64.b64encode(pickle.dumps([("a", 3)])).decode()
    with pytest.raises(UnsafePayload, match="not a list of names and tensors"):
        open_handles(other)
    for broken in ("", "!", "AAAA"):
        with pytest.raises(UnsafePayload, match="the handles cannot be opened"):
            open_handles(broken)


def test_handles_of_a_gpu_consist_of_known_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `reduce_tensor` makes of a tensor on a GPU, without the call of CUDA."""
    opened: list[tuple[Any, ...]] = []

    def rebuild_cuda_tensor(*args: Any) -> torch.Tensor:
        opened.append(args)
        return torch.ones(2)

    class OnGPU:
        def __reduce__(self) -> tuple[Any, ...]:
            return reductions.rebuild_cuda_tensor, args

    tensor = torch.zeros(3, 2, dtype=torch.bfloat16)
    storage = type(tensor._typed_storage())
    layout = (torch.Tensor, tensor.size(), tensor.stride(), 0, storage, tensor.dtype, 0)
    args = (*layout, b"handle", 12, 512, False, b"counter", 3, b"event", True)
    expected = inspect.signature(reductions.rebuild_cuda_tensor).parameters
    assert len(args) == len(expected), "the handle of this version of torch"
    payload = base64.b64encode(pickle.dumps([("a", OnGPU())])).decode()
    name = ("torch.multiprocessing.reductions", "rebuild_cuda_tensor")
    monkeypatch.setitem(_CLASSES, name, rebuild_cuda_tensor)
    assert open_handles(payload).keys() == {"a"}
    assert opened == [args]


# --- groups ---


def test_a_process_group_is_reused_until_its_engines_change(lab: Lab) -> None:
    sender = BroadcastSender(timeout_s=TIMEOUT_S)
    pusher = Pusher(sender, timeout_s=TIMEOUT_S + 2)
    made = []
    for names in (["a", "b"], ["a", "b"], ["a"], ["a"], ["b", "a"]):
        assert lab.push(pusher, *names).failures == ()
        made.append(sender.groups_made)
    assert made == [1, 1, 2, 2, 3]
    # An engine that has another version than the one sent last has been restarted meanwhile.
    other = Pusher(TensorSender(), timeout_s=TIMEOUT_S)
    assert lab.push(other, "b").failures == ()
    assert lab.push(pusher, "b", "a").failures == ()
    assert sender.groups_made == 4
    pusher.close()


def test_a_process_group_that_an_engine_left_is_formed_again(lab: Lab) -> None:
    sender = BroadcastSender(timeout_s=TIMEOUT_S)
    pusher = Pusher(sender, timeout_s=TIMEOUT_S + 2)
    assert lab.push(pusher, "a", "b").failures == ()
    assert sender._group is not None
    # No other reference: a group is closed when its last reference is dropped.
    name = sender._group.name
    lab.post("b", "/destroy_weights_update_group", {"group_name": name})
    assert lab.push(pusher, "a", "b").failures == ()
    assert sender.groups_made == 2
    assert lab.error("a") < 1e-5
    assert lab.error("b") < 1e-5
    pusher.close()


def test_making_groups_leaves_nothing_open(lab: Lab) -> None:
    sender = BroadcastSender(timeout_s=TIMEOUT_S)
    pusher = Pusher(sender, timeout_s=TIMEOUT_S + 2)
    lab.engine("b")

    def held() -> tuple[int, int, int]:
        place = Path(f"/proc/{lab.engine('a').child.pid}")
        ours = len(os.listdir("/proc/self/fd"))
        return ours, len(os.listdir(place / "fd")), len(os.listdir(place / "task"))

    counts = []
    for _ in range(6):
        assert lab.push(pusher, "a", "b").failures == ()
        pusher.close()
        assert lab.push(pusher, "a").failures == ()
        pusher.close()
        counts.append(held())
    *descriptors, threads = counts[-1]
    assert descriptors <= list(counts[1][:2]), counts
    # The engine's pool for blocking calls grows when two overlap; a group has its own threads.
    assert threads <= counts[1][2] + 2, counts


def test_a_hung_engine_is_named_within_the_bound_and_the_others_have_the_weights(
    lab: Lab, pusher: Pusher
) -> None:
    assert lab.push(pusher, "a", "b").failures == ()
    child = lab.engine("b").child.pid
    os.kill(child, signal.SIGSTOP)
    try:
        start_s = time.monotonic()
        (failure,) = lab.push(pusher, "a", "b").failures
        assert time.monotonic() - start_s < TIMEOUT_S + 4
    finally:
        os.kill(child, signal.SIGCONT)
    assert (failure.engine, failure.problem) == (lab.engine("b").base_url, "unreachable")
    assert failure.phase is Phase.OPEN
    assert "opening the update failed: no reply to /model_info within 4 s" in failure.message
    assert lab.error("a") < 1e-5
    assert lab.push(pusher, "a", "b").failures == ()


def test_an_engine_that_dies_during_the_broadcast_is_named(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = BroadcastSender(timeout_s=TIMEOUT_S)
    pusher = Pusher(sender, timeout_s=TIMEOUT_S + 2)
    assert lab.push(pusher, "a", "dying").failures == ()
    dying = lab.engines.pop("dying")
    send = BroadcastSender._broadcast

    def killed_first(self: BroadcastSender, sending: Any) -> Any:
        if dying.child.process.returncode is None and len(sending.links) == 2:
            os.kill(dying.child.pid, signal.SIGKILL)
        return send(self, sending)

    monkeypatch.setattr(BroadcastSender, "_broadcast", killed_first)
    lab.engines["dying"] = dying
    (failure,) = lab.push(pusher, "a", "dying").failures
    del lab.engines["dying"]
    assert (failure.engine, failure.problem) == (dying.base_url, "unreachable")
    assert failure.phase is Phase.BROADCAST
    assert sender.groups_made == 2
    assert lab.error("a") < 1e-5
    lab.run(dying.stop())
    pusher.close()


def test_an_engine_that_does_not_join_is_named(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = BroadcastSender(timeout_s=1.0)
    pusher = Pusher(sender, timeout_s=3.0)
    child = lab.engine("b").child.pid
    join = BroadcastSender._join

    def stopped_first(self: BroadcastSender, sending: Any) -> Any:
        if len(sending.links) == 2:
            os.kill(child, signal.SIGSTOP)
        return join(self, sending)

    monkeypatch.setattr(BroadcastSender, "_join", stopped_first)
    try:
        (failure,) = lab.push(pusher, "a", "b").failures
    finally:
        os.kill(child, signal.SIGCONT)
    assert (failure.engine, failure.phase) == (lab.engine("b").base_url, Phase.JOIN)
    assert failure.problem == "unreachable"
    assert lab.error("a") < 1e-5
    pusher.close()

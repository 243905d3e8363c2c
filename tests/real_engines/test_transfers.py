"""Push weights from this process's memory into real servers; broken process groups.

That a server holds what was sent is shown three times: by the push itself, which compares the
server's checksums; by a digest that is the same as after loading a folder; and by its log-probs.

The embedded engine is here to be held to the same; quick tests of it are in `tests/engines`.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx2
import pytest
import torch

from areal_lab.config.load import load_config
from areal_lab.engines.keys import authorization
from areal_lab.engines.launch.backends import BACKENDS
from areal_lab.engines.launch.start import EngineProcess
from areal_lab.engines.protocol import Generated, PauseMode
from areal_lab.engines.weights.broadcast import BroadcastSender
from areal_lab.engines.weights.folder import deduplicated_state
from areal_lab.engines.weights.link import EngineLink
from areal_lab.engines.weights.push import ActivePush, Pusher, PushOutcome
from areal_lab.engines.weights.records import EngineTarget, Phase, Transfer, TransferFailed
from areal_lab.engines.weights.tensor import TensorSender
from areal_lab.resolve.check import check_transfer
from areal_lab.resolve.placement import place_parts
from areal_lab.training.process.threads import REPLY_MARGIN_S
from tests.real_engines.conftest import Announce, start
from tests.real_engines.lab import LONG, Lab, request, tokens_of, versions_of

GROUP_TIMEOUT_S = 3.0
ANSWER_S = GROUP_TIMEOUT_S + REPLY_MARGIN_S
"""Longest wait for one reply of an engine."""
PROMPT = list(range(2, 40))
TAKES_PUSHES = [n for n, backend in BACKENDS.items() if Transfer.DISTRIBUTED in backend.transfers]
pushed_to = pytest.mark.parametrize("engine_lab", TAKES_PUSHES, indirect=True)
pytestmark = pytest.mark.sglang


def tensor_pusher() -> Pusher:
    """Several requests for one set of weights."""
    return Pusher(TensorSender(chunk_bytes=256 << 10), timeout_s=ANSWER_S)


def broadcast_pusher() -> Pusher:
    """A process group of this process and the engines."""
    return Pusher(BroadcastSender(timeout_s=GROUP_TIMEOUT_S), timeout_s=ANSWER_S)


@pytest.fixture(params=[tensor_pusher, broadcast_pusher], ids=["http_tensor", "distributed"])
def pusher(request: pytest.FixtureRequest) -> Iterator[Pusher]:
    """One of each way."""
    pusher: Pusher = request.param()
    yield pusher
    pusher.close()


@pytest.fixture
def sender() -> BroadcastSender:
    """Of a process group, to look into."""
    return BroadcastSender(timeout_s=GROUP_TIMEOUT_S)


@pytest.fixture
def grouped(sender: BroadcastSender) -> Iterator[Pusher]:
    """What sends by it."""
    pusher = Pusher(sender, timeout_s=ANSWER_S)
    yield pusher
    pusher.close()


@pytest.fixture
def member(lab: Lab, tmp_path: Path, announce: Announce) -> Iterator[EngineProcess]:
    """A second engine for the group, which may be killed."""
    log = tmp_path / "member.log"
    engine = lab.run(start("embedded", lab.weights(0), log, announce))
    yield engine
    lab.run(engine.stop())


async def push(
    pusher: Pusher, lab: Lab, version: int, *others: EngineProcess, flush_cache: bool = True
) -> PushOutcome:
    """Send the weights of a version to the server, and to others."""
    pusher.hold(deduplicated_state(lab.models[version]), version, dtype=torch.float32)
    targets = [EngineTarget(one.base_url, key=one.client.key) for one in (lab.engine, *others)]
    return await asyncio.to_thread(pusher.push, version, targets, flush_cache=flush_cache)


async def assert_holds(lab: Lab, version: int) -> None:
    """Check the weights by the server's report and by its samples."""
    assert await lab.client.version() == version
    (result,) = await lab.client.generate([request("holds", PROMPT, 40)])
    assert versions_of(result) == [version]
    assert lab.errors(version, PROMPT, result).max() < 10 * lab.facts.error


# --- held weights ---


@pushed_to
def test_a_server_holds_what_was_sent(lab: Lab, pusher: Pusher) -> None:
    async def scenario() -> None:
        digests = {}
        for version in (1, 2):
            await lab.load(version)
            digests[version] = await lab.client.digest()
        assert digests[1] != digests[2]
        for version in (1, 2, 1):
            assert (await push(pusher, lab, version)).failures == ()
            await lab.client.confirm_push(version, PauseMode.RETRACT)
            assert await lab.client.digest() == digests[version]
            await assert_holds(lab, version)
        await lab.load(2)
        assert await lab.client.digest() == digests[2]
        await assert_holds(lab, 2)

    lab.run(scenario())


@pushed_to
@pytest.mark.parametrize("mode", list(PauseMode))
def test_running_responses_continue_under_the_sent_weights(
    lab: Lab, pusher: Pusher, mode: PauseMode
) -> None:
    in_place = mode is PauseMode.IN_PLACE

    async def scenario() -> list[Generated]:
        async with lab.running([request("r", PROMPT, LONG)]) as answers:
            await lab.client.pause(mode)
            assert (await push(pusher, lab, 1, flush_cache=not in_place)).failures == ()
            await lab.client.confirm_push(1, mode)
            await lab.client.resume()
        return answers.result()

    (result,) = lab.run(scenario())
    assert versions_of(result) == [0, 1]
    assert len(tokens_of(result)) == LONG
    change = len(result.segments[0].tokens)
    before, after = (lab.errors(version, PROMPT, result) for version in (0, 1))
    assert before[:change].max() < 10 * lab.facts.error
    exact = bool(after[change:].max() < 10 * lab.facts.error)
    assert exact is not in_place, "old keys and values show in the log-probs, and only they"


@pushed_to
def test_a_broadcast_that_does_not_fit_is_refused_and_the_next_one_works(
    lab: Lab, grouped: Pusher
) -> None:
    """By HTTP it is one, too, of the embedded engine (`tests/engines`). SGLang dies of it; a run
    never sends such a thing, since its servers begin with its own weights, or are asked for their
    model when it attaches to them."""

    async def scenario() -> None:
        grouped.hold({"model.norm.weight": torch.ones(3)}, 1, dtype=torch.float32)
        target = EngineTarget(lab.engine.base_url, key=lab.client.key)
        outcome = await asyncio.to_thread(grouped.push, 1, [target], flush_cache=True)
        (failure,) = outcome.failures
        assert (failure.engine, failure.phase) == (lab.engine.base_url, Phase.BROADCAST)
        assert failure.problem == "refused"
        assert "\n" not in failure.message
        assert (await push(grouped, lab, 2)).failures == ()
        await assert_holds(lab, 2)

    lab.run(scenario())


ADAPTERS = ("actor.use_lora=true", "rollout.pause_mode=abort")


@pytest.mark.parametrize("transfer", list(Transfer))
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_a_way_that_an_engine_lacks_is_refused_before_anything_starts(
    backend: str, transfer: Transfer
) -> None:
    config = load_config(
        None,
        [
            f"rollout.backend={backend}",
            f"rollout.transfer={transfer}",
            *(ADAPTERS if transfer is Transfer.ADAPTER else ()),
        ],
    )
    placed = place_parts(config)
    supported = transfer in BACKENDS[backend].transfers
    if supported and transfer is not Transfer.CUDA_IPC:
        assert not list(check_transfer(placed))
        return
    (problem,) = check_transfer(placed)
    why = "only one engine and one trainer" if supported else f"{backend} supports .* only[;:]"
    assert re.search(rf"{why}.*set .*rollout\.transfer=folder$", str(problem))


# --- groups that break ---


@pushed_to
def test_a_member_that_is_killed_is_named_and_the_group_made_again(
    lab: Lab, member: EngineProcess, sender: BroadcastSender, grouped: Pusher
) -> None:
    kill = partial(os.kill, member.child.pid, signal.SIGKILL)
    outcome = lab.run(disturbed(kill, lab, sender, grouped, member))
    assert sender.groups_made == 2
    (failure,) = outcome.failures
    assert (failure.engine, failure.problem) == (member.base_url, "unreachable")
    assert failure.phase is Phase.BROADCAST
    assert f"{Phase.BROADCAST} failed" in failure.message
    lab.run(assert_holds(lab, 2))


@pushed_to
def test_a_member_that_hangs_is_named_within_the_bound(
    lab: Lab, member: EngineProcess, sender: BroadcastSender, grouped: Pusher
) -> None:
    stop = partial(os.kill, member.child.pid, signal.SIGSTOP)
    start_s = time.monotonic()
    try:
        outcome = lab.run(disturbed(stop, lab, sender, grouped, member))
    finally:
        os.kill(member.child.pid, signal.SIGCONT)
    # The member's reply, then the group of the remaining engines.
    assert time.monotonic() - start_s < 2 * ANSWER_S
    (failure,) = outcome.failures
    assert (failure.engine, failure.phase) == (member.base_url, Phase.BROADCAST)
    assert f"no reply to /update_weights_from_distributed within {ANSWER_S:g} s" in failure.message
    lab.run(assert_holds(lab, 2))
    # When it continues, it joins again.
    assert lab.run(push(grouped, lab, 1, member)).failures == ()
    lab.run(assert_holds(lab, 1))


@pushed_to
def test_a_server_that_hangs_during_the_broadcast_takes_the_next_one(
    lab: Lab, sender: BroadcastSender, grouped: Pusher
) -> None:
    stop = partial(os.killpg, lab.engine.child.pid, signal.SIGSTOP)
    start_s = time.monotonic()
    try:
        outcome = lab.run(disturbed(stop, lab, sender, grouped))
    finally:
        os.killpg(lab.engine.child.pid, signal.SIGCONT)
    assert time.monotonic() - start_s < 2 * ANSWER_S
    (failure,) = outcome.failures
    assert (failure.problem, failure.phase) == ("unreachable", Phase.BROADCAST)
    assert lab.run(push(grouped, lab, 1)).failures == ()
    assert sender.groups_made == 2
    lab.run(assert_holds(lab, 1))


@pushed_to
def test_a_server_whose_group_is_left_replies_at_once(
    lab: Lab, sender: BroadcastSender, grouped: Pusher
) -> None:
    """As when the trainer dies: the server waits for a broadcast that never starts."""

    async def scenario() -> None:
        assert (await push(grouped, lab, 1)).failures == ()
        assert sender._group is not None
        body = {
            "names": ["model.norm.weight"],
            "dtypes": ["float32"],
            "shapes": [[128]],
            "group_name": sender._group.name,
        }
        headers = authorization(lab.client.key)
        async with httpx2.AsyncClient(
            base_url=lab.engine.base_url, headers=headers, timeout=ANSWER_S
        ) as http:
            (await http.post("/begin_weight_update", json={})).raise_for_status()
            waiting = asyncio.create_task(http.post("/update_weights_from_distributed", json=body))
            assert not (await asyncio.wait({waiting}, timeout=1.0))[0]
            await asyncio.to_thread(sender.close)
            assert (await waiting).status_code == httpx2.codes.BAD_REQUEST
        assert lab.engine.child.process.returncode is None
        # The update that was left open is ended, and the group forgotten.
        assert (await push(grouped, lab, 2)).failures == ()
        await assert_holds(lab, 2)

    lab.run(scenario())
    assert sender.groups_made == 2


async def disturbed(
    what: Callable[[], None],
    lab: Lab,
    sender: BroadcastSender,
    grouped: Pusher,
    *others: EngineProcess,
) -> PushOutcome:
    """Version 1 goes through a group; then something happens to it, once, just before version 2."""
    assert (await push(grouped, lab, 1, *others)).failures == ()
    await assert_holds(lab, 1)
    broadcast = sender._broadcast

    def disturbed_broadcast(sending: ActivePush) -> dict[EngineLink, TransferFailed]:
        sender._broadcast = broadcast  # type: ignore[method-assign]
        what()
        return broadcast(sending)

    sender._broadcast = disturbed_broadcast  # type: ignore[method-assign]
    return await push(grouped, lab, 2, *others)

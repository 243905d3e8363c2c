"""What can happen to a server, what the run then does, and within which time: one function a fault.

Each function makes its fault happen in a run of a few steps, checks the outcome, and returns the
seconds that it took. `python -m benchmarks.faults` runs them all.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from areal_lab.control.events import Action, EngineJoined, EngineLost, Event, PushWeights
from areal_lab.engines.client import EngineClient, EngineError
from areal_lab.engines.launch import HOST, EngineProcess, bind
from areal_lab.engines.protocol import WeightsFolder
from benchmarks.fault_lab import HEALTH, POLL_S, VICTIM, Case, FaultLab


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table."""

    name: str
    """As in `server killed while it generates`."""
    outcome: str
    bound: str
    """In words of the settings."""
    bound_s: float
    """The same with the settings of the lab."""
    measured: str
    """From what to what the seconds count."""
    happen: Callable[[FaultLab], float]


@dataclass
class Moment:
    """When the fault happened."""

    s: float = 0.0

    def now(self) -> None:
        """It is now; the first time counts."""
        self.s = self.s or time.monotonic()


def killed_while_generating(lab: FaultLab) -> float:
    """Its samples go on at the survivor, with the tokens they had."""
    moment = Moment()
    case = lab.case(lab.launched, lambda case: _when_generating(case, signal.SIGKILL, moment))
    case.check_nothing_was_lost()
    _expect(case, losses=1)
    _expect_tokens_kept(case)
    return case.seconds_to(EngineLost, moment.s)


def killed_during_an_update(lab: FaultLab) -> float:
    """The update goes on without it."""
    moment = Moment()

    def fault(case: Case) -> None:
        def on_load(client: EngineClient, version: int) -> None:
            server = case.servers.alive.get(VICTIM)
            if version == 2 and server is not None and server.client is client:
                moment.now()
                _signal(case, signal.SIGKILL)

        case.on_load = on_load

    case = lab.case(lab.launched, fault)
    case.check_nothing_was_lost()
    _expect(case, losses=1)
    return case.seconds_to(EngineLost, moment.s)


def hung(lab: FaultLab) -> float:
    """It still takes connections, and answers nothing."""
    moment = Moment()
    case = lab.case(lab.launched, lambda case: _when_generating(case, signal.SIGSTOP, moment))
    case.check_nothing_was_lost()
    _expect(case, losses=1)
    _expect_tokens_kept(case)
    return case.seconds_to(EngineLost, moment.s)


def port_stolen(lab: FaultLab) -> float:
    """It is killed, and another program takes its port before it is started again."""
    moment = Moment()
    with bind(0) as reserved:
        port = int(reserved.getsockname()[1])
    with socket.socket() as thief:

        def fault(case: Case) -> None:
            _when_generating(case, signal.SIGKILL, moment, then=lambda: _steal(thief, port))
            case.trainer.hold = lambda: VICTIM in case.servers.mending or not moment.s

        case = lab.case(lambda own: lab.launcher(VICTIM, own, port), fault, max_restarts=1)
    case.check_nothing_was_lost()
    _expect(case, losses=1)
    given_up = [note for note in case.notes if "does not come back" in note]
    assert len(given_up) == 1, case.notes
    assert f"port {port}" in given_up[0]
    times = [t for t, what in case.happened if isinstance(what, EngineLost)]
    assert len(times) == 2
    return times[-1] - moment.s


def damaged_weights(lab: FaultLab) -> float:
    """Half of the file of version 2 is missing: no engine can have it."""
    moment = Moment()

    def fault(case: Case) -> None:
        def damage(weights: WeightsFolder) -> None:
            if weights.version == 2:
                file = weights.path / "model.safetensors"
                os.truncate(file, file.stat().st_size // 2)

        def on(what: Event | Action) -> None:
            if what == PushWeights(2):
                moment.now()

        case.trainer.damage, case.on = damage, on

    try:
        lab.case(lab.shared, fault)
    except EngineError as error:
        ended_s = time.monotonic()
        lines = str(error).splitlines()
        assert len(lines) == 1, lines
        assert "v00000002" in lines[0], lines
        return ended_s - moment.s
    raise AssertionError("a run ended well whose weights were damaged")


def wrong_version_echoed(lab: FaultLab) -> float:
    """After an update it names another version than that it was sent."""
    moment = Moment()

    def fault(case: Case) -> None:
        def on(what: Event | Action) -> None:
            if what == PushWeights(2):
                moment.now()
                client = case.servers.alive[VICTIM].client
                true_version = client.version

                async def one_less() -> int:
                    return await true_version() - 1

                client.version = one_less  # type: ignore[method-assign]  # the fault

        case.on = on
        _hold_until_back(case)

    case = lab.case(lab.shared, fault, max_restarts=1)
    case.check_nothing_was_lost()
    _expect(case, losses=1, restarts=1, mismatches=1)
    return case.seconds_to(EngineLost, moment.s)


def other_weights(lab: FaultLab) -> float:
    """Somebody else loads old weights into it."""
    moment = Moment()

    def fault(case: Case) -> None:
        def load_old() -> None:
            moment.now()
            body = {"model_path": str(lab.model_path), "weight_version": "0"}
            answer = httpx.post(
                f"{lab.shared_address}/update_weights_from_disk",
                json={**body, "abort_all_requests": True},
                timeout=60,
                trust_env=False,
            )
            answer.raise_for_status()

        _when_generating(case, None, moment, then=lambda: asyncio.to_thread(load_old))
        _hold_until_back(case)

    case = lab.case(lab.shared, fault, max_restarts=1)
    case.check_nothing_was_lost()
    _expect(case, losses=1, restarts=1, mismatches=1)
    return case.seconds_to(EngineLost, moment.s)


def restarted_with_old_weights(lab: FaultLab) -> float:
    """Whoever runs it starts it again, with the weights that it began with."""
    moment = Moment()

    def fault(case: Case) -> None:
        _when_generating(case, None, moment, then=lab.restart_shared)
        _hold_until_back(case)

    case = lab.case(lab.shared, fault, max_restarts=1)
    case.check_nothing_was_lost()
    _expect(case, losses=1, restarts=1)
    joined = next(t for t, what in case.happened if isinstance(what, EngineJoined))
    return joined - moment.s


BROKEN = "as soon as its process ends or a connection breaks"
FAULTS = (
    Fault(
        "server killed while it generates",
        "goes on: its samples are finished by the others, with the tokens they had",
        BROKEN,
        2.0,
        "killed to lost",
        killed_while_generating,
    ),
    Fault(
        "server killed while it loads weights",
        "goes on: the others load them, its samples are finished there",
        BROKEN,
        2.0,
        "killed to lost",
        killed_during_an_update,
    ),
    Fault(
        "server hung (SIGSTOP)",
        "goes on: the server is killed, its samples are finished by the others",
        "`rollout.health_interval_s` + `rollout.health_timeout_s` (22 s)",
        HEALTH.bound_s + 1.0,
        "stopped to lost",
        hung,
    ),
    Fault(
        "server killed, its port taken by another program",
        "goes on without it: it is not started beside the thief, and given up in one line",
        "`rollout.max_engine_restarts` starts",
        30.0,
        "killed to given up",
        port_stolen,
    ),
    Fault(
        "folder of weights damaged",
        "stops with one line that names the folder: every engine would refuse it",
        "at once",
        10.0,
        "update to error",
        damaged_weights,
    ),
    Fault(
        "wrong version echoed after an update",
        "goes on: the server is lost, brought up to date and used again; counted as a mismatch",
        "the update",
        10.0,
        "update to lost",
        wrong_version_echoed,
    ),
    Fault(
        "server given other weights by somebody else",
        "goes on: what it drew with them is discarded; brought up to date and used again; counted",
        "its next answer, or `rollout.health_interval_s` (2 s) and an answer of its",
        HEALTH.bound_s + 5.0,
        "loaded to lost",
        other_weights,
    ),
    Fault(
        "server restarted by its owner, with old weights",
        "goes on: its samples are finished by the others; it gets the present weights before work",
        "`rollout.ready_timeout_s` (300 s)",
        120.0,
        "killed to joined",
        restarted_with_old_weights,
    ),
)
"""Every fault; the table of `docs/reliability.md` has these rows."""


def _when_generating(
    case: Case,
    number: signal.Signals | None,
    moment: Moment,
    then: Callable[[], Any] = lambda: None,
) -> None:
    """Once engine 1 is in the middle of long answers: send its process a signal, or do `then`."""

    async def strike() -> None:
        await case.until_victim_generates()
        moment.now()
        if number is not None:
            _signal(case, number)
        done = then()
        if asyncio.iscoroutine(done):
            await done

    tasks: list[asyncio.Task[None]] = []

    def on(_: Event | Action) -> None:
        if not tasks:
            tasks.append(asyncio.get_running_loop().create_task(strike()))

    case.on = on
    case.trainer.hold = lambda: not moment.s


def _hold_until_back(case: Case) -> None:
    case.trainer.hold = lambda: case.servers.counts["engine_restarts"] == 0


def _signal(case: Case, number: signal.Signals) -> None:
    process = case.servers.alive[VICTIM].process
    assert isinstance(process, EngineProcess)
    os.killpg(process.child.pid, number)


async def _steal(thief: socket.socket, port: int) -> None:
    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    while True:
        try:
            thief.bind((HOST, port))
            thief.listen()
            return
        except OSError:
            await asyncio.sleep(POLL_S)  # its owner is dying


def _expect(case: Case, *, losses: int, restarts: int = 0, mismatches: int = 0) -> None:
    counts = case.servers.counts
    found = [counts[f"{name}"] for name in ("engine_losses", "engine_restarts")]
    assert found == [losses, restarts], (counts, case.notes)
    assert counts["version_mismatches"] == mismatches, (counts, case.notes)


def _expect_tokens_kept(case: Case) -> None:
    """Samples moved, and not all of their tokens were drawn again."""
    assert case.recomputed.resubmitted_samples > 0
    assert case.recomputed.kept_tokens > 0

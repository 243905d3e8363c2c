"""Faults of a server, how a run handles them, and within which time.

Each function causes one or two faults in a run of a few steps, checks the outcome, and returns the
seconds by the name of the fault.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from areal_lab.control.events import (
    Action,
    EngineJoined,
    EngineLost,
    Event,
    PushWeights,
    StartGroup,
)
from areal_lab.engines.client.engine_client import EngineClient, EngineError
from areal_lab.engines.launch.options import HOST
from areal_lab.engines.protocol import PauseMode, WeightsFolder
from areal_lab.pipeline.servers.health import HealthLimits
from areal_lab.pipeline.state import RunState
from areal_lab.runlog.file import read_log_file
from areal_lab.shell.step_report import StepReport
from tests.fault_lab.case import SAMPLES, VICTIM, Case, check_log, response_tokens
from tests.fault_lab.lab import FaultLab
from tests.fault_lab.stand_in import POLL_S
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import do_run, tiny_config, trained_samples

Seconds: TypeAlias = dict[str, float]
Run: TypeAlias = Callable[[FaultLab], Seconds]


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table in `docs/reliability.md`."""

    name: str
    outcome: str
    measured: str
    """Start and end of the measured time."""
    bound: str
    """The bound in words, or in settings of the configuration."""
    bound_s: Callable[[HealthLimits], float]
    """The bound in seconds for a lab's settings, with a margin for a busy machine."""


@dataclass
class Moment:
    """When the fault happened."""

    s: float = 0.0

    def now(self) -> None:
        """Set the moment to now; only the first call counts."""
        self.s = self.s or time.monotonic()


AT_ONCE: Final = 5.0
"""Seconds to notice an immediate event on a busy machine."""
SGLANG_LOOKS_S: Final = 5.0
"""Seconds between two checks of SGLang of its own processes."""
START_S: Final = 240.0
"""Seconds to start a real server with a tiny model on a busy machine."""
LOADING: Final = 10.0
"""Seconds to load a tiny model's weights."""

KILLED: Final = Fault(
    "server killed while it generates",
    "continues: other servers finish its samples, keeping their tokens",
    "killed to lost",
    "at once: its process ends, or its connections break",
    lambda _: AT_ONCE,
)
PORT_STOLEN: Final = Fault(
    "server killed, and its port taken before it is restarted",
    "continues without it: the restart fails, and the server is given up in one line",
    "killed to given up",
    "`rollout.max_engine_restarts` starts of `rollout.ready_timeout_s`",
    lambda _: START_S,
)
KILLED_LOADING: Final = Fault(
    "server killed while it loads weights",
    "continues: the other servers load them and finish its samples",
    "killed to lost",
    "at once: its process ends, or its connections break",
    lambda _: AT_ONCE,
)
OLD_WEIGHTS: Final = Fault(
    "server restarted by its owner, with old weights",
    "continues: it gets the current weights, which are verified, before it gets work",
    "killed to used again",
    "its start, at most `rollout.ready_timeout_s`",
    lambda _: START_S,
)
HUNG: Final = Fault(
    "server hung (SIGSTOP), then continued",
    "continues: other servers finish its samples; it gets the current weights and is used again",
    "stopped to lost",
    "`rollout.health_interval_s` + `rollout.health_timeout_s`",
    lambda health: health.bound_s + AT_ONCE,
)
HUNG_WHOLE: Final = Fault(
    "server hung (SIGSTOP), in a run with the real trainer",
    "continues: other servers finish its samples",
    "stopped to lost",
    "`rollout.health_interval_s` + `rollout.health_timeout_s`",
    lambda health: health.bound_s + AT_ONCE,
)
STALLED: Final = Fault(
    "compute process of a server hung (SIGSTOP), its HTTP process not",
    "continues: other servers finish its samples; it gets the current weights and is used again",
    "stopped to lost",
    "`rollout.health_interval_s` + `rollout.stall_timeout_s` (20 s here)",
    lambda health: health.stall_bound_s + AT_ONCE,
)
COMPUTING_KILLED: Final = Fault(
    "compute process of a server killed, its HTTP process not",
    "continues: other servers finish its samples, keeping their tokens",
    "killed to lost",
    "its connections break, or it reports an error; SGLang checks every 5 s",
    lambda _: SGLANG_LOOKS_S + AT_ONCE,
)
DAMAGED: Final = Fault(
    "folder of weights damaged",
    "stops with one line that names the file, since every engine would refuse it",
    "update to error",
    "at once: the folder is compared with its checksum before engines load it",
    lambda _: AT_ONCE,
)
WRONG_VERSION: Final = Fault(
    "wrong version reported after an update",
    "continues: the server is lost, gets the current weights and is used again; a version mismatch",
    "update to lost",
    "the update",
    lambda _: LOADING,
)
OTHER_WEIGHTS: Final = Fault(
    "other weights loaded into it by someone else",
    "continues: tokens generated with them are discarded, then as above; a version mismatch",
    "load requested to lost",
    "its next reply, or `rollout.health_interval_s` and a reply",
    lambda health: LOADING + health.interval_s + AT_ONCE,
)


def damaged_weights(lab: FaultLab) -> Seconds:
    """Half of the file of version 2 is missing: no engine can have it."""
    moment = Moment()

    def fault(case: Case) -> None:
        def damage(weights: WeightsFolder) -> None:
            if weights.version == 2:
                file = weights.path / "model.safetensors"
                os.truncate(file, file.stat().st_size // 2)

        case.trainer.damage = damage
        case.on = lambda what: moment.now() if what == PushWeights(2) else None

    try:
        lab.case(lab.attached(), fault)
    except EngineError as error:
        ended_s = time.monotonic()
        (line,) = str(error).splitlines()
        assert "v00000002/model.safetensors is damaged" in line, line
        return {DAMAGED.name: ended_s - moment.s}
    raise AssertionError("a run with damaged weights ended without an error")


def wrong_version_echoed(lab: FaultLab) -> Seconds:
    """After an update the server reports another version than it was sent."""
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
        hold_until_back(case)

    case = lab.case(lab.attached(), fault, max_restarts=1)
    case.check_nothing_was_lost()
    case.check_counts(losses=1, restarts=1, mismatches=1)
    return {WRONG_VERSION.name: case.seconds_to(EngineLost, moment.s)}


def other_weights(lab: FaultLab) -> Seconds:
    """Someone else loads old weights into the server while it generates."""
    moment = Moment()

    def fault(case: Case) -> None:
        async def load() -> None:
            assert lab.victim is not None
            lab.signal_victim(signal.SIGCONT)
            stranger = EngineClient(
                lab.victim_address, api=lab.victim.client.api, key=lab.victim.client.key
            )
            servers = case.servers
            try:
                while not servers.counts["engine_losses"]:
                    # Not concurrently: two loads at a time crash SGLang 0.5.23.
                    async with servers._weights_lock:
                        version = servers.weights.version
                        moment.s = time.monotonic()
                        await stranger.load_weights(lab.first, PauseMode.RETRACT)
                    # A pending update may repair it before a check notices.
                    while (
                        not servers.counts["engine_losses"] and servers.weights.version == version
                    ):
                        await asyncio.sleep(POLL_S)
            finally:
                await stranger.close()

        when_generating(lab, case, load)
        hold_until_back(case)

    case = lab.case(lab.attached(), fault, max_restarts=1)
    case.check_nothing_was_lost()
    case.check_counts(losses=1, restarts=1, mismatches=1)
    return {OTHER_WEIGHTS.name: case.seconds_to(EngineLost, moment.s)}


def hung(lab: FaultLab) -> Seconds:
    """The server accepts connections without replying, and later continues normally."""
    moment = Moment()

    async def hang() -> None:
        moment.now()
        try:
            await asyncio.sleep(lab.timings.hangs_s)
        finally:
            lab.signal_victim(signal.SIGCONT)

    def fault(case: Case) -> None:
        when_generating(lab, case, hang)
        hold_until_back(case)

    case = lab.case(lab.attached(), fault, max_restarts=1)
    case.check_nothing_was_lost()
    case.check_counts(losses=1, restarts=1)
    case.check_tokens_were_kept()
    return {HUNG.name: case.seconds_to(EngineLost, moment.s)}


def stalled(lab: FaultLab) -> Seconds:
    """The HTTP process replies while the compute process hangs, and later continues."""
    moment = Moment()

    async def stall() -> None:
        moment.now()
        for process in lab.victim_speaks():
            process.resume()
        try:
            await asyncio.sleep(lab.timings.hangs_s)
        finally:
            lab.signal_victim(signal.SIGCONT)

    def fault(case: Case) -> None:
        when_generating(lab, case, stall)
        hold_until_back(case)

    case = lab.case(lab.attached(), fault, max_restarts=1)
    case.check_nothing_was_lost()
    case.check_counts(losses=1, restarts=1)
    return {STALLED.name: case.seconds_to(EngineLost, moment.s)}


def computing_killed(lab: FaultLab) -> Seconds:
    """The compute process dies; the owner restarts the server."""
    moment = Moment()

    def fault(case: Case) -> None:
        async def kill() -> None:
            moment.now()
            for process in lab.victim_computes():
                process.kill()
            lab.signal_victim(signal.SIGCONT)
            # SGLang's other processes end too; vLLM's keep running and report an error.
            while not case.servers.counts["engine_losses"]:
                await asyncio.sleep(POLL_S)
            await lab.restart_victim()

        when_generating(lab, case, kill)
        hold_until_back(case)

    case = lab.case(lab.attached(), fault, max_restarts=1)
    case.check_nothing_was_lost()
    case.check_counts(losses=1, restarts=1)
    return {COMPUTING_KILLED.name: case.seconds_to(EngineLost, moment.s)}


def hung_in_a_whole_run(lab: FaultLab) -> Seconds:
    """A hung server in a complete run: real trainer and rewards, attached to both servers."""
    state, steps = RunState(), 5
    moment: list[float] = []
    tasks: list[asyncio.Task[None]] = []
    health = lab.timings.health
    config = tiny_config(
        lab.root,
        f"rollout.addresses=[{lab.survivor_address},{lab.victim_address}]",
        f"rollout.health_interval_s={health.interval_s}",
        f"rollout.health_timeout_s={health.timeout_s}",
        f"total_train_steps={steps}",
        f"gconfig.n_samples={SAMPLES}",
        "eta=3",
    )
    groups = config.dataset.batch_size

    async def hang() -> None:
        assert state.performer is not None
        client = state.performer.servers.alive[VICTIM].client
        await lab.stop_victim_in_mid_answer(lambda: client)
        moment.append(time.time())

    def on_step(report: StepReport) -> None:
        if report.step == 1:
            tasks.append(asyncio.get_running_loop().create_task(hang()))

    try:
        result = do_run(
            config,
            on_step=on_step,
            response_tokens=response_tokens,
            reward_fn=even_digits,
            state=state,
        )
    finally:
        lab.signal_victim(signal.SIGCONT)
    summary = result.summary
    seen = [(s["group"], s["sample"]) for step in trained_samples(result.folder) for s in step]
    assert len(seen) == len(set(seen)) == steps * groups * SAMPLES
    assert summary["status"] == "complete"
    assert (summary["engine_losses"], summary["engine_restarts"]) == (1, 0)
    assert summary["version_mismatches"] == 0
    assert summary["resubmitted_samples"] > 0
    assert summary["kept_tokens"] > 0
    check_log(result.folder / "events.jsonl")
    log = read_log_file(result.folder / "events.jsonl")
    (lost,) = [record for record in log.events if isinstance(record.event, EngineLost)]
    return {HUNG_WHOLE.name: lost.t_s + log.header.started_at - moment[0]}


def killed_while_loading_then_started_with_old_weights(lab: FaultLab) -> Seconds:
    """The server dies in an update; its owner restarts it with its first weights."""
    moment = Moment()

    async def kill_and_restart() -> None:
        await asyncio.sleep(0.1)  # the update has been sent to a server that does not reply
        moment.now()
        lab.signal_victim(signal.SIGKILL)
        await lab.restart_victim()

    def fault(case: Case) -> None:
        def before_load(client: EngineClient, version: int) -> None:
            if version == 2 and client.base_url == lab.victim_address and not case.tasks:
                lab.signal_victim(signal.SIGSTOP)
                case.tasks.append(asyncio.create_task(kill_and_restart()))

        case.before_load = before_load
        hold_until_back(case)

    case = lab.case(lab.attached(), fault, max_restarts=1)
    case.check_nothing_was_lost()
    case.check_counts(losses=1, restarts=1)
    seconds = {
        KILLED_LOADING.name: case.seconds_to(EngineLost, moment.s),
        OLD_WEIGHTS.name: case.seconds_to(EngineJoined, moment.s),
    }
    joined_s = moment.s + seconds[OLD_WEIGHTS.name]
    work = [
        what for t, what in case.happened
        if t >= joined_s and isinstance(what, StartGroup) and what.engine == VICTIM
    ]  # fmt: skip
    assert work, "the server came back and got no work"
    return seconds


def killed_while_generating_and_its_port_stolen(lab: FaultLab) -> Seconds:
    """The server is killed, and another program takes its port before the restart."""
    moment = Moment()
    victim, port = lab.borrowed()
    with socket.socket() as thief:

        async def kill_and_steal() -> None:
            moment.now()
            lab.signal_victim(signal.SIGKILL)
            await steal(thief, port)

        def fault(case: Case) -> None:
            when_generating(lab, case, kill_and_steal)
            case.wait_for(lambda: case.losses_told == 2)

        case = lab.case(victim, fault, max_restarts=1)
    case.check_nothing_was_lost()
    case.check_counts(losses=1)
    case.check_tokens_were_kept()
    (given_up,) = [note for note in case.notes if "did not come back" in note]
    assert f"port {port}" in given_up
    lost, gone = [t for t, what in case.happened if isinstance(what, EngineLost)]
    return {KILLED.name: lost - moment.s, PORT_STOLEN.name: gone - moment.s}


RUNS: Final[dict[Run, tuple[Fault, ...]]] = {
    damaged_weights: (DAMAGED,),
    wrong_version_echoed: (WRONG_VERSION,),
    other_weights: (OTHER_WEIGHTS,),
    hung: (HUNG,),
    stalled: (STALLED,),
    hung_in_a_whole_run: (HUNG_WHOLE,),
    computing_killed: (COMPUTING_KILLED,),
    killed_while_loading_then_started_with_old_weights: (KILLED_LOADING, OLD_WEIGHTS),
    killed_while_generating_and_its_port_stolen: (KILLED, PORT_STOLEN),
}
"""Every run and its faults; after the last one there is no victim."""


def when_generating(
    lab: FaultLab, case: Case, strike: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Call `strike` once engine 1 is stopped during a response; `case.wait_for` holds steps."""

    async def stop_and_strike() -> None:
        await lab.stop_victim_in_mid_answer(case.victim)
        case.struck = True
        await strike()

    def on(_: Event | Action) -> None:
        if not case.tasks:
            case.tasks.append(asyncio.get_running_loop().create_task(stop_and_strike()))

    case.on = on
    case.struck = False


def hold_until_back(case: Case) -> None:
    """Hold training steps until a server has come back."""
    case.wait_for(lambda: case.servers.counts["engine_restarts"] > 0)


async def steal(thief: socket.socket, port: int) -> None:
    """Listen on a port as soon as it is free."""
    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    while True:
        try:
            thief.bind((HOST, port))
            thief.listen()
            return
        except OSError:
            await asyncio.sleep(POLL_S)  # its owner is dying

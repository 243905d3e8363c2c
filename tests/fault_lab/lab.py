"""Real servers under the real coordinator and pipeline, with faults.

    engine 0   the survivor: an embedded engine, run by the lab, the same for every case
    engine 1   the victim, of the tested backend; also run by the lab, unless a case borrows it as
               if the run had started it

In a `case` the trainer is a stand-in (`stand_in`); `faults.hung_in_a_whole_run` has a real one.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from areal_lab.config.schema import RolloutConfig, TrainConfig
from areal_lab.control.coordinator import Coordinator
from areal_lab.control.events import EngineId, Event, RunStarted
from areal_lab.data.problems import Problem, PromptSource
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.client.engine_client import EngineClient
from areal_lab.engines.keys import KEY_VARIABLE, new_key
from areal_lab.engines.launch.backends import ServerOptions
from areal_lab.engines.launch.start import EngineProcess, launch_engine
from areal_lab.engines.protocol import PauseMode, SamplingParams, WeightsFolder
from areal_lab.engines.weights.folder import write_weights
from areal_lab.pipeline.drive import UserRequest, drive
from areal_lab.pipeline.evaluations import Evaluations
from areal_lab.pipeline.fleet import first_error
from areal_lab.pipeline.performer import RunPerformer
from areal_lab.pipeline.resume.writer import CheckpointWriter
from areal_lab.pipeline.rollout.groups import Rollout, request_id
from areal_lab.pipeline.servers.health import HealthLimits
from areal_lab.pipeline.servers.pool import EngineSource, ServerPool
from areal_lab.pipeline.servers.server import PushTo, Weights, prepare_push_from
from areal_lab.pipeline.servers.sources import attach
from areal_lab.runlog.file import EventLog
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.records import RunHeader
from areal_lab.runlog.replay import limits_to_fields
from benchmarks.tiny_model import write_tiny_model
from tests.fault_lab.case import (
    LIMITS,
    LONG,
    SAMPLES,
    SHORT,
    STEPS,
    VICTIM,
    Case,
    response_tokens,
)
from tests.fault_lab.stand_in import POLL_S, EvenDigits, StandInTrainer, load_model

DRAIN_S = 0.2
"""Time until everything that a stopped server had sent is received."""
BOUND_S = 300.0
"""Timeout of a case, whatever hangs."""
START_BOUND_S = 600.0
"""Timeout of a server's start on a busy machine."""
PROBLEMS = tuple(Problem(prompt=f"{n}+1=", answer=str(n + 1), key=str(n)) for n in range(64))
Fault = Callable[[Case], None]
"""Prepares a case: sets `case.on`, or damages something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabTimings:
    """Timings of a lab."""

    health: HealthLimits
    hangs_s: float
    """Time for which a server is stopped."""


QUICK = LabTimings(health=HealthLimits(interval_s=0.2, timeout_s=1.3, stall_s=1.3), hangs_s=2.5)
"""For an engine that replies immediately."""
AS_SHIPPED = LabTimings(
    health=HealthLimits(
        interval_s=RolloutConfig().health_interval_s,
        timeout_s=RolloutConfig().health_timeout_s,
        stall_s=20.0,
    ),
    hangs_s=30.0,
)
"""The defaults of the configuration, except for a stall: steps of a tiny model are short."""
_COMPUTES = re.compile("^(sglang::scheduler|VLLM::EngineCore)")
"""Titles of compute processes behind an HTTP process."""


def timings_of(backend: str) -> LabTimings:
    """The timings of the lab with this engine."""
    return QUICK if backend == "embedded" else AS_SHIPPED


@dataclass
class FaultLab:
    """The two servers, the model, and the means to run a case."""

    root: Path
    backend: str
    timings: LabTimings
    model_path: Path
    first: WeightsFolder
    """The weights that servers are started with."""
    runner: asyncio.Runner
    cases: int = 0
    key: str = field(default_factory=new_key)
    """Of both servers: runs that attach to them take it from the environment."""
    _survivor: EngineProcess | None = None
    victim: EngineProcess | None = None
    """None before it is started, and after a case that borrowed it."""
    _victim_pid: int = 0

    # --- servers ---

    async def open(self) -> None:
        """Start both servers, if they do not run."""
        os.environ[KEY_VARIABLE] = self.key

        async def survivor() -> None:
            self._survivor = self._survivor or await self.launch(0, "embedded")

        async def victim() -> None:
            self.victim = self.victim or await self.launch(VICTIM, self.backend)
            self._victim_pid = self.victim.child.pid

        # Each is stored as soon as it runs, so that it is stopped if the other one fails.
        async with asyncio.TaskGroup() as starting:
            starting.create_task(survivor())
            starting.create_task(victim())

    async def close(self) -> None:
        """Stop both."""
        os.environ.pop(KEY_VARIABLE, None)
        for engine in (self._survivor, self.victim):
            if engine is not None:
                await engine.stop()

    @property
    def survivor_address(self) -> str:
        """Address of engine 0."""
        assert self._survivor is not None, "the lab is open"
        return self._survivor.base_url

    @property
    def victim_address(self) -> str:
        """Address of engine 1."""
        assert self.victim is not None, "it was borrowed and is gone"
        return self.victim.base_url

    def attached(self) -> EngineSource:
        """The victim as an attached server."""
        return self._attacher(self.victim_address)

    def borrowed(self) -> tuple[EngineSource, int]:
        """The victim as if the run had started it, on a fixed port, and that port.

        A second start is a real one. The lab has no victim afterwards, until it opens again.
        """
        first, self.victim = self.victim, None
        assert first is not None, "it was borrowed and is gone"
        port = _port(first)
        self.runner.run(first.client.load_weights(self.first, PauseMode.RETRACT))
        there = [first]

        async def start() -> EngineProcess:
            return there.pop() if there else await self.launch(VICTIM, self.backend, port)

        return start, port

    def signal_victim(self, number: signal.Signals) -> None:
        """Send a signal to the victim's processes, borrowed or not."""
        os.killpg(self._victim_pid, number)

    def victim_computes(self) -> list[psutil.Process]:
        """The victim's compute processes, or its only process."""
        whole = psutil.Process(self._victim_pid)
        found = [one for one in whole.children(recursive=True) if _COMPUTES.match(title(one))]
        return found or [whole]

    def victim_speaks(self) -> list[psutil.Process]:
        """The victim's other processes."""
        whole = psutil.Process(self._victim_pid)
        computes = self.victim_computes()
        return [one for one in (whole, *whole.children(recursive=True)) if one not in computes]

    async def stop_victim_in_mid_answer(self, client: Callable[[], EngineClient | None]) -> None:
        """Stop the victim's processes (SIGSTOP) once it is generating a long response.

        Args:
            client: returns the client that waits for responses, if there is one.
        """
        names = [request_id("train", group, s) for group in range(64) for s in range(SAMPLES)]

        def in_the_middle() -> bool:
            asked = client()
            return asked is not None and any(
                SHORT <= asked.confirmed_tokens(name) < LONG for name in names
            )

        while True:
            if in_the_middle():
                self.signal_victim(signal.SIGSTOP)
                await asyncio.sleep(DRAIN_S)
                if in_the_middle():
                    return
                self.signal_victim(signal.SIGCONT)
            await asyncio.sleep(POLL_S)

    async def restart_victim(self) -> None:
        """Restart the victim on its port, as its owner would."""
        assert self.victim is not None, "it was borrowed and is gone"
        port = _port(self.victim)
        await self.victim.stop(at_once=True)
        self.victim = await self.launch(VICTIM, self.backend, port)
        self._victim_pid = self.victim.child.pid

    async def launch(self, index: EngineId, backend: str, port: int = 0) -> EngineProcess:
        """Start a server."""
        return await launch_engine(
            backend,
            ServerOptions(
                model=self.first.path,
                version=str(self.first.version),
                port=port,
                max_running_requests=16,
            ),
            index=index,
            log_path=self.root / f"case-{self.cases}-engine-{index}.log",
            ready_timeout_s=START_BOUND_S,
            request_timeout_s=BOUND_S,
            key=self.key,
        )

    def _attacher(self, address: str) -> EngineSource:
        async def wait() -> EngineClient:
            return await attach(
                address, self.model_path, request_timeout_s=BOUND_S, ready_timeout_s=BOUND_S
            )

        return wait

    # --- a run ---

    def case(self, victim: EngineSource, fault: Fault, *, max_restarts: int = 0) -> Case:
        """Run one case.

        Raises:
            Exception: what ended the run; an engine's error, not a group of them.
        """
        return self.runner.run(self._bounded(victim, fault, max_restarts))

    async def _bounded(self, victim: EngineSource, fault: Fault, max_restarts: int) -> Case:
        try:
            async with asyncio.timeout(BOUND_S):
                return await self._case(victim, fault, max_restarts)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    async def _case(self, victim: EngineSource, fault: Fault, max_restarts: int) -> Case:
        self.cases += 1
        root = self.root / f"case-{self.cases}"
        for name in ("trajectories", "checkpoints"):
            (root / name).mkdir(parents=True)
        trainer = StandInTrainer(load_model(self.model_path), root / "weights")
        weights = trainer.write()
        notes: list[str] = []
        carry = prepare_push_from(trainer)

        def prepare_push(
            weights: Weights, clients: Sequence[EngineClient], mode: PauseMode
        ) -> PushTo:
            push_to = carry(weights, clients, mode)

            async def tell_and_bring(client: EngineClient) -> object:
                case.before_load(client, weights.version)
                return await push_to(client)

            return tell_and_bring

        servers = ServerPool(
            sources={0: self._attacher(self.survivor_address), VICTIM: victim},
            health=self.timings.health,
            max_restarts=max_restarts,
            pause_mode=PauseMode.RETRACT,
            weights=weights,
            prepare_push=prepare_push,
            note=notes.append,
        )
        case = Case(servers=servers, trainer=trainer, folder=RunFolder(root), notes=notes)
        fault(case)
        try:
            await servers.start()
            await self._drive(case, weights)
            await asyncio.gather(*case.tasks)
        finally:
            # Otherwise a task that waits for an event that never comes would outlast every bound.
            for task in case.tasks:
                task.cancel()
            await asyncio.gather(*case.tasks, return_exceptions=True)
            await servers.close()
        return case

    async def _drive(self, case: Case, weights: WeightsFolder) -> None:
        header = RunHeader(
            mode="train",
            started_at=time.time(),
            limits=limits_to_fields(LIMITS),
            processes=("trainer", "engine 0", "engine 1"),
        )
        with EventLog(case.folder.events, header, clock=time.time) as log:
            case.log = log
            rollout = Rollout(
                engines=case.servers,
                codec=TextCodec.load(self.model_path),
                rewards=EvenDigits(),  # type: ignore[arg-type]
                sampling=SamplingParams(max_new_tokens=LONG),
                run_seed=1,
                running_samples=16,
                response_tokens=response_tokens,
                recomputed=case.recomputed,
            )
            checkpoints = CheckpointWriter(
                folder=case.folder,
                config=TrainConfig(),
                trainer=case.trainer,
                data="",
            )
            performer = RunPerformer(
                folder=case.folder,
                log=log,
                rollout=rollout,
                source=PromptSource(PROBLEMS, seed=1),
                trainer=case.trainer,
                servers=case.servers,
                checkpoints=checkpoints,
                evaluations=Evaluations(
                    config=TrainConfig(),
                    rollout=rollout,
                    servers=case.servers,
                    problems=(),
                    folder=case.folder,
                    checkpoints=checkpoints,
                    note=case.notes.append,
                ),
                samples=SAMPLES,
                total_steps=STEPS,
                on_step=lambda _: None,
                weights={0: weights},
            )
            performer.begin()
            events: asyncio.Queue[Event | UserRequest] = asyncio.Queue()
            started = RunStarted(await case.servers.begin(events.put_nowait))
            drive_task = asyncio.create_task(
                drive(Coordinator(LIMITS), performer, started, events, case)
            )
            loss_task = asyncio.create_task(case.servers.given_up.wait())
            try:
                await asyncio.wait({drive_task, loss_task}, return_when=asyncio.FIRST_COMPLETED)
                if loss_task.done():
                    assert case.servers.last_error is not None
                    raise case.servers.last_error
                case.finish = drive_task.result()
            finally:
                performer.log_counts()
                drive_task.cancel()
                loss_task.cancel()


@contextmanager
def fault_lab(root: Path, backend: str) -> Iterator[FaultLab]:
    """A lab; `open` starts its servers, and they are stopped at the end."""
    model_path = root / "model"
    write_tiny_model(model_path, initializer_range=0.2, head_size=32)
    first = write_weights(load_model(model_path), root / "first", 0, dtype=torch.float32)
    with asyncio.Runner() as runner:
        lab = FaultLab(
            root=root,
            backend=backend,
            timings=timings_of(backend),
            model_path=model_path,
            first=first,
            runner=runner,
        )
        try:
            yield lab
        finally:
            runner.run(lab.close())


def title(process: psutil.Process) -> str:
    """The command line of a process, as in `ps`."""
    return " ".join(process.cmdline())


def _port(engine: EngineProcess) -> int:
    return int(engine.base_url.rpartition(":")[2])

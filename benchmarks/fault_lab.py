"""Real servers under the real coordinator and shell, with faults; only the trainer is a stand-in.

    engine 0   a survivor: an embedded engine that somebody else runs, the same one for every case
    engine 1   the victim, of the backend that is tested

The stand-in trainer moves the weights at random and keeps every version, so that each token can be
scored again with the version that the engine named.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from areal_lab.control.coordinator import Coordinator, Limits
from areal_lab.control.eventlog import RunHeader
from areal_lab.control.events import Action, EngineId, Event, Finish, RunStarted
from areal_lab.control.replay import check_replay, limits_to_fields
from areal_lab.control.schedule import asynchronous
from areal_lab.data.problems import Problem, PromptSource
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import Trajectory
from areal_lab.engines.client import EngineClient
from areal_lab.engines.launch import EngineProcess, launch_engine
from areal_lab.engines.protocol import PauseMode, SamplingParams, WeightsFolder
from areal_lab.engines.weights import write_weights
from areal_lab.pipeline.attach import attach
from areal_lab.pipeline.courier import Bring, Weights, courier_from
from areal_lab.pipeline.drive import drive
from areal_lab.pipeline.eventlog import EventLog, read_log_file
from areal_lab.pipeline.folder import RunFolder
from areal_lab.pipeline.health import Health
from areal_lab.pipeline.live import LiveRun
from areal_lab.pipeline.rollout import Recomputed, Rollout, request_id
from areal_lab.pipeline.servers import Place, Servers
from areal_lab.rewards.service import RewardOutcome
from areal_lab.training.protocol import Span
from benchmarks.tiny_model import write_tiny_model

STEPS = 4
GROUPS, SAMPLES = 3, 4
"""A batch; one group of samples has one prompt."""
VICTIM: EngineId = 1
SHORT = 20
LONG = 200
"""Tokens of an answer that is still running when something happens."""
HEALTH = Health(interval_s=0.2, timeout_s=1.5)
"""Faster than the defaults, so that a test need not wait for them."""
BOUND_S = 120.0
"""No case takes longer, whatever hangs: beyond this it fails."""
HELD_AT = 2
POLL_S = 0.005
_NOISE = 0.003


@dataclass
class StandInTrainer:
    """Answers what a trainer answers; a step moves every weight a little."""

    model: PreTrainedModel
    root: Path
    version: int = 0
    versions: dict[int, PreTrainedModel] = field(default_factory=dict)
    trained: list[Trajectory] = field(default_factory=list)
    damage: Callable[[WeightsFolder], None] = lambda _: None
    """Done to each folder before engines are told of it."""
    hold: Callable[[], bool] = lambda: False
    """The third step does not end while this holds, so that what is to happen comes in time."""

    def __post_init__(self) -> None:
        self.versions[0] = copy.deepcopy(self.model)

    def write(self) -> WeightsFolder:
        """The weights of the present version."""
        return write_weights(self.model, self.root, self.version, dtype=torch.float32)

    async def train(self, batch: Any) -> Any:
        """Train on the trajectories, after a fashion."""
        self.trained.extend(batch.trajectories)
        while self.version == HELD_AT and self.hold():
            await asyncio.sleep(POLL_S)
        self.version += 1
        with torch.no_grad():
            torch.manual_seed(self.version)
            for weight in self.model.parameters():
                weight.add_(_NOISE * torch.randn_like(weight))
        self.versions[self.version] = copy.deepcopy(self.model)
        names = ("reward_mean", "loss", "lag_token_mean", "lag_token_max")
        metrics = dict.fromkeys(names, 0.0)
        return SimpleNamespace(version=self.version, metrics=metrics, spans=())

    async def export(self) -> Any:
        """Write the weights, and damage them if this is asked for."""
        weights = self.write()
        self.damage(weights)
        return SimpleNamespace(weights=weights, span=_span())

    async def save(self, request: Any) -> Any:
        """Pretend."""
        request.path.mkdir(parents=True)
        return SimpleNamespace(path=request.path, span=_span())


def _span() -> Span:
    return Span("work", time.time(), time.time())


PROBLEMS = tuple(Problem(prompt=f"{n}+1=", answer=str(n + 1), key=str(n)) for n in range(64))


class EvenDigits:
    """Rewards that need no process."""

    async def score(self, completions: tuple[str, ...], _problem: Problem) -> list[RewardOutcome]:
        """Count the even digits."""
        return [RewardOutcome("ok", float(sum(c in "02468" for c in text))) for text in completions]


@dataclass
class Case:
    """One run and what came of it."""

    servers: Servers
    trainer: StandInTrainer
    folder: RunFolder
    notes: list[str]
    began_s: float = field(default_factory=time.monotonic)
    happened: list[tuple[float, Event | Action]] = field(default_factory=list)
    finish: Finish | None = None
    recomputed: Recomputed = field(default_factory=Recomputed)
    on: Callable[[Event | Action], None] = lambda _: None
    """Called with all that happens, to make more happen."""
    on_load: Callable[[EngineClient, int], None] = lambda *_: None
    """Called when an engine was just sent a version."""
    log: EventLog = field(init=False)

    def event(self, event: Event) -> None:
        """As an observer."""
        self._see(event)
        self.log.event(event)

    def action(self, action: Action) -> None:
        """As an observer."""
        self._see(action)
        self.log.action(action)

    def _see(self, what: Event | Action) -> None:
        self.happened.append((time.monotonic(), what))
        self.on(what)

    def seconds_to(self, kind: type[Event | Action], since_s: float) -> float:
        """From a moment to the first event or action of a kind after it."""
        times = (t for t, what in self.happened if isinstance(what, kind) and t >= since_s)
        return next(times) - since_s

    async def until_victim_generates(self, tokens: int = 20) -> None:
        """Wait until a long answer on engine 1 has so many tokens, after the first update."""
        while True:
            server = self.servers.alive.get(VICTIM)
            if server is not None and self.trainer.version > 0:
                names = [request_id("train", g, s) for g in range(64) for s in range(SAMPLES)]
                if any(server.client.arrived_tokens(name) >= tokens for name in names):
                    return
            await asyncio.sleep(POLL_S)

    def check_nothing_was_lost(self) -> None:
        """Every sample of every group was trained on once, and every token's version is true.

        Raises:
            AssertionError: otherwise.
        """
        assert self.finish == Finish("complete"), self.notes
        seen = [(t.group, t.sample) for t in self.trainer.trained]
        assert len(seen) == len(set(seen)) == STEPS * GROUPS * SAMPLES
        assert {sample for _, sample in seen} == set(range(SAMPLES))
        for trajectory in self.trainer.trained:
            generated = sum(len(part.tokens) for part in trajectory.segments)
            assert generated == answer_tokens(trajectory.group, trajectory.sample)
        replay = check_replay(read_log_file(self.folder.events))
        assert replay.agrees, replay.difference
        gaps = [rescored_gap(self.trainer.versions, t) for t in self.trainer.trained]
        assert max(gaps) < 1e-4


def answer_tokens(group: int, sample: int) -> int:
    """Half of every group runs for long."""
    return LONG if (group + sample) % 2 == 0 else SHORT


def rescored_gap(versions: dict[int, PreTrainedModel], trajectory: Trajectory) -> float:
    """Largest difference of a log-prob from that of the version that it is said to be of."""
    tokens = [token for part in trajectory.segments for token in part.tokens]
    inputs = torch.tensor([[*trajectory.prompt_tokens, *tokens]])
    at, largest = len(trajectory.prompt_tokens), 0.0
    for part in trajectory.segments:
        with torch.no_grad():
            logprobs = versions[part.version](inputs).logits[0].log_softmax(-1)
        for token, behavior in zip(part.tokens, part.logprobs, strict=True):
            largest = max(largest, abs(float(logprobs[at - 1, token]) - behavior))
            at += 1
    return largest


@dataclass
class FaultLab:
    """The survivor, the model, and the means to run a case."""

    root: Path
    backend: str
    model_path: Path
    survivor: EngineProcess
    runner: asyncio.Runner
    cases: int = 0
    _shared: EngineProcess | None = None

    def launched(self, own: WeightsFolder) -> Place:
        """A victim of its own for one case."""
        return self.launcher(VICTIM, own)

    def shared(self, _own: WeightsFolder) -> Place:
        """The victim that somebody else runs, the same one for every case that spares it."""
        return self.attacher(self.shared_address)

    @property
    def shared_address(self) -> str:
        """Where it is; it is started before the first case that needs it."""
        assert self._shared is not None, "a case that names it was run"
        return self._shared.base_url

    async def restart_shared(self) -> None:
        """What its owner does: kill it, and start it again on its port."""
        assert self._shared is not None
        port = int(self._shared.base_url.rpartition(":")[2])
        await self._shared.child.stop(at_once=True)
        await self._shared.stop()
        self._shared = await self.launch(VICTIM, first_weights(self.model_path), port)

    async def close(self) -> None:
        """Stop the servers that are shared."""
        await self.survivor.stop()
        if self._shared is not None:
            await self._shared.stop()

    def launcher(self, index: EngineId, weights: WeightsFolder, port: int = 0) -> Place:
        """A place whose server is started here."""

        async def start() -> EngineProcess:
            return await self.launch(index, weights, port)

        return Place(open=start)

    async def launch(
        self, index: EngineId, weights: WeightsFolder, port: int = 0, backend: str = ""
    ) -> EngineProcess:
        """Start a server with the weights of the model's own folder."""
        return await launch_engine(
            backend or self.backend,
            index=index,
            weights=weights,
            port=port,
            threads=1,
            dtype="float32",
            max_running_requests=16,
            context_length=None,
            log_path=self.root / f"case-{self.cases}-engine-{index}.log",
            request_timeout_s=BOUND_S,
        )

    def attacher(self, address: str) -> Place:
        """A place whose server somebody else runs."""

        async def wait() -> EngineClient:
            return await attach(
                address, self.model_path, request_timeout_s=BOUND_S, ready_timeout_s=BOUND_S
            )

        return Place(open=wait)

    def case(
        self,
        victim: Callable[[WeightsFolder], Place] | None,
        fault: Callable[[Case], None],
        *,
        survivor: bool = True,
        max_restarts: int = 0,
    ) -> Case:
        """Run one case: `fault` puts something into `case.on`, or damages something.

        Args:
            victim: makes the place of engine 1 from the first weights; None has no engine 1.

        Raises:
            Exception: what ended the run.
        """
        if victim == self.shared and self._shared is None:
            self._shared = self.runner.run(self.launch(VICTIM, first_weights(self.model_path)))
        return self.runner.run(self._bounded(victim, fault, survivor, max_restarts))

    async def _bounded(self, *arguments: Any) -> Case:
        async with asyncio.timeout(BOUND_S):
            return await self._case(*arguments)

    async def _case(
        self,
        victim: Callable[[WeightsFolder], Place] | None,
        fault: Callable[[Case], None],
        survivor: bool,
        max_restarts: int,
    ) -> Case:
        self.cases += 1
        root = self.root / f"case-{self.cases}"
        for name in ("trajectories", "checkpoints"):
            (root / name).mkdir(parents=True)
        folder = RunFolder(root)
        trainer = StandInTrainer(load_model(self.model_path), root / "weights")
        weights = trainer.write()
        places: dict[EngineId, Place] = {}
        if survivor:
            places[0] = self.attacher(self.survivor.base_url)
        if victim is not None:
            places[VICTIM] = victim(first_weights(self.model_path))
        notes: list[str] = []
        carry = courier_from(trainer)  # type: ignore[arg-type]  # folders need no more of it

        def courier(weights: Weights, clients: Sequence[EngineClient], mode: PauseMode) -> Bring:
            bring = carry(weights, clients, mode)

            async def bring_and_tell(client: EngineClient) -> object:
                bringing = asyncio.create_task(bring(client))
                await asyncio.sleep(POLL_S)
                case.on_load(client, weights.version)
                return await bringing

            return bring_and_tell

        servers = Servers(
            places=places,
            health=HEALTH,
            max_restarts=max_restarts,
            pause_mode=PauseMode.RETRACT,
            weights=weights,
            courier=courier,
            note=notes.append,
        )
        case = Case(servers=servers, trainer=trainer, folder=folder, notes=notes)
        fault(case)
        try:
            await servers.start()
            await self._drive(case, weights)
        finally:
            await servers.close()
        return case

    async def _drive(self, case: Case, weights: WeightsFolder) -> None:
        limits = Limits(
            batch_groups=GROUPS,
            max_in_flight=2 * GROUPS,
            train_steps=STEPS,
            schedule=asynchronous(2),
        )
        codec = TextCodec.load(self.model_path)
        header = RunHeader(
            mode="train",
            started_at=time.time(),
            limits=limits_to_fields(limits),
            processes=("trainer", "engine 0", "engine 1"),
        )
        with EventLog(case.folder.events, header, clock=time.time) as log:
            case.log = log
            live = LiveRun(
                folder=case.folder,
                log=log,
                rollout=Rollout(
                    engines=case.servers,
                    codec=codec,
                    rewards=EvenDigits(),  # type: ignore[arg-type]
                    sampling=SamplingParams(max_new_tokens=LONG),
                    run_seed=1,
                    running_samples=16,
                    answer_tokens=answer_tokens,
                    recomputed=case.recomputed,
                ),
                source=PromptSource(PROBLEMS, seed=1),
                trainer=case.trainer,  # type: ignore[arg-type]
                servers=case.servers,
                samples=SAMPLES,
                total_steps=STEPS,
                on_step=lambda _: None,
                weights={0: weights},
            )
            live.begin()
            events: asyncio.Queue[Event] = asyncio.Queue()
            started = RunStarted(await case.servers.begin(events.put_nowait))
            driving = asyncio.create_task(drive(Coordinator(limits), live, started, events, case))
            losing = asyncio.create_task(case.servers.none_left.wait())
            try:
                await asyncio.wait({driving, losing}, return_when=asyncio.FIRST_COMPLETED)
                if losing.done():
                    assert case.servers.last_words is not None
                    raise case.servers.last_words
                case.finish = driving.result()
            finally:
                live.log_counts()
                driving.cancel()
                losing.cancel()


@contextmanager
def fault_lab(root: Path, backend: str) -> Iterator[FaultLab]:
    """A lab whose survivor runs, and is stopped in the end."""
    model_path = root / "model"
    write_tiny_model(model_path, initializer_range=0.2)
    model = load_model(model_path)
    weights = write_weights(model, root / "first", 0, dtype=torch.float32)
    with asyncio.Runner() as runner:
        survivor = runner.run(
            launch_engine(
                "embedded",
                index=0,
                weights=weights,
                port=0,
                threads=1,
                dtype="float32",
                max_running_requests=16,
                context_length=None,
                log_path=root / "survivor.log",
                request_timeout_s=BOUND_S,
            )
        )
        lab = FaultLab(root, backend, model_path, survivor, runner)
        try:
            yield lab
        finally:
            runner.run(lab.close())


def first_weights(model_path: Path) -> WeightsFolder:
    """The model's own folder, as weights that a server is started with."""
    return WeightsFolder(path=model_path, version=0, checksum="", size_bytes=0)


def load_model(folder: Path) -> PreTrainedModel:
    """A model in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model

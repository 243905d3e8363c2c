"""A run folder without models: the real coordinator, log and file formats under virtual time.

Durations, lengths and rewards are drawn; who starts, trains, pauses and loads when is decided by
the coordinator. `write_fake_run(folder)` leaves what a training run leaves.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from areal_lab.control.coordinator import Coordinator, Limits
from areal_lab.control.events import (
    Action,
    CheckpointDone,
    Drop,
    Event,
    Finish,
    GroupFinished,
    Interrupt,
    PushWeights,
    Request,
    Resume,
    RunStarted,
    Save,
    StartGroup,
    Train,
    TrainStepDone,
    WeightsPushed,
)
from areal_lab.control.ledger import mean_lag
from areal_lab.runlog.file import EventLog, read_log_file
from areal_lab.runlog.lags import trained_batches
from areal_lab.runlog.records import REWARDS, TRAINER, RunHeader, engine_process
from areal_lab.runlog.replay import limits_to_fields

START_S = 1_700_000_000.0
"""Seconds since the epoch at which every fake run starts."""
HELD_OUT_S = 9.0
"""Seconds of measuring on held-out problems, before and after training."""


@dataclass
class FakeGroup:
    """One running group; its samples advance together, one token at a time."""

    start: StartGroup
    begun_s: float
    lengths: list[int]
    done: float = 0.0
    """Tokens the longest sample has."""
    since_s: float = 0.0
    stretches: list[tuple[int, int, int]] = field(default_factory=list)
    """(version, first token, end token)."""
    epoch: int = 0
    """Incremented at every pause, which invalidates ends scheduled before."""
    generated_s: float = math.inf


class FakeRun:
    """Performs actions by scheduling events at random times."""

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        *,
        engines: int = 1,
        samples: int = 8,
        mean_tokens: float = 60,
        tokens_per_s: float = 22,
        train_s: float = 3.6,
        seed: int = 1,
        requests: Sequence[tuple[float, Request]] = (),
    ) -> None:
        """`requests`: what a person asks, and when, in seconds since training began."""
        self.folder = folder
        self.coordinator = Coordinator(limits)
        self.chance = random.Random(seed)
        self.now_s = START_S
        self.samples, self.mean_tokens = samples, mean_tokens
        self.tokens_per_s, self.train_s = tokens_per_s, train_s
        self.engines = engines
        self.version = 0
        self.paused = False
        self.groups: dict[int, FakeGroup] = {}
        self.decoding_since: dict[int, float] = {}
        self.heap: list[tuple[float, int, object]] = []
        self.count = 0
        self.interruptions = 0
        self.requests = requests
        processes = (TRAINER, *(engine_process(e) for e in range(engines)), REWARDS)
        header = RunHeader(
            mode="train",
            started_at=START_S,
            limits=limits_to_fields(limits),
            processes=processes,
        )
        self.log = EventLog(folder / "events.jsonl", header, clock=lambda: self.now_s)

    def run(self) -> None:
        """From measuring before to measuring after."""
        self._hold_out()
        with self.log:
            for at_s, request in self.requests:
                self._later(at_s, request)
            self._tell(RunStarted(tuple(range(self.engines))))
            while self.heap:
                self.now_s, _, what = heappop(self.heap)
                if isinstance(what, tuple):
                    self._generated(*what)
                else:
                    self._tell(what)
            self._hold_out()

    def _hold_out(self) -> None:
        for engine in range(self.engines):
            name = engine_process(engine)
            self.log.span(name, "decode", self.now_s + 0.1, self.now_s + HELD_OUT_S)
        self.now_s += HELD_OUT_S

    def _later(self, seconds: float, what: object) -> None:
        self.count += 1
        heappush(self.heap, (self.now_s + seconds, self.count, what))

    def _tell(self, event: object) -> None:
        if isinstance(event, WeightsPushed):
            self.version = event.version
        self.log.event(event)
        for action in self.coordinator.handle(event):
            self.log.action(action)
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case StartGroup():
                self.groups[action.group] = FakeGroup(action, self.now_s, self._lengths())
                self._go_on(self.groups[action.group])
            case Drop():
                self.groups.pop(action.group, None)
            case Interrupt(by_hand):
                self.interruptions += not by_hand
                for group in self.groups.values():
                    self._pause(group)
                self.paused = True
            case Resume():
                self.paused = False
                for group in self.groups.values():
                    self._go_on(group)
            case Train():
                self._later(self._train(), TrainStepDone(action.version + 1))
            case PushWeights():
                seconds = self.chance.uniform(0.35, 0.6)
                for engine in range(self.engines):
                    name = engine_process(engine)
                    self.log.span(name, "load_weights", self.now_s + 0.03, self.now_s + seconds)
                self._later(seconds, WeightsPushed(action.version))
            case Save():
                self.log.span(TRAINER, "save", self.now_s + 0.02, self.now_s + 1.2)
                self._later(1.25, CheckpointDone(action.version))
            case Finish():
                pass

    def _lengths(self) -> list[int]:
        draw = (self.chance.lognormvariate(math.log(self.mean_tokens), 0.6) for _ in range(99))
        return [max(2, min(300, int(next(draw)))) for _ in range(self.samples)]

    def _go_on(self, group: FakeGroup) -> None:
        if self.paused or math.isfinite(group.generated_s):
            return
        group.since_s = self.now_s
        engine = group.start.engine
        self.decoding_since.setdefault(engine, self.now_s)
        seconds = (max(group.lengths) - group.done) / self.tokens_per_s
        self._later(max(0.02, seconds), (group, group.epoch))

    def _pause(self, group: FakeGroup) -> None:
        if math.isfinite(group.generated_s):
            return
        group.epoch += 1
        reached = group.done + (self.now_s - group.since_s) * self.tokens_per_s
        self._note(group, min(reached, max(group.lengths)))
        self._decoded(group.start.engine)

    def _note(self, group: FakeGroup, reached: float) -> None:
        if int(reached) > int(group.done):
            group.stretches.append((self.version, int(group.done), int(reached)))
        group.done = reached

    def _decoded(self, engine: int) -> None:
        since_s = self.decoding_since.pop(engine, None)
        if since_s is not None:
            self.log.span(engine_process(engine), "decode", since_s, self.now_s)

    def _generated(self, group: FakeGroup, epoch: int) -> None:
        if epoch != group.epoch or group.start.group not in self.groups:
            return
        self._note(group, max(group.lengths))
        group.generated_s = self.now_s
        engine = group.start.engine
        running = [g for g in self.groups.values() if g.start.engine == engine]
        if all(math.isfinite(g.generated_s) for g in running):
            self._decoded(engine)
        scored_s = self.now_s + self.chance.uniform(0.05, 0.35)
        segments = [
            [[v, min(b, length) - a] for v, a, b in group.stretches if min(b, length) > a]
            for length in group.lengths
        ]
        self.log.group(
            group=group.start.group,
            engine=engine,
            start_s=group.begun_s,
            generated_s=self.now_s,
            end_s=scored_s,
            samples=[
                {"segments": s, "reward": float(self._is_right()), "finish_reason": "stop"}
                for s in segments
            ],
        )
        head = min(s[0][0] for s in segments)
        tail = max(s[-1][0] for s in segments)
        self._later(scored_s - self.now_s, GroupFinished(group.start.group, head, tail))
        del self.groups[group.start.group]

    def _is_right(self) -> bool:
        return self.chance.random() < 0.5 + 0.46 / (1 + math.exp(6 - 0.55 * self.version))

    def _train(self) -> float:
        begun_s = at_s = self.now_s + 0.05
        scale = self.train_s * self.chance.uniform(0.85, 1.2)
        for name, share in (
            ("advantages and packing", 0.03),
            ("proximal log-probs", 0.2),
            *[("forward/backward", 0.15)] * 4,
            ("optimizer", 0.08),
            ("export weights", 0.09),
        ):
            self.log.span(TRAINER, name, at_s, at_s + share * scale, {"tokens": 2048.0})
            at_s += share * scale
        return at_s - begun_s + 0.08


def write_fake_run(folder: Path, limits: Limits, *, seed: int = 1, **knobs: Any) -> Path:
    """A complete run folder; returns it."""
    for name in ("trajectories", "checkpoints", "logs"):
        (folder / name).mkdir(parents=True)
    fake = FakeRun(folder, limits, seed=seed, **knobs)
    fake.run()
    with (folder / "metrics.jsonl").open("w") as file:
        for line in _metrics(folder):
            file.write(json.dumps(line) + "\n")
    (folder / "config.yaml").write_text("experiment_name: arithmetic\nseed: 1\n")
    return folder


def _metrics(folder: Path) -> Iterator[dict[str, float]]:
    log = read_log_file(folder / "events.jsonl")
    groups = {record.group: record for record in log.groups}
    before_s = HELD_OUT_S
    for batch in trained_batches(log):
        rewards = [r for g in batch.groups for r in groups[g].rewards]
        line: dict[str, float] = {
            "step": batch.version,
            "version": batch.version,
            "time_s": batch.done_s - HELD_OUT_S,
            "step_s": batch.done_s - before_s,
            "tokens_per_s": batch.tokens / (batch.done_s - before_s),
            "reward_mean": sum(rewards) / len(rewards),
            "loss": -0.01 / batch.version,
            "grad_norm": 1.0 + 1 / batch.version,
            "entropy": 0.8 / batch.version + 0.05,
            "trained_samples": len(rewards),
            "trained_tokens": batch.tokens,
            "clip_fraction": 0.02,
            "peak_rss_bytes": 2.1e9,
        }
        for name in ("head", "tail", "token"):
            lags = getattr(batch, f"{name}_lags")
            line[f"lag_{name}_mean"] = mean_lag(lags)
            line[f"lag_{name}_max"] = max(lags)
        before_s = batch.done_s
        yield line


__all__ = ["HELD_OUT_S", "START_S", "Event", "FakeRun", "write_fake_run"]

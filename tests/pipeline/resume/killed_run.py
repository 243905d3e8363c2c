"""Runs in processes of their own that are killed at a moment which their log names."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import psutil

from areal_lab.config.load import load_config
from areal_lab.control.events import GroupId, PushWeights, Save, StartGroup, Train
from areal_lab.live.presence import read_presence
from areal_lab.models.checkpoint_files import checkpoints_of
from areal_lab.pipeline.resume.positions import set_aside, trained_steps
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.lags import trained_batches
from areal_lab.runlog.records import ActionRecord
from areal_lab.runlog.replay import check_replay
from tests.warm import ForkedPopen

Found = TypeVar("Found")
Victim = Literal["run", "trainer", "engine", "pipeline", "stopped"]
"""All processes, one of them, or none: a person presses Ctrl-C."""
MOMENTS: dict[str, type] = {
    "generation": StartGroup,
    "step": Train,
    "push": PushWeights,
    "save": Save,
}
GIVE_UP_S = 120.0
_LOOK_S = 0.002


@dataclass(frozen=True, slots=True)
class Kill:
    """When to kill what."""

    victim: Victim
    moment: str
    """What was decided last: one of `MOMENTS`."""
    count: int
    """How often since the start of this life."""
    delay_s: float
    """Then wait this long, into what it began."""


def start(folder: Path) -> ForkedPopen:
    """Start or continue the run of a folder; one without a checkpoint as `--restart` does."""
    if trained_steps(folder) and not checkpoints_of(folder):
        set_aside(folder)
    with (folder / "logs" / "run.log").open("ab") as output:
        return ForkedPopen(
            [sys.executable, "-m", "areal_lab.cli.app", "train", "--resume", str(folder)],
            stdout=output,
            stderr=output,
        )


def live(folder: Path, kill: Kill | None) -> int | None:
    """One life of a run, to its kill or its end; returns the exit code if it ended by itself.

    A run whose trainer or last engine is killed ends by itself, with 1.
    """
    process = start(folder)
    try:
        if kill is not None and _comes(kill, process, folder):
            time.sleep(kill.delay_s)
            _kill(kill.victim, process)
        return process.wait(GIVE_UP_S)
    finally:
        _kill("run", process)
        process.wait()


def _comes(kill: Kill, process: ForkedPopen, folder: Path) -> bool:
    """Wait for the moment; returns whether it came before the end of the run."""
    wanted = f'"type":"{MOMENTS[kill.moment].__name__}"'.encode()
    until_s = time.monotonic() + GIVE_UP_S
    begun: int | None = None
    while process.poll() is None and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
        if begun is None:
            found = read_presence(folder)
            trains = found is not None and found.process.pid == process.pid
            if found is None or not trains or found.phase != "training":
                continue
            begun = (folder / "events.jsonl").stat().st_size
        with (folder / "events.jsonl").open("rb") as events:
            events.seek(begun)
            if events.read().count(wanted) >= kill.count:
                return True
    return False


def wait_for(look: Callable[[], Found]) -> Found:
    """Wait until there is something, or True."""
    until_s = time.monotonic() + GIVE_UP_S
    while not (found := look()):
        assert time.monotonic() < until_s, "it did not come in time"
        time.sleep(_LOOK_S)
    return found


def _kill(victim: Victim, process: ForkedPopen) -> None:
    try:
        parent = psutil.Process(process.pid)
        children = parent.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    match victim:
        case "stopped":
            parent.send_signal(signal.SIGINT)
            return
        case "run":
            chosen = [parent, *children]
        case "pipeline":
            chosen = [parent]
        case _:
            chosen = [child for child in children if _log(child).startswith(victim)]
    for one in chosen:
        try:
            os.kill(one.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _log(process: psutil.Process) -> str:
    """Name of the file that has the output of a process."""
    try:
        return Path(f"/proc/{process.pid}/fd/1").readlink().name
    except OSError:
        return ""  # it is gone


def trained_groups(folder: Path) -> Counter[GroupId]:
    """How often each group was trained on, from the samples that the trainer got."""
    found: Counter[GroupId] = Counter()
    for file in sorted((folder / "trajectories").glob("step-*.jsonl")):
        # A run that continues removes those after its checkpoint.
        with suppress(FileNotFoundError):
            found.update(json.loads(line)["group"] for line in file.read_text().splitlines())
    return found


def check_folder(folder: Path, steps: int, largest_lag: int) -> None:
    """What holds for the folder of a complete run, killed or not."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(one["time_s"] <= after["time_s"] for one, after in pairwise(lines))
    log = read_log_file(folder / "events.jsonl")
    assert check_replay(log).agrees, check_replay(log).difference
    batches = list(trained_batches(log))
    assert [batch.version for batch in batches] == list(range(1, steps + 1))
    in_log = Counter(group for batch in batches for group in batch.groups)
    assert in_log == trained_groups(folder)
    assert max(max(batch.head_lags, default=0) for batch in batches) <= largest_lag
    saves = [r.action.version for r in log.records if _is_save(r)]
    assert saves == sorted(set(saves))
    held_out = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    check_held_out(folder, held_out, steps)
    assert not list((folder / "checkpoints").glob(".*"))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "complete"


def check_held_out(folder: Path, lines: list[dict[str, Any]], steps: int) -> None:
    """No version has two scores, except a mixture and then an exact one; the best is the best."""
    exact = [line["version"] for line in lines if line["later_tokens"] == 0]
    mixed = [line["version"] for line in lines if line["later_tokens"] > 0]
    assert len(set(exact)) == len(exact)
    assert len(set(mixed)) == len(mixed)
    assert exact[0] == 0
    assert steps in exact
    every = int(load_config(folder / "config.yaml", []).eval_every_steps)
    if every == 0:
        assert [line["version"] for line in lines] == [0, steps]
    rewards = {line["version"]: line["reward"] for line in lines if line["later_tokens"] == 0}
    saved = {int(path.name[-5:]) for path in (folder / "checkpoints").glob("step-*")}
    best = int((folder / "best").resolve().name[-5:])
    assert best in saved
    assert rewards[best] == max(rewards[one] for one in saved & rewards.keys())


def _is_save(record: Any) -> bool:
    return isinstance(record, ActionRecord) and isinstance(record.action, Save)


AGAIN: Final = ("generated_tokens",)
"""Metrics that count what is generated a second time, for groups that were open at a checkpoint. At
eta 0 there are none, unless it had to wait for the checkpoint before it, as one beside training may
have to."""


def comparable(folder: Path, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Everything of a run that does not depend on time: samples, metrics but some, models."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("_s", "_bytes", *without)
    return {
        "metrics": [{k: v for k, v in line.items() if not k.endswith(timed)} for line in metrics],
        "samples": {
            file.name: file.read_bytes() for file in (folder / "trajectories").glob("step-*.jsonl")
        },
        "models": {
            file.parent.name: file.read_bytes()
            for file in (folder / "checkpoints").glob("step-*/model.safetensors")
        },
    }

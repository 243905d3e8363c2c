"""Every command that runs for long, under every fault: exit code, last lines, summary, processes.

    fault       what it does
    interrupt   Ctrl-C once, of a run whose sink has failed before
    twice       Ctrl-C twice
    terminate   SIGTERM
    request     `areal-lab control stop`
    disk        no file can be written any more

A few of the cheapest commands stand for all; the others are slow.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from omegaconf import OmegaConf

from areal_lab.live.attach import attach_run
from areal_lab.live.mailbox import RequestRefused
from areal_lab.live.presence import read_presence
from areal_lab.offline.resume import find_resumable
from areal_lab.pipeline.resume.recovery import find_recovery
from tests.offline.small import config_for, model_folder
from tests.pipeline.tiny_run import metrics, tiny_config, trained_samples
from tests.warm import ForkedPopen

BOUND_S = 120.0
STOPPING = "stopping after the running step, which is saved; press Ctrl-C again to stop at once"


def train(folder: Path, *more: str) -> list[str]:
    settings = ("total_train_steps=10000", "save_every_steps=1", "eta=2", *more)
    return ["train", written(folder, tiny_config(folder, *settings))]


def distill(folder: Path) -> list[str]:
    return ["distill", *train(folder)[1:], f"teacher.path={folder / 'model'}"]


def offline(kind: str) -> Callable[[Path], list[str]]:
    def arguments(folder: Path) -> list[str]:
        config = config_for(kind, folder, total_train_steps=100000, save_every_steps=1)
        return [kind, written(folder, config)]

    return arguments


def cosim(folder: Path) -> list[str]:
    small = ("total_train_steps=10000", "evaluation.max_problems=0", "eval_every_steps=0")
    batch = ("dataset.batch_size=4", "gconfig.n_samples=4", "simulator.preset=small")
    mode = ("mode=live", "tokens_per_token=100", "plots=false")
    return ["cosim", "cosim", f"run_dir={folder / 'runs'}", *small, *batch, *mode]


def evaluate(folder: Path) -> list[str]:
    limits = ("--limit", "200", "--samples", "4", "--out", str(folder / "out"))
    engine = ("rollout.threads=1", "rollout.max_running_requests=4", "gconfig.max_new_tokens=100")
    return ["eval", str(model_folder(folder)), "tiny", *limits, *engine]


def gateway(folder: Path) -> list[str]:
    key = ("--admin-key-file", str(folder / "key"))
    return ["gateway", str(model_folder(folder, chat=True)), "--port", "0", *key]


def controllers(folder: Path) -> list[str]:
    return train(folder, "evaluation.max_problems=0")[1:]


def written(folder: Path, config: Any) -> str:
    """The path of a config as a file."""
    path = folder / "config.yaml"
    path.write_text(OmegaConf.to_yaml(config.model_dump()))
    return str(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What is started, and how it differs from a run that ends after its step."""

    arguments: Callable[[Path], list[str]]
    module: str = "areal_lab.cli.app"
    works: str = "step   1/"
    """In its output once it does what it is for."""
    records: bool = True
    """It has a run folder."""
    saves: bool = True
    """It saves a checkpoint with each step, and can continue."""
    ends_steps: bool = True
    """The first Ctrl-C lets the running step end."""
    code: int = 130
    """After Ctrl-C."""
    pauses: bool = False
    """It can be paused by a request."""
    long: tuple[str, ...] = ()
    """Settings of steps during which Ctrl-C comes twice; children are halted for that."""
    writers: bool = False
    """Its children write the run folder, too."""
    last: str = ""
    """Pattern of the last line after Ctrl-C, where it is not the run folder."""


OFFLINE = ("sft", "rm", "dpo")
COMMANDS = {
    "train": Command(arguments=train, pauses=True),
    "distill": Command(arguments=distill, pauses=True),
    **{kind: Command(arguments=offline(kind), writers=True) for kind in OFFLINE},
    "cosim": Command(
        arguments=cosim, saves=False, long=("dataset.batch_size=32", "gconfig.n_samples=16")
    ),
    "eval": Command(
        arguments=evaluate, works="problems, mean reward", records=False, saves=False, last=".*/out"
    ),
    # A server that was asked to stop has done what it is for.
    "gateway": Command(
        arguments=gateway, works="press Ctrl-C", records=False, saves=False, code=0, last="stopped"
    ),
    "controllers": Command(
        arguments=controllers,
        module="tests.shell.controllers_loop",
        saves=False,
        ends_steps=False,
    ),
}


@dataclass
class Started:
    """A command that runs, and what it has printed."""

    process: subprocess.Popen[str]
    out: list[str] = field(default_factory=list[str])
    errors: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        pipes = ((self.process.stdout, self.out), (self.process.stderr, self.errors))
        self._readers = [threading.Thread(target=_read, args=pipe) for pipe in pipes]
        for reader in self._readers:
            reader.start()

    def until(self, condition: Callable[[], object]) -> None:
        """Wait; a command that ends meanwhile fails the test."""
        until_s = time.monotonic() + BOUND_S
        while not condition():
            assert self.process.poll() is None, self.printed
            assert time.monotonic() < until_s, self.printed
            time.sleep(0.02)

    def end(self) -> int:
        """Wait for the end; returns the exit code."""
        code = self.process.wait(BOUND_S)
        for reader in self._readers:
            reader.join()
        return code

    @property
    def printed(self) -> str:
        return "".join([*self.out, *self.errors])

    @property
    def folder(self) -> Path:
        """The run folder."""
        found = re.search(r"run folder (\S+)", self.printed)
        assert found is not None, self.printed
        return Path(found[1])


def _read(pipe: IO[str], lines: list[str]) -> None:
    with pipe:
        lines.extend(iter(pipe.readline, ""))


@contextmanager
def started(command: Command, folder: Path, *more: str, **variables: str) -> Iterator[Started]:
    """A command that works, with a checkpoint if it has any."""
    one = Started(
        ForkedPopen(
            [sys.executable, "-m", command.module, *command.arguments(folder), *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "XDG_STATE_HOME": str(folder), **variables},
        )
    )
    try:
        one.until(lambda: command.works in one.printed)
        if command.saves:
            one.until((one.folder / "model").exists)
        yield one
    finally:
        with suppress(ProcessLookupError):
            one.process.kill()
        one.end()


def interrupt(one: Started, _: Command) -> None:
    one.process.send_signal(signal.SIGINT)


def terminate(one: Started, _: Command) -> None:
    one.process.send_signal(signal.SIGTERM)


def twice(one: Started, command: Command) -> None:
    """The second Ctrl-C comes while the step runs: the processes that do it are halted."""
    children = psutil.Process(one.process.pid).children(recursive=True) if command.saves else []
    for child in children:
        child.suspend()
    one.process.send_signal(signal.SIGINT)
    if command.records and command.ends_steps:
        one.until(lambda: STOPPING in one.printed)
    else:
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        one.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.resume()


def request(one: Started, command: Command) -> None:
    """Another process looks at the run, and stops it."""
    run = attach_run(one.folder)
    now = run.snapshot()
    assert (now.state, now.alive) == ("training", True)
    assert now.step >= 1
    if command.pauses:
        assert run.pause() == "the run is paused"
    else:
        with pytest.raises(RequestRefused, match="can be stopped only; it has no pause"):
            run.pause()
    assert run.stop() == "the run stops after the running step"


def disk(one: Started, command: Command) -> None:
    """The kernel refuses writes of these processes as it does at the end of a disk."""
    main = psutil.Process(one.process.pid)
    for process in [main, *(main.children(recursive=True) if command.writers else ())]:
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))


FAULTS = {fault.__name__: fault for fault in (interrupt, twice, terminate, request, disk)}
FAST = {
    *(("sft", "interrupt"), ("sft", "twice"), ("sft", "disk"), ("train", "interrupt")),
    ("train", "twice"),
    *(("cosim", "interrupt"), ("eval", "interrupt"), ("sft", "request")),
}
LEFT_OUT = {
    *(("gateway", "disk"), ("gateway", "request")),  # it writes nothing before its end
    *(("eval", "request"), ("controllers", "request")),  # it has no requests; its program decides
}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, marks=() if (name, fault) in FAST else pytest.mark.slow)
        for name in COMMANDS
        for fault in FAULTS
        if (name, fault) not in LEFT_OUT
    ],
)
def test_a_fault_ends_every_command_in_the_same_way(tmp_path: Path, name: str, fault: str) -> None:
    command, variables = COMMANDS[name], dict[str, str]()
    settings = list(command.long if fault == "twice" else ())
    if fault == "interrupt" and command.records and name != "controllers":
        (tmp_path / "broken" / "tensorboard").mkdir(parents=True)  # a package without its modules
        variables["PYTHONPATH"] = str(tmp_path / "broken")
        settings = ["sinks=[tensorboard]", "plots=true"]
    with started(command, tmp_path, *settings, **variables) as one:
        if variables:
            one.until(lambda: "tensorboard failed and the run continues: Module" in one.printed)
        children = psutil.Process(one.process.pid).children(recursive=True)
        FAULTS[fault](one, command)
        code = one.end()
    assert not psutil.wait_procs(children, timeout=15)[1], "a process outlives the command"
    assert code == (1 if fault == "disk" else command.code), one.printed
    if fault == "disk":
        assert "cannot be written: " in one.errors[-1], one.printed
    elif (name, fault) != ("controllers", "twice"):  # it is cut off wherever it is
        assert "Traceback" not in one.printed
    if not command.records:
        if fault != "disk":
            last = (one.out if name == "eval" else one.errors)[-1]
            assert re.fullmatch(command.last, last.strip()), one.printed
        return
    presence = read_presence(one.folder)
    assert presence is not None
    assert presence.alive is False
    assert presence.ended == (fault != "disk")
    if fault == "disk":
        assert "summary.json was not written: " in one.printed
        assert not (one.folder / "summary.json").exists()
    else:
        check_summary(one, command, at_once=fault == "twice", sink=bool(variables))
        if (name, fault) == ("train", "interrupt"):
            check_dropped(one.folder)
    if command.saves:
        found = find_resumable(name, one.folder) if name in OFFLINE else find_recovery(one.folder)
        assert found.checkpoint.is_dir()


def check_summary(one: Started, command: Command, *, at_once: bool, sink: bool) -> None:
    """Summary and last line of a run that was stopped."""
    summary = json.loads((one.folder / "summary.json").read_text())
    assert (summary["sinks"]["tensorboard"]["failures"] == 1) if sink else "sinks" not in summary
    if at_once or not command.ends_steps:
        assert summary["status"] == "stopped at once"
        assert summary.get("saved_version", 1) >= 1
        assert "error" in summary
        assert not one.out
        if command.ends_steps:
            assert one.errors[-1].startswith("stopped at once, as requested; ")
        return
    assert summary["status"] == "stopped"
    assert summary["steps"] >= 1
    assert summary["steps"] == max(int(line["step"]) for line in metrics(one.folder))
    assert Path(one.out[-1].strip()) == one.folder
    assert STOPPING in one.printed
    pictures = {"loss.png", "timeline.png"} & {file.name for file in one.folder.iterdir()}
    assert len(pictures) == sink  # only this run is to draw
    assert (one.folder / "model").resolve().name == f"step-{summary['steps']:05d}"
    assert (one.folder / "model" / "config.json").is_file()
    assert (one.folder / "model" / "model.safetensors").is_file()


def check_dropped(folder: Path) -> None:
    """Groups that were started and not trained on are counted."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == len(metrics(folder))
    log = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    begun = {r["group"] for r in log if r.get("type") == "StartGroup"}
    trained = {s["group"] for step in trained_samples(folder) for s in step}
    assert summary["dropped"] == len(begun - trained)

"""Run folders with a checkpoint, written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_lab.config.schema import TrainConfig
from areal_lab.control.frontier import Frontier, OpenGroup
from areal_lab.data.problems import Problem, ProblemSet
from areal_lab.models.checkpoint_files import write_digests
from areal_lab.pipeline.resume.positions import positions
from areal_lab.pipeline.resume.saved_run import RUN_FILE, SavedRun
from areal_lab.runlog.folder import RunFolder

PROBLEMS = ProblemSet(
    train=tuple(Problem(prompt=f"{n} =", answer=str(n), key=str(n)) for n in range(5)),
    held_out=(Problem(prompt="9 =", answer="9", key="9"),),
)
FRONTIER = Frontier(
    version=3,
    next_group=30,
    open=(OpenGroup(group=25, version=2, attempts=2), OpenGroup(group=28, version=3)),
    eta=4.0,
    filtered=1,
)


def saved_run(config: TrainConfig, **changes: Any) -> SavedRun:
    """What is saved after step 3."""
    saved = SavedRun(
        frontier=FRONTIER,
        positions={},
        training_s=12.5,
        counts={"generated_tokens": 900, "interruptions": 2, "engine_losses": 1},
        data=PROBLEMS.digest(),
        config=config.model_dump(),
        held_out_before=(0.25, 0.5),
        unscored_before=1,
    )
    return replace(saved, **changes)


def run_folder(
    parent: Path, *, resumable: bool = True, steps: int = 10, digests: bool = True
) -> RunFolder:
    """A run of `steps` steps that was killed after step 3; with 3 it is complete."""
    config = TrainConfig(run_dir=str(parent), total_train_steps=steps, save_every_steps=1)
    folder = RunFolder.create(config)
    for step in (1, 2, 3):
        folder.append_metrics({"step": step, "reward_mean": 0.5})
        checkpoint = folder.checkpoint(step)
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text("{}")
        (checkpoint / "model.safetensors").write_bytes(bytes(range(64)))
        if resumable and step > 1:
            (checkpoint / "trainer").mkdir()
            (checkpoint / "trainer" / ".metadata").write_bytes(b"state")
            frontier = replace(FRONTIER, version=step, open=FRONTIER.open[: step - 1])
            saved = saved_run(config, frontier=frontier, positions=positions(folder.path))
            if step == steps:
                saved = replace(saved, frontier=replace(FRONTIER, open=()))
            (checkpoint / RUN_FILE).write_bytes(saved.to_json())
        if digests:
            write_digests(checkpoint, step)
    folder.append_metrics({"step": 4, "reward_mean": 0.5})
    return folder

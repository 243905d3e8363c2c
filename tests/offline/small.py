"""Small models and runs on fixed data for the tests, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_lab.config.offline import KINDS, OfflineConfig
from areal_lab.offline.job import Job, RunEvent, Stepped
from areal_lab.offline.resume import Resumable
from areal_lab.offline.run import run
from areal_lab.offline.start import begin, resolve_offline
from benchmarks.tiny_model import write_tiny_model

TEMPLATE = (
    "{% for m in messages %}"
    "{{ '+' + m.content + '=' if m.role == 'user' else '*' + m.content + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '*' }}{% endif %}"
)
"""A chat template of characters that the tiny model knows."""


def model_folder(folder: Path, *, chat: bool = False) -> Path:
    """A random model with a tokenizer of characters."""
    path = folder / "model"
    if not path.exists():
        write_tiny_model(path, initializer_range=0.2)
        if chat:
            (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_for(kind: str, folder: Path, **changes: Any) -> OfflineConfig:
    """A few steps on one-digit addition; `a__b` is the setting `a.b`."""
    settings: dict[str, Any] = {
        "actor.path": str(model_folder(folder)),
        "run_dir": str(folder / "runs"),
        "dataset.type": "arithmetic",
        "dataset.eval_size": 8,
        "dataset.batch_size": 6,
        "actor.dtype": "float32",
        "actor.device": "cpu",
        "actor.threads": 1,
        "actor.optimizer.lr": 1e-3,
        "actor.optimizer.warmup_steps": 0,
        "total_train_steps": 5,
        "plots": False,
    }
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    return KINDS[kind]().with_settings(settings)


def adder(kind: str, folder: Path, **changes: Any) -> OfflineConfig:
    """A run of the included model that adds, in a few seconds."""
    more = {
        "actor.path": "Adder-75K",
        "dataset.digits": [2, 2],
        "dataset.end_text": "\n",
        "dataset.end_token": False,
        "dataset.batch_size": 64,
        "dataset.eval_size": 128,
    }
    return config_for(kind, folder, **{**more, **changes})


def run_here(
    config: OfflineConfig,
    *,
    stop: Callable[[], bool] = lambda: False,
    emit: Callable[[RunEvent], object] = lambda _: None,
    resumable: Resumable | None = None,
) -> tuple[dict[str, Any], Job]:
    """Train in this process; returns the summary and the job."""
    job = begin(resolve_offline(config), resumable)
    return run(job, job.rows, emit=emit, stop=stop), job


def stop_after(steps: int) -> tuple[Callable[[], bool], Callable[[RunEvent], object]]:
    """`stop` and `emit` of a run that is stopped after a step."""
    done = 0

    def emit(event: RunEvent) -> None:
        nonlocal done
        done = event.step if isinstance(event, Stepped) else done

    # A step asks before its line is written.
    return lambda: done == steps - 1, emit


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without those that depend on the clock."""
    timed = ("time_s", "step_s", "tokens_per_s")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in timed} for line in lines]

"""Trials that are simulated once: a plan with other prices or limits asks for the same ones.

    cache = TrialCache()                       or TrialCache.load(path)
    PlanSearch(config, cache)                  simulates what is not in the cache
    PlanSearch(other_prices, cache)            simulates nothing

A trial belongs to everything that decides it: the settings, the GPUs and the model with their
numbers, the seed and the changed inputs; not to names, prices and the other seeds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Self

from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.plan.trial import Job, Run, Trial, run_here

_SHIPPED: Final = Path(__file__).parent / "data"
_NOT_DECIDING: Final = {"name": "", "seed": 1, "seeds": 1}
"""Settings that change nothing in one trial."""
_MONEY: Final = ("price", "purchase", "sources")


class TrialCache:
    """Performs jobs, each of them once; a `Run`."""

    def __init__(self, run: Run = run_here, trials: Mapping[str, Trial] | None = None) -> None:
        """Start with known trials.

        Args:
            run: simulates jobs that are not known.
            trials: known trials by `key`.
        """
        self._run = run
        self._trials = dict(trials or {})
        self.paused = False
        """Whether jobs that are not known wait (`Step.waits`), and nothing is simulated."""
        self.simulated = 0
        """Jobs that were not known."""
        self.made_by = ""
        """Version and command that made a loaded file."""

    def __len__(self) -> int:
        """Number of known trials."""
        return len(self._trials)

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Trial | None]:
        """The trials of the jobs in their order; unknown ones are simulated in their turn."""
        # A job without a key is known by its place: it is never kept.
        names = [key(job) or place for place, job in enumerate(jobs)]
        asked: list[str | int] = []
        fresh: Iterator[Trial | None] = iter(())
        for place, name in enumerate(names):
            trial = self._trials.get(str(name))
            while trial is None and self.paused:
                yield None
                trial = self._trials.get(str(name))
            if trial is None and (not asked or asked[0] != name):
                # Others may have simulated some of what was asked for; each job is asked for once.
                unknown = {
                    one: job
                    for one, job in zip(names[place:], jobs[place:], strict=True)
                    if str(one) not in self._trials
                }
                asked, fresh = list(unknown), self._run(list(unknown.values()))
            while trial is None:
                trial = next(fresh)
                if trial is None:
                    yield None
                    continue
                del asked[0]
                self.simulated += 1
                if isinstance(name, str):
                    self._trials[name] = trial
            yield trial

    def save(self, path: Path, *, made_by: str) -> None:
        """Write all trials as JSON, and what made them."""
        trials = {
            name: [trial.step_s, trial.tokens_per_s, trial.kwh, dict(trial.busy), dict(trial.idle)]
            for name, trial in sorted(self._trials.items())
        }
        head = {"made_by": made_by, "areal_lab": _version()}
        lines = [f'"{name}": {json.dumps(row)}' for name, row in trials.items()]
        text = f'{json.dumps(head)[:-1]}, "trials": {{\n' + ",\n".join(lines) + "\n}}\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: Path, run: Run = run_here) -> Self:
        """Read a file that `save` wrote.

        Raises:
            ValueError: in one line, if it is missing or is another file.
        """
        try:
            told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            trials = {name: _trial(row) for name, row in told["trials"].items()}
            made_by = f"areal_lab {told['areal_lab']}, {told['made_by']}"
        except FileNotFoundError:
            raise ValueError(f"{path} does not exist (looked in {Path.cwd()})") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} holds no trials of a plan: {error}") from error
        cache = cls(run, trials)
        cache.made_by = made_by
        return cache


def shipped_trials(plan: str, run: Run = run_here) -> TrialCache:
    """The shipped trials of a shipped plan file (`plan_small`), which need no simulation.

    Raises:
        ValueError: in one line, if there are none.
    """
    return TrialCache.load(_SHIPPED / f"{plan}.json", run)


def key(job: Job) -> str | None:
    """What decides a trial, in short; None if it depends on a file of lengths or inputs."""
    config = job.config
    if config.controller.inputs:
        return None
    answers = config.workload.answers
    if answers.kind == "recorded" or (answers.kind == "trace" and answers.trace.endswith(".csv")):
        return None
    decides: list[Any] = [
        config.model_dump() | _NOT_DECIDING,
        *(job.seed, job.training_slowdown, job.memory_slowdown),
        repr(find_model(config.model)),
    ]
    cluster = config.cluster
    decides[0]["cluster"] = cluster.model_dump(exclude={"price_per_gpu_h", "overhead"})
    for name in (cluster.gpu, cluster.generating_gpu):
        gpu = find_gpu(name)
        decides.append([getattr(gpu, field) for field in _deciding(type(gpu))])
    # Computed settings differ between processors in their last digits.
    rounded = json.loads(json.dumps(decides), parse_float=lambda text: f"{float(text):.12g}")
    written = json.dumps(rounded, sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()[:24]


def _deciding(record: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(record) if field.name not in _MONEY]


def _trial(row: Sequence[Any]) -> Trial:
    step_s, tokens_per_s, kwh, busy, idle = row
    return Trial(step_s=step_s, tokens_per_s=tokens_per_s, kwh=kwh, busy=busy, idle=idle)


def _version() -> str:
    try:
        return version("areal_lab")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"

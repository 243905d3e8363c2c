"""One co-simulated run, from its configuration to its folder.

    check --> held-out before --> along a log | live --> summary.json, checkpoint
                                        '-- stop requested: after the running step

Everything happens in this process, in an order that the configuration fixes: the same command
writes the same metrics, events and weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areal_lab.control.events import Version
from areal_lab.pipeline.report import write_report
from areal_lab.runlog.alarm_log import AlarmLog
from areal_lab.runlog.folder import RunFolder, environment
from areal_lab.runlog.records import Log, Record, log_of
from areal_lab.runlog.summary import build_summary, run_status
from areal_lab.shell.display import Display, Silent
from areal_lab.shell.recorded import Ending, recorded_here
from areal_lab.shell.step_report import StepReport
from areal_lab.shell.stop import StopSignal
from cosim.along import follow
from cosim.cluster import mean_response_tokens
from cosim.live import Live
from cosim.load import resolve_cosim
from cosim.policy import Policy
from cosim.schema import CosimConfig
from cosim.steps import Steps, Stopped
from simulator.run.one_seed import run_system
from simulator.run.system import System


@dataclass(frozen=True, slots=True)
class CosimResult:
    """The folder and the summary of a finished run."""

    folder: Path
    summary: dict[str, Any]


def run_cosim(
    config: CosimConfig,
    *,
    on_step: Callable[[StepReport], None] = lambda _: None,
    display: Display | None = None,
    stop: StopSignal | None = None,
) -> CosimResult:
    """Run to the end.

    Sets the number of torch's threads, to one unless `actor.threads` says otherwise: more of them
    may round differently in each run.

    Args:
        config: see `cosim.schema`; `load_cosim` makes one from YAML and overrides.
        display: where to show progress; None shows nothing.
        stop: requests an end after the running step.
    """
    display, stop = display or Silent(), stop or StopSignal()
    torch.set_num_threads(config.actor.threads or 1)
    resolved = resolve_cosim(config)
    began_s = time.process_time()
    folder = RunFolder.create(config)
    display.phase(f"run folder {folder.path}")
    for note in resolved.notes:
        display.note(f"note: {note}")
    policy = Policy(resolved)
    saved: list[Version] = []

    def save(version: Version) -> None:
        assert version == policy.version, "checkpoints are of the newest weights"
        policy.save(folder.checkpoint(version))
        folder.point("model", folder.checkpoint(version))
        saved.append(version)

    def report(step: StepReport) -> None:
        display.step(step)
        on_step(step)

    steps = Steps(
        folder=folder,
        total_steps=config.total_train_steps,
        eval_every_steps=config.eval_every_steps,
        save=save,
        on_step=report,
        alarms=AlarmLog(config, folder.path),
        note=display.note,
        stop=stop,
    )

    def failure(_: float) -> dict[str, Any]:
        found = _failure(config, steps)
        display.note(f"ended after {found['steps']} steps, which are in {folder.path}")
        return found

    ending = Ending(
        draw=write_report, pictures="reward.png, timeline.png, staleness.png", failure=failure
    )
    with recorded_here(config, folder, display, ending, stop) as recording:
        tokens_per_token = _perform(config, policy, steps, resolved.schedule, recording.display)
        if policy.version not in saved:  # the end of a log that continues
            save(policy.version)
        status = "stopped" if steps.stopped else run_status(log_of(steps.records))
        if status == "incomplete":  # a log that continues, up to the step that was asked for
            status = "complete"
        recording.summary = _summary(config, steps, tokens_per_token, status=status)
        cpu_s = round(time.process_time() - began_s, 2)
        folder.write_json("env.json", {**environment(), "cpu_s": cpu_s})
    return CosimResult(folder.path, recording.summary)


def _perform(
    config: CosimConfig, policy: Policy, steps: Steps, schedule: System | Log, display: Display
) -> int:
    """Generate and train to the end; returns how many simulated tokens a real one stands for."""
    tokens_per_token, seed = config.tokens_per_token, config.simulator.seed
    if config.mode == "live":
        assert isinstance(schedule, System), "checked: there is no log"
        display.phase("held-out problems before training")
        steps.measure(policy)
        tokens_per_token = tokens_per_token or _tokens_per_token(config, steps)
        live = Live(policy, steps, schedule, seed=seed, tokens_per_token=tokens_per_token)
        display.phase("generating and training")
        with suppress(Stopped):
            run_system(schedule, seed, steps.write, name=config.experiment_name, responses=live)
        return tokens_per_token
    if isinstance(schedule, System):
        if config.rollout.dynamic_sampling.enabled:
            display.note(
                "note: rollout.dynamic_sampling has no effect with mode=along, which makes the "
                "schedule before there are rewards; use mode=live"
            )
        display.phase("simulating the schedule")
        records: list[Record] = []
        run_system(schedule, seed, records.append)
        schedule = log_of(records)
    display.phase("generating and training")
    with suppress(Stopped):
        follow(
            schedule,
            policy,
            steps,
            train_steps=config.total_train_steps,
            tokens_per_token=tokens_per_token,
        )
    return tokens_per_token


def _tokens_per_token(config: CosimConfig, steps: Steps) -> int:
    """The cluster's mean response over the model's, of its first measurement."""
    return max(1, round(mean_response_tokens(config) / steps.measured[0].mean_tokens))


def _failure(config: CosimConfig, steps: Steps) -> dict[str, Any]:
    """The summary of a run that an error ended."""
    if not steps.records:
        return {"steps": 0, "seed": config.seed, "model": config.actor.path}
    return _summary(config, steps, config.tokens_per_token, status="failed")


def _summary(
    config: CosimConfig, steps: Steps, tokens_per_token: int, *, status: str
) -> dict[str, Any]:
    """The object of summary.json; its times are those of the simulated cluster."""
    log, measured = log_of(steps.records), steps.measured
    return build_summary(
        log,
        reward_before=measured[0].problem_means if measured else None,
        reward_after=measured[-1].problem_means if measured and not steps.stopped else None,
        wall_s=log.end_s,
        backend="co-simulated",
        more={
            "status": status,
            "alarms": steps.alarms.summary(),
            "seed": config.seed,
            "model": config.actor.path,
            "objective": "decoupled" if config.actor.use_decoupled_loss else "naive",
            "loss": config.actor.loss.get("name") or config.actor.loss_fn or "PPO",
            "cosim_mode": config.mode,
            "tokens_per_token": tokens_per_token,
            "simulated_hours": log.end_s / 3600,
        },
    )

"""An imported run: steps with named quantities, and what could not be read.

    rows of a log --reader--> Attempt, Attempt, ... --> ImportedRun --as_json--> one object

A quantity that the log does not have is absent (or None if the log has it as NaN); it is never 0
and never guessed. Names carry their units; `QUANTITIES` describes them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

Quantity: TypeAlias = "float | int | str | bool | None"

QUANTITIES: Final[Mapping[str, str]] = {
    "step_time_s": "seconds of a step, from one update to the next",
    "step_time_without_validation_s": "the same without validation and saving",
    "orchestrator_step_s": "prime-rl: seconds until a batch was collected",
    "trainer_step_s": "prime-rl: seconds of a step of the trainer",
    "generation_s": "seconds in which engines generated the samples of this step",
    "wait_for_batch_s": "seconds in which the trainer waited for samples",
    "rollout_fetch_s": "seconds until a batch was handed over, in an asynchronous run",
    "training_s": "forward and backward passes and optimizer of the policy",
    "critic_s": "the same of the critic",
    "old_logprob_s": "log-probs of the policy before the update",
    "reference_s": "log-probs of the reference policy",
    "logprobs_s": "log-probs of old policy and reference together",
    "reward_s": "seconds to compute rewards, beside generation",
    "advantage_s": "seconds to compute advantages",
    "weight_sync_s": "seconds until engines have new weights",
    "validation_s": "seconds of validation inside the step",
    "save_s": "seconds of saving inside the step",
    "response_length_mean": "sampled tokens of a response",
    "response_length_max": "the longest response, in tokens",
    "response_length_min": "the shortest response, in tokens",
    "prompt_length_mean": "tokens of a prompt",
    "prompt_length_max": "the longest prompt, in tokens",
    "sequence_length_mean": "tokens of prompt and response",
    "truncated_fraction": "share of responses cut at the maximum length",
    "reward_mean": "mean reward of the task, before penalties",
    "reward_std": "standard deviation of rewards",
    "zero_variance_fraction": "share of groups whose rewards are all equal",
    "clip_fraction": "share of tokens whose ratio PPO clips",
    "entropy": "entropy of the policy, per token",
    "reference_kl": "divergence from the reference policy",
    "drift_kl": "divergence of the current policy from the one that sampled",
    "drift_logp_abs_mean": "mean |log-prob of trainer - of engine| of sampled tokens",
    "drift_prob_abs_mean": "mean |probability of trainer - of engine| of sampled tokens",
    "behavior_weight_mean": "mean importance weight of the current over the sampling policy",
    "weight_deviation": "mean |w - 1| of the truncated importance weights of tokens",
    "lag_mean": "versions between sampling and training",
    "lag_max": "the largest lag, in versions",
    "weight_version_mean": "version that sampled, counted from the start of the run",
    "mixed_versions": "share of samples of several versions",
    "grad_norm": "norm of the gradient",
    "learning_rate": "learning rate of the policy",
    "tokens": "tokens of the step, prompts and responses",
    "response_tokens": "sampled tokens of the step",
    "tokens_per_turn": "sampled tokens of a turn",
    "turns_mean": "turns of a sample",
    "samples_per_step": "samples of a step",
    "samples": "samples of the batch, as printed",
    "trainable": "samples of the batch that are trained on",
    "optimizer_steps": "optimizer steps of a step",
    "tokens_per_s_per_gpu": "tokens a second and GPU, prompts and responses",
    "tokens_per_s_total": "tokens a second, of all GPUs",
    "mfu": "model FLOP/s utilization of the trainer, 0 to 1",
    "trainer_idle": "share of the step in which the trainer waits",
    "rollout_idle_printed": "idle share of the engines as the log has it",
    "gpus": "GPUs of the run",
    "trainer_gpus": "GPUs that train",
    "rollout_gpus": "GPUs that generate",
}
"""Meaning of each quantity of a step."""

STANDARD: Final = (
    "step_time_s",
    "generation_s",
    "wait_for_batch_s",
    "training_s",
    "weight_sync_s",
    "response_length_mean",
    "response_length_max",
    "truncated_fraction",
    "reward_mean",
    "clip_fraction",
    "entropy",
    "drift_kl",
    "lag_mean",
    "gpus",
)
"""Quantities that a report names as missing if the log has none of them."""

PER_RUN: Final = ("gpus", "rollout_gpus", "trainer_gpus", "samples_per_step")
"""Quantities of steps that also describe the run if they never change."""


@dataclass(slots=True, kw_only=True)
class Step:
    """A training step as its log describes it."""

    step: int
    """Number as logged; `ImportedRun.step_base` is that of a first step."""
    values: dict[str, Quantity] = field(default_factory=dict)
    """By name of `QUANTITIES`; None if the log has NaN, infinity or an empty cell."""
    other: dict[str, float] = field(default_factory=dict)
    """Numbers of keys that no table knows, by the log's name."""
    role: str = ""
    """Process that wrote it, if several write steps: orchestrator, trainer."""
    time_s: float | None = None
    """Time stamp of the line, in seconds; None if the line has none."""
    line: int = 0
    """Line of the file, from 1."""

    def number(self, name: str) -> float | None:
        """A quantity if it is known and a number."""
        value = self.values.get(name)
        return float(value) if isinstance(value, int | float) else None


@dataclass(slots=True, kw_only=True)
class Attempt:
    """Steps of one process: a run that was resumed has several attempts."""

    pid: int | None = None
    steps: list[Step] = field(default_factory=list)
    late: list[Step] = field(default_factory=list)
    """Steps that stand behind later ones."""


@dataclass(slots=True, kw_only=True)
class ImportedRun:
    """What a reader found in the logs of one run."""

    framework: str | None
    version: str | None = None
    mode: str | None = None
    """synchronous, one step off, fully async, asynchronous; None if the log does not tell."""
    step_base: int | None = None
    """Number of a run's first step; None if unknown."""
    numbered: bool = True
    """False if the log has no numbers of its steps: those of `Step` are their order."""
    settings: dict[str, Quantity] = field(default_factory=dict)
    """Of the run: model, gpus, prompts_per_step, samples_per_prompt, max_response, engine, ..."""
    attempts: list[Attempt] = field(default_factory=list)
    """In the order of the log; the last one counts."""
    validation: list[dict[str, Quantity]] = field(default_factory=list)
    derived: dict[str, str] = field(default_factory=dict)
    """How a quantity was computed, for those that the log does not print."""
    ambiguous: dict[str, str] = field(default_factory=dict)
    """Why a quantity was left out although a key looks like it."""
    unread: Counter[str] = field(default_factory=Counter)
    """What was lost, by kind: values that were cut, lines that could not be parsed."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Keys that no table knows, with the number of records that have them."""
    notes: list[str] = field(default_factory=list)
    """Conversions and choices, one sentence each."""
    refused: str | None = None
    """Why nothing was read."""

    @property
    def steps(self) -> list[Step]:
        """Steps of the last attempt."""
        return self.attempts[-1].steps if self.attempts else []

    @property
    def missing(self) -> list[str]:
        """Standard quantities that no step has."""
        known = {
            name for one in self.steps for name, value in one.values.items() if value is not None
        }
        known |= {name for name, value in self.settings.items() if value is not None}
        return [name for name in STANDARD if name not in known]


def as_json(run: ImportedRun) -> dict[str, Any]:
    """The run as an object of finite numbers, texts and nulls, for `--json`."""
    found: dict[str, Any] = {"framework": run.framework, "version": run.version}
    if run.refused is not None:
        return found | {
            "refused": run.refused,
            "steps": [],
            "unread": sum(run.unread.values()),
            "unread_by_kind": dict(run.unread),
        }
    found |= {"mode": run.mode, "step_base": run.step_base}
    found |= dict.fromkeys(run.missing)
    found |= {name: _finite(value) for name, value in run.settings.items()}
    found["steps"] = _step_list(run.steps)
    if not run.numbered:
        found["steps"] = [one | {"step": None} for one in found["steps"]]
    found["validation"] = [
        {name: _finite(value) for name, value in one.items()} for one in run.validation
    ]
    found["runs_or_attempts"] = len(run.attempts)
    if len(run.attempts) > 1 or any(one.late for one in run.attempts):
        found["attempts"] = [_attempt(one) for one in run.attempts]
    return found | {
        "missing": run.missing,
        "derived": run.derived,
        "ambiguous": run.ambiguous,
        "unread": sum(run.unread.values()),
        "unread_by_kind": dict(run.unread),
        "unknown_keys": sorted(run.unknown),
        "notes": run.notes,
        "refused": None,
    }


def _attempt(one: Attempt) -> dict[str, Any]:
    found: dict[str, Any] = {"pid": one.pid, "steps": _step_list(one.steps)}
    if one.late:
        late = _step_list(one.late)
        found |= {"late_line": late[0], "late_lines": late}
    return found


def _step_list(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Steps as objects that all have the same quantities, null where one has none."""
    columns = list(dict.fromkeys(name for one in steps for name in one.values))
    return [
        {
            "step": one.step,
            **({"role": one.role} if one.role else {}),
            **{
                name: _finite(one.values.get(name))
                for name in columns
                if not one.role or name in one.values
            },
            **({"time_s": one.time_s} if one.time_s is not None else {}),
            **(
                {"other": {k: v for k, v in one.other.items() if math.isfinite(v)}}
                if one.other
                else {}
            ),
        }
        for one in steps
    ]


def _finite(value: Quantity) -> Quantity:
    return None if isinstance(value, float) and not math.isfinite(value) else value

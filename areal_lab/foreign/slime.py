"""slime and Miles: Python dictionaries `perf N: {...}`, `rollout N:`, `step M:`; N is a rollout.

The rollout manager and the trainer both print `perf N`; `step M` counts optimizer steps.
Sources: slime/observability/{rollout_metrics,train_metric_utils}.py, slime/backends/megatron_utils;
Miles's rollout executor and trainer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from areal_lab.foreign.assemble import (
    Table,
    attempts,
    derive,
    derive_gpus,
    finish_run,
    note_once,
)
from areal_lab.foreign.dicts import DictExtractor, Header
from areal_lab.foreign.quantities import known, tidy, whole
from areal_lab.foreign.record import ImportedRun, Step
from areal_lab.foreign.scan import Extractor, Row, Rows
from areal_lab.foreign.text import Line

ANCHORS: Final = (
    b"{'rollout/",
    b"{'perf/",
    b"{'train/",
    b"{'eval/",
    b"{'multi_turn/",
    b"{'passrate/",
    b"perf/rollout_time':",
    b"  'perf/",  # a dictionary with a pair a line, as in a document
    b"  'rollout/",
    b"  'train/",
    b"rollout_batch_size ..",
    b"n_samples_per_prompt ..",
    b"rollout_max_response_len ..",
    b"rollout_num_gpus ..",
    b"rollout_num_gpus_per_engine ..",
    b"actor_num_nodes ..",
    b"actor_num_gpus_per_node ..",
)

KEYS: Final[Table] = {
    "perf/step_time": "step_time_s",
    "perf/total_train_time": "step_time_s",
    "perf/rollout_time": "generation_s",
    "perf/train_wait_time": "#wait",
    "perf/actor_train_time": "training_s",
    "perf/log_probs_time": "old_logprob_s",
    "perf/ref_log_probs_time": "reference_s",
    "perf/update_weights_time": "weight_sync_s",
    "rollout/response_len/mean": "response_length_mean",
    "rollout/response_lengths": "response_length_mean",
    "rollout/response_len/max": "response_length_max",
    "rollout/response_len/min": "response_length_min",
    "rollout/truncated_ratio": "truncated_fraction",
    "rollout/truncated": "truncated_fraction",
    "rollout/raw_reward": "reward_mean",
    "rollout/episode_raw_reward": "reward_mean",
    "rollout/total_lengths": "sequence_length_mean",
    "rollout/weight_version/mean": "weight_version_mean",
    "rollout/weight_version/mixed_version_ratio": "mixed_versions",
    "train/entropy_loss": "entropy",
    "train/pg_clipfrac": "clip_fraction",
    "train/kl_loss": "reference_kl",
    "train/grad_norm": "grad_norm",
    "train/train_rollout_logprob_abs_diff": "drift_logp_abs_mean",
    "train/tis_abs": "weight_deviation",
}
_EVALUATION: Final = re.compile(r"eval/(?!.*(?:-truncated_ratio|pass@?\d*|step)$)[\w.-]+")
_AVERAGED: Final = (
    "train/entropy_loss",
    "train/pg_clipfrac",
    "train/kl_loss",
    "train/grad_norm",
    "train/train_rollout_logprob_abs_diff",
    "train/tis_abs",
)
_HEADER: Final = re.compile(r"(?:^|[^\w/-])(perf|rollout|step|eval|passrate) (\d{1,9}): ?(?=\{|$)")
_MILES: Final = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \w+\]")
_ARGUMENT: Final = re.compile(r"(?:^|\s)([a-z][\w-]{2,50}) \.{3,} (\d{1,9})\s*$")
_ARGUMENTS: Final[Mapping[str, str]] = {
    "rollout_batch_size": "prompts_per_step",
    "n_samples_per_prompt": "samples_per_prompt",
    "rollout_max_response_len": "max_response",
    "rollout_num_gpus_per_engine": "engine_tp",
    "rollout_num_gpus": "rollout_gpus",
    "actor_num_nodes": "#nodes",
    "actor_num_gpus_per_node": "#each",
}


def extractor() -> Extractor:
    """Dictionaries, and Megatron's list of arguments."""
    return DictExtractor(_header, watch=_watch)


def _header(line: Line) -> Header | None:
    if (found := next(iter(reversed(list(_HEADER.finditer(line.text)))), None)) is None:
        return None
    start = found.end() if found.end() < len(line.text) else None
    return Header(kind=found[1], step=int(found[2]), start=start)


def _watch(line: Line, into: Rows) -> None:
    if (found := _ARGUMENT.search(line.text)) is not None and found[1] in _ARGUMENTS:
        value = whole(found[2])
        if value is not None and value > 0:
            into.marks[_ARGUMENTS[found[1]]] = value
    if line.process.startswith("RolloutExecutor") or _MILES.search(line.text[:60]):
        into.marks["miles"] += 1


def keyed(values: Mapping[str, Any]) -> int:
    """See `readers.Reader`."""
    return sum(
        key in KEYS or key.startswith(("multi_turn/", "rollout/response_len/")) for key in values
    )


def kind(values: Mapping[str, Any]) -> str:
    """See `readers.Reader`."""
    if any(key.startswith("eval/") for key in values):
        return "eval"
    return "step" if any(key.startswith("train/") for key in values) else "perf"


def assemble(found: Rows) -> ImportedRun:
    """See `readers.Reader`."""
    run = ImportedRun(framework="slime", step_base=0, unread=found.unread)
    keys = {key for row in found.rows for key in row.values}
    if found.marks["miles"] or any(
        key in ("rollout/num_training_samples", "rollout/episode_raw_reward")
        or key.startswith("rollout/weight_version/")
        for key in keys
    ):
        run.framework = "miles"
    _add_arguments(found, run)
    if _supervised(found):
        run.refused = (
            "The optimizer steps have a loss of no policy and the rollouts no rewards: supervised "
            "fine-tuning, not RL."
        )
        return run
    rows = _by_rollout(found, run)
    if not rows:
        run.refused = "The log has no rollout and no training step."
        return run
    waits = _overlaps(rows)
    run.mode = {True: "asynchronous", False: "synchronous", None: None}[waits]
    run.attempts = attempts(rows, KEYS, run, lambda row, step: _finish(row, step, run))
    for row in found.rows:
        if row.kind == "eval":
            run.validation += [
                {"step": row.step, "value": known(value), "name": key.removeprefix("eval/")}
                for key, value in row.values.items()
                if _EVALUATION.fullmatch(key) and known(value) is not None
            ]
    return finish_run(run)


def _supervised(found: Rows) -> bool:
    """True if all optimizer steps have a loss alone; `rollouts` are then examples as they are."""
    losses = [row.values for row in found.rows if row.kind == "step" and not row.cut]
    losses = [one for one in losses if "train/loss" in one]
    others = {key for row in found.rows for key in row.values}
    policy = ("train/pg_loss", "train/pg_clipfrac", "train/ppo_kl", "train/entropy_loss")
    rewards = ("rollout/raw_reward", "rollout/episode_raw_reward", "rollout/advantages")
    return bool(losses) and not others & {*policy, *rewards}


def _add_arguments(found: Rows, run: ImportedRun) -> None:
    """Settings from Megatron's list of arguments."""
    for name in _ARGUMENTS.values():
        if found.marks[name] and not name.startswith("#"):
            run.settings[name] = found.marks[name]
    if found.marks["#nodes"] and found.marks["#each"]:
        run.settings["trainer_gpus"] = found.marks["#nodes"] * found.marks["#each"]


def _by_rollout(found: Rows, run: ImportedRun) -> list[Row]:
    """Join the records of a rollout; optimizer steps between its samples and its times."""
    rows: list[Row] = []
    pending: list[Row] = []
    begun: set[int | None] = set()
    for row in found.rows:
        if row.kind == "step":
            if not pending:
                begun = {one.step for one in rows}
            pending.append(row)
        elif row.kind in ("perf", "rollout") and row.step is not None:
            trainer = "perf/step_time" in row.values or "perf/train_time" in row.values
            values = dict(row.values)
            if trainer and pending:
                # The samples of a rollout are told before its optimizer steps.
                if row.step in begun and _consecutive(pending):
                    values |= _averaged(pending)
                else:
                    run.unread["optimizer steps of an incomplete rollout"] += len(pending)
                pending = []
            rows.append(
                Row(
                    kind="perf",
                    step=row.step,
                    values=values,
                    process=row.process,
                    pid=row.pid,
                    time_s=row.time_s,
                    line=row.line,
                    source=row.source,
                )
            )
    if pending:
        run.unread["optimizer steps of an unfinished rollout"] += len(pending)
    return _first_names(rows)


def _first_names(rows: list[Row]) -> list[Row]:
    """Let both processes tell of a rollout before the next one begins."""
    held: dict[int, Row] = {}
    joined: list[Row] = []
    for row in rows:
        assert row.step is not None
        old = held.get(row.step)
        if old is not None and not any(
            old.values[key] != row.values[key] for key in old.values.keys() & row.values.keys()
        ):
            old.values |= row.values
            continue
        held[row.step] = row
        joined.append(row)
    return joined


def _consecutive(steps: Sequence[Row]) -> bool:
    numbers = [one.step or 0 for one in steps]
    return all(two == one + 1 for one, two in pairwise(numbers))


def _averaged(steps: Sequence[Row]) -> dict[str, Any]:
    values: dict[str, Any] = dict(steps[-1].values)
    for key in _AVERAGED:
        amounts = [known(one.values.get(key)) for one in steps]
        if all(one is not None for one in amounts):
            values[key] = sum(amounts) / len(amounts)  # type: ignore[arg-type]  # no None
        elif key in values:
            values[key] = None
    values["#steps"] = len(steps)
    return values


def _overlaps(rows: Sequence[Row]) -> bool | None:
    """True if the trainer waited for less than a rollout takes; None if the log does not tell."""
    told = [
        wait < rollout
        for row in rows
        if (wait := known(row.values.get("perf/train_wait_time"))) is not None
        and (rollout := known(row.values.get("perf/rollout_time"))) is not None
    ]
    return any(told) if told else None


def _finish(row: Row, step: Step, run: ImportedRun) -> None:
    values, own = step.values, row.values
    run.unknown.pop("#steps", None)
    step.other.pop("#steps", None)
    wait = values.pop("#wait", None)
    if run.mode == "asynchronous":
        values["wait_for_batch_s"] = wait
        if "generation_s" in values:
            values["rollout_fetch_s"] = values.pop("generation_s")
        note_once(
            run,
            "rollout_time is the time until a batch was handed over; it gives no speed "
            "of the engines.",
        )
    elif run.mode is None and values.pop("generation_s", None) is not None:
        run.ambiguous["generation_s"] = (
            "`perf/rollout_time` is generation in synchronous runs only, and the log has no "
            "`perf/train_wait_time` that would tell"
        )
    if (steps := whole(own.get("#steps"))) is not None:
        values["optimizer_steps"] = steps
        batch = whole(own.get("train/global_batch_size"))
        if batch is not None:
            derive(
                step,
                run,
                "samples_per_step",
                steps * batch,
                "optimizer steps x train/global_batch_size",
            )
    if values.get("samples_per_step") is None and (
        count := whole(own.get("rollout/num_training_samples"))
    ):
        values["samples_per_step"] = count
    total, mean = values.get("sequence_length_mean"), values.get("response_length_mean")
    if isinstance(total, float) and isinstance(mean, float) and total > mean:
        derive(
            step,
            run,
            "prompt_length_mean",
            tidy(total - mean),
            "rollout/total_lengths - rollout/response_lengths",
        )
    if run.mode == "synchronous" and isinstance(mean, float):
        _rollout_gpus(step, run, own, mean)
    if run.framework == "slime" and run.mode == "synchronous":
        values["warm_up"] = step.step == 0


def _rollout_gpus(step: Step, run: ImportedRun, own: Mapping[str, Any], mean: float) -> None:
    samples, seconds = step.values.get("samples_per_step"), known(own.get("perf/rollout_time"))
    rate = known(own.get("perf/tokens_per_gpu_per_sec"))
    if isinstance(samples, int) and seconds and rate:
        derive_gpus(
            step,
            run,
            samples * mean / seconds,
            rate,
            how="samples x response length / rollout_time / tokens_per_gpu_per_sec",
            name="rollout_gpus",
        )

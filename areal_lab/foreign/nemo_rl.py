"""NeMo-RL: blocks on the console, `===== Step 3/50 =====` and lines `• NAME: 31.00s (25.5%)`.

Sources: nemo_rl/algorithms/{grpo,grpo_sync,utils}.py, 0.3 to 0.7.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from areal_lab.foreign.assemble import (
    Table,
    attempts,
    derive,
    derive_gpus,
    finish_run,
)
from areal_lab.foreign.config_values import settings_of
from areal_lab.foreign.quantities import known
from areal_lab.foreign.record import ImportedRun, Step
from areal_lab.foreign.scan import Row, Rows
from areal_lab.foreign.text import Line

ANCHORS: Final = (
    b"= Step ",
    b"Training Results:",
    b"Performance Metrics:",
    b"Throughputs (per",
    b"batch of size",
    b"Timing:",
)

KEYS: Final[Table] = {
    "Total step time": "step_time_s",
    "generation": "generation_s",
    "exposed_generation": "wait_for_batch_s",
    "policy_training": "training_s",
    "policy_and_reference_logprobs": "logprobs_s",
    "weight_sync": "weight_sync_s",
    "prepare_for_generation/total": "weight_sync_s",
    "prepare_for_generation": "weight_sync_s",
    "reward_calculation": "reward_s",
    "advantage_calculation": "advantage_s",
    "checkpointing": "save_s",
    "Avg Reward": "reward_mean",
    "Mean Generation Length": "response_length_mean",
    "Generation KL Error": "drift_kl",
    "Avg Trajectory Age": "lag_mean",
    "GPU/E2E (Tokens/sec/gpu)": "tokens_per_s_per_gpu",
    "Group/E2E (Tokens/sec)": "tokens_per_s_total",
    "#batch": "samples_per_step",
}
FILES: Final[Table] = {
    "timing/train/total_step_time": "step_time_s",
    "timing/train/generation": "generation_s",
    "timing/train/exposed_generation": "wait_for_batch_s",
    "timing/train/policy_training": "training_s",
    "timing/train/policy_and_reference_logprobs": "logprobs_s",
    "timing/train/weight_sync": "weight_sync_s",
    "timing/train/prepare_for_generation/total": "weight_sync_s",
    "train/reward": "reward_mean",
    "train/mean_gen_tokens_per_sample": "response_length_mean",
    "train/gen_kl_error": "drift_kl",
    "train/approx_entropy": "entropy",
    "train/avg_trajectory_age": "lag_mean",
    "train/lr": "learning_rate",
    "performance/tokens_per_sec_per_gpu": "tokens_per_s_per_gpu",
    "performance/tokens_per_sec": "tokens_per_s_total",
}
_STEP: Final = re.compile(r"=\s*Step (\d{1,9})/(\d{1,9})\s*=")
_ITEM: Final = re.compile(
    r"^\W{0,8}(?P<name>[A-Za-z][\w./ ()-]{1,70}?):\s*"
    r"(?P<value>[-+]?\d[\d.]*(?:e[-+]?\d+)?|-?nan|-?inf)"
    r"(?P<unit>\s?(?:s|steps|%|tokens)(?=\s|$|\())?(?P<share>\s*\(\d[\d.]*%\))?\s*$"
)
_BATCH: Final = re.compile(r"Generating responses for batch of size (\d{1,9})\b")
_HEADING: Final = re.compile(
    r"(Training Results|Validation Results|Timing|Performance Metrics|"
    r"Validation Timing|Throughputs \(per GPU\)|Throughputs \(per Group\))"
    r":\s*$"
)
WANTED: Final = 60
"""Lines after a heading that may belong to its block."""


class Extractor:
    """Blocks of a step; lines of other processes may stand between theirs."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._step: int | None = None
        self._line: Line | None = None
        self._section = ""
        self._sections: set[str] = set()
        self._wants = 0

    def feed(self, line: Line, into: Rows) -> int:
        """See `scan.Extractor`."""
        text = line.text
        if (found := _STEP.search(text)) is not None:
            self._finish(into)
            self._step, self._line, self._section = int(found[1]), line, ""
            into.marks["max_steps"] = int(found[2])
            return 3
        if (found := _BATCH.search(text)) is not None:
            self._values.setdefault("#batch", found[1])
            return 0
        if (found := _HEADING.search(text)) is not None:
            if self._step is None and found[1] in self._sections:
                self._finish(into)  # a paste of blocks without their numbers
            self._line = self._line or line
            self._sections.add(found[1])
            self._section, self._wants = found[1], WANTED
            return self._wants
        self._wants -= 1
        if (found := _ITEM.match(text)) is not None and self._section:
            self._item(found, line, into)
        if self._wants <= 0:
            self._section = ""
        return max(self._wants, 0)

    def _item(self, found: re.Match[str], line: Line, into: Rows) -> None:
        name, value = found["name"].strip(), found["value"]
        if self._section.startswith("Validation"):
            if name == "Accuracy" and self._step is not None:
                into.add(
                    Row(
                        kind="validation",
                        step=self._step,
                        values={"value": value},
                        line=line.number,
                    )
                )
            return
        bare = found["unit"] is None
        decimals = len(value.partition(".")[2])
        short = self._section.startswith("Throughputs") and decimals < 2
        short |= self._section == "Training Results" and decimals < 4 and name != "Buffer Size"
        if bare and (self._section == "Timing" or not line.ended or short):
            into.unread["values that are cut or unreadable"] += 1
            return
        if self._section.startswith("Throughputs"):
            name = ("GPU/" if "GPU" in self._section else "Group/") + name
        if name in self._values:
            if self._values[name] != value:
                into.unread["blocks without the number of their step"] += 1
            return
        self._values[name] = value

    def _finish(self, into: Rows) -> None:
        values, step, line = self._values, self._step, self._line
        self._values, self._step, self._line = {}, None, None
        self._sections = set()
        if not values.keys() - {"#batch"} or line is None:
            return
        into.add(
            Row(
                kind="console",
                step=step,
                values=dict(values),
                process=line.process,
                pid=line.pid,
                time_s=line.time_s,
                line=line.number,
            )
        )

    def close(self, into: Rows) -> None:
        """See `scan.Extractor`."""
        self._finish(into)
        self._section = ""


def keyed(values: Mapping[str, Any]) -> int:
    """See `readers.Reader`."""
    return sum(key in FILES or key.startswith(("timing/train/", "performance/")) for key in values)


def assemble(found: Rows) -> ImportedRun:
    """See `readers.Reader`."""
    run = ImportedRun(framework="nemo-rl", step_base=1, unread=found.unread)
    for row in found.rows:
        if row.kind == "config":
            run.settings |= settings_of(row.values)
    rows = _numbered([row for row in found.rows if row.kind in ("console", "train")], run)
    if not rows:
        run.refused = "The log has no training step."
        return run
    keys = {key for row in rows for key in row.values}
    if not keys & {
        "Avg Reward",
        "Avg Filtered Reward",
        "generation",
        "exposed_generation",
        "train/reward",
        "timing/train/generation",
        "timing/train/exposed_generation",
    }:
        run.refused = "The steps have no rewards and no generation: supervised fine-tuning."
        return run
    if keys & {
        "exposed_generation",
        "Avg Trajectory Age",
        "Buffer Size",
        "weight_sync",
        "timing/train/exposed_generation",
    }:
        run.mode = "asynchronous"
    elif keys & {"generation", "timing/train/generation"}:
        run.mode = "synchronous"
    table = {**KEYS, **FILES}
    run.attempts = attempts(rows, table, run, lambda row, step: _finish(row, step, run))
    if found.marks["max_steps"]:
        run.settings.setdefault("max_steps", found.marks["max_steps"])
    run.validation = [
        {"step": row.step, "value": known(row.values["value"])}
        for row in found.rows
        if row.kind == "validation"
    ]
    return finish_run(run)


def _numbered(rows: Sequence[Row], run: ImportedRun) -> list[Row]:
    """Rows with a step; if none has one and all are of one run, numbered by order."""
    with_number = [row for row in rows if row.step is not None]
    if with_number or not rows:
        run.unread["blocks without the number of their step"] += len(rows) - len(with_number)
        return with_number
    for order, row in enumerate(rows, 1):
        row.step = order
    run.numbered, run.step_base = False, None
    run.notes.append(
        "The blocks have no number of their step. They are numbered from 1 in the log's order, "
        "also in alarms, pictures and the run folder; these need not be the numbers of the run."
    )
    return list(rows)


def _finish(row: Row, step: Step, run: ImportedRun) -> None:
    own, values = row.values, step.values
    run.unknown.pop("Training Worker Idle Time Ratio", None)
    step.other.pop("Training Worker Idle Time Ratio", None)
    wait, total = values.get("wait_for_batch_s"), values.get("step_time_s")
    if isinstance(wait, float) and isinstance(total, float) and total > 0:
        derive(
            step,
            run,
            "trainer_idle",
            wait / total,
            "exposed_generation / total step time, because the printed ratio is 0 for waits "
            "above 0.1 s",
        )
    derive_gpus(
        step,
        run,
        own.get("Group/E2E (Tokens/sec)"),
        own.get("GPU/E2E (Tokens/sec/gpu)"),
        how="E2E tokens per second per group / per GPU",
    )
    batch = values.get("samples_per_step")
    if isinstance(batch, float):
        values["samples_per_step"] = int(batch)

"""ROLL: a JSON object at the end of a line of the driver, every `logging_steps`; steps from 0.

Sources: roll/pipeline/rlvr/rlvr_pipeline.py, roll/pipeline/agentic/agentic_pipeline.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from areal_lab.foreign.assemble import (
    Table,
    attempts,
    derive_gpus,
    finish_run,
)
from areal_lab.foreign.dicts import DictExtractor, Header
from areal_lab.foreign.quantities import whole
from areal_lab.foreign.record import ImportedRun, Step
from areal_lab.foreign.scan import Extractor, Row, Rows
from areal_lab.foreign.text import Line

ANCHORS: Final = (b'"system/',)

KEYS: Final[Table] = {
    "time/step_total": "step_time_s",
    "time/step_generate": "generation_s",
    "time/step_rollout": "generation_s",
    "time/step_train": "training_s",
    "time/old_log_probs": "old_logprob_s",
    "time/step_old_log_probs_values": "old_logprob_s",
    "time/ref_log_probs_values": "reference_s",
    "time/step_ref_log_probs_values_reward": "reference_s",
    "time/step_model_update": "weight_sync_s",
    "time/step_adv": "advantage_s",
    "time/step_val": "validation_s",
    "time/val_step": "validation_s",
    "token/response_length/mean": "response_length_mean",
    "token/response_length/max": "response_length_max",
    "token/response_length/min": "response_length_min",
    "token/prompt_length/mean": "prompt_length_mean",
    "tokens/response_length/mean": "response_length_mean",
    "tokens/response_length/max": "response_length_max",
    "tokens/prompt_length/mean": "prompt_length_mean",
    "critic/score/mean": "reward_mean",
    "actor/clipfrac": "clip_fraction",
    "actor/ppo_ratio_clipfrac": "clip_fraction",
    "actor/entropy": "entropy",
    "critic/entropy/mean": "entropy",
    "actor/kl_loss": "reference_kl",
    "actor/grad_norm": "grad_norm",
    "actor/total_grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "system/tps": "tokens_per_s_total",
    "system/tps_gpu": "tokens_per_s_per_gpu",
}
_START: Final = re.compile(r'\{"[\w@./-]+": ')


def extractor() -> Extractor:
    """JSON objects with keys `system/...`."""
    return DictExtractor(_header, step_key="system/global_step")


def _header(line: Line) -> Header | None:
    if '"system/' not in line.text and "_pipeline.py" not in line.text:
        return None
    if (found := _START.search(line.text)) is None:
        return None
    kind = "agentic" if "agentic_pipeline" in line.text else "rlvr"
    return Header(kind=kind, step=None, start=found.start())


def keyed(values: Mapping[str, Any]) -> int:
    """See `readers.Reader`."""
    return (
        sum(key in KEYS or key.startswith("system/") for key in values)
        if any(key.startswith(("system/", "time/step_")) for key in values)
        else 0
    )


def assemble(found: Rows) -> ImportedRun:
    """See `readers.Reader`."""
    run = ImportedRun(framework="roll", step_base=0, unread=found.unread)
    rows = []
    for row in found.rows:
        if row.step is None:
            row.step = whole(row.values.get("system/global_step"))
        if row.step is not None and KEYS.keys() & row.values.keys():
            rows.append(row)
    if not rows:
        run.refused = "The log has no training step with metrics."
        return run
    rlvr = any(row.kind == "rlvr" for row in rows)
    known_kind = rlvr or any(row.kind == "agentic" for row in rows)
    totals = {
        row.step: row.values.pop("time/step_total")
        for row in rows
        if "time/step_total" in row.values
    }
    if rlvr and totals:
        for row in rows:
            if (following := totals.get((row.step or 0) + 1)) is not None:
                row.values["time/step_total"] = following
        run.notes.append(
            "`time/step_total` of a record is of the step before (RLVR pipeline): moved there."
        )
    elif totals and known_kind:
        for row in rows:
            if row.step in totals:
                row.values["time/step_total"] = totals[row.step]
    elif totals:
        run.ambiguous["step_time_s"] = (
            "`time/step_total` is of the step before in RLVR pipelines and of its own step in "
            "agentic ones, and the file does not tell which wrote it"
        )
    run.attempts = attempts(rows, KEYS, run, lambda row, step: _finish(row, step, run))
    return finish_run(run)


def _finish(row: Row, step: Step, run: ImportedRun) -> None:
    derive_gpus(
        step,
        run,
        row.values.get("system/tps"),
        row.values.get("system/tps_gpu"),
        how="system/tps / system/tps_gpu",
    )

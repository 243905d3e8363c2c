"""OpenRLHF: `Global step N: {...}` from 0.9 on; before, only the postfix of a bar.

Sources: openrlhf/trainer/{ppo_trainer,ppo_trainer_async}.py, 0.8 to 0.11.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from areal_lab.foreign.assemble import Table, attempts, finish_run
from areal_lab.foreign.dicts import DictExtractor, Header
from areal_lab.foreign.quantities import known
from areal_lab.foreign.record import ImportedRun, Step
from areal_lab.foreign.scan import Extractor, Row, Rows
from areal_lab.foreign.text import Line

ANCHORS: Final = (b"Global step ", b"act_loss=")

KEYS: Final[Table] = {
    "timing/step_total": "step_time_s",
    "timing/generation": "generation_s",
    "timing/ppo_train": "training_s",
    "timing/make_experience": "logprobs_s",
    "timing/broadcast": "weight_sync_s",
    "reward": "reward_mean",
    "rollout/reward_mean": "reward_mean",
    "response_length": "response_length_mean",
    "rollout/response_length_mean": "response_length_mean",
    "total_length": "sequence_length_mean",
    "truncated": "truncated_fraction",
    "rollout/truncated_rate": "truncated_fraction",
    "rollout/num_samples": "samples_per_step",
    "ppo_clip_ratio": "clip_fraction",
    "vllm_kl": "drift_kl",
    "kl": "reference_kl",
    "entropy_loss": "entropy",
    "entropy": "entropy",
    "actor_lr": "learning_rate",
    "actor_grad_norm": "grad_norm",
}
_HEADER: Final = re.compile(r"Global step (\d{1,9}): ?(?=\{|$)")


def extractor() -> Extractor:
    """Dictionaries behind `Global step N:`."""
    return DictExtractor(_header, watch=_watch)


def _watch(line: Line, into: Rows) -> None:
    if "act_loss=" in line.text and not into.marks["bars"]:
        into.marks["bars"] = 1
        into.add(Row(kind="bar", step=None, values={"act_loss": None}, line=line.number))


def _header(line: Line) -> Header | None:
    if (found := _HEADER.search(line.text)) is None:
        return None
    kind = "train" if "✨" in line.text else "plain"
    return Header(
        kind=kind, step=int(found[1]), start=found.end() if found.end() < len(line.text) else None
    )


def bare(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys without the prefix of wandb."""
    return {key.removeprefix("train/"): value for key, value in values.items()}


def keyed(values: Mapping[str, Any]) -> int:
    """See `readers.Reader`."""
    marks = (
        "vllm_kl",
        "ppo_clip_ratio",
        "timing/ppo_train",
        "timing/broadcast",
        "policy_loss",
        "timing/make_experience",
        "timing/step_total",
        "rollout/truncated_rate",
    )
    return sum(key in marks for key in bare(values))


def assemble(found: Rows) -> ImportedRun:
    """See `readers.Reader`."""
    run = ImportedRun(framework="openrlhf", step_base=1, unread=found.unread)
    rows = [row for row in found.rows if row.step is not None]
    for row in rows:
        row.values = bare(row.values)
    rows = [row for row in rows if KEYS.keys() & row.values.keys()]
    if not rows and found.marks["bars"]:
        run.refused = (
            "The log has progress bars only, which show the last micro-batch of a step; OpenRLHF "
            "prints the metrics of steps from 0.9 on."
        )
    elif not rows:
        run.refused = "The log has no training step with metrics."
    if not rows:
        return run
    plain = sum(row.kind == "plain" for row in rows)
    run.mode = "asynchronous" if plain == len(rows) else None
    run.attempts = attempts(rows, KEYS, run, lambda row, step: _finish(row, step, run))
    return finish_run(run)


def _finish(row: Row, step: Step, run: ImportedRun) -> None:
    parts = [
        known(value)
        for key, value in row.values.items()
        if key.startswith("timing/") and key != "timing/step_total"
    ]
    total = step.values.get("step_time_s")
    if not isinstance(total, float) or not parts or None in parts:
        return
    if abs(sum(one for one in parts if one is not None) - total) < 1e-6 * max(1.0, total):
        run.mode = run.mode or "synchronous"

"""SkyRL: loguru's `Step N:` and a printed dictionary over many lines, with numbers as text.

Sources: skyrl/train/{trainer,fully_async_trainer}.py, skyrl/train/utils/tracking.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from areal_lab.foreign.assemble import Table, attempts, finish_run, note_once
from areal_lab.foreign.config_values import settings_of
from areal_lab.foreign.dicts import DictExtractor, Header
from areal_lab.foreign.quantities import known
from areal_lab.foreign.record import ImportedRun, Step
from areal_lab.foreign.scan import Extractor, Row, Rows
from areal_lab.foreign.text import Line

ANCHORS: Final = (
    b"Step ",
    b"{'async/",
    b"{'generate/",
    b"{'policy/",
    b"{'reward/",
    b"{'timing/",
    b"{'critic/",
    b"{'loss/",
)

KEYS: Final[Table] = {
    "timing/step": "step_time_s",
    "timing/generate": "generation_s",
    "timing/wait_for_generation_buffer": "wait_for_batch_s",
    "timing/policy_train": "training_s",
    "timing/critic_train": "critic_s",
    "timing/fwd_logprobs_values_reward": "logprobs_s",
    "timing/sync_weights": "weight_sync_s",
    "timing/sync_weights_to_inference_engines": "weight_sync_s",
    "timing/eval": "validation_s",
    "timing/save_checkpoints": "save_s",
    "generate/avg_assistant_tokens": "response_length_mean",  # without the output of tools
    "generate/max_assistant_tokens": "response_length_max",
    "generate/min_assistant_tokens": "response_length_min",
    "generate/avg_num_tokens": "response_length_mean",
    "generate/max_num_tokens": "response_length_max",
    "generate/min_num_tokens": "response_length_min",
    "reward/avg_raw_reward": "reward_mean",
    "policy/clip_ratio": "clip_fraction",
    "policy/ppo_clip_ratio": "clip_fraction",
    "policy/policy_entropy": "entropy",
    "policy/policy_kl": "reference_kl",
    "policy/policy_lr": "learning_rate",
    "policy/raw_grad_norm": "grad_norm",
    "policy/rollout_train_logprobs_abs_diff_mean": "drift_logp_abs_mean",
    "async/staleness_mean": "lag_mean",
    "async/staleness_max": "lag_max",
}
_HEADER: Final = re.compile(r"(?:^|[\s-])Step (\d{1,9}): ?$")
_DICT: Final = re.compile(r"^\s*\{'(?:async|generate|policy|reward|timing|critic|loss|trainer)/")


def extractor() -> Extractor:
    """Dictionaries behind `Step N:`, or by their keys."""
    return DictExtractor(_header, step_key="trainer/global_step", patience=12)


def _header(line: Line) -> Header | None:
    if (found := _HEADER.search(line.text)) is not None:
        return Header(kind="train", step=int(found[1]), start=None)
    found = re.search(r"(?:^|[\s-])Step (\d{1,9}): ?(?=\{')", line.text)
    if found is not None:
        return Header(kind="train", step=int(found[1]), start=found.end())
    return None


def keyed(values: Mapping[str, Any]) -> int:
    """See `readers.Reader`."""
    return sum(key in KEYS for key in values)


def assemble(found: Rows) -> ImportedRun:
    """See `readers.Reader`."""
    run = ImportedRun(framework="skyrl", step_base=1, unread=found.unread)
    for row in found.rows:
        if row.kind == "config":
            run.settings |= settings_of(row.values)
    rows = []
    for row in found.rows:
        own = known(row.values.get("trainer/global_step"))
        step = int(own) if own is not None else row.step
        if step is not None and row.kind != "config" and KEYS.keys() & row.values.keys():
            row.step = step
            row.values = {
                k: v
                for k, v in row.values.items()
                if k not in ("trainer/global_step", "trainer/epoch")
            }
            rows.append(row)
    if not rows:
        run.refused = "The log has no training step with metrics."
        return run
    keys = {key for row in rows for key in row.values}
    asynchronous = any(key.startswith("async/") for key in keys) or (
        "timing/wait_for_generation_buffer" in keys
    )
    run.mode = "asynchronous" if asynchronous else "synchronous"
    run.attempts = attempts(rows, KEYS, run, lambda row, step: _finish(row, step, run))
    run.validation += [
        {"step": row.step, "value": known(value), "name": key}
        for row in rows
        for key, value in row.values.items()
        if key.startswith("eval/") and key.endswith(("/avg_score", "/pass_at_1"))
    ]
    return finish_run(run)


def _finish(row: Row, step: Step, run: ImportedRun) -> None:
    own = row.values
    joined = "timing/train_critic_and_policy"
    if "training_s" not in step.values and joined in own and "timing/critic_train" not in own:
        step.values["training_s"] = known(own[joined])
        note_once(
            run,
            "training_s is `train_critic_and_policy`, because `policy_train` is not in the log.",
        )

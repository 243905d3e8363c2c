"""prime-rl: `Step N | ...` of two processes, orchestrator and trainer, and their metric files.

    to 0.5    Step 5 | Time: 41.07s | Reward: 0.2812 | ...                    steps from 0
    from 0.6  Step 2 |  58.4s | Reward 0.4219 | Trainable 201/256 (78.5%) |   from 1 since 0.7

The orchestrator's step is the time until a batch was collected; the trainer's contains its wait.
Sources: prime_rl/orchestrator/orchestrator.py, prime_rl/trainer/rl/train.py, 0.3 to 0.8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from areal_lab.foreign.assemble import (
    Table,
    attempts,
    derive_gpus,
    finish_run,
    note_once,
)
from areal_lab.foreign.quantities import UNREAD, known, number, seconds, whole
from areal_lab.foreign.record import Attempt, ImportedRun, Step
from areal_lab.foreign.scan import Row, Rows
from areal_lab.foreign.text import Line, stamp

ANCHORS: Final = (b"Step ",)

CONSOLE: Final[Table] = {
    "#seconds": "step_time_s",
    "Reward": "reward_mean",
    "Entropy": "entropy",
    "Mismatch KL": "drift_kl",
    "Throughput": "tokens_per_s_total",
    "Seq. Length": "sequence_length_mean",
    "Max. Off-Policy Level": "lag_max",
    "Max Off-Policy": "lag_max",
    "Truncation": ("truncated_fraction", 0.01),
    "MFU": ("mfu", 0.01),
    "Grad. Norm": "grad_norm",
    "LR": "learning_rate",
    "Turns": "turns_mean",
    "#trainable": "trainable",
    "#samples": "samples",
    "#resolution": "step_time_resolution_s",
}
_FIXED: Final = {"Reward": 4, "Loss": 4, "Entropy": 4, "Mismatch KL": 4, "Grad. Norm": 4}
"""Decimals of a value, so that one with fewer at the end of a line was cut."""
_WITH_UNIT: Final = ("Throughput", "Seq. Length", "MFU", "Truncation", "Peak Mem.")
"""Values with a unit, so that one without it at the end of a line was cut."""
_LISTED: Final = re.compile(r"(?:^|(?<=\s))\[(?=['\"]\S)|(?<=\S)['\"], ['\"]")
_UNITS: Final = re.compile(r"\s*(?:tokens/s(?:ample)?|%|GiB|s)\s*(?:\(.*)?$")
_STEP: Final = re.compile(r"(?<![\w(] )(?<!\()Step (\d{1,9})\s*\|\s*(.*)")
_STEP_ANY: Final = re.compile(r"Step (\d{1,9})\s*\|\s*(.*)")
_EVALUATED: Final = re.compile(
    r"Evaluated (\S{1,80}) \(Step (\d{1,9})\) \| Policy v(\d{1,9}) \|(.*)"
)
_FIELD: Final = re.compile(r"([A-Z][A-Za-z.\- ]{0,30}?):?\s*([-+]?\.?\d.*|-?(?:nan|inf)\b.*)$")
_SHARE: Final = re.compile(r"(\d{1,12})/(\d{1,12})")

FILES: Final[Table] = {
    "orchestrator_step_s": "orchestrator_step_s",
    "trainer_step_s": "trainer_step_s",
    "time/wait_for_batch": "wait_for_batch_s",
    "time/forward_backward": "training_s",
    "time/broadcast_weights": "weight_sync_s",
    "train/agg/effective/reward/mean": "reward_mean",
    "train/all/reward/mean": "reward_mean",
    "reward/mean": "reward_mean",
    "reward/all/mean": "reward_mean",
    "train/agg/effective/is_truncated/mean": "truncated_fraction",
    "is_truncated/mean": "truncated_fraction",
    "is_truncated/all/mean": "truncated_fraction",
    "completion_len/mean": "response_length_mean",
    "completion_len/all/mean": "response_length_mean",
    "completion_len/max": "response_length_max",
    "completion_len/all/max": "response_length_max",
    "prompt_len/mean": "prompt_length_mean",
    "prompt_len/all/mean": "prompt_length_mean",
    "seq_len/mean": "sequence_length_mean",
    "seq_len/all/mean": "sequence_length_mean",
    "train/agg/effective/num_output_tokens/mean": "response_length_mean",
    "train/agg/effective/num_output_tokens/max": "response_length_max",
    "train/agg/effective/num_turns/mean": "turns_mean",
    "progress/output_tokens": "response_tokens",
    "off_policy/mean": "lag_mean",
    "off_policy/max": "lag_max",
    "batch/off_policy_level/mean": "lag_mean",
    "batch/off_policy_level/max": "lag_max",
    "mismatch_kl/all/mean": "drift_kl",
    "mismatch_kl/mean": "drift_kl",
    "entropy/all/mean": "entropy",
    "entropy/mean": "entropy",
    "optim/grad_norm": "grad_norm",
    "optim/lr": "learning_rate",
}
_TRAINER: Final = (
    "time/wait_for_batch",
    "time/forward_backward",
    "time/load_data",
    "time/broadcast_weights",
)
_ORCHESTRATOR: Final = (
    "progress/",
    "train/",
    "off_policy/",
    "time/wait_for_policy",
    "time/wait_for_ckpt",
    "time/generate_completions",
    "time/update_weights",
    "batch/",
)


class Extractor:
    """Lines `Step N | ...` and evaluations."""

    def __init__(self) -> None:
        self._open: tuple[Line, str] | None = None

    def feed(self, line: Line, into: Rows) -> int:
        """See `scan.Extractor`."""
        wants, shown = 0, _LISTED.split(line.text)  # a failed test prints a list of lines
        for index, text in enumerate(shown):
            last = index == len(shown) - 1
            one = line if len(shown) == 1 else replace(line, text=text, time_s=stamp(text))
            wants = self._feed(one if last else replace(one, ended=True), into)
        return wants

    def _feed(self, line: Line, into: Rows) -> int:
        text = line.text
        if (found := _EVALUATED.search(text)) is not None:
            self.close(into)
            fields, _ = _fields(found[4], ended=line.ended)
            if "Reward" in fields:
                into.add(
                    Row(
                        kind="validation",
                        step=int(found[2]),
                        line=line.number,
                        values={"policy": found[3], "value": fields["Reward"], "name": found[1]},
                    )
                )
            return 0
        if _STEP_ANY.search(text) is not None and "Validation |" not in text:
            self.close(into)
            self._open = line, text[text.rfind("Step ", 0, text.find("|")) :]
            return 2
        if self._open is not None:
            begun, before = self._open
            if _rest(line, begun, before):
                self._open = replace(begun, ended=line.ended), before + text
            self.close(into)
        return 0

    def close(self, into: Rows) -> None:
        """See `scan.Extractor`."""
        if self._open is None:
            return
        line, text = self._open
        self._open = None
        found = _STEP_ANY.match(text)
        if found is None:
            return
        rest = found[2].split("\\n")[0].split('"')[0]  # inside a JSON log line
        fields, lost = _fields(rest, ended=line.ended)
        into.unread["values that are cut or unreadable"] += lost
        role = "orchestrator" if "Reward" in fields else "trainer" if "Loss" in fields else ""
        if not role:
            into.unread["records of an unknown process"] += 1
            return
        old = "Time:" in rest
        into.marks["old" if old else "new"] += 1
        into.add(
            Row(
                kind=role,
                step=int(found[1]),
                values=fields,
                process=line.process,
                pid=line.pid,
                time_s=line.time_s,
                line=line.number,
            )
        )


def _rest(line: Line, begun: Line, before: str) -> bool:
    """True if a line without prefix and time is the rest of a broken record."""
    text = line.text.strip()
    if not text or line.time_s is not None or not line.may_continue(begun) or "╰" in text:
        return False
    return re.match(r"[\w.,:%/() \-]{0,40}\|", text) is not None or (
        before.rstrip().endswith(("|", ":"))
        and re.fullmatch(r"[\w.%/() \-]{1,60}", text) is not None
    )


def _fields(text: str, *, ended: bool) -> tuple[dict[str, Any], int]:
    """Named values between bars; a duration without a name is the step's time."""
    values: dict[str, Any] = {}
    lost = 0
    pieces = [one.strip() for one in text.split("|")]
    for index, piece in enumerate(pieces):
        last = index == len(pieces) - 1
        if not piece:
            continue
        timed = seconds(piece.removeprefix("Time:").strip())
        if timed is not None and (piece.startswith("Time:") or piece[0].isdigit()):
            values["#seconds"], unit = repr(timed[0]), timed[1]
            if unit >= 1:
                values["#resolution"] = repr(unit)
            continue
        found = _FIELD.fullmatch(piece)
        if found is None:
            lost += 1
            continue
        name, amount = found[1].strip(), found[2].strip()
        if name == "Trainable" and (share := _SHARE.match(amount)) is not None:
            if last and not amount.endswith(")"):
                lost += 1
                continue
            values["#trainable"], values["#samples"] = share[1], share[2]
            continue
        bare = _UNITS.sub("", amount)
        whole_piece = bare != amount
        cut = last and not whole_piece and (not ended or _shorter(name, bare))
        if cut or number(bare) is UNREAD:
            lost += 1
        else:
            values[name] = bare
    return values, lost


def _shorter(name: str, text: str) -> bool:
    """True if a value has fewer digits than prime-rl prints, or lacks its unit."""
    if not text[-1:].isdigit():
        return text.endswith(".")
    if name == "LR":
        return re.search(r"e[-+]\d\d$", text) is None
    return name in _WITH_UNIT or len(text.partition(".")[2]) < _FIXED.get(name, 0)


def keyed(values: Mapping[str, Any]) -> int:
    """See `readers.Reader`."""
    return sum(
        key in FILES
        or key.startswith(("progress/", "time/wait_for_", "off_policy/", "perf/throughput_per_gpu"))
        for key in values
    )


def assemble(found: Rows) -> ImportedRun:
    """See `readers.Reader`."""
    run = ImportedRun(framework="prime-rl", unread=found.unread)
    files = [row for row in found.rows if row.kind == "train" and row.step is not None]
    if files:
        return _from_files(files, run)
    if not any(
        row.kind == "orchestrator" or "Entropy" in row.values or "Mismatch KL" in row.values
        for row in found.rows
    ):
        run.refused = "The steps have a loss and no rewards or entropy: supervised fine-tuning."
        if not any(row.kind == "trainer" for row in found.rows):
            run.refused = "The log has evaluations only, and no training step."
        return run
    old = found.marks["old"] >= found.marks["new"]
    run.version = "0.5 or older" if old else "0.6 or newer"
    steps = [row.step for row in found.rows if row.kind in ("orchestrator", "trainer")]
    run.step_base = 0 if old or 0 in steps else 1 if 1 in steps else None
    roles = {
        role: attempts(
            [row for row in found.rows if row.kind == role],
            CONSOLE,
            run,
            lambda _row, step: _whole_counts(step),
            role=role,
        )
        for role in ("orchestrator", "trainer")
    }
    count = max(len(one) for one in roles.values())
    for index in range(count):
        chosen = [one[index] for one in roles.values() if index < len(one)]
        run.attempts.append(
            Attempt(
                steps=[step for one in chosen for step in one.steps],
                late=[step for one in chosen for step in one.late],
            )
        )
    run.validation = [
        {
            "step": row.step,
            "policy": whole(row.values["policy"]),
            "value": known(row.values["value"]),
            "name": row.values["name"],
        }
        for row in found.rows
        if row.kind == "validation"
    ]
    run.notes.append(
        "A step of the orchestrator is the time until a batch was collected; a step of "
        "the trainer contains its wait for the batch."
    )
    return finish_run(run)


def _whole_counts(step: Step) -> None:
    for name in ("trainable", "samples", "lag_max"):
        value = step.values.get(name)
        if isinstance(value, float) and value == int(value):
            step.values[name] = int(value)


def _of_the_only_agent(values: dict[str, Any]) -> None:
    """Give reward and truncation of a run's only agent the names without the agent's."""
    for name in ("reward/mean", "is_truncated/mean"):
        found = [key for key in values if re.fullmatch(rf"train/agg/effective/[^/]+/{name}", key)]
        if len(found) == 1:
            values.setdefault(f"train/agg/effective/{name}", values.pop(found[0]))


def _from_files(rows: Sequence[Row], run: ImportedRun) -> ImportedRun:
    """Steps of `metrics.jsonl`, of one process or both."""
    for row in rows:
        _of_the_only_agent(row.values)
        time = row.values.pop("time/step", None)
        if time is None:
            continue
        trains = any(key in row.values for key in _TRAINER)
        collects = any(key.startswith(_ORCHESTRATOR) for key in row.values)
        if trains != collects:
            row.values["trainer_step_s" if trains else "orchestrator_step_s"] = time
        else:
            run.ambiguous["step_time_s"] = (
                "`time/step` is of the orchestrator or of the trainer, and its record does not tell"
            )
    run.step_base = 0 if min(row.step or 0 for row in rows) == 0 else 1
    run.attempts = attempts(rows, FILES, run, lambda row, step: _gpus(row, step, run))
    note_once(
        run,
        "`time/step` of a record with time/wait_for_batch is the trainer's, else the "
        "orchestrator's.",
    )
    return finish_run(run)


def _gpus(row: Row, step: Step, run: ImportedRun) -> None:
    own = row.values
    derive_gpus(
        step,
        run,
        own.get("perf/throughput"),
        own.get("perf/throughput_per_gpu"),
        how="perf/throughput / perf/throughput_per_gpu",
        name="trainer_gpus",
    )

"""Megatron-RL: `iteration 5/ 200 | ... elapsed time per iteration (ms): 98200.5 |`, and timers.

Also ms-swift's Megatron variant, whose line has `reward:`. Times are milliseconds.
Sources: megatron/training/training.py, megatron/rl/rl_utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from areal_lab.foreign.assemble import Table, attempts, derive_gpus, finish_run
from areal_lab.foreign.quantities import UNREAD, number, tidy
from areal_lab.foreign.record import ImportedRun, Step
from areal_lab.foreign.scan import Row, Rows
from areal_lab.foreign.text import Line

ANCHORS: Final = (b"elapsed time per iteration (ms)", b"time across ranks (ms)")

KEYS: Final[Table] = {
    "elapsed time per iteration (ms)": ("step_time_s", 1e-3),
    "timer rl/rollout-collection": ("generation_s", 1e-3),
    "timer rl/compute-logprobs": ("logprobs_s", 1e-3),
    "timer forward-backward": ("training_s", 1e-3),
    "global batch size": "samples_per_step",
    "toks/s": "tokens_per_s_total",
    "toks/s/gpu": "tokens_per_s_per_gpu",
    "reward": "reward_mean",
    "completions/mean_length": "response_length_mean",
    "completions/max_length": "response_length_max",
    "completions/min_length": "response_length_min",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "zero_variance_fraction",
    "completions/clipped_ratio": "truncated_fraction",
    "clip_ratio/region_mean": "clip_fraction",
    "entropy": "entropy",
    "entropy/mean": "entropy",
    "kl": "reference_kl",
    "grad norm": "grad_norm",
    "learning rate": "learning_rate",
}
FILES: Final[Table] = {
    "mean_reward": "reward_mean",
    "mean_turn_length": "tokens_per_turn",
}
_ITERATION: Final = re.compile(r"iteration\s+(\d{1,9})/\s*(\d{1,9}) \|(.*)")
_TIMER: Final = re.compile(
    r"^\s*([\w/.-]{3,60}) \.*:?\s*\(?(?:\.*: )?\(?([\d.]{1,20}), ([\d.]{1,20})\)\s*$"
)
_PLAIN_TIMER: Final = re.compile(r"^\s*([\w/.-]{3,60}) \.{2,}: ([\d.]{1,20})\s*$")
WANTED: Final = 80


class Extractor:
    """Iteration lines, and the timers below them."""

    def __init__(self) -> None:
        self._row: Row | None = None
        self._timers = False

    def feed(self, line: Line, into: Rows) -> int:
        """See `scan.Extractor`."""
        text = line.text
        if (found := _ITERATION.search(text)) is not None:
            self.close(into)
            values, lost = _pairs(found[3])
            into.unread["values that are cut or unreadable"] += lost
            into.marks["max_steps"] = int(found[2])
            self._row = Row(
                kind="console",
                step=int(found[1]),
                values=values,
                process=line.process,
                pid=line.pid,
                time_s=line.time_s,
                line=line.number,
            )
            self._timers = False
            return 3
        if "time across ranks (ms)" in text:
            self._timers = True
            return WANTED
        if self._timers and self._row is not None:
            found = _TIMER.match(text) or _PLAIN_TIMER.match(text)
            if found is not None:
                if line.ended or found.lastindex == 3:
                    self._row.values[f"timer {found[1]}"] = found[found.lastindex or 2]
                return WANTED
            return 8
        return 0

    def close(self, into: Rows) -> None:
        """See `scan.Extractor`."""
        if self._row is not None and self._row.values:
            into.add(self._row)
        self._row, self._timers = None, False


def _pairs(text: str) -> tuple[dict[str, str], int]:
    values: dict[str, str] = {}
    lost = 0
    pieces = text.split("|")
    for index, piece in enumerate(pieces):
        if not piece.strip():
            continue
        key, colon, value = piece.rpartition(":")
        # A bar ends each pair, so that behind the last one nothing is left.
        if not colon or number(value) is UNREAD or index == len(pieces) - 1:
            lost += 1
        else:
            values[key.strip()] = value.strip()
    return values, lost


def keyed(values: Mapping[str, Any]) -> int:
    """See `readers.Reader`."""
    return sum(key in FILES or key.startswith(("rl/", "policy_staleness")) for key in values)


def assemble(found: Rows) -> ImportedRun:
    """See `readers.Reader`."""
    run = ImportedRun(framework="megatron-rl", step_base=1, unread=found.unread)
    rows = [row for row in found.rows if row.step is not None]
    keys = {key for row in rows for key in row.values}
    if "reward" in keys:
        run.framework = "ms-swift"
    elif not keys & {"toks/s/gpu", "toks/s", *FILES} and not any(
        key.startswith(("timer rl/", "rl/")) for key in keys
    ):
        run.refused = (
            "The iterations have no rollouts, rewards or tokens per second of RL: pretraining or "
            "supervised fine-tuning."
        )
        return run
    run.attempts = attempts(rows, {**KEYS, **FILES}, run, lambda row, step: _finish(row, step, run))
    run.notes.append("Times are converted from milliseconds; they are means over log_interval.")
    if found.marks["max_steps"]:
        run.settings.setdefault("max_steps", found.marks["max_steps"])
    return finish_run(run)


def _finish(row: Row, step: Step, run: ImportedRun) -> None:
    own = row.values
    derive_gpus(step, run, own.get("toks/s"), own.get("toks/s/gpu"), how="toks/s / toks/s/gpu")
    samples = step.values.get("samples_per_step")
    if isinstance(samples, float):
        step.values["samples_per_step"] = tidy(samples)

"""AReaL: `Train step 3/1200 done.` and a table of pairs, four a row; times are parts only.

Sources: areal/utils/{stats_logger,printing}.py; realhf's master worker for 0.3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from areal_lab.foreign.assemble import Table, attempts, derive, finish_run
from areal_lab.foreign.quantities import known, tidy
from areal_lab.foreign.record import ImportedRun, Step
from areal_lab.foreign.scan import Row, Rows
from areal_lab.foreign.text import Line

ANCHORS: Final = (b"Train step ", b"timeperf/")

KEYS: Final[Table] = {
    "timeperf/rollout": "wait_for_batch_s",
    "timeperf/train_step": "training_s",
    "timeperf/critic_train_step": "critic_s",
    "timeperf/recompute_logp": "old_logprob_s",
    "timeperf/ref_logp": "reference_s",
    "timeperf/compute_advantage": "advantage_s",
    "timeperf/compute_advantages": "advantage_s",
    "timeperf/update_weights": "weight_sync_s",
    "timeperf/eval": "validation_s",
    "timeperf/save": "save_s",
    "actor/task_reward/avg": "reward_mean",
    "actor/seq_len/avg": "sequence_length_mean",
    "actor/prompt_len/avg": "prompt_length_mean",
    "actor/no_eos_ratios/avg": "truncated_fraction",
    "actor/n_seqs": "samples_per_step",
    "actor/update/clip_ratio/avg": "clip_fraction",
    "actor/update/entropy/avg": "entropy",
    "actor/update/behave_imp_weight/avg": "behavior_weight_mean",
    "actor/update/behave_approx_kl/avg": "drift_kl",
    "actor/update/grad_norm": "grad_norm",
    "actor/update/grad_norm/avg": "grad_norm",
    "actor/update/lr": "learning_rate",
    "actor/update/lr/avg": "learning_rate",
    "version_stats/sample_staleness_theta_avg": "lag_mean",
    "version_stats/sample_staleness_theta_max": "lag_max",
}
_DONE: Final = re.compile(
    r"Epoch (\d{1,9})/(\d{1,9}) Step (\d{1,9})/(\d{1,9}) Train step (\d{1,9})/(\d{1,9}) done"
)
_CELL: Final = re.compile(
    r"(?P<key>[A-Za-z_][\w@.\-]*(?:/[\w@.\- ]+?)*)\s*[│|]\s*"
    r"(?P<value>[-+]?\d[\d.]*(?:e[-+]?\d+)?|-?nan|-?inf)\s*(?P<closed>[│|])",
    re.IGNORECASE,
)
_ROW: Final = re.compile(r"^[^│|]{0,12}[│|]")
_ACTOR: Final = re.compile(r"^(?:[a-z]+_)?actor/")
_STATS: Final = re.compile(r"Stats \((\d{1,4})/(\d{1,4})\):")
_PARTS: Final = (
    "rollout",
    "critic_values",
    "recompute_logp",
    "ref_logp",
    "teacher_logp",
    "compute_advantage",
    "compute_advantages",
    "train_step",
    "critic_train_step",
    "update_weights",
    "save",
    "checkpoint_for_recover",
    "eval",
    "clear_batches",
)
"""Parts of a step that follow each other; others are inside of these."""
WANTED: Final = 300


class Extractor:
    """The line that ends a step, and the tables below it: `Stats (1/2):` and so on."""

    def __init__(self) -> None:
        self._line: Line | None = None
        self._step: int | None = None
        self._tables: list[dict[str, str]] = []
        self._values: dict[str, str] = {}
        self._announced = 1

    def feed(self, line: Line, into: Rows) -> int:
        """See `scan.Extractor`."""
        text = line.text
        if (found := _DONE.search(text)) is not None:
            self.close(into)
            self._line, self._step, self._announced = line, int(found[5]), 1
            into.marks["max_steps"] = int(found[6])
            return WANTED
        if self._step is None:
            if _CELL.search(text):
                into.unread["rows of a table without its step"] += 1
            return 0
        if (found := _STATS.search(text)) is not None:
            self._announced = int(found[2])
        elif ("│" in text or "|" in text) and _ROW.match(text):
            self._read_cells(text, into)
            return WANTED
        elif self._values and "╘" in text:
            self._tables.append(self._values)
            self._values = {}
            if len(self._tables) >= self._announced:
                self.close(into)
                return 0
        return 20

    def _read_cells(self, text: str, into: Rows) -> None:
        end = 0
        for found in _CELL.finditer(text):
            self._values.setdefault(_name(found["key"]), found["value"])
            end = found.end()
        if re.search(r"[\w/]{3}", text[end:]):
            into.unread["values that are cut or unreadable"] += 1

    def close(self, into: Rows) -> None:
        """See `scan.Extractor`."""
        line, step, rest, tables = self._line, self._step, self._values, self._tables
        self._line, self._step, self._values, self._tables = None, None, {}, []
        if line is None:
            return
        if not rest and not tables:
            into.unread["steps without their table"] += 1
            return
        cut = bool(rest) or len(tables) < self._announced
        into.unread["steps whose tables are cut"] += cut
        values = _joined([*tables, rest], whole=not cut)
        row = Row(kind="console", step=step, values=values, cut=cut)
        row.process, row.pid, row.time_s = line.process, line.pid, line.time_s
        row.line = line.number
        into.add(row)


def _joined(tables: Sequence[Mapping[str, str]], *, whole: bool) -> dict[str, Any]:
    """Values of the tables of a step; those of several updates as their mean."""
    values: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in tables for key in one):
        told = [one[key] for one in tables if key in one]
        amounts = [known(one) for one in told]
        if len(told) == 1 and (whole or "update/" not in key or len(tables) < 3):
            values[key] = told[0]
        elif whole and None not in amounts:
            values[key] = sum(one for one in amounts if one is not None) / len(amounts)
        else:
            values[key] = None
    return values


def _name(key: str) -> str:
    """Key without what comes before `actor/` and `version_stats/`."""
    name = _ACTOR.sub("actor/", key.strip()).replace("time_perf/", "timeperf/")
    return re.sub(r"^.*(?=version_stats/)", "", name)


def bare(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys without the trainer's name before `actor/`."""
    return {_name(key): value for key, value in values.items()}


def keyed(values: Mapping[str, Any]) -> int:
    """See `readers.Reader`."""
    return sum(
        key.startswith(("timeperf/", "version_stats/", "ppo_actor/", "grpo_actor/"))
        for key in values
    )


def assemble(found: Rows) -> ImportedRun:
    """See `readers.Reader`."""
    run = ImportedRun(framework="areal", step_base=1, unread=found.unread)
    rows = [row for row in found.rows if row.step is not None]
    if not rows:
        run.refused = "The log has no training step with its table."
        return run
    for row in rows:
        row.values = bare(row.values)
        run.step_base = 1 if row.kind == "console" else 0
    if not any(key.startswith("actor/") for row in rows for key in row.values):
        run.refused = "The steps have no rewards and no rollouts: supervised fine-tuning."
        return run
    if run.step_base == 0:
        run.notes.append(
            "The trackers' axis counts from 0 and runs ahead of the training step while "
            "a step commits several entries."
        )
    run.mode = None
    run.attempts = attempts(rows, KEYS, run, lambda row, step: _finish(row, step, run))
    run.notes.append("timeperf/rollout is the trainer's wait for a batch.")
    return finish_run(run)


def _finish(row: Row, step: Step, run: ImportedRun) -> None:
    own, values = row.values, step.values
    for name in ("samples_per_step", "lag_max"):
        value = values.get(name)
        if isinstance(value, float):
            values[name] = tidy(value)
    if row.cut:
        return  # what is computed needs all rows
    names = [f"timeperf/{one}" for one in _PARTS]
    parts = {key: known(own[key]) for key in names if key in own}
    amounts = list(parts.values())
    if {"timeperf/rollout", "timeperf/train_step"} <= parts.keys() and None not in amounts:
        derive(
            step,
            run,
            "step_time_s",
            sum(amounts),  # type: ignore[arg-type]  # no None
            "sum of timeperf/*",
        )
    whole_length, prompt = values.get("sequence_length_mean"), values.get("prompt_length_mean")
    tokens, samples = known(own.get("actor/n_valid_tokens")), values.get("samples_per_step")
    if isinstance(whole_length, float) and isinstance(prompt, float):
        derive(
            step, run, "response_length_mean", whole_length - prompt, "seq_len/avg - prompt_len/avg"
        )
    elif tokens is not None and isinstance(samples, int | float) and samples > 0:
        derive(step, run, "response_length_mean", tokens / samples, "n_valid_tokens / n_seqs")
